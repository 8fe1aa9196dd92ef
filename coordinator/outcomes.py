"""Outcomes of pending tasks, replies or failures, stored until they are due on the timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from coordinator.counters import Counters
from coordinator.events import Discard, DiscardReason, Failed, Send
from coordinator.fault_injection import FaultInjector
from coordinator.rounds import PendingTask
from coordinator.run_context import RunContext
from coordinator.timeline import EntryKind, Timeline, TimelineEntry
from fedmq.clock import Clock
from fedmq.federation.faults import FailureReason, TaskOutcome
from fedmq.federation.protocol import SiloFacts
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Message


def drawn_outcome(run_context: RunContext, fault_injector: FaultInjector, task: Send, silo: SiloFacts) -> TaskOutcome:
    """The outcome of a new task, according to the cost model and the scenario's faults.

    Args:
        run_context: fixed facts of the run.
        fault_injector: applies the faults.
        task: the task.
        silo: its silo, with the modalities that it has at the task's base version.
    """
    work = run_context.cost.duration(silo.name, task.sequence, run_context.samples[silo.index])
    outcome = fault_injector.outcome(silo.name, task.sequence, task.base_version, work, task.cause)
    if run_context.protocol.eligible(silo):
        return outcome
    return replace(outcome, due=outcome.issued_at, fails=FailureReason.NOT_ELIGIBLE, sent=False)


class Outcomes:
    """The first outcome of each pending task, and when it is due.

    Args:
        silos: facts of the silos, by name.
        due: arrival time [s] of each pending task's outcome, by silo, from a checkpoint; infinite on a wall clock.
        clock: the run's clock.
        timeline: receives the arrivals.
        fault_injector: knows the delays of replies on a wall clock.
        log: the coordinator's message log.
        counters: the run's counters.

    Attributes:
        due: arrival times [s] as above.
    """

    def __init__(
        self,
        silos: Mapping[str, SiloFacts],
        due: dict[str, float],
        clock: Clock,
        timeline: Timeline,
        fault_injector: FaultInjector,
        log: MessageLog,
        counters: Counters,
    ) -> None:
        self.due = due
        self._silos, self._clock, self._timeline = silos, clock, timeline
        self._fault_injector, self._log, self._counters = fault_injector, log, counters
        self._stored: dict[tuple[str, int], Message | Failed] = {}
        self._causes: dict[tuple[str, int], int | None] = {}

    def schedule_saved(self, pending: Mapping[str, PendingTask]) -> None:
        """Put the arrivals of a checkpoint on the timeline; on a wall clock their times are unknown."""
        for silo, at in self.due.items():
            if at < math.inf:
                self._timeline.arrival(at, self._silos[silo].index, silo, pending[silo].sequence)

    def expect(self, silo: str, sequence: int, at: float) -> float:
        """A task is issued, or issued again; returns when its outcome is due [s].

        Args:
            silo: the task's silo.
            sequence: number of the task.
            at: when its outcome arrives in virtual time [s].
        """
        if silo not in self.due:
            self.due[silo] = math.inf
            if self._clock.virtual:
                self.due[silo] = at
                self._timeline.arrival(at, self._silos[silo].index, silo, sequence)
        return self.due[silo]

    def get(self, silo: str, sequence: int) -> Message | Failed | None:
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

    def reply(self, silo: str, sequence: int) -> Message:
        """The stored reply to a task that did not fail."""
        message = self.get(silo, sequence)
        assert isinstance(message, Message)  # noqa: S101 - the rounds machine merges no failed tasks
        return message

    def is_open(self, pending: Mapping[str, PendingTask], silo: str, sequence: int) -> bool:
        """Whether a task is pending and has no outcome yet."""
        task = pending.get(silo)
        return task is not None and task.sequence == sequence and (silo, sequence) not in self._stored

    def put(
        self,
        pending: Mapping[str, PendingTask],
        silo: str,
        sequence: int,
        outcome: Message | Failed,
        after: float | None = None,
        *,
        cause: int | None,
    ) -> None:
        """Store the outcome of a pending task; the first one counts. The timeline decides when it is handled.

        Args:
            pending: the pending tasks, by silo.
            silo: the task's silo.
            sequence: number of the task.
            outcome: a validated reply, or the failure.
            after: delay on a wall clock [s]; None for the delay of the scenario's faults.
            cause: number of the log record of the reply, or of why the task failed; None if there is none.
        """
        if not self.is_open(pending, silo, sequence):
            # A repeated outcome: the task is merged or given up, or its first outcome is waiting on the timeline.
            reason = DiscardReason.DUPLICATE
            self._counters.discarded[reason] += 1
            self._log.note(LogEvent.REPLY_DISCARDED, silo=silo, sequence=sequence, reason=reason, caused_by=cause)
            return
        self._stored[silo, sequence], self._causes[silo, sequence] = outcome, cause
        if not self._clock.virtual:
            at = self._clock.now() + (self._fault_injector.delay(silo) if after is None else after)
            self._timeline.arrival(at, self._silos[silo].index, silo, sequence)

    def remove(self, silo: str, sequence: int) -> None:
        """The outcome of a silo's pending task has been handled."""
        self.forget(silo, sequence)
        self.due.pop(silo, None)

    def fail(self, failed: Failed, cause: int | None) -> None:
        """A task failed; ``cause`` is the number of the log record of that event."""
        self.remove(failed.silo, failed.sequence)
        self._counters.failed += 1
        self._counters.failures[failed.reason] += 1
        self._log.note(
            LogEvent.TASK_FAILED, silo=failed.silo, sequence=failed.sequence, reason=failed.reason, caused_by=cause
        )

    def discard(self, discarded: Discard) -> None:
        """The reply to a task is not merged."""
        silo, sequence, reason = discarded.silo, discarded.sequence, discarded.reason
        if reason is DiscardReason.DUPLICATE:
            self.forget(silo, sequence)
        else:
            self.remove(silo, sequence)
        self._counters.discarded[reason] += 1
        self._log.note(LogEvent.REPLY_DISCARDED, silo=silo, sequence=sequence, reason=reason, caused_by=discarded.cause)

    def forget(self, silo: str, sequence: int) -> None:
        """Drop a stored outcome; the silo may have another pending task."""
        self._stored.pop((silo, sequence), None)
        self._causes.pop((silo, sequence), None)
