"""Failed tasks: one line on the terminal, the traceback in a file, the memory free for the next silo."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedmq.errors import DiskError, RunError
from fedmq.storage import logs as error_files
from fedmq.storage.logs import QUIET, ErrorFile
from fedmq.wire.messages import Kind
from silos import program
from tests.command_line import completed

METHOD = """
from dataclasses import dataclass

from protocols.parts.variant import variant
from protocols.fedavg import AnchoredOptions


@dataclass(frozen=True)
class Options(AnchoredOptions):
    pass


def extra_loss(options, context, local, task):
    if local.silo.name == "silo-01":
        raise ZeroDivisionError("no items\\x1b[31m")
    return lambda step, image, text: None


PROTOCOL = variant(Options, extra_loss=extra_loss)
"""


def failed(error: str, out: Path) -> None:
    """The terminal shows the error once, and the file of the silo each traceback."""
    assert "Traceback" not in error
    place = out / "errors" / "silo-01.log"
    (line,) = [line for line in error.splitlines() if "failed: ZeroDivisionError" in line]
    assert line == f"silo-01: task 1 failed: ZeroDivisionError: no items\\x1b[31m; traceback in {place}"
    text = place.read_text()
    assert text.count("Traceback (most recent call last)") == text.count(" silo-01: task ") > 1
    assert 'raise ZeroDivisionError("no items' in text
    assert [each.name for each in place.parent.iterdir()] == ["silo-01.log"]


def words(tiny: Path, folder: Path, *more: str) -> list[str]:
    (folder / "mine.py").write_text(METHOD)
    settings = (f"protocol={folder}/mine.py", "missing_modality.silos={}", "participation=1.0", "rounds=2", *more)
    return ["scenario", str(tiny), "--out", str(folder / "run"), "--json", *(f"--set={each}" for each in settings)]


@pytest.mark.slow
def test_a_task_that_fails_unexpectedly_is_one_line_on_the_terminal(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedmq", *words(tiny, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    failed(done.stderr, tmp_path / "run")
    assert json.loads(done.stdout)["per_silo"]["silo-01"]["participations"] == 0


@pytest.mark.slow
def test_a_task_that_fails_unexpectedly_inside_the_coordinator_is_one_line_on_the_terminal(
    tiny: Path, tmp_path: Path
) -> None:
    done = completed(*words(tiny, tmp_path, "launcher=inline"), "--quiet")
    assert done.returncode == 0, done.stderr
    failed(done.stderr, tmp_path / "run")


def test_tracebacks_are_printed_on_request_or_if_the_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        raise ZeroDivisionError("no items")
    except ZeroDivisionError as caught:
        error = caught
    shown = ErrorFile(tmp_path / "shown.log", line=False, shown=True)
    assert shown.add(error, "silo-01", "task 1") == str(tmp_path / "shown.log")
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "failed" not in printed
    (tmp_path / "file").write_text("")
    assert not ErrorFile(tmp_path / "file" / "silo-01.log").add(error, "silo-01", "task 1")
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and printed.endswith("task 1 failed: ZeroDivisionError: no items\n")
    monkeypatch.setattr(error_files, "_MOST_BYTES", 400)
    full = ErrorFile(tmp_path / "full.log")
    for task in range(50):
        assert full.add(error, "silo-01", f"task {task}")
    assert (tmp_path / "full.log").stat().st_size < 1000
    assert capsys.readouterr().err.count("\n") == 1


# -------------------------------------------------------------------------------------------- memory and failed tasks
class Slots:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        yield
        self.told.append("slot free")


def replied(monkeypatch: pytest.MonkeyPatch, error: Exception | None, *fatal: type[Exception]) -> list[str]:
    told: list[str] = []

    def respond(_message: Any) -> tuple[()]:
        if error is not None:
            raise error
        return ()

    monkeypatch.setattr(program, "release_unused_gpu_memory", lambda: told.append("given back"))
    facts, epochs = SimpleNamespace(name="silo-00"), SimpleNamespace(epochs_before=0)
    silo: Any = SimpleNamespace(respond=respond, simulated=True, facts=facts, epochs=epochs, errors=None)
    link: Any = SimpleNamespace(send=lambda kind, *_, **__: told.append(str(kind)))
    header = SimpleNamespace(sequence=1, base_version=0, kind=Kind.TASK)
    message: Any = SimpleNamespace(header=header, task=None)
    slots: Any = Slots(told)
    ready: Any = SimpleNamespace(silo=silo, agreed=SimpleNamespace(check=lambda _: None))
    program.reply_to(link, ready, slots, message, QUIET, (*program.FATAL_ERRORS, *fatal))
    return told


def test_a_silo_frees_its_gpu_memory_before_the_next_one_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replied(monkeypatch, None)[:2] == ["given back", "slot free"]


def test_a_failed_task_is_reported_and_the_silo_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replied(monkeypatch, RunError("training diverged")) == ["error"]


class Spoiled(RuntimeError):
    """Like torch's error after which the GPU is unusable until the process ends."""


@pytest.mark.parametrize("error", [DiskError("full"), Spoiled("CUDA error: an illegal memory access")])
def test_an_unrecoverable_error_ends_the_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        replied(monkeypatch, error, Spoiled)
