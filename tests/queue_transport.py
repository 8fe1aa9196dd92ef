"""A transport without ZeroMQ, ``queue://NAME``: Python's queues between the threads of one process."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Sequence

from fedmq.errors import InputError
from fedmq.wire.codec import BytesLike, byte_view
from fedmq.wire.transports.base import Connection, Listener, Transport, check_received, check_sendable
from fedmq.wire.transports.registry import register


class QueueListener(Listener):
    def __init__(self, uri: str, max_frame: int, size: int) -> None:
        self.uri, self.queue = uri, queue_at(uri, size)

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        with contextlib.suppress(queue.Empty):
            peer, frames = self.queue.get(timeout_s != 0, timeout_s)
            return peer, check_received(frames)
        return None

    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        views = [byte_view(frame) for frame in check_sendable(frames)]
        with contextlib.suppress(queue.Full, KeyError):
            CONNECTED[peer].queue.put_nowait(views)
            return True
        return False

    def close(self) -> None:
        QUEUES.pop(self.uri, None)


class QueueConnection(Connection):
    def __init__(self, uri: str, max_frame: int, size: int) -> None:
        self.uri, self.size, self.peer = uri, size, b"%d" % next(NUMBERS)
        self.queue: queue.Queue[list[memoryview] | None] = queue.Queue(size)
        CONNECTED[self.peer] = self

    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        with contextlib.suppress(queue.Empty):
            frames = self.queue.get(timeout_s != 0, timeout_s)
            return None if frames is None else check_received(frames)
        return None

    def wake(self) -> None:
        if self.queue.empty():  # else a receive returns at once anyway
            self.queue.put(None)

    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        views = [byte_view(frame) for frame in check_sendable(frames)]
        with contextlib.suppress(queue.Full):
            queue_at(self.uri, self.size).put((self.peer, views), timeout_s != 0, timeout_s)
            return True
        return False

    def established(self) -> int:
        return 0

    def close(self) -> None:
        CONNECTED.pop(self.peer, None)


Arrivals = queue.Queue[tuple[bytes, list[memoryview]]]
QUEUES: dict[str, Arrivals] = {}
CONNECTED: dict[bytes, QueueConnection] = {}
NUMBERS = itertools.count(1)


def queue_at(uri: str, size: int) -> Arrivals:
    """The queue of a URI; whoever comes first makes it."""
    return QUEUES.setdefault(uri, queue.Queue(size))


def check(uri: str, place: str, listening: bool) -> None:
    if uri == "queue://":
        raise InputError(place, uri, "queue://NAME")


TRANSPORT = Transport("queue://NAME", check, QueueListener, QueueConnection)
register("queue", TRANSPORT)
