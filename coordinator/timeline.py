"""Timeline of a run: outcomes of tasks, deadlines and availability changes in order of the run's time.

An outcome, a reply or a failure, is stored until it is due. A due entry becomes an event of the rounds machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from coordinator import round_events as events
from coordinator.counters import Counters
from coordinator.faults import FaultInjector
from coordinator.participation import Trace
from coordinator.run_context import RunContext
from coordinator.secure_sums import Answer, SecureSums
from fedmq.clock import Clock
from fedmq.federation.faults import FailureReason, TaskOutcome
from fedmq.federation.protocol import SiloFacts, Update
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.message_log import MessageLog

_KINDS: Mapping[type[events.Event], TimelineEvent] = {
    events.Arrived: TimelineEvent.ARRIVED,
    events.Failed: TimelineEvent.FAILED,
    events.Switched: TimelineEvent.SWITCHED,
    events.Deadline: TimelineEvent.DEADLINE,
}


class EntryKind(IntEnum):
    """Kind of an entry; entries due at the same time are handled in this order."""

    SWITCH = 0  # availability at a time is updated before anything else
    ARRIVAL = 1
    DEADLINE = 2  # a reply that arrives exactly at the deadline counts


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """An entry of the timeline."""

    at: float  # the run's time [s]
    kind: EntryKind
    index: int  # the silo's index in the fixed order, or the round of a deadline; breaks ties
    sequence: int = 0  # number of the task; 0 if there is none
    # The silo that replies or changes its availability; empty for a deadline.
    silo: str = field(default="", compare=False)
    cause: int | None = field(default=None, compare=False)  # number of the log record that led to a deadline


class Timeline:
    """Entries in order of time."""

    def __init__(self) -> None:
        self._heap: list[TimelineEntry] = []

    def begin(self, trace: Trace, now: float, silos: Mapping[str, SiloFacts]) -> list[str]:
        """Add each silo's first availability change after ``now`` [s]; returns the silos that are off."""
        for name, facts in silos.items():
            self.next_switch(trace, now, facts.index, name)
        return [name for name in silos if not trace.on(name, now)]

    def arrival(self, at: float, index: int, silo: str, sequence: int) -> None:
        """Add a task's outcome at ``at`` [s]."""
        heapq.heappush(self._heap, TimelineEntry(at, EntryKind.ARRIVAL, index, sequence, silo))

    def deadline(self, at: float, round_: int, cause: int | None) -> None:
        """Add a round's deadline at ``at`` [s]; ``cause`` is the number of the log record that led to it."""
        heapq.heappush(self._heap, TimelineEntry(at, EntryKind.DEADLINE, round_, cause=cause))

    def next_switch(self, trace: Trace, now: float, index: int, silo: str) -> None:
        """Add the silo's first availability change after ``now`` [s], if there is one."""
        at = trace.next_change(silo, now)
        if at < math.inf:
            heapq.heappush(self._heap, TimelineEntry(at, EntryKind.SWITCH, index, silo=silo))

    def peek(self, round_: int) -> TimelineEntry | None:
        """The earliest entry; drops deadlines of earlier rounds, which a resumed run does not have."""
        while self._heap and self._heap[0].kind is EntryKind.DEADLINE and self._heap[0].index < round_:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> TimelineEntry:
        """Remove and return the earliest entry."""
        return heapq.heappop(self._heap)


def event_of(entry: TimelineEntry, outcome: Update | Answer | events.Failed | None, trace: Trace) -> events.Event:
    """Convert a due entry to an event of the rounds machine; ``outcome`` is that of an arrival."""
    match entry.kind:
        case EntryKind.DEADLINE:
            return events.Deadline(entry.index)
        case EntryKind.SWITCH:
            return events.Switched(entry.silo, trace.on(entry.silo, entry.at))
        case EntryKind.ARRIVAL:
            assert outcome is not None  # noqa: S101 - the loop waits for it
            if isinstance(outcome, events.Failed):
                return outcome
            return events.Arrived(entry.silo, entry.sequence, outcome.loss)


def note_event(
    log: MessageLog, entry: TimelineEntry, event: events.Event, version: int, number: int, cause: int | None
) -> int:
    """Log an event with its time and version, by which a replay compares runs; returns the number of its record."""
    return log.event(
        _KINDS[type(event)],
        silo=entry.silo,
        sequence=entry.sequence,
        now=entry.at,
        version=version,
        number=number,
        caused_by=cause,
    )


def drawn_outcome(
    run_context: RunContext, fault_injector: FaultInjector, task: events.Send, silo: SiloFacts, sums: SecureSums | None
) -> TaskOutcome:
    """The outcome of a new task or step, according to the cost model and the scenario's faults."""
    if sums is not None and task.stage is not events.Stage.TRAIN:
        return sums.outcome(task, fault_injector)
    work = run_context.cost.duration(silo.name, task.sequence, run_context.samples[silo.index])
    outcome = fault_injector.outcome(silo.name, task.sequence, task.base_version, work, task.cause)
    if run_context.protocol.eligible(silo):
        return outcome
    return replace(outcome, due=outcome.issued_at, fails=FailureReason.NOT_ELIGIBLE, sent=False)


