"""Copies, noise and foreign keys on the wire: the right silo joins, logs stay small, and both ends learn the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.sessions import Roster
from fedmq.clock import VirtualClock, WallClock
from fedmq.errors import RemoteWireError
from fedmq.wire.channel import Channel
from fedmq.wire.handshake import HelloRefusedError, complete, initiate, reject, respond
from fedmq.wire.keys import init_keys, load_accepted, load_identity, words
from fedmq.wire.limits import PER_CONNECTION, PER_MINUTE
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import HandshakeRecord, NoteRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Kind
from fedmq.wire.transports.base import Listener
from fedmq.wire.transports.registry import listen
from tests.waiting import memory_uri, wait_for

SILO, RUN = "silo-00", "link-0-0123456789ab"


class Moments(VirtualClock):
    """A clock whose stopwatch a test sets."""

    at = 0.0

    def stopwatch(self) -> float:
        return self.at


class Recorded(Listener):
    """A listener that keeps what is sent, by address."""

    uri = "none"

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, list[memoryview]]] = []

    def receive(self, timeout_s: float | None = None) -> None:
        return None

    def send(self, peer: bytes, frames: object) -> bool:
        self.sent.append((peer, [memoryview(frame) for frame in frames]))  # type: ignore[attr-defined]
        return True

    def close(self) -> None:
        pass


class Coordinator:
    """A roster without a transport."""

    def __init__(self, folder: Path, names: tuple[str, ...] = (COORDINATOR, SILO)) -> None:
        self.keys, self.log_path, self.clock, self.wire = folder / "keys", folder / "c.jsonl", Moments(), Recorded()
        init_keys(self.keys, names)
        self.log = MessageLog(self.log_path, COORDINATOR, self.clock)
        self.accepted = load_accepted(self.keys)
        self.identity = load_identity(self.keys, COORDINATOR)
        self.roster = Roster(self.wire, self.identity, self.accepted, RUN, self.log, self.clock, max_body=1 << 20)

    def take(self, address: bytes, frames: object) -> object:
        return self.roster.take(address, [memoryview(frame) for frame in frames])  # type: ignore[attr-defined]

    def records(self, kind: type) -> list[object]:
        return [record for _, record in read_log(self.log_path) if isinstance(record, kind)]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    yield made
    made.log.close()


NOISE = [b"x", b""]


# ------------------------------------------------------------------------------------------------------ bounded logs
def test_noise_is_counted_but_only_some_of_each_connection_and_each_minute_is_logged(coordinator: Coordinator) -> None:
    for number in range(1000):
        coordinator.take(b"%d" % (number % 2), NOISE)
    assert len(coordinator.records(RefusedRecord)) == 2 * PER_CONNECTION
    for number in range(1000):
        coordinator.take(b"%d" % number, NOISE)
    assert len(coordinator.records(RefusedRecord)) == PER_MINUTE
    coordinator.clock.at = 61.0
    coordinator.take(b"0", NOISE)
    assert len(coordinator.records(RefusedRecord)) == PER_MINUTE + 1
    (note,) = coordinator.records(NoteRecord)
    assert isinstance(note, NoteRecord)
    assert (note.event, note.facts["count"]) == (LogEvent.REFUSALS_COUNTED, 2000 - PER_MINUTE)
    assert coordinator.roster.refused.total() == 2001


def test_noise_on_the_connection_of_a_session_is_not_attributed_to_its_silo(coordinator: Coordinator) -> None:
    hello, initiated = initiate(load_identity(coordinator.keys, SILO), COORDINATOR, RUN, 0.0)
    coordinator.take(b"a", hello)
    ready, _ = complete(initiated, coordinator.accepted, coordinator.wire.sent[-1][1], 0.0)
    coordinator.take(b"a", ready)
    assert coordinator.roster.online(SILO)
    size = coordinator.log_path.stat().st_size
    for _ in range(10_000):
        coordinator.take(b"a", [ready[0], b"y" * 80])
    refused = coordinator.records(RefusedRecord)
    assert {record.peer for record in refused} == {"unknown"}  # type: ignore[attr-defined]
    assert coordinator.log_path.stat().st_size - size < 20_000
    assert coordinator.roster.online(SILO)


# ----------------------------------------------------------------------------------------------- copies of a hello
@pytest.mark.parametrize("copies", [1, 300])
def test_copies_of_a_hello_that_arrive_first_do_not_lock_its_sender_out(coordinator: Coordinator, copies: int) -> None:
    hello, initiated = initiate(load_identity(coordinator.keys, SILO), COORDINATOR, RUN, 0.0)
    for number in range(copies):
        coordinator.take(b"relay-%d" % number, hello)
    coordinator.take(b"silo", hello)
    address, welcome = coordinator.wire.sent[-1]
    ready, _ = complete(initiated, coordinator.accepted, welcome, 0.0)
    assert address == b"silo"
    assert coordinator.take(b"relay-0", ready) is None
    assert not coordinator.roster.online(SILO)
    assert coordinator.take(b"silo", ready) is not None
    assert coordinator.roster.online(SILO)
    kinds = Counter(record.kind for record in coordinator.records(HandshakeRecord))  # type: ignore[attr-defined]
    assert kinds == {Kind.HELLO: 1, Kind.WELCOME: 1, Kind.READY: 1}


# ------------------------------------------------------------------------------------------- what a refusal tells
def refusal(coordinator: Coordinator, keys: Path, run: str = RUN, name: str = SILO) -> RemoteWireError:
    hello, initiated = initiate(load_identity(keys, name), COORDINATOR, run, 0.0)
    coordinator.take(b"a", hello)
    with pytest.raises(RemoteWireError) as caught:
        complete(initiated, coordinator.accepted, coordinator.wire.sent[-1][1], 0.0)
    return caught.value


def test_a_silo_with_an_accepted_key_learns_that_its_run_is_another(coordinator: Coordinator) -> None:
    told = refusal(coordinator, coordinator.keys, run="another-run")
    assert isinstance(told, HelloRefusedError)
    assert told.reason == "wrong_run"
    assert RUN in told.detail


@pytest.mark.parametrize("run", [RUN, "another-run"])
@pytest.mark.parametrize("name", [SILO, "silo-07"])
def test_an_unknown_sender_learns_only_that_its_key_is_not_accepted(
    coordinator: Coordinator, tmp_path: Path, run: str, name: str
) -> None:
    init_keys(tmp_path / "stranger", (name,))
    told = refusal(coordinator, tmp_path / "stranger", run, name)
    assert (type(told), told.reason, told.detail) == (HelloRefusedError, "unknown_sender", "this key is not accepted")
    # At the coordinator the reason stands with the claimed name.
    (record,) = coordinator.records(RefusedRecord)
    assert isinstance(record, RefusedRecord)
    assert name in record.detail


def test_a_refusal_is_believed_only_with_the_coordinators_signature_over_this_hello(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    silo = load_identity(coordinator.keys, SILO)
    hello, initiated = initiate(silo, COORDINATOR, "another-run", 0.0)
    earlier, _ = initiate(silo, COORDINATOR, "another-run", 0.0)
    init_keys(tmp_path / "rogue", (COORDINATOR,))
    error = RemoteWireError("wrong_run", "no")
    for identity, frames in ((load_identity(tmp_path / "rogue", COORDINATOR), hello), (coordinator.identity, earlier)):
        answer = reject(identity, coordinator.accepted, frames, error, 0.0)
        assert answer is not None
        with pytest.raises(RemoteWireError) as caught:
            complete(initiated, coordinator.accepted, answer, 0.0)
        assert type(caught.value) is RemoteWireError
        assert caught.value.reason == "bad_signature"


# --------------------------------------------------------------------------------------------- what a silo reports
def reported(folder: Path, keys: Path, answer: Callable[[list[memoryview]], object]) -> str:
    """The first line of a silo's channel, whose hellos get ``answer``."""
    uri, told = memory_uri(), list[str]()
    listener, log = listen(uri), MessageLog(folder / "silo.jsonl", SILO, WallClock())
    link = Channel(uri, load_identity(keys, SILO), load_accepted(keys), RUN, log, WallClock(), lambda: 0.0, told.append)
    link.start()

    def answered() -> list[str]:
        if (received := listener.receive(0.1)) is not None:
            listener.send(received[0], answer(received[1]))  # type: ignore[arg-type]
        return told

    wait_for(answered)
    link.close(0.5)
    listener.close()
    return told[0]


