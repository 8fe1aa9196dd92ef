"""Listeners and connections over ZeroMQ sockets, shared by the schemes tcp, ipc and memory.

Frames are sent and received without copies. ZeroMQ disconnects a peer that announces a frame above the size limit.
Each listener or connection creates its socket and, except for memory://, its ZeroMQ context, so a process may fork
before but not after that.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from typing_extensions import override
from zmq.utils.monitor import parse_monitor_message

from fedmq.errors import InputError, RemoteWireError
from fedmq.wire.codec import BytesLike
from fedmq.wire.limits import BoundedDict
from fedmq.wire.messages import Reason
from fedmq.wire.transports._connection_admission import PARTIAL, WATCH_MS, ConnectionAdmission, bytes_received, widen
from fedmq.wire.transports._shared_memory import SharedMemory
from fedmq.wire.transports.base import FRAMES, MOST_FRAMES, Connection, ConnectionRefusal, Listener
from fedmq.wire.transports.tickets import FOREIGN, ConnectionKeys, ListenerKeys

#: How long a closing socket continues to send queued messages [ms].
_LINGER_MS = 2000
#: Silence after which TCP probes the peer [s].
_KEEPALIVE_S = 20
_RECONNECT_MS = (50, 5000)
#: Time without a TCP acknowledgement after which a connection is given up and made again [ms]. TCP alone would retry
#: for minutes after a long cut, or from an address that this machine no longer has.
_UNACKNOWLEDGED_MS = 15_000
#: Time for TCP to connect before the next attempt [ms].
_CONNECT_MS = 5000
#: Time for a connection's handshake before it is closed [ms].
_HANDSHAKE_MS = 10_000
#: Number of frames of a message above which its connection is ended: no peer sends as many by mistake, and reading them
#: takes time.
_MOST_FRAMES = 64
#: Peers whose connections are remembered, to end them.
_MAX_DESCRIPTORS = 1 << 14
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
#: Scheme of a Unix socket whose ends share memory.
_SHM = "shm://"


@dataclass(frozen=True)
class Endpoint:
    """A ZeroMQ endpoint other than the URI itself."""

    name: str  # ZeroMQ's address
    # Shared with other sockets of this process; closing a socket leaves it open.
    context: zmq.Context[zmq.Socket[bytes]]


class ZeroMQListener(Listener):
    """A ROUTER socket; made by :func:`bind`."""

    shares = True

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        context: zmq.Context[zmq.Socket[bytes]] | None,
        uri: str,
        admission: ConnectionAdmission | None,
        max_frame: int,  # maximum size of an accepted frame [bytes]
    ) -> None:
        self.uri = uri
        self._memory = SharedMemory(self.connected, max_frame) if uri.startswith(_SHM) else None
        self._socket, self._context, self._admission = socket, context, admission
        self._descriptors = BoundedDict[bytes, int](_MAX_DESCRIPTORS)
        self._inodes = BoundedDict[bytes, int | None](_MAX_DESCRIPTORS)  # of the sockets of these descriptors

    @override
    def receive(self, timeout_s: float | None = None) -> tuple[bytes, list[memoryview]] | None:
        if self._admission is not None:
            self._admission.check()
        if self._admission is not None and self._admission.refused:
            raise RemoteWireError(Reason.UNKNOWN_SENDER, self._admission.refused.popleft())
        if not self._socket.poll(_milliseconds(timeout_s), zmq.POLLIN):
            return None
        if (received := _received(self._socket, 1 + FRAMES)) is None:
            return None
        (first, *rest), number = received
        peer = bytes(first.buffer)
        if self._admission is not None:
            key = str(first.get("User-Id")) if self._admission.by_key else ""
            self._descriptors[peer] = int(first.get(zmq.SRCFD))
            if peer not in self._inodes:
                self._inodes[peer] = _inode(self._descriptors[peer])
            self._admission.heard(self._descriptors[peer], key)
        if (frames := number - 1) > _MOST_FRAMES:
            self.cut(peer)
        _require(frames, FRAMES)
        return peer, _opened(rest, peer, self._memory)

    @override
    def room(self, size: int) -> memoryview:
        return super().room(size) if self._memory is None else self._memory.room(size)

    @override
    def cut(self, peer: bytes) -> None:
        if self._admission is not None and peer in self._descriptors:
            self._admission.shut(self._descriptors.pop(peer))

    @override
    def keep(self, peer: bytes) -> None:
        if self._admission is not None and peer in self._descriptors:
            self._admission.keep(self._descriptors[peer])

    def connected(self, peer: bytes) -> bool:
        """Whether the connection of a peer that has sent a message is still open."""
        inode = self._inodes.get(peer)
        return inode is not None and _inode(self._descriptors.get(peer, -1)) == inode

    @override
    def send(self, peer: bytes, frames: Sequence[BytesLike]) -> bool:
        if self._memory is not None:
            return self._memory.send(frames, peer, lambda named: put(self._socket, [peer, *named]))
        return put(self._socket, [peer, *frames])

    @override
    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._admission is not None:
            self._admission.close()
            self._admission = None
        _close(self._socket, self._context)


class ZeroMQConnection(Connection):
    """A DEALER socket; made by :func:`dial`."""

    def __init__(
        self,
        make: Callable[[ConnectionKeys | None], zmq.Socket[bytes]],  # makes a socket for a connection with these keys
        context: zmq.Context[zmq.Socket[bytes]] | None,  # closed with the connection; None if other sockets share it
        uri: str,  # URI of the listener
        name: str,  # ZeroMQ's name of the listener
        *,
        watched: bool,  # whether to count connections, for a transport whose connections can break
        keys: ConnectionKeys | None,  # with which the connection is admitted; None for a listener without keys
        max_frame: int,  # maximum size of an accepted frame [bytes]
    ) -> None:
        self._memory = SharedMemory(lambda peer: peer == self._number(), max_frame) if uri.startswith(_SHM) else None
        self.uri, self._name, self._make, self._watched = uri, name, make, watched
        self._keys, self._redial = keys, False
        self._refusal: ConnectionRefusal | None = None
        self._context = context
        self._monitor: zmq.Socket[bytes] | None = None
        self._established = 0
        # ZeroMQ sockets are not thread-safe: other threads write to this pipe to wake the socket's thread.
        self._lock = threading.Lock()
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._open = True
        self._begin()

    def _begin(self) -> None:
        """Make the socket, and connect it."""
        self._socket = self._make(self._keys)
        self._tried, self._admitted, self._broken = 0, False, False
        # Of the TCP connection: its file descriptor, the bytes that it had brought when the last message was read, and
        # how many more it may bring without another one.
        self._descriptor: int | None = None
        self._mark, self._most = 0, PARTIAL
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakes, zmq.POLLIN)
        if self._watched:
            self._monitor = self._socket.get_monitor_socket(_EVENTS | _FAILURES)
            self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(self._name)
        except zmq.ZMQError as error:
            self.close()
            raise InputError(self.uri, str(error), "an address that can be connected to") from error

    @override
    def receive(self, timeout_s: float | None = None) -> list[memoryview] | None:
        if timeout_s != 0:
            self._wait(timeout_s)
        received = _received(self._socket, MOST_FRAMES)
        if received is None and self._is_lost():
            time.sleep(_RECONNECT_MS[0] / 1000)  # as long as ZeroMQ would wait; the last messages may still arrive
            received = _received(self._socket, MOST_FRAMES)
            if received is None:
                self.reconnect()
        if received is None:
            return None
        self._mark = self._brought()
        frames, number = received
        _require(number, MOST_FRAMES)
        return _opened(frames, self._number(), self._memory)

    def _number(self) -> int:
        """Number of the connection by which a message travels that is sent now."""
        return max(1, self.established())

    @override
    def room(self, size: int) -> memoryview:
        return super().room(size) if self._memory is None else self._memory.room(size)

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for a message, a call of :meth:`wake` or a connection that needs a new ticket."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        longest = math.inf if self._keys is None else WATCH_MS / 1000
        while True:
            left = max(0.0, until - time.monotonic())
            ready = dict(self._poller.poll(_milliseconds(min(left, longest))))
            if self._wakes in ready:
                os.read(self._wakes, 4096)
            if self._socket in ready or self._wakes in ready or (not ready and left <= longest):
                return
            if self._is_lost():
                return

    def _brought(self) -> int:
        """Bytes that the TCP connection has brought; 0 without one, or without keys."""
        self._read_monitor()
        return 0 if self._descriptor is None else bytes_received(self._descriptor)

    def _is_lost(self) -> bool:
        """Whether the connection broke, or brings a message without an end."""
        return self._brought() - self._mark > self._most or self._broken

    @override
    def keep(self) -> None:
        self._read_monitor()  # what it reports later is of another connection
        self._most = 2 * int(self._socket.getsockopt(zmq.MAXMSGSIZE))

    @override
    def wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread too
            if self._open:
                os.write(self._wake, b"x")

    @override
    def send(self, frames: Sequence[BytesLike], timeout_s: float | None = 0.0) -> bool:
        if self._redial:
            self.reconnect()
        if not self._socket.poll(_milliseconds(timeout_s), zmq.POLLOUT):
            return False
        if self._memory is not None:
            return self._memory.send(frames, self._number(), lambda named: put(self._socket, named))
        return put(self._socket, frames)

    @override
    def established(self) -> int:
        self._read_monitor()  # ZeroMQ reconnects automatically
        return self._established

    def reconnect(self) -> None:
        """Connect again after a refusal or an error of ZeroMQ's protocol, after which it does not do so by itself.

        It uses a new socket: a socket that is disconnected while it connects continues to connect.
        """
        self._redial, self._refusal = False, None
        if self._monitor is not None:
            self._end_monitor()
            self._socket.close(0)
            self._begin()

    @override
    def use_keys(self, keys: ConnectionKeys) -> bool:
        if self._keys is None or keys == self._keys:
            return False
        self._keys = keys
        return True

    @override
    def refusal(self) -> ConnectionRefusal | None:
        self._read_monitor()
        found, self._refusal = self._refusal, None
        return found

    def _read_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            message = parse_monitor_message(self._monitor.recv_multipart())
            event, value = message["event"], message["value"]
            if event == zmq.EVENT_CONNECTED:
                widen(value)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._established += 1
                self._admitted, self._broken, self._refusal = True, False, None
            elif self._keys is not None:
                self._on_trouble(event, value)

    def _on_trouble(self, event: int, value: int) -> None:
        """Note why a connection with a ticket is not admitted, or that it broke and needs a new one."""
        if event == zmq.EVENT_DISCONNECTED:
            self._descriptor = None  # soon of another file
        match event:
            case zmq.EVENT_CONNECTED:
                self._tried += 1
                self._descriptor, self._mark, self._most = value, 0, PARTIAL
            case zmq.EVENT_DISCONNECTED if self._admitted:
                self._broken = True
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH if self._tried > 1:
                self._broken = True  # the ticket was used before
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                refused = ConnectionRefusal.FOREIGN if value == int(FOREIGN) else ConnectionRefusal.REFUSED
                self._refusal, self._redial = refused, True
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refusal = ConnectionRefusal.FOREIGN

    def _end_monitor(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None

    @override
    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._end_monitor()
        with self._lock:
            if self._open:
                os.close(self._wakes)
                os.close(self._wake)
                self._open = False
        _close(self._socket, self._context)


def bind(
    uri: str,
    max_frame: int,
    queue: int,
    endpoint: Endpoint | None = None,
    *,
    keys: ListenerKeys | None = None,
    ipv6: bool = False,
) -> ZeroMQListener:
    """Open a listener.

    Args:
        uri: URI on which to listen; with the scheme ``shm``, a Unix socket whose peers share memory.
        max_frame: maximum size of an accepted frame [bytes].
        queue: messages queued per peer and direction.
        endpoint: ZeroMQ's endpoint, if it is not ``uri``.
        keys: admit only peers with these keys; None admits everyone who reaches the address.
        ipv6: whether the address is, or also is, an IPv6 address.

    Raises:
        InputError: the address cannot be bound.
    """
    used: zmq.Context[zmq.Socket[bytes]] = endpoint.context if endpoint else zmq.Context()
    socket, context = _socket(used, zmq.ROUTER, max_frame, queue, ipv6=ipv6), None if endpoint else used
    if keys is not None:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"fedmq")
    admission = None if context is None else ConnectionAdmission(socket, context, keys, max_frame)
    # Without this option ZeroMQ silently drops messages for a disconnected peer.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(endpoint.name if endpoint else _name(uri))
    except zmq.ZMQError as error:
        if admission is not None:
            admission.close()
        _close(socket, context)
        taken = "; another process listens there, e.g. another coordinator" if error.errno == zmq.EADDRINUSE else ""
        raise InputError(uri, str(error), f"an address that is free and belongs to this machine{taken}") from error
    bound = uri if endpoint or uri.startswith(_SHM) else socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return ZeroMQListener(socket, context, bound, admission, max_frame)


def dial(
    uri: str,
    max_frame: int,
    queue: int,
    endpoint: Endpoint | None = None,
    *,
    keys: ConnectionKeys | None = None,
    ipv6: bool = False,
) -> ZeroMQConnection:
    """Open a connection; arguments as for :func:`bind`.

    Raises:
        InputError: ZeroMQ refuses the address.
    """
    context: zmq.Context[zmq.Socket[bytes]] = endpoint.context if endpoint else zmq.Context()

    def made(keys: ConnectionKeys | None) -> zmq.Socket[bytes]:
        socket = _socket(context, zmq.DEALER, max_frame, queue, ipv6=ipv6)
        if keys is not None:
            socket.setsockopt(zmq.PLAIN_USERNAME, keys.name.encode())
            socket.setsockopt(zmq.PLAIN_PASSWORD, keys.ticket(time.time()))
        return socket

    name, own = (endpoint.name, None) if endpoint else (_name(uri), context)
    return ZeroMQConnection(made, own, uri, name, watched=endpoint is None, keys=keys, max_frame=max_frame)


def _name(uri: str) -> str:
    """ZeroMQ's name of a URI."""
    return f"ipc://{uri.removeprefix(_SHM)}" if uri.startswith(_SHM) else uri


