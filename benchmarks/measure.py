"""Results of benchmarks, a description of the machine, and a stopwatch."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import psutil
import torch


@dataclass(frozen=True)
class Number:
    """One measured number.

    Args:
        name: what was measured.
        value: the measurement; the median of repeats.
        unit: e.g. ``ms``.
        aim: target in words; empty without a target.
        low: minimum of the repeats.
        high: maximum of the repeats.
    """

    name: str
    value: float
    unit: str
    aim: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Result:
    """Result of a benchmark.

    Args:
        name: of the benchmark.
        numbers: in display order.
        notes: remarks for the table's caption.
        load: one-minute load average before and after.
        failed: why there are no numbers; empty if there are.
    """

    name: str
    numbers: tuple[Number, ...]
    notes: tuple[str, ...] = ()
    load: tuple[float, float] = (0.0, 0.0)
    failed: str = ""


def spread(name: str, values: Sequence[float], unit: str, aim: str = "") -> Number:
    """Median, minimum and maximum of repeats."""
    return Number(name, statistics.median(values), unit, aim, min(values), max(values))


def load_average() -> float:
    """The one-minute load average."""
    return os.getloadavg()[0]


def machine() -> dict[str, Any]:
    """The machine and versions, for the head of the output, without host names."""
    return {
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
    }


@dataclass
class Stopwatch:
    """Adds up the seconds spent in patched functions."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

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
                self.seconds[name] += time.perf_counter() - began

        return timed
