"""Time is an injected object. Nothing else that a run does reads a clock.

Waits for a lock, the pace of a progress line and the seconds of a command are the machine's own.

A clock tells two times: :meth:`Clock.now` is the run's own time (virtual or wall), which the protocol's decisions
depend on; :meth:`Clock.stopwatch` is real elapsed time, for reports and for liveness, which no decision of a virtual
run depends on.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What every clock offers."""

    def now(self) -> float:
        """The run's time [s], from 0."""
        ...

    def advance_to(self, at: float) -> None:
        """Move the run's time forward to ``at`` [s]; a wall clock moves by itself and ignores it."""
        ...

    @property
    def virtual(self) -> bool:
        """Whether time moves only when told to."""
        ...

    def stopwatch(self) -> float:
        """Real monotonic seconds, for reports and liveness."""
        ...

    def utc(self) -> str:
        """Real date and time, ISO 8601 with milliseconds, for logs."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait for real seconds, where something outside needs them."""
        ...


class _RealTime:
    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def stopwatch(self) -> float:
        return time.monotonic()

    def utc(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds")


class VirtualClock(_RealTime):
    """Time that jumps from event to event."""

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
    """Real time since the clock was made, plus ``start`` (time already spent before a resume)."""

    virtual = False

    def __init__(self, start: float = 0.0) -> None:
        self._origin = time.monotonic() - start

    def now(self) -> float:
        """The run's time [s]."""
        return time.monotonic() - self._origin

    def advance_to(self, at: float) -> None:
        """Nothing: real time moves by itself."""


def clock_for(kind: str, start: float = 0.0) -> Clock:
    """The clock a scenario asks for: ``virtual`` or ``wall``."""
    return VirtualClock(start) if kind == "virtual" else WallClock(start)