def put(socket: zmq.Socket[bytes], frames: Sequence[BytesLike]) -> bool:
    """Queue frames without waiting; False if the queue is full or the peer is disconnected."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            return False
        raise
    return True


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, max_frame: int, queue: int, *, ipv6: bool
) -> zmq.Socket[bytes]:
    """A socket with its options set."""
    socket = context.socket(kind)
    options = {
        zmq.SNDHWM: queue,
        zmq.RCVHWM: queue,
        zmq.MAXMSGSIZE: max_frame,
        zmq.LINGER: _LINGER_MS,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: _KEEPALIVE_S,
        zmq.TCP_KEEPALIVE_INTVL: _KEEPALIVE_S // 4,
        zmq.TCP_KEEPALIVE_CNT: 4,
        zmq.TCP_MAXRT: _UNACKNOWLEDGED_MS,
        zmq.CONNECT_TIMEOUT: _CONNECT_MS,
        # ZeroMQ's own heartbeats stay off: with them libzmq 4.3.5 aborts the process if a connection breaks whose
        # queue is full (libzmq issue 4767). A host that lost power is noticed by TCP's probes.
        zmq.RECONNECT_IVL: _RECONNECT_MS[0],
        zmq.RECONNECT_IVL_MAX: _RECONNECT_MS[1],
        zmq.IPV6: int(ipv6),
        zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
    socket.close()
    if context is not None:
        context.term()


def _milliseconds(timeout_s: float | None) -> int | None:
    # Rounded up, so that waits below one millisecond do not become a busy loop.
    return None if timeout_s in (None, math.inf) else max(0, math.ceil(timeout_s * 1000))


def _inode(descriptor: int) -> int | None:
    """The inode of an open file; None if the descriptor is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return None


