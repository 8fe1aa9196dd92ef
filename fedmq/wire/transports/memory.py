"""``memory://NAME``: ZeroMQ between threads of one process, for tests."""

from __future__ import annotations

import functools
import os
import re

import zmq

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Connection, Listener, Transport

_MEMORY = re.compile(r"memory://[A-Za-z0-9_.-]{1,64}")


def _check(uri: str, place: str, listening: bool) -> None:
    if _MEMORY.fullmatch(uri) is None:
        raise InputError(place, uri, "memory://NAME with a name of 1 to 64 of A-Z a-z 0-9 _ . -")


@functools.cache
def _context(_process: int) -> zmq.Context[zmq.Socket[bytes]]:
    """The context shared by all sockets of a process, since inproc names are local to a context."""
    return zmq.Context()


def endpoint(uri: str) -> _zeromq.Endpoint:
    """The ZeroMQ endpoint of a URI of this process."""
    return _zeromq.Endpoint("inproc://" + uri.removeprefix("memory://"), _context(os.getpid()))


def _listen(uri: str, max_frame: int, queue: int) -> Listener:
    return _zeromq.bind(uri, max_frame, queue, endpoint(uri))


def _connect(uri: str, max_frame: int, queue: int) -> Connection:
    return _zeromq.dial(uri, max_frame, queue, endpoint(uri))


TRANSPORT = Transport("memory://NAME", _check, _listen, _connect)
