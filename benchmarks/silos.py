"""A roster of 1,000 silos on one machine, hosted by a few processes, compared with a roster of 100."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import Number, Result
from benchmarks.runs import Roster, loop_seconds, roster_scenario, simulated

#: Training items of each silo; width of images and texts; number of rounds.
ITEMS, WIDTH, ROUNDS = 20, 512, 8


def run(*, smoke: bool = False) -> Result:
    """Measure both rosters; ``smoke``: 4 and 8 silos."""
    small, large, selected, hosts = (4, 8, 2, 2) if smoke else (100, 1000, 50, 4)
    numbers, costs = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for silos in (small, large):
            out = folder / f"run-{silos}"
            roster = Roster(silos, ITEMS * silos, WIDTH, ROUNDS, selected)
            summary = simulated(roster_scenario(folder, roster), out, f"silos.hosts={hosts}")
            costs.append(loop_seconds(out) / ROUNDS)
            memory, aim = summary["processes"]["peak_pss_mb"], "at most 4096 MB" if silos == 1000 else ""
            numbers += [
                Number(f"{silos} silos: seconds per merge", costs[-1], "s"),
                Number(f"{silos} silos: ready after", summary["seconds"]["startup"], "s"),
                Number(f"{silos} silos: memory of all processes", memory, "MB", aim),
            ]
    numbers.append(Number(f"cost per merge, {large} silos to {small}", costs[1] / costs[0], "x", "at most 1.1"))
    note = f"{ROUNDS} rounds of {selected} silos with {ITEMS} items each, in {hosts} processes"
    return Result("silos", tuple(numbers), (note,))