class Outcomes:
    """The first outcome of each pending task, and when it is due."""

    def __init__(
        self,
        silos: Mapping[str, SiloFacts],
        # Arrival time [s] of each pending task's outcome, by silo, from a checkpoint; infinite on a wall clock.
        due: dict[str, float],
        clock: Clock,
        timeline: Timeline,
        fault_injector: FaultInjector,  # knows the delays of replies on a wall clock
        log: MessageLog,
        counters: Counters,
    ) -> None:
        self.due = due
        self._silos, self._clock, self._timeline = silos, clock, timeline
        self._fault_injector, self._log, self._counters = fault_injector, log, counters
        self._stored: dict[tuple[str, int], Update | Answer | events.Failed] = {}
        self._causes: dict[tuple[str, int], int | None] = {}

    def schedule_saved(self, pending: Mapping[str, events.PendingTask]) -> None:
        """Put the arrivals of a checkpoint on the timeline; on a wall clock their times are unknown."""
        for silo, at in self.due.items():
            if at < math.inf:
                self._timeline.arrival(at, self._silos[silo].index, silo, pending[silo].sequence)

    def expect(self, silo: str, sequence: int, at: float) -> float:
        """A task is issued, or issued again, with a virtual arrival ``at`` [s]; returns when its outcome is due [s]."""
        if silo not in self.due:
            self.due[silo] = math.inf
            if self._clock.virtual:
                self.due[silo] = at
                self._timeline.arrival(at, self._silos[silo].index, silo, sequence)
        return self.due[silo]

    def get(self, silo: str, sequence: int) -> Update | Answer | events.Failed | None:
        """The stored outcome of a task; None if there is none yet."""
        return self._stored.get((silo, sequence))

    def cause_of(self, entry: TimelineEntry) -> int | None:
        """Number of the log record that led to an entry of the timeline; None if there is none."""
        return self._causes.get((entry.silo, entry.sequence), entry.cause)

    def allow(self, entry: TimelineEntry) -> bool:
        """Whether an entry of the timeline can be handled: it is due and, for a task, the outcome has arrived."""
        if self._clock.virtual:
            return entry.kind is not EntryKind.ARRIVAL or self.get(entry.silo, entry.sequence) is not None
        return entry.at <= self._clock.now()

    def update(self, silo: str, sequence: int) -> Update:
        """The update in the reply to a task that did not fail."""
        outcome = self.get(silo, sequence)
        assert isinstance(outcome, Update)  # noqa: S101 - the rounds machine merges no failed tasks
        return outcome

    def taken(self, replies: Sequence[events.Arrived]) -> dict[str, Update | Answer]:
        """The replies of a stage of a secure sum, which is over: its tasks have other outcomes in the next one."""
        found = {reply.silo: self.get(reply.silo, reply.sequence) for reply in replies}
        for reply in replies:
            self.remove(reply.silo, reply.sequence)
        return {name: each for name, each in found.items() if isinstance(each, Update | Answer)}

    def is_open(self, pending: Mapping[str, events.PendingTask], silo: str, sequence: int) -> bool:
        """Whether a task is pending and has no outcome yet."""
        task = pending.get(silo)
        return task is not None and task.sequence == sequence and (silo, sequence) not in self._stored

    def put(
        self,
        pending: Mapping[str, events.PendingTask],
        silo: str,
        sequence: int,
        outcome: Update | Answer | events.Failed,
        after: float | None = None,
        *,
        cause: int | None,
    ) -> None:
        """Store the outcome of a pending task; the first one counts. The timeline decides when it is handled.

        ``after`` is its delay on a wall clock [s]; None for that of the scenario's faults.
        """
        if not self.is_open(pending, silo, sequence):
            # The task is merged or given up, or its first outcome is waiting on the timeline.
            self.repeated(silo, sequence, cause)
            return
        self._stored[silo, sequence], self._causes[silo, sequence] = outcome, cause
        if not self._clock.virtual:
            after = 0.0 if isinstance(outcome, Answer) else after
            at = self._clock.now() + (self._fault_injector.delay(silo) if after is None else after)
            self._timeline.arrival(at, self._silos[silo].index, silo, sequence)

    def repeated(self, silo: str, sequence: int | None, cause: int | None) -> None:
        """Note an outcome that does not count, because another one of its task or step does."""
        reason = events.DiscardReason.DUPLICATE
        self._counters.discarded[reason] += 1
        self._log.note(LogEvent.REPLY_DISCARDED, silo=silo, sequence=sequence, reason=reason, caused_by=cause)

    def remove(self, silo: str, sequence: int) -> None:
        """The outcome of a silo's pending task has been handled."""
        self.forget(silo, sequence)
        self.due.pop(silo, None)

    def fail(self, failed: events.Failed, cause: int | None) -> None:
        """A task failed; ``cause`` is the number of the log record of that event."""
        self.remove(failed.silo, failed.sequence)
        self._counters.failed += 1
        self._counters.failures[failed.reason] += 1
        self._log.note(
            LogEvent.TASK_FAILED, silo=failed.silo, sequence=failed.sequence, reason=failed.reason, caused_by=cause
        )

    def discard(self, discarded: events.Discard) -> None:
        """The reply to a task is not merged."""
        silo, sequence, reason = discarded.silo, discarded.sequence, discarded.reason
        if reason is events.DiscardReason.DUPLICATE:
            self.forget(silo, sequence)
        else:
            self.remove(silo, sequence)
        self._counters.discarded[reason] += 1
        self._log.note(LogEvent.REPLY_DISCARDED, silo=silo, sequence=sequence, reason=reason, caused_by=discarded.cause)

    def forget(self, silo: str, sequence: int) -> None:
        """Drop a stored outcome; the silo may have another pending task."""
        self._stored.pop((silo, sequence), None)
        self._causes.pop((silo, sequence), None)
