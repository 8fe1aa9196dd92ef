"""Rounds of ten silos with a 12 MB model without training: fedmq, sealed and logged, and Flower's simulation."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from benchmarks import rounds
from benchmarks.line import MEGABYTES, PARAMETERS
from benchmarks.measure import Number, Result, spread

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
    """Measure both, one after the other; ``smoke``: two silos, three rounds.

    Raises:
        FileNotFoundError: Flower is not installed.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON}: Flower is not installed; make peers installs and measures it")
    silos, count = (2, 3) if smoke else (10, 20)
    ours, theirs = rounds.run(smoke=smoke).numbers[0], _flower(silos, count)
    ratio = statistics.median(theirs) / ours.value
    numbers = (
        ours,
        spread(f"Flower's simulation: seconds per round, {silos} silos", theirs, "s"),
        Number("Flower's time as a multiple of fedmq's", ratio, "x", "at least 3"),
    )
    note = f"a model of {MEGABYTES:.2f} MB, constant updates; Flower: two actors, in memory, unsealed, without a log"
    return Result("peers", numbers, (note,))
