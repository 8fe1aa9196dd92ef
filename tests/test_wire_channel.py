"""The end of a silo's channel: the last message is delivered, nothing is sent after it, nothing stays open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.sessions import Roster
from fedmq.clock import WallClock
from fedmq.config.sections import Wire
from fedmq.errors import InputError, RemoteWireError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.packages import __version__
from fedmq.storage.logs import LogOptions, open_log
from fedmq.wire import channel, codec, key_agreement
from fedmq.wire.channel import BEAT_SECONDS, Channel
from fedmq.wire.keys import accept_key, init_keys, load_accepted, load_identity
from fedmq.wire.limits import BoundedDict, RateLimit
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import (
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    TimelineRecord,
    read_log,
)
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Kind, Message
from fedmq.wire.payloads import Error
from fedmq.wire.transports.base import QUEUE, Listener
from fedmq.wire.transports.registry import listen
from fedmq.wire.transports.tickets import ListenerKeys
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.threaded_run import resolved, run_of
from tests.waiting import PATIENCE, memory_uri, wait_for

SILO, RUN = "silo-00", "link-0-0123456789ab"
#: Two fewer than fill the queue: the handshake's messages count until ZeroMQ reports that they were read.
FULL = QUEUE - 2
#: Patience of a silo whose threads a busy machine may not run for several heartbeats.
BUSY = 10.0


class Jumping(WallClock):
    """A clock that can jump forward, as it does for a suspended process."""

    ahead = 0.0

    def stopwatch(self) -> float:
        return super().stopwatch() + self.ahead


def serve_until(listener: Listener, roster: Roster, done: Callable[[], bool]) -> None:
    """Have a roster take what arrives until a condition holds."""

    def reached() -> bool:
        if not done() and (got := listener.receive(0.1)) is not None:
            roster.take(*got)
        return done()

    wait_for(reached)


@contextmanager
def both_ends(
    folder: Path,
    queue: int,
    own_clock: WallClock | None = None,
    progress: Callable[[str], None] | None = None,
    patience: float = BUSY,
) -> Iterator[tuple[Listener, Roster, Channel]]:
    """A silo's channel with a session, and the coordinator's end; the caller closes the channel.

    With ``progress``, which gets the channel's lines for the terminal, it is enough that there is one.
    """
    keys, uri = folder / "keys", memory_uri()
    init_keys(keys, (COORDINATOR, SILO))
    clock = WallClock()
    listener = listen(uri, queue=queue)
    with MessageLog(folder / f"{COORDINATOR}.jsonl", COORDINATOR, clock) as log:
        identity = load_identity(keys, COORDINATOR)
        roster = Roster(listener, identity, load_accepted(keys), RUN, log, clock, max_body=1 << 20)
        own = MessageLog(folder / f"{SILO}.jsonl", SILO, clock)
        told = threading.Event()

        def tell(line: str) -> None:
            (progress or print)(line)
            told.set()

        silo, accepted = load_identity(keys, SILO), load_accepted(keys)
        link = Channel(uri, silo, accepted, RUN, own, own_clock or clock, lambda: 0.0, tell, patience=patience)
        link.start()
        serve_until(listener, roster, lambda: roster.online(SILO) or (progress is not None and told.is_set()))
        try:
            yield listener, roster, link
        finally:
            listener.close()


def records(folder: Path, action: str) -> list[str]:
    """Kinds of a silo's log records, or texts of notes."""
    found = [record for _, record in read_log(folder / f"{SILO}.jsonl") if record and record.action == action]
    return [_kind(record) for record in found]


def _kind(record: LogRecord) -> str:
    match record:
        case MessageRecord():
            return record.header.kind
        case HandshakeRecord():
            return record.kind
        case RefusedRecord():
            return record.reason
        case NoteRecord() | TimelineRecord():
            return record.event


def report(link: Channel, count: int) -> None:
    for number in range(1, count + 1):
        error = Error("training_failed", "x")
        link.send(Kind.ERROR, (error,), sequence=number, reply_to=number, base_version=0)


def test_a_task_that_cannot_be_read_is_answered_with_an_error(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=8) as (listener, roster, link):
        header = roster.header(SILO, Kind.TASK, sequence=7, base_version=3)
        peer = roster._by_name[SILO]
        listener.send(peer.address, peer.session.seal(header, [b"\x01\x00\x00\x00\xc0"]).frames)

        def received() -> Message | None:
            taken = None if (got := listener.receive(0.1)) is None else roster.take(*got)
            return taken if isinstance(taken, Message) else None

        message = wait_for(received)
        assert isinstance(message, Message)
        assert (message.header.kind, message.header.reply_to, message.header.base_version) == (Kind.ERROR, 7, 3)
        (said,) = message.payloads
        assert isinstance(said, Error)
        assert said.code == "unreadable"
        assert link.receive(timeout=0.1) is None
        link.close(0.5)


