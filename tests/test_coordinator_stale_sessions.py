"""Messages of sessions before a coordinator's restart are dropped and counted apart from refused ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.sessions import Roster
from fedmq.clock import WallClock
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message
from fedmq.wire.sessions import Session, seal_message
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect, listen
from tests.waiting import PATIENCE, memory_uri, wait_for

SILO, RUN = "silo-00", "former-0123456789ab"
BEAT = Header(run=RUN, kind=Kind.HEARTBEAT, sender=SILO, receiver=COORDINATOR, sequence=0, sent_at=0.0)


@dataclass
class Ends:
    """A roster, a silo's connection, and what the roster has logged."""

    root: Path
    restarted: bool

    def __post_init__(self) -> None:
        keys = self.root / "keys"
        if not keys.exists():
            init_keys(keys, (COORDINATOR, SILO))
        self.uri = uri = memory_uri()
        self.wire, self.log = listen(uri), MessageLog(self.root / f"{self.restarted}.jsonl", COORDINATOR, WallClock())
        self.keys, accepted = keys, load_accepted(keys)
        identity = load_identity(keys, COORDINATOR)
        self.roster = Roster(
            self.wire, identity, accepted, RUN, self.log, WallClock(), max_body=1 << 20, restarted=self.restarted
        )
        self.connection: Connection = connect(uri)

    def join(self) -> tuple[Session, list[bytes]]:
        """Make a session; returns it with the frames of its ready."""
        hello, initiated = initiate(load_identity(self.keys, SILO), COORDINATOR, RUN, 0.0)
        self.send(hello)
        frames = self.connection.receive(PATIENCE)
        assert frames is not None
        ready, session = complete(initiated, load_accepted(self.keys), frames, 0.0)
        self.send(ready)
        assert self.roster.online(SILO)
        return session, [bytes(frame) for frame in ready]

    def send(self, frames: tuple[bytes, ...] | list[bytes]) -> None:
        self.connection.send(frames)
        received = self.wire.receive(PATIENCE)
        assert received is not None
        self.roster.take(*received)

    def break_connection(self) -> None:
        """Close the silo's connection, and send until the coordinator notices that."""
        self.connection.close()

        def lost() -> bool:
            self.roster.send(SILO, Message(self.roster.header(SILO, Kind.STOP)))
            return not self.roster.online(SILO)

        wait_for(lost)

    def close(self) -> tuple[list[object], list[RefusedRecord]]:
        """The counts of dropped messages, and the refusals, in the log."""
        self.roster.note_unlogged()
        self.connection.close()
        self.wire.close()
        self.log.close()
        records = [record for _, record in read_log(self.log.path)]
        counts = [
            each.facts["count"]
            for each in records
            if isinstance(each, NoteRecord) and each.event is LogEvent.STALE_SESSIONS
        ]
        return counts, [each for each in records if isinstance(each, RefusedRecord)]


@pytest.mark.parametrize("restarted", [True, False])
def test_queued_messages_of_a_session_with_the_earlier_process_do_not_count_as_refused(
    tmp_path: Path, restarted: bool
) -> None:
    (tmp_path / "before").mkdir()
    before = Ends(tmp_path / "before", restarted=False)
    old, ready = before.join()
    queued = [list(seal_message(old, Message(BEAT)).frames) for _ in range(3)]
    before.close()
    (tmp_path / "before" / "after").mkdir()
    after = Ends(tmp_path / "before" / "after", restarted=restarted)
    after.send(ready)
    after.send(queued[0])  # before the silo has a session
    session, _ = after.join()
    after.send(queued[1])  # on the connection of its session
    after.send(list(seal_message(session, Message(BEAT)).frames))
    assert after.roster.online(SILO)
    counts, refused = after.close()
    if restarted:
        assert (counts, refused, after.roster.refused, after.roster.refusal) == ([3], [], {}, "")
    else:
        assert counts == [] and after.roster.refused == {"unknown_session": 2, "unexpected": 1}
        assert len(refused) == 3


def test_what_is_damaged_replayed_or_of_a_session_of_this_process_is_still_refused(tmp_path: Path) -> None:
    ends = Ends(tmp_path, restarted=True)
    session, _ = ends.join()
    frames = list(seal_message(session, Message(BEAT)).frames)
    ends.send(frames)
    ends.send(frames)  # replayed
    clear, body = seal_message(session, Message(BEAT)).frames
    ends.send([bytes(clear), b"\0" * len(bytes(body))])  # tampered
    ends.roster.drop(SILO)
    ends.send([bytes(clear), bytes(body)])  # of a session that has ended
    ends.send([b"noise", b"noise"])
    counts, refused = ends.close()
    assert counts == []
    assert [each.reason.value for each in refused] == ["replay", "tampered", "unknown_session", "malformed"]


def test_a_peer_to_which_a_message_cannot_be_delivered_is_lost_with_the_log_record_as_its_cause(tmp_path: Path) -> None:
    ends = Ends(tmp_path, restarted=False)
    ends.join()
    ends.break_connection()
    undelivered = dict(ends.roster.undelivered)
    ends.connection = connect(ends.uri)
    ends.join()
    assert not ends.roster.undelivered  # its new session has nothing to do with that
    ends.close()
    records = [record for _, record in read_log(ends.log.path)]
    notes = [each.n for each in records if isinstance(each, NoteRecord) and each.event is LogEvent.NOT_DELIVERED]
    assert undelivered == {SILO: notes[0]}
