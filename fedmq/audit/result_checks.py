"""Compare the files of a finished run with the digests that its coordinator noted at the end, in its signed log."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fedmq.errors import InputError
from fedmq.runs.result_digests import FILES, SUMMARY, result_digest
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import Fact, LogRecord, NoteKind, NoteRecord
from fedmq.wire.messages import COORDINATOR

#: Notes after which files may change until the run has ended again.
_GOES_ON = (NoteKind.STARTED, NoteKind.RESUMED, NoteKind.EXTENDED)


@dataclass
class ResultChecks:
    """The last digests that the coordinator noted.

    Args:
        noted: place of the note, and its digests by file; None without one, as in logs of earlier releases.
    """

    noted: tuple[str, Mapping[str, Fact]] | None = None

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add a record of a process's log."""
        if process != COORDINATOR or not isinstance(record, NoteRecord):
            return
        if record.text is NoteKind.RESULTS:
            self.noted = place, record.facts
        elif record.text in _GOES_ON:
            self.noted = None

    def compared(self, folder: RunFolder) -> tuple[str, ...]:
        """The files that :meth:`differences` compares; none in a run that is not finished."""
        if self.noted is None or not folder.summary.exists():
            return ()
        return tuple(name for name in (*FILES, SUMMARY) if name in self.noted[1])

    def differences(self, folder: RunFolder, known: Collection[str]) -> Iterator[tuple[str, str]]:
        """Places and texts of the files that differ from their digests.

        Args:
            folder: the run folder.
            known: places at which something is found already.
        """
        if self.noted is None:
            return
        place, digests = self.noted
        for name in self.compared(folder):
            path = str(folder.root / name)
            if any(each.startswith(path) for each in known):
                continue
            try:
                same = result_digest(folder, name) == digests[name]
            except InputError as error:
                yield path, f"{error.found} instead of the file with the digest in {place}"
            else:
                if not same:
                    yield path, f"was changed after the run had ended: its digest is not that in {place}"
