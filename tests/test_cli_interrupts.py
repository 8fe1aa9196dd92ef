"""Ctrl-C during a step that keeps what it has done: the command says how it continues, and no traceback is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmq.cli.main import app


def test_an_interrupted_extraction_says_that_the_same_command_continues(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedmq.data.prepare.prepare", interrupted)
    done = CliRunner().invoke(app, ["data", "features", str(tiny)])
    assert done.exit_code == 1
    assert capfd.readouterr().err.endswith("fedmq: interrupted; repeat the command to continue\n")
