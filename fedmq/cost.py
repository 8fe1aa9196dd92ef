"""What a task costs in virtual time: drawn when it is handed out, from the scenario and the silo's own seed."""

from __future__ import annotations

from dataclasses import dataclass

from fedmq import seeds
from fedmq.scenario import Cost


@dataclass(frozen=True)
class CostModel:
    """Log-normal compute speed per silo and jitter per task, plus a link of fixed latency and bandwidth.

    Args:
        cost: the scenario's numbers.
        seed: the scenario's seed.
        epochs: local epochs of a task.
        down_bytes: nominal size of a task [bytes].
        up_bytes: nominal size of a reply [bytes].
    """

    cost: Cost
    seed: int
    epochs: int
    down_bytes: int
    up_bytes: int

    def speed(self, silo: str) -> float:
        """How many times slower than the average silo this one is; the median over silos is 1."""
        return float(seeds.numpy_generator(self.seed, "speed", silo).lognormal(0.0, self.cost.speed_sigma))

    def duration(self, silo: str, sequence: int, samples: int) -> float:
        """Seconds of virtual time from handing a task out to its reply's arrival."""
        jitter = float(
            seeds.numpy_generator(self.seed, "jitter", silo, sequence).lognormal(0.0, self.cost.jitter_sigma)
        )
        compute = self.cost.seconds_per_sample * samples * self.epochs * self.speed(silo) * jitter
        return compute + 2 * self.cost.latency + (self.down_bytes + self.up_bytes) / self.cost.bandwidth
