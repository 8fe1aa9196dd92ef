"""Records of message logs: they round-trip byte for byte."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from fedmq.clock import VirtualClock
from fedmq.wire import codec
from fedmq.wire.codec import digest
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.log_records import (
    GENESIS,
    HEADER,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    TimelineRecord,
    canonical,
    chain,
    read_log,
    record_of,
)
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message, Reason
from fedmq.wire.payloads import Delta, Loss
from tests.wire_examples import header


def written(path: Path) -> list[LogRecord]:
    """The records of a log with one record of each kind."""
    numbers = {"sequence": 3, "reply_to": 3, "base_version": 2, "counter": 7}
    sent = Message(header(run="run-0", session=b"s" * 16, **numbers), (Loss(0.5),))
    with MessageLog(path, "coordinator", VirtualClock()) as log:
        log.handshake("received", Kind.HELLO, "silo-00", 1400)
        log.message("received", sent, "ab" * 16, 900)
        log.refused("silo-00", Reason.REPLAY, "message 7", 900)
        log.note(LogEvent.FAULT, kind="crash", place=1, silo="silo-00", sequence=3, caused_by=0)
        log.event(TimelineEvent.ARRIVED, silo="silo-00", sequence=3, now=1.5, version=2, number=5)
    found = [record for _, record in read_log(path)]
    assert None not in found
    return [record for record in found if record is not None]


def test_the_record_of_a_message_that_is_still_hashed_is_written_before_the_next_one(tmp_path: Path) -> None:
    path, head = tmp_path / "log.jsonl", header(session=b"s" * 16, reply_to=3)
    sent = Message(head, (Delta("0" * 64, np.ones(1 << 18, np.float32), 1),))
    idle = threading.Event()
    codec._HASHING.submit(idle.wait)
    codec.start_hashing(sent.payloads[0])
    with MessageLog(path, "coordinator", VirtualClock()) as log:
        log.message("received", sent, "ab" * 16, 900, waits=False)
        assert (log.records, path.read_bytes()) == (1, b"")
        idle.set()
        assert log.note(LogEvent.STARTED) == 1
        log.message("received", Message(head, (Loss(0.5),)), "cd" * 16, 900, waits=False)
        assert log.records == 3 == len(path.read_bytes().splitlines()), "nothing to wait for"
        log.message("received", sent, "ef" * 16, 900, waits=False)
    found = [record for _, record in read_log(path)]
    assert [record.n for record in found if record is not None] == [0, 1, 2, 3]
    assert isinstance(found[0], MessageRecord) and found[0].digests == [digest(sent.payloads[0])]


def test_each_kind_of_record_round_trips(tmp_path: Path) -> None:
    hello, message, refused, note, event = written(tmp_path / "log.jsonl")
    assert isinstance(hello, HandshakeRecord) and (hello.kind, hello.peer, hello.bytes) == (Kind.HELLO, "silo-00", 1400)
    assert isinstance(message, MessageRecord)
    assert (message.action, message.header.kind, message.header.session) == ("received", Kind.REPLY, b"s" * 16)
    assert (message.payloads, message.digests) == ([("loss", 0)], [digest(Loss(0.5))])
    assert isinstance(refused, RefusedRecord) and refused.reason is Reason.REPLAY
    assert isinstance(note, NoteRecord) and note.event is LogEvent.FAULT and note.caused_by == 0
    assert note.facts == {"kind": "crash", "place": 1, "silo": "silo-00", "sequence": 3}
    assert isinstance(event, TimelineRecord) and (event.event, event.now, event.number) == (
        TimelineEvent.ARRIVED,
        1.5,
        5,
    )


def test_a_record_is_the_canonical_json_of_its_fields_and_those_of_the_header(tmp_path: Path) -> None:
    for record, line in zip(written(tmp_path / "log.jsonl"), (tmp_path / "log.jsonl").open("rb"), strict=True):
        plain = json.loads(line)
        assert line == canonical(plain) + b"\n" == record.line
        assert record.hash == chain(record.previous, {name: each for name, each in plain.items() if name != "hash"})
        assert record.intact
        if isinstance(record, MessageRecord):
            assert set(HEADER) < plain.keys() and "header" not in plain


def test_a_record_has_every_header_field_except_the_wire_version() -> None:
    assert {field.name for field in fields(Header)} - set(HEADER) == {"wire_version"}


def line_of(**values: Any) -> bytes:
    """A valid log line."""
    plain = {"n": 0, "process": "silo-00", "wall": "2026-01-01T00:00:00.000+00:00", "previous": GENESIS, **values}
    return canonical({**plain, "hash": chain(GENESIS, plain)}) + b"\n"


EVENT = {"action": "timeline", "event": "arrived", "silo": "", "sequence": 0, "now": 1, "version": 0, "number": 1}


def test_a_record_is_caused_by_an_earlier_one_and_its_event_is_known() -> None:
    for plain in ({"action": "note", "event": "fault"}, EVENT):
        later = record_of(line_of(**plain, n=7, caused_by=6))
        assert isinstance(later, NoteRecord | TimelineRecord) and later.caused_by == 6
        for wrong in (7, 8, -1, "6", 6.0):
            assert record_of(line_of(**plain, n=7, caused_by=wrong)) is None
        assert record_of(line_of(**{**plain, "event": "the moon is full"})) is None


def test_the_script_in_the_docs_prints_what_led_to_a_record(tmp_path: Path) -> None:
    document = Path(__file__).parent.parent / "docs" / "reference" / "message_logs.md"
    block = document.read_text().partition("    import json, sys\n")[2].partition("\n\n")[0]
    path = tmp_path / "log.jsonl"
    with MessageLog(path, "coordinator", VirtualClock()) as log:
        log.note(LogEvent.STARTED)
        expelled = log.note(LogEvent.EXPELLED, peer="silo-01")
        event = {"silo": "silo-01", "sequence": 2, "now": 1.0, "version": 1, "number": 5}
        failed = log.event(TimelineEvent.FAILED, **event, caused_by=expelled)
        log.note(LogEvent.KEYS_UNREADABLE)
        last = log.note(LogEvent.TASK_FAILED, caused_by=failed)
    script = f"import json, sys\n{textwrap.dedent(block)}"
    done = subprocess.run([sys.executable, "-c", script, path, str(last)], capture_output=True, text=True, check=True)
    events = [ast.literal_eval(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["task_failed", "failed", "expelled"]


def test_the_docs_name_the_kinds_of_messages_that_have_records() -> None:
    document = (Path(__file__).parent.parent / "docs" / "reference" / "message_logs.md").read_text()
    entry = document.partition("- `kind` (sent, received)")[2].partition("\n- ")[0]
    recorded, _, others = entry.partition("A `reject`")
    assert set(re.findall("`(.+?)`", recorded)) == set(Kind) - {Kind.REJECT, Kind.INQUIRE, Kind.STATUS}
    assert set(re.findall("`(.+?)`", others)) == {Kind.INQUIRE, Kind.STATUS}


MESSAGE = {
    "action": "sent",
    "run": "run-0",
    "kind": "task",
    "sender": "coordinator",
    "receiver": "silo-00",
    "sequence": 1,
    "reply_to": None,
    "base_version": 0,
    "sent_at": 0,
    "session": "ab" * 16,
    "counter": 0,
    "payloads": [["model", 4]],
    "digests": ["ab" * 32],
    "bytes": 10,
    "tag": "ab" * 16,
}


def test_what_is_not_the_object_of_a_record_with_valid_fields_is_none() -> None:
    assert isinstance(record_of(line_of(**MESSAGE)), MessageRecord)
    changes: list[dict[str, Any]] = [
        {"kind": "hello"}, {"kind": "nonsense"}, {"kind": "reply"}, {"sequence": -1}, {"sequence": 1.0},
        {"sequence": True}, {"session": ""}, {"session": "AB" * 16}, {"session": 7}, {"sender": "no name"},
        {"sent_at": "0"}, {"payloads": [["model", 4, 4]]}, {"payloads": [["model", -4]]}, {"payloads": "model"},
        {"digests": ["ab"]}, {"tag": "x"}, {"header": {}}, {"action": "lost"},
    ]  # fmt: skip
    others = [line_of(**{**MESSAGE, **change}) for change in changes]
    others += [line_of(**{key: MESSAGE[key] for key in MESSAGE if key != name}) for name in MESSAGE.keys() - {"action"}]
    others += [b"", b"\n", b"[]\n", b"7\n", b'"note"\n', b"{}\n", b'{"action":"note"}\n', b"[" * 9999]
    for line in others:
        assert record_of(line) is None, line[:200]


def test_text_not_encodable_in_utf_8_can_be_logged_and_read_back(tmp_path: Path) -> None:
    with MessageLog(tmp_path / "log.jsonl", "coordinator", VirtualClock()) as log:
        log.note(LogEvent.CHECKPOINT_REFUSED, error="no such file: x\udce9")
        log.refused("silo-00", Reason.MALFORMED, "x\udce9", 1)
    note, refused = (record for _, record in read_log(tmp_path / "log.jsonl"))
    assert isinstance(note, NoteRecord) and note.facts == {"error": r"no such file: x\udce9"}
    assert isinstance(refused, RefusedRecord) and refused.detail == r"x\udce9"


def test_the_times_of_records_do_not_decrease_when_the_clock_of_the_machine_is_set_back(tmp_path: Path) -> None:
    class Set(VirtualClock):
        wall = "2026-11-27T12:00:00.000+00:00"

        def utc(self, at: float | None = None) -> str:
            return self.wall

    clock, path = Set(), tmp_path / "silo-00.jsonl"
    for wall in ("2026-11-27T15:00:00.000+00:00", "2026-11-27T10:00:00.000+00:00", "2026-11-28T00:00:00.000+00:00"):
        clock.wall = wall
        with MessageLog(path, "silo-00", clock) as log:  # a restart reads the last time from the log
            log.note(LogEvent.STARTED)
            log.note(LogEvent.ENDED)
    found = [json.loads(line)["wall"][:13] for line in path.read_text().splitlines()]
    assert found == ["2026-11-27T15"] * 4 + ["2026-11-28T00"] * 2
