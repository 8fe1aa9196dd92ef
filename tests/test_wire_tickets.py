"""Tickets of connections over TCP: which admit a connection, how often, and what who has another's ticket can do."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.attacks import Target, presented
from fedmq.config.faults import Drop, SignFlip, wire_over
from fedmq.config.sections import Wire
from fedmq.errors import RemoteWireError
from fedmq.wire.keys import fingerprint
from fedmq.wire.transports import tickets
from fedmq.wire.transports._connection_admission import PARTIAL, PER_KEY, bytes_received
from fedmq.wire.transports._zeromq import ZeroMQConnection
from fedmq.wire.transports.base import MAX_FRAME, Listener
from fedmq.wire.transports.registry import connect, listen
from fedmq.wire.transports.tickets import REMEMBERED, USE_SECONDS, USES, VALID_SECONDS, ConnectionKeys, ListenerKeys
from tests.waiting import PATIENCE, wait_for

NAME, NOON = "silo-00", 1_700_000_000.0
COORDINATOR, SILO, STRANGER = (Ed25519PrivateKey.generate() for _ in range(3))
ACCEPTED = {NAME: SILO.public_key()}
KEYS = ConnectionKeys(SILO, COORDINATOR.public_key(), NAME)


class Gate(tickets.TicketGate):
    """A gate with a clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOON
        super().__init__(ListenerKeys(COORDINATOR.public_key(), ACCEPTED, lambda: self.now))

    def admits(self, ticket: bytes, name: str = NAME) -> bool:
        verdict = self.judge(name.encode(), ticket)
        assert (verdict.why == "") is (verdict.key != "")
        return verdict.key == SILO.public_key().public_bytes_raw().hex()


def forged(at: int) -> bytes:
    """A ticket with one bit of a byte flipped."""
    raw = bytearray(base64.b64decode(KEYS.ticket(NOON)))
    raw[at] ^= 1
    return base64.b64encode(raw)


# --------------------------------------------------------------------------------------------------- which are valid
def test_a_ticket_of_an_accepted_key_for_this_coordinator_is_valid_and_short_enough_for_zeromq() -> None:
    ticket = KEYS.ticket(NOON)
    assert Gate().admits(ticket)
    assert len(ticket) <= 255  # of a password


@pytest.mark.parametrize("at", [0, 40, 64, 72, 88, 151], ids=["key", "coordinator", "time", "nonce", "r", "s"])
def test_every_part_of_a_ticket_is_signed(at: int) -> None:
    assert not Gate().admits(forged(at))


@pytest.mark.parametrize("ticket", [b"", b"x", b"?" * 204, KEYS.ticket(NOON)[:-4], KEYS.ticket(NOON) + b"AAAA"])
def test_what_is_no_ticket_is_refused(ticket: bytes) -> None:
    assert Gate().judge(NAME.encode(), ticket).why == "no ticket"


def test_a_ticket_is_valid_for_its_name_only() -> None:
    assert not Gate().admits(KEYS.ticket(NOON), "silo-01")


def test_the_name_of_a_refused_peer_cannot_contain_control_characters() -> None:
    assert "\n" not in Gate().judge(b"silo\n\xff", KEYS.ticket(NOON)).why


def test_a_ticket_for_another_coordinator_is_refused_with_a_code_of_its_own() -> None:
    elsewhere = ConnectionKeys(SILO, STRANGER.public_key(), NAME)
    assert Gate().judge(NAME.encode(), elsewhere.ticket(NOON)).status == tickets.FOREIGN
    assert Gate().judge(NAME.encode(), b"x").status == tickets.REFUSED


def test_the_operator_reads_name_and_key_of_a_peer_whose_key_is_unknown() -> None:
    verdict = Gate().judge(NAME.encode(), ConnectionKeys(STRANGER, COORDINATOR.public_key(), NAME).ticket(NOON))
    assert verdict.status == tickets.REFUSED
    assert f"claims to be {NAME}, with the unknown key SHA256 {fingerprint(STRANGER.public_key())}" in verdict.why
    assert verdict.why.endswith("`fedmq keys accept` accepts its request")


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_ticket_is_valid_for_a_day_by_clocks_that_differ_by_a_day(sign: int) -> None:
    gate, ticket = Gate(), KEYS.ticket(NOON)
    gate.now = NOON + sign * (VALID_SECONDS + 1)
    assert "a clock is wrong" in gate.judge(NAME.encode(), ticket).why
    gate.now = NOON + sign * (VALID_SECONDS - 1)
    assert gate.admits(ticket)


