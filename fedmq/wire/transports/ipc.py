"""``ipc://PATH``: ZeroMQ over a Unix socket, between processes of one machine, with large bodies in shared memory."""

from __future__ import annotations

import os
import socket

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Connection, Listener, Transport

#: Linux's sockaddr_un holds 108 bytes including the terminating zero.
_PATH_BYTES = 107


def _check(uri: str, place: str, listening: bool) -> None:
    path = uri.removeprefix("ipc://")
    size = len(os.fsencode(path))
    if not 1 <= size <= _PATH_BYTES or "\0" in path or path == "*":
        raise InputError(place, uri, f"ipc://PATH with a path of 1 to {_PATH_BYTES} bytes (here {size})")


def _listen(uri: str, max_frame: int, queue: int) -> Listener:
    if _has_listener(uri.removeprefix("ipc://")):
        # ZeroMQ would silently replace the other listener's socket file.
        raise InputError(uri, "a path where another process listens", "an unused path")
    return _zeromq.bind(uri, max_frame, queue, shares_memory=True)


def _connect(uri: str, max_frame: int, queue: int) -> Connection:
    return _zeromq.dial(uri, max_frame, queue, shares_memory=True)


def _has_listener(path: str) -> bool:
    """Whether a process listens on a Unix socket; the socket file of a dead listener does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


TRANSPORT = Transport("ipc://PATH", _check, _listen, _connect)
