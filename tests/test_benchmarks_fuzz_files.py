"""Damaged files: every reader reads or refuses them in one line; the benchmark tells when one does not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fuzz_files
from benchmarks.fuzz_files import KINDS, Kind, content_of, fuzz
from fedmq.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    tally = fuzz(kind, 60, seed=1)
    assert tally.failures == []
    assert tally.outcomes["read"] + tally.outcomes["refused"] == 60
    assert tally.outcomes["refused"] > 10


def test_the_same_seed_makes_the_same_files() -> None:
    assert content_of("csv", 3, 5) == content_of("csv", 3, 5) != content_of("csv", 4, 5)


def _fails(path: Path) -> object:
    """A reader that fails in another way on each damaged file."""
    match int(path.read_bytes()):
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
            raise InputError("place", "found", "allowed\nand more")
    return None


def test_crashes_hangs_memory_and_dead_processes_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_files, "KINDS", {"fake": Kind(".x", lambda: b"9", _fails)})
    monkeypatch.setattr(fuzz_files, "content_of", lambda _kind, _seed, number: str(number).encode())
    monkeypatch.setattr(fuzz_files, "_GIVEN_UP_S", 0.5)
    tally = fuzz("fake", 6, seed=0)
    assert [number for number, _ in tally.failures] == [0, 1, 2, 3, 4]
    for (_, problem), expected in zip(
        tally.failures, ("ValueError", "MB", "died with 7", "hang", "lines"), strict=True
    ):
        assert expected in problem
    assert tally.outcomes["read"] == 1
