"""The structured message log of a process, chained by hashes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from fedmq.clock import Clock
from fedmq.errors import InputError
from fedmq.storage.locks import try_lock
from fedmq.storage.run_folder import make_folder, writing
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
from fedmq.wire.messages import Kind, Message, digest, tensor_bytes


class MessageLog:
    """Appends records to one process's log, each whole or not at all; from any of the process's threads.

    Every method that records something raises what ``storage.run_folder.writing`` says if the record cannot be written;
    the log then ends with the record before it.

    Args:
        path: of the log; an existing one is continued, after cutting off a last line that a crash left unfinished.
        process: name of the process.
        clock: for the date and time of a record.
        patience: how long to wait for a process of the same name that is being ended [s].

    Raises:
        InputError: the log cannot be written there, or another process writes it; two writers would break the chain.
        RunError: the disk is full or broken.
    """

    def __init__(self, path: Path, process: str, clock: Clock, *, patience: float = 5.0) -> None:
        self.path = path
        self.process = process
        self._clock = clock
        self._head, self._count, self._size = GENESIS, 0, 0
        self._one = threading.Lock()
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
        """Hold the log until it is closed; the kernel lets go of it when the process dies."""
        until = time.monotonic() + patience
        while not try_lock(self._file):
            if time.monotonic() > until:
                found = f"a log that another {self.process} is writing"
                raise InputError(str(self.path), found, "one process of a name in a run folder")
            time.sleep(0.05)

    def _continue(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = record_of(line)
                if record is not None:  # What is none is not ours to mend: the audit will point at it.
                    self._head, self._count = record.hash, record.n + 1
                self._size += len(line)
        os.truncate(self.path, self._size)

    @property
    def head(self) -> str:
        """Hash of the last record."""
        return self._head

    def _append(self, kind: type[LogRecord], /, **values: object) -> None:
        with self._one:
            wall = self._clock.utc()
            record = sealed(kind, n=self._count, process=self.process, wall=wall, previous=self._head, **values)
            line = record.line
            with writing(self.path):
                try:
                    rest = memoryview(line)
                    # A disk that is about to be full takes a part of it, and says so at the next write only.
                    while rest:
                        rest = rest[self._file.write(rest) :]
                except BaseException:
                    # Half a record would break the chain for all that follow.
                    self._file.truncate(self._size)
                    raise
            self._head, self._count, self._size = record.hash, self._count + 1, self._size + len(line)

    def message(self, action: Literal["sent", "received"], message: Message, tag: str, size: int) -> None:
        """Record a message.

        Args:
            action: which way it went.
            message: the message, for its header and the kinds and sizes of its payloads.
            tag: hexadecimal authentication tag of the sealed frame.
            size: bytes of all its frames.
        """
        self._append(
            MessageRecord,
            action=action,
            header=message.header,
            payloads=[(payload.KIND, tensor_bytes(payload)) for payload in message.payloads],
            # At both ends: the tag binds the sealed bytes, which no log has, and nobody else could say what was in.
            digests=[digest(payload) for payload in message.payloads],
            bytes=size,
            tag=tag,
        )

    def handshake(self, action: Literal["sent", "received"], kind: Kind, peer: str, size: int) -> None:
        """Record a hello, a welcome or a ready."""
        self._append(HandshakeRecord, action=action, kind=kind, peer=peer, bytes=size)

    def refused(self, peer: str, reason: str, detail: str, size: int) -> None:
        """Record something that was not accepted.

        Args:
            peer: whoever it came from, as far as known.
            reason: the fixed word of the refusal.
            detail: one line.
            size: bytes of all its frames.
        """
        detail = _encodable(detail[:300])
        self._append(RefusedRecord, action="refused", peer=peer, reason=reason, detail=detail, bytes=size)

    def note(self, kind: NoteKind, /, **facts: Fact) -> None:
        """Record something that is no message: a start, a resume, a lost silo, a stop."""
        said = {name: _encodable(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        self._append(NoteRecord, action="note", text=kind, **said)

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
        """Close the file; every record is already with the operating system."""
        self._file.close()

    def __enter__(self) -> MessageLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _encodable(text: str) -> str:
    """Text without lone surrogates, which paths with undecodable bytes have and UTF-8 does not."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