# ------------------------------------------------------------------------------------------------------- how often
def test_a_ticket_admits_few_connections_soon_after_each_other() -> None:
    gate, first, second = Gate(), KEYS.ticket(NOON), KEYS.ticket(NOON)
    assert [gate.admits(first) for _ in range(USES + 1)] == [True] * USES + [False]
    assert gate.admits(second)
    gate.now += USE_SECONDS + 1
    assert not gate.admits(second)
    assert gate.admits(KEYS.ticket(gate.now))


def test_tickets_that_are_not_valid_use_none_up() -> None:
    gate, ticket = Gate(), KEYS.ticket(NOON)
    for _ in range(USES + 1):
        assert not gate.admits(ticket, "silo-01")
    assert gate.admits(ticket)


def test_forgotten_tickets_stay_used() -> None:
    gate = Gate()
    made = [KEYS.ticket(NOON + number) for number in range(2 * REMEMBERED)]
    assert all(gate.admits(ticket) for ticket in made)
    assert sum(map(len, gate._uses.values())) == REMEMBERED
    gate.now += USE_SECONDS + 1
    assert not any(gate.admits(ticket) for ticket in made)
    assert gate.admits(KEYS.ticket(NOON + 2 * REMEMBERED))


# --------------------------------------------------------------------------------------------- over real connections
@pytest.fixture
def listener() -> Iterator[Listener]:
    made = listen("tcp://127.0.0.1:*", keys=ListenerKeys(COORDINATOR.public_key(), ACCEPTED))
    yield made
    made.close()


def recorded(listener: Listener, ticket: bytes) -> socket.socket | None:
    """A connection of someone who has a silo's ticket."""
    port = int(listener.uri.rpartition(":")[2])
    return presented(Target(port, "run", Path(), threading.Event()), ticket)


def now() -> bytes:
    return KEYS.ticket(tickets.time.time())  # type: ignore[attr-defined]


def test_a_connection_that_breaks_again_and_again_is_replaced_with_new_tickets(listener: Listener) -> None:
    connection = connect(listener.uri, keys=KEYS)
    for number in range(1, 2 * USES):
        connection.send((b"header", b"%d" % number))
        received = listener.receive(PATIENCE)  # would raise an error for a refused ticket
        assert received is not None and bytes(received[1][1]) == b"%d" % number
        listener.cut(received[0])
        wait_for(lambda number=number: connection.receive(0.05) or connection.established() > number)  # type: ignore[misc]
    assert connection.refusal() is None
    connection.close()


def test_what_arrived_before_a_connection_broke_is_delivered() -> None:
    listener = listen("tcp://127.0.0.1:*", keys=ListenerKeys(COORDINATOR.public_key(), ACCEPTED))
    connection = connect(listener.uri, keys=KEYS)
    assert isinstance(connection, ZeroMQConnection)
    connection.send((b"header", b"hello"))
    received = listener.receive(PATIENCE)
    assert received is not None
    assert listener.send(received[0], (b"header", b"stop"))
    listener.close()
    wait_for(lambda: connection.established() and connection._broken)
    last = connection.receive(0.0)
    assert last is not None and bytes(last[1]) == b"stop"
    connection.close()


def test_connections_with_recorded_tickets_do_not_end_one_with_a_session(listener: Listener) -> None:
    connection, others = connect(listener.uri, keys=KEYS), list[socket.socket]()
    connection.send((b"header", b"hello"))
    received = listener.receive(PATIENCE)
    assert received is not None
    listener.keep(received[0])
    for number in range(4 * PER_KEY):
        if number % USES == 0:
            ticket = now()
        other = recorded(listener, ticket)
        assert other is not None
        other.sendall(b"\x01\x01x\x00\x01y")
        assert listener.receive(PATIENCE) is not None
        others.append(other)
    assert recorded(listener, ticket) is None
    connection.send((b"header", b"still here"))

    def heard() -> bool:
        with contextlib.suppress(RemoteWireError):
            got = listener.receive(0.1)
            return got is not None and bytes(got[1][1]) == b"still here"
        return False

    wait_for(heard)
    assert connection.established() == 1
    connection.close()
    for each in others:
        each.close()


