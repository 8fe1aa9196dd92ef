"""Duplicate logins: which of a silo's sessions takes part if the silo joins again, or is started twice.

A process ends its session before it begins another one, and the connection of a killed process is closed. So if an
earlier session continues, a second process was started with the same key, perhaps in a folder without the silo's
personal state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedmq.clock import Clock
from fedmq.errors import RemoteWireError
from fedmq.storage.logs import Logger
from fedmq.wire.channel import BEAT_SECONDS, LOST_BEATS
from fedmq.wire.limits import BoundedDict
from fedmq.wire.messages import Kind
from fedmq.wire.sessions import Session


@dataclass
class Peer:
    """A peer with a session.

    Args:
        name: the name under which its key is accepted.
        address: the transport's identifier of its connection.
        session: keys and counters of the session.
        heard: stopwatch time of its last message [s].
    """

    name: str
    address: bytes
    session: Session
    heard: float


#: Maximum number of replaced sessions that are remembered; the oldest are forgotten.
_MOST = 4096


class ReplacedSessions:
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


class DuplicateLogins:
    """The new sessions of a roster that wait, at most one of each name.

    Args:
        clock: clock for the time since a session was heard.
        patience: factor of the interval between heartbeats.
    """

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock, self._beat = clock, BEAT_SECONDS * patience
        self._waiting: dict[str, tuple[Peer, float]] = {}

    def must_wait(self, peer: Peer, earlier: Peer | None) -> bool:
        """Whether a session waits until it is clear whether the earlier one of its name continues.

        Args:
            peer: the new session.
            earlier: the session with which the name has joined; None if there is none.
        """
        now = self._clock.stopwatch()
        # A process that begins a session on the same connection has ended the earlier one.
        if earlier is None or earlier.address == peer.address or now - earlier.heard > LOST_BEATS * self._beat:
            return False
        if not self.waits(peer):
            self._waiting[peer.name] = peer, now
        return True

    def waits(self, peer: Peer) -> bool:
        """Whether a session waits."""
        return self._waiting.get(peer.name, (None, 0.0))[0] is peer

    def forget(self, peer: Peer) -> None:
        """A session of this name joins, so none waits any longer."""
        self._waiting.pop(peer.name, None)

    def refused(self, alive: Peer) -> Peer | None:
        """The waiting session that a heartbeat of the earlier one refuses; it is forgotten.

        A heartbeat that was in transit when the new session began proves nothing: a proxy may deliver it seconds later,
        when its process has begun the new session itself.
        """
        peer, since = self._waiting.get(alive.name, (None, 0.0))
        if peer is None or peer is alive or self._clock.stopwatch() - since < LOST_BEATS * self._beat:
            return None
        del self._waiting[alive.name]
        return peer
