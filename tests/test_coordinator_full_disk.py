"""Full disks: checkpoints are retried and the run can be resumed; the task of a silo does not fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from coordinator.rounds import Phase
from fedmq.errors import DiskError, RunError
from fedmq.storage import run_folder
from fedmq.wire.log_events import LogEvent
from silos.personal_state import StateStore
from tests import in_process_run, threaded_run
from tests.in_process_run import notes
from tests.threaded_run import resolved

#: A file size limit simulates a full disk, which would need root privileges: the system refuses the write.
FULL = """
import resource, sys
from pathlib import Path
import torch
from coordinator import checkpoints
from fedmq.errors import DiskError, RunError
from fedmq.federation.protocol import State
from fedmq.storage.run_folder import write_tensors, write_atomically
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
def test_a_full_disk_reported_by_safetensors_is_a_disk_error_and_leaves_no_file(tmp_path: Path) -> None:
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
    def failing(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: failed to write whole buffer")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="failed to write whole buffer"):
        run_folder.write_tensors(tmp_path / "x", {"x": torch.zeros(1)})


def fail_writes(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """Make the first ``times`` writes to paths that contain ``name`` fail as on a full disk; returns those paths."""
    from safetensors import torch as safetensors

    write, refused, lock = safetensors.save_file, list[str](), threading.Lock()

    def save(tensors: Any, path: Any, metadata: dict[str, str] | None = None) -> None:
        with lock:
            full = name in str(path) and len(refused) < times
            if full:
                refused.append(str(path))
        if full:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(tensors, path, metadata)

    monkeypatch.setattr(safetensors, "save_file", save)
    return refused


@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk_is_tried_three_times_and_the_run_can_be_resumed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = in_process_run.run(resolved(tiny), tmp_path / "whole").summary.model_digest
    out = tmp_path / "full"
    fail_writes(monkeypatch, "version-000002", 4)
    with pytest.raises(RunError, match=r"checkpoint could not be written: .*No space left"):
        in_process_run.run(resolved(tiny), out)
    assert len(notes(out, LogEvent.CHECKPOINT_REFUSED)) == 3
    assert not list((out / "checkpoints").glob(".version-*"))
    assert in_process_run.run(resolved(tiny), out, resume=True).summary.model_digest == uninterrupted
    assert len(notes(out, LogEvent.CHECKPOINT_REFUSED)) == 4


@pytest.mark.slow
def test_a_full_disk_of_a_silo_ends_its_process_but_does_not_fail_its_task(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = resolved(tiny, "protocol={name: fedper}", "rounds=2", "participation=1")
    uninterrupted = in_process_run.run(scenario, tmp_path / "whole").summary.plain()
    refused = fail_writes(monkeypatch, f"{os.sep}silo-01{os.sep}", 1)
    outcome = threaded_run.run(scenario, tmp_path / "full")
    assert len(refused) == 1
    assert outcome.phase is Phase.DONE
    assert outcome.summary.tasks.failed == 0
    assert outcome.summary.model_digest == uninterrupted["model_digest"]
    assert outcome.summary.personal == uninterrupted["personal"]


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


def test_a_path_where_no_state_can_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "silo").write_text("somebody's own")
    with pytest.raises(DiskError, match="a folder that can be written"):
        StateStore(tmp_path / "silo").keep(1, {"x": torch.zeros(1)}, committed=0)
