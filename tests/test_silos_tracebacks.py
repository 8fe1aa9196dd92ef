"""Failed tasks: one line on the terminal, the traceback in a file; and what a silo notes of its personal state."""

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
import torch

from fedmq.clock import WallClock
from fedmq.errors import DiskError, InputError, RunError
from fedmq.storage import logs as error_files
from fedmq.storage.logs import QUIET, ErrorFile
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Kind
from silos import program
from silos.personal_state import StateNotes, StateStore
from tests.command_line import completed

METHOD = """
from protocols.fedavg import AnchoredFedAvg


class PROTOCOL(AnchoredFedAvg):
    def extra_loss(self, local, task):
        if local.silo.name == "silo-01":
            raise ZeroDivisionError("no items\\x1b[31m")
        return lambda step, image, text: None
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
    queue = SimpleNamespace(settle=lambda: told.append("state on disk"))
    silo: Any = SimpleNamespace(
        respond=respond, simulated=True, facts=facts, epochs=epochs, errors=None, disk_queue=queue
    )
    link: Any = SimpleNamespace(send=lambda kind, *_, **__: told.append(str(kind)))
    header = SimpleNamespace(sequence=1, base_version=0, kind=Kind.TASK)
    message: Any = SimpleNamespace(header=header, task=None)
    slots: Any = Slots(told)
    ready: Any = SimpleNamespace(silo=silo, agreed=SimpleNamespace(check=lambda _: None), respond=silo.respond)
    program.reply_to(link, ready, slots, message, QUIET, (*program.FATAL_ERRORS, *fatal))
    return told


def test_a_silo_frees_its_gpu_memory_before_the_next_one_may_train_and_replies_once_its_state_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert replied(monkeypatch, None) == ["given back", "slot free", "state on disk", "reply"]


def test_a_failed_task_is_reported_and_the_silo_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replied(monkeypatch, RunError("training diverged")) == ["error"]


class Spoiled(RuntimeError):
    """Like torch's error after which the GPU is unusable until the process ends."""


@pytest.mark.parametrize("error", [DiskError("full"), Spoiled("CUDA error: an illegal memory access")])
def test_an_unrecoverable_error_ends_the_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        replied(monkeypatch, error, Spoiled)


# ---------------------------------------------------------------------------------------- notes of the personal state
def noted(folder: Path, *tasks: tuple[int, int, bool]) -> list[LogEvent]:
    """Notes of a silo in a new folder, given its tasks: number, last merged task, whether a state is stored."""
    with MessageLog(folder / "silo-00.jsonl", "silo-00", WallClock()) as log:
        store = StateStore(folder / "silo-00")
        notes = StateNotes(store, log)
        for number, settled, stored in tasks:
            store.keep(number, {"w": torch.ones(2)} if stored else {}, settled)
            notes.after_task(number, settled)
    return [record.event for _, record in read_log(folder / "silo-00.jsonl") if isinstance(record, NoteRecord)]


def test_a_silo_in_a_new_folder_says_that_its_state_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, gone = LogEvent.STATE_KEPT, LogEvent.STATE_MISSING
    assert noted(tmp_path / "first", (1, 0, True), (4, 1, True)) == [kept]
    assert not capfd.readouterr().err
    assert noted(tmp_path / "second", (7, 4, True), (9, 7, True)) == [gone, kept]
    assert "it sent an earlier reply from another folder than this --out" in capfd.readouterr().err
    assert noted(tmp_path / "begins later", (7, 4, False), (9, 7, True)) == [kept], "the method had no state before"


def test_a_state_deleted_while_its_silo_runs_is_missed_and_no_older_one_is_used(tmp_path: Path) -> None:
    store, states = StateStore(tmp_path), {number: {"w": torch.full((2,), float(number))} for number in (1, 4, 7)}
    for number, state in states.items():
        store.keep(number, state, committed=0)
    for number in (4, 7):
        (tmp_path / f"task-{number:09d}.safetensors").unlink()
    assert torch.equal(store.before(8)["w"], states[7]["w"]), "still in memory"
    assert torch.equal(store.before(2)["w"], states[1]["w"])
    with pytest.raises(InputError, match=r"task-000000004.*deleted while the silo was running"):
        store.before(5)
    assert torch.equal(StateStore(tmp_path).before(8)["w"], states[1]["w"]), "a new process notes that it is older"
