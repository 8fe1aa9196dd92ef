"""The records of a message log: one type per kind of record, and their hash chain.

Logs may come from untrusted processes. A line counts as a record only if it has the fields of its action, each of its
declared type, and is exactly the canonical JSON that fedmq writes for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, JsonValue, ValidationInfo, model_validator

from fedmq.errors import InputError
from fedmq.storage.json_files import DateTime, Digest, Stored
from fedmq.storage.regular_files import MAX_LINE, bounded_lines, open_regular
from fedmq.text import first_few
from fedmq.wire.fields import FieldError
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.messages import SESSION_BYTES, Header, Kind, Reason

GENESIS = "0" * 64
#: Identifies a sent frame by sender, receiver, session and counter, which both ends log.
Frame = tuple[str, str, bytes, int]
#: Value of a further field of a note.
Fact = str | int | float | None


class SignedAt(StrEnum):
    """When a process signs its log."""

    START = "start"
    #: The coordinator, before it writes the checkpoint of a merge.
    MERGE = "merge"
    #: A silo or the evaluator, before it sends a reply or an error.
    REPLY = "reply"
    END = "end"


_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def canonical(record: Mapping[str, object]) -> bytes:
    """A record's line in the log, without the newline."""
    return _JSON.encode(record).encode()


def chain(previous: str, record: Mapping[str, object]) -> str:
    """Hash of a record: SHA-256 over the previous hash and the canonical JSON of the record without ``hash``."""
    return hashlib.sha256(previous.encode() + canonical(record)).hexdigest()


