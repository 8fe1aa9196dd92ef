"""The rounds machine: which silo is asked when, and when replies are merged. No sockets, no clock, no tensors.

``rounds.handle(event)`` returns the next machine and the actions to carry out. It is a pure function of frozen
values: an event that is illegal in the present phase raises :class:`IllegalEventError` and changes nothing.
``TABLE`` is the truth about which events are legal in which phase; ``docs/rounds.md`` is generated from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, assert_never

from fedmq import seeds
from fedmq.errors import FedmqError


class Phase(StrEnum):
    """Where the run stands."""

    GATHERING = "gathering"  # waiting for the silos to join
    COLLECTING = "collecting"  # tasks are out, replies come in
    MERGING = "merging"  # a merge is under way; its checkpoint is part of it
    DONE = "done"  # all rounds merged
    STOPPED = "stopped"  # stopped before the end; can be resumed


# --------------------------------------------------------------------------------------------------- events in
@dataclass(frozen=True)
class Joined:
    """A silo has an authenticated session and is ready for tasks."""

    silo: str


@dataclass(frozen=True)
class Lost:
    """A silo's connection went silent; its task stays open until it rejoins or the task expires."""

    silo: str


@dataclass(frozen=True)
class Arrived:
    """A well-formed reply is here."""

    silo: str
    sequence: int


@dataclass(frozen=True)
class Failed:
    """A silo's task will bring no usable reply: it was refused, the silo said it failed, or the silo stayed away."""

    silo: str
    sequence: int
    reason: str
    gone: bool = False


@dataclass(frozen=True)
class Deadline:
    """The time a round waits for stragglers is over."""

    round: int


@dataclass(frozen=True)
class Merged:
    """The merge asked for is done and its checkpoint is on disk."""

    version: int


@dataclass(frozen=True)
class Stop:
    """The user or the operating system asks to stop."""


Event = Joined | Lost | Arrived | Failed | Deadline | Merged | Stop


# --------------------------------------------------------------------------------------------------- actions out
@dataclass(frozen=True)
class Send:
    """Hand a task to a silo."""

    silo: str
    sequence: int
    base_version: int
    round: int


@dataclass(frozen=True)
class SetDeadline:
    """Call back with :class:`Deadline` after this many seconds."""

    round: int
    after: float


@dataclass(frozen=True)
class Merge:
    """Merge these replies, in this order, into version + 1."""

    round: int
    replies: tuple[Arrived, ...]


@dataclass(frozen=True)
class Discard:
    """Throw a reply away; it will never be merged."""

    silo: str
    sequence: int
    reason: str


@dataclass(frozen=True)
class Finish:
    """Nothing more will be asked of anyone."""


Action = Send | SetDeadline | Merge | Discard | Finish

TABLE: Mapping[Phase, Mapping[type, tuple[Phase, ...]]] = {
    Phase.GATHERING: {
        Joined: (Phase.GATHERING, Phase.COLLECTING),
        Lost: (Phase.GATHERING,),
        Stop: (Phase.STOPPED,),
    },
    Phase.COLLECTING: {
        Joined: (Phase.COLLECTING,),
        Lost: (Phase.COLLECTING,),
        Arrived: (Phase.COLLECTING, Phase.MERGING),
        Failed: (Phase.COLLECTING, Phase.MERGING),
        Deadline: (Phase.COLLECTING, Phase.MERGING),
        Stop: (Phase.STOPPED,),
    },
    Phase.MERGING: {
        Joined: (Phase.MERGING,),
        Lost: (Phase.MERGING,),
        Merged: (Phase.COLLECTING, Phase.DONE),
        Stop: (Phase.STOPPED,),
    },
    Phase.DONE: {
        Joined: (Phase.DONE,),
        Lost: (Phase.DONE,),
        Arrived: (Phase.DONE,),
        Failed: (Phase.DONE,),
        Deadline: (Phase.DONE,),
        Stop: (Phase.DONE,),
    },
    Phase.STOPPED: {
        Joined: (Phase.STOPPED,),
        Lost: (Phase.STOPPED,),
        Arrived: (Phase.STOPPED,),
        Failed: (Phase.STOPPED,),
        Deadline: (Phase.STOPPED,),
        Stop: (Phase.STOPPED,),
    },
}


class IllegalEventError(FedmqError):
    """An event that the present phase does not allow; the machine is unchanged."""


