"""Tracebacks of unexpected errors in a file, so that a terminal shows one line."""

from __future__ import annotations

import datetime
import os
import traceback
from pathlib import Path

from fedmq.text import print_line, printable, printable_lines

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
        """Append the traceback of an error that was caught; it is printed if that fails.

        Args:
            error: the error.
            name: name of the process.
            what: what failed, e.g. the task.

        Returns:
            The file; empty if it could not be written.
        """
        trace = "".join(traceback.format_exception(error)).rstrip()
        wall = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        written = self._append(f"{wall} {name}: {what}\n{trace}\n\n")
        if self._shown or not written:
            print_line(trace, error=True)
        found = f"{type(error).__name__}: {printable(str(error))}"
        if self._line and found not in self._printed:
            self._printed.add(found)
            place = f"; traceback in {self._path}" if written else ""
            print_line(f"{name}: {what} failed: {found}{place}", error=True)
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
