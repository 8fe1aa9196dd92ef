"""What a task costs in virtual time: drawn when it is handed out, from the scenario and the silo's own seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedmq import seeds
from fedmq.config.parts import Cost


def slowdowns(cost: Cost, seed: int, silos: tuple[str, ...]) -> dict[str, float]:
    """Each silo's slowdown by its device class; 1 for a silo of no class.

    Classes first take the silos they name. Then, in the order written, each takes its share of all silos, rounded,
    from those left, in an order drawn from the seed.
    """
    result = {silo: each.slowdown for each in cost.classes.values() for silo in each.silos}
    left = sorted((silo for silo in silos if silo not in result), key=lambda silo: seeds.derive(seed, "device", silo))
    for each in cost.classes.values():
        count = round(each.share * len(silos))
        result |= dict.fromkeys(left[:count], each.slowdown)
        left = left[count:]
    return {silo: result.get(silo, 1.0) for silo in silos}


@dataclass(frozen=True)
class CostModel:
    """Device classes, log-normal speeds within them, jitter per task, and a link that loses messages.

    Args:
        cost: the scenario's numbers.
        seed: the scenario's seed.
        silos: all silos in their fixed order.
        epochs: local epochs of a task.
        down_bytes: nominal size of a task [bytes].
        up_bytes: nominal size of a reply [bytes].
    """

    cost: Cost
    seed: int
    silos: tuple[str, ...]
    epochs: int
    down_bytes: int
    up_bytes: int

    @cached_property
    def _slowdowns(self) -> dict[str, float]:
        return slowdowns(self.cost, self.seed, self.silos)

    def speed(self, silo: str) -> float:
        """How many times slower than the average silo this one is; the median over the silos of a class is its own."""
        spread = float(seeds.numpy_generator(self.seed, "speed", silo).lognormal(0.0, self.cost.speed_sigma))
        return self._slowdowns[silo] * spread

    def jitter(self, silo: str, sequence: int) -> float:
        """How many times longer than usual this task takes; the median is 1."""
        generator = seeds.numpy_generator(self.seed, "jitter", silo, sequence)
        if self.cost.jitter == "pareto":
            # NumPy's is the Lomax distribution, Pareto's from 0 on; Pareto's own median is 2^(1/tail).
            return float((1.0 + generator.pareto(self.cost.jitter_tail)) / 2 ** (1 / self.cost.jitter_tail))
        return float(generator.lognormal(0.0, self.cost.jitter_sigma))

    def duration(self, silo: str, sequence: int, samples: int) -> float:
        """Seconds of virtual time from handing a task out to its reply's arrival."""
        cost = self.cost
        compute = cost.seconds_per_sample * samples * self.epochs * self.speed(silo) * self.jitter(silo, sequence)
        down = self.down_bytes / (cost.down_bandwidth or cost.bandwidth)
        up = self.up_bytes / (cost.up_bandwidth or cost.bandwidth)
        lost_down, lost_up = self._lost(silo, sequence)
        # A lost copy took its time on the link, and a round trip goes by before it is missed.
        again = lost_down * (down + 2 * cost.latency) + lost_up * (up + 2 * cost.latency)
        return compute + 2 * cost.latency + down + up + again

    def _lost(self, silo: str, sequence: int) -> tuple[int, int]:
        """How many copies of the task and of its reply are lost before one gets through."""
        if self.cost.loss == 0.0:
            return 0, 0
        down, up = seeds.numpy_generator(self.seed, "loss", silo, sequence).geometric(1.0 - self.cost.loss, 2) - 1
        return int(down), int(up)
