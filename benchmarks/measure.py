"""Results of benchmarks, a description of the machine, and a stopwatch."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

#: Packages whose versions decide about speed.
_VERSIONS = ("numpy", "pyzmq", "cryptography")


@dataclass(frozen=True)
class Number:
    """One measured number."""

    name: str
    value: float  # the median of repeats
    unit: str  # e.g. ``ms``
    aim: str = ""  # target in words; empty without a target
    low: float | None = None  # minimum of the repeats
    high: float | None = None


@dataclass(frozen=True)
class Result:
    """Result of a benchmark."""

    name: str
    numbers: tuple[Number, ...]
    notes: tuple[str, ...] = ()  # remarks for the table's caption
    load: tuple[float, float] = (0.0, 0.0)  # one-minute load average before and after
    seconds: float = 0.0
    failed: str = ""  # why there are no numbers; empty if there are


def spread(name: str, values: Sequence[float], unit: str, aim: str = "") -> Number:
    """Median, minimum and maximum of repeats."""
    return Number(name, statistics.median(values), unit, aim, min(values), max(values))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch uses this number of threads while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def minutes(text: str) -> float:
    """A time limit [min], given on a command line; with 0 nothing is started.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    with suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r}, allowed: a number of minutes, at least 0")


def load_average() -> float:
    """The one-minute load average."""
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    """The machine, the commit and the versions, for the head of the output, without host names."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in _VERSIONS},
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """The processor as the kernel names it, otherwise its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """The commit of this checkout, with ``-dirty`` if tracked files differ from it; ``unknown`` without git."""
    words = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return "unknown"


@dataclass
class Stopwatch:
    """Adds up the seconds spent in patched functions.

    Args:
        seconds: spent in each, by its name.
        ended: the end of each call [s, perf_counter].
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def around(self, *functions: tuple[object, str, str]) -> Iterator[None]:
        """Measure the functions ``owner.attribute`` under the given names while the block runs."""
        with ExitStack() as stack:
            for owner, attribute, name in functions:
                timed = self._timed(getattr(owner, attribute), name)
                stack.enter_context(mock.patch.object(owner, attribute, timed))
            yield

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.ended[name].append(time.perf_counter())
                self.seconds[name] += self.ended[name][-1] - began

        return timed
