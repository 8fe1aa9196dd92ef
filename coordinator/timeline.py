"""What will happen when: arrivals, deadlines and silos going on or off, in the order of the run's time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import IntEnum


class Due(IntEnum):
    """What is due; the order settles what is due at the same time."""

    SWITCH = 0  # who is off at a time is settled before anything else of that time
    ARRIVAL = 1
    DEADLINE = 2  # a reply that arrives on the stroke of the deadline counts


@dataclass(frozen=True, order=True)
class Entry:
    """Something due.

    Args:
        at: the run's time [s].
        due: what it is.
        index: the silo's place in the fixed order, or the round; settles what is due at the same time.
        sequence: the task's number; 0 where there is none.
        silo: who replies or goes on or off; empty for a deadline.
    """

    at: float
    due: Due
    index: int
    sequence: int = 0
    silo: str = field(default="", compare=False)


class Timeline:
    """A heap of entries."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def arrival(self, at: float, index: int, silo: str, sequence: int) -> None:
        """A task's outcome is due at ``at`` [s]."""
        heapq.heappush(self._heap, Entry(at, Due.ARRIVAL, index, sequence, silo))

    def deadline(self, at: float, round_: int) -> None:
        """A round's deadline is due at ``at`` [s]."""
        heapq.heappush(self._heap, Entry(at, Due.DEADLINE, round_))

    def switch(self, at: float, index: int, silo: str) -> None:
        """A silo goes on or off at ``at`` [s]."""
        heapq.heappush(self._heap, Entry(at, Due.SWITCH, index, silo=silo))

    def peek(self, round_: int) -> Entry | None:
        """The earliest entry; deadlines of rounds before this one, which a resumed run lacks, are passed over."""
        while self._heap and self._heap[0].due is Due.DEADLINE and self._heap[0].index < round_:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> Entry:
        """Take the earliest entry."""
        return heapq.heappop(self._heap)
