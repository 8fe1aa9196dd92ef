"""The records of a message log: one type per kind of record, and the chain of hashes over them.

Logs come from processes that nobody trusts. A line is read as the record that its action says, or it is no record:
a field is missing or of another type, or the line is not the canonical JSON that fedmq writes of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, JsonValue

from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored
from fedmq.wire.fields import FieldError
from fedmq.wire.messages import SESSION_BYTES, Header, Kind, Reason

GENESIS = "0" * 64
#: A frame that was sent: sender, receiver, session and counter, which both ends log.
Frame = tuple[str, str, bytes, int]
#: A fact of a note, as JSON has it.
Fact = str | int | float | None


class NoteKind(StrEnum):
    """What a note says. The values are the texts in the logs, old ones included; readers act on the members alone."""

    STARTED = "started"
    RESUMED = "resumed"
    #: Noted by the coordinator of a run without messages. An auditor must not take its silence for a clean record.
    INLINE = "silos run inside the coordinator: no messages are exchanged, none are logged"
    ENDED = "ended"
    RELEASED = "released"
    # Silos and their tasks, as the coordinator sees them.
    EXPELLED = "expelled"
    PEER_LOST = "peer lost"
    NOT_DELIVERED = "a message could not be delivered"
    NOT_MEASURED = "peer stayed away: its own model is not measured"
    ERROR_REPORTED = "error reported"
    TASK_FAILED = "task failed"
    REPLY_DISCARDED = "reply discarded"
    LEFT_OUT_BY_KRUM = "reply left out by krum"
    ALL_MERGED = "all rounds merged"
    CHECKPOINT_REFUSED = "checkpoint refused"
    REFUSALS_COUNTED = "refusals of unknown peers are counted, not logged"
    # Scripted faults.
    FAULT = "fault"
    FAULT_NOT_CARRIED_OUT = "fault without its process"
    WALL_CLOCK_FAULTS = "wall clock: the faults are real, but this run cannot be replayed"
    # A silo's personal state.
    STATE_KEPT = "personal state kept from here on"
    STATE_GONE = "the personal state of its earlier tasks is gone: it goes on without"
    # Why a silo or the evaluator ended its session, to shake hands again.
    COORDINATOR_SILENT = "the coordinator went silent"
    STOOD_STILL = "this process stood still: to the coordinator it was lost"
    RECONNECTED = "the connection was made anew"
    QUEUE_FULL = "the queue to the coordinator is full"
    MESSAGE_LOST = "a message was lost on the way"


class EventKind(StrEnum):
    """Events of the timeline of a run."""

    ARRIVED = "arrived"
    FAILED = "failed"
    SWITCHED = "switched"
    DEADLINE = "deadline"


def canonical(record: Mapping[str, object]) -> bytes:
    """A record as a log holds it, without the end of the line."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def chain(previous: str, record: Mapping[str, object]) -> str:
    """Hash of a record: SHA-256 over the previous hash and the canonical JSON of the record without ``hash``."""
    return hashlib.sha256(previous.encode() + canonical(record)).hexdigest()


#: As logs write it, in UTC.
_Wall = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
_Size = Annotated[int, Field(ge=0)]
_Way = Literal["sent", "received"]
# Read from JSON, which has strings and lists where Python has enums and tuples.
_PayloadSize = Annotated[tuple[str, _Size], Field(strict=False)]
_Reason = Annotated[Reason, Field(strict=False)]
_NoteKind = Annotated[NoteKind, Field(strict=False)]
_EventKind = Annotated[EventKind, Field(strict=False)]


class _Record(Stored):
    """What every record has.

    Args:
        n: number of the record in its log, from 0.
        process: whose log it is.
        wall: when it was written: UTC, milliseconds.
        previous: hash of the record before it; of the first one 64 zeros.
        hash: of this record, as :func:`chain` takes it.
    """

    n: int
    process: str
    wall: _Wall
    previous: str
    hash: str

    @property
    def _extra(self) -> dict[str, Any]:
        return self.__pydantic_extra__ or {}

    def plain(self) -> dict[str, JsonValue]:
        """As JSON-serialisable data: what the log holds, no more and no less."""
        given = {name: value for name, value in self.__dict__.items() if name in self.model_fields_set}
        return {**given, **self._extra}

    @property
    def line(self) -> bytes:
        """As a line of a log."""
        return canonical(self.plain()) + b"\n"

    @property
    def intact(self) -> bool:
        """Whether the hash is that of the record."""
        return self.hash == _hash(self)


def _hash(record: _Record) -> str:
    plain = record.plain()
    del plain["hash"]
    return chain(record.previous, plain)


