"""Attacks on a coordinator's address, each bounded in time and bytes; for ``make hostile`` and the tests.

Each attack takes the address of a coordinator on this machine and a folder with keys. Attacks whose
name lacks ``with_key`` need only the address: they use no key, or one that is not accepted.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmq.errors import RemoteWireError
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import Identity, load_accepted, load_identity
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message
from fedmq.wire.sessions import Session, seal_message
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect
from fedmq.wire.transports.tickets import ConnectionKeys

#: Maximum size of what a peer sends per connection [bytes].
_MULTIPART_BYTES = 20 << 20
_IDLE = 1500
#: Name of a hostile silo. The run has five silos and starts with four, so it can open sessions, but is not needed.
HOSTILE = "silo-04"
HOSTILE_SETTINGS = ("silos.count=5", "participation.minimum=4")
#: Ports that Linux uses for outgoing connections.
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_HALF_SENT = 40
_HALF_BYTES = 1 << 20
#: Handshakes on one connection, and messages in one session.
_SESSIONS, _MESSAGES = 20, 2000
#: Connections that are kept open with an accepted key.
_HELD = 16


def free_port() -> int:
    """A free port of 127.0.0.1.

    It is not one of those from which the system takes ports for outgoing connections: attacks open thousands, and one
    of them could get the port before the coordinator listens on it, or even connect to itself.
    """
    first = int(_PORT_RANGE.read_text().split()[0]) if _PORT_RANGE.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(1024 + (first - 1024) // 2, first)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclass(frozen=True)
class Target:
    """The coordinator under attack."""

    port: int  # of the coordinator, on 127.0.0.1
    run: str
    keys: Path  # a folder with the accepted keys and the private keys of ``silo-00`` and :data:`HOSTILE`
    over: threading.Event  # set when the attack has to end

    @property
    def uri(self) -> str:
        """The coordinator's URI."""
        return f"tcp://127.0.0.1:{self.port}"

    def open(self) -> socket.socket:
        """A connection, which the coordinator may close at any time."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=5.0)


def _greeting(mechanism: bytes) -> bytes:
    """ZMTP 3.1's greeting, as a client."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def _hello(name: str, ticket: bytes) -> bytes:
    """PLAIN's HELLO command, with a name and a ticket."""
    command = b"\x05HELLO" + bytes([len(name)]) + name.encode() + bytes([len(ticket)]) + ticket
    return b"\x04" + bytes([len(command)]) + command


_METADATA = b"\x0bSocket-Type\0\0\0\x06DEALER"
_INITIATE = b"\x04\x1f\x08INITIATE" + _METADATA
_READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def idle_connections(target: Target) -> None:
    """Hold connections open without a byte."""
    with contextlib.ExitStack() as opened:
        for _ in range(_IDLE):
            with contextlib.suppress(OSError):
                opened.enter_context(target.open())
            if target.over.is_set():
                return
        target.over.wait()


def endless_multipart(target: Target) -> None:
    """Send one message of endless one-byte frames, after a greeting without security and one that announces it."""
    frames = b"\x01\x01x" * 4096
    for mechanism in itertools.cycle((b"NULL", b"PLAIN")):
        with contextlib.suppress(OSError), target.open() as connection:
            connection.sendall(_greeting(mechanism) + (_READY if mechanism == b"NULL" else b""))
            for _ in range(_MULTIPART_BYTES // len(frames)):
                connection.sendall(frames)
        if target.over.wait(0.2):
            return


def half_sent_frames(target: Target) -> None:
    """Announce frames of 100 MB on many connections, and send only part of each."""
    with contextlib.ExitStack() as opened:
        while not target.over.wait(0.2):
            for _ in range(_HALF_SENT):
                with contextlib.suppress(OSError):
                    connection = opened.enter_context(target.open())
                    connection.sendall(_greeting(b"PLAIN") + b"\x06" + (100 << 20).to_bytes(8, "big"))
                    connection.sendall(bytes(_HALF_BYTES))
            opened.close()


def garbage(target: Target) -> None:
    """Send bytes that are not ZMTP."""
    while not target.over.wait(0.005):
        with contextlib.suppress(OSError), target.open() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 40)


