"""A silo notes whether its folder has its personal state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from silos.personal_state import StateNotes, StateStore


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
