"""Rounds of ten silos with a 12 MB model without training: fedmq, sealed and logged, and Flower's simulation."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks import rounds
from benchmarks.line import MEGABYTES, PARAMETERS
from benchmarks.measure import Result, spread

_ROOT = Path(__file__).parent.parent.parent
#: Interpreter that has flwr, whose versions of typer and rich exclude those of fedmq; ``make peers`` installs it.
PYTHON = _ROOT / ".venv-peers" / "bin" / "python"
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def _flower(silos: int, count: int) -> list[float]:
    """Seconds of each round of Flower's simulation but the first."""
    command = [str(PYTHON), str(Path(__file__).with_name("flower.py")), str(silos), str(count), str(PARAMETERS)]
    done = subprocess.run(command, env={**os.environ, **_QUIET}, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[") and line.endswith("]")]
    if done.returncode or not lines:
        raise RuntimeError(f"Flower's simulation ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    seconds: list[float] = json.loads(lines[-1])
    return seconds


def run(*, smoke: bool = False) -> Result:
    """Measure both alternately, five times each; ``smoke``: two silos, three rounds, once.

    Raises:
        FileNotFoundError: Flower is not installed.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON}: Flower is not installed; make peers installs and measures it")
    silos, count, repeats = (2, 3, 1) if smoke else (10, 20, 5)
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(statistics.median(rounds.measure(silos, count)[0]))
        theirs.append(statistics.median(_flower(silos, count)))
    ratios = [slow / fast for fast, slow in zip(ours, theirs, strict=True)]
    numbers = (
        spread(f"fedmq: a round of {silos} silos", ours, "s"),
        spread(f"Flower's simulation: a round of {silos} silos", theirs, "s"),
        spread("Flower's time as a multiple of fedmq's", ratios, "x", "at least 3"),
    )
    notes = (
        f"runs of the two alternate, {repeats} of each; a run counts with the median of its {count - 1} rounds",
        f"a model of {MEGABYTES:.2f} MB, constant updates; fedmq: sealed, logged, a process per silo, checkpoints",
        f"Flower {_version()}: two actors, in memory, unsealed, without a log",
    )
    return Result("peers", numbers, notes)


def _version() -> str:
    code = "import importlib.metadata; print(importlib.metadata.version('flwr'))"
    return subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