def test_a_silo_reports_that_a_coordinator_with_another_key_answers(tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", (COORDINATOR, SILO))
    init_keys(tmp_path / "rogue", (COORDINATOR,))
    accepted, rogue = load_accepted(tmp_path / "keys"), load_identity(tmp_path / "rogue", COORDINATOR)
    line = reported(tmp_path, tmp_path / "keys", lambda hello: respond(rogue, accepted, RUN, hello, 0.0)[0])
    assert "does not have the coordinator's key" in line
    assert words(accepted[COORDINATOR]) in line


def test_a_silo_whose_key_is_not_accepted_reports_the_words_that_its_operator_reads_out(tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", (COORDINATOR, SILO))
    coordinator = load_identity(tmp_path / "keys", COORDINATOR)
    error = RemoteWireError("unknown_sender", "no key of silo-00 is accepted here")
    line = reported(tmp_path, tmp_path / "keys", lambda hello: reject(coordinator, {}, hello, error, 0.0))
    assert "does not accept this key of silo-00" in line
    assert words(load_identity(tmp_path / "keys", SILO)) in line
    notes = [record for _, record in read_log(tmp_path / "silo.jsonl") if isinstance(record, NoteRecord)]
    assert notes[0].event is LogEvent.HELLO_REFUSED
    assert notes[0].facts == {"reason": "unknown_sender", "detail": "this key is not accepted"}
