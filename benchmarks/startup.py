"""Time from the command until all silos are ready, and the memory of all processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Number, Result

#: The setting of the RCSR paper's main table; only its size varies here.
_SCENARIO = """\
name: bench
rounds: 200
participation: 0.5
protocol: {name: rcsr}
data: {name: openmoji}
backbone: {name: lite}
silos: {count: 30}
partition: {kind: dir_clusters, alpha: 0.1, clusters: 50}
missing_modality: {rate: 0.5, seed: 42}
training: {learning_rate: 1.0e-3, weight_decay: 0.01, batch_size: 128, local_epochs: 1, warmup_rounds: 5}
evaluation: {every: 10, split: test}
"""


def scenario_file(folder: Path) -> Path:
    """Write the benchmarks' scenario into a folder."""
    path = folder / "bench.yaml"
    path.write_text(_SCENARIO, encoding="utf-8")
    return path


def simulated(folder: Path, out: str, *settings: str, limit_s: float = 300.0) -> dict[str, Any]:
    """Run ``fedmq scenario`` and return its summary.

    Args:
        folder: for the scenario and the run.
        out: name of the run folder in ``folder``.
        settings: ``key=value`` arguments of ``--set``.
        limit_s: time limit [s].

    Raises:
        subprocess.SubprocessError: the run failed or exceeded the time limit.
    """
    command = [
        sys.executable,
        "-m",
        "fedmq",
        "scenario",
        str(scenario_file(folder)),
        "--out",
        str(folder / out),
    ]
    command += ["--json", "--quiet", *(part for setting in settings for part in ("--set", setting))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=limit_s)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def run(counts: tuple[int, ...] = (30, 100)) -> Result:
    """Measure start-up in runs of one round."""
    aims = {30: ("at most 12 s", "at most 4096 MB")}
    numbers = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        simulated(folder, "warm", "rounds=1", "silos.count=2", limit_s=600)  # fills the cache with the data set
        for count in counts:
            # Also cache the partition: computing it is not part of start-up.
            simulated(folder, f"warm-{count}", "rounds=1", f"silos.count={count}")
            summary = simulated(folder, f"run-{count}", "rounds=1", f"silos.count={count}")
            seconds, memory = summary["seconds"]["startup"], summary["processes"]["peak_pss_mb"]
            ready, usage = aims.get(count, ("", ""))
            numbers += [
                Number(f"{count} silos ready after", seconds, "s", ready),
                Number(f"memory of all processes, {count} silos", memory, "MB PSS", usage),
                Number("  the same per silo", memory / count, "MB PSS"),
            ]
    return Result(
        "startup", tuple(numbers), ("rcsr on openmoji and lite, one round, features and partition in the cache",)
    )
