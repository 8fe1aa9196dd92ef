"""Timeline of a run: arrivals, deadlines and availability changes in order of the run's time.

A due entry becomes an event of the rounds machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.events import Arrived, Deadline, Event, Failed, Switched
from coordinator.participation import Trace
from fedmq.federation.protocol import SiloFacts
from fedmq.wire.log_events import TimelineEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Message
from fedmq.wire.payloads import Loss

_KINDS: Mapping[type[Event], TimelineEvent] = {
    Arrived: TimelineEvent.ARRIVED,
    Failed: TimelineEvent.FAILED,
    Switched: TimelineEvent.SWITCHED,
    Deadline: TimelineEvent.DEADLINE,
}


class EntryKind(IntEnum):
    """Kind of an entry; entries due at the same time are handled in this order."""

    SWITCH = 0  # availability at a time is updated before anything else
    ARRIVAL = 1
    DEADLINE = 2  # a reply that arrives exactly at the deadline counts


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """An entry of the timeline.

    Args:
        at: the run's time [s].
        kind: what is due.
        index: the silo's index in the fixed order, or the round of a deadline; breaks ties.
        sequence: number of the task; 0 if there is none.
        silo: the silo that replies or changes its availability; empty for a deadline.
        cause: number of the log record that led to a deadline.
    """

    at: float
    kind: EntryKind
    index: int
    sequence: int = 0
    silo: str = field(default="", compare=False)
    cause: int | None = field(default=None, compare=False)


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


def event_of(entry: TimelineEntry, outcome: Message | Failed | None, trace: Trace) -> Event:
    """Convert a due entry to an event of the rounds machine.

    Args:
        entry: the due entry.
        outcome: the task's reply, or its failure; used for arrivals only.
        trace: availability of the silos.
    """
    match entry.kind:
        case EntryKind.DEADLINE:
            return Deadline(entry.index)
        case EntryKind.SWITCH:
            return Switched(entry.silo, trace.on(entry.silo, entry.at))
        case EntryKind.ARRIVAL:
            assert outcome is not None  # noqa: S101 - the loop waits for it
            if isinstance(outcome, Failed):
                return outcome
            losses = [payload.value for payload in outcome.payloads if isinstance(payload, Loss)]
            return Arrived(entry.silo, entry.sequence, losses[0] if losses else None)


def note_event(
    log: MessageLog, entry: TimelineEntry, event: Event, version: int, number: int, cause: int | None
) -> int:
    """Log an event with its time and version; a replay compares runs event by event.

    Args:
        log: the coordinator's message log.
        entry: the due entry.
        event: the event made from it.
        version: number of merges so far.
        number: number of the event in the run.
        cause: number of the log record that led to it; None if there is none.

    Returns:
        The number of its log record.
    """
    return log.event(
        _KINDS[type(event)],
        silo=entry.silo,
        sequence=entry.sequence,
        now=entry.at,
        version=version,
        number=number,
        caused_by=cause,
    )
