"""Time from the command until all silos are ready, and the memory of all processes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measure import Number, Result
from benchmarks.runs import rcsr_scenario, simulated


def run(*, smoke: bool = False) -> Result:
    """Measure start-up in runs of one round; ``smoke``: of two silos on synthetic features."""
    counts = (2,) if smoke else (30, 100)
    aims = {30: ("at most 3.5 s", "at most 4096 MB"), 100: ("at most 6.6 s", "")}
    numbers = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        scenario = rcsr_scenario(folder, smoke=smoke)
        for count in counts:
            settings = ("rounds=1", f"silos.count={count}")
            # Fills the cache with the data set and its partition: computing them is not part of start-up.
            simulated(scenario, folder / f"warm-{count}", *settings, limit_s=600)
            summary = simulated(scenario, folder / f"run-{count}", *settings)
            seconds, memory = summary["seconds"]["startup"], summary["processes"]["peak_pss_mb"]
            ready, usage = aims.get(count, ("", ""))
            numbers += [
                Number(f"{count} silos ready after", seconds, "s", ready),
                Number(f"memory of all processes, {count} silos", memory, "MB PSS", usage),
                Number("  the same per silo", memory / count, "MB PSS"),
            ]
    data = "made features" if smoke else "openmoji and lite"
    return Result("startup", tuple(numbers), (f"rcsr on {data}, one round, features and partition in the cache",))
