"""Transports by URI scheme: built-in, registered, and provided by installed packages.

An installed package provides a scheme by an entry point of the group ``fedmq.transports``, whose name is the scheme and
whose value is a :class:`~fedmq.wire.transports.base.Transport`. It is loaded when a URI of that scheme is first used.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points

from fedmq.errors import InputError
from fedmq.profiling import span
from fedmq.wire.transports import builtin
from fedmq.wire.transports.base import MAX_FRAME, QUEUE, Connection, Listener, Transport
from fedmq.wire.transports.shared_connections import SHARED, SharedConnection, SharedListener
from fedmq.wire.transports.tickets import ConnectionKeys, ListenerKeys

#: Entry point group of installed packages.
GROUP = "fedmq.transports"

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
#: The transports registered in this process, by scheme, without entry points that have not been loaded yet.
TRANSPORTS = {"tcp": builtin.TCP, "ipc": builtin.IPC, "shm": builtin.SHM, "memory": builtin.MEMORY}


def register(scheme: str, transport: Transport) -> None:
    """Register a scheme in this process.

    Raises:
        ValueError: not a URI scheme, or already registered.
    """
    if _SCHEME.fullmatch(scheme) is None:
        raise ValueError(f"{scheme!r} is not a URI scheme: a lower-case letter, then letters, digits, + . -")
    if scheme in TRANSPORTS:
        raise ValueError(f"the scheme {scheme} is already registered")
    TRANSPORTS[scheme] = transport


@span("start")
def listen(uri: str, *, max_frame: int = MAX_FRAME, queue: int = QUEUE, keys: ListenerKeys | None = None) -> Listener:
    """Open a listener.

    Args:
        uri: ``tcp://HOST:PORT`` (port ``*`` is any free port, host ``*`` all interfaces), ``ipc://PATH``,
            ``shm://PATH``, ``memory://NAME`` within this process, or a URI of another registered scheme; with the
            prefix ``shared+``, many peers share a connection.
        max_frame: maximum size of an accepted frame [bytes]; a peer that announces a larger one is disconnected before
            it is read.
        queue: messages queued per peer and direction.
        keys: admit only peers with these keys, on a transport that can; None admits everyone.

    Raises:
        InputError: an unknown scheme, a malformed URI, or an address that cannot be bound.
    """
    inner = uri.removeprefix(SHARED)
    transport = _checked(inner, "uri", listening=True)
    if inner != uri:
        return SharedListener(transport.listen(inner, max_frame, queue))
    return transport.listen(uri, max_frame, queue, *([keys] if transport.admits else []))


def connect(
    uri: str, *, max_frame: int = MAX_FRAME, queue: int = QUEUE, keys: ConnectionKeys | None = None
) -> Connection:
    """Open a connection; the listener may be started later.

    Args:
        uri: as for :func:`listen`, without ``*``.
        max_frame: maximum size of an accepted frame [bytes].
        queue: messages queued per direction.
        keys: keys with which the connection is admitted, on a transport that requires them.

    Raises:
        InputError: an unknown scheme or a malformed URI.
    """
    if uri.startswith(SHARED):
        return connect_shared(uri, max_frame=max_frame, queue=queue).branch(0)
    transport = _checked(uri, "uri", listening=False)
    return transport.connect(uri, max_frame, queue, *([keys] if transport.admits else []))


def connect_shared(uri: str, *, max_frame: int = MAX_FRAME, queue: int = QUEUE) -> SharedConnection:
    """Open a connection for many peers of this process, to a listener with the prefix ``shared+``.

    The queue's messages are those of all peers together; other arguments and errors as for :func:`connect`.
    """
    return SharedConnection(connect(uri.removeprefix(SHARED), max_frame=max_frame, queue=queue))


def check_uri(uri: str, place: str, *, listening: bool = False) -> None:
    """Check the form of a URI for :func:`listen` or :func:`connect` before it is used.

    ``place`` is where it was given, for the error, e.g. ``"--bind"``.

    Raises:
        InputError: an unknown scheme or a malformed URI.
    """
    _checked(uri.removeprefix(SHARED), place, listening=listening)


def _checked(uri: str, place: str, *, listening: bool) -> Transport:
    """The transport of a URI, after checking the URI's form."""
    transport = _transport_of(uri, place)
    transport.check(uri, place, listening)
    return transport


def _transport_of(uri: str, place: str) -> Transport:
    scheme, separator, _ = uri.partition("://")
    if separator and scheme in TRANSPORTS:
        return TRANSPORTS[scheme]
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if not separator or scheme not in offered:
        forms = [transport.form for transport in TRANSPORTS.values()]
        forms += [f"{name}://..." for name in sorted(offered.keys() - TRANSPORTS.keys())]
        raise InputError(place, uri, f"{', '.join(forms[:-1])} or {forms[-1]}")
    point = offered[scheme]
    entry_place, allowed = (
        f"{place}: entry point {scheme} of {GROUP}",
        "the name of a fedmq.wire.transports.base.Transport",
    )
    try:
        loaded = point.load()
    except Exception as error:
        raise InputError(entry_place, f"{point.value}: {type(error).__name__}: {error}", allowed) from error
    if not isinstance(loaded, Transport):
        raise InputError(entry_place, f"{point.value}: a {type(loaded).__name__}", allowed)
    register(scheme, loaded)
    return loaded
