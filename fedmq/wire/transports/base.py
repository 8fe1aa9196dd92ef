"""What a transport is: a Listener (the coordinator's end), Connections (of silos and the evaluator), how both are made.

A transport carries messages of two frames from process to process. What the frames mean is no concern of it: they are
sealed before they get here. Whoever uses a transport goes through these two interfaces and no further.

A listener or connection is made after a fork, in the thread that uses it, and never leaves that thread;
:meth:`Connection.wake` alone is called from others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.wire.codec import MAX_BODY, BytesLike
from fedmq.wire.messages import Reason

#: Frames of one message: clear header and body.
FRAMES = 2
#: Messages queued per peer and direction before the sender waits or is told.
QUEUE = 64
#: Largest frame a peer may send [bytes]: a body and its tag.
MAX_FRAME = MAX_BODY + 16

FramesT = TypeVar("FramesT", bound=Sequence[BytesLike])


class Listener(ABC):
    """The end that many peers connect to.

    Attributes:
        uri: where peers connect, with the port that was taken.
    """

    uri: str

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """The next message of any peer.

        Args:
            timeout_s: how long to wait [s]; 0 only looks, None waits for ever.

        Returns:
            The peer's address (good for :meth:`send` as long as it is connected) and its two frames, or None.

        Raises:
            RemoteWireError: reason ``malformed``: the message has not two frames; it is gone, the next can be read.
        """

    @abstractmethod
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        """Queue a message for a peer; never waits. The frames must not change afterwards: they need not be copied.

        Returns:
            False if the peer is gone or its queue is full: the message was dropped, the caller decides what follows.

        Raises:
            LocalWireError: not two frames, or a frame above the largest.
        """

    @abstractmethod
    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""


class Connection(ABC):
    """The end that connects to one listener, and reconnects by itself; the listener may come up later.

    Attributes:
        uri: of the listener.
    """

    uri: str

    @abstractmethod
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """The next message's two frames; None if there is none within ``timeout_s``, or :meth:`wake` was called.

        Wait in steps and look at :meth:`established` between them: after a reconnect nothing comes until a new hello.

        Args:
            timeout_s: how long to wait [s]; 0 only looks, None waits for ever.

        Raises:
            RemoteWireError: reason ``malformed``: the message has not two frames; it is gone, the next can be read.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the :meth:`receive` that waits, or else the next one, return at once: with a message, or with None.

        The only method that other threads may call; it never waits and, after :meth:`close`, does nothing.
        """

    @abstractmethod
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        """Queue a message. The frames must not change afterwards: they need not be copied.

        Args:
            frames: two.
            timeout_s: how long to wait for room in the queue [s]; None waits for ever.

        Returns:
            False if the queue is full: the message was dropped.

        Raises:
            LocalWireError: not two frames, or a frame above the largest.
        """

    @abstractmethod
    def established(self) -> int:
        """How many connections to the listener there have been so far: when it rises above 1, the session is gone.

        After a reconnect the listener sees a new peer, which has to begin with a new hello. Always 0 where a
        connection cannot break, as within one process.
        """

    @abstractmethod
    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""


@dataclass(frozen=True)
class Transport:
    """One URI scheme.

    Args:
        form: of its URIs, for error lines: ``"tcp://HOST:PORT"``.
        check: ``(uri, place, listening)``: raises InputError naming ``place`` where the URI is not of that form, or
            cannot be listened at or connected to.
        listen: ``(uri, max_frame, queue)``: makes a listener; raises InputError if the address cannot be had.
        connect: ``(uri, max_frame, queue)``: makes a connection.

    ``max_frame`` is the largest frame accepted of a peer [bytes], ``queue`` the messages queued per peer and direction;
    both functions are called with URIs that ``check`` has passed.
    """

    form: str
    check: Callable[[str, str, bool], None]
    listen: Callable[[str, int, int], Listener]
    connect: Callable[[str, int, int], Connection]


def check_received(frames: FramesT) -> FramesT:
    """The frames of a peer's message, once they are seen to be two.

    Raises:
        RemoteWireError: reason ``malformed``: another number.
    """
    if len(frames) != FRAMES:
        raise RemoteWireError(Reason.MALFORMED, f"{len(frames)} frames, expected {FRAMES}")
    return frames


def check_sendable(frames: FramesT) -> FramesT:
    """The frames of an own message, once they are seen to be two and not too large.

    Raises:
        LocalWireError: another number, or a frame above :data:`MAX_FRAME`.
    """
    if len(frames) != FRAMES:
        raise LocalWireError(f"{len(frames)} frames, expected {FRAMES}")
    if any(memoryview(frame).nbytes > MAX_FRAME for frame in frames):
        raise LocalWireError(f"a frame above {MAX_FRAME} bytes")
    return frames
