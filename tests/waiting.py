"""Waiting for what other processes and threads do, with a limit that a busy machine keeps; addresses of one test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

#: Time that a slow, busy machine needs for a whole run [s].
PATIENCE = 600.0
_NUMBERS = itertools.count()


def memory_uri() -> str:
    """An address within this process that no other test has; ZeroMQ gives a closed one free only a little later."""
    return f"memory://test-{next(_NUMBERS)}"


def wait_for(condition: Callable[[], T], seconds: float = PATIENCE, why: str = "") -> T:
    """Wait until a condition holds, and return its value.

    Args:
        condition: called again and again; its value counts as true or false.
        seconds: time after which the test fails [s].
        why: the failure's message.
    """
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, why or f"nothing within {seconds:g} s"
        time.sleep(0.01)
    return found


def wait_for_merges(run: Path, merges: int) -> None:
    """Wait until a run folder has the records of this number of merges."""
    metrics = run / "metrics.jsonl"

    def enough() -> bool:
        return metrics.is_file() and metrics.read_text().count('"merge"') >= merges

    wait_for(enough, PATIENCE, f"no {merges} merges in {PATIENCE:g} s")
