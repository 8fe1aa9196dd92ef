"""Limits on peers: rates per key, over all of its connections, how much is remembered about them, and what is logged.

A limited number of unauthenticated frames per minute is logged one by one, the rest as one count. After a restart,
messages of sessions with the earlier process are counted separately. ``coordinator/sessions.py`` decides on refusals.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.wire.log_events import LogEvent
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Reason, ShortHeader

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class RateLimit:
    """A rate limit as a token bucket."""

    most: int  # maximum number in a burst
    at: float = 0.0  # stopwatch time of the last change [s]
    per_second: float = 1.0  # how many more are allowed per second

    def __post_init__(self) -> None:
        self._left = float(self.most)

    def left(self, now: float) -> bool:
        """Whether one is allowed at a stopwatch time [s]."""
        more = self.per_second * max(0.0, now - self.at)
        self._left, self.at = max(self._left, min(self.most, self._left + more)), now
        return self._left >= 1

    def take(self, now: float) -> bool:
        """Count one at a stopwatch time [s]; returns whether it is allowed."""
        allowed = self.left(now)
        self._left -= allowed
        return allowed

    def grant(self) -> None:
        """Allow one more, even beyond ``most``."""
        self._left += 1


def peer_rate_limits(most: int, per_second: float = 1.0) -> defaultdict[Hashable, RateLimit]:
    """The same rate limit for each peer, by the name of its accepted key; arguments as for :class:`RateLimit`."""
    return defaultdict(lambda: RateLimit(most, per_second=per_second))


class BoundedDict(dict[K, V]):
    """A dict that forgets its oldest entries; a key that is set again keeps its place."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Set an entry, and forget the oldest one if there are too many."""
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


#: Name in the log of a sender that has not proven who it is.
UNKNOWN = "unknown"
#: Refusals logged per minute, of one connection and of all.
PER_CONNECTION = 20
PER_MINUTE = 100
_WINDOW_SECONDS = 60.0
#: Time after which the messages of former sessions are noted as one count [s]; most arrive together.
_FORMER_SECONDS = 10.0
#: Maximum number of sessions of this process that are remembered; the oldest are forgotten.
_MAX_SESSIONS = 4096


class RefusalLog:
    """Refusals of frames whose sender is unproven; anyone who reaches the port can cause them at any rate."""

    def __init__(self, log: MessageLog, clock: Clock) -> None:
        self._log, self._clock = log, clock
        self._began = -math.inf
        self._logged: Counter[bytes] = Counter()
        self._unlogged = 0

    def add(self, connection: bytes, error: RemoteWireError, size: int) -> None:
        """Log a refusal of frames of a size [bytes], or count it if enough have been logged in this minute."""
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
            self._log.note(LogEvent.REFUSALS_COUNTED, count=self._unlogged)
        self._unlogged = 0


class StaleSessions:
    """Messages of sessions that peers had with an earlier process of this coordinator, which cannot open them.

    A restart leaves such messages in the peers' queues. They are dropped like any message without a session. So are
    those that arrived before their connection broke, but are read after this process could not send to their peer.
    """

    def __init__(self, log: MessageLog, clock: Clock, *, restarted: bool) -> None:
        self._log, self._clock, self._restarted = log, clock, restarted
        self._known, self._broken = BoundedDict[bytes, None](_MAX_SESSIONS), BoundedDict[bytes, None](_MAX_SESSIONS)
        self._dropped, self._first = 0, math.inf

    def know(self, session: bytes) -> None:
        """Remember a session of this process, whose refused messages are not of a former one."""
        self._known[session] = None

    def end(self, session: bytes) -> None:
        """The connection of a session is broken; what arrived before that may still be queued."""
        self._broken[session] = None

    def drop(self, header: Header | ShortHeader | None, error: RemoteWireError) -> bool:
        """Whether an unauthenticated message is of a former or broken session; those of former ones are counted."""
        if header is not None and header.session in self._broken and error.reason == Reason.UNKNOWN_SESSION:
            return True
        if not self._restarted or header is None or not header.session or header.session in self._known:
            return False
        ready = isinstance(header, Header) and header.kind is Kind.READY
        if error.reason != (Reason.UNEXPECTED if ready else Reason.UNKNOWN_SESSION):
            return False
        self._dropped, self._first = self._dropped + 1, min(self._first, self._clock.stopwatch())
        return True

    def note(self, *, all_: bool = False) -> None:
        """Log the number of messages dropped since the last note, if some time has passed since the first of them."""
        if self._dropped and (all_ or self._clock.stopwatch() - self._first >= _FORMER_SECONDS):
            self._log.note(LogEvent.STALE_SESSIONS, count=self._dropped)
            self._dropped, self._first = 0, math.inf
