"""Log records of refused, unauthenticated frames: a limited number per minute, the rest as one count."""

from __future__ import annotations

import math
from collections import Counter

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.log_records import NoteKind
from fedmq.wire.message_log import MessageLog

#: Name in the log of a sender that has not proven who it is.
UNKNOWN = "unknown"
#: Refusals logged per minute, of one connection and of all.
PER_CONNECTION = 20
PER_MINUTE = 100
_WINDOW_SECONDS = 60.0


class RefusalLog:
    """Refusals of frames whose sender is unproven; anyone who reaches the port can cause them at any rate.

    Args:
        log: the message log of this process.
        clock: clock for the windows of one minute.
    """

    def __init__(self, log: MessageLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._began = -math.inf
        self._logged: Counter[bytes] = Counter()
        self._unlogged = 0

    def add(self, connection: bytes, error: RemoteWireError, size: int) -> None:
        """Log a refusal, or count it if enough of them have been logged in this minute.

        Args:
            connection: identifies the connection on which the frames arrived.
            error: why they were refused.
            size: size of the frames [bytes].
        """
        now = self._clock.stopwatch()
        if now - self._began >= _WINDOW_SECONDS:
            self.flush()
            self._began = now
            self._logged.clear()
        if self._logged[connection] >= PER_CONNECTION or self._logged.total() >= PER_MINUTE:
            self._unlogged += 1
            return
        self._logged[connection] += 1
        self._log.refused(UNKNOWN, error.reason, error.detail, size)

    def flush(self) -> None:
        """Log the number of refusals that were counted since the last call."""
        if self._unlogged:
            self._log.note(NoteKind.REFUSALS_COUNTED, count=self._unlogged)
        self._unlogged = 0
