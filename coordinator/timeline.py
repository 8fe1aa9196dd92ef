"""What will happen when: arrivals and deadlines in the order of the run's time."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Entry:
    """Something due.

    Args:
        at: the run's time [s].
        rank: 0 for an arrival, 1 for a deadline: a reply that arrives on the stroke of the deadline counts.
        index: the silo's place in the fixed order, or the round; settles what is due at the same time.
        sequence: the task's number; 0 for a deadline.
        silo: who replies; empty for a deadline.
    """

    at: float
    rank: int
    index: int
    sequence: int = 0
    silo: str = field(default="", compare=False)

    @property
    def deadline(self) -> bool:
        """Whether it is a round's deadline."""
        return self.rank == 1


class Timeline:
    """A heap of entries."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def arrival(self, at: float, index: int, silo: str, sequence: int) -> None:
        """A reply is due at ``at`` [s]."""
        heapq.heappush(self._heap, Entry(at, 0, index, sequence, silo))

    def deadline(self, at: float, round_: int) -> None:
        """A round's deadline is due at ``at`` [s]."""
        heapq.heappush(self._heap, Entry(at, 1, round_))

    def peek(self) -> Entry | None:
        """The earliest entry."""
        return self._heap[0] if self._heap else None

    def pop(self) -> Entry:
        """Take the earliest entry."""
        return heapq.heappop(self._heap)
