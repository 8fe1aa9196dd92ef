"""The rounds machine: which silos are selected when, and when replies are merged. No sockets, no clock, no tensors.

``rounds.handle(event)`` looks the event up in the present phase's row of ``TABLE``, at the end of this module: what the
event changes, and the ways into another phase with their conditions. It is a pure function of frozen values: an event
that the row lacks raises :class:`IllegalEventError` and changes nothing. ``docs/explanation/rounds.md`` shows the
table's diagram.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator import round_events as events
from coordinator.participation import RoundsPlan
from fedmq.errors import FedmqError
from fedmq.wire.secure_sum import needed


class IllegalEventError(FedmqError):
    """An event is illegal in the present phase; the machine is unchanged."""


#: The next machine, and the actions to carry out.
Step = tuple["Rounds", tuple[events.Action, ...]]


@dataclass(frozen=True)
class Rounds:
    """The rounds machine.

    A checkpoint, which is written after a merge, stores ``version``, ``last``, ``gone``, ``pending``, ``sequences`` and
    ``losses``. After a merge the other fields are reset, or follow from the joined silos and the trace.
    """

    plan: RoundsPlan
    phase: events.Phase = events.Phase.GATHERING
    version: int = 0  # number of merges so far; also the number of the present round
    online: frozenset[str] = frozenset()  # silos with a session
    off: frozenset[str] = frozenset()  # silos that the availability trace has off
    # Silos given up; they are not selected until they rejoin, and a resumed run starts without them.
    gone: frozenset[str] = frozenset()
    pending: Mapping[str, events.PendingTask] = field(default_factory=dict)
    # Silos selected at this version whose task has not failed. A silo is selected at most once per version.
    cohort: tuple[str, ...] = ()
    arrived: Mapping[str, int] = field(default_factory=dict)  # task numbers of the replies to be merged next, by silo
    failed: frozenset[str] = frozenset()  # silos whose task of this version failed
    sequences: Mapping[str, int] = field(default_factory=dict)  # number of the last task, by silo
    losses: Mapping[str, float] = field(default_factory=dict)  # last-known training loss, by silo
    least: int = 0  # secure aggregation: silos that have to answer each step
    summed: Mapping[str, int] = field(default_factory=dict)  # task numbers of the silos that were asked in this step
    deadline_set: bool = False  # whether the deadline of the present merge is scheduled
    deadline_passed: bool = False  # whether it has passed
    last: bool = False  # no further rounds are wanted
    # Silos that took part before the run was resumed; it starts without them only after WaitEnded.
    awaited: frozenset[str] = frozenset()

    def handle(self, event: events.Event, record: int | None = None) -> tuple[Rounds, tuple[events.Action, ...]]:
        """The next machine, and the actions to carry out, with the event's log record as their cause.

        Raises:
            IllegalEventError: the present phase does not allow the event, or it names an unknown silo or version.
        """
        transition = TABLE[self.phase].get(type(event))
        if transition is None:
            raise IllegalEventError(f"{type(event).__name__} is not allowed while {self.phase}")
        for silo in events.silos_of(event):
            if silo not in self.plan.silos:
                raise IllegalEventError(f"{type(event).__name__} names the unknown silo {silo}")
        after, actions = transition.change(self, event)
        for way in transition.exits:
            if way.when(after):
                after, more = way.enter(replace(after, phase=way.to))
                actions += more
                break
        return after, tuple(replace(action, cause=record) for action in actions)

    # ------------------------------------------------------------------------------------------- what events change
    def same(self, event: events.Event) -> Step:
        """The event changes nothing but, where the table says so, the phase."""
        return self, ()

    def join(self, event: events.Joined) -> Step:
        """A silo joins, and gets its pending task again."""
        joined, _ = self.join_late(event)
        return joined, joined._resend((event.silo,))

    def join_late(self, event: events.Joined) -> Step:
        """A silo joins after the last round."""
        return replace(self, online=self.online | {event.silo}, gone=self.gone - {event.silo}), ()

    def stay_connected(self, event: events.StillConnected) -> Step:
        """Silos are connected already, and get their pending tasks again."""
        return replace(self, online=self.online.union(event.silos)), self._resend(event.silos)

    def lose(self, event: events.Lost) -> Step:
        """A silo is not connected any more."""
        return replace(self, online=self.online - {event.silo}), ()

    def switch(self, event: events.Switched) -> Step:
        """The trace turns a silo on or off."""
        return replace(self, off=self.off - {event.silo} if event.on else self.off | {event.silo}), ()

    def expel(self, event: events.Expelled) -> Step:
        """A silo's key was removed."""
        return replace(self, online=self.online - {event.silo}, gone=self.gone | {event.silo}), ()

    def end_wait(self, event: events.WaitEnded) -> Step:
        """The minimum of silos suffices from now on."""
        return replace(self, awaited=frozenset()), ()

    def arrive(self, event: events.Arrived) -> Step:
        """Keep a reply for the merge, or discard it."""
        task = self._task_of(event)
        if task is None:
            return self, (events.Discard(event.silo, event.sequence, events.DiscardReason.DUPLICATE),)
        received = self._answered(event)
        if (reason := self._discard_reason(task)) is not None:
            return received, (events.Discard(event.silo, event.sequence, reason),)
        return replace(received, arrived={**self.arrived, event.silo: event.sequence}), ()

    def answer(self, event: events.Arrived) -> Step:
        """Keep an answer in a step of a secure sum; discard a late reply to the training before it."""
        task = self._task_of(event)
        if task is None or task.stage is events.Stage.TRAIN:
            return self.arrive_late(event)
        return replace(self._answered(event), arrived={**self.arrived, event.silo: event.sequence}), ()

    def arrive_late(self, event: events.Arrived) -> Step:
        """Discard a reply after the last merge."""
        known = self._task_of(event) is not None
        reason = events.DiscardReason.LATE if known else events.DiscardReason.DUPLICATE
        return self._answered(event) if known else self, (events.Discard(event.silo, event.sequence, reason),)

    def fail(self, event: events.Failed) -> Step:
        """A task of the present round or of an earlier one fails; another silo can be selected."""
        task = self._task_of(event)
        after, actions = self.fail_late(event)
        if task is None or task.base_version != self.version:
            return after, actions
        cohort = tuple(name for name in self.cohort if name != event.silo)
        return replace(after, cohort=cohort, failed=self.failed | {event.silo}), actions

    def fail_late(self, event: events.Failed) -> Step:
        """A task fails after the last merge."""
        if self._task_of(event) is None:
            return self, ()
        # A silo that rejoined before it was given up only fails this task and can be selected again.
        gone = event.gone and event.silo not in self.online
        return replace(
            self, pending=self._without(event.silo), gone=self.gone | {event.silo} if gone else self.gone
        ), ()

    def pass_deadline(self, event: events.Deadline) -> Step:
        """From now on fewer replies suffice, if the deadline is the present round's."""
        return replace(self, deadline_passed=self.deadline_passed or event.round == self.version), ()

    def count_merge(self, event: events.Merged) -> Step:
        """The merge is done."""
        if event.version != self.version + 1:
            raise IllegalEventError(f"Merged({event.version}) while version is {self.version}")
        return replace(self, version=event.version, last=event.last), ()

    def _task_of(self, event: events.Arrived | events.Failed) -> events.PendingTask | None:
        """The pending task that an event ends; None if it has ended already."""
        task = self.pending.get(event.silo)
        return task if task is not None and task.sequence == event.sequence else None

    def _without(self, silo: str) -> Mapping[str, events.PendingTask]:
        """The pending tasks without that of a silo."""
        return {name: task for name, task in self.pending.items() if name != silo}

    def _answered(self, event: events.Arrived) -> Rounds:
        losses = self.losses if event.loss is None else {**self.losses, event.silo: event.loss}
        return replace(self, pending=self._without(event.silo), losses=losses)

    def _discard_reason(self, pending_task: events.PendingTask) -> events.DiscardReason | None:
        """Why a reply is discarded; None if it is merged."""
        age = self.version - pending_task.base_version
        if self.plan.mode == "sync":
            late = events.DiscardReason.SURPLUS if self.plan.over_select > 1 else events.DiscardReason.LATE
            return None if age == 0 else late
        fresh = self.plan.max_staleness is None or age <= self.plan.max_staleness
        return None if fresh else events.DiscardReason.STALE

    def _resend(self, silos: tuple[str, ...]) -> tuple[events.Action, ...]:
        """The pending tasks of these silos again.

        The same task has the same number: a silo that has done it already repeats its reply or the same training.
        """
        found = [(silo, self.pending[silo]) for silo in silos if silo in self.pending]
        # A silo keeps its update in memory until the sum: before that step it may have to train again.
        stages = {events.Stage.MASK: (events.Stage.TRAIN, events.Stage.MASK)}
        return tuple(
            events.Send(silo, task.sequence, task.base_version, task.round, stage)
            for silo, task in found
            for stage in stages.get(task.stage, (task.stage,))
        )

    # ------------------------------------------------------------------------------------------- ways into a phase
    @property
    def over(self) -> bool:
        """Whether no round is left."""
        return self.last or self.version >= self.plan.rounds

    @property
    def ready(self) -> bool:
        """Whether enough replies have arrived for a merge, or no more will arrive."""
        none_pending = not (self.cohort if self.plan.mode == "sync" else self.pending)
        # A round in which all selected silos failed still counts: it merges nothing and the run continues.
        selected = bool(self.arrived or self.cohort or self.failed)
        return self._has_enough_replies or (selected and none_pending)

    def begin(self) -> Step:
        """Begin the first round or resume; silos that are not needed for it are not selected until they join."""
        return self._without_absent().next_round()

    def end(self) -> Step:
        """Finish a run that is resumed after its last merge."""
        return self._without_absent().finish()

    def _without_absent(self) -> Rounds:
        return replace(self, gone=self.gone | (frozenset(self.plan.silos) - self.online), awaited=frozenset())

    def next_round(self) -> Step:
        """Begin a round."""
        return self._cleared().select()

    def finish(self) -> Step:
        """All rounds are merged."""
        return self._cleared(), (events.Finish(),)

    def merge(self) -> Step:
        """Merge the replies in the fixed order of the silos."""
        return self, (events.Merge(self.version, self._in_order(self.arrived)),)

    def _in_order(self, replies: Mapping[str, int]) -> tuple[events.Arrived, ...]:
        return tuple(events.Arrived(silo, replies[silo]) for silo in self.plan.silos if silo in replies)

    # ------------------------------------------------------------------------------------------- secure aggregation
    @property
    def answered(self) -> bool:
        """Whether a step of a secure sum is over: no silo is still to answer it."""
        return not any(task.stage is not events.Stage.TRAIN for task in self.pending.values())

    @property
    def goes_on(self) -> bool:
        """Whether a step is over with enough answers for the next one."""
        return self.answered and len(self.arrived) >= self.least

    def asked(self, done: events.Stage, stage: events.Stage) -> Step:
        """Ask the silos that answered a step for the next one."""
        replies = self._in_order(self.arrived)
        tasks = {each.silo: events.PendingTask(each.sequence, self.version, self.version, stage) for each in replies}
        sends = [events.Send(silo, task.sequence, task.base_version, task.round, stage) for silo, task in tasks.items()]
        least = needed(len(replies), self.plan.threshold or 0.0) if done is events.Stage.TRAIN else self.least
        after = replace(self, arrived={}, summed=self.arrived, least=least, pending={**self.pending, **tasks})
        return after, (events.Collect(self.version, done, replies), *sends)

    def merge_sum(self) -> Step:
        """Merge the sum."""
        revealed = events.Collect(self.version, events.Stage.REVEAL, self._in_order(self.arrived))
        return self, (revealed, events.Merge(self.version, self._in_order(self.summed)))

    def merge_nothing(self) -> Step:
        """End the round without a merge, because too few silos answered a step."""
        reason, answers = events.DiscardReason.INCOMPLETE, self._in_order(self.arrived)
        discards = (events.Discard(each.silo, each.sequence, reason) for each in answers)
        return self, (*discards, events.Collect(self.version, events.Stage.REVEAL, ()), events.Merge(self.version, ()))

    @property
    def gathered(self) -> bool:
        """Whether enough silos have joined to start or resume."""
        plan, known = self.plan, self.online | self.gone
        if not self.online or set(plan.silos) <= known:
            return bool(self.online)
        enough = plan.minimum is not None and len(self.online.intersection(plan.eligible)) >= plan.minimum
        return enough and self.awaited <= known

    def _cleared(self) -> Rounds:
        """The machine without the fields of the current version."""
        cleared = replace(self, cohort=(), arrived={}, failed=frozenset(), least=0, summed={})
        return replace(cleared, deadline_set=False, deadline_passed=False)

    def select(self) -> Step:
        """Select silos and send tasks: a cohort per round (sync), or up to a cohort at any time (other modes)."""
        plan = self.plan
        begun = plan.mode == "sync" and (self.cohort or self.failed)
        if begun or self._has_enough_replies:
            return self, ()
        busy = {*self.gone, *self.off, *self.pending, *self.arrived, *self.cohort, *self.failed}
        free = tuple(silo for silo in plan.selectable(self.sequences) if silo not in busy)
        # Pending tasks of earlier rounds do not count in sync mode; in other modes they do. A silo whose reply awaits
        # the merge makes room for another one, except where a merge needs the whole cohort: that is to be a round.
        out, wanted = plan.tasks_out(self.version), plan.wanted(self.version)
        waiting = len(self.arrived) if wanted == out else 0
        count = out if plan.mode == "sync" else out - len(self.pending) - waiting
        chosen = plan.sampling.choose(plan.seed, self.version, free, count, self.losses)
        sequences, pending = dict(self.sequences), dict(self.pending)
        actions: list[events.Action] = []
        for silo in chosen:
            sequences[silo] = sequences.get(silo, 0) + 1
            pending[silo] = events.PendingTask(sequences[silo], self.version, self.version)
            actions.append(events.Send(silo, sequences[silo], self.version, self.version))
        cohort = self.cohort + chosen
        after = replace(self, cohort=cohort, sequences=sequences, pending=pending)
        if plan.patience is None or self.deadline_set or not (cohort or (plan.mode != "sync" and pending)):
            return after, tuple(actions)
        return replace(after, deadline_set=True), (*actions, events.SetDeadline(self.version, plan.patience))

    @property
    def _has_enough_replies(self) -> bool:
        """Whether enough replies have arrived for a merge; after the deadline fewer suffice."""
        return self.plan.enough(self.version, len(self.arrived), len(self.cohort), deadline_passed=self.deadline_passed)

    @property
    def stalled(self) -> bool:
        """Whether no task is pending and no given-up silo could rejoin; without a due event the run cannot continue."""
        return self.phase is events.Phase.COLLECTING and not self.pending and not self.gone

    @property
    def committed(self) -> dict[str, int]:
        """Number of each silo's last committed task: the last one whose outcome is known."""
        pending = self.pending
        return {s: pending[s].sequence - 1 if s in pending else last for s, last in self.sequences.items()}

    # ------------------------------------------------------------------------------------------- checkpoints
    def after_merge(self, *, last: bool = False) -> Rounds:
        """The state machine as stored in the current merge's checkpoint: merged, with the next round not started."""
        cleared = replace(self._cleared(), phase=events.Phase.GATHERING, online=frozenset())
        return replace(cleared, version=self.version + 1, last=last)

    def to_record(self) -> events.RoundsRecord:
        """The record that a checkpoint stores."""
        return events.RoundsRecord(
            version=self.version,
            last=self.last,
            gone=sorted(self.gone),
            pending={silo: [f.sequence, f.base_version, f.round] for silo, f in sorted(self.pending.items())},
            sequences=dict(sorted(self.sequences.items())),
            losses=dict(sorted(self.losses.items())),
        )

    @classmethod
    def from_record(cls, plan: RoundsPlan, record: events.RoundsRecord) -> Rounds:
        """The machine of a checkpoint, waiting for its silos to join."""
        gone = frozenset(record.gone)
        return cls(
            plan,
            version=record.version,
            last=record.last,
            gone=gone,
            awaited=frozenset() if plan.minimum is None else frozenset(plan.silos) - gone,
            pending={
                silo: events.PendingTask(number, base, round_)
                for silo, (number, base, round_) in record.pending.items()
            },
            sequences=dict(record.sequences),
            losses=dict(record.losses),
        )


