"""Full disks: checkpoints are retried, a run can be resumed, no task fails, and a missing signed end is reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import fedmq.wire.message_log
from coordinator import checkpoints
from fedmq.audit.log_checks import audit_run
from fedmq.cli.run import _on_full_disk
from fedmq.clock import WallClock
from fedmq.errors import DiskError, InputError
from fedmq.storage import run_folder
from fedmq.storage.run_folder import RunFolder, write_whole
from fedmq.wire.message_log import MessageLog
from silos import personal_state
from silos.personal_state import StateStore
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests import in_process_run, threaded_run
from tests.threaded_run import resolved, run_of

#: A file size limit simulates a full disk, which would need root privileges: the system refuses the write.
FULL = """
import resource, sys
from pathlib import Path
import torch
from coordinator import checkpoints
from fedmq.errors import DiskError, RunError
from fedmq.federation.protocol import State
from fedmq.storage.run_folder import write_tensors, write_atomically
from silos import personal_state
from silos.personal_state import StateStore
from tests.test_storage_crashes import made

root, size = Path(sys.argv[1]), 1 << 16
checkpoints.save(root / "run", made(1))
large = torch.zeros(size)
record = made(2)
record.states[2] = State(large)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
for write in (
    lambda: checkpoints.save(root / "run", record),
    lambda: StateStore(root / "silo").keep(1, {"x": large}, committed=0),
    lambda: write_atomically(root / "model.safetensors", lambda path: write_tensors(path, {"x": large})),
):
    try:
        write()
    except RunError as error:
        print(type(error).__name__, error)
print(checkpoints.load(root / "run").rounds.version)
"""


@pytest.mark.slow
def test_a_full_disk_is_a_disk_error_of_every_file_of_tensors_and_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checkpointed, kept, released, version = done.stdout.splitlines()
    assert checkpointed.startswith(f"RunError {tmp_path}/run/version-000002: the checkpoint could not be written")
    assert kept == f"DiskError {tmp_path}/silo/task-000000001.safetensors: could not be written: File too large"
    assert released == f"DiskError {tmp_path}/model.safetensors: could not be written: File too large"
    assert version == "1"
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["run/version-000001/checkpoint.json", "run/version-000001/state-000001.safetensors"]


def test_a_safetensors_write_error_without_an_error_number_is_an_os_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: failed to write whole buffer")

    monkeypatch.setattr("safetensors.torch.serialize_file", failing)
    with pytest.raises(OSError, match="failed to write whole buffer"):
        run_folder.write_tensors(tmp_path / "x", {"x": torch.zeros(1)})


def fail_writes(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Make the first ``times`` writes of states fail as on a full disk, if in a path with ``name``; returns them."""
    write, refused, lock = personal_state.write_tensors, list[str](), threading.Lock()

    def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        with lock:
            full = name in str(path) and len(refused) < times
            if full:
                refused.append(str(path))
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, tensors, metadata)

    monkeypatch.setattr(personal_state, "write_tensors", save)
    return refused


def test_a_full_disk_of_a_silo_ends_a_run_in_one_process_which_can_be_resumed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = resolved(tiny, "protocol={name: fedper}", "rounds=2", "participation=1")
    uninterrupted = in_process_run.run(scenario, tmp_path / "whole").summary.plain()
    fail_writes(monkeypatch, f"{os.sep}silo-01{os.sep}", 1)
    with pytest.raises(DiskError, match="No space left"):
        in_process_run.run(scenario, tmp_path / "full")
    again = in_process_run.run(scenario, tmp_path / "full", resume=True).summary.plain()
    assert again["model_digest"] == uninterrupted["model_digest"]


def test_a_run_in_one_process_has_all_states_on_disk_before_a_checkpoint_refers_to_them(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def flush(path: Path, *, cached: bool) -> None:
        flushed.append(path.parent.name)
        if len(flushed) == 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run_folder, "to_disk", flush)
    scenario = resolved(tiny, "protocol={name: fedper}", "rounds=3", "participation=1")
    with pytest.raises(DiskError, match="silo-0"):
        in_process_run.run(scenario, tmp_path)
    saved = checkpoints.load(RunFolder(tmp_path).checkpoints)
    replies = sum(1 for task in (saved.rounds.committed if saved else {}).values() if task)
    assert replies <= 3 < len(flushed)


def test_a_path_where_no_state_can_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "silo").write_text("somebody's own")
    with pytest.raises(DiskError, match="a folder that can be written"):
        StateStore(tmp_path / "silo").keep(1, {"x": torch.zeros(1)}, committed=0)


def full_at_the_end(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The disk is full when the logs of these names are signed at their end."""

    def full(file: Any, line: bytes) -> None:
        if Path(file.name).stem in names and b'"at":"end"' in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(file, line)

    monkeypatch.setattr(fedmq.wire.message_log, "write_whole", full)


def test_a_log_whose_end_cannot_be_signed_says_so_unless_another_error_ends_its_process(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, out, told = resolved(tiny, "rounds=1"), tmp_path / "run", list[str]()
    full_at_the_end(monkeypatch, "coordinator", "silo-00")

    def telling(uri: str, keys: Path) -> None:
        try:
            run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, out))
        except DiskError as error:
            told.append(str(error))

    with pytest.raises(DiskError) as caught, _on_full_disk(RunFolder(out), "fedmq coordinator --resume"):
        threaded_run.run(scenario, out, silos=scenario.silo_names[1:], others=[telling])
    what = "could not be written: No space left on device; the log lacks its signed end, which an audit reports"
    assert str(caught.value) == f"{out}/messages/coordinator.jsonl: {what}"  # a finished run cannot be resumed
    assert told == [f"{out}/messages/silo-00.jsonl: {what}"]
    assert {finding.place for finding in audit_run(out).findings} == {"coordinator.jsonl", "silo-00.jsonl"}

    with pytest.raises(InputError, match="the cause"), MessageLog(tmp_path / "silo-00.jsonl", "silo-00", WallClock()):
        raise InputError("the cause", "x", "y")


def test_an_unfinished_run_that_a_full_disk_ends_says_how_to_continue_it(tmp_path: Path) -> None:
    resume, folder = "fedmq coordinator --resume RUN", RunFolder(tmp_path)
    said = pytest.raises(DiskError, match=f"No space left on device; free space, then: {resume}$")
    with said, _on_full_disk(folder, resume), run_folder.writing(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