def unknown_keys(target: Target) -> None:
    """Connect with new keys again and again, each claiming to be silo-00."""
    coordinator = load_accepted(target.keys)[COORDINATOR]
    while not target.over.wait(0.02):
        key = Ed25519PrivateKey.generate()
        connection = connect(target.uri, keys=ConnectionKeys(key, coordinator, "silo-00"))
        hello, _ = initiate(Identity("silo-00", key), COORDINATOR, target.run, 0.0)
        connection.send(hello)
        until = time.monotonic() + 1.0
        while connection.refusal() is None and time.monotonic() < until:
            connection.receive(0.05)
        connection.close()


def _ticket(target: Target) -> bytes:
    """A ticket of silo-00, as someone who listens on the network sees it."""
    identity, coordinator = load_identity(target.keys, "silo-00"), load_accepted(target.keys)[COORDINATOR]
    return ConnectionKeys(identity.key, coordinator, "silo-00").ticket(time.time())


def presented(target: Target, ticket: bytes) -> socket.socket | None:
    """A connection that a ticket admits; None if it is refused."""
    try:
        connection = target.open()
    except OSError:  # the coordinator ended
        return None
    with contextlib.suppress(OSError):
        connection.sendall(_greeting(b"PLAIN") + _hello("silo-00", ticket))
        connection.settimeout(1.0)
        answer = b""
        while len(answer) < 66 + len(b"WELCOME"):  # after the greeting: a command's flags and size, its name
            part = connection.recv(64)
            if not part:
                break
            answer += part
        if answer.endswith(b"\x07WELCOME"):
            connection.sendall(_INITIATE)
            return connection
    connection.close()
    return None


def unusable_tickets(target: Target) -> None:
    """Present tickets of silo-00 for another coordinator, of the day before yesterday, forged ones, and garbage."""
    identity, coordinator = load_identity(target.keys, "silo-00"), load_accepted(target.keys)[COORDINATOR]
    elsewhere = Ed25519PrivateKey.generate().public_key()
    tickets = (
        ConnectionKeys(identity.key, elsewhere, "silo-00").ticket(time.time()),
        ConnectionKeys(identity.key, coordinator, "silo-00").ticket(time.time() - 2 * 86_400),
        base64.b64encode(base64.b64decode(_ticket(target))[:-64] + bytes(64)),
        b"ticket",
    )
    for ticket in itertools.cycle(tickets):
        if target.over.wait(0.01):
            return
        if (connection := presented(target, ticket)) is not None:
            connection.close()


def recorded_tickets(target: Target) -> None:
    """Present each ticket of silo-00 again and again; hold what it admits, and send noise there."""
    with contextlib.ExitStack() as held:
        connections: list[socket.socket] = []
        for number in itertools.count():
            if number % 100 == 0:
                ticket = _ticket(target)
            with contextlib.suppress(OSError):
                if (connection := presented(target, ticket)) is not None:
                    connections.append(held.enter_context(connection))
            for each in connections:
                with contextlib.suppress(OSError):
                    each.sendall(b"\x01\x01x\0\x01y" * 20)
            if target.over.wait(0.02):
                return


def endless_multipart_with_a_recorded_ticket(target: Target) -> None:
    """Send messages of endless empty frames on the connections that a recorded ticket admits."""
    frames = b"\x01\0" * (1 << 15)
    while not target.over.wait(0.05):
        with contextlib.suppress(OSError):
            connection = presented(target, _ticket(target))
            while connection is not None and not target.over.is_set():
                connection.sendall(frames)


def flood_with_key(target: Target) -> None:
    """Send noise and hellos on the connection of an accepted key, as fast as the queue takes them."""
    identity, accepted = load_identity(target.keys, "silo-00"), load_accepted(target.keys)
    connection = connect(target.uri, keys=ConnectionKeys(identity.key, accepted[COORDINATOR], identity.name))
    hello, _ = initiate(identity, COORDINATOR, target.run, 0.0)
    noise = (b"x" * 200, b"y" * 200)
    for number in itertools.count():
        connection.send(hello if number % 10 == 0 else noise, 0.05)
        if number % 50 == 0 and target.over.wait(0.02):
            break
    connection.close()


def _session(target: Target, connection: Connection) -> Session | None:
    """A session of the hostile silo, if the coordinator answers immediately."""
    identity, accepted = load_identity(target.keys, HOSTILE), load_accepted(target.keys)
    hello, initiated = initiate(identity, COORDINATOR, target.run, 0.0)
    connection.send(hello, 0.05)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        frames = connection.receive(0.05)
        with contextlib.suppress(RemoteWireError):
            if frames is not None:
                ready, session = complete(initiated, accepted, frames, 0.0)
                connection.send(ready, 0.05)
                return session
    return None


