"""The message log of a process: JSON lines, linked by a hash chain."""

from __future__ import annotations

import os
import threading
import time
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Literal

from fedmq.clock import Clock
from fedmq.errors import InputError
from fedmq.storage.locks import try_lock
from fedmq.storage.logs import QUIET, Logger
from fedmq.storage.run_folder import make_folder, writing
from fedmq.wire.log_mirror import mirror
from fedmq.wire.log_records import (
    GENESIS,
    EventKind,
    EventRecord,
    Fact,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteKind,
    NoteRecord,
    RefusedRecord,
    record_of,
    sealed,
)
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import digest, tensor_bytes


class MessageLog:
    """Appends records to a process's log; may be used from all of its threads.

    If a record cannot be written, the recording method raises the errors of ``storage.run_folder.writing`` and the log
    ends with the record before it.

    Args:
        path: of the log; an existing log is continued, after cutting off a last line left incomplete by a crash.
        process: name of the process.
        clock: for the date and time of records.
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
        self._last_hash, self._count, self._size = GENESIS, 0, 0
        self._write_lock = threading.Lock()
        make_folder(path.parent)
        with writing(path):
            self._file = path.open("ab", buffering=0)
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
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = record_of(line)
                if record is not None:  # invalid lines are left in place for the audit to report
                    self._last_hash, self._count = record.hash, record.n + 1
                self._size += len(line)
        os.truncate(self.path, self._size)

    @property
    def head(self) -> str:
        """Hash of the last record."""
        return self._last_hash

    def _append(self, kind: type[LogRecord], /, **values: object) -> None:
        with self._write_lock:
            wall = self._clock.utc()
            record = sealed(kind, n=self._count, process=self.process, wall=wall, previous=self._last_hash, **values)
            line = record.line
            with writing(self.path):
                try:
                    write_all(self._file, line)
                except BaseException:
                    # An incomplete record would break the chain for all later ones.
                    self._file.truncate(self._size)
                    raise
            self._last_hash, self._count, self._size = record.hash, self._count + 1, self._size + len(line)
        mirror(self.logger, record)

    def message(self, action: Literal["sent", "received"], message: Message, tag: str, size: int) -> None:
        """Record a message.

        Args:
            action: its direction.
            message: the message, of which the header and each payload's kind, size and digest are recorded.
            tag: hexadecimal authentication tag of the sealed frame.
            size: bytes of all its frames.
        """
        self._append(
            MessageRecord,
            action=action,
            header=message.header,
            payloads=[(payload.KIND, tensor_bytes(payload)) for payload in message.payloads],
            # Recorded at both ends, since the tag authenticates only the sealed bytes, which no log contains.
            digests=[digest(payload) for payload in message.payloads],
            bytes=size,
            tag=tag,
        )

    def handshake(self, action: Literal["sent", "received"], kind: Kind, peer: str, size: int) -> None:
        """Record a handshake message."""
        self._append(HandshakeRecord, action=action, kind=kind, peer=peer, bytes=size)

    def refused(self, peer: str, reason: str, detail: str, size: int) -> None:
        """Record a refused message.

        Args:
            peer: its sender, as far as known.
            reason: a value of :class:`~fedmq.wire.messages.Reason`.
            detail: one line for a reader; cut after 300 characters.
            size: bytes of all its frames.
        """
        detail = _encodable(detail[:300])
        self._append(RefusedRecord, action="refused", peer=peer, reason=reason, detail=detail, bytes=size)

    def note(self, kind: NoteKind, /, **facts: Fact) -> None:
        """Record something other than a message, e.g. a start, a resume, a lost silo, a stop."""
        encodable = {name: _encodable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        self._append(NoteRecord, action="note", text=kind, **encodable)

    def event(self, event: EventKind, *, silo: str, sequence: int, now: float, version: int, number: int) -> None:
        """Record an event of the run; see :class:`EventRecord`."""
        self._append(
            EventRecord,
            action="note",
            text="event",
            event=event,
            silo=silo,
            sequence=sequence,
            now=now,
            version=version,
            number=number,
        )

    def close(self) -> None:
        """Close the file; all records have already been passed to the operating system."""
        self._file.close()

    def __enter__(self) -> MessageLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_all(file: RawIOBase, line: bytes) -> None:
    """Write a line to an unbuffered file, in several parts if need be.

    Raises:
        OSError: a part could not be written. A nearly full disk accepts part of a line and reports an error only at the
            next write.
    """
    unwritten = memoryview(line)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) or 0 :]


def _encodable(text: str) -> str:
    """Replace lone surrogates, which occur in undecodable paths and cannot be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
