"""Checkpoints, personal state, slots, locks: what survives a crash and what a crash frees."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from coordinator import checkpoints
from coordinator.checkpoints import Checkpoint
from coordinator.counters import Counters
from coordinator.faults import FaultInjector
from coordinator.round_events import RoundsRecord
from fedmq.clock import VirtualClock, WallClock
from fedmq.errors import DiskError, InputError, RunError
from fedmq.federation.faults import FaultSchedule
from fedmq.federation.protocol import State
from fedmq.storage import run_folder
from fedmq.storage.locks import is_locked, lock, locked, try_lock, unlock
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from silos.personal_state import DiskQueue, StateStore
from silos.tasks import Slots, slots_folder
from tests.waiting import PATIENCE


def made(version: int, *older: int) -> Checkpoint:
    states = {
        number: State(
            torch.full((3,), float(number)), {"x": torch.tensor([number], dtype=torch.float64)}, {"merges": number}
        )
        for number in (version, *older)
    }
    rounds = RoundsRecord(version=version, last=False, gone=[], pending={}, sequences={}, losses={})
    return Checkpoint(rounds, states, 0.1 + version, {"silo-00": 1 / 3}, Counters(up=Counter(delta=5)).copied())


def _log(folder: Path) -> None:
    MessageLog(folder / "messages" / "silo-00.jsonl", "silo-00", WallClock()).close()


@pytest.mark.parametrize(
    "write",
    [
        run_folder.make_folder,
        lambda folder: run_folder.write_json(folder / "summary.json", {}),
        lambda folder: run_folder.append_line(folder / "metrics.jsonl", {}),
        _log,
    ],
    ids=["folder", "json", "line", "log"],
)
@pytest.mark.parametrize("kind", ["a file", "proc"])
def test_an_unwritable_path_is_a_one_line_error_that_names_it(
    tmp_path: Path, write: Callable[[Path], object], kind: str
) -> None:
    file = tmp_path / "file"
    file.write_text("somebody's own")
    folder = {"a file": file, "proc": Path("/proc/x")}[kind]
    with pytest.raises(InputError, match=f"^{folder}.*allowed: a folder that can be written$") as caught:
        write(folder)
    assert "\n" not in str(caught.value)
    assert file.read_text() == "somebody's own"


def test_a_full_disk_is_not_reported_as_an_input_error(tmp_path: Path) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"x\.json: could not be written: No space left"):
        run_folder.write_atomically(tmp_path / "x.json", full)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("half", [b'{"fault": "0 sil', b""])
def test_a_line_left_unfinished_by_a_crash_is_removed_before_the_next_is_written(tmp_path: Path, half: bytes) -> None:
    folder = RunFolder(tmp_path)
    folder.faults.write_bytes(b'{"fault": "0 silo-00 1"}\n' + half)
    for again in range(2):
        with MessageLog(tmp_path / "coordinator.jsonl", "coordinator", WallClock()) as log:
            script = FaultSchedule((), 0, ())
            fault_injector = FaultInjector(script, folder, log, VirtualClock(), order=None, wired=False, issued={})
        assert not fault_injector._mark_fired("0 silo-00 1")
        assert fault_injector._mark_fired("2 silo-00 3") is not bool(again)
    whole = [line["fault"] for line in map(json.loads, folder.faults.read_text().splitlines())]
    assert whole == ["0 silo-00 1", "2 silo-00 3"]


def test_a_process_ends_when_the_log_that_it_writes_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "messages" / "silo-00.jsonl"
    with MessageLog(path, "silo-00", WallClock()) as log:
        log.note(LogEvent.STARTED)
        path.parent.rename(tmp_path / "moved")
        log.note(LogEvent.RESUMED)  # it still has a name
        (tmp_path / "moved" / path.name).unlink()
        with pytest.raises(DiskError, match=r"silo-00\.jsonl: was deleted while silo-00 was writing it"):
            log.note(LogEvent.ENDED)
        assert log.records == 2


def test_lines_are_appended_to_regular_files_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"metrics\.jsonl: found 'no regular file'"):
        run_folder.append_line(path, {"a": 1})


@pytest.mark.slow
def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_folder.append_line(path, {"a": 1})
    program = (
        "import resource, sys; from pathlib import Path; from fedmq.storage import run_folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "try: run_folder.append_line(Path(sys.argv[1]), {'b': 'x' * 100})\n"
        "except run_folder.DiskError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert "could not be written: File too large" in done.stdout
    assert path.read_text() == '{"a": 1}\n'


def test_files_that_killed_processes_left_unfinished_are_removed(tmp_path: Path) -> None:
    dead, huge = 10**9, 10**30  # no process has these numbers
    left = [f".task-000000001.safetensors.{dead}", f".summary.json.{dead}", f".report.html.{huge}"]
    others = [f".summary.json.{os.getpid()}", ".summary.json.0", ".note.txt.1", "summary.json", f"x.json.{dead}"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    (tmp_path / f".folder.json.{dead}").mkdir()
    run_folder.remove_unfinished(tmp_path, tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, f".folder.json.{dead}"])
    state = tmp_path / "silo-00" / left[0]
    state.parent.mkdir()
    state.touch()
    assert StateStore(state.parent).empty and not state.exists()


def test_a_checkpoint_reads_back_to_the_bit(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, made(7, 5))
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert (loaded.rounds.version, loaded.now, loaded.due, loaded.counters) == (
        7,
        7.1,
        {"silo-00": 1 / 3},
        made(7).counters,
    )
    assert set(loaded.states) == {7, 5}
    assert torch.equal(loaded.states[5].theta, torch.full((3,), 5.0))
    assert loaded.states[7].tensors["x"].dtype == torch.float64
    assert loaded.states[7].values == {"merges": 7}


def test_the_last_two_checkpoints_are_kept_and_older_states_are_linked_without_copying(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, made(1))
    checkpoints.save(tmp_path, made(2, 1))
    checkpoints.save(tmp_path, made(3, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-000002", "version-000003"]
    shared = [tmp_path / f"version-00000{number}" / "state-000001.safetensors" for number in (2, 3)]
    assert shared[0].stat().st_ino == shared[1].stat().st_ino
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded.states[1].theta, torch.ones(3))


@pytest.mark.parametrize("carried", [False, True])
def test_a_replaced_state_file_makes_the_checkpoint_damaged(tmp_path: Path, *, carried: bool) -> None:
    folder = checkpoints.save(tmp_path, made(1))
    other = tmp_path / "other"
    checkpoints.save(other, Checkpoint(made(1).rounds, {1: made(5).states[5]}, 1.0, {}, made(1).counters))
    # Replaced in place under a killed run: a valid file that the next checkpoint links to.
    changed = folder / "state-000001.safetensors"
    changed.write_bytes((other / "version-000001" / changed.name).read_bytes())
    if carried:
        folder = checkpoints.save(tmp_path, made(2, 1))
    with pytest.raises(InputError, match=rf"{folder.name}: found 'a damaged state .*{changed.name}.*the previous one"):
        checkpoints.load(tmp_path)


def test_a_checkpoint_in_the_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, made(1)).rename(tmp_path / "version-000003")
    with pytest.raises(InputError, match=r"version-000003/checkpoint\.json: found 'version 1'"):
        checkpoints.load(tmp_path)


def test_a_state_whose_recorded_digest_is_lost_is_written_again_and_not_linked(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path, made(1))
    (folder / "checkpoint.json").write_text("{}")
    other = tmp_path / "other"
    checkpoints.save(other, Checkpoint(made(1).rounds, {1: made(5).states[5]}, 1.0, {}, made(1).counters))
    (folder / "state-000001.safetensors").write_bytes((other / "version-000001/state-000001.safetensors").read_bytes())
    checkpoints.save(tmp_path, made(2, 1))
    loaded = checkpoints.load(tmp_path)
    assert loaded is not None
    assert loaded.states[1].theta.tolist() == [1.0] * 3


def test_a_repeated_task_starts_from_the_state_before_it(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    assert store.before(1) == {}
    store.keep(1, {"a": torch.tensor([1.0])}, committed=0)
    store.keep(2, {"a": torch.tensor([2.0])}, committed=1)
    StateStore(tmp_path / "none").keep(1, {}, committed=0)
    assert not (tmp_path / "none").exists()
    for again in (store, StateStore(tmp_path)):
        assert again.before(2)["a"].item() == 1.0
        assert again.before(3)["a"].item() == 2.0
    store.keep(3, {"a": torch.tensor([3.0])}, committed=2)
    kept = ["task-000000002.safetensors", "task-000000003.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


def test_the_library_reads_tensors_of_every_type_as_written_and_only_their_owner_can(tmp_path: Path) -> None:
    flat = torch.arange(-6, 6)
    written = {str(kind): flat.to(kind) for kind in map(torch_type, TYPES)}
    written |= {"scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "turned": torch.randn(3, 5).t()}
    written |= {"view": flat[1:7].view(2, 3), "same": flat[1:7], "é\n": torch.ones(1, dtype=torch.bool)}
    written |= {"NumPy": torch.from_numpy(np.zeros(0, np.int64)), "repeated": torch.tensor(3).expand(1)}
    run_folder.write_tensors(tmp_path / "x", written, {"owner": "é"})
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"owner": "é"}
    read = run_folder.load_aligned(tmp_path / "x")
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


def torch_type(name: str) -> torch.dtype:
    kind: torch.dtype = getattr(torch, name)
    return kind


def test_a_queued_state_is_on_disk_once_its_queue_is_settled_and_the_silo_has_it_at_once(tmp_path: Path) -> None:
    queue, folder = DiskQueue(), tmp_path / "silo"
    store = StateStore(folder, queue)
    for task in range(1, 6):
        store.keep(task, {"a": torch.tensor([float(task)])}, committed=1)
        assert store.before(task + 1)["a"].item() == task
        if task == 4:
            store.drop_unwritten(committed=3)
    assert not folder.exists()
    queue.settle()
    again = StateStore(folder)
    assert [again.newest(task) for task in range(1, 6)] == [None, None, 3, 4, 5], "4 may be sent again, from 3"
    assert [again.before(task)["a"].item() for task in (4, 5, 6)] == [3, 4, 5]


def test_a_damaged_personal_state_is_named_and_other_silos_files_are_untouched(tmp_path: Path) -> None:
    StateStore(tmp_path).keep(1, {"x": torch.ones(2)}, committed=0)
    StateStore(tmp_path).keep(2, {"x": torch.ones(2)}, committed=0)
    (tmp_path / "task-2 (copy).safetensors").write_text("somebody's own")
    assert torch.equal(StateStore(tmp_path).before(3)["x"], torch.ones(2))
    newest = tmp_path / "task-000000002.safetensors"
    newest.write_bytes(newest.read_bytes()[:40])
    with pytest.raises(InputError, match=r"task-000000002\.safetensors: found 'a damaged personal state"):
        StateStore(tmp_path).before(3)
    newest.unlink()
    assert torch.equal(StateStore(tmp_path).before(3)["x"], torch.ones(2))


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """XDG_RUNTIME_DIR names the folder ``user``, which does not exist; TMPDIR the folder ``shared``, which does."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    return tmp_path


