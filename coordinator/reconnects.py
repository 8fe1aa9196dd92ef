"""Limits how often a peer that reconnects is served."""

from __future__ import annotations

import math


class ReconnectThrottle:
    """Limits reconnects: each one has all open requests sealed and queued for the peer, including models.

    The first reconnect is served immediately; another one within a beat is served when the beat is over.

    Attributes:
        waiting: peers whose reconnect is delayed.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self.waiting: set[str] = set()

    def must_wait(self, name: str, now: float, beat: float) -> bool:
        """Whether a peer that is ready has to wait.

        Args:
            name: name of the peer.
            now: stopwatch time [s].
            beat: minimum interval between two reconnects [s].
        """
        if now - self._last.get(name, -math.inf) < beat:
            self.waiting.add(name)
            return True
        self.waiting.discard(name)
        self._last[name] = now if name in self._last else -math.inf
        return False

    def expired(self, now: float, beat: float) -> list[str]:
        """Peers whose delay is over; arguments as in :meth:`must_wait`."""
        return [name for name in sorted(self.waiting) if now - self._last[name] >= beat]
