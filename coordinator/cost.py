"""Duration of a task in virtual time, drawn from the scenario's seed per silo and task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedmq import seeds
from fedmq.config.sections import Cost


def slowdowns(cost: Cost, seed: int, silos: tuple[str, ...]) -> dict[str, float]:
    """Slowdown factor of each silo by its device class; 1 for silos without a class.

    Classes are first assigned the silos they name. Then each class in turn is assigned ``round(share * N)`` of the
    remaining silos, in an order drawn from the seed.

    Args:
        cost: the scenario's cost section.
        seed: the scenario's seed.
        silos: all silos in their fixed order.
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
    """Task durations from device classes, log-normal speeds within them, jitter per task, and a lossy link.

    Args:
        cost: the scenario's cost section.
        seed: the scenario's seed.
        silos: all silos in their fixed order.
        epochs: local epochs per task.
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
        """The silo's slowdown factor; its median over the silos of a class is the slowdown of the class."""
        spread = float(seeds.numpy_generator(self.seed, "speed", silo).lognormal(0.0, self.cost.speed_sigma))
        return self._slowdowns[silo] * spread

    def jitter(self, silo: str, sequence: int) -> float:
        """Random factor of this task's compute time; its median is 1."""
        generator = seeds.numpy_generator(self.seed, "jitter", silo, sequence)
        if self.cost.jitter == "pareto":
            # NumPy draws from the Lomax distribution, i.e. Pareto minus 1; the median of Pareto is 2^(1/tail).
            return float((1.0 + generator.pareto(self.cost.jitter_tail)) / 2 ** (1 / self.cost.jitter_tail))
        return float(generator.lognormal(0.0, self.cost.jitter_sigma))

    def duration(self, silo: str, sequence: int, samples: int) -> float:
        """Virtual time from sending a task to the arrival of its reply [s].

        Args:
            silo: the silo's name.
            sequence: number of the task.
            samples: training samples of the silo.
        """
        cost = self.cost
        compute = cost.seconds_per_sample * samples * self.epochs * self.speed(silo) * self.jitter(silo, sequence)
        down = self.down_bytes / (cost.down_bandwidth or cost.bandwidth)
        up = self.up_bytes / (cost.up_bandwidth or cost.bandwidth)
        lost_down, lost_up = self._lost(silo, sequence)
        # A lost copy costs its transfer time and a round trip before it is sent again.
        resends = lost_down * (down + 2 * cost.latency) + lost_up * (up + 2 * cost.latency)
        return compute + 2 * cost.latency + down + up + resends

    def _lost(self, silo: str, sequence: int) -> tuple[int, int]:
        """Number of copies of the task and of its reply that are lost before one arrives."""
        if self.cost.loss == 0.0:
            return 0, 0
        down, up = seeds.numpy_generator(self.seed, "loss", silo, sequence).geometric(1.0 - self.cost.loss, 2) - 1
        return int(down), int(up)
