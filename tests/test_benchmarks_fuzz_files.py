"""Damaged files: every reader reads or refuses them in one line; the benchmark tells when one does not."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz_files
from benchmarks.fuzz_damage import Folder, Special, restructured
from benchmarks.fuzz_files import content_of, fuzz, write
from benchmarks.fuzz_kinds import KINDS, Kind, valid
from fedmq.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    tally = fuzz(kind, 15, seed=1)
    assert tally.failures == []
    assert tally.outcomes["read"] + tally.outcomes["refused"] == 15


def test_the_same_seed_makes_the_same_files() -> None:
    assert content_of("csv", 3, 5) == content_of("csv", 3, 5) != content_of("csv", 4, 5)


def test_a_folder_with_links_pipes_and_folders_in_place_of_files_is_written(tmp_path: Path) -> None:
    content: Folder = {
        "a/b.txt": b"1",
        "link": Special("link", ".."),
        "pipe": Special("pipe"),
        "folder": Special("folder"),
    }
    write(tmp_path / "made", content)
    assert (tmp_path / "made" / "a" / "b.txt").read_bytes() == b"1"
    assert (tmp_path / "made" / "link").readlink() == Path("..")
    assert (tmp_path / "made" / "pipe").is_fifo() and (tmp_path / "made" / "folder").is_dir()


@pytest.mark.parametrize("kind", ["npz", "mat", "hdf5", "parquet", "arrow", "png"])
def test_damage_of_what_a_format_holds_leaves_a_file_of_that_format(kind: str) -> None:
    files = valid("csv" if kind == "png" else kind)
    name = next(name for name in files if name != "list.csv")
    content = files[name]
    assert isinstance(content, bytes)
    found = [restructured(name, content, random.Random(number)) for number in range(20)]
    assert len(set(found)) > 10
    assert sum(each[:4] == content[:4] for each in found) > 10


class SeveralLinesError(InputError):
    def __str__(self) -> str:
        return "two\nlines"


def _fails(folder: Path) -> object:
    """A reader that fails in another way on each damaged file."""
    match int((folder / "f").read_bytes()):
        case 0:
            raise ValueError("not an InputError")
        case 1:
            return np.ones(300_000_000 // 8).sum()
        case 2:
            os._exit(7)
        case 3:
            while time.process_time() >= 0:
                pass
        case 4:
            raise SeveralLinesError("place", "found", "allowed")
        case 5:
            os.mkfifo(folder / "pipe")
            return (folder / "pipe").read_bytes()
    return None


def test_crashes_hangs_memory_and_dead_processes_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_files, "KINDS", {"fake": Kind(lambda: {"f": b"9"}, _fails)})
    monkeypatch.setattr(fuzz_files, "valid", lambda _kind: {"f": b"9"})
    monkeypatch.setattr(fuzz_files, "content_of", lambda _kind, _seed, number: {"f": str(number).encode()})
    tally = fuzz("fake", 7, seed=0, given_up_s=0.5, dead_s=1.0)
    assert [number for number, _ in tally.failures] == [0, 1, 2, 3, 4, 5]
    for (_, problem), expected in zip(
        tally.failures, ("ValueError", "MB", "died with 7", "hang", "lines", "nothing for"), strict=True
    ):
        assert expected in problem
    assert tally.outcomes["read"] == 1


def test_finished_kinds_are_not_fuzzed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fuzz_files", "--smoke", "--resume", str(tmp_path / "done.json"), "--only"]
    for kinds, counted in (("heads", 1), ("heads,site", 1), ("heads,site", 0)):
        made: list[str] = []
        monkeypatch.setattr(fuzz_files, "fuzz", lambda kind, *more, made=made: made.append(kind) or fuzz(kind, *more))
        monkeypatch.setattr(sys, "argv", [*command, kinds])
        with pytest.raises(SystemExit) as ended:
            fuzz_files.main()
        assert ended.value.code == 0
        assert len(made) == counted
        assert all(kind in capsys.readouterr().out for kind in made)


def test_a_valid_file_that_is_not_read_in_time_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_files, "KINDS", {"fake": Kind(lambda: {"f": b"9"}, lambda _folder: time.sleep(60))})
    monkeypatch.setattr(fuzz_files, "valid", lambda _kind: {"f": b"9"})
    with pytest.raises(RuntimeError, match=r"the valid file was not read in 1 s"):
        fuzz("fake", 1, seed=0, dead_s=0.1)