#: Date and time in UTC, with milliseconds.
_Wall = Annotated[DateTime, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
_Size = Annotated[int, Field(ge=0)]
_Direction = Literal["sent", "received"]
# Not strict: JSON has strings and lists in place of enums and tuples.
_PayloadSize = Annotated[tuple[str, _Size], Field(strict=False)]
_Reason = Annotated[Reason, Field(strict=False)]
_LogEvent = Annotated[LogEvent, Field(strict=False)]
_TimelineEvent = Annotated[TimelineEvent, Field(strict=False)]


def _earlier(caused_by: int | None, info: ValidationInfo) -> int | None:
    if caused_by is not None and caused_by >= info.data.get("n", 0):
        raise ValueError("the number of an earlier record")
    return caused_by


_CausedBy = Annotated[_Size | None, AfterValidator(_earlier)]


class _Record(Stored):
    """Base of all records."""

    n: int  # number of the record in its log, from 0
    process: str  # name of the process that wrote it
    wall: _Wall  # when it was written, UTC with milliseconds
    previous: str  # hash of the record before it; 64 zeros for the first one
    hash: str  # hash of this record, by chain

    @property
    def _extra(self) -> dict[str, Any]:
        return self.__pydantic_extra__ or {}

    def plain(self) -> dict[str, JsonValue]:
        """As JSON-serialisable data: what the log holds, no more and no less."""
        given = self.model_fields_set
        return {**{name: value for name, value in self.__dict__.items() if name in given}, **self._extra}

    @property
    def line(self) -> bytes:
        """The record's line in the log."""
        return canonical(self.plain()) + b"\n"

    @property
    def intact(self) -> bool:
        """Whether the stored hash matches the record."""
        return self.hash == self.hash_after(self.previous)

    def hash_after(self, previous: str) -> str:
        """The hash of this record's content after a record with the hash ``previous``."""
        plain = self.plain()
        del plain["hash"]
        return chain(previous, plain)


class _Noted(_Record):
    __pydantic_extra__: dict[str, Fact]

    @property
    def facts(self) -> Mapping[str, Fact]:
        """Its further fields by name."""
        return self._extra


class NoteRecord(_Noted):
    """A note of an event other than a message, e.g. a start, a lost silo, a release."""

    action: Literal["note"]
    event: _LogEvent  # what happened
    version: int | None = None  # number of merges, if the note has one
    # Number ``n`` of an earlier record of this log, which led to this one: an event on the timeline, or a note of what
    # peers or the operator did.
    caused_by: _CausedBy = None

    @property
    def not_summed(self) -> str:
        """What the secure sum of a round did not change; empty for other notes."""
        match self.event:
            case LogEvent.BRANCH_LEFT_ALONE:
                return f"left {self.facts.get('branch')} unchanged"
            case LogEvent.ROWS_LEFT_ALONE:
                return f"left {first_few(str(self.facts.get('rows')).split(', '))} unchanged"
            case LogEvent.SUM_ENDED:
                return "merged nothing"
        return ""


class TimelineRecord(_Noted):
    """An event on the run's timeline, as processed by the coordinator; a replay must have the same events."""

    action: Literal["timeline"]
    event: _TimelineEvent  # what happened
    silo: str  # the silo whose task it concerns; empty for a deadline
    sequence: int  # number of that task; 0 if there is none
    now: int | float  # the run's time [s]
    version: int
    number: int  # number of the event in the run, from 1
    # Number ``n`` of an earlier record of this log, which led to this one: the received reply, or why the task failed.
    caused_by: _CausedBy = None


class RefusedRecord(_Record):
    """A refused message."""

    action: Literal["refused"]
    peer: str  # its sender, as far as known
    reason: _Reason  # why it was refused
    detail: str  # one line for a reader
    bytes: _Size  # total size of all its frames [bytes]; 0 if it was refused after it had been received and logged


class StartRecord(_Record):
    """What a process declares at each start, before it exchanges messages; a :class:`SignatureRecord` follows."""

    action: Literal["start"]
    run: str
    scenario: Digest  # SHA-256 (hex) of the scenario without machine-dependent keys; the run's name begins with it
    protocol: str
    privacy: dict[str, JsonValue]
    data: str  # digest of the prepared data's content
    key: Digest  # this process's public key, Ed25519, 32 bytes in hexadecimal
    peers: dict[str, Digest]  # public keys that this process accepts, by name


class SignatureRecord(_Record):
    """A signature of the log up to the record before it."""

    action: Literal["signed"]
    at: Annotated[SignedAt, Field(strict=False)]  # when; a merge also has its ``version``
    version: int | None = None
    # Ed25519 (64 bytes in hexadecimal) of signed_statement, by the key of the last start. It covers the other fields of
    # this record, too: when it was made, and on which occasion.
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def signed_statement(run: str, record: Mapping[str, object]) -> bytes:
    """The bytes that a process signs: the run, and the record of the signature, which holds the log's head.

    ``hash`` and ``signature`` of the record are left out.
    """
    return f"fedmq log 1\n{run}\n".encode() + canonical(
        {name: value for name, value in record.items() if name not in ("hash", "signature")}
    )


class HandshakeRecord(_Record):
    """A handshake message."""

    action: _Direction
    kind: Literal[Kind.HELLO, Kind.WELCOME, Kind.READY]
    peer: str  # the process at the other end
    bytes: _Size  # total size of all its frames [bytes]


#: Fields of a message's header that its record holds: all but the wire version.
HEADER = tuple(each.name for each in fields(Header) if each.name != "wire_version")


class MessageRecord(_Record):
    """A sealed message. In the log, its header's fields are at the top level."""

    action: _Direction
    header: Header  # header of the message
    payloads: list[_PayloadSize]  # kind and tensor bytes of each payload, as sent
    digests: list[Digest]  # digests of each payload
    bytes: _Size  # total size of all its frames [bytes]
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # hexadecimal authentication tag of the sealed frame
    # Head of the sender's log when it sealed the message; missing if the sender keeps no signed log.
    head: Digest | None = None
    # Tensor bytes of each payload once decoded; missing if none of them was compressed.
    decoded: list[_Size] | None = None

    @model_validator(mode="after")
    def _size_of_each(self) -> Self:
        if self.decoded is not None and len(self.decoded) != len(self.payloads):
            raise ValueError("one decoded size for each payload")
        return self

    @property
    def both_sizes(self) -> Iterator[tuple[str, int, int]]:
        """Kind of each payload, and its tensor bytes as sent and once decoded."""
        for place, (kind, size) in enumerate(self.payloads):
            yield kind, size, size if self.decoded is None else self.decoded[place]

    @property
    def frame(self) -> Frame:
        """The frame's identifier, the same in both ends' logs."""
        return self.header.sender, self.header.receiver, self.header.session, self.header.counter

    def plain(self) -> dict[str, JsonValue]:
        """As JSON-serialisable data: what the log holds, no more and no less."""
        plain = super().plain()
        del plain["header"]
        header = {name: getattr(self.header, name) for name in HEADER}
        return {**plain, **header, "session": self.header.session.hex()}


LogRecord = (
    MessageRecord | HandshakeRecord | RefusedRecord | StartRecord | SignatureRecord | NoteRecord | TimelineRecord
)
_Any = TypeVar("_Any", bound=_Record)


def sealed(record: type[_Any], /, **values: object) -> _Any:
    """Make a record and set its hash."""
    unhashed = record.model_validate({**values, "hash": ""})
    return unhashed.model_copy(update={"hash": unhashed.hash_after(unhashed.previous)})


#: Types by action; a record of a message that has a counter is a :class:`MessageRecord`.
_TYPES: Mapping[str, type[LogRecord]] = {
    "sent": HandshakeRecord,
    "received": HandshakeRecord,
    "refused": RefusedRecord,
    "start": StartRecord,
    "signed": SignatureRecord,
    "timeline": TimelineRecord,
    "note": NoteRecord,
}


def record_of(line: bytes) -> LogRecord | None:
    """Parse a line of a log; None if it is not a record.

    The hashes are over parsed values. To make them cover the bytes of the line as well, only canonical JSON counts as
    a record: a line with a duplicate key or other spacing does not.
    """
    try:
        value = json.loads(line)
        kind = _TYPES[value["action"]]
        if kind is HandshakeRecord and "counter" in value:
            kind, value = MessageRecord, _with_header_object(value)
        record = kind.model_validate(value)
    except (KeyError, TypeError, ValueError, FieldError, RecursionError):
        return None
    return record if record.line == line else None


def _with_header_object(value: Mapping[str, Any]) -> dict[str, object]:
    """The fields of a message's record, with those of its header replaced by a Header."""
    kind, session = Kind(value["kind"]), str(value["session"])
    if kind in (Kind.HELLO, Kind.WELCOME, Kind.READY) or len(session) != 2 * SESSION_BYTES:
        raise ValueError("not a message of a session")
    values = {**{name: value[name] for name in HEADER}, "kind": kind, "session": bytes.fromhex(session)}
    return {"header": Header(**values), **{name: each for name, each in value.items() if name not in HEADER}}


def read_log(path: Path) -> Iterator[tuple[int, LogRecord | None]]:
    """Read the records of a log with their line numbers, from 1; None for a line that is not a complete record.

    Raises:
        InputError: the file cannot be read, or a line is too long.
    """
    with open_regular(path, "a readable message log") as file:
        for number, line in bounded_lines(path, file, "a message log"):
            yield number, record_of(line)


def read_records(path: Path, *, damaged: bool) -> Iterator[tuple[LogRecord, int]]:
    """Read the records of a log, each with the size of the log up to its end [bytes].

    ``damaged`` leaves out lines that are not records; otherwise only an incomplete last line may be left out.

    Raises:
        InputError: the file cannot be read, a line is too long, or one is damaged where that is refused.
    """
    at, bad = 0, 0
    with open_regular(path, "a readable message log") as file:
        for number, line in bounded_lines(path, file, "a message log"):
            if bad and not damaged:
                raise InputError(
                    f"{path}: line {bad}", "not a record", "an undamaged log; fedmq audit names all damage"
                )
            at, record = at + len(line), record_of(line)
            if record is None:
                bad = bad or number
            else:
                yield record, at


def last_head(path: Path) -> tuple[int, str] | None:
    """Number of records and head of a log, by its last line; None if that is not a record.

    Raises:
        InputError: the file cannot be read.
    """
    with open_regular(path, "a readable message log") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LINE))
        last = file.read().splitlines(keepends=True)[-1:]
    record = record_of(last[0]) if last else None
    return None if record is None else (record.n + 1, record.hash)


_Counts = defaultdict[str, Counter[str]]


@dataclass
class SentPayloads:
    """Payloads by the process that sent them and by kind."""

    number: _Counts = field(default_factory=lambda: defaultdict(Counter))  # number of payloads
    # Total size of their tensors as sent [bytes]; 0 for a kind that holds numbers or words only.
    bytes: _Counts = field(default_factory=lambda: defaultdict(Counter))
    # Total size of the tensors once decoded [bytes].
    decoded: _Counts = field(default_factory=lambda: defaultdict(Counter))

    def add(self, process: str, record: MessageRecord) -> None:
        """Count the payloads of a message that a process sent."""
        for kind, size, decoded in record.both_sizes:
            self.number[process][kind] += 1
            self.bytes[process][kind] += size
            self.decoded[process][kind] += decoded


def sent_payloads(messages: Iterable[MessageRecord], logged: Container[str]) -> SentPayloads:
    """Count the payloads that each process sent, from its own log, or from the receiver's if it is not ``logged``."""
    counted = SentPayloads()
    for record in messages:
        sender = record.header.sender
        if record.action == "sent" or sender not in logged:
            counted.add(sender, record)
    return counted
