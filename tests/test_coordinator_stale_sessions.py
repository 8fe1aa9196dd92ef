"""Messages of sessions before a coordinator's restart are dropped and counted apart from refused ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmq.config.sections import Wire
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import MessageRecord, NoteRecord, RefusedRecord
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Model
from fedmq.wire.sessions import open_message
from tests.roster_ends import Ends, header, roster_ends, sealed
from tests.waiting import wait_for

SILO = "silo-00"


def notes(ends: Ends, event: LogEvent) -> list[NoteRecord]:
    return [each for each in ends.records() if isinstance(each, NoteRecord) and each.event is event]


def refused(ends: Ends) -> list[str]:
    """Why messages were refused, by the log."""
    return [each.reason.value for each in ends.records() if isinstance(each, RefusedRecord)]


def dropped(ends: Ends) -> list[object]:
    """The counts of dropped messages, in the log."""
    ends.roster.note_unlogged()
    return [each.facts["count"] for each in notes(ends, LogEvent.STALE_SESSIONS)]


@pytest.mark.parametrize("restarted", [True, False])
def test_queued_messages_of_a_session_with_the_earlier_process_do_not_count_as_refused(
    tmp_path: Path, restarted: bool
) -> None:
    with roster_ends(tmp_path) as before:
        connection = before.connect()
        old = before.joined(connection)
        queued = [sealed(old, header(old, Kind.HEARTBEAT, 0)) for _ in range(2)]
        connection.close()
    (tmp_path / "after").mkdir()
    with roster_ends(tmp_path / "after", before.keys, restarted=restarted) as after:
        connection = after.connect()
        after.take(connection, before.ready)
        after.take(connection, queued[0])  # before the silo has a session
        session = after.joined(connection)
        after.take(connection, queued[1])  # on the connection of its session
        after.beat(connection, session)
        assert after.roster.online(SILO)
        if restarted:
            assert (dropped(after), refused(after), after.roster.refused, after.roster.refusal) == ([3], [], {}, "")
        else:
            assert (dropped(after), len(refused(after))) == ([], 3)
            assert after.roster.refused == {"unknown_session": 2, "unexpected": 1}
        connection.close()


def test_what_is_damaged_replayed_or_of_a_session_of_this_process_is_still_refused(tmp_path: Path) -> None:
    with roster_ends(tmp_path, restarted=True) as ends:
        connection = ends.connect()
        session = ends.joined(connection)
        frames = sealed(session, header(session, Kind.HEARTBEAT, 0))
        ends.take(connection, frames)
        ends.take(connection, frames)  # replayed
        clear, body = sealed(session, header(session, Kind.HEARTBEAT, 0))
        ends.take(connection, (clear, b"\0" * len(body)))  # tampered
        ends.roster.drop(SILO)
        ends.take(connection, (clear, body))  # of a session that has ended
        ends.take(connection, (b"noise", b"noise"))
        assert (dropped(ends), refused(ends)) == ([], ["replay", "tampered", "unknown_session", "malformed"])
        connection.close()


def test_a_peer_to_which_a_message_cannot_be_delivered_is_lost_with_the_log_record_as_its_cause(tmp_path: Path) -> None:
    with roster_ends(tmp_path) as ends:
        connection = ends.connect()
        ends.joined(connection)
        connection.close()

        def lost() -> bool:
            ends.roster.send(SILO, Message(ends.roster.header(SILO, Kind.STOP)))
            return not ends.roster.online(SILO)

        wait_for(lost)
        (note,) = notes(ends, LogEvent.NOT_DELIVERED)
        assert ends.roster.undelivered == {SILO: note.n}
        again = ends.connect()
        ends.joined(again)
        assert not ends.roster.undelivered  # its new session has nothing to do with that
        again.close()


@pytest.mark.parametrize("padding", [False, True])
def test_a_model_is_sealed_once_for_all_silos_unless_messages_are_padded(tmp_path: Path, *, padding: bool) -> None:
    parts = list[bytes]()
    with roster_ends(tmp_path, options=Wire(padding=padding)) as ends:
        lines = {name: ends.connect() for name in ("silo-00", "silo-01")}
        silos = {name: ends.joined(line, name) for name, line in lines.items()}
        for version in range(2):
            model = Model("0" * 64, np.full(1 << 18, version, np.float32))
            for name in silos:
                assert ends.roster.send(name, Message(ends.roster.header(name, Kind.EVALUATE), (model,)))
            for name, line in lines.items():
                frames = wait_for(lambda line=line: line.receive(1.0))
                message, tag = open_message(silos[name], frames)
                assert message.payloads[0].buffer[-1] == version  # type: ignore[attr-defined]
                parts += map(bytes, frames[2:])
                sent = [each for each in ends.records() if isinstance(each, MessageRecord) and each.tag == tag]
                assert [(each.header.receiver, each.bytes) for each in sent] == [(name, sum(map(len, frames)))]
    assert [part == parts[0] for part in parts] == ([] if padding else [True, True, False, False])
