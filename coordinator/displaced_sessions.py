"""Sessions that a newer one of the same name has replaced, to notice a silo that runs twice.

A process ends its session before it begins another, so it sends nothing more on the earlier one. If a replaced session
still sends heartbeats, a second process has the same key.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.peer_sessions import Peer
from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.storage.logs import Logger
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.limits import BoundedDict
from fedmq.wire.messages import Kind

#: Maximum number of replaced sessions that are remembered; the oldest are forgotten.
_MOST = 4096


class DisplacedSessions:
    """The replaced sessions of a roster.

    Args:
        clock: clock for the time since a session was replaced.
        patience: factor of the interval between heartbeats.
        logger: the log for operators.
    """

    def __init__(self, clock: Clock, patience: float, logger: Logger) -> None:
        self._clock, self._logger = clock, logger
        self._in_transit = BEAT_SECONDS * patience / 2
        self._replaced = BoundedDict[bytes, tuple[Peer, float]](_MOST)

    def add(self, earlier: Peer, address: bytes) -> None:
        """Remember a session unless the one that replaced it is on the same connection, at ``address``."""
        if earlier.address != address:
            self._replaced[earlier.address] = earlier, self._clock.stopwatch()

    def still_used(self, address: bytes, frames: Sequence[memoryview]) -> tuple[bool, Peer | None]:
        """Whether frames are an authentic message of a replaced session.

        Args:
            address: where the frames came from.
            frames: the frames.

        Returns:
            Whether they are, so that they are dropped; and the session, once: to tell its process that it is replaced.
            Messages that were in transit when the session was replaced are dropped only.
        """
        peer, since = self._replaced.get(address, (None, 0.0))
        if peer is None:
            return False, None
        try:
            opened = peer.session.open(frames)
        except RemoteWireError:
            return False, None
        in_transit = self._clock.stopwatch() - since < self._in_transit
        if in_transit or opened.header.kind is not Kind.HEARTBEAT:
            return True, None
        del self._replaced[address]
        what = f"{peer.name} joined again while its earlier session was alive: is it running twice?"
        self._logger.warning(what, peer=peer.name)
        return True, peer
