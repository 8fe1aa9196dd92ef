"""Frames from process to process over ZeroMQ, by URI scheme: tcp:// and ipc://, and memory:// for tests.

A Listener (the coordinator's) talks to many peers, a Connection (a silo's, the evaluator's) to one listener. Frames are
sent and received without copies; what they mean is no concern of this module. Every object makes its own context when
it is made, so a process may fork before but not after.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import socket as unix
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.wire.codec import MAX_BODY, BytesLike
from fedmq.wire.messages import Reason

#: Frames of one message: clear header and body.
FRAMES = 2
#: Messages queued per peer and direction before the sender waits or is told.
QUEUE = 64
#: Largest frame a peer may send [bytes]: a body and its tag. ZeroMQ drops the connection of one that announces more.
MAX_FRAME = MAX_BODY + 16

#: How long a closing socket goes on sending what is queued [ms].
_LINGER_MS = 2000
#: Silence after which TCP and ZeroMQ ask whether the peer is still there [s].
_KEEPALIVE_S = 20
_RECONNECT_MS = (50, 5000)
#: sockaddr_un holds 108 bytes with its closing zero on Linux.
_IPC_PATH_BYTES = 107
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+|\*):(\d{1,5}|\*)")
_MEMORY = re.compile(r"memory://[A-Za-z0-9_.-]{1,64}")
_ALLOWED = "tcp://HOST:PORT, ipc://PATH or memory://NAME"


class Listener:
    """The end that many peers connect to; made by :func:`listen`."""

    def __init__(self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None, uri: str) -> None:
        self.socket = socket
        self.uri = uri
        self._context = context

    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        """The next message of any peer.

        Args:
            timeout_s: how long to wait [s]; 0 only looks, None waits for ever.

        Returns:
            The peer's address (good for :meth:`send` as long as it is connected) and its two frames, or None.

        Raises:
            RemoteWireError: reason ``malformed``: the message has not two frames; it is gone, the next can be read.
        """
        frames = _receive(self.socket, timeout_s)
        if frames is None:
            return None
        peer, *rest = frames
        return bytes(peer), _checked(rest)

    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        """Queue a message for a peer; never waits. The frames must not change afterwards: they are not copied.

        Returns:
            False if the peer is gone or its queue is full: the message was dropped, the caller decides what follows.

        Raises:
            LocalWireError: not two frames, or a frame above the largest.
        """
        return _send(self.socket, [peer, *_sendable(frames)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""
        _close(self.socket, self._context)


class Connection:
    """The end that connects to one listener, and reconnects by itself; made by :func:`connect`."""

    def __init__(self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None, uri: str) -> None:
        self.socket = socket
        self.uri = uri
        self._context = context
        self._monitor: zmq.Socket[bytes] | None = None
        self._established = 0
        if not uri.startswith("memory:"):  # no transport connection to watch inside one process
            self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        """The next message's two frames, or None after ``timeout_s`` [s] (0 only looks, None waits for ever).

        Wait in steps and look at :meth:`established` between them: after a reconnect nothing comes until a new hello.

        Raises:
            RemoteWireError: reason ``malformed``: the message has not two frames; it is gone, the next can be read.
        """
        frames = _receive(self.socket, timeout_s)
        return None if frames is None else _checked(frames)

    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        """Queue a message. The frames must not change afterwards: they are not copied.

        Args:
            frames: two.
            timeout_s: how long to wait for room in the queue [s]; None waits for ever.

        Returns:
            False if the queue is full: the message was dropped.

        Raises:
            LocalWireError: not two frames, or a frame above the largest.
        """
        sendable = _sendable(frames)
        if not self.socket.poll(_milliseconds(timeout_s), zmq.POLLOUT):
            return False
        return _send(self.socket, sendable, zmq.NOBLOCK)

    def established(self) -> int:
        """How many transport connections there have been so far: when it rises above 1, the session is gone.

        ZeroMQ reconnects unasked; the listener then sees a new peer, which has to begin with a new hello. Always 0
        for ``memory://``.
        """
        if self._monitor is not None:
            while self._monitor.poll(0):
                parse_monitor_message(self._monitor.recv_multipart())
                self._established += 1
        return self._established

    def close(self) -> None:
        """Close; what is queued is still sent for up to two seconds. Closing twice is allowed."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        _close(self.socket, self._context)


def listen(uri: str, *, max_frame: int = MAX_FRAME, queue: int = QUEUE) -> Listener:
    """Open a listener.

    Args:
        uri: ``tcp://HOST:PORT`` (port ``*`` takes a free one; host ``*`` all interfaces), ``ipc://PATH``, or
            ``memory://NAME`` within this process.
        max_frame: largest frame accepted [bytes]; who announces a larger one is disconnected before it is read.
        queue: messages queued per peer and direction.

    Raises:
        InputError: another scheme, a bad URI, or an address that cannot be had.
    """
    endpoint = _endpoint(uri, listening=True)
    if uri.startswith("ipc:") and _answers(uri.removeprefix("ipc://")):
        # ZeroMQ would remove the other listener's socket file and take its place without a word.
        raise InputError(uri, "a path where another process listens", "a path that is free")
    socket, context = _socket(uri, zmq.ROUTER, max_frame, queue)
    # Without this a message for a vanished peer would disappear without a word.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        _close(socket, context)
        raise InputError(uri, str(error), "an address that is free and belongs to this machine") from error
    actual = uri if uri.startswith("memory:") else socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return Listener(socket, context, actual)


