"""The structured message log of a process, chained by hashes, and the checks an auditor makes of a run folder.

One JSON object per line. Every record holds the hash of the record before it and its own hash over everything else,
so a line that was changed, removed or inserted shows. Records hold no tensors, no captions and no keys: they say who
sent what kind of thing to whom, how large it was, and the authentication tag of the sealed frame, which both ends log.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from fedmq.clock import Clock
from fedmq.errors import InputError
from fedmq.messages import Header, Message, digest, tensor_bytes
from fedmq.runfolder import make_folder, writing
from fedmq.stored import Stored

GENESIS = "0" * 64
Action = Literal["sent", "received", "refused", "note"]
#: How long to wait for a process of the same name that is being ended [s].
_LOCK_SECONDS = 5.0


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def chain(previous: str, record: Mapping[str, Any]) -> str:
    """Hash of a record: SHA-256 over the previous hash and the canonical JSON of the record without ``hash``."""
    return hashlib.sha256(previous.encode() + _canonical(record)).hexdigest()


# ------------------------------------------------------------------------------------------------ what a record holds
# Logs come from processes that nobody trusts: a record is what its action says, or it is none.
_Size = Annotated[int, Field(ge=0)]


class _Record(Stored):
    n: int
    process: str
    wall: str
    previous: str
    hash: str


class _Note(_Record):
    text: str
    version: int | None = None
    __pydantic_extra__: dict[str, str | float | None]


class _Event(_Note):
    event: str
    silo: str
    sequence: int
    now: float
    version: int


class _Refused(_Record):
    peer: str
    reason: str
    detail: str
    bytes: _Size


class _Handshake(_Record):
    kind: str
    peer: str
    bytes: _Size


class _Message(_Record):
    run: str
    kind: str
    sender: str
    receiver: str
    sequence: int
    reply_to: int | None
    base_version: int
    sent_at: float
    session: str
    counter: int
    payloads: list[tuple[str, _Size]]
    digests: list[str] | None = None
    bytes: _Size
    tag: str


def _shape(record: Any) -> str | None:
    """Which of them a record says it is."""
    action = record.get("action") if isinstance(record, dict) else None
    if action in ("sent", "received"):
        return "message" if "counter" in record else "handshake"
    if action == "note":
        return "event" if record.get("text") == "event" else "note"
    return "refused" if action == "refused" else None


_RECORD: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Annotated[_Note, Tag("note")]
        | Annotated[_Event, Tag("event")]
        | Annotated[_Refused, Tag("refused")]
        | Annotated[_Handshake, Tag("handshake")]
        | Annotated[_Message, Tag("message")],
        Discriminator(_shape),
    ]
)


def _record(line: bytes) -> dict[str, Any] | None:
    """A line as the record it is, None if it is none."""
    try:
        _RECORD.validate_json(line)
        record: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if line.endswith(b"\n") else None


def read_log(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The records of a log with their line numbers; None for a line that is no whole record of a message log.

    Raises:
        InputError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(str(path), error.strerror, "a readable message log") from None
    with file:
        for number, line in enumerate(file, 1):
            yield number, _record(line)


#: What the coordinator notes of a run without messages; an auditor must not take its silence for a clean record.
INLINE = "silos run inside the coordinator: no messages are exchanged, none are logged"
_NOT_INLINE = "says that nothing was sent; only the coordinator may, and only where no log has a message or a handshake"
#: As docs/wire.md calls it, and what a log calls a peer that no session names; neither module may be imported here.
_COORDINATOR, _UNKNOWN = "coordinator", "unknown"


class MessageLog:
    """Appends records to one process's log, each whole or not at all.

    Every method that records something raises what ``fedmq.runfolder.writing`` says if the record cannot be written;
    the log then ends with the record before it.

    Args:
        path: of the log; an existing one is continued, after cutting off a last line that a crash left unfinished.
        process: name of the process.
        clock: for the date and time of a record.

    Raises:
        InputError: the log cannot be written there, or another process writes it; two writers would break the chain.
        RunError: the disk is full or broken.
    """

    def __init__(self, path: Path, process: str, clock: Clock) -> None:
        self.path = path
        self.process = process
        self._clock = clock
        self._head, self._count, self._size = GENESIS, 0, 0
        make_folder(path.parent)
        with writing(path):
            self._file = path.open("ab", buffering=0)
        try:
            self._lock()
            self._continue()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        """Hold the log until it is closed; the kernel lets go of it when the process dies."""
        until = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    found = f"a log that another {self.process} is writing"
                    raise InputError(str(self.path), found, "one process of a name in a run folder") from None
            time.sleep(0.05)

    def _continue(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = _record(line)
                if record is not None:  # What is none is not ours to mend: the audit will point at it.
                    self._head, self._count = record["hash"], record["n"] + 1
                self._size += len(line)
        os.truncate(self.path, self._size)

    @property
    def head(self) -> str:
        """Hash of the last record."""
        return self._head

    def _append(self, record: dict[str, Any]) -> None:
        record = {
            "n": self._count,
            "process": self.process,
            "wall": self._clock.utc(),
            **record,
            "previous": self._head,
        }
        record["hash"] = head = chain(self._head, record)
        line = _canonical(record) + b"\n"
        with writing(self.path):
            try:
                rest = memoryview(line)
                while rest:  # A disk that is about to be full takes a part of it, and says so at the next write only.
                    rest = rest[self._file.write(rest) :]
            except BaseException:
                # Half a record would break the chain for all that follow.
                self._file.truncate(self._size)
                raise
        self._head, self._count, self._size = head, self._count + 1, self._size + len(line)

    def message(self, action: Literal["sent", "received"], message: Message, tag: str, size: int) -> None:
        """Record a message.

        Args:
            action: which way it went.
            message: the message, for its header and the kinds and sizes of its payloads.
            tag: hexadecimal authentication tag of the sealed frame.
            size: bytes of all its frames.
        """
        self._append(
            {
                "action": action,
                **_header(message.header),
                "payloads": [[payload.KIND, tensor_bytes(payload)] for payload in message.payloads],
                # The sender's record alone: hashing costs, and the tag binds the receiver's record to it.
                **({"digests": [digest(payload) for payload in message.payloads]} if action == "sent" else {}),
                "bytes": size,
                "tag": tag,
            }
        )

    def handshake(self, action: Literal["sent", "received"], kind: str, peer: str, size: int) -> None:
        """Record a hello or a welcome, which carry public keys only."""
        self._append({"action": action, "kind": kind, "peer": peer, "bytes": size})

    def refused(self, peer: str, reason: str, detail: str, size: int) -> None:
        """Record something that was not accepted.

        Args:
            peer: whoever it came from, as far as known.
            reason: the fixed word of the refusal.
            detail: one line.
            size: bytes of all its frames.
        """
        self._append({"action": "refused", "peer": peer, "reason": reason, "detail": detail[:300], "bytes": size})

    def note(self, text: str, **facts: str | float) -> None:
        """Record something that is no message: a start, a resume, a lost silo, a stop."""
        self._append({"action": "note", "text": text, **facts})

    def close(self) -> None:
        """Close the file; every record is already with the operating system."""
        self._file.close()

    def __enter__(self) -> MessageLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _header(header: Header) -> dict[str, Any]:
    return {
        "run": header.run,
        "kind": header.kind.value,
        "sender": header.sender,
        "receiver": header.receiver,
        "sequence": header.sequence,
        "reply_to": header.reply_to,
        "base_version": header.base_version,
        "sent_at": header.sent_at,
        "session": header.session.hex(),
        "counter": header.counter,
    }


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
    """

    findings: list[Finding] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    left: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    frames: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    undelivered: int = 0
    inline: bool = False
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        """As JSON-serialisable data."""
        return {
            "ok": not self.findings,
            "findings": [{"place": f.place, "what": f.what} for f in self.findings],
            "records": dict(sorted(self.records.items())),
            "left": {name: dict(sorted(kinds.items())) for name, kinds in sorted(self.left.items())},
            "frames": dict(sorted(self.frames.items())),
            "refused": {name: dict(sorted(reasons.items())) for name, reasons in sorted(self.refused.items())},
            "undelivered": self.undelivered,
        }


