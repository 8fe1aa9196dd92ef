"""Clocks, virtual and real, which are passed to all code of a run that needs the time.

:meth:`Clock.now` is the run's time (virtual or wall), on which the run's decisions depend. :meth:`Clock.stopwatch` is
real elapsed time, for reports and liveness; no decision of a virtual run depends on it. Only waits for locks, progress
lines and the duration of commands read the machine's clock directly.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """The interface of clocks."""

    def now(self) -> float:
        """The run's time [s], from 0."""
        ...

    def advance_to(self, at: float) -> None:
        """Advance the run's time to ``at`` [s]; ignored by a wall clock."""
        ...

    @property
    def virtual(self) -> bool:
        """Whether time advances only by :meth:`advance_to`."""
        ...

    def stopwatch(self) -> float:
        """Real monotonic time [s], for reports and liveness."""
        ...

    def utc(self, at: float | None = None) -> str:
        """Real date and time, ISO 8601 with milliseconds, for logs, at a time of the stopwatch [s]; None for now."""
        ...

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds`` of real time [s], e.g. until another process is ready."""
        ...


class _RealTime:
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def stopwatch(self) -> float:
        return time.monotonic()

    def utc(self, at: float | None = None) -> str:
        past = 0.0 if at is None else time.monotonic() - at
        return (datetime.now(UTC) - timedelta(seconds=past)).isoformat(timespec="milliseconds")


class VirtualClock(_RealTime):
    """A simulated clock that jumps from event to event, starting at ``start`` [s]."""

    virtual = True

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The run's time [s]."""
        return self._now

    def advance_to(self, at: float) -> None:
        """Jump to ``at`` [s].

        Raises:
            ValueError: ``at`` lies in the past.
        """
        if at < self._now:
            raise ValueError(f"virtual time cannot go back from {self._now} to {at}")
        self._now = at


class WallClock(_RealTime):
    """Real time since the clock was created, plus ``start``, the run's time before a resume [s]."""

    virtual = False

    def __init__(self, start: float = 0.0) -> None:
        self._origin = time.monotonic() - start

    def now(self) -> float:
        """The run's time [s]."""
        return time.monotonic() - self._origin

    def advance_to(self, at: float) -> None:
        """Do nothing: real time advances by itself."""


def clock_for(kind: str, start: float = 0.0) -> Clock:
    """The clock of a scenario's ``kind``, ``virtual`` or ``wall``, starting at ``start`` [s]."""
    return VirtualClock(start) if kind == "virtual" else WallClock(start)