class NoteRecord(_Record):
    """Something that is no message: a start, a lost silo, a release.

    Args:
        action: ``note``.
        text: what it says; plain text where another release of fedmq wrote it.
        version: number of merges, where the note has one.
        cause: number of the event that it follows from; 0 where none of the run's events caused it, but a silo that
            joined or was lost, or the operator.
    """

    action: Literal["note"]
    text: Annotated[_NoteKind | str, Field(union_mode="left_to_right")]
    version: int | None = None
    cause: int | None = None
    __pydantic_extra__: dict[str, Fact]

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What else it says, by name."""
        return self._extra


class EventRecord(_Record):
    """An event of the run's timeline as the coordinator deals with it; a replay must have the same ones.

    Args:
        action: ``note``.
        text: ``event``.
        event: what happened; plain text where another release of fedmq wrote it.
        silo: to whose task; empty for a deadline.
        sequence: number of that task; 0 where there is none.
        now: the run's time [s].
        version: number of merges.
        number: of the event in the run, from 1; notes name it as their cause. Logs of earlier releases have none.
    """

    action: Literal["note"]
    text: Literal["event"]
    event: Annotated[_EventKind | str, Field(union_mode="left_to_right")]
    silo: str
    sequence: int
    now: int | float
    version: int
    number: int | None = None
    __pydantic_extra__: dict[str, Fact]

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What else it says, by name."""
        return self._extra


class RefusedRecord(_Record):
    """Something that was not accepted.

    Args:
        action: ``refused``.
        peer: whoever it came from, as far as known.
        reason: the fixed word of the refusal.
        detail: one line.
        bytes: of all its frames; 0 where it was refused after it had been taken from the wire and logged.
    """

    action: Literal["refused"]
    peer: str
    reason: _Reason
    detail: str
    bytes: _Size


_HANDSHAKE = (Kind.HELLO, Kind.WELCOME, Kind.READY)


def _of_handshake(kind: Kind) -> Kind:
    if kind not in _HANDSHAKE:
        raise ValueError(f"one of {', '.join(_HANDSHAKE)}")
    return kind


class HandshakeRecord(_Record):
    """A hello, a welcome or a ready.

    Args:
        action: which way it went.
        kind: of message.
        peer: the process at the other end.
        bytes: of all its frames.
    """

    action: _Way
    kind: Annotated[Kind, Field(strict=False), AfterValidator(_of_handshake)]
    peer: str
    bytes: _Size


#: Fields of a message's header that its record holds: all but the wire's version.
HEADER = tuple(field.name for field in fields(Header) if field.name != "wire_version")


class MessageRecord(_Record):
    """A sealed message. In the log its header's fields stand beside the others.

    Args:
        action: which way it went.
        header: of the message.
        payloads: kind and bytes of tensors of each payload.
        digests: of each payload.
        bytes: of all its frames.
        tag: hexadecimal authentication tag of the sealed frame.
    """

    action: _Way
    header: Header
    payloads: list[_PayloadSize]
    digests: list[Digest]
    bytes: _Size
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

    @property
    def frame(self) -> Frame:
        """Which frame it was."""
        return self.header.sender, self.header.receiver, self.header.session, self.header.counter

    def plain(self) -> dict[str, JsonValue]:
        """As JSON-serialisable data: what the log holds, no more and no less."""
        plain = super().plain()
        del plain["header"]
        header = {name: getattr(self.header, name) for name in HEADER}
        return {**plain, **header, "session": self.header.session.hex()}


LogRecord = MessageRecord | HandshakeRecord | RefusedRecord | NoteRecord | EventRecord
_Any = TypeVar("_Any", bound=_Record)


def sealed(record: type[_Any], /, **values: object) -> _Any:
    """A record of these values with its hash."""
    made = record.model_validate({**values, "hash": ""})
    return made.model_copy(update={"hash": _hash(made)})


def record_of(line: bytes) -> LogRecord | None:
    """A line as the record it is, None if it is none.

    The chain is over what a line says. So that it is over the line, too, there is one way to write a record: a line
    with a key twice, or with other spacing, is none.
    """
    try:
        record = _parsed(json.loads(line))
    except (ValueError, FieldError, RecursionError):
        return None
    return record if record is not None and record.line == line else None


def _parsed(value: Any) -> LogRecord | None:
    """JSON as a record.

    Raises:
        ValueError: a field is missing or not as it must be.
        FieldError: so is one of a message's header.
    """
    match value:
        case {"action": "sent" | "received", "counter": _}:
            return MessageRecord.model_validate(_with_header(value))
        case {"action": "sent" | "received"}:
            return HandshakeRecord.model_validate(value)
        case {"action": "refused"}:
            return RefusedRecord.model_validate(value)
        case {"action": "note", "text": "event"}:
            return EventRecord.model_validate(value)
        case {"action": "note"}:
            return NoteRecord.model_validate(value)
    return None


def _with_header(value: Mapping[str, Any]) -> dict[str, object]:
    """A message's record with its header as one."""
    if missing := [name for name in HEADER if name not in value]:
        raise ValueError(f"no {missing[0]}")
    kind, session = Kind(value["kind"]), str(value["session"])
    if kind in _HANDSHAKE or len(session) != 2 * SESSION_BYTES:
        raise ValueError("no message of a session")
    own = {**{name: value[name] for name in HEADER}, "kind": kind, "session": bytes.fromhex(session)}
    return {"header": Header(**own), **{name: each for name, each in value.items() if name not in HEADER}}


def read_log(path: Path) -> Iterator[tuple[int, LogRecord | None]]:
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
            yield number, record_of(line)