@dataclass(frozen=True)
class Exit:
    """A way into another phase."""

    when: Callable[[Rounds], bool]  # the condition, which is looked at after an event
    to: events.Phase
    enter: Callable[[Rounds], Step] = lambda rounds: (rounds, ())  # what entering it changes, with its actions


@dataclass(frozen=True)
class Transition:
    """What becomes of an event in a phase."""

    change: Callable[[Rounds, Any], Step]  # what the event changes, with its actions
    exits: tuple[Exit, ...] = ()  # ways into another phase; the first whose condition holds is taken


def _selecting(change: Callable[[Rounds, Any], Step]) -> Callable[[Rounds, Any], Step]:
    """A change after which silos are selected."""

    def both(rounds: Rounds, event: events.Event) -> Step:
        changed, actions = change(rounds, event)
        after, more = changed.select()
        return after, actions + more

    return both


_STOP = Transition(Rounds.same, (Exit(lambda _: True, events.Phase.STOPPED),))
#: Ways out of the wait for silos; done: resumed after the last merge.
_STARTS = (
    Exit(lambda rounds: rounds.gathered and not rounds.over, events.Phase.COLLECTING, Rounds.begin),
    Exit(lambda rounds: rounds.gathered and rounds.over, events.Phase.DONE, Rounds.end),
)
_MERGES = (
    Exit(
        lambda rounds: rounds.ready and bool(rounds.arrived and rounds.plan.threshold),
        events.Phase.SHARING,
        lambda rounds: rounds.asked(events.Stage.TRAIN, events.Stage.SHARE),
    ),
    Exit(lambda rounds: rounds.ready, events.Phase.MERGING, Rounds.merge),
)
_CONTINUES = (
    Exit(lambda rounds: not rounds.over, events.Phase.COLLECTING, Rounds.next_round),
    Exit(lambda rounds: rounds.over, events.Phase.DONE, Rounds.finish),
)
_AFTER_THE_END: Mapping[type[events.Event], Transition] = {
    events.Joined: Transition(Rounds.join_late),
    events.Lost: Transition(Rounds.lose),
    events.Switched: Transition(Rounds.switch),
    events.Expelled: Transition(Rounds.expel),
    events.Arrived: Transition(Rounds.arrive_late),
    events.Failed: Transition(Rounds.fail_late),
    events.Deadline: Transition(Rounds.same),
    events.Stop: Transition(Rounds.same),
}


