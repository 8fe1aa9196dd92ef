"""Handshakes and sessions of a coordinator's peers."""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.wire.handshake import Responded
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


@dataclass(frozen=True)
class PendingHandshake:
    """A handshake between welcome and ready.

    Args:
        hello: SHA-256 of the hello.
        welcome: its answer.
        responded: state of the handshake.
    """

    hello: bytes
    welcome: tuple[bytes, bytes]
    responded: Responded
