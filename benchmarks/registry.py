"""The benchmarks by name, and the process that runs one of them under its time limit."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from benchmarks.measure import Result, load_average

_CONTEXT = multiprocessing.get_context("spawn")
_RESULT = TypeAdapter(Result)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    module: str  # whose function ``run(*, smoke: bool) -> Result`` measures; ``smoke``: the smallest size, in seconds
    limit_s: float  # a benchmark that takes longer is ended, and the command fails [s]
    by_default: bool = True  # whether it runs unless others are named


#: Limits are two to four times the time on two idle cores; all together may take ten minutes, whatever their limits.
BENCHMARKS: Mapping[str, Benchmark] = {
    "delta": Benchmark("delta", 60),
    "rounds": Benchmark("rounds", 60),
    "startup": Benchmark("startup", 240),  # with an empty cache it also draws and encodes openmoji
    "hamming": Benchmark("hamming", 60),
    "loop": Benchmark("whole", 210),
    "vit": Benchmark("vit", 150),
    "blockwise": Benchmark("blockwise", 90),
    "silos": Benchmark("silos", 180),
    "soak": Benchmark("soak", 150),
    "estimates": Benchmark("estimates", 240),
    "large": Benchmark("large", 420, by_default=False),
    "sums": Benchmark("sums", 600, by_default=False),
    "peers": Benchmark("peers.comparison", 600, by_default=False),
}


def run_one(name: str, smoke: bool, file: Path) -> None:
    """Run a benchmark in this process, and write its result as JSON."""
    before, began = load_average(), time.monotonic()
    module = import_module(f"benchmarks.{BENCHMARKS[name].module}")  # with its libraries, which others do not use
    result = module.run(smoke=smoke)
    seconds = time.monotonic() - began
    file.write_bytes(_RESULT.dump_json(replace(result, load=(before, load_average()), seconds=seconds)))


def _run_alone(name: str, smoke: bool, file: Path) -> None:
    """Run a benchmark whose temporary folders are beside its result, to be removed even if it is killed."""
    tempfile.tempdir = str(file.parent)
    run_one(name, smoke, file)


def run_limited(name: str, smoke: bool, limit_s: float, file: Path) -> Result:
    """Run a benchmark in a process of its own, which is killed with all its descendants at its time limit."""
    process = _CONTEXT.Process(target=_run_alone, args=(name, smoke, file))
    process.start()
    late = True
    try:
        process.join(limit_s)
        late = process.exitcode is None
    finally:
        if late:  # or this command is being ended
            _kill(process.pid)
            process.join()
    if late:
        return Result(name, (), failed=f"took longer than its limit of {limit_s:.0f} s")
    if process.exitcode:
        return Result(name, (), failed=f"ended with exit code {process.exitcode}; the reason is printed above")
    return _RESULT.validate_json(file.read_bytes())


def _kill(pid: int | None) -> None:
    """Kill a process and all its descendants."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for running in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                running.kill()