def _step_of_sum(to: events.Phase, enter: Callable[[Rounds], Step]) -> Mapping[type[events.Event], Transition]:
    """The row of a step of a secure sum, which ends with the last answer or failure."""
    exits = (
        Exit(lambda rounds: rounds.goes_on, to, enter),
        Exit(lambda rounds: rounds.answered, events.Phase.MERGING, Rounds.merge_nothing),
    )
    return {
        events.Joined: Transition(Rounds.join),
        events.Lost: Transition(Rounds.lose),
        events.Switched: Transition(Rounds.switch),
        events.Expelled: Transition(Rounds.expel),
        events.Arrived: Transition(Rounds.answer, exits),
        events.Failed: Transition(Rounds.fail_late, exits),
        events.Deadline: Transition(Rounds.same),
        events.Stop: _STOP,
    }


#: The whole truth about phases: the events that are legal in each, what they change, and where they lead.
TABLE: Mapping[events.Phase, Mapping[type[events.Event], Transition]] = {
    events.Phase.GATHERING: {
        events.Joined: Transition(Rounds.join, _STARTS),
        events.StillConnected: Transition(Rounds.stay_connected, _STARTS),
        events.Lost: Transition(Rounds.lose),
        events.Switched: Transition(Rounds.switch),
        events.Expelled: Transition(Rounds.expel, _STARTS),
        events.WaitEnded: Transition(Rounds.end_wait, _STARTS),
        events.Stop: _STOP,
    },
    events.Phase.COLLECTING: {
        events.Joined: Transition(_selecting(Rounds.join)),
        events.Lost: Transition(Rounds.lose),
        events.Switched: Transition(_selecting(Rounds.switch)),
        events.Expelled: Transition(Rounds.expel),
        events.Arrived: Transition(_selecting(Rounds.arrive), _MERGES),
        events.Failed: Transition(_selecting(Rounds.fail), _MERGES),
        events.Deadline: Transition(Rounds.pass_deadline, _MERGES),
        events.Stop: _STOP,
    },
    events.Phase.SHARING: _step_of_sum(
        events.Phase.MASKING, lambda rounds: rounds.asked(events.Stage.SHARE, events.Stage.MASK)
    ),
    events.Phase.MASKING: _step_of_sum(
        events.Phase.REVEALING, lambda rounds: rounds.asked(events.Stage.MASK, events.Stage.REVEAL)
    ),
    events.Phase.REVEALING: _step_of_sum(events.Phase.MERGING, Rounds.merge_sum),
    events.Phase.MERGING: {
        events.Joined: Transition(Rounds.join),
        events.Lost: Transition(Rounds.lose),
        events.Switched: Transition(Rounds.switch),
        events.Expelled: Transition(Rounds.expel),
        events.Merged: Transition(Rounds.count_merge, _CONTINUES),
        events.Stop: _STOP,
    },
    events.Phase.DONE: {**_AFTER_THE_END, events.EvaluationAborted: _STOP},
    events.Phase.STOPPED: _AFTER_THE_END,
}