@dataclass(frozen=True)
class Plan:
    """What the machine needs to know of the scenario.

    Args:
        seed: the scenario's seed.
        rounds: merges until the run is done.
        silos: all silos in their fixed order.
        eligible: the silos the method ever asks, in the same order.
        participation: share of the eligible silos asked in a round.
        quorum: share of the cohort that is enough once the deadline is over.
        deadline: seconds a round waits for stragglers; None waits for all.
    """

    seed: int
    rounds: int
    silos: tuple[str, ...]
    eligible: tuple[str, ...]
    participation: float = 1.0
    quorum: float = 1.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if not self.eligible:
            raise ValueError("the method may ask none of the silos")

    @property
    def cohort_size(self) -> int:
        """⌊C N⌋ of RCSR's Algorithm 1, at least one."""
        # The small term keeps floor(0.29 * 100) at 29 in spite of binary fractions.
        return max(1, math.floor(self.participation * len(self.eligible) + 1e-9))

    def cohort(self, round_: int, free: tuple[str, ...]) -> tuple[str, ...]:
        """The silos asked in a round: a uniform sample without replacement, in the fixed silo order.

        Every eligible silo draws a number of its own, and the lowest numbers among the free ones win, so one silo's
        absence does not reshuffle the others.
        """
        rank = {silo: seeds.derive(self.seed, "participation", round_, silo) for silo in free}
        chosen = set(sorted(free, key=rank.__getitem__)[: self.cohort_size])
        return tuple(silo for silo in free if silo in chosen)


@dataclass(frozen=True)
class Flight:
    """A task that is out."""

    sequence: int
    base_version: int
    round: int


