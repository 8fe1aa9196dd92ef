"""Where the time of a run goes: the spans that its processes record for ``fedmq scenario --profile``.

A span is a phase of :data:`PHASES`, or all that a process does as one of the run's parties, e.g. as a silo. Functions
are spans by a decorator. A process that is not profiled pays one comparison per span. A profiled one appends a line of
JSON for each start and end of a span to a file of its own; :mod:`fedmq.runs.profile` reads the files.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from pathlib import Path
from typing import Literal, get_args

Phase = Literal[
    "start", "data", "compute", "encode", "seal", "send", "wait", "slot", "open", "check", "merge", "evaluate",
    "disk", "log", "report",
]  # fmt: skip
#: What the parties of a run do. ``wait`` is for a message or a process, ``slot`` for one of the scenario's slots for
#: training; ``encode`` includes digests, and ``open`` decoding.
PHASES: tuple[str, ...] = get_args(Phase)
#: Precedes the name of a party.
PARTY = "@"
#: The process of the command that starts all others, as a party.
COMMAND = "command"


class Recorder:
    """Writes the spans of this process, while it is profiled.

    Attributes:
        on: spans are recorded.
        folder: folder of the files of all processes; None as long as it is unknown.
    """

    def __init__(self) -> None:
        self.on, self._process = False, ""
        self.folder: Path | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._file: io.BufferedIOBase = io.BytesIO()

    def begin(self, process: str, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Record from now on, in memory; the process is its own party, and starts until :meth:`write_to`.

        Args:
            process: its name.
            began: when it began to start [s].
            clock: time of all processes [s].
        """
        self.on, self._process, self._clock, self._file = True, process, clock, io.BytesIO()
        self.note("O", PARTY + process, began)
        self.note("O", "start", began)

    def write_to(self, folder: Path) -> None:
        """Write what was recorded, and what follows, to a file of this start of the process.

        Raises:
            OSError: the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        before, self.folder = self._file, folder
        self._file = (folder / f"{self._process}.{os.getpid()}.jsonl").open("wb")
        if isinstance(before, io.BytesIO):
            self._write(before.getvalue())
        self.note("C", "start")

    def end(self) -> None:
        """The process ends: record nothing more."""
        if self.on:
            self.note("C", PARTY + self._process)
        self.on, self.folder = False, None
        with contextlib.suppress(OSError):
            self._file.close()

    def note(self, event: Literal["O", "C"], name: str, at: float | None = None) -> None:
        """Note that a span of this thread opens or closes, now or at a time of the clock [s]."""
        at, thread = self._clock() if at is None else at, threading.current_thread().name
        self._write(f'[{at:.6f},"{thread}","{event}","{name}"]\n'.encode())
        if name == "wait" and event == "O":
            self._write(b"", flush=True)  # before what may last, so that a killed process leaves what it did

    def _write(self, line: bytes, *, flush: bool = False) -> None:
        try:
            self._file.write(line)
            if flush:
                self._file.flush()
        except (OSError, ValueError):  # a full disk, or closed meanwhile: no reason to end the run
            self.on = False


#: That of this process.
RECORDER = Recorder()


class _Span(ContextDecorator):
    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if RECORDER.on:
            RECORDER.note("O", self._name)

    def __exit__(self, *_: object) -> None:
        if RECORDER.on:
            RECORDER.note("C", self._name)


def span(phase: Phase) -> _Span:
    """A function, as its decorator, or a block that is a phase; its time without that of the spans within it."""
    return _Span(phase)


def party(name: str) -> _Span:
    """A block in which this process acts as one of the run's parties."""
    return _Span(PARTY + name)


def child(process: str, target: Callable[..., None]) -> Callable[..., None]:
    """The main function of a child process, which is profiled if this process is."""
    if RECORDER.folder is None:
        return target
    return partial(_run_child, process, time.monotonic(), RECORDER.folder, target)


def _run_child(process: str, began: float, folder: Path, target: Callable[..., None], *arguments: object) -> None:
    RECORDER.begin(process, began)
    RECORDER.write_to(folder)
    try:
        target(*arguments)
    finally:
        RECORDER.end()