_COMPARED = ("run", "kind", "sequence", "reply_to", "base_version", "sent_at", "payloads", "bytes", "tag")


def audit_run(folder: Path) -> Audit:
    """Check every message log of a run folder: its own chain, and what was sent against what was received.

    Raises:
        InputError: the folder holds no message logs.
    """
    logs = sorted((folder / "messages").glob("*.jsonl"))
    if not logs:
        raise InputError(
            str(folder), "no messages/*.jsonl", "a run folder that fedmq scenario or fedmq coordinator wrote"
        )
    result = Audit()
    named: dict[str, str] = {}
    notes: list[tuple[str, str]] = []
    exchanged = False
    sent: dict[tuple[str, str, str, int], tuple[str, dict[str, Any]]] = {}
    received: dict[tuple[str, str, str, int], tuple[str, dict[str, Any]]] = {}
    for path in logs:
        for place, record in _checked_chain(path, result):
            _tally(place, record, result, sent, received)
            for name in _others(record):
                named.setdefault(name, place)
            exchanged = exchanged or _shape(record) in ("message", "handshake")
            if record["action"] == "note" and record["text"] == INLINE:
                notes.append((path.stem, place))
    # Whoever has messages to hide could write that note; the coordinator's holds unless any log speaks against it.
    result.inline = not exchanged and any(process == _COORDINATOR for process, _ in notes)
    if result.inline:
        return result
    result.findings += [Finding(place, _NOT_INLINE) for _, place in notes]
    present, unseen = {path.stem for path in logs}, Counter[str]()
    for key, (place, record) in received.items():
        if key in sent:
            _compare(place, record, *sent[key], result)
        elif key[0] in present:
            what = f"{record['kind']} from {key[0]} received, but never logged as sent"
            result.findings.append(Finding(place, what))
        else:
            unseen[key[0]] += 1
    for process in sorted(named.keys() - present):
        count = unseen[process]
        why = f"{count} messages of {process} cannot be compared" if count else f"{named[process]} tells of {process}"
        result.findings.append(Finding(f"{process}.jsonl", f"no such log in this folder: {why}"))
    # What went to a process whose log is elsewhere is not known to be lost.
    result.undelivered = sum(key[1] in present for key in sent.keys() - received.keys())
    return result