@pytest.mark.slow
def test_the_coordinator_may_be_busy_for_longer_than_a_silo_may(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=64, patience=1.0) as (_, roster, link):
        time.sleep(2.2 * BEAT_SECONDS)
        assert LogEvent.HEARTBEAT_MISSED not in records(tmp_path, "note")
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        link.close()


def test_a_silo_that_was_suspended_repeats_the_handshake_immediately(tmp_path: Path) -> None:
    clock = Jumping()
    with both_ends(tmp_path, queue=64, own_clock=clock) as (listener, roster, link):
        roster.drop(SILO)
        clock.ahead = 3 * BEAT_SECONDS * BUSY
        serve_until(listener, roster, lambda: roster.online(SILO))
        assert roster.online(SILO)
        assert records(tmp_path, "note") == [LogEvent.PROCESS_SUSPENDED]
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        link.close()


def test_a_coordinator_that_was_stopped_says_so_at_once(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=64) as (listener, roster, link):
        before = roster._by_name[SILO]
        roster.pause()
        wait_for(lambda: LogEvent.COORDINATOR_STOPPED in records(tmp_path, "note"))
        serve_until(listener, roster, lambda: roster._by_name[SILO] is not before)  # it waits for the next process
        roster.dismiss([SILO])
        link.close()
    assert records(tmp_path, "note") == [LogEvent.COORDINATOR_STOPPED] and records(tmp_path, "refused") == []


def test_another_wire_version_reaches_the_terminal_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    initiate, terminal = channel.initiate, open_log(LogOptions(), SILO)

    def of_another_version(*arguments: Any, **options: Any) -> Any:
        frames, initiated = initiate(*arguments, **options)
        clear = codec.encode_header(replace(codec.decode_header(frames[0]), wire_version=7))
        return (clear, frames[1]), replace(initiated, hello=(bytes(clear), bytes(frames[1])))

    monkeypatch.setattr(channel, "initiate", of_another_version)
    with both_ends(tmp_path, queue=64, progress=terminal.warning) as (_, _, link):
        link.close()
    here = f"fedmq {__version__} here has wire version 1"
    said = f"says: wire version 7, supported here: 1; {here}; install the same release at both ends"
    assert said in capsys.readouterr().err


def test_a_hello_that_waited_for_a_new_connection_begins_one_session(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=64) as (listener, roster, link):
        before = roster._by_name[SILO]
        say_hello, made = link._say_hello, [1]

        def earlier(*arguments: Any, **options: Any) -> None:
            say_hello(*arguments, **options)
            made[0] = 2

        link._say_hello = earlier  # type: ignore[method-assign]
        link._connection.established = lambda: made[0]  # type: ignore[method-assign, union-attr]
        link._end_session(LogEvent.RECONNECTED)
        serve_until(listener, roster, lambda: roster._by_name[SILO] is not before)
        roster.send(SILO, roster.header(SILO, Kind.HEARTBEAT))
        serve_until(listener, roster, lambda: "heartbeat" in records(tmp_path, "received"))
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        link.close()
    assert records(tmp_path, "note") == [LogEvent.RECONNECTED] and records(tmp_path, "refused") == []


def test_a_stop_reaches_a_silo_that_is_blocked_sending(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=1) as (listener, roster, link):
        report(link, 200)
        wait_for(lambda: records(tmp_path, "sent").count("error") >= FULL)
        time.sleep(0.3)
        assert FULL <= records(tmp_path, "sent").count("error") < 200
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        listener.close()
        message = link.receive(timeout=PATIENCE)
        assert message is not None
        assert message.header.kind is Kind.STOP
        link.close()
    assert records(tmp_path, "received")[-1] == "stop"
    assert records(tmp_path, "note") == records(tmp_path, "refused") == []


def test_a_session_that_asks_for_new_keys_too_often_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_agreement, "MOST_REKEYS_ANSWERED", 2)
    with both_ends(tmp_path, queue=64) as (listener, roster, link):
        link._options = Wire(rekey_messages=1)
        serve_until(listener, roster, lambda: bool(roster.refused) and roster.online(SILO))
        assert roster.refused["too_often"] == 1 and roster.online(SILO), "it connects anew"
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        link.close()
    assert records(tmp_path, "note") == [LogEvent.RATE_LIMITED]
    assert records(tmp_path, "sent").count("rekey") >= 3


