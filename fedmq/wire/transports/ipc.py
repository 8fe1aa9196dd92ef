"""``ipc://PATH``: ZeroMQ over a Unix socket, between processes of one machine."""

from __future__ import annotations

import os
import socket

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Listener, Transport

#: Linux's sockaddr_un holds 108 bytes including the terminating zero.
_PATH_BYTES = 107


def check(uri: str, place: str, listening: bool) -> None:
    """Check the path of ``ipc://PATH``, or of another scheme with such a path; see :class:`Transport`.

    Raises:
        InputError: the path is empty, too long, or no path of a socket.
    """
    scheme, _, path = uri.partition("://")
    size = len(os.fsencode(path))
    if not 1 <= size <= _PATH_BYTES or "\0" in path or path == "*":
        raise InputError(place, uri, f"{scheme}://PATH with a path of 1 to {_PATH_BYTES} bytes (here {size})")


def require_free(uri: str) -> None:
    """Refuse a URI at whose path a process listens.

    Raises:
        InputError: a process listens there.
    """
    if _has_listener(uri.partition("://")[2]):
        # ZeroMQ would silently replace the other listener's socket file.
        raise InputError(uri, "a path where another process listens", "an unused path")


def _listen(uri: str, max_frame: int, queue: int) -> Listener:
    require_free(uri)
    return _zeromq.bind(uri, max_frame, queue)


def _has_listener(path: str) -> bool:
    """Whether a process listens on a Unix socket; the socket file of a dead listener does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


TRANSPORT = Transport("ipc://PATH", check, _listen, _zeromq.dial)
