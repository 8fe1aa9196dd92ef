"""Scripts of a simulation: what happens in one run, all of it from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from fedmq.wire.messages import COORDINATOR, EVALUATOR
from tests.simulated_network import DiskFault, Weather

SILOS = tuple(f"silo-0{index}" for index in range(4))
#: The methods and ways to aggregate; the undisturbed model of each is computed once.
MODES = (
    ("protocol={name: rcsr, warmup: 1}",),
    ("protocol={name: rcsr, warmup: 1}", "aggregation={mode: sync, deadline: 1.0, quorum: 0.5}"),
    ("protocol=fedavg", "aggregation={mode: buffered, buffer: 2, balance: 10}"),
    ("protocol=fedavg", "aggregation={mode: async, max_staleness: 4, balance: 4}"),
    ("protocol={name: fedper}",),
)


@dataclass(frozen=True)
class Act:
    """Something that happens at a time.

    Args:
        at: simulated time [s].
        what: name of the method of :class:`Simulation` that does it.
        silo: the process that it happens to.
        seconds: how long it lasts, or how far the clock jumps [s].
    """

    at: float
    what: str
    silo: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Script:
    """What happens in one run.

    Args:
        seed: the seed of all of it.
        mode: settings of the scenario.
        weather: what happens to messages.
        disk: faults of writes.
        acts: what happens at times.
        liars: silos that lie.
    """

    seed: int
    mode: tuple[str, ...]
    weather: Weather = field(default_factory=Weather)
    disk: tuple[DiskFault, ...] = ()
    acts: tuple[Act, ...] = ()
    liars: frozenset[str] = frozenset()

    @property
    def harmless(self) -> bool:
        """Whether the model has to be that of the undisturbed run."""
        return not self.liars and not any(act.what in ("remove_key", "replace_key") for act in self.acts)

    @classmethod
    def of(cls, seed: int) -> Script:
        """The script of a seed."""
        chance = random.Random(seed)
        script = cls(seed, chance.choice(MODES))
        kinds = ["weather", "disk", "acts", "keys", "lies"]
        for kind in chance.sample(kinds, chance.randint(1, 3)):
            match kind:
                case "weather":
                    script = replace(script, weather=_weather(chance))
                case "disk":
                    script = replace(script, disk=_disk(chance))
                case "acts":
                    script = replace(script, acts=script.acts + _acts(chance))
                case "keys":
                    script = replace(script, acts=script.acts + _keys(chance))
                case "lies":
                    script = replace(script, liars=frozenset({chance.choice(SILOS)}))
        return script


def _weather(chance: random.Random) -> Weather:
    shares = [chance.choice((0.0, 0.02, 0.1, 0.3)) for _ in range(4)]
    return Weather(chance.uniform(5, 120), *shares, latest=chance.choice((0.5, 8.0, 40.0)))


def _disk(chance: random.Random) -> tuple[DiskFault, ...]:
    processes = [*[COORDINATOR] * 5, *SILOS, EVALUATOR]
    return tuple(
        DiskFault(chance.choice(processes), int(10 ** chance.uniform(0, 2.6)), chance.random() < 0.6, chance.random())
        for _ in range(chance.randint(1, 6))
    )


def _acts(chance: random.Random) -> tuple[Act, ...]:
    whats = ("kill", "kill", "kill_coordinator", "stop_coordinator", "cut", "shift_clock", "freeze")
    return tuple(
        Act(
            10 ** chance.uniform(-1, 1.7),
            chance.choice(whats),
            chance.choice((*SILOS, EVALUATOR)),
            chance.choice((-7200.0, -3.0, 4.0, 50.0, 90_000.0)),
        )
        for _ in range(chance.randint(1, 6))
    )


def _keys(chance: random.Random) -> tuple[Act, ...]:
    silo, at = chance.choice(SILOS), 10 ** chance.uniform(-1, 1.2)
    what = chance.choice(("remove_key", "remove_key", "replace_key"))
    again = (Act(at + chance.uniform(0.1, 20), "return_key", silo),) if chance.random() < 0.5 else ()
    return (Act(at, what, silo), *(again if what == "remove_key" else ()))
