"""Compare the files of a finished run with the digests that its coordinator noted at the end, in its signed log."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from fedmq.audit.traffic_checks import BEGINNINGS
from fedmq.errors import InputError
from fedmq.runs.results import FILES, SUMMARY, result_digest
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import Fact, LogRecord, MessageRecord, NoteKind, NoteRecord
from fedmq.wire.messages import COORDINATOR, Kind


@dataclass
class ResultChecks:
    """The last digests that the coordinator noted.

    Args:
        noted: place of the note, and its digests by file; None without one, as in logs of earlier releases.
        after: places of the coordinator's messages after the note that are not its last ones to its peers.
    """

    noted: tuple[str, Mapping[str, Fact]] | None = None
    after: list[str] = field(default_factory=list)

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add a record of a process's log."""
        if process != COORDINATOR:
            return
        match record:
            case NoteRecord(text=NoteKind.RESULTS):
                self.noted = place, record.facts
            case NoteRecord() if record.text in BEGINNINGS:  # files may change until the run has ended again
                self.noted = None
            case MessageRecord() if self.noted is not None and record.header.kind is not Kind.STOP:
                self.after.append(place)

    def compared(self, folder: RunFolder) -> tuple[str, ...]:
        """The files that :meth:`differences` compares; none in a run that is not finished."""
        if self.noted is None or not folder.summary.exists():
            return ()
        return tuple(name for name in (*FILES, SUMMARY) if name in self.noted[1])

    def differences(self, folder: RunFolder, known: Collection[str]) -> Iterator[tuple[str, str]]:
        """Places and texts of the files that differ from their digests, and of messages after the end.

        Args:
            folder: the run folder.
            known: places at which something is found already.
        """
        for place in self.after:
            yield place, "a message after the run had ended"
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
