"""What will happen when: arrivals, deadlines and silos going on or off, in the order of the run's time.

What is due becomes an event of the rounds machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from coordinator.events import Arrived, Deadline, Event, Failed, Switched
from coordinator.participation import Trace
from fedmq.wire.log_records import EventKind
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Loss, Message

_KINDS: Mapping[type[Event], EventKind] = {
    Arrived: EventKind.ARRIVED,
    Failed: EventKind.FAILED,
    Switched: EventKind.SWITCHED,
    Deadline: EventKind.DEADLINE,
}


class EntryKind(IntEnum):
    """What is due; the order settles what is due at the same time."""

    SWITCH = 0  # who is off at a time is settled before anything else of that time
    ARRIVAL = 1
    DEADLINE = 2  # a reply that arrives on the stroke of the deadline counts


@dataclass(frozen=True, order=True)
class TimelineEntry:
    """Something due.

    Args:
        at: the run's time [s].
        due: what it is.
        index: the silo's place in the fixed order, or the round; settles what is due at the same time.
        sequence: the task's number; 0 where there is none.
        silo: who replies or goes on or off; empty for a deadline.
    """

    at: float
    kind: EntryKind
    index: int
    sequence: int = 0
    silo: str = field(default="", compare=False)


class Timeline:
    """A heap of entries."""

    def __init__(self) -> None:
        self._heap: list[TimelineEntry] = []

    def arrival(self, at: float, index: int, silo: str, sequence: int) -> None:
        """A task's outcome is due at ``at`` [s]."""
        heapq.heappush(self._heap, TimelineEntry(at, EntryKind.ARRIVAL, index, sequence, silo))

    def deadline(self, at: float, round_: int) -> None:
        """A round's deadline is due at ``at`` [s]."""
        heapq.heappush(self._heap, TimelineEntry(at, EntryKind.DEADLINE, round_))

    def next_switch(self, trace: Trace, now: float, index: int, silo: str) -> None:
        """Put on the timeline when a silo goes on or off next after ``now`` [s], if it ever does."""
        at = trace.next_change(silo, now)
        if at < math.inf:
            heapq.heappush(self._heap, TimelineEntry(at, EntryKind.SWITCH, index, silo=silo))

    def peek(self, round_: int) -> TimelineEntry | None:
        """The earliest entry; deadlines of rounds before this one, which a resumed run lacks, are passed over."""
        while self._heap and self._heap[0].kind is EntryKind.DEADLINE and self._heap[0].index < round_:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> TimelineEntry:
        """Take the earliest entry."""
        return heapq.heappop(self._heap)


def event_of(entry: TimelineEntry, outcome: Message | Failed | None, trace: Trace) -> Event:
    """What is due, as an event of the rounds machine.

    Args:
        entry: what is due.
        outcome: of the task, where it is an arrival: the reply, or why there is none.
        trace: who is on when.
    """
    match entry.kind:
        case EntryKind.DEADLINE:
            return Deadline(entry.index)
        case EntryKind.SWITCH:
            return Switched(entry.silo, trace.on(entry.silo, entry.at))
        case EntryKind.ARRIVAL:
            assert outcome is not None  # noqa: S101 - the loop waits until it is there
            if isinstance(outcome, Failed):
                return outcome
            losses = [payload.value for payload in outcome.payloads if isinstance(payload, Loss)]
            return Arrived(entry.silo, entry.sequence, losses[0] if losses else None)


def note_event(log: MessageLog, entry: TimelineEntry, event: Event, version: int, number: int) -> None:
    """Put on record what happens, when, and at which version: a replay compares it event by event.

    Args:
        log: the coordinator's.
        entry: what is due.
        event: the same, as the machine gets it.
        version: number of merges.
        number: of the event in the run.
    """
    log.event(
        _KINDS[type(event)], silo=entry.silo, sequence=entry.sequence, now=entry.at, version=version, number=number
    )
