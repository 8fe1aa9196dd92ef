"""Logs for operators: timestamped events with a level and fields, as console or JSON lines (structlog).

They are unlike message logs, which are hash-chained evidence for an audit. A log that cannot be written does not stop a
run. Values are escaped, so that a peer cannot write control characters to a terminal. Tracebacks of unexpected errors
go to a file of their own, so that a terminal shows one line.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from fedmq.storage.run_folder import make_folder, writing
from fedmq.text import print_line, printable, printable_lines

#: Characters kept of a value.
_LONGEST = 500


class LogLevel(StrEnum):
    """Levels, from the least to the most important."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Formats of a log."""

    CONSOLE = "console"  # aligned text for a reader
    JSON = "json"  # one JSON object per line


class Logger(Protocol):
    """Records events; its functions are those of structlog's loggers."""

    def debug(self, event: str, **values: object) -> Any:
        """An event of interest for finding errors, e.g. a message."""

    def info(self, event: str, **values: object) -> Any:
        """An event of a normal run, e.g. a merge."""

    def warning(self, event: str, **values: object) -> Any:
        """An event that an operator may have to act upon, e.g. a lost silo."""

    def error(self, event: str, **values: object) -> Any:
        """A failure."""


class _Quiet:
    def debug(self, event: str, **values: object) -> None: ...
    def info(self, event: str, **values: object) -> None: ...
    def warning(self, event: str, **values: object) -> None: ...
    def error(self, event: str, **values: object) -> None: ...


#: Records nothing.
QUIET: Logger = _Quiet()


@dataclass(frozen=True)
class LogOptions:
    """Where and how to log."""

    level: LogLevel = LogLevel.INFO  # minimum level that is recorded
    file: Path | None = None  # file to append to, opened for every line, so that it can be rotated; None for no file
    format: LogFormat = LogFormat.CONSOLE  # format of the lines
    console: bool = True  # also log to standard error

    def check(self) -> None:
        """Create the file's folder, and check that the file can be written.

        Raises:
            InputError: it cannot.
            DiskError: the disk is full or broken.
        """
        if self.file is not None:
            make_folder(self.file.parent)
            with writing(self.file):
                self.file.open("ab").close()


Event = MutableMapping[str, Any]
_Renderer = Callable[[Any, str, Event], str | bytes]


def open_log(options: LogOptions | None, process: str) -> Logger:
    """A logger; None records nothing. The process's name is a field of every event."""
    if options is None:
        return QUIET
    # Not imported where nothing is logged: it takes a tenth of a second, and memory in every silo.
    import logging  # noqa: PLC0415

    import structlog  # noqa: PLC0415

    level = logging.getLevelNamesMapping()[options.level.upper()]
    writers: list[structlog.types.Processor] = []
    if options.console:
        writers.append(_writer(_renderer(options.format, colours=sys.stderr.isatty()), _to_stderr))
    if options.file is not None:
        writers.append(_writer(_renderer(options.format, colours=False), partial(_append, options.file)))
    processors: Sequence[Any] = (
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _escaped,
        *writers,
        _drop,
    )
    made = structlog.wrap_logger(
        None, processors=processors, wrapper_class=structlog.make_filtering_bound_logger(level)
    ).bind(process=process)
    return cast("Logger", made)


def _renderer(format_: LogFormat, *, colours: bool) -> _Renderer:
    import structlog  # noqa: PLC0415

    if format_ is LogFormat.JSON:
        return lambda logger, name, event: json.dumps(event, default=str)
    return structlog.dev.ConsoleRenderer(colors=colours, pad_event_to=0, sort_keys=False)


def _to_stderr(line: str) -> None:
    # Looked up each time: a live display replaces the stream, and prints lines above itself.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - has colours; its values are escaped


def _append(path: Path, line: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:  # in one call, so that lines of several processes do not mix
            os.write(descriptor, line.encode("utf-8", "backslashreplace") + b"\n")
        finally:
            os.close(descriptor)


def _writer(render: _Renderer, write: Callable[[str], None]) -> Callable[[Any, str, Event], Event]:
    """A processor that renders and writes an event, and returns it for the next one."""

    def processor(logger: Any, name: str, event: Event) -> Event:
        rendered = render(logger, name, dict(event))
        write(rendered.decode() if isinstance(rendered, bytes) else rendered)
        return event

    return processor


def _drop(_logger: Any, _name: str, _event: Event) -> Event:
    """The last processor: everything is written already."""
    import structlog  # noqa: PLC0415

    raise structlog.DropEvent


def _escaped(_logger: Any, _name: str, event: Event) -> Event:
    """Escape control characters, which a peer may have sent, and shorten long values."""
    return {name: _escaped_value(value) for name, value in event.items()}


def _escaped_value(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case list() | tuple() | set() | frozenset():
            return [_escaped_value(item) for item in value]
        case dict():
            return {_escaped_value(name): _escaped_value(item) for name, item in value.items()}
    text = str(value)
    shown = printable(text[:_LONGEST])
    return shown if len(text) <= _LONGEST else f"{shown}..."


#: Maximum size of a file [bytes], above which nothing is added: a silo may fail in every round.
_MOST_BYTES = 1 << 20


class ErrorFile:
    """File of the errors of one process.

    Args:
        path: the file; its folder is created with the first error.
        line: print one line for each error, unless the same line was printed before.
        shown: also print tracebacks.
    """

    def __init__(self, path: Path, *, line: bool = True, shown: bool = False) -> None:
        self._path, self._line, self._shown = path, line, shown
        self._printed: set[str] = set()

    def add(self, error: Exception, name: str, what: str) -> str:
        """Append the traceback of an error that was caught, or print it; returns the file, empty if that failed."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        wall = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        written = self._append(f"{wall} {name}: {what}\n{trace}\n\n")
        if self._shown or not written:
            print_line(trace, error=True)
        problem = f"{type(error).__name__}: {printable(str(error))}"
        if self._line and problem not in self._printed:
            self._printed.add(problem)
            place = f"; traceback in {self._path}" if written else ""
            print_line(f"{name}: {what} failed: {problem}{place}", error=True)
        return str(self._path) if written else ""

    def _append(self, text: str) -> bool:
        """Whether the text is in the file, or the file is full."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
                if file.seek(0, os.SEEK_END) < _MOST_BYTES:
                    file.write(printable_lines(text).encode())
        except OSError:
            return False
        return True
