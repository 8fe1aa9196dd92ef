"""Admission of connections to a listener: accepted keys only, and a limited number that have sent nothing yet.

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

from fedmq.text import printable
from fedmq.wire.keys import fingerprint, words
from fedmq.wire.transports.curve_keys import ListenerKeys, ed25519_of

#: Connections that may be open without having sent a message; the oldest are closed.
UNHEARD = 256
#: Of the process's file descriptors, the part that such connections may take.
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
        self._keys, self._socket = keys, socket
        self._heard: set[int] = set()
        self._unheard: dict[int, None] = {}
        self._unknown: dict[str, bytes] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(8, min(UNHEARD, soft // _PART))
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP)
        self._wakes, self._wake = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="connection admission", daemon=True)
        self._thread.start()

    def heard(self, descriptor: int) -> None:
        """A peer sent a message on the connection with this file descriptor."""
        self._heard.add(descriptor)

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

    def _run(self) -> None:
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
        return [b"1.0", number, b"200" if admitted else b"400", b"", b"", b""]

    def _refuse(self, address: str, public: bytes) -> None:
        assert self._keys is not None  # noqa: S101 - without keys everyone is admitted
        claim = self._keys.claimed(public)
        if claim is None:
            self._unknown[address] = public
            while len(self._unknown) > _REMEMBERED:
                del self._unknown[next(iter(self._unknown))]
            self.refused.append(f"{address}: a key that is not accepted")
            return
        name, sign = claim
        unknown, known = self._unknown.get(address), ""
        with contextlib.suppress(ValueError, TypeError):  # not a point of the curve
            known = f", with the unknown key {_fingerprint(unknown, sign)}" if unknown else ""
        self.refused.append(f"{address}: claims to be {name}{known}")

    def _watch(self) -> None:
        event = parse_monitor_message(self._monitor.recv_multipart())
        descriptor = int(event["value"])
        self._heard.discard(descriptor)
        self._unheard.pop(descriptor, None)
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        self._unheard[descriptor] = None
        if len(self._unheard) > self._most:
            for each in [each for each in self._unheard if each in self._heard]:
                del self._unheard[each]
        while len(self._unheard) > self._most:
            oldest = next(iter(self._unheard))
            del self._unheard[oldest]
            self.shut(oldest)


def _fingerprint(public: bytes, sign: int) -> str:
    key = ed25519_of(public, sign)
    return f"SHA256 {fingerprint(key)} ({words(key)})"
