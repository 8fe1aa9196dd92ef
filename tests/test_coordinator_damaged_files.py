"""Files of a run that were changed after they were written: a run that is resumed refuses them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from coordinator import checkpoints
from coordinator.checkpoints import Checkpoint, CheckpointRecord
from coordinator.counters import Counters
from coordinator.round_events import RoundsRecord
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.federation.protocol import State
from fedmq.runs.results import read_metrics
from fedmq.storage.run_folder import RunFolder, write_tensors
from fedmq.wire.message_log import MessageLog
from silos.personal_state import StateStore

MERGE = {"kind": "merge", "version": 1, "now": 1.0, "replies": [], "staleness": []}


def saved(folder: Path) -> Path:
    rounds = RoundsRecord(
        version=2, last=False, gone=[], pending={"a": [5, 2, 2]}, sequences={"a": 5}, losses={"a": 1.5}
    )
    state = State(torch.zeros(3), {}, {})
    counters = Counters(sent=4).copied()
    made = checkpoints.save(folder, Checkpoint(rounds, {2: state}, 1.5, {"a": 2.5}, counters, {"a": (5, 1.5)}))
    return made / "checkpoint.json"


def forged(record: dict[str, object], _change: object) -> None:
    """Give a changed record the digest of its content."""
    record["digest"] = CheckpointRecord.model_validate(record).own_digest


#: What is changed in a checkpoint, and the key that is refused; none if another digest than that of the content is.
CHANGES = (
    (lambda record: record["counters"].update(sent=5), ""),
    (lambda record: record["counters"].update(sent=-1), "counters.sent"),
    (lambda record: record.update(now=float("nan")), "now"),
    (lambda record: record.update(now=-1.0), "now"),
    (lambda record: record["rounds"]["pending"].update(a=[5, -2, 2]), "rounds.pending.a.1"),
    (lambda record: forged(record, record["rounds"]["pending"].update(a=[5, 1, 2])), ""),
    (lambda record: forged(record, record["rounds"].update(version=3)), ""),
)


def test_a_changed_checkpoint_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert checkpoints.load(tmp_path) is not None
    written = path.read_text()
    for number, (change, key) in enumerate(CHANGES):
        record = json.loads(written)
        change(record)  # type: ignore[no-untyped-call]
        path.write_text(json.dumps(record))
        with pytest.raises(InputError) as refused:
            checkpoints.load(tmp_path)
        assert refused.value.place == f"{path}: {key}".removesuffix(": "), number


def test_a_fifo_in_place_of_a_state_is_refused(tmp_path: Path) -> None:
    state = saved(tmp_path).with_name("state-000002.safetensors")
    state.unlink()
    os.mkfifo(state)
    with pytest.raises(InputError, match="a FIFO"):
        checkpoints.load(tmp_path)


def test_a_checkpoint_of_more_rounds_or_other_silos_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    checkpoints.check_fits(tmp_path, loaded, 2, ["a", "b"])
    with pytest.raises(InputError, match="the run has 1 rounds"):
        checkpoints.check_fits(tmp_path, loaded, 1, ["a", "b"])
    with pytest.raises(InputError, match="the run has no such silo"):
        checkpoints.check_fits(tmp_path, loaded, 2, ["b"])


def test_a_changed_value_of_a_personal_state_is_refused(tmp_path: Path) -> None:
    StateStore(tmp_path).keep(1, {"w": torch.arange(4.0), "n": torch.tensor(3)}, 0)
    assert torch.equal(StateStore(tmp_path).before(2)["w"], torch.arange(4.0))
    (path,) = tmp_path.glob("task-*")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="other content than was written"):
        StateStore(tmp_path).before(2)


def test_a_personal_state_of_another_silo_or_task_is_refused(tmp_path: Path) -> None:
    for silo in ("silo-00", "silo-01"):
        for task in (1, 2):
            StateStore(tmp_path / silo).keep(task, {"w": torch.full((2,), 1.0 + task)}, 0)
    assert StateStore(tmp_path / "silo-00").before(3)["w"].tolist() == [3.0, 3.0]
    path = tmp_path / "silo-00" / "task-000000002.safetensors"
    for other in ("silo-00/task-000000001", "silo-01/task-000000002"):
        path.write_bytes((tmp_path / f"{other}.safetensors").read_bytes())
        with pytest.raises(InputError, match=f"it is {other}"):
            StateStore(tmp_path / "silo-00").before(3)


def test_a_personal_state_without_its_owner_or_digest_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "silo-00" / "task-000000001.safetensors"
    path.parent.mkdir()
    for metadata in ({}, {"owner": "silo-00/task-000000001"}, {"digest": "0" * 64}):
        write_tensors(path, {"w": torch.ones(2)}, metadata)
        with pytest.raises(InputError) as refused:
            StateStore(tmp_path / "silo-00").before(2)
        assert refused.value.place == str(path)


def test_a_log_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    device, pipe, folder = (tmp_path / f"{name}.jsonl" for name in ("device", "pipe", "folder"))
    device.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (device, pipe, folder):
        with pytest.raises(InputError) as refused:
            MessageLog(path, "silo-00", WallClock())
        assert refused.value.place == str(path)


#: A line of metrics.jsonl, and its key that is refused.
IMPOSSIBLE_LINES = (
    (MERGE | {"version": -1}, "version"),
    (MERGE | {"now": -1.0}, "now"),
    (MERGE | {"loss": float("inf")}, "loss"),
    (MERGE | {"wall": "2026-02-31T00:00:00+00:00"}, "wall"),
    ({"kind": "evaluation", "version": 1, "metrics": {"mean_r10": -1.0}, "per_silo": {}}, "metrics"),
    ({"kind": "evaluation", "version": 1, "metrics": {}, "per_silo": {"a": {"map": 2.0}}}, "per_silo.a"),
    ({"kind": "own_heldout", "version": 1, "per_silo": {"a": {"items": 2, "mean_r1": 3.0}}}, "per_silo.a"),
)


def test_a_line_of_metrics_with_impossible_values_is_refused(tmp_path: Path) -> None:
    folder, more = RunFolder(tmp_path), {"items": 2, "metrics": {}, "per_silo_mean": {}, "fairness": {}}
    for line, key in IMPOSSIBLE_LINES:
        folder.metrics.write_text(json.dumps((more if line["kind"] == "own_heldout" else {}) | line) + "\n")
        with pytest.raises(InputError) as refused:
            read_metrics(folder)
        assert refused.value.place.partition(": line 1: ")[2].partition(".")[2].startswith(key), line
