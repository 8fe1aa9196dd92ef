"""Limits on peers: rates per key, over all of its connections, and how much is remembered about peers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class RateLimit:
    """A rate limit as a token bucket.

    Args:
        most: maximum number in a burst.
        at: stopwatch time of the last change [s].
        per_second: how many more are allowed per second.
    """

    most: int
    at: float
    per_second: float = 1.0

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


class PeerRateLimits:
    """The same rate limit for each peer, by the name of its accepted key.

    Args:
        most: maximum number in a burst, for each peer.
        per_second: how many more each peer is allowed per second.
    """

    def __init__(self, most: int, per_second: float = 1.0) -> None:
        self._most, self._per_second = most, per_second
        self._of: dict[Hashable, RateLimit] = {}

    def left(self, who: Hashable, now: float) -> bool:
        """Whether a peer is allowed one at a stopwatch time [s]."""
        return self._limit(who, now).left(now)

    def take(self, who: Hashable, now: float) -> bool:
        """Count one of a peer at a stopwatch time [s]; returns whether it is allowed."""
        return self._limit(who, now).take(now)

    def grant(self, who: Hashable, now: float) -> None:
        """Allow a peer one more, even beyond ``most``."""
        self._limit(who, now).grant()

    def _limit(self, who: Hashable, now: float) -> RateLimit:
        if who not in self._of:
            self._of[who] = RateLimit(self._most, now, self._per_second)
        return self._of[who]


class BoundedDict(dict[K, V]):
    """A dict that forgets its oldest entries; a key that is set again keeps its place.

    Args:
        most: maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Set an entry, and forget the oldest one if there are too many."""
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
