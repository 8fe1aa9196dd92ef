"""Memory growth of the coordinator and the silos over a virtual day with churn and 10,000 messages."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

import protocols
from benchmarks.measure import Number, Result
from fedmq.config.resolve import Source, resolve
from fedmq.config.scenario import Scenario
from fedmq.launch import preparation, supervisor
from fedmq.runs.status import Status
from fedmq.storage.run_folder import RunFolder

SILOS = 12
DAY = 86_400.0
_EVERY = 1.0
_COORDINATOR, _SILO = "coordinator.jsonl", "silo-"


@dataclass
class Memory:
    """Private memory of the coordinator and of the silos over a run.

    Args:
        samples: virtual time [s], the coordinator's USS and the silos' mean USS [bytes].
    """

    samples: list[tuple[float, float, float]] = field(default_factory=list)
    looked: float = 0.0

    def look(self, status: Status) -> None:
        """Take a sample, at most one per second."""
        if status.phase != "collecting" or time.monotonic() - self.looked < _EVERY:
            return
        self.looked = time.monotonic()
        uss: dict[str, list[int]] = {_COORDINATOR: [], _SILO: []}
        for process in psutil.Process().children(recursive=True):
            try:
                logs = [Path(file.path).name for file in process.open_files() if file.path.endswith(".jsonl")]
                for name, sizes in uss.items():
                    if any(log.startswith(name) for log in logs):
                        sizes.append(process.memory_full_info().uss)
            except psutil.Error:
                continue
        if all(uss.values()):
            coordinator, silos = uss.values()
            self.samples.append((status.now, statistics.mean(coordinator), statistics.mean(silos)))

    def fifths(self, which: int) -> list[float]:
        """Median of each fifth of the samples [MB]; of all of them if there are fewer than five."""
        values = [sample[which] / 2**20 for sample in self.samples]
        parts = np.array_split(values, 5) if len(values) >= 5 else [values] * 5
        return [statistics.median(part) for part in parts]


def scenario(path: Path, rounds: int) -> Scenario:
    """Twelve small silos, 30 % of which leave at intervals; a task takes about 200 virtual seconds."""
    generator = np.random.default_rng(0)
    latent = generator.normal(size=(300, 24)).astype(np.float32)
    np.savez(path, image=latent, text=latent[:, None], split=np.array(["train"] * 240 + ["test"] * 60))
    return Scenario.model_validate(
        {
            "name": "soak",
            "rounds": rounds,
            "protocol": {"name": "fedavg"},
            "data": {"name": "features", "path": path},
            "backbone": {"name": "features", "bottleneck": 4},
            "silos": {"count": SILOS},
            "partition": {"kind": "iid"},
            "training": {"learning_rate": 1e-4, "schedule": "constant", "warmup_rounds": 0},
            "aggregation": {"mode": "buffered", "buffer": 4},
            "cost": {"seconds_per_sample": 9.0, "speed_sigma": 0.2},
            "faults": [{"kind": "leave", "share": 0.3, "every": 14_400, "away": 3600}],
            "evaluation": {"every": rounds // 5},
        }
    )


def run(*, smoke: bool = False) -> Result:
    """Simulate the day once, with real processes; ``smoke``: its first twenty minutes.

    Raises:
        ValueError: the run was too short for a sample.
    """
    memory = Memory()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        root = Path(name)
        made = resolve(Source(root / "soak.yaml", scenario(root / "soak.npz", 60 if smoke else 1250)), protocols)
        data = preparation.prepare_population(made, None)
        done = supervisor.simulate(made, RunFolder(root / "run"), resume=False, status=memory.look, data=data)
    summary = done.outcome.summary
    assert summary is not None and summary.seconds.virtual is not None
    numbers = [
        Number("messages", summary.messages.sent + summary.messages.received, "", "10,000"),
        Number("virtual time", summary.seconds.virtual / 3600, "h", "24"),
        Number("real time", done.seconds, "s"),
    ]
    for which, name in ((1, "coordinator"), (2, "a silo, mean")):
        first, *_, before, last = memory.fifths(which)
        numbers += [
            Number(f"private memory of {name}, first fifth", first, "MB"),
            Number(f"private memory of {name}, last fifth", last, "MB"),
            Number(f"growth of {name}", 100 * (last / first - 1), "%", "within 5"),
            # Free lists and garbage that Python's collector has not come to yet fill up during the first 500 merges or
            # so; a list that is never emptied would grow all day.
            Number("  of it, from the fourth to the last fifth", 100 * (last / before - 1), "%", "within 1"),
        ]
    note = f"a virtual day of {SILOS} silos with churn, {len(memory.samples)} samples of memory, one per second"
    return Result("soak", tuple(numbers), (note,))