def _with_key(target: Target) -> Connection:
    identity, coordinator = load_identity(target.keys, HOSTILE), load_accepted(target.keys)[COORDINATOR]
    return connect(target.uri, keys=ConnectionKeys(identity.key, coordinator, identity.name))


def new_sessions_with_key(target: Target) -> None:
    """Complete handshakes with an accepted key as fast as the coordinator answers, and connect again and again."""
    while not target.over.is_set():
        connection = _with_key(target)
        for _ in range(_SESSIONS):
            if not target.over.is_set():  # the keys are removed soon after
                _session(target, connection)
        connection.close()


def messages_with_key(target: Target) -> None:
    """Send heartbeats and statements in valid sessions, as fast as the queue takes them."""
    connection = _with_key(target)
    while not target.over.is_set():
        session = _session(target, connection)
        for number in range(_MESSAGES if session is not None else 0):
            header = Header(
                run=target.run,
                kind=Kind.HEARTBEAT if number % 2 else Kind.STATEMENT,
                sender=HOSTILE,
                receiver=COORDINATOR,
                sequence=0,
                sent_at=0.0,
            )
            assert session is not None
            connection.send(seal_message(session, Message(header)).frames, 0.05)
        while connection.receive(0.0) is not None:
            pass
    connection.close()


def held_connections_with_key(target: Target) -> None:
    """Keep many connections of an accepted key open, and send noise on each; those that are closed connect again."""

    def hold() -> None:
        connection = _with_key(target)
        while not target.over.wait(0.2):
            connection.send((b"x" * 200, b"y" * 200))
        connection.close()

    threads = [threading.Thread(target=hold, daemon=True) for _ in range(_HELD)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


ATTACKS: Mapping[str, Callable[[Target], None]] = {
    "idle connections": idle_connections,
    "endless multipart": endless_multipart,
    "half-sent frames": half_sent_frames,
    "garbage": garbage,
    "unknown keys": unknown_keys,
    "unusable tickets": unusable_tickets,
    "recorded tickets": recorded_tickets,
    "endless multipart with a recorded ticket": endless_multipart_with_a_recorded_ticket,
    "flood with a key": flood_with_key,
    "new sessions with a key": new_sessions_with_key,
    "messages with a key": messages_with_key,
    "held connections with a key": held_connections_with_key,
}


class Relay:
    """A relay before the coordinator.

    By default it sends copies of what silos send first, 30 ms ahead, on other connections.

    Args:
        port: of the coordinator, on 127.0.0.1.
        damage_s: instead damage, reorder and drop bytes and cut connections, for so long after the first connection
            [s].

    Attributes:
        port: where silos connect.
        copies: connections on which copies were sent.
        damaged: parts of the traffic that were damaged.
    """

    def __init__(self, port: int, damage_s: float = 0.0) -> None:
        self._target, self.copies, self.damaged = port, 0, 0
        self._damage_s, self._until, self._random = damage_s, math.inf, random.Random(0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no further connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._until = min(self._until, time.monotonic() + self._damage_s)
                serve = self._serve_damaged if self._damage_s else self._serve
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as server:
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            first = client.recv(1 << 16)
            seen = bytearray()
            while first:
                if len(seen) < 1 << 16:
                    seen += first
                    self._send_copy(bytes(seen))
                    time.sleep(0.03)
                server.sendall(first)
                first = client.recv(1 << 16)

    def _serve_damaged(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as server:
            ways = ((client, server), (server, client))
            threads = [threading.Thread(target=self._damage, args=way, daemon=True) for way in ways]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

    def _damage(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 15)):
                kind = self._random.randrange(100) if time.monotonic() < self._until else 99
                self.damaged += kind < 8
                if kind < 4:
                    data[self._random.randrange(len(data))] ^= 1
                elif kind < 6:
                    data = data[len(data) // 2 :] + data[: len(data) // 2]
                elif kind == 6:
                    continue  # lost
                elif kind == 7:
                    break
                target.sendall(data)
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)

    def _send_copy(self, seen: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as other:
            other.sendall(seen)
            self.copies += 1
            time.sleep(0.01)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
