"""A few seconds of the campaign of benchmarks/fuzz_frames.py, and what it would report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fuzz_frames
from benchmarks.fuzz_roster import RosterReaders
from fedmq.wire import codec


@pytest.mark.slow
def test_mutated_frames_are_accepted_or_refused_and_nothing_else() -> None:
    found = fuzz_frames.fuzz(fuzz_frames.Readers(), fuzz_frames.Found(seed=1), 4000, lambda: False, lambda _: None)
    assert not found.failed, fuzz_frames.lines_of(found)
    readers = {name.partition(" ")[0] for name in found.outcomes}
    assert readers == {"header", "body", "sealed", "hello", "welcome", "ready", "short", "rekey"}
    # Some mutations are harmless, so the readers are reached beyond their first check.
    assert found.outcomes["body accepted"] and found.outcomes["hello malformed"] and found.outcomes["sealed malformed"]


@pytest.mark.slow
def test_a_roster_stays_within_its_rate_limits_for_any_frames() -> None:
    with RosterReaders() as readers:
        found = fuzz_frames.fuzz(readers, fuzz_frames.Found(seed=1), 3000, lambda: False, lambda _: None)
    assert not found.failed, fuzz_frames.lines_of(found)
    assert found.outcomes["roster message accepted"] and found.outcomes["roster message too_often"]


def test_an_exception_other_than_a_refusal_is_a_crash_with_its_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(codec, "decode", decode)
    found = fuzz_frames.fuzz(fuzz_frames.Readers(), fuzz_frames.Found(seed=1), 50, lambda: False, lambda _: None)
    assert found.failed
    assert any((reader, what) == ("body", "ZeroDivisionError: oh") for _, reader, what in found.crashes)


@pytest.mark.slow
def test_a_campaign_continues_from_its_state_and_the_same_frames_have_the_same_outcome(tmp_path: Path) -> None:
    def campaign(count: int, name: str) -> dict[str, object]:
        command = [
            sys.executable,
            "-m",
            "benchmarks.fuzz_frames",
            "--count",
            str(count),
            "--state",
            str(tmp_path / name),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{count:,} frames, 0 crashes")
        return dict(json.loads((tmp_path / name).read_text())["outcomes"])

    whole = campaign(400, "whole")
    campaign(150, "parts")
    # Whether a flipped bit of a random key or ciphertext is refused differs from process to process.
    keyless = ("header", "body")
    parts = campaign(400, "parts")
    assert {k: v for k, v in parts.items() if k.startswith(keyless)} == {
        k: v for k, v in whole.items() if k.startswith(keyless)
    }
