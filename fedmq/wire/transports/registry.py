"""Transports by URI scheme: built-in, registered, and provided by installed packages.

An installed package provides a scheme by an entry point of the group ``fedmq.transports``, whose name is the scheme and
whose value is a :class:`~fedmq.wire.transports.base.Transport`. It is loaded when a URI of that scheme is first used.

With the prefix ``shared+``, as in ``shared+tcp://HOST:PORT``, many peers of one process share a connection, so that a
thousand silos need a few file descriptors. Each peer keeps its own key, session and message log. Only the transport
differs: two bytes before the unencrypted header tell the branches of a connection apart.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from importlib.metadata import entry_points

from typing_extensions import override

from fedmq.errors import InputError, RemoteWireError
from fedmq.profiling import span
from fedmq.wire.codec import BytesLike
from fedmq.wire.messages import Reason
from fedmq.wire.transports import ipc, memory, shm, tcp
from fedmq.wire.transports.base import MAX_FRAME, QUEUE, Connection, Listener, Transport
from fedmq.wire.transports.tickets import ConnectionKeys, ListenerKeys

#: Entry point group of installed packages.
GROUP = "fedmq.transports"

#: Prefix of the URI schemes of shared connections.
SHARED = "shared+"
#: Bytes of a branch's number, big endian.
_NUMBER_BYTES = 2
#: Maximum number of branches of a connection.
MAX_BRANCHES = 1 << 8 * _NUMBER_BYTES
#: Silos of a connection that keep the usual heartbeat. More beat less often: a thousand silos would send 500 a second.
_USUAL_BEATS = 16
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
#: The transports registered in this process, by scheme.
TRANSPORTS = {"tcp": tcp.TRANSPORT, "ipc": ipc.TRANSPORT, "shm": shm.TRANSPORT, "memory": memory.TRANSPORT}


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


def schemes() -> tuple[str, ...]:
    """The schemes registered in this process, without entry points that have not been loaded yet."""
    return tuple(TRANSPORTS)


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
    """Open a connection for many peers of this process; arguments and errors as for :func:`connect`.

    Args:
        uri: URI of a listener with the prefix ``shared+``.
        max_frame: maximum size of an accepted frame [bytes].
        queue: messages queued per direction, for all peers together.
    """
    return SharedConnection(connect(uri.removeprefix(SHARED), max_frame=max_frame, queue=queue))


def check_uri(uri: str, place: str, *, listening: bool = False) -> None:
    """Check the form of a URI before it is used.

    Args:
        uri: as for :func:`listen` or :func:`connect`.
        place: where the URI was given, for the error, e.g. ``"--bind"``.
        listening: whether it is for :func:`listen`.

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


# -------------------------------------------------------------------------------------------------- shared connections
def beat_patience(branches: int) -> float:
    """Factor of the interval between heartbeats on a connection with this many branches, at both of its ends."""
    return max(1.0, branches / _USUAL_BEATS)


class SharedListener(Listener):
    """A listener whose peers are the branches of its connections.

    Args:
        inner: the listener of the connections.
    """

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self.uri = SHARED + inner.uri

    @override
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        received = self._inner.receive(timeout_s)
        if received is None:
            return None
        address, (first, body) = received
        if first.nbytes < _NUMBER_BYTES:
            raise RemoteWireError(Reason.MALFORMED, "a frame without the number of its branch")
        return address + bytes(first[:_NUMBER_BYTES]), [first[_NUMBER_BYTES:], body]

    @override
    def room(self, size: int) -> memoryview:
        return self._inner.room(size)

    @override
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        return self._inner.send(peer[:-_NUMBER_BYTES], _marked(peer[-_NUMBER_BYTES:], frames))

    @override
    def close(self) -> None:
        self._inner.close()


class SharedConnection:
    """A connection with branches; made and used by one thread, except for the branches' ``wake``."""

    def __init__(self, inner: Connection) -> None:
        self._inner = inner
        self._branches: dict[bytes, Branch] = {}
        self._unanswered: set[bytes] = set()

    def branch(self, number: int) -> Branch:
        """Open a branch.

        Args:
            number: 0 to :data:`MAX_BRANCHES` - 1, not in use yet.
        """
        mark = number.to_bytes(_NUMBER_BYTES, "big")
        branch = self._branches[mark] = Branch(self, mark, self._inner)
        return branch

    def pump(self, timeout_s: float | None) -> None:
        """Receive the messages that have arrived, for all branches; wait for the first one, see ``receive``."""
        while (frames := self._inner.receive(timeout_s)) is not None:
            timeout_s = 0.0
            self._unanswered.clear()
            first, body = frames
            branch = self._branches.get(bytes(first[:_NUMBER_BYTES]))
            if branch is not None:  # otherwise a branch that is closed
                branch.arrived.append([first[_NUMBER_BYTES:], body])

    def reconnect(self, mark: bytes) -> None:
        """A branch gets no answer; if that is true of most and nothing else arrived, make a new connection."""
        self._unanswered.add(mark)
        if 2 * len(self._unanswered) > len(self._branches):
            self._unanswered.clear()
            self._inner.reconnect()

    def close(self) -> None:
        """Close all branches and the connection."""
        self._branches.clear()
        self._inner.close()


class Branch(Connection):
    """One peer's part of a shared connection."""

    def __init__(self, shared: SharedConnection, mark: bytes, inner: Connection) -> None:
        self.uri = SHARED + inner.uri
        self._shared, self._mark, self._inner = shared, mark, inner
        self.arrived: deque[list[memoryview]] = deque()  # received and not yet read messages

    @override
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """The next message of this branch; None also if a message of another branch arrives first."""
        if not self.arrived:
            self._shared.pump(timeout_s)
        return self.arrived.popleft() if self.arrived else None

    @override
    def wake(self) -> None:
        self._inner.wake()

    @override
    def room(self, size: int) -> memoryview:
        return self._inner.room(size)

    @override
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        return self._inner.send(_marked(self._mark, frames), timeout_s)

    @override
    def established(self) -> int:
        return self._inner.established()

    def reconnect(self) -> None:
        """Ask for a new connection; other branches need this one, which is kept until most of them get no answer."""
        self._shared.reconnect(self._mark)

    def close(self) -> None:
        """Close the shared connection."""
        self._shared.close()


def _marked(mark: bytes, frames: Sequence[BytesLike]) -> list[BytesLike]:
    """The frames with a branch's number before the first one, which is a short header."""
    header, *rest = frames
    return [mark + bytes(header), *rest]
