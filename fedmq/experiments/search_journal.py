"""The journal of a search: Optuna's operations, one a line, with a digest of each line and all lines before it.

Optuna skips what it cannot apply and does not compare values with the searched ranges, so a damaged line could change
the result in silence. Operations that belong together, such as the creation of a trial and its parameters, are written
as one step, of which a crash leaves all lines or none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmq.errors import InputError
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import writing

#: One of Optuna's operations: JSON of its own form.
Operation = dict[str, Any]
_ALLOWED = "the journal of this search; delete it to begin the search again with the runs that are done"
#: Maximum size of a journal [bytes].
_MOST_BYTES = 1 << 30
_DIGEST, _MORE = "digest", "more"  # keys that are added to Optuna's


class SearchJournal:
    """A journal backend of Optuna (``optuna.storages.journal.BaseJournalBackend``), for one process at a time.

    Args:
        path: the file; an incomplete last step in it is cut off.
        search: what identifies the search; a journal of another one is refused.

    Raises:
        InputError: the file is not a regular one, or a line in it is damaged, misplaced or of another search.
    """

    def __init__(self, path: Path, search: object) -> None:
        self.path, self._together = path, False
        self._operations, self._step = list[Operation](), list[Operation]()
        self._last = last = hashlib.sha256(json.dumps(search, sort_keys=True).encode()).hexdigest()
        raw = read_regular(path, _ALLOWED, _MOST_BYTES) if os.path.lexists(path) else b""
        read, end, whole = 0, 0, 0
        for number, line in enumerate(raw.split(b"\n")[:-1], 1):
            operation, last = self._checked(line, number, last)
            self._operations.append(operation)
            end += len(line) + 1
            if not operation.get(_MORE):
                read, self._last, whole = number, last, end
        del self._operations[read:]
        if whole < len(raw):
            os.truncate(path, whole)

    def _checked(self, line: bytes, number: int, before: str) -> tuple[Operation, str]:
        try:
            operation = json.loads(line)
            operation.pop(_DIGEST)
            text, digest = _sealed(operation, before)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError):  # not JSON, or not an object
            text = None
        if text is None or text.encode() != line:
            raise InputError(f"{self.path}: line {number}", "a damaged or misplaced line", _ALLOWED)
        return operation, digest

    @contextmanager
    def step(self) -> Iterator[None]:
        """Write the operations of the block together; none of them if it raises."""
        self._together = True
        try:
            yield
            self._write()
        finally:
            self._together = False
            self._step = []

    def append_logs(self, logs: list[Operation]) -> None:
        """Append operations."""
        self._step += logs
        self._operations += json.loads(json.dumps(logs))
        if not self._together:
            self._write()
            self._step = []

    def read_logs(self, log_number_from: int) -> list[Operation]:
        """The operations from a number on, those of an unfinished step included."""
        return self._operations[log_number_from:]

    def _write(self) -> None:
        text = ""
        for place, operation in enumerate(self._step, 1):
            line, self._last = _sealed({**operation, _MORE: len(self._step) - place}, self._last)
            text += f"{line}\n"
        with writing(self.path), self.path.open("a") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def _sealed(operation: Operation, before: str) -> tuple[str, str]:
    """The line of an operation, and its digest; given the digest of the line before."""
    text = json.dumps(operation, separators=(",", ":"))
    digest = hashlib.sha256(f"{before}{text}".encode()).hexdigest()
    return json.dumps({**operation, _DIGEST: digest}, separators=(",", ":")), digest
