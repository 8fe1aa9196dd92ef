"""Sessions of a peer that has joined already, until it is clear whether a second process has the same key.

A process ends its session before it begins another one, and the connection of a killed process is closed. So if the
earlier session continues, a second process was started with the same key, perhaps in a folder without the silo's
personal state. The first process then keeps its place, and the second one is refused. If the earlier session is silent,
its process or its connection is gone, and the new session replaces it.
"""

from __future__ import annotations

from coordinator.peer_sessions import Peer
from fedmq.clock import Clock
from fedmq.wire.channel import BEAT_SECONDS, LOST_BEATS


class SecondProcesses:
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
