"""The message log of a process: JSON lines, linked by a hash chain, and passed on to a log for operators."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import JsonValue

from fedmq.clock import Clock
from fedmq.config.resolve import ResolvedRun
from fedmq.config.run_id import digest_of
from fedmq.errors import DiskError, InputError
from fedmq.profiling import span
from fedmq.storage.locks import try_lock
from fedmq.storage.logs import QUIET, Logger
from fedmq.storage.regular_files import bounded_lines, open_regular
from fedmq.storage.run_folder import make_folder, write_whole, writing
from fedmq.wire.codec import digest, is_hashed
from fedmq.wire.keys import Identity
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.log_records import (
    GENESIS,
    Fact,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    SignatureRecord,
    SignedAt,
    StartRecord,
    TimelineRecord,
    record_of,
    sealed,
    signed_statement,
)
from fedmq.wire.messages import COORDINATOR, Kind, Message
from fedmq.wire.payloads import decoded_sizes, sizes


@dataclass(frozen=True)
class StartFacts:
    """What every process of a run must agree on; each declares it in its log and signs it."""

    run: str
    scenario: str  # SHA-256 (hex) of the scenario, see ``config.run_id.digest_of``
    protocol: str
    privacy: Mapping[str, JsonValue]
    data: str  # digest of the prepared data's content

    @classmethod
    def of(cls, run: ResolvedRun, data: str) -> StartFacts:
        """The facts of a run with these data, given by their digest."""
        plain = run.scenario.model_dump(mode="json")
        return cls(run.id, digest_of(plain), run.scenario.protocol.name, plain["privacy"], data)


class MessageLog:
    """Appends records to a process's log; may be used from all of its threads.

    If a record cannot be written, the recording method raises the errors of ``storage.run_folder.writing`` and the log
    ends with the record before it. A log that was deleted, with its folder or alone, counts as such.

    Args:
        path: path of the log; an existing log is continued, after cutting off a last line left incomplete by a crash.
        process: name of the process.
        patience: how long to wait for an earlier process of the same name to end [s].
        logger: receives every record, too, as a log for operators.

    Raises:
        InputError: the log cannot be written there, or another process is writing it, which would break the chain.
        RunError: the disk is full or broken.
    """

    def __init__(
        self, path: Path, process: str, clock: Clock, *, patience: float = 5.0, logger: Logger = QUIET
    ) -> None:
        self.path = path
        self.process = process
        self.logger = logger
        self._clock = clock
        self._last_hash, self._count, self._size, self._last_wall = GENESIS, 0, 0, ""
        self.first = GENESIS  # hash of the first record, by which runs of one scenario differ
        self._signer: tuple[Identity, str] | None = None
        self._signed = 0  # number of records when the log was signed last
        self._due: Callable[[], int] | None = None  # writes the next record, whose payloads are still being hashed
        self._write_lock = threading.RLock()
        make_folder(path.parent)
        if os.path.lexists(path):  # opening a FIFO would block, and reading a device would not end
            open_regular(path, "a message log").close()
        with writing(path):
            self._file = path.open("ab", buffering=0)
        self._names = min(1, os.fstat(self._file.fileno()).st_nlink)  # 0 on file systems that do not count them
        try:
            self._lock(patience)
            self._continue()
        except BaseException:
            self._file.close()
            raise

    def _lock(self, patience: float) -> None:
        """Lock the log until it is closed; the kernel releases the lock when the process dies."""
        until = time.monotonic() + patience
        while not try_lock(self._file):
            if time.monotonic() > until:
                found = f"a log that another {self.process} is writing"
                raise InputError(str(self.path), found, "one process of each name per run folder")
            time.sleep(0.05)

    def _continue(self) -> None:
        with open_regular(self.path, "a message log") as file:
            for _, line in bounded_lines(self.path, file, "a message log"):
                if not line.endswith(b"\n"):
                    break
                record = record_of(line)
                if record is not None:  # invalid lines are left in place for the audit to report
                    self.first = self.first if self._count else record.hash
                    self._last_hash, self._count, self._last_wall = record.hash, record.n + 1, record.wall
                self._size += len(line)
        os.truncate(self.path, self._size)

    @property
    def head(self) -> str:
        """Hash of the last record."""
        self.settle()
        return self._last_hash

    @property
    def records(self) -> int:
        """Number of records, including one that is due."""
        with self._write_lock:
            return self._count + (self._due is not None)

    @property
    def sent_head(self) -> bytes | None:
        """The head that a message to a peer carries, 32 bytes; None unless this log is signed."""
        return None if self._signer is None else bytes.fromhex(self.head)

    def start(self, identity: Identity, accepted: Mapping[str, Ed25519PublicKey], facts: StartFacts) -> None:
        """Record what this process declares at its start; from here on it signs its log."""
        # All others exchange messages with the coordinator alone; a thousand silos need not list a thousand keys each.
        peers = sorted(accepted) if self.process == COORDINATOR else [COORDINATOR]
        self._append(
            StartRecord,
            action="start",
            **asdict(facts),
            key=identity.key.public_key().public_bytes_raw().hex(),
            peers={name: accepted[name].public_bytes_raw().hex() for name in peers if name in accepted},
        )
        self._signer = identity, facts.run
        self.sign(SignedAt.START)

    @span("log")
    def sign(self, at: SignedAt, **version: int) -> None:
        """Sign the log as it is now; does nothing before :meth:`start`, or if nothing was added since the last one.

        Args:
            at: the occasion.
            version: ``version``, the number of merges, for a merge.
        """
        with self._write_lock:
            self.settle()
            if self._signer is None or self._signed == self._count:
                return
            identity, run = self._signer
            fields = {"action": "signed", "at": at, **self._next(), **version}
            signature = identity.key.sign(signed_statement(run, fields)).hex()
            self._append(SignatureRecord, **fields, signature=signature)
            self._signed = self._count

    def _next(self) -> dict[str, object]:
        """The fields that every record has, of the next one."""
        # Never before the record before it, even if the machine's clock was set back: an audit requires that.
        wall = max(self._clock.utc(), self._last_wall)
        return {"n": self._count, "process": self.process, "wall": wall, "previous": self._last_hash}

    @span("log")
    def _append(self, kind: type[LogRecord], /, **values: object) -> int:
        """Write a record; returns its number."""
        with self._write_lock:
            self.settle()
            record = sealed(kind, **{**self._next(), **values})
            line = record.line
            with writing(self.path):
                if os.fstat(self._file.fileno()).st_nlink < self._names:
                    raise DiskError(f"{self.path}: was deleted while {self.process} was writing it")
                try:
                    write_whole(self._file, line)
                except BaseException:
                    # An incomplete record would break the chain for all later ones.
                    self._file.truncate(self._size)
                    raise
            self.first = self.first if self._count else record.hash
            self._last_hash, self._count, self._size = record.hash, self._count + 1, self._size + len(line)
            self._last_wall = record.wall
        mirror(self.logger, record)
        return record.n

    def message(
        self, action: Literal["sent", "received"], message: Message, tag: str, size: int, *, waits: bool = True
    ) -> None:
        """Record a message.

        Args:
            action: its direction.
            message: the message, of which the header and each payload's kind, size and digest are recorded.
            tag: hexadecimal authentication tag of the sealed frame.
            size: bytes of all its frames.
            waits: whether to wait until its payloads are hashed. Otherwise the record may be written later: before the
                next one, or by :meth:`settle`.
        """
        with self._write_lock:
            self.settle()
            self._due = partial(self._append_message, action, message, tag, size)
            if waits or all(map(is_hashed, message.payloads)):
                self.settle()

    def settle(self) -> None:
        """Write the record that is due."""
        with self._write_lock:
            if self._due is not None:
                write, self._due = self._due, None
                write()

    def _append_message(self, action: Literal["sent", "received"], message: Message, tag: str, size: int) -> int:
        decoded = decoded_sizes(message.payloads)
        return self._append(
            MessageRecord,
            action=action,
            header=message.header,
            payloads=sizes(message.payloads),
            # Recorded at both ends, since the tag authenticates only the sealed bytes, which no log contains.
            digests=[digest(payload) for payload in message.payloads],
            bytes=size,
            tag=tag,
            **_given(head=None if message.head is None else message.head.hex(), decoded=decoded),
        )

    def handshake(self, action: Literal["sent", "received"], kind: Kind, peer: str, size: int) -> None:
        """Record a handshake message."""
        self._append(HandshakeRecord, action=action, kind=kind, peer=peer, bytes=size)

    def refused(self, peer: str, reason: str, detail: str, size: int) -> int:
        """Record a refused message; returns the number of the record.

        Args:
            peer: its sender, as far as known.
            reason: a value of :class:`~fedmq.wire.messages.Reason`.
            detail: one line for a reader; cut after 300 characters.
            size: bytes of all its frames.
        """
        detail = _encodable(detail[:300])
        return self._append(RefusedRecord, action="refused", peer=peer, reason=reason, detail=detail, bytes=size)

    def note(self, event: LogEvent, /, *, caused_by: int | None = None, **facts: Fact) -> int:
        """Record something other than a message, e.g. a start, a lost silo, a stop; returns the number of the record.

        Args:
            event: what happened.
            caused_by: number of the record of this log that led to it; None if there is none.
            facts: further fields.
        """
        encodable = {name: _encodable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        return self._append(NoteRecord, action="note", event=event, **_given(caused_by=caused_by), **encodable)

    def event(
        self,
        event: TimelineEvent,
        *,
        silo: str,
        sequence: int,
        now: float,
        version: int,
        number: int,
        caused_by: int | None = None,
    ) -> int:
        """Record an event of the run, see :class:`TimelineRecord`; returns the number of the record."""
        return self._append(
            TimelineRecord,
            action="timeline",
            event=event,
            silo=silo,
            sequence=sequence,
            now=now,
            version=version,
            number=number,
            **_given(caused_by=caused_by),
        )

    def close(self) -> None:
        """Sign the end of the log and close the file; all records have already been passed to the operating system.

        Raises:
            DiskError: the end could not be signed; not raised if another error is ending the process.
        """
        if self._file.closed:
            return
        ending = sys.exception() is not None  # that error is the one to be told
        try:
            self.sign(SignedAt.END)
        except DiskError as error:
            if not ending:
                raise DiskError(f"{error}; the log lacks its signed end, which an audit reports") from None
        finally:
            self._file.close()

    def __enter__(self) -> MessageLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encodable(text: str) -> str:
    """Replace lone surrogates, which occur in undecodable paths and cannot be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def mirror(logger: Logger, record: LogRecord) -> None:
    """Log a record of a message log, a note with the level of its event."""
    match record:
        case MessageRecord(header=header):
            peer = header.receiver if record.action == "sent" else header.sender
            values = _given(sequence=header.sequence, reply_to=header.reply_to, version=header.base_version)
            logger.debug(f"{header.kind.value} {record.action}", peer=peer, bytes=record.bytes, **values)
        case HandshakeRecord(kind=Kind.READY, action="received"):
            # It has not joined: the coordinator may still refuse the data that it states next.
            logger.info("connected", peer=record.peer)
        case HandshakeRecord():
            logger.debug(f"{record.kind.value} {record.action}", peer=record.peer, bytes=record.bytes)
        case RefusedRecord():
            logger.warning("message refused", peer=record.peer, reason=record.reason.value, detail=record.detail)
        case TimelineRecord():
            values = _given(silo=record.silo or None, sequence=record.sequence or None, number=record.number)
            logger.debug(f"timeline {record.event}", now=record.now, version=record.version, **values)
        case StartRecord():
            logger.debug("start record signed", protocol=record.protocol)
        case SignatureRecord():
            logger.debug("log signed", at=record.at.value, records=record.n)
        case NoteRecord():
            write = getattr(logger, record.event.level)
            write(str(record.event), **_given(version=record.version, **record.facts))


def _given(**values: object) -> Mapping[str, object]:
    return {name: value for name, value in values.items() if value is not None}
