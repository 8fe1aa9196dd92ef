"""A roster of 1,000 silos on one machine, hosted by a few processes, compared with a roster of 100."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import Number, Result
from benchmarks.runs import Roster, loop_seconds, roster_scenario, simulated

#: Training items of each silo; width of images and texts.
ITEMS, WIDTH = 20, 512


def run(*, smoke: bool = False) -> Result:
    """Measure both rosters hosted, and the smaller one with a process per silo; ``smoke``: 4 and 8 silos."""
    small, large, selected, rounds = (4, 8, 2, 2) if smoke else (100, 1000, 50, 10)
    hosts = "silos.hosts=2" if smoke else "silos.hosts=4"
    numbers, costs, digests = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for silos, settings, how in (
            (small, (), "a process per silo"),
            (small, (hosts,), "hosted"),
            (large, (hosts,), "hosted"),
        ):
            out = folder / f"run-{silos}-{len(settings)}"
            roster = Roster(silos, ITEMS * silos, WIDTH, rounds, selected)
            summary = simulated(roster_scenario(folder, roster), out, *settings, limit_s=900)
            cost = costs[silos, how] = loop_seconds(out) / rounds
            digests[silos, how] = summary["model_digest"]
            memory, aim = summary["processes"]["peak_pss_mb"], "at most 4096 MB" if silos == 1000 else ""
            numbers += [
                Number(f"{silos} silos, {how}: seconds per merge", cost, "s"),
                Number(f"{silos} silos, {how}: ready after", summary["seconds"]["startup"], "s"),
                Number(f"{silos} silos, {how}: memory of all processes", memory, "MB", aim),
            ]
    ratio = costs[large, "hosted"] / costs[small, "hosted"]
    numbers.append(Number(f"cost per merge, {large} silos to {small}", ratio, "x", "at most 1.1"))
    same = digests[small, "hosted"] == digests[small, "a process per silo"]
    notes = (
        f"{rounds} rounds of {selected} silos with {ITEMS} items each, {hosts}",
        f"{small} silos: the hosted model is {'bitwise identical' if same else 'different'}",
    )
    return Result("silos", tuple(numbers), notes)
