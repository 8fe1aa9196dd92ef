"""The rounds machine: which silos are selected when, and when replies are merged. No sockets, no clock, no tensors.

``rounds.handle(event)`` returns the next machine and the actions to carry out. It is a pure function of frozen
values: an event that is illegal in the present phase raises :class:`IllegalEventError` and changes nothing.
``TABLE`` defines which events are legal in which phase; ``docs/explanation/rounds.md`` shows its diagram.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, assert_never

from coordinator.events import (
    Action,
    Arrived,
    Deadline,
    Discard,
    DiscardReason,
    EvaluationAborted,
    Event,
    Expelled,
    Failed,
    Finish,
    Joined,
    Lost,
    Merge,
    Merged,
    RoundsRecord,
    Send,
    SetDeadline,
    StillConnected,
    Stop,
    Switched,
    WaitEnded,
)
from coordinator.participation import Sampling, cohort_size
from fedmq.errors import FedmqError


class Phase(StrEnum):
    """Phase of a run."""

    GATHERING = "gathering"  # waiting for the silos to join
    COLLECTING = "collecting"  # tasks are pending, replies arrive
    MERGING = "merging"  # a merge is in progress, including its checkpoint
    DONE = "done"  # all rounds merged
    STOPPED = "stopped"  # stopped early; can be resumed


TABLE: Mapping[Phase, Mapping[type, tuple[Phase, ...]]] = {
    Phase.GATHERING: {
        Joined: (Phase.GATHERING, Phase.COLLECTING, Phase.DONE),  # done: resumed after the last merge
        StillConnected: (Phase.GATHERING, Phase.COLLECTING, Phase.DONE),
        Lost: (Phase.GATHERING,),
        Switched: (Phase.GATHERING,),
        Expelled: (Phase.GATHERING, Phase.COLLECTING, Phase.DONE),  # the others have all joined
        WaitEnded: (Phase.GATHERING, Phase.COLLECTING, Phase.DONE),  # the minimum has joined
        Stop: (Phase.STOPPED,),
    },
    Phase.COLLECTING: {
        Joined: (Phase.COLLECTING,),
        Lost: (Phase.COLLECTING,),
        Switched: (Phase.COLLECTING,),
        Expelled: (Phase.COLLECTING,),
        Arrived: (Phase.COLLECTING, Phase.MERGING),
        Failed: (Phase.COLLECTING, Phase.MERGING),
        Deadline: (Phase.COLLECTING, Phase.MERGING),
        Stop: (Phase.STOPPED,),
    },
    Phase.MERGING: {
        Joined: (Phase.MERGING,),
        Lost: (Phase.MERGING,),
        Switched: (Phase.MERGING,),
        Expelled: (Phase.MERGING,),
        Merged: (Phase.COLLECTING, Phase.DONE),
        Stop: (Phase.STOPPED,),
    },
    Phase.DONE: {
        Joined: (Phase.DONE,),
        Lost: (Phase.DONE,),
        Switched: (Phase.DONE,),
        Expelled: (Phase.DONE,),
        Arrived: (Phase.DONE,),
        Failed: (Phase.DONE,),
        Deadline: (Phase.DONE,),
        Stop: (Phase.DONE,),
        EvaluationAborted: (Phase.STOPPED,),
    },
    Phase.STOPPED: {
        Joined: (Phase.STOPPED,),
        Lost: (Phase.STOPPED,),
        Switched: (Phase.STOPPED,),
        Expelled: (Phase.STOPPED,),
        Arrived: (Phase.STOPPED,),
        Failed: (Phase.STOPPED,),
        Deadline: (Phase.STOPPED,),
        Stop: (Phase.STOPPED,),
    },
}


class IllegalEventError(FedmqError):
    """An event is illegal in the present phase; the machine is unchanged."""


@dataclass(frozen=True)
class RoundsPlan:
    """The scenario's options that the rounds machine needs.

    Args:
        seed: the scenario's seed.
        rounds: number of merges until the run is done.
        silos: all silos in their fixed order.
        eligible: silos that the method can select, in the same order.
        participation: fraction of the eligible silos selected in a round (the cohort).
        sampling: how silos are sampled.
        mode: ``sync`` selects a cohort and merges its replies together; ``buffered`` and ``async`` keep as many tasks
            pending as a cohort has silos, and merge whenever :meth:`wanted` replies have arrived.
        quorum: sync: fraction of the cohort whose replies suffice once ``patience`` is over.
        over_select: sync: factor by which more silos than the cohort are selected; the first replies, as many as the
            cohort has silos, are merged.
        buffer: buffered: replies per merge, at most the cohort; None for a third of the cohort.
        patience: time that a merge waits for more replies [s]; None waits for all.
        max_staleness: replies with a higher staleness are discarded; None accepts all.
        first_round_selects_all: sync: the first round selects all eligible silos (pFedMMA).
        minimum: number of joined silos at which the run starts; the others are selected once they have joined. None
            waits for all silos.
    """

    seed: int
    rounds: int
    silos: tuple[str, ...]
    eligible: tuple[str, ...]
    participation: float = 1.0
    sampling: Sampling = field(default_factory=Sampling)
    mode: Literal["sync", "buffered", "async"] = "sync"
    quorum: float = 1.0
    over_select: float = 1.0
    buffer: int | None = None
    patience: float | None = None
    max_staleness: int | None = None
    first_round_selects_all: bool = False
    minimum: int | None = None

    def __post_init__(self) -> None:
        if not self.eligible:
            raise ValueError("the method can select none of the silos")

    def cohort_size(self, version: int) -> int:
        """Number of silos in the cohort at a version."""
        if self.first_round_selects_all and version == 0 and self.mode == "sync":
            return len(self.eligible)
        return cohort_size(self.participation, len(self.eligible))

    def tasks_out(self, version: int) -> int:
        """Number of tasks sent in a round (sync), or pending at any time (buffered, async)."""
        cohort = self.cohort_size(version)
        return math.ceil(self.over_select * cohort - 1e-9) if self.mode == "sync" else cohort

    def wanted(self, version: int) -> int:
        """Number of replies that complete a merge."""
        cohort = self.cohort_size(version)
        match self.mode:
            case "sync":
                return cohort
            case "buffered":
                return min(self.buffer or math.ceil(cohort / 3), cohort)
            case "async":
                return 1


@dataclass(frozen=True)
class PendingTask:
    """A task without an outcome yet."""

    sequence: int
    base_version: int
    round: int


@dataclass(frozen=True)
class Rounds:
    """The rounds machine.

    A checkpoint, which is written after a merge, stores ``version``, ``gone``, ``pending``, ``sequences`` and
    ``losses``. After a merge the other fields are reset, or follow from the joined silos and the trace.

    Args:
        plan: the scenario's options.
        phase: phase of the run.
        version: number of merges so far; also the number of the present round.
        online: silos with a session.
        off: silos that the availability trace has off.
        gone: silos given up; they are not selected until they rejoin, and a resumed run starts without them.
        pending: pending tasks, by silo.
        cohort: silos selected at this version whose task has not failed. A silo is selected at most once per version.
        arrived: task numbers of the replies to be merged next, by silo.
        failed: silos whose task of this version failed.
        sequences: number of the last task, by silo.
        losses: last-known training loss, by silo.
        deadline_set: whether the deadline of the present merge is scheduled.
        deadline_passed: whether it has passed.
        awaited: silos that took part before the run was resumed; it starts without them only after :class:`WaitEnded`.
    """

    plan: RoundsPlan
    phase: Phase = Phase.GATHERING
    version: int = 0
    online: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    pending: Mapping[str, PendingTask] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    arrived: Mapping[str, int] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    sequences: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    deadline_set: bool = False
    deadline_passed: bool = False
    awaited: frozenset[str] = frozenset()

    def handle(self, event: Event, record: int | None = None) -> tuple[Rounds, tuple[Action, ...]]:
        """Handle an event.

        Args:
            event: the event.
            record: number of the event's log record, which the actions carry as their cause; None without a log.

        Returns:
            The next machine, and the actions to carry out.

        Raises:
            IllegalEventError: the present phase does not allow the event, or it names an unknown silo or version.
        """
        allowed = TABLE[self.phase].get(type(event))
        if allowed is None:
            raise IllegalEventError(f"{type(event).__name__} is not allowed while {self.phase}")
        for silo in _silos_of(event):
            if silo not in self.plan.silos:
                raise IllegalEventError(f"{type(event).__name__} names the unknown silo {silo}")
        result, actions = self._dispatch(event)
        if result.phase not in allowed:
            raise IllegalEventError(f"{type(event).__name__} would lead from {self.phase} to {result.phase}")
        return result, tuple(replace(action, cause=record) for action in actions)

    def _dispatch(self, event: Event) -> tuple[Rounds, tuple[Action, ...]]:
        match event:
            case Joined(silo):
                return self._joined(silo)
            case StillConnected(silos):
                return self._still_connected(silos)
            case Lost(silo):
                return replace(self, online=self.online - {silo}), ()
            case Switched(silo, on):
                return replace(self, off=self.off - {silo} if on else self.off | {silo})._select()
            case Arrived(silo, sequence, loss):
                return self._arrived(silo, sequence, loss)
            case Failed(silo, sequence, _, gone):
                return self._failed(silo, sequence, gone)
            case Deadline(round_):
                return self._deadline(round_)
            case Merged(version, last):
                return self._merged(version, last=last)
            case Stop() | EvaluationAborted():
                finished = self.phase is Phase.DONE and isinstance(event, Stop)
                return self if finished else replace(self, phase=Phase.STOPPED), ()
            case Expelled(silo):
                return replace(self, online=self.online - {silo}, gone=self.gone | {silo})._start_if_enough()
            case WaitEnded():
                return replace(self, awaited=frozenset())._start_if_enough()
            case _:
                assert_never(event)

    def _joined(self, silo: str) -> tuple[Rounds, tuple[Action, ...]]:
        joined = replace(self, online=self.online | {silo}, gone=self.gone - {silo})
        if joined.phase in (Phase.DONE, Phase.STOPPED):
            return joined, ()
        resend = joined._resend((silo,))
        after, actions = joined._select() if joined.phase is not Phase.GATHERING else joined._start_if_enough()
        return after, resend + actions

    def _still_connected(self, silos: tuple[str, ...]) -> tuple[Rounds, tuple[Action, ...]]:
        connected = replace(self, online=self.online.union(silos))
        after, actions = connected._start_if_enough()
        return after, connected._resend(silos) + actions

    def _resend(self, silos: tuple[str, ...]) -> tuple[Action, ...]:
        """The pending tasks of these silos again.

        The same task has the same number: a silo that has done it already repeats its reply or the same training.
        """
        found = ((silo, self.pending[silo]) for silo in silos if silo in self.pending)
        return tuple(Send(silo, task.sequence, task.base_version, task.round) for silo, task in found)

    def _start_if_enough(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Start the first round, or resume, if the run waits for silos and enough of them have joined."""
        if self.phase is not Phase.GATHERING or not self.online or not self._enough_silos:
            return self, ()
        # Silos that are not needed to start are not selected until they join.
        absent = frozenset(self.plan.silos) - self.online
        return replace(self, gone=self.gone | absent, awaited=frozenset())._begin_round()

    @property
    def _enough_silos(self) -> bool:
        """Whether enough silos have joined to start or resume."""
        plan, known = self.plan, self.online | self.gone
        if set(plan.silos) <= known:
            return True
        enough = plan.minimum is not None and len(self.online.intersection(plan.eligible)) >= plan.minimum
        return enough and self.awaited <= known

    def _cleared(self) -> Rounds:
        """The machine without the fields of the current version."""
        return replace(self, cohort=(), arrived={}, failed=frozenset(), deadline_set=False, deadline_passed=False)

    def _begin_round(self, *, last: bool = False) -> tuple[Rounds, tuple[Action, ...]]:
        """Start the next round, or finish."""
        begun = replace(self._cleared(), phase=Phase.COLLECTING)
        if last or self.version >= self.plan.rounds:
            return replace(begun, phase=Phase.DONE), (Finish(),)
        return begun._select()

    def _select(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Select silos and send tasks: a cohort per round (sync), or up to a cohort at any time (other modes)."""
        plan = self.plan
        begun = plan.mode == "sync" and (self.cohort or self.failed)
        if self.phase is not Phase.COLLECTING or begun or self._has_enough_replies:
            return self, ()
        busy = {*self.gone, *self.off, *self.pending, *self.arrived, *self.cohort, *self.failed}
        free = tuple(silo for silo in plan.eligible if silo not in busy)
        # Pending tasks of earlier rounds do not count in sync mode; in other modes they do. A silo whose reply awaits
        # the merge makes room for another one, except where a merge needs the whole cohort: that is to be a round.
        out, wanted = plan.tasks_out(self.version), plan.wanted(self.version)
        waiting = len(self.arrived) if wanted == out else 0
        count = out if plan.mode == "sync" else out - len(self.pending) - waiting
        chosen = plan.sampling.choose(plan.seed, self.version, free, count, self.losses)
        sequences, pending = dict(self.sequences), dict(self.pending)
        actions: list[Action] = []
        for silo in chosen:
            sequences[silo] = sequences.get(silo, 0) + 1
            pending[silo] = PendingTask(sequences[silo], self.version, self.version)
            actions.append(Send(silo, sequences[silo], self.version, self.version))
        cohort = self.cohort + chosen
        after = replace(self, cohort=cohort, sequences=sequences, pending=pending)
        if plan.patience is None or self.deadline_set or not (cohort or (plan.mode != "sync" and pending)):
            return after, tuple(actions)
        return replace(after, deadline_set=True), (*actions, SetDeadline(self.version, plan.patience))

    def _arrived(self, silo: str, sequence: int, loss: float | None) -> tuple[Rounds, tuple[Action, ...]]:
        pending_task = self.pending.get(silo)
        if pending_task is None or pending_task.sequence != sequence:
            return self, (Discard(silo, sequence, DiscardReason.DUPLICATE),)
        pending = {name: each for name, each in self.pending.items() if name != silo}
        received = replace(self, pending=pending, losses=self.losses if loss is None else {**self.losses, silo: loss})
        reason = self._refusal(pending_task)
        if reason is None:
            return replace(received, arrived={**self.arrived, silo: sequence})._select_or_merge()
        after, actions = received._select_or_merge()
        return after, (Discard(silo, sequence, reason), *actions)

    def _refusal(self, pending_task: PendingTask) -> DiscardReason | None:
        """Why a reply is discarded; None if it is merged."""
        if self.phase is not Phase.COLLECTING:
            return DiscardReason.LATE
        age = self.version - pending_task.base_version
        if self.plan.mode == "sync":
            late = DiscardReason.SURPLUS if self.plan.over_select > 1 else DiscardReason.LATE
            return None if age == 0 else late
        fresh = self.plan.max_staleness is None or age <= self.plan.max_staleness
        return None if fresh else DiscardReason.STALE

    def _failed(self, silo: str, sequence: int, gone: bool) -> tuple[Rounds, tuple[Action, ...]]:
        pending_task = self.pending.get(silo)
        if pending_task is None or pending_task.sequence != sequence:
            return self, ()
        pending = {name: each for name, each in self.pending.items() if name != silo}
        # A silo that rejoined before it was given up only fails this task and can be selected again.
        gone = gone and silo not in self.online
        after = replace(self, pending=pending, gone=self.gone | {silo} if gone else self.gone)
        if self.phase is Phase.COLLECTING and pending_task.base_version == self.version:
            cohort = tuple(name for name in self.cohort if name != silo)
            after = replace(after, cohort=cohort, failed=self.failed | {silo})
        return after._select_or_merge()

    def _select_or_merge(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Select other silos if there is room, then merge if complete."""
        after, actions = self._select()
        after, more = after._merge_if_ready()
        return after, (*actions, *more)

    def _deadline(self, round_: int) -> tuple[Rounds, tuple[Action, ...]]:
        if self.phase is not Phase.COLLECTING or round_ != self.version:
            return self, ()
        return replace(self, deadline_passed=True)._merge_if_ready()

    def _merge_if_ready(self) -> tuple[Rounds, tuple[Action, ...]]:
        """Merge if enough replies have arrived, or if no more will arrive."""
        if self.phase is not Phase.COLLECTING:
            return self, ()
        none_pending = not (self.cohort if self.plan.mode == "sync" else self.pending)
        # A round in which all selected silos failed still counts: it merges nothing and the run continues.
        selected = bool(self.arrived or self.cohort or self.failed)
        if self._has_enough_replies or (selected and none_pending):
            replies = tuple(Arrived(silo, self.arrived[silo]) for silo in self.plan.silos if silo in self.arrived)
            return replace(self, phase=Phase.MERGING), (Merge(self.version, replies),)
        return self, ()

    @property
    def _has_enough_replies(self) -> bool:
        """Whether enough replies have arrived for a merge; after the deadline fewer suffice."""
        plan, have, wanted = self.plan, len(self.arrived), self.plan.wanted(self.version)
        if plan.mode != "sync":
            return have >= (1 if self.deadline_passed else wanted)
        expected = min(len(self.cohort), wanted)
        return have >= max(1, math.ceil(plan.quorum * expected - 1e-9) if self.deadline_passed else expected)

    def _merged(self, version: int, *, last: bool) -> tuple[Rounds, tuple[Action, ...]]:
        if version != self.version + 1:
            raise IllegalEventError(f"Merged({version}) while version is {self.version}")
        return replace(self, version=version)._begin_round(last=last)

    @property
    def stalled(self) -> bool:
        """Whether no task is pending and no given-up silo could rejoin; without a due event the run cannot continue."""
        return self.phase is Phase.COLLECTING and not self.pending and not self.gone

    @property
    def committed(self) -> dict[str, int]:
        """Number of each silo's last committed task: the last one whose outcome is known."""
        pending = self.pending
        return {s: pending[s].sequence - 1 if s in pending else last for s, last in self.sequences.items()}

    # ------------------------------------------------------------------------------------------- checkpoints
    def after_merge(self) -> Rounds:
        """The state machine as stored in the current merge's checkpoint: merged, with the next round not started."""
        return replace(self._cleared(), phase=Phase.GATHERING, version=self.version + 1, online=frozenset())

    def to_record(self) -> RoundsRecord:
        """The record that a checkpoint stores."""
        return RoundsRecord(
            version=self.version,
            gone=sorted(self.gone),
            pending={silo: [f.sequence, f.base_version, f.round] for silo, f in sorted(self.pending.items())},
            sequences=dict(sorted(self.sequences.items())),
            losses=dict(sorted(self.losses.items())),
        )

    @classmethod
    def from_record(cls, plan: RoundsPlan, record: RoundsRecord) -> Rounds:
        """The machine of a checkpoint, waiting for its silos to join."""
        gone = frozenset(record.gone)
        return cls(
            plan,
            version=record.version,
            gone=gone,
            awaited=frozenset() if plan.minimum is None else frozenset(plan.silos) - gone,
            pending={silo: PendingTask(*task) for silo, task in record.pending.items()},
            sequences=dict(record.sequences),
            losses=dict(record.losses),
        )


def _silos_of(event: Event) -> tuple[str, ...]:
    """The silos that an event names."""
    match event:
        case StillConnected(silos):
            return silos
        case Joined() | Lost() | Switched() | Arrived() | Failed() | Expelled():
            return (event.silo,)
        case Deadline() | Merged() | Stop() | WaitEnded() | EvaluationAborted():
            return ()
        case _:
            assert_never(event)


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.GATHERING}"]
    for phase, row in TABLE.items():
        for event, targets in row.items():
            lines += [f"    {phase} --> {target}: {event.__name__}" for target in targets if target is not phase]
    return "\n".join([*lines, f"    {Phase.DONE} --> [*]", f"    {Phase.STOPPED} --> [*]"]) + "\n"
