"""Ctrl-C during a step that keeps what it has done: the command says how it continues, and no traceback is printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedmq.cli.main import app
from tests.waiting import PATIENCE


def test_an_interrupted_extraction_says_that_the_same_command_continues(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmq.data.prepare.prepare", interrupted)
    done = CliRunner().invoke(app, ["data", "features", str(tiny)])
    assert done.exit_code == 1
    assert capfd.readouterr().err.endswith("fedmq: interrupted; repeat the command to continue\n")


@pytest.mark.parametrize("begun", [False, True])
def test_a_stopped_coordinator_names_the_run_folder_only_if_it_exists(
    begun: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def stopped(*_: object, **__: object) -> SimpleNamespace:
        if begun:
            run.mkdir()
            (run / "scenario.yaml").touch()
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(summary=None)

    monkeypatch.setattr("coordinator.program.run_coordinator", stopped)
    monkeypatch.setattr("fedmq.launch.preparation.population_here", lambda *_: tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        done = CliRunner().invoke(app, ["coordinator", str(tiny), "--keys", str(tmp_path / "keys"), "--out", str(run)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    printed = capfd.readouterr().err + done.output
    command = f"fedmq coordinator --resume {run}"
    assert printed.count(f"continue with {command if begun else 'the same command'}") == 2
    assert begun == (str(run) in printed)
    assert done.exit_code == 1


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_stopped_silo_says_that_the_same_command_continues(number: int, how: str) -> None:
    program = (
        "import os, signal\n"
        "from fedmq.cli.console import continued_by_the_same_command\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"with continued_by_the_same_command(): os.kill(os.getpid(), {int(number)}); signal.pause()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stderr == f"fedmq: {how}; start it again with the same command, and it continues\n"
    # A service manager sees that SIGTERM ended it.
    assert done.returncode == (1 if number == signal.SIGINT else -signal.SIGTERM)