@dataclass(frozen=True)
class Rounds:
    """The machine. All fields but ``plan`` and ``online`` are checkpointed.

    Args:
        plan: facts of the scenario.
        phase: where the run stands.
        version: merges so far; also the number of the present round.
        online: silos with a live session.
        gone: silos given up; they are not asked again until they rejoin.
        flights: tasks that are out, by silo.
        cohort: the silos whose replies the present round waits for or has.
        arrived: replies of this round, by silo.
        sequences: the last task number handed out, by silo.
        overdue: whether the present round's deadline is over.
    """

    plan: Plan
    phase: Phase = Phase.GATHERING
    version: int = 0
    online: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    flights: Mapping[str, Flight] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    arrived: Mapping[str, int] = field(default_factory=dict)
    sequences: Mapping[str, int] = field(default_factory=dict)
    overdue: bool = False

    def handle(self, event: Event) -> tuple[Rounds, tuple[Action, ...]]:
        """The next machine and what to do.

        Raises:
            IllegalEventError: the present phase does not allow the event, or it names an unknown silo or version.
        """
        allowed = TABLE[self.phase].get(type(event))
        if allowed is None:
            raise IllegalEventError(f"{type(event).__name__} is not allowed while {self.phase}")
        silo = getattr(event, "silo", None)
        if silo is not None and silo not in self.plan.silos:
            raise IllegalEventError(f"{type(event).__name__} names the unknown silo {silo}")
        result, actions = self._dispatch(event)
        if result.phase not in allowed:
            raise IllegalEventError(f"{type(event).__name__} would lead from {self.phase} to {result.phase}")
        return result, actions

    def _dispatch(self, event: Event) -> tuple[Rounds, tuple[Action, ...]]:
        match event:
            case Joined(silo):
                return self._joined(silo)
            case Lost(silo):
                return replace(self, online=self.online - {silo}), ()
            case Arrived(silo, sequence):
                return self._arrived(silo, sequence)
            case Failed(silo, sequence, _, gone):
                return self._failed(silo, sequence, gone)
            case Deadline(round_):
                return self._deadline(round_)
            case Merged(version):
                return self._merged(version)
            case Stop():
                return self if self.phase is Phase.DONE else replace(self, phase=Phase.STOPPED), ()
            case _:
                assert_never(event)

    def _joined(self, silo: str) -> tuple[Rounds, tuple[Action, ...]]:
        here = replace(self, online=self.online | {silo}, gone=self.gone - {silo})
        if here.phase in (Phase.DONE, Phase.STOPPED):
            return here, ()
        # The same task under the same number: a silo that already did it answers from memory or does the same again.
        flight = here.flights.get(silo)
        again = () if flight is None else (Send(silo, flight.sequence, flight.base_version, flight.round),)
        complete = here.phase is Phase.GATHERING and set(here.plan.silos) <= here.online
        begun, actions = here._begin() if complete else here._unblock()
        return begun, again + actions

    def _unblock(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Begin the round again if nobody could be asked when it began."""
        return (self, ()) if self.phase is not Phase.COLLECTING or self.cohort else self._begin()

    def _begin(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Hand out the tasks of the round ``self.version``, or finish."""
        if self.version >= self.plan.rounds:
            return replace(self, phase=Phase.DONE, cohort=(), arrived={}), (Finish(),)
        free = tuple(s for s in self.plan.eligible if s not in self.gone and s not in self.flights)
        cohort = self.plan.cohort(self.version, free)
        sequences, flights = dict(self.sequences), dict(self.flights)
        actions: list[Action] = []
        for silo in cohort:
            sequences[silo] = sequences.get(silo, 0) + 1
            flights[silo] = Flight(sequences[silo], self.version, self.version)
            actions.append(Send(silo, sequences[silo], self.version, self.version))
        if self.plan.deadline is not None:
            actions.append(SetDeadline(self.version, self.plan.deadline))
        begun = replace(
            self, phase=Phase.COLLECTING, cohort=cohort, arrived={}, sequences=sequences, flights=flights, overdue=False
        )
        return begun, tuple(actions)

    def _arrived(self, silo: str, sequence: int) -> tuple[Rounds, tuple[Action, ...]]:
        flight = self.flights.get(silo)
        if flight is None or flight.sequence != sequence:
            return self, (Discard(silo, sequence, "duplicate"),)
        flights = {name: f for name, f in self.flights.items() if name != silo}
        landed = replace(self, flights=flights)
        if self.phase is not Phase.COLLECTING or flight.round != self.version or silo not in self.cohort:
            unblocked, actions = landed._unblock()
            return unblocked, (Discard(silo, sequence, "late"), *actions)
        return replace(landed, arrived={**self.arrived, silo: sequence})._merge_if_ready()

    def _failed(self, silo: str, sequence: int, gone: bool) -> tuple[Rounds, tuple[Action, ...]]:
        flight = self.flights.get(silo)
        if flight is None or flight.sequence != sequence:
            return self, ()
        flights = {name: f for name, f in self.flights.items() if name != silo}
        after = replace(self, flights=flights, gone=self.gone | {silo} if gone else self.gone)
        if self.phase is not Phase.COLLECTING or flight.round != self.version:
            return after._unblock()
        return replace(after, cohort=tuple(name for name in self.cohort if name != silo))._merge_if_ready()

    def _deadline(self, round_: int) -> tuple[Rounds, tuple[Action, ...]]:
        if self.phase is not Phase.COLLECTING or round_ != self.version or not self.cohort:
            return self, ()
        return replace(self, overdue=True)._merge_if_ready()

    def _merge_if_ready(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Merge once the whole cohort answered, or a quorum did and the deadline is over."""
        have, asked = len(self.arrived), len(self.cohort)
        enough = self.overdue and have >= max(1, math.ceil(self.plan.quorum * asked - 1e-9))
        if have == asked or enough:
            # A cohort of which nobody is left still counts as a round: it merges nothing, and the run goes on.
            replies = tuple(Arrived(silo, self.arrived[silo]) for silo in self.cohort if silo in self.arrived)
            return replace(self, phase=Phase.MERGING), (Merge(self.version, replies),)
        return self, ()

    def _merged(self, version: int) -> tuple[Rounds, tuple[Action, ...]]:
        if version != self.version + 1:
            raise IllegalEventError(f"Merged({version}) while version is {self.version}")
        return replace(self, version=version)._begin()

    # ------------------------------------------------------------------------------------------- checkpoints
    def after_merge(self) -> Rounds:
        """The machine as the checkpoint of the merge under way records it: merged, next round not yet begun."""
        return replace(
            self,
            phase=Phase.GATHERING,
            version=self.version + 1,
            cohort=(),
            arrived={},
            online=frozenset(),
            overdue=False,
        )

    def to_plain(self) -> dict[str, Any]:
        """As JSON-serialisable data, without ``plan``, ``online`` and whatever a checkpoint between rounds lacks."""
        return {
            "version": self.version,
            "gone": sorted(self.gone),
            "flights": {silo: [f.sequence, f.base_version, f.round] for silo, f in sorted(self.flights.items())},
            "sequences": dict(sorted(self.sequences.items())),
        }

    @classmethod
    def from_plain(cls, plan: Plan, plain: Mapping[str, Any]) -> Rounds:
        """The machine a checkpoint recorded, waiting for its silos to join."""
        return cls(
            plan,
            version=plain["version"],
            gone=frozenset(plain["gone"]),
            flights={silo: Flight(*f) for silo, f in plain["flights"].items()},
            sequences=dict(plain["sequences"]),
        )


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.GATHERING}"]
    for phase, row in TABLE.items():
        for event, targets in row.items():
            lines += [f"    {phase} --> {target}: {event.__name__}" for target in targets if target is not phase]
    return "\n".join([*lines, f"    {Phase.DONE} --> [*]", f"    {Phase.STOPPED} --> [*]"]) + "\n"
