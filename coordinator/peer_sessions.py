"""Sessions of a coordinator's peers."""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.wire.sealed_sessions import Session


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