def connect(uri: str, *, max_frame: int = MAX_FRAME, queue: int = QUEUE) -> Connection:
    """Open a connection; the listener may come up later.

    Args:
        uri: ``tcp://HOST:PORT``, ``ipc://PATH`` or ``memory://NAME``.
        max_frame: largest frame accepted [bytes].
        queue: messages queued in each direction.

    Raises:
        InputError: another scheme or a bad URI.
    """
    endpoint = _endpoint(uri, listening=False)
    socket, context = _socket(uri, zmq.DEALER, max_frame, queue)
    connection = Connection(socket, context, uri)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        connection.close()
        raise InputError(uri, str(error), _ALLOWED) from error
    return connection


def check_uri(uri: str, place: str, *, listening: bool = False) -> None:
    """Check the form of a URI before anything is begun.

    Args:
        uri: as :func:`listen` or :func:`connect` takes it.
        place: what an error names, e.g. ``"--bind"``.
        listening: whether it is to be listened at.

    Raises:
        InputError: another scheme or a bad URI.
    """
    _endpoint(uri, listening=listening, place=place)


def _endpoint(uri: str, *, listening: bool, place: str = "uri") -> str:
    """The ZeroMQ endpoint of a URI, once it is seen to be of a known form."""
    scheme = uri.partition("://")[0]
    if scheme == "tcp":
        match = _TCP.fullmatch(uri)
        if match is None:
            raise InputError(place, uri, "tcp://HOST:PORT")
        host, port = match.groups()
        if not listening and (host == "*" or port == "*"):
            raise InputError(place, uri, "tcp://HOST:PORT without * where one connects")
        if port != "*" and not (0 if listening else 1) <= int(port) <= 65535:
            raise InputError(place, uri, "a port from 1 to 65535")
        return uri
    if scheme == "ipc":
        path = uri.removeprefix("ipc://")
        size = len(os.fsencode(path))
        if not 1 <= size <= _IPC_PATH_BYTES or "\0" in path or path == "*":
            raise InputError(place, uri, f"ipc://PATH with a path of 1 to {_IPC_PATH_BYTES} bytes (here {size})")
        return uri
    if scheme == "memory":
        if _MEMORY.fullmatch(uri) is None:
            raise InputError(place, uri, "memory://NAME with a name of 1 to 64 of A-Z a-z 0-9 _ . -")
        return "inproc://" + uri.removeprefix("memory://")
    raise InputError(place, uri, _ALLOWED)


def _answers(path: str) -> bool:
    """Whether somebody listens on a Unix socket; the file of a listener that died does not count."""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


@functools.cache
def _memory_context(_process: int) -> zmq.Context[zmq.Socket[bytes]]:
    """The context that the memory:// sockets of one process share: inproc names live within a context."""
    return zmq.Context()


def _socket(
    uri: str, kind: int, max_frame: int, queue: int
) -> tuple[zmq.Socket[bytes], zmq.Context[zmq.Socket[bytes]] | None]:
    """A socket with its limits set, and its context if it is the socket's own."""
    own = None if uri.startswith("memory:") else zmq.Context()
    socket = (own or _memory_context(os.getpid())).socket(kind)
    options = {
        zmq.SNDHWM: queue,
        zmq.RCVHWM: queue,
        zmq.MAXMSGSIZE: max_frame,
        zmq.LINGER: _LINGER_MS,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE_S,
        zmq.TCP_KEEPALIVE_INTVL: _KEEPALIVE_S // 4,
        zmq.TCP_KEEPALIVE_CNT: 4,
        # A host that lost its power sends no FIN; without these the queue for it would fill unnoticed.
        zmq.HEARTBEAT_IVL: _KEEPALIVE_S * 1000,
        zmq.HEARTBEAT_TIMEOUT: 3 * _KEEPALIVE_S * 1000,
        zmq.RECONNECT_IVL: _RECONNECT_MS[0],
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MS[1],
        zmq.IPV6: int("[" in uri),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket, own


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
    socket.close()
    if context is not None:
        context.term()


def _milliseconds(timeout_s: float | None) -> int | None:
    # Rounded up: a wait below one millisecond must not become a busy loop.
    return None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))


def _receive(socket: zmq.Socket[bytes], timeout_s: float | None) -> list[memoryview] | None:
    if not socket.poll(_milliseconds(timeout_s), zmq.POLLIN):
        return None
    with contextlib.suppress(zmq.Again):
        return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
    return None


def _checked(frames: list[memoryview]) -> list[memoryview]:
    if len(frames) != FRAMES:
        raise RemoteWireError(Reason.MALFORMED, f"{len(frames)} frames, expected {FRAMES}")
    return frames


def _sendable(frames: Sequence[BytesLike]) -> Sequence[BytesLike]:
    if len(frames) != FRAMES:
        raise LocalWireError(f"{len(frames)} frames, expected {FRAMES}")
    if any(memoryview(frame).nbytes > MAX_FRAME for frame in frames):
        raise LocalWireError(f"a frame above {MAX_FRAME} bytes")
    return frames


def _send(socket: zmq.Socket[bytes], frames: Sequence[BytesLike], flags: int) -> bool:
    try:
        socket.send_multipart(frames, flags, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True
