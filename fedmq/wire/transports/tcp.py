"""``tcp://HOST:PORT``: ZeroMQ over TCP, between hosts."""

from __future__ import annotations

import re
import socket

from fedmq.errors import InputError
from fedmq.wire.transports import _zeromq
from fedmq.wire.transports.base import Connection, Listener, Transport
from fedmq.wire.transports.tickets import ConnectionKeys, ListenerKeys

_FORM = "tcp://HOST:PORT"
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5}|\*)")


def _check(uri: str, place: str, listening: bool) -> None:
    match = _TCP.fullmatch(uri)
    if match is None:
        raise InputError(place, uri, _FORM)
    host, port = match.groups()
    if not listening and (host == "*" or port == "*"):
        raise InputError(place, uri, f"{_FORM} without *, which is for listening only")
    if port != "*" and not (0 if listening else 1) <= int(port) <= 65535:
        raise InputError(place, uri, "a port from 1 to 65535")


def _families(host: str) -> set[int]:
    """The families of the addresses of a host, e.g. AF_INET6; none of a name that this machine cannot resolve."""
    try:
        return {found[0] for found in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # UnicodeError: an empty label, or one above 63 characters
        return set()


def unknown_host(uri: str) -> str:
    """The host of a URI of this scheme, if it is a name that this machine cannot resolve; otherwise empty."""
    match = _TCP.fullmatch(uri)
    return "" if match is None or _families(match.group(1)) else match.group(1)


def _listen(uri: str, max_frame: int, queue: int, keys: ListenerKeys | None = None) -> Listener:
    host = _host(uri)
    interfaces = [name for _, name in socket.if_nameindex()]  # ZeroMQ knows them, too
    if host not in ("*", *interfaces) and not _families(host):
        found = f"the name {host}, which is unknown on this machine"
        raise InputError(uri, found, "an address or a name of this machine, or * for all of its addresses")
    return _zeromq.bind(uri, max_frame, queue, keys=keys, ipv6=_needs_ipv6(host))


def _connect(uri: str, max_frame: int, queue: int, keys: ConnectionKeys | None = None) -> Connection:
    return _zeromq.dial(uri, max_frame, queue, keys=keys, ipv6=_needs_ipv6(_host(uri)))


def _host(uri: str) -> str:
    return uri.removeprefix("tcp://").rpartition(":")[0]


def _needs_ipv6(host: str) -> bool:
    """Whether a host is an IPv6 address, all interfaces, or a name that has IPv6 addresses only.

    With its option for IPv6, ZeroMQ uses only the IPv6 addresses of a name that has both kinds, without it only the
    others.
    """
    return host == "*" or host.startswith("[") or _families(host) == {socket.AF_INET6}


TRANSPORT = Transport(_FORM, _check, _listen, _connect, admits=True)
