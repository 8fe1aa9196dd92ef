"""The built-in transports, ZeroMQ over each kind of address.

``tcp://HOST:PORT`` is for other hosts. ``ipc://PATH`` is a Unix socket, between processes of one machine;
``shm://PATH`` also shares memory. ``memory://NAME`` is between threads of one process, for tests.
"""

from __future__ import annotations

import functools
import os
import re
import socket

import zmq

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Connection, Listener, Transport
from fedmq.wire.transports.tickets import ConnectionKeys, ListenerKeys

_TCP_FORM = "tcp://HOST:PORT"
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5}|\*)")
#: Linux's sockaddr_un holds 108 bytes including the terminating zero.
_PATH_BYTES = 107
_MEMORY = re.compile(r"memory://[A-Za-z0-9_.-]{1,64}")


# ------------------------------------------------------------------------------------------------------------ tcp
def _check_tcp(uri: str, place: str, listening: bool) -> None:
    match = _TCP.fullmatch(uri)
    if match is None:
        raise InputError(place, uri, _TCP_FORM)
    host, port = match.groups()
    if not listening and (host == "*" or port == "*"):
        raise InputError(place, uri, f"{_TCP_FORM} without *, which is for listening only")
    if port != "*" and not (0 if listening else 1) <= int(port) <= 65535:
        raise InputError(place, uri, "a port from 1 to 65535")


def _families(host: str) -> set[int]:
    """The families of the addresses of a host, e.g. AF_INET6; none of a name that this machine cannot resolve."""
    try:
        return {found[0] for found in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # UnicodeError: an empty label, or one above 63 characters
        return set()


def unknown_host(uri: str) -> str:
    """The host of a TCP URI, if it is a name that this machine cannot resolve; otherwise empty."""
    match = _TCP.fullmatch(uri)
    return "" if match is None or _families(match.group(1)) else match.group(1)


def _listen_tcp(uri: str, max_frame: int, queue: int, keys: ListenerKeys | None = None) -> Listener:
    host = _host(uri)
    interfaces = [name for _, name in socket.if_nameindex()]  # ZeroMQ knows them, too
    if host not in ("*", *interfaces) and not _families(host):
        found = f"the name {host}, which is unknown on this machine"
        raise InputError(uri, found, "an address or a name of this machine, or * for all of its addresses")
    return _zeromq.bind(uri, max_frame, queue, keys=keys, ipv6=_needs_ipv6(host))


def _connect_tcp(uri: str, max_frame: int, queue: int, keys: ConnectionKeys | None = None) -> Connection:
    return _zeromq.dial(uri, max_frame, queue, keys=keys, ipv6=_needs_ipv6(_host(uri)))


def _host(uri: str) -> str:
    return uri.removeprefix("tcp://").rpartition(":")[0]


def _needs_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address, all interfaces, or a name that has IPv6 addresses only.

    With its option for IPv6, ZeroMQ uses only the IPv6 addresses of a name that has both kinds, without it only the
    others.
    """
    return host == "*" or host.startswith("[") or _families(host) == {socket.AF_INET6}


# ---------------------------------------------------------------------------------------------------- Unix sockets
def _check_path(uri: str, place: str, listening: bool) -> None:
    scheme, _, path = uri.partition("://")
    size = len(os.fsencode(path))
    if not 1 <= size <= _PATH_BYTES or "\0" in path or path == "*":
        raise InputError(place, uri, f"{scheme}://PATH with a path of 1 to {_PATH_BYTES} bytes (here {size})")


def _listen_path(uri: str, max_frame: int, queue: int) -> Listener:
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


# ---------------------------------------------------------------------------------------------------------- memory
def _check_memory(uri: str, place: str, listening: bool) -> None:
    if _MEMORY.fullmatch(uri) is None:
        raise InputError(place, uri, "memory://NAME with a name of 1 to 64 of A-Z a-z 0-9 _ . -")


@functools.cache
def _context(_process: int) -> zmq.Context[zmq.Socket[bytes]]:
    """The context shared by all sockets of a process, since inproc names are local to a context."""
    return zmq.Context()


def memory_endpoint(uri: str) -> _zeromq.Endpoint:
    """The ZeroMQ endpoint of a URI of this process."""
    return _zeromq.Endpoint("inproc://" + uri.removeprefix("memory://"), _context(os.getpid()))


def _listen_memory(uri: str, max_frame: int, queue: int) -> Listener:
    return _zeromq.bind(uri, max_frame, queue, memory_endpoint(uri))


def _connect_memory(uri: str, max_frame: int, queue: int) -> Connection:
    return _zeromq.dial(uri, max_frame, queue, memory_endpoint(uri))


TCP = Transport(_TCP_FORM, _check_tcp, _listen_tcp, _connect_tcp, admits=True)
IPC = Transport("ipc://PATH", _check_path, _listen_path, _zeromq.dial)
#: Large bodies stay in memory that both processes map, where both can; see :mod:`fedmq.wire.transports._shared_memory`.
SHM = Transport("shm://PATH", _check_path, _listen_path, _zeromq.dial)
MEMORY = Transport("memory://NAME", _check_memory, _listen_memory, _connect_memory)
