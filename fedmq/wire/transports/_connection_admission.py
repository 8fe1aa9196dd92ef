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
import threading
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

from fedmq.errors import RunError
from fedmq.text import printable
from fedmq.wire.keys import fingerprint, words
from fedmq.wire.limits import BoundedDict
from fedmq.wire.transports.curve_keys import ListenerKeys, ed25519_of

#: Connections that may be open without having sent a message; the oldest are closed.
UNHEARD = 256
#: Connections of one key that may be open; those not heard for the longest time are closed. A peer needs one, and
#: another for an inquiry.
PER_KEY = 8
#: Part of the process's file descriptors that connections without a message may take.
_PART = 4
#: Refusals, and addresses of refused peers, that are remembered.
_REMEMBERED = 256
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_ZAP = "inproc://zeromq.zap.01"


class ConnectionAdmission:
    """Watches the connections of a listening socket; made before the socket is bound.

    Args:
        socket: the listening socket.
        context: the socket's own context.
        keys: keys of the peers to admit; None admits everyone.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], keys: ListenerKeys | None
    ) -> None:
        self.refused: deque[str] = deque(maxlen=_REMEMBERED)
        self._error: Exception | None = None
        self._keys, self._socket = keys, socket
        # Descriptors of open connections, each in one of the two; by key, the one heard last is the last.
        self._lock = threading.Lock()
        self._unheard: dict[int, None] = {}
        self._heard: dict[str, dict[int, None]] = {}
        self._keys_heard: dict[int, str] = {}
        self._unknown = BoundedDict[str, bytes](_REMEMBERED)
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
        return self._keys is not None

    def heard(self, descriptor: int, key: str) -> None:
        """A peer sent a message.

        Args:
            descriptor: file descriptor of its connection.
            key: its CURVE public key, hexadecimal; empty if none is required, and then there is no limit by key.
        """
        with self._lock:
            if descriptor not in self._unheard and descriptor not in self._keys_heard:
                return  # closed in the meantime
            self._forget(descriptor)
            self._keys_heard[descriptor] = key
            of_key = self._heard.setdefault(key, {})
            of_key[descriptor] = None
            oldest = next(iter(of_key)) if key and len(of_key) > PER_KEY else None
            if oldest is not None:
                self._forget(oldest)
        if oldest is not None:
            self.shut(oldest)

    def _forget(self, descriptor: int) -> None:
        self._unheard.pop(descriptor, None)
        if (key := self._keys_heard.pop(descriptor, None)) is not None:
            del self._heard[key][descriptor]
            if not self._heard[key]:
                del self._heard[key]

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
        while True:
            ready = dict(poller.poll())
            if self._wakes in ready:
                return
            if self._zap in ready:
                self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
            if self._monitor in ready:
                self._watch()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Answer a request of the ZeroMQ Authentication Protocol (ZAP, rfc.zeromq.org/spec/27)."""
        number, address, public = request[1], printable(request[3].decode(errors="replace")), request[-1]
        admitted = self._keys is None or (len(public) == 32 and self._keys.admits(public))
        if not admitted:
            self._refuse(address, public)
        user = public.hex().encode() if admitted and self._keys is not None else b""
        return [b"1.0", number, b"200" if admitted else b"400", b"", user, b""]

    def _refuse(self, address: str, public: bytes) -> None:
        assert self._keys is not None  # noqa: S101 - without keys everyone is admitted
        claim = self._keys.claimed(public)
        if claim is None:
            self._unknown[address] = public
            self.refused.append(f"{address}: a key that is not accepted")
            return
        name, sign = claim
        unknown, known = self._unknown.get(address), ""
        with contextlib.suppress(ValueError, TypeError):  # not a point of the curve
            if unknown:
                known = f", with the unknown key {_fingerprint(unknown, sign)}; `fedmq keys accept` accepts its request"
        self.refused.append(f"{address}: claims to be {name}{known}")

    def _watch(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())
        descriptor, closed = int(event["value"]), list[int]()
        with self._lock:
            self._forget(descriptor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._unheard[descriptor] = None
            while len(self._unheard) > self._most:
                closed.append(oldest := next(iter(self._unheard)))
                del self._unheard[oldest]
        for each in closed:
            self.shut(each)


def _fingerprint(public: bytes, sign: int) -> str:
    key = ed25519_of(public, sign)
    return f"SHA256 {fingerprint(key)} ({words(key)})"