def test_slots_are_in_the_first_writable_directory(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"fedmq-slots-{os.getuid()}"
    assert slots_folder("r") == places / "shared" / own / "r"
    assert not (places / "user").exists()
    (places / "user").mkdir()
    assert slots_folder("r") == places / "user" / own / "r"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != places / "user" and access(path, mode))
    assert slots_folder("r") == places / "shared" / own / "r"


def test_slots_in_another_users_folder_are_refused_in_one_line(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = places / "shared" / f"fedmq-slots-{os.getuid()}"
    own.symlink_to(places)
    with pytest.raises(InputError, match=rf"^{own}: found 'a link or a folder of another user', allowed: .*TMPDIR"):
        slots_folder("r")
    own.unlink()
    own.mkdir(mode=0o755)
    user = os.getuid()
    own.rename(places / "shared" / f"fedmq-slots-{user + 1}")
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(InputError, match="of another user"):
        slots_folder("r")
    assert (places / "shared" / f"fedmq-slots-{user + 1}").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("blocked", ["own", "slot"])
def test_slots_that_cannot_be_created_are_a_one_line_error(places: Path, blocked: str) -> None:
    own = places / "shared" / f"fedmq-slots-{os.getuid()}"
    if blocked == "slot":
        (own / "r" / "slot-0").mkdir(parents=True)
    else:
        own.write_text("")
    with pytest.raises(InputError, match=f"^{own}.*allowed: a folder that can be written$"):
        Slots(slots_folder("r"), 1)


def test_at_most_the_given_number_of_holders_have_a_slot(tmp_path: Path) -> None:
    first, second, third = (Slots(tmp_path / "r", 2) for _ in range(3))
    with first.one(), second.one():
        import threading

        done = threading.Event()

        def wait() -> None:
            with third.one():
                done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not done.wait(0.2)
    assert done.wait(PATIENCE)
    thread.join()


def test_folders_of_slots_that_no_process_uses_are_removed(tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "user-1").touch()  # not locked any more
    first, other, second = Slots(tmp_path / "r", 1), Slots(tmp_path / "s", 1), Slots(tmp_path / "r", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "r", "s"]
    first.close()
    with second.one():
        third = Slots(tmp_path / "r", 1)
        assert not try_lock(third._files[0])  # the same slot
    other.close()
    third.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "r"]
    second.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


