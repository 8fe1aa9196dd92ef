"""Locks between processes: exclusion, and release when a process is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fedmq.storage.locks import is_locked, lock, locked, try_lock, unlock

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