def test_a_message_of_endless_frames_ends_its_connection(listener: Listener) -> None:
    attacker = recorded(listener, now())
    assert attacker is not None

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                attacker.sendall(b"\x01\x00" * (1 << 15))

    attacker.settimeout(PATIENCE)
    threading.Thread(target=send, daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while attacker.recv(1 << 10):  # until the listener closes the connection
            pass
    with contextlib.suppress(OSError):  # reset already
        attacker.shutdown(socket.SHUT_RDWR)
    attacker.close()


@pytest.fixture
def false_listener() -> Iterator[socket.socket]:
    """A socket on which :func:`admitted` takes a connection's ticket without a look at it."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE)
        yield made


def dialled(listener: socket.socket, max_frame: int) -> ZeroMQConnection:
    connection = connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys=KEYS, max_frame=max_frame)
    assert isinstance(connection, ZeroMQConnection)
    return connection


def admitted(listener: socket.socket) -> socket.socket:
    """The next connection, admitted with ZeroMQ's PLAIN mechanism as by a listener."""
    peer, _ = listener.accept()
    peer.settimeout(PATIENCE)
    peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + b"\1" + bytes(31))
    with peer.makefile("rb") as stream:
        stream.read(64)
        for answer in (b"\x07WELCOME", b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER"):
            _, size = stream.read(2)
            stream.read(size)
            peer.sendall(b"\x04" + bytes([len(answer)]) + answer)
    return peer


def attack(listener: socket.socket, read: threading.Semaphore) -> None:
    """Send a whole message and, when it is read, endless frames, until the connection is closed; on two of them."""
    for _ in range(2):
        with admitted(listener) as peer, contextlib.suppress(ConnectionError):
            peer.sendall(b"\x01\x01x\x00\x01y")
            read.acquire()
            for _ in range(64):  # MiB; more is only more memory
                peer.sendall((b"\x01\xfe" + bytes(254)) * (1 << 12))
            while peer.recv(1 << 10):
                pass


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("timeout_s", [0.0, PATIENCE, None])
def test_a_false_coordinator_cannot_fill_a_silos_memory_with_a_message_of_endless_frames(
    false_listener: socket.socket, timeout_s: float | None, keeps: bool
) -> None:
    connection = dialled(false_listener, PARTIAL if keeps else MAX_FRAME)
    with ThreadPoolExecutor(1) as pool:
        read = threading.Semaphore(0)
        attacked = pool.submit(attack, false_listener, read)
        attacked.add_done_callback(lambda _: connection.wake())
        while not attacked.done():
            if connection.receive(timeout_s) is not None:
                if keeps:
                    connection.keep()
                read.release()
        attacked.result()
    connection.close()


def test_a_coordinator_that_completed_a_handshake_may_send_a_frame_of_the_largest_size(
    false_listener: socket.socket,
) -> None:
    connection, body = dialled(false_listener, 2 * PARTIAL), bytes(2 * PARTIAL)
    with ThreadPoolExecutor(1) as pool, pool.submit(admitted, false_listener).result() as peer:
        wait_for(connection.established)
        connection.keep()
        peer.sendall(b"\x01\x01x\x02" + len(body).to_bytes(8, "big") + body[1:])
        wait_for(lambda: bytes_received(connection._descriptor or 0) > len(body))
        assert connection.receive(0.0) is None
        peer.sendall(body[:1])
        received = connection.receive(PATIENCE)
    assert received is not None and received[1].nbytes == len(body)
    assert connection.established() == 1
    connection.close()


# ------------------------------------------------------------------------------------------------- what is in clear
def test_names_are_hidden_over_tcp_unless_faults_need_them() -> None:
    drops, flips = (Drop(probability=0.1),), (SignFlip(),)
    assert wire_over("tcp://host:1", Wire(), flips).hides
    assert wire_over("shared+tcp://host:1", Wire(), ()).hides
    assert not wire_over("tcp://host:1", Wire(), drops).hides
    assert not wire_over("ipc:///socket", Wire(), ()).hides
    assert wire_over("ipc:///socket", Wire(padding=True), ()).padding
