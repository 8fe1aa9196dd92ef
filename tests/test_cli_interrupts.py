"""Stopped commands say how they continue; runs continue from their folder, also with more rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedmq.audit.log_checks import audit_run
from fedmq.audit.report import outcome
from fedmq.cli.main import app
from fedmq.config.yaml_files import read_yaml
from fedmq.runs.resume import begin_extension, extended
from fedmq.storage.run_folder import RunFolder
from tests import threaded_run
from tests.command_line import printed, refused
from tests.in_process_run import run
from tests.threaded_run import resolved
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


# ------------------------------------------------------------------------------------------------------- stopped runs
INLINE = ("--set", "launcher=inline")


def digest(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["model_digest"])


@pytest.mark.slow
def test_a_run_is_resumed_from_its_folder_alone(tiny: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    printed("scenario", tiny, *INLINE, "--out", whole, "--quiet")
    scenario = resolved(tiny, "launcher=inline")
    merged = iter(range(1000))
    stopped = run(scenario, out, stop_wanted=lambda: next(merged) > 12)
    assert stopped.summary is None
    printed("scenario", "--resume", out, "--quiet")
    assert digest(out) == digest(whole)


@pytest.mark.slow
def test_an_extended_run_gives_the_model_of_a_run_with_all_rounds(tiny: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    schedule = ("--set", "rounds=6", "--set", "training.schedule_rounds=4")
    printed("scenario", tiny, *INLINE, *schedule, "--out", whole, "--quiet")
    printed("scenario", tiny, *INLINE, "--out", out, "--quiet")
    first = digest(out)
    printed("scenario", "--resume", out, "--extend", 2, "--quiet")
    assert digest(out) == digest(whole) != first
    assert json.loads((out / "summary-4.json").read_text())["model_digest"] == first
    written = read_yaml(out / "scenario.yaml")
    assert (written["rounds"], written["training"]["schedule_rounds"]) == (6, 4)
    assert not audit_run(out).findings
    # The evaluation at the former end is not a difference.
    printed("replay", out, "--quiet")
    # A second extension keeps the first schedule.
    printed("scenario", "--resume", out, "--extend", 1, "--quiet")
    assert read_yaml(out / "scenario.yaml")["training"]["schedule_rounds"] == 4


@pytest.mark.slow
def test_a_run_whose_last_records_are_torn_is_extended_and_audits_clean(tiny: Path, tmp_path: Path) -> None:
    """In threads, where each process has its own log: the last records of the coordinator and of a silo are torn."""
    folder, scenario = RunFolder(tmp_path / "run"), resolved(tiny, "rounds=2", "participation=1.0")
    folder.root.mkdir()
    folder.scenario.write_text(scenario.dump())
    threaded_run.run(scenario, folder.root)
    torn = ("coordinator", "silo-00")
    for process in torn:
        log = folder.messages(process)
        os.truncate(log, log.stat().st_size - 40)
    found = [finding.place for finding in audit_run(folder.root).findings if "no complete record" in finding.what]
    assert {place.partition(".jsonl")[0] for place in found} == set(torn)
    longer = extended(scenario, 3, folder.scenario)
    begin_extension(folder, longer)
    threaded_run.run(longer, folder.root, resume=True)
    assert outcome(audit_run(folder.root)) == "the logs are consistent"


def test_rounds_with_a_learning_rate_of_zero_are_refused(tiny: Path, tmp_path: Path) -> None:
    out, to_zero = tmp_path / "run", ("--set", "training.decay_to=0")
    beyond = ("--set", "rounds=6", "--set", "training.schedule_rounds=4")
    assert "training.decay_to" in refused("scenario", tiny, *INLINE, *to_zero, *beyond, "--out", out, "--quiet")
    printed("scenario", tiny, *INLINE, *to_zero, "--out", out, "--quiet")
    before = (out / "scenario.yaml").read_bytes()
    assert "training.decay_to" in refused("scenario", "--resume", out, "--extend", 1, "--quiet")
    assert (out / "scenario.yaml").read_bytes() == before


@pytest.mark.slow
def test_a_finished_run_is_extended_only_if_it_has_its_checkpoints(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed("scenario", tiny, *INLINE, "--out", out, "--quiet")
    assert "a finished run" in refused("scenario", "--resume", out, "--quiet")
    for path in sorted((out / "checkpoints").glob("version-*")):
        path.rename(tmp_path / path.name)
    assert "a run without a checkpoint" in refused("scenario", "--resume", out, "--extend", 2, "--quiet")
    assert (out / "summary.json").exists()
