"""Admission of connections to a listener: accepted keys only, and limits on how many connections may be open.

A key may have a few connections: a relay can keep those open that its peer has replaced. The connections that have sent
nothing yet are limited together.

It runs on a separate thread, so that a coordinator that is merging still answers, and an attacker cannot use up the
file descriptors in the meantime.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket as sockets
import stat
import struct
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from fedmq.errors import RunError
from fedmq.text import printable
from fedmq.wire.transports.tickets import ADMITTED, ListenerKeys, TicketGate, Verdict

#: Connections that may be open without having sent a message; the oldest are closed.
UNHEARD = 256
#: Connections of one key that may be open; those that have been silent longest are closed, those without a
#: completed handshake first, since a peer with a stolen ticket cannot complete one. A process needs one connection, and
#: a second one for an inquiry.
PER_KEY = 8
#: Part of the process's file descriptors that connections without a message may take.
_PART = 4
#: Bytes that a connection may bring without a whole message before its peer has completed a handshake: ZeroMQ keeps the
#: frames of a message, however many, until the last one. Then it may bring a message of the largest size.
PARTIAL = 4 << 20
#: Interval at which these bytes are counted [ms].
WATCH_MS = 250
#: Bytes received, in Linux's ``struct tcp_info``.
_TCP_INFO = struct.Struct("128xQ")
#: Send buffer of a Unix socket [bytes]; Linux allows at most net.core.wmem_max.
_UNIX_ROOM = 1 << 19
#: Refusals that are remembered.
_REMEMBERED = 256
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_ZAP = "inproc://zeromq.zap.01"


@dataclass
class _Open:
    """An open connection."""

    key: str | None = None  # its peer's key, hexadecimal, empty if none is required; None until it sends a message
    kept: bool = False  # whether its peer has completed a handshake
    messages: int = 0  # number of its messages
    # The numbers of messages and of received bytes when the last message was seen.
    mark: tuple[int, int] = (0, 0)


class ConnectionAdmission:
    """Watches the connections of a listening socket; made before the socket is bound."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],  # the listening socket
        context: zmq.Context[zmq.Socket[bytes]],  # the socket's own context
        keys: ListenerKeys | None,  # keys of the peers to admit; None admits everyone
        max_message: int,  # bytes that a connection may bring without a whole message
    ) -> None:
        self.refused: deque[str] = deque(maxlen=_REMEMBERED)
        self._error: Exception | None = None
        self._gate, self._socket = None if keys is None else TicketGate(keys), socket
        self._max_message = max_message
        # By descriptor; the one heard last is the last.
        self._open: dict[int, _Open] = {}
        self._number = Counter[str | None]()  # number of open connections by key
        self._lock = threading.Lock()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(8, min(UNHEARD, soft // _PART))
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connection admission", daemon=True)
        self._thread.start()

    @property
    def by_key(self) -> bool:
        """Whether messages carry the key of their connection."""
        return self._gate is not None

    def heard(self, descriptor: int, key: str) -> None:
        """A peer sent a message.

        Args:
            descriptor: file descriptor of its connection.
            key: its public key, hexadecimal; empty if none is required, and then there is no limit by key.
        """
        with self._lock:
            if (connection := self._forget(descriptor)) is None:
                return  # closed in the meantime
            if connection.key not in (None, key):  # of a connection that is closed
                connection = _Open()
            connection.key, connection.messages = key, connection.messages + 1
            self._add(descriptor, connection)
            surplus = self._surplus(key, PER_KEY) if key else None
        if surplus is not None:
            self.shut(surplus)

    def keep(self, descriptor: int) -> None:
        """A peer has completed a handshake; close its connection after those of its key that have not."""
        with self._lock:
            if descriptor in self._open:
                self._open[descriptor].kept = True

    def _add(self, descriptor: int, connection: _Open) -> None:
        self._open[descriptor] = connection
        self._number[connection.key] += 1

    def _forget(self, descriptor: int) -> _Open | None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._number[connection.key] -= 1
        return connection

    def _surplus(self, key: str | None, most: int) -> int | None:
        """Forget the connection that is to be closed because a key has more than ``most``; None if it has not."""
        if self._number[key] <= most:
            return None
        of_key = [each for each, connection in self._open.items() if connection.key == key]
        oldest = next((each for each in of_key if not self._open[each].kept), of_key[0])
        self._forget(oldest)
        return oldest

    def shut(self, descriptor: int) -> None:
        """End a connection; ZeroMQ then closes it."""
        with contextlib.suppress(OSError):  # closed in the meantime
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with sockets.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(sockets.SHUT_RDWR)

    def close(self) -> None:
        """End the thread."""
        os.write(self._wake, b"x")
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._zap.close(0)
        os.close(self._wakes)
        os.close(self._wake)

    def check(self) -> None:
        """Raise a RunError if the thread has ended by an error: without it nobody is admitted any more."""
        if self._error is not None:
            raise RunError(f"the admission of connections failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._error = error

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._monitor, self._zap, self._wakes):
            poller.register(each, zmq.POLLIN)
        watched = time.monotonic()
        while True:
            ready = dict(poller.poll(None if self._gate is None else WATCH_MS))
            if self._gate is not None and time.monotonic() - watched >= WATCH_MS / 1000:
                self._end_endless()
                watched = time.monotonic()
            if self._wakes in ready:
                return
            if self._zap in ready:
                self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
            if self._monitor in ready:
                self._watch()

    def _end_endless(self) -> None:
        """End the connections that bring too much without a whole message."""
        with self._lock:
            counts = {each: connection.messages for each, connection in self._open.items()}
        for descriptor, count in counts.items():
            received = bytes_received(descriptor)
            with self._lock:
                connection = self._open.get(descriptor, _Open())  # closed in the meantime
                before, most = connection.mark, self._max_message if connection.kept else PARTIAL
                if count > before[0] and connection.key is not None:
                    connection.mark = count, received
            if count == before[0] and received - before[1] > most:
                self.shut(descriptor)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Answer a request of the ZeroMQ Authentication Protocol (ZAP, rfc.zeromq.org/spec/27)."""
        number, address, credentials = request[1], printable(request[3].decode(errors="replace")), request[6:]
        verdict = Verdict(ADMITTED) if self._gate is None else self._gate.judge(*credentials)
        if verdict.why:
            self.refused.append(f"{address}: {verdict.why}")
        return [b"1.0", number, verdict.status, b"", verdict.key.encode(), b""]

    def _watch(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())
        descriptor = int(event["value"])
        with self._lock:
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                widen(descriptor)
                self._add(descriptor, _Open())
            surplus = self._surplus(None, self._most)
        if surplus is not None:
            self.shut(surplus)


def widen(descriptor: int) -> None:
    """Enlarge the send buffer of a connection over a Unix socket; Linux enlarges TCP's by itself.

    With the default buffer, the two processes wake each other 60 times for an update of 12 MB.
    """
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family == sockets.AF_UNIX:
            connection.setsockopt(sockets.SOL_SOCKET, sockets.SO_SNDBUF, _UNIX_ROOM)


def bytes_received(descriptor: int) -> int:
    """Bytes that a TCP connection has received; 0 if it is closed."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
        (received,) = _TCP_INFO.unpack(connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO.size))
        return int(received)
    return 0
