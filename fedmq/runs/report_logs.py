"""What a report takes from the message logs of a run, each of which is read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedmq.runs.html_timeline import LogFacts, add_record
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, tell
from fedmq.wire.log_records import MessageRecord, read_records
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.sent_payloads import SentPayloads, sent_payloads

_SHOWN_BYTES = 1 << 24  # size of the logs from which on their progress is shown
_EVERY = 5000  # records between two reports of progress


@dataclass(frozen=True)
class LoggedFacts:
    """What the message logs of a run show.

    Args:
        course: tasks, incidents and traffic, by the coordinator's log.
        sent: payloads that each process sent.
    """

    course: LogFacts
    sent: SentPayloads


def read_logs(folder: RunFolder, progress: Progress | None = None, *, damaged: bool = True) -> LoggedFacts:
    """Read the message logs of a run.

    Args:
        folder: its folder; without logs, there are no facts.
        progress: called with the megabytes that are read, for large logs; None shows nothing.
        damaged: leave out lines that are not records (``fedmq audit`` names them); otherwise refuse them.

    Raises:
        InputError: a log cannot be read, or is damaged where that is refused.
    """
    course = LogFacts()
    logs = sorted((folder.root / "messages").glob("*.jsonl"))
    messages = _messages(logs, folder.messages(COORDINATOR), course, progress, damaged)
    return LoggedFacts(course, sent_payloads(messages, {log.stem for log in logs}))


def _messages(
    logs: list[Path], coordinator: Path, course: LogFacts, progress: Progress | None, damaged: bool
) -> Iterator[MessageRecord]:
    """All messages; adds the records of the coordinator to the course of the run."""
    sizes = [log.stat().st_size if log.is_file() else 0 for log in logs]
    before, total = 0, sum(sizes)
    report = tell(progress if total >= _SHOWN_BYTES else None, "reading message logs, MB", total >> 20)
    for log, size in zip(logs, sizes, strict=True):
        for record, at in read_records(log, damaged=damaged):
            if log == coordinator:
                add_record(course, record)
            if isinstance(record, MessageRecord):
                yield record
            if record.n % _EVERY == 0:
                report((before + at) >> 20)
        before += size
    report(total >> 20)