def test_the_oldest_entries_of_a_bounded_dict_are_forgotten() -> None:
    recent = BoundedDict[str, int](2)
    for number, key in enumerate("abac"):
        recent[key] = number
    assert recent == {"b": 1, "c": 3}


def test_requests_for_new_keys_are_allowed_again_with_time() -> None:
    limit = RateLimit(2, at=10.0)
    assert [limit.take(now) for now in (10.0, 10.1, 10.2, 11.3, 11.4)] == [True, True, False, True, False]
    assert [limit.take(1e6) for _ in range(3)] == [True, True, False]


def test_after_a_stop_nothing_is_sent_to_the_coordinator(tmp_path: Path) -> None:
    with both_ends(tmp_path, queue=64) as (_, roster, link):
        roster.send(SILO, roster.header(SILO, Kind.STOP))
        message = link.receive(timeout=PATIENCE)
        assert message is not None
        assert message.header.kind is Kind.STOP
        report(link, 3)
        link.close()
    assert records(tmp_path, "sent") == ["hello", "ready"]


class Hurried(WallClock):
    """A clock that runs twenty times too fast."""

    def stopwatch(self) -> float:
        """Twenty times the elapsed time."""
        return 20 * super().stopwatch()


@pytest.mark.slow
def test_a_silo_connects_to_a_coordinator_with_a_new_key_once_that_is_accepted(tmp_path: Path) -> None:
    site, keys, printed, clock = tmp_path / "site", tmp_path / "keys", list[str](), WallClock()
    init_keys(site, (COORDINATOR, SILO))
    init_keys(keys, (COORDINATOR,))  # the coordinator's new key
    accept_key(keys, SILO, load_accepted(site)[SILO])
    identity, accepted = load_identity(keys, COORDINATOR), load_accepted(keys)
    listener = listen("tcp://127.0.0.1:0", keys=ListenerKeys(identity.key.public_key(), accepted))
    own = MessageLog(tmp_path / f"{SILO}.jsonl", SILO, clock)
    link = Channel(
        listener.uri, load_identity(site, SILO), load_accepted(site), RUN, own, clock, lambda: 0.0, printed.append
    )
    link.start()
    try:
        with MessageLog(tmp_path / f"{COORDINATOR}.jsonl", COORDINATOR, clock) as log:
            roster = Roster(listener, identity, accepted, RUN, log, clock, max_body=1 << 20)

            def joined() -> bool:
                with suppress(RemoteWireError):  # connections with the former key of the coordinator
                    if (received := listener.receive(0.1)) is not None:
                        roster.take(*received)
                if printed and load_accepted(site)[COORDINATOR] != accepted[COORDINATOR]:
                    accept_key(site, COORDINATOR, accepted[COORDINATOR])
                return roster.online(SILO)

            wait_for(joined)
    finally:
        link.close()
        listener.close()
    assert len(printed) == 1 and "does not have the coordinator's key" in printed[0]


@pytest.mark.slow
def test_a_silo_without_an_answer_reports_that_and_repeats_it_every_minute(tmp_path: Path) -> None:
    keys, uri, printed, clock = tmp_path / "keys", memory_uri(), list[str](), Hurried()
    init_keys(keys, (COORDINATOR, SILO))
    listener, own = listen(uri), MessageLog(tmp_path / f"{SILO}.jsonl", SILO, clock)
    link = Channel(uri, load_identity(keys, SILO), load_accepted(keys), RUN, own, clock, lambda: 0.0, printed.append)
    link.start()
    wait_for(lambda: len(records(tmp_path, "sent")) >= 6)
    link.close()
    listener.close()
    line, *later = printed
    assert later[0] == f"silo-00: still no answer from {uri} after 60 s; it keeps trying"
    assert len(set(later)) == len(later) <= 5  # at most 100 s of this clock
    assert line.startswith(f"silo-00: no answer from {uri} for 10 s: ")


@pytest.mark.parametrize("program", ["silo", "evaluator"])
def test_a_program_with_unreadable_data_reports_that_and_opens_no_socket(
    tiny: Path, tmp_path: Path, program: str
) -> None:
    scenario, keys = resolved(tiny, f"data.path={tmp_path}/nothing.npz"), tmp_path / "keys"
    init_keys(keys, (COORDINATOR, "evaluator", *scenario.silo_names))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    uri = memory_uri()
    with pytest.raises(InputError, match=r"nothing\.npz"):
        if program == "silo":
            run_silo(SiloArguments(run_of(scenario), SILO, uri, keys, tmp_path))
        else:
            run_evaluator(EvaluatorArguments(run_of(scenario), uri, keys, tmp_path))
    # Sockets of earlier tests may be closed meanwhile.
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
