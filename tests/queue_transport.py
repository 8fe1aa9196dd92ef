"""A transport without ZeroMQ, ``queue://NAME``: Python's queues between the threads of one process."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Sequence
from typing import Any

from fedmq.errors import InputError
from fedmq.wire.codec import BytesLike, byte_view
from fedmq.wire.transports.base import Connection, Listener, Transport, check_received, check_sendable
from fedmq.wire.transports.registry import register

#: A listener's by its URI, a connection's by its address.
INBOXES: dict[str | bytes, queue.Queue[Any]] = {}
NUMBERS = itertools.count(1)


def take(inbox: queue.Queue[Any], timeout_s: float | None) -> Any:
    with contextlib.suppress(queue.Empty):
        return inbox.get(timeout_s != 0, timeout_s)
    return None


def put(inbox: queue.Queue[Any] | None, item: object, timeout_s: float | None = 0.0) -> bool:
    with contextlib.suppress(queue.Full):
        if inbox is not None:
            inbox.put(item, timeout_s != 0, timeout_s)
            return True
    return False


class QueueListener(Listener):
    def __init__(self, uri: str, max_frame: int, size: int) -> None:
        self.uri, self.inbox = uri, INBOXES.setdefault(uri, queue.Queue(size))

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        got = take(self.inbox, timeout_s)
        return None if got is None else (got[0], check_received(got[1]))

    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        return put(INBOXES.get(peer), [byte_view(frame) for frame in check_sendable(frames)])

    def close(self) -> None:
        INBOXES.pop(self.uri, None)


class QueueConnection(Connection):
    def __init__(self, uri: str, max_frame: int, size: int) -> None:
        self.uri, self.size, self.address = uri, size, b"%d" % next(NUMBERS)
        self.inbox = INBOXES[self.address] = queue.Queue(size)

    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        frames = take(self.inbox, timeout_s)
        return None if frames is None else check_received(frames)

    def wake(self) -> None:
        if self.inbox.empty():  # else a receive returns at once anyway
            put(self.inbox, None)

    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        views = [byte_view(frame) for frame in check_sendable(frames)]
        return put(INBOXES.setdefault(self.uri, queue.Queue(self.size)), (self.address, views), timeout_s)

    def established(self) -> int:
        return 0  # within one process no connection breaks

    def close(self) -> None:
        INBOXES.pop(self.address, None)


def check(uri: str, place: str, listening: bool) -> None:
    if not uri.removeprefix("queue://"):
        raise InputError(place, uri, "queue://NAME")


TRANSPORT = Transport("queue://NAME", check, QueueListener, QueueConnection)
register("queue", TRANSPORT)
