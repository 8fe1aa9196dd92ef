"""Files are read in a child process: whatever its reader does, the caller gets the values or one line."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.errors import DataItemError, InputError
from fedmq.storage import quarantine
from tests import quarantined
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


def read(function: Callable[..., Any], *arguments: object, **options: Any) -> Any:
    return quarantine.read(function, *arguments, place="the file", allowed="a readable file", **options)


def test_values_arrays_and_bytes_are_the_same_on_both_sides() -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 3)), np.array("é"), np.array([b"a", b"bc"])]
    value = [1, None, "\udcff", {"a": [b"\0", *arrays]}, Path("/x"), np.float32(2), np.bool_(True)]
    *found, process = read(quarantined.same, *value)
    assert process != os.getpid()
    assert found[:3] == value[:3] and found[4:] == ["/x", 2.0, True]
    inside = found[3]["a"]
    assert inside[0] == b"\0"
    for array, wanted in zip(inside[1:], arrays, strict=True):
        assert array.dtype == wanted.dtype and array.shape == wanted.shape and np.array_equal(array, wanted)
        assert array.flags.writeable


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (quarantined.fails, "found 'broken', allowed: a readable file"),
        (quarantined.crashes, "died of SIGSEGV"),
        (quarantined.leaves, "died with code 9: no such table"),
        (quarantined.strings, "found"),
        (quarantined.objects, "an array of object"),
        (lambda: None, "found"),
    ],
)
def test_a_reader_that_fails_or_dies_is_one_line(function: Callable[[], None], found: str) -> None:
    with pytest.raises(DataItemError, match=found) as caught:
        read(function, error=DataItemError)
    assert caught.value.place == "the file" and "\n" not in str(caught.value)
    assert read(quarantined.same, 1)[0] == 1


def test_what_a_reader_refuses_is_refused_as_it_says() -> None:
    with pytest.raises(InputError, match="another place: found 3, allowed: 4"):
        read(quarantined.refuses)


@pytest.mark.parametrize("name", ["fails", "crashes", "grows"])
def test_what_a_child_reads_in_turn_it_reads_itself_and_names(name: str) -> None:
    process, (inner,) = read(quarantined.nested, "same")
    assert process == inner != os.getpid()
    with pytest.raises(InputError, match=r"an inner file: .* allowed: another file"):
        read(quarantined.nested, name)


def test_memory_is_limited_in_proportion_to_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MEMORY", 1 << 27)
    with pytest.raises(InputError, match=r"Unable to allocate 256\. MiB"):
        read(quarantined.grows, 1 << 28)
    (tmp_path / "file").write_bytes(bytes(1 << 24))
    assert read(quarantined.grows, 1 << 28, files=[tmp_path / "file"]) == 1 << 28


def test_processor_time_and_waiting_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "CPU_S", 1)
    monkeypatch.setattr(quarantine, "WAITS", 600)
    with pytest.raises(InputError, match="more than 1 s of processor time"):
        read(quarantined.hangs)
    monkeypatch.setattr(quarantine, "WAITS", 1)
    with pytest.raises(InputError, match="no answer in 1 s"):
        read(quarantined.sleeps, 1000)


def test_a_reader_writes_no_large_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="File too large"):
        read(quarantined.writes, tmp_path / "written")


@pytest.mark.parametrize("kind", ["missing", "pipe", "folder"])
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(InputError, match="file: found"):
        read(quarantined.same, files=[path])


def test_calls_share_a_child_and_threads_have_one_each() -> None:
    quarantine.end_children()
    assert len({read(quarantined.same)[0] for _ in range(5)}) == 1
    together = threading.Barrier(3)

    def call(_number: int) -> int:
        together.wait()
        read(quarantined.sleeps, 0.5)
        return int(read(quarantined.same)[0])

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(call, range(3)))) > 1


def test_a_child_reads_relative_paths_and_imports_wherever_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine.end_children()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    child = read(quarantined.same)[0]
    monkeypatch.chdir(tmp_path / "second")
    (tmp_path / "first").rmdir()
    path = Path("array.npy")
    np.save(path, np.arange(3))
    assert read(quarantined.multiplied, path, libraries=["torch"]) == [
        0.0,
        1.0,
        2.0,
    ]  # by a library that a removed working folder ends
    assert read(quarantined.same)[0] == child


def _other_process(line: Any) -> None:
    line.send(read(quarantined.same)[0])


def test_a_forked_process_has_children_of_its_own() -> None:
    (ours,) = read(quarantined.same)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_other_process, args=(there,))
    process.start()
    assert here.recv() != ours
    process.join()
    assert read(quarantined.same) == [ours]


def test_ctrl_c_ends_the_child_that_is_reading() -> None:
    quarantine.end_children()
    (child,) = read(quarantined.same)

    def interrupt() -> None:
        wait_for(lambda: not quarantine._waiting)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test before may have set another one
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            read(quarantined.sleeps, 1000)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, former)
    stat = Path(f"/proc/{child}/stat")
    wait_for(lambda: not stat.exists() or " Z " in stat.read_text())
