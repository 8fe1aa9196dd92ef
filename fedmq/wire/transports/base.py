"""The interface of transports: the coordinator's Listener, and the Connections of silos and the evaluator.

A transport carries messages of two opaque frames, header and sealed body, between processes; some also messages of
three, whose last is a part of the body that is the same for many peers. Its users depend only on these two interfaces.

A listener or connection is created after any fork and used only by the thread that created it, except for
:meth:`Connection.wake`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from fedmq.wire.codec import MAX_BODY, BytesLike, fresh_memory
from fedmq.wire.transports.tickets import ConnectionKeys

#: Frames of a message: unencrypted header and body.
FRAMES = 2
#: Frames of a message to a peer whose body has a part that is sealed once for many peers.
MOST_FRAMES = 3
#: Messages queued per peer and direction before ``send`` waits or returns False.
QUEUE = 64
#: Maximum size of a frame that a peer may send [bytes]: a body and its tag.
MAX_FRAME = MAX_BODY + 16


class ConnectionRefusal(Enum):
    """Why a connection is not admitted."""

    REFUSED = "the listener does not accept this key"
    FOREIGN = "the listener does not have the expected key, or speaks another protocol"


class Listener(ABC):
    """The end that many peers connect to."""

    uri: str  # URI to which peers connect, with the actual port
    shares: bool = False  # whether it can send messages of three frames, and its peers receive them

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """Receive the next message of any peer.

        Args:
            timeout_s: how long to wait [s]; 0 polls, None waits forever.

        Returns:
            The peer's address (valid for :meth:`send` while it is connected) and its two frames; None if there is no
            message within ``timeout_s``.

        Raises:
            RemoteWireError: reason ``malformed``: a message without exactly two frames, which is discarded; or
                ``unknown_sender``: a peer was not admitted.
        """

    def cut(self, peer: bytes) -> None:  # noqa: B027 - a transport without connections has nothing to do
        """End the connection of a peer, which may then connect again."""

    def keep(self, peer: bytes) -> None:  # noqa: B027 - likewise
        """A peer has completed a handshake: if its key has too many connections, those without one are closed."""

    def room(self, size: int) -> memoryview:
        """Allocate memory of a size [bytes], with undefined contents, for the sealed body of the next message."""
        return fresh_memory(size)

    @abstractmethod
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        """Queue a message for a peer without waiting.

        Args:
            peer: its address, from :meth:`receive`.
            frames: two, or three if it shares; they must not change afterwards, as they may be sent without a copy.
                The same memory may be the third frame of messages to many peers.

        Returns:
            False if the peer is disconnected or its queue is full, in which case the message is dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""


class Connection(ABC):
    """The end that connects to a listener and reconnects automatically; the listener may be started later."""

    uri: str  # URI of the listener

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """Receive the next message.

        Call it with a timeout and check :meth:`established` between calls: after a reconnect the listener sends
        nothing until it receives a new hello.

        Args:
            timeout_s: how long to wait [s]; 0 polls, None waits forever.

        Returns:
            The message's two or three frames; None if there is none within ``timeout_s`` or :meth:`wake` was called.

        Raises:
            RemoteWireError: reason ``malformed``: a message of another number of frames, which is discarded.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a waiting :meth:`receive`, or otherwise the next one, return immediately with a message or None.

        The only method that other threads may call. It never waits; after :meth:`close` it does nothing.
        """

    def room(self, size: int) -> memoryview:
        """Allocate memory of a size [bytes], with undefined contents, for the sealed body of the next message."""
        return fresh_memory(size)

    @abstractmethod
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        """Queue a message.

        Args:
            frames: two; they must not change afterwards, as they may be sent without a copy.
            timeout_s: how long to wait for room in the queue [s]; None waits forever.

        Returns:
            False if the queue stays full, in which case the message is dropped.
        """

    @abstractmethod
    def established(self) -> int:
        """Number of connections made to the listener so far; always 0 for a transport whose connections cannot break.

        When it increases beyond 1, the session is lost: to the listener the reconnected process is a new peer, which
        has to start with a hello.
        """

    def reconnect(self) -> None:  # noqa: B027 - a transport without connections has nothing to do
        """Drop the connection, if there is one, and make a new one; what is queued may be lost."""

    def keep(self) -> None:  # noqa: B027 - likewise
        """The listener has completed a handshake: from now on, large messages are expected on this connection."""

    def use_keys(self, keys: ConnectionKeys) -> bool:
        """Use other keys from the next :meth:`reconnect` on, if this connection uses keys; whether they differ."""
        del keys
        return False

    def refusal(self) -> ConnectionRefusal | None:
        """Why the connection was not admitted since the last call; None if it was, or is not decided yet."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""


@dataclass(frozen=True)
class Transport:
    """One URI scheme."""

    form: str  # form of its URIs, for error messages, e.g. ``"tcp://HOST:PORT"``.
    # ``(uri, place, listening)``: raises an InputError that names ``place`` if the URI does not have this form, or one
    # cannot listen at it (``listening``) or connect to it.
    check: Callable[[str, str, bool], None]
    # ``(uri, max_frame, queue)``: opens a listener; raises InputError if the address cannot be bound.
    listen: Callable[..., Listener]
    connect: Callable[..., Connection]  # ``(uri, max_frame, queue)``: opens a connection
    # Whether ``listen`` and ``connect`` take keys as a fourth argument, to admit only peers with them. ``max_frame`` is
    # the largest frame accepted from a peer [bytes], ``queue`` the number of messages queued per peer and direction.
    # ``listen`` and ``connect`` receive only URIs that ``check`` has accepted.
    admits: bool = False