def _opened(frames: Sequence[zmq.Frame], peer: bytes | int, memory: SharedMemory | None) -> list[memoryview]:
    """The frames of a message from a peer, with its body."""
    found = [frame.buffer for frame in frames]
    return found if memory is None else memory.received(found, peer, _process_of(frames[0]))


def _process_of(frame: zmq.Frame) -> int:
    """The process at a Unix socket's other end, by the kernel's word; 0 if of another user or PID namespace."""
    try:
        _, user, _, process = str(frame.get("Peer-Address")).rsplit(":", 3)
    except (zmq.ZMQError, ValueError):  # ValueError: no Unix socket
        return 0
    return int(process) if user == str(os.geteuid()) else 0


def _require(frames: int, most: int) -> None:
    if not FRAMES <= frames <= most:
        expected = f"{FRAMES}" if most == FRAMES else f"{FRAMES} or {most}"
        raise RemoteWireError(Reason.MALFORMED, f"{frames} frames, expected {expected}")


def _received(socket: zmq.Socket[bytes], most: int) -> tuple[list[zmq.Frame], int] | None:
    """The first frames of a message that has arrived, at most ``most``, and the number of all; None if none has."""
    try:
        frames = [frame := socket.recv(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None
    number = 1
    while frame.more:  # further ones are dropped one by one: a peer may send a million in one message
        frame, number = socket.recv(copy=False), number + 1
        if number <= most:
            frames.append(frame)
    return frames, number
