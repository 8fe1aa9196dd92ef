"""Scripts of a simulation: what happens in one run, all of it from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from fedmq.wire.messages import COORDINATOR, EVALUATOR
from fedmq.wire.payloads import Delta, PartialDelta, Payload
from tests.simulated_network import DiskFault, Weather

SILOS = tuple(f"silo-0{index}" for index in range(4))
#: The methods and ways to aggregate; the undisturbed model of each is computed once.
MODES = (
    ("protocol={name: rcsr, warmup: 1}",),
    ("protocol={name: rcsr, warmup: 1}", "aggregation={mode: sync, deadline: 1.0, quorum: 0.5}"),
    ("protocol=fedavg", "aggregation={mode: buffered, buffer: 2, balance: 10}"),
    ("protocol=fedavg", "aggregation={mode: async, max_staleness: 4, balance: 4}"),
    ("protocol={name: fedper}",),
    ("protocol={name: fedper}", "aggregation={mode: sync, on_lost: give_up, lost_after: 15}"),
)


@dataclass(frozen=True)
class Act:
    """Something that happens at a time, or at an event of the coordinator."""

    at: float  # simulated time [s]; the number of the event of the rounds, if ``events``
    what: str  # name of the method of Simulation that does it
    silo: str = ""  # the process that it happens to
    seconds: float = 0.0  # how long it lasts, or how far the clock jumps [s]
    events: bool = False  # whether it happens at an event


@dataclass(frozen=True)
class Script:
    """What happens in one run."""

    seed: int  # the seed of all of it
    mode: tuple[str, ...]  # settings of the scenario
    weather: Weather = field(default_factory=Weather)  # what happens to messages
    disk: tuple[DiskFault, ...] = ()  # faults of writes
    acts: tuple[Act, ...] = ()  # what happens at times
    liars: frozenset[str] = frozenset()  # silos that lie
    doublers: frozenset[str] = frozenset()  # silos that answer each task twice, with another model the second time

    @property
    def harmless(self) -> bool:
        """Whether the model has to be that of the undisturbed run."""
        changing = (
            "remove_key",
            "replace_key",
            *(("kill", "leave", "freeze", "cut") if "give_up" in self.mode[-1] else ()),
        )
        lost = "give_up" in self.mode[-1] and bool(self.weather.until or self.disk)
        # The first answer may be lost, and the second one merged.
        lost |= bool(self.doublers and self.weather.until)
        return not self.liars and not lost and not any(act.what in changing for act in self.acts)

    @classmethod
    def of(cls, seed: int) -> Script:
        """The script of a seed."""
        chance = random.Random(seed)
        script = cls(seed, chance.choice(MODES))
        kinds = ["weather", "disk", "acts", "leaves", "keys", "torn", "doubles", "lies"]
        for kind in chance.sample(kinds, chance.randint(1, 3)):
            match kind:
                case "weather":
                    script = replace(script, weather=_weather(chance))
                case "disk":
                    script = replace(script, disk=_disk(chance))
                case "acts":
                    whats = ("kill", "kill", "kill_coordinator", "stop_coordinator", "cut", "shift_clock", "freeze")
                    script = script.with_acts(_act(chance, chance.choice(whats)) for _ in range(chance.randint(1, 6)))
                case "leaves":
                    script = script.with_acts(_act(chance, "leave") for _ in range(chance.randint(1, 2)))
                case "keys":
                    script = script.with_acts(_keys(chance))
                case "torn":
                    script = script.with_acts(_act(chance, "tear_checkpoint") for _ in range(chance.randint(1, 2)))
                case "doubles":
                    script = replace(script, doublers=frozenset(chance.sample(SILOS, chance.randint(1, len(SILOS)))))
                case "lies":
                    script = replace(script, liars=frozenset({chance.choice(SILOS)}))
        return script

    def with_acts(self, acts: Iterable[Act]) -> Script:
        """The script with more acts."""
        return replace(self, acts=(*self.acts, *acts))


def _weather(chance: random.Random) -> Weather:
    shares = [chance.choice((0.0, 0.02, 0.1, 0.3)) for _ in range(4)]
    return Weather(chance.uniform(5, 120), *shares, latest=chance.choice((0.5, 8.0, 40.0)))


#: Number of writes of each kind in a run, about.
_WRITES = {"log": 400, "metrics": 6, "checkpoint": 16, "state": 4}


def _disk(chance: random.Random) -> tuple[DiskFault, ...]:
    places = [(name, kind) for name in SILOS for kind in ("log", "state", "state")]
    places += [(COORDINATOR, kind) for kind in ("log", "metrics", "checkpoint", "checkpoint") for _ in range(4)]
    faults = []
    for name, kind in chance.choices([*places, (EVALUATOR, "log")], k=chance.randint(1, 5)):
        write, dies = int(_WRITES[kind] ** chance.random()), chance.random() < 0.6
        faults.append(DiskFault(name, kind, write, dies, chance.random(), 1 if dies else chance.choice((1, 1, 4))))
    return tuple(faults)


def _act(chance: random.Random, what: str) -> Act:
    events = chance.random() < 0.5
    at = float(chance.randrange(40)) if events else 10 ** chance.uniform(-1, 1.7)
    seconds = chance.choice((-7200.0, -3.0, 4.0, 50.0, 90_000.0))
    return Act(at, what, chance.choice((*SILOS, EVALUATOR)), seconds, events)


def _keys(chance: random.Random) -> tuple[Act, ...]:
    what = chance.choice(("remove_key", "remove_key", "replace_key"))
    act = replace(_act(chance, what), silo=chance.choice(SILOS))
    if what == "replace_key" or chance.random() < 0.5:
        return (act,)
    return (act, replace(act, at=act.at + chance.uniform(1, 20), what="return_key"))


def changed(payloads: tuple[Payload, ...], change: Callable[[np.ndarray], np.ndarray]) -> tuple[Payload, ...]:
    """The payloads with another change of the model."""
    return tuple(
        replace(each, buffer=change(np.array(each.buffer))) if isinstance(each, Delta | PartialDelta) else each
        for each in payloads
    )
