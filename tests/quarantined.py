"""What a reader in the quarantine may do, for tests: return values, fail, crash, hang and take memory."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedmq.errors import InputError
from fedmq.storage import quarantine


def same(*values: Any) -> list[Any]:
    """The arguments, and the number of the process."""
    return [*values, os.getpid()]


def strings() -> Any:
    """An array of strings, one of which is no character."""
    return np.array([0x110005, 3], np.uint32).view("U1")


def objects() -> Any:
    """An array of Python objects."""
    return np.array([object()])


def multiplied(path: str) -> list[float]:
    """A vector in a file, multiplied by one by torch."""
    torch = importlib.import_module("torch")
    product = torch.from_numpy(np.load(path)).double()[None] @ torch.eye(3, dtype=torch.float64)
    return [float(value) for value in product[0]]


def fails() -> None:
    """Fail with a message of two lines."""
    raise ValueError("broken\nin many ways")


def refuses() -> None:
    """Refuse what is read."""
    raise InputError("another place", 3, "4")


def crashes() -> None:
    """Follow a null pointer."""
    ctypes.string_at(0)


def leaves() -> None:
    """End the process."""
    print("no such table", file=sys.stderr, flush=True)
    os._exit(9)


def hangs() -> None:
    """Compute for ever."""
    while time.process_time() >= 0:
        pass


def sleeps(seconds: float) -> None:
    """Wait without computing."""
    time.sleep(seconds)


def grows(size: int) -> int:
    """Take memory."""
    return len(np.ones(size, np.uint8))


def writes(path: str) -> None:
    """Write a large file."""
    Path(path).write_bytes(bytes(1 << 22))


def nested(name: str) -> list[Any]:
    """The number of the process, and the result of another function of this module, read in turn."""
    return [os.getpid(), quarantine.read(globals()[name], place="an inner file", allowed="another file")]
