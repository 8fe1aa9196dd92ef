"""``ipc://PATH``: ZeroMQ over a Unix socket, between processes of one machine; ``shm://PATH`` also shares memory."""

from __future__ import annotations

import os
import socket

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Listener, Transport

#: Linux's sockaddr_un holds 108 bytes including the terminating zero.
_PATH_BYTES = 107


def _check(uri: str, place: str, listening: bool) -> None:
    scheme, _, path = uri.partition("://")
    size = len(os.fsencode(path))
    if not 1 <= size <= _PATH_BYTES or "\0" in path or path == "*":
        raise InputError(place, uri, f"{scheme}://PATH with a path of 1 to {_PATH_BYTES} bytes (here {size})")


def _listen(uri: str, max_frame: int, queue: int) -> Listener:
    if _has_listener(uri.partition("://")[2]):
        # ZeroMQ would silently replace the other listener's socket file.
        raise InputError(uri, "a path where another process listens", "an unused path")
    return _zeromq.bind(uri, max_frame, queue)


def _has_listener(path: str) -> bool:
    """Whether a process listens on a Unix socket; the socket file of a dead listener does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


TRANSPORT = Transport("ipc://PATH", _check, _listen, _zeromq.dial)
#: Large bodies stay in memory that both processes map, where both can; see :mod:`fedmq.wire.transports._shared_memory`.
SHARES_MEMORY = Transport("shm://PATH", _check, _listen, _zeromq.dial)
