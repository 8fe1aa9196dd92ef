"""The checks an auditor makes of the message logs in a run folder.

One JSON object per line. Every record holds the hash of the record before it and its own hash over everything else,
so a line that was changed, removed or inserted shows. Records hold no tensors, no captions and no keys: they say who
sent what kind of thing to whom, how large it was, and the authentication tag of the sealed frame, which both ends log.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmq.audit.run_checks import Course, against_the_run, told_by
from fedmq.errors import InputError
from fedmq.storage.locks import is_locked
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import (
    GENESIS,
    HEADER,
    EventRecord,
    Frame,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteKind,
    NoteRecord,
    RefusedRecord,
    read_log,
)
from fedmq.wire.messages import COORDINATOR, Kind, Reason

_NOT_INLINE = "says that nothing was sent; only the coordinator may, and only where no log has a message or a handshake"
#: What a log calls a peer that no session names; its module may not be imported here.
_UNKNOWN = "unknown"


# ------------------------------------------------------------------------------------------------------ the audit
@dataclass(frozen=True)
class Finding:
    """Something an auditor must know.

    Args:
        place: file and line.
        what: one line.
    """

    place: str
    what: str


@dataclass
class Audit:
    """What the logs of a run show.

    Args:
        findings: differences; an empty list means that the logs agree with themselves and with each other.
        records: number of records read, by process.
        left: bytes of payload tensors that left each process, by kind.
        frames: bytes of all frames that left each process.
        refused: number of refusals, by process and reason.
        inline: the silos were calls inside the coordinator: there were no messages, so nothing is shown about them.
        undelivered: messages sent that nobody logged as received: refused ones, and what was on its way when a process
            ended.
        messages: every record of a sealed message with its file and line, as each end logged it.
        finished: there is a summary; what a run releases and measures at its end is held against the logs from then on.
        written: processes that are writing their logs now: what is sent while logs are read one after another may show
            as a difference.
    """

    findings: list[Finding] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    left: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    frames: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    undelivered: int = 0
    inline: bool = False
    messages: list[tuple[str, MessageRecord]] = field(default_factory=list)
    finished: bool = False
    written: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        return {
            "ok": not self.findings,
            "finished": self.finished,
            "written": list(self.written),
            "findings": [{"place": f.place, "what": f.what} for f in self.findings],
            "records": dict(sorted(self.records.items())),
            "left": {name: dict(sorted(kinds.items())) for name, kinds in sorted(self.left.items())},
            "frames": dict(sorted(self.frames.items())),
            "refused": {name: dict(sorted(reasons.items())) for name, reasons in sorted(self.refused.items())},
            "undelivered": self.undelivered,
        }


#: What both ends of a message must have logged alike, beside its header.
_COMPARED = ("payloads", "digests", "bytes", "tag")
#: Where a frame is logged, and how.
_Frames = dict[Frame, tuple[str, MessageRecord]]


@dataclass
class _Logs:
    """What is gathered of all logs.

    Args:
        sent: frames as their senders logged them.
        received: frames as their receivers logged them.
        handshakes: by action, kind, sender and receiver: how often, and the last place.
        named: processes that a record tells of, with the first place.
        inline: logs with the note that nothing was sent, with its place.
        exchanged: whether any log has a message or a handshake.
        course: what binds the logs to the rest of the run folder.
    """

    sent: _Frames = field(default_factory=dict)
    received: _Frames = field(default_factory=dict)
    handshakes: dict[tuple[str, str, str, str], tuple[int, str]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    inline: list[tuple[str, str]] = field(default_factory=list)
    exchanged: bool = False
    course: Course = field(default_factory=Course)


def audit_run(folder: Path) -> Audit:
    """Check every message log of a run folder: its own chain, what was sent against what was received, and both against
    what the folder says of the run.

    Raises:
        InputError: the folder holds no message logs.
    """
    logs = sorted((folder / "messages").glob("*.jsonl"))
    if not logs:
        raise InputError(
            str(folder), "no messages/*.jsonl", "a run folder that fedmq scenario or fedmq coordinator wrote"
        )
    told = told_by(RunFolder(folder))
    result, found = Audit(finished=told.finished, written=tuple(path.stem for path in logs if is_locked(path))), _Logs()
    for path in logs:
        for place, record in _of_its_own(path, result):
            _counters(path.stem, place, record, result, found)
    # Whoever has messages to hide could write that note; the coordinator's holds unless any log speaks against it.
    result.inline = not found.exchanged and any(process == COORDINATOR for process, _ in found.inline)
    if not result.inline:
        result.findings += [Finding(place, _NOT_INLINE) for _, place in found.inline]
        _compare_ends(found, {path.stem for path in logs}, result)
    bound = against_the_run(RunFolder(folder), told, found.course, found.named, inline=result.inline)
    result.findings += [Finding(*each) for each in bound]
    if not result.inline:
        result.findings += _missing(found, {path.stem for path in logs})
    return result


def _compare_ends(found: _Logs, present: set[str], result: Audit) -> None:
    """Hold what was received against what was sent."""
    for key, (place, record) in found.received.items():
        if key in found.sent:
            _compare(place, record, *found.sent[key], result)
        elif key[0] in present:
            what = f"{record.header.kind} from {key[0]} received, but never logged as sent"
            result.findings.append(Finding(place, what))
    for (action, kind, sender, receiver), (count, place) in found.handshakes.items():
        sent, _ = found.handshakes.get(("sent", kind, sender, receiver), (0, ""))
        # A hello travels in clear: who recorded one can send it again, and a coordinator started anew takes it.
        if action == "received" and kind != Kind.HELLO and sender in present and count > sent:
            what = f"{count} times a {kind} from {sender} received, but {sent} times logged as sent"
            result.findings.append(Finding(place, what))
    # What went to a process whose log is elsewhere is not known to be lost.
    result.undelivered = sum(key[1] in present for key in found.sent.keys() - found.received.keys())


def _missing(found: _Logs, present: set[str]) -> Iterator[Finding]:
    """A finding for every process that something tells of, and of which there is no log."""
    unseen = Counter(sender for sender, *_ in found.received)
    for process in sorted(found.named.keys() - present):
        count = unseen[process]
        told = f"{found.named[process]} tells of {process}"
        why = f"{count} messages of {process} cannot be compared" if count else told
        yield Finding(f"{process}.jsonl", f"no such log in this folder: {why}")


def _others(record: LogRecord) -> tuple[str, ...]:
    """The processes that a record tells of; of one that was never heard there need not be a log."""
    match record:
        case MessageRecord():
            return record.header.sender, record.header.receiver
        case HandshakeRecord():
            return (record.peer,)
        case RefusedRecord():
            return () if record.peer == _UNKNOWN else (record.peer,)
        case NoteRecord() | EventRecord():
            return ()


def _compare(place: str, record: MessageRecord, other_place: str, other: MessageRecord, result: Audit) -> None:
    different = [name for name in HEADER if getattr(record.header, name) != getattr(other.header, name)]
    different += [name for name in _COMPARED if getattr(record, name) != getattr(other, name)]
    if different:
        result.findings.append(Finding(place, f"differs from {other_place} in {', '.join(different)}"))


def _of_its_own(path: Path, result: Audit) -> Iterator[tuple[str, LogRecord]]:
    """The records of a log with their places, held against each other and against the name of the file."""
    counters, strangers, refusals = dict[tuple[str, str, bytes], int](), set[str](), dict[str, float]()
    for place, record in _checked_chain(path, result):
        process = record.process
        if process != path.stem and process not in strangers:
            strangers.add(process)
            result.findings.append(Finding(place, f"a record of {process} in the log of {path.stem}"))
        match record:
            case RefusedRecord():
                # Of what was lost on the way nobody knows how much it was: the refusal says that there was some.
                # What is refused without a size was taken from the wire, and has been logged so.
                lost = math.inf if record.reason is Reason.GAP else int(record.bytes > 0)
                refusals[record.peer] = refusals.get(record.peer, 0) + lost
            case MessageRecord():
                action, sender = record.action, record.header.sender
                # A silo's first sealed message is its ready, which is logged as a handshake.
                first = 0 if sender == COORDINATOR else 1
                session = action, sender, record.header.session
                counter, expected = record.header.counter, counters.get(session, first)
                # Of what arrives each may have been refused, and has a record then that says so.
                refused = refusals.pop(sender, 0) if action == "received" else 0
                if counter > expected + refused:
                    what = f"message {counter} of a session, expected {expected}: what was between is not in the log"
                    result.findings.append(Finding(place, what))
                elif counter < expected and action == "received":
                    result.findings.append(Finding(place, f"message {counter} of a session after {expected - 1}"))
                counters[session] = max(expected, counter + 1)
            case HandshakeRecord() | NoteRecord() | EventRecord():
                pass
        yield place, record


def _checked_chain(path: Path, result: Audit) -> Iterator[tuple[str, LogRecord]]:
    head, count = GENESIS, 0
    for number, record in read_log(path):
        place = f"{path.name}:{number}"
        if record is None:
            result.findings.append(Finding(place, "no whole record of a message log"))
            continue
        if record.previous != head or record.n != count:
            result.findings.append(
                Finding(place, "does not follow the record before it: lines were removed, inserted or moved")
            )
        elif not record.intact:
            result.findings.append(Finding(place, "was changed after it was written"))
        head, count = record.hash, record.n + 1
        result.records[path.stem] += 1
        yield place, record


def _counters(process: str, place: str, record: LogRecord, result: Audit, found: _Logs) -> None:
    """Take a record of a process's log into account."""
    for name in _others(record):
        found.named.setdefault(name, place)
    found.course.take(process, place, record)
    match record:
        case RefusedRecord():
            result.refused[process][record.reason] += 1
        case NoteRecord():
            if record.text is NoteKind.INLINE:
                found.inline.append((process, place))
        case HandshakeRecord():
            found.exchanged = True
            if record.action == "sent":
                result.frames[process] += record.bytes
            ends = (process, record.peer) if record.action == "sent" else (record.peer, process)
            count, _ = found.handshakes.get((record.action, record.kind, *ends), (0, ""))
            found.handshakes[record.action, record.kind, *ends] = count + 1, place
        case MessageRecord():
            found.exchanged = True
            if record.action == "sent":
                result.frames[process] += record.bytes
            _tally_message(process, place, record, result, found)
        case EventRecord():
            pass


def _tally_message(process: str, place: str, record: MessageRecord, result: Audit, found: _Logs) -> None:
    """Take a message of a process's log into account."""
    header = record.header
    result.messages.append((place, record))
    if len(record.digests) != len(record.payloads):
        what = f"{len(record.digests)} digests of {len(record.payloads)} payloads"
        result.findings.append(Finding(place, what))
    if COORDINATOR not in (header.sender, header.receiver):
        what = f"a message from {header.sender} to {header.receiver}: silos talk to the coordinator alone"
        result.findings.append(Finding(place, what))
    key = record.frame
    seen = found.sent if record.action == "sent" else found.received
    if key in seen:
        result.findings.append(Finding(place, f"the same frame as {seen[key][0]} is logged as {record.action} again"))
    seen[key] = (place, record)
    if record.action == "sent":
        for kind, size in record.payloads:
            result.left[process][kind] += size
        if process != header.sender:
            result.findings.append(Finding(place, f"{process} logged sending in the name of {header.sender}"))
    elif process != header.receiver:
        result.findings.append(Finding(place, f"{process} logged receiving what was for {header.receiver}"))