# -------------------------------------------------------------------------------------------------------------- locks
FORK = multiprocessing.get_context("fork")


def _hold(path: Path, there: Connection) -> None:
    with locked(path):
        there.send("held")
        time.sleep(1000)


def test_a_locked_file_is_locked_for_other_processes_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"content")
    with path.open("ab") as one, path.open("ab") as other:
        assert try_lock(one)
        assert not try_lock(other)
        assert is_locked(path)
        unlock(one)
        assert not is_locked(path)
        lock(other)
        assert not try_lock(one)
    assert not is_locked(path)
    assert path.read_bytes() == b"content"


def test_the_lock_of_a_file_in_an_unwritable_folder_can_be_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"content")
    path.chmod(0o444)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with path.open("rb") as file:
        assert not is_locked(path)
        assert try_lock(file)
        assert is_locked(path)


@pytest.mark.slow
def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    here, there = FORK.Pipe()
    holder = FORK.Process(target=_hold, args=(path, there))
    holder.start()
    assert here.recv() == "held"
    assert is_locked(path)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    with locked(path):
        holder.join()


def _count(path: Path, times: int) -> None:
    for _ in range(times):
        with locked(path.with_suffix(".lock")):
            count = int(path.read_text())
            time.sleep(0.001)
            path.write_text(str(count + 1))


@pytest.mark.slow
def test_forked_processes_hold_a_lock_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    processes = [FORK.Process(target=_count, args=(path, 10)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert path.read_text() == "40"
