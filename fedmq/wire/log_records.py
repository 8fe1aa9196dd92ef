"""The records of a message log: their chain of hashes, and what a line must hold to be one.

Logs come from processes that nobody trusts: a record is what its action says, written as fedmq writes it, or it is
none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored
from fedmq.wire.messages import SESSION_BYTES, Reason

GENESIS = "0" * 64


def canonical(record: Mapping[str, Any]) -> bytes:
    """A record as a log holds it, without the end of the line."""
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def chain(previous: str, record: Mapping[str, Any]) -> str:
    """Hash of a record: SHA-256 over the previous hash and the canonical JSON of the record without ``hash``."""
    return hashlib.sha256(previous.encode() + canonical(record)).hexdigest()


#: As logs write it, in UTC.
_Wall = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")]
_Size = Annotated[int, Field(ge=0)]


class _Record(Stored):
    n: int
    process: str
    wall: _Wall
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
    reason: Reason
    detail: str
    bytes: _Size


class _Handshake(_Record):
    kind: Literal["hello", "welcome", "ready"]
    peer: str
    bytes: _Size


class _Message(_Record):
    run: str
    kind: Literal["layout", "task", "reply", "evaluate", "heartbeat", "stop", "error"]
    sender: str
    receiver: str
    sequence: int
    reply_to: int | None
    base_version: int
    sent_at: float
    session: Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * SESSION_BYTES}}}$")]
    counter: _Size
    payloads: list[tuple[str, _Size]]
    digests: list[Digest]
    bytes: _Size
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def shape(record: Any) -> str | None:
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
        Discriminator(shape),
    ]
)


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line as the record it is, None if it is none.

    The chain is over what a line says. So that it is over the line, too, there is one way to write a record: a line
    with a key twice, or with other spacing, is none.
    """
    try:
        _RECORD.validate_json(line)
        record: dict[str, Any] = json.loads(line)
        return record if line == canonical(record) + b"\n" else None
    except (ValueError, RecursionError):
        return None


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
            yield number, record_of(line)
