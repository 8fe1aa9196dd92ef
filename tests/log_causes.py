"""Checks that every record that follows from an event names it, for the logs of runs that other tests make."""

from __future__ import annotations

from pathlib import Path

from coordinator.round_events import DiscardReason
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord, TimelineRecord, read_log

#: Notes of events that the loop passes to the rounds machine; what follows from them names them.
EVENTS = frozenset(
    {
        LogEvent.JOINED, LogEvent.RETURNED, LogEvent.PEER_LOST, LogEvent.EXPELLED, LogEvent.TASK_OVERDUE,
        LogEvent.OFF_AT_START, LogEvent.STILL_CONNECTED, LogEvent.REJOIN_TIMEOUT, LogEvent.LATE_SILOS,
        LogEvent.STOP_REQUESTED, LogEvent.EVALUATION_ABORTED,
    }
)  # fmt: skip
#: Notes of what else happens to a coordinator: its start, what its peers tell it or fail to do, what they agree on.
OUTSIDE = frozenset(
    {
        LogEvent.STARTED, LogEvent.RESUMED, LogEvent.EXTENDED, LogEvent.INLINE, LogEvent.AGREED, LogEvent.SILO_ABSENT,
        LogEvent.NOT_DELIVERED, LogEvent.EVALUATOR_ABSENT, LogEvent.NOT_MEASURED, LogEvent.ERROR_REPORTED,
        LogEvent.STALE_SESSIONS, LogEvent.ONE_STEP_TASKS,
        LogEvent.REFUSALS_COUNTED, LogEvent.KEYS_UNREADABLE, LogEvent.STATUS_REQUESTED, LogEvent.WALL_CLOCK_FAULTS,
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
        if not isinstance(record, NoteRecord | TimelineRecord):
            continue
        cause = None if record.caused_by is None else by_number[record.caused_by]
        assert cause is None or cause.n < record.n
        if isinstance(record, TimelineRecord) and isinstance(cause, MessageRecord):
            assert (cause.header.sender, cause.header.reply_to) == (record.silo, record.sequence)
        if isinstance(record, NoteRecord) and record.facts.get("reason") == DiscardReason.DUPLICATE:
            assert cause is not None, record  # it never reaches the timeline
        elif isinstance(record, NoteRecord) and record.event not in EVENTS | OUTSIDE:
            assert isinstance(cause, TimelineRecord) or (isinstance(cause, NoteRecord) and cause.event in EVENTS), (
                record
            )