def _others(record: dict[str, Any]) -> tuple[str, ...]:
    """The processes that a record tells of; of one that was never heard there need not be a log."""
    match _shape(record):
        case "message":
            return record["sender"], record["receiver"]
        case "handshake":
            return (record["peer"],)
        case "refused" if record["peer"] != _UNKNOWN:
            return (record["peer"],)
    return ()


def _compare(place: str, record: dict[str, Any], other_place: str, other: dict[str, Any], result: Audit) -> None:
    different = [name for name in _COMPARED if record.get(name) != other.get(name)]
    if different:
        result.findings.append(Finding(place, f"differs from {other_place} in {', '.join(different)}"))


def _checked_chain(path: Path, result: Audit) -> Iterator[tuple[str, dict[str, Any]]]:
    head, count = GENESIS, 0
    for number, record in read_log(path):
        place = f"{path.name}:{number}"
        if record is None:
            result.findings.append(Finding(place, "no whole record of a message log"))
            continue
        unhashed = {key: value for key, value in record.items() if key != "hash"}
        if record["previous"] != head or record["n"] != count:
            result.findings.append(
                Finding(place, "does not follow the record before it: lines were removed, inserted or moved")
            )
        elif chain(head, unhashed) != record["hash"]:
            result.findings.append(Finding(place, "was changed after it was written"))
        head, count = record["hash"], record["n"] + 1
        result.records[path.stem] += 1
        yield place, record


def _tally(
    place: str,
    record: dict[str, Any],
    result: Audit,
    sent: dict[tuple[str, str, str, int], tuple[str, dict[str, Any]]],
    received: dict[tuple[str, str, str, int], tuple[str, dict[str, Any]]],
) -> None:
    process, action = record["process"], record["action"]
    if action == "refused":
        result.refused[process][record["reason"]] += 1
    elif action == "sent":
        result.frames[process] += record["bytes"]
    if _shape(record) != "message":
        return
    result.messages.append((place, record))
    key = (record["sender"], record["receiver"], record["session"], record["counter"])
    seen = sent if action == "sent" else received
    if key in seen:
        result.findings.append(Finding(place, f"the same frame as {seen[key][0]} is logged as {action} again"))
    seen[key] = (place, record)
    if action == "sent":
        for kind, size in record["payloads"]:
            result.left[process][kind] += size
        if process != record["sender"]:
            result.findings.append(Finding(place, f"{process} logged sending in the name of {record['sender']}"))
