"""Checks that every record that follows from an event names it, for the logs of runs that other tests make."""

from __future__ import annotations

from pathlib import Path

from coordinator.events import DiscardReason
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_records import EventRecord, LogRecord, MessageRecord, NoteKind, NoteRecord, read_log

#: Notes of events that the loop passes to the rounds machine; what follows from them names them.
EVENTS = frozenset(
    {
        NoteKind.JOINED, NoteKind.RETURNED, NoteKind.PEER_LOST, NoteKind.EXPELLED, NoteKind.OVERDUE,
        NoteKind.OFF_AT_START, NoteKind.STILL_CONNECTED, NoteKind.WAIT_ENDED, NoteKind.LATE_SILOS,
        NoteKind.STOP_REQUESTED, NoteKind.EVALUATION_ABORTED,
    }
)  # fmt: skip
#: Notes of what else happens to a coordinator: its start, what its peers tell it or fail to do, what they agree on.
OUTSIDE = frozenset(
    {
        NoteKind.STARTED, NoteKind.RESUMED, NoteKind.EXTENDED, NoteKind.INLINE, NoteKind.AGREED, NoteKind.STAYED_AWAY,
        NoteKind.NOT_DELIVERED, NoteKind.EVALUATOR_GIVEN_UP, NoteKind.NOT_MEASURED, NoteKind.ERROR_REPORTED,
        NoteKind.FORMER_SESSIONS,
        NoteKind.REFUSALS_COUNTED, NoteKind.KEYS_UNREADABLE, NoteKind.INQUIRED, NoteKind.WALL_CLOCK_FAULTS,
    }
)  # fmt: skip


def records(out: Path) -> list[LogRecord]:
    """The records of a run's coordinator."""
    return [record for _, record in read_log(RunFolder(out).messages("coordinator")) if record is not None]


def check_causes(out: Path) -> None:
    """Check the causes in the log of a run's coordinator."""
    found = records(out)
    by_number = {record.n: record for record in found}
    for record in found:
        if not isinstance(record, NoteRecord | EventRecord):
            continue
        cause = None if record.caused_by is None else by_number[record.caused_by]
        assert cause is None or cause.n < record.n
        if isinstance(record, EventRecord) and isinstance(cause, MessageRecord):
            assert (cause.header.sender, cause.header.reply_to) == (record.silo, record.sequence)
        if isinstance(record, NoteRecord) and record.facts.get("reason") == DiscardReason.DUPLICATE:
            assert cause is not None, record  # it never reaches the timeline
        elif isinstance(record, NoteRecord) and record.text not in EVENTS | OUTSIDE:
            assert isinstance(cause, EventRecord) or (isinstance(cause, NoteRecord) and cause.text in EVENTS), record
