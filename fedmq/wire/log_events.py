"""The events that message logs record, each with its meaning; ``docs/reference/message_logs.md`` lists them."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

#: How a log for operators shows an event.
Level = Literal["debug", "info", "warning", "error"]


class _Event(StrEnum):
    """An identifier with its meaning and the level that it has in a log for operators."""

    meaning: str
    level: Level

    def __new__(cls, value: str, meaning: str, level: Level = "debug") -> Self:
        event = str.__new__(cls, value)
        event._value_, event.meaning, event.level = value, meaning, level
        return event


class LogEvent(_Event):
    """What a note records; the further fields of a note depend on its event."""

    # Of a process.
    STARTED = "started", "the process started, of the version `program` of fedmq", "info"
    RESUMED = "resumed", "the coordinator resumed the run from the checkpoint of `version` merges", "info"
    EXTENDED = "extended", "a finished run continues until it has `rounds` rounds", "info"
    ENDED = "ended", "the coordinator ended while its rounds were in `phase`", "info"
    INLINE = ("inline", "the silos run inside the coordinator: no messages are exchanged or logged", "info")
    ONE_STEP_TASKS = (
        "one_step_tasks",
        "every task is one optimiser step, with batches of `batch_size` items",
        "warning",
    )
    BELOW_START = (
        "below_start",
        "training made the model, or personal models, worse: `metric`, `before`, `after`",
        "warning",
    )
    RELEASED = "released", "the coordinator released the model, with its digests", "info"
    RESULT_DIGESTS = "result_digests", "SHA-256 of the files of the finished run, by name"
    # What happened outside the run's timeline.
    AGREED = "agreed", "the silos agreed on labels and model inputs"
    JOINED = "joined", "the silo or evaluator `peer` takes part from here on", "info"
    RETURNED = "returned", "`peer` began a new session before the coordinator noticed that the old connection was lost"
    PEER_LOST = "peer_lost", "the coordinator lost `peer`: no heartbeat, or a broken connection", "warning"
    KEY_ACCEPTED = "key_accepted", "the coordinator accepts `key` of `peer` from here on", "info"
    EXPELLED = (
        "expelled",
        "the key of `peer` (or this process's own) was removed or replaced; its session ended",
        "warning",
    )
    TASK_OVERDUE = "task_overdue", "`peer` did not reply to task `sequence` within its limit of real time"
    SILO_ABSENT = "silo_absent", "`peer` stayed away for too long: its tasks fail"
    OFF_AT_START = "off_at_start", "by the availability trace, the `silos` are unavailable when the coordinator starts"
    STILL_CONNECTED = "still_connected", "the `silos` stayed connected while late silos were included"
    REJOIN_TIMEOUT = "rejoin_timeout", "the coordinator stopped waiting for silos that took part before it restarted"
    LATE_SILOS = "late_silos", "the rounds pause to include late silos"
    STOP_REQUESTED = "stop_requested", "the operator asked the run to stop"
    EVALUATION_ABORTED = "evaluation_aborted", "the operator stopped the run before its last evaluation was complete"
    KEYS_UNREADABLE = "keys_unreadable", "the folder of accepted keys cannot be read completely"
    STATUS_REQUESTED = "status_requested", "the holder of the key `peer` asked for the run's status for the first time"
    OTHER_SCENARIO = (
        "other_scenario",
        "after a refused handshake, `peer` reported which `keys` of its scenario differ",
        "warning",
    )
    # About tasks, replies and evaluations.
    NOT_DELIVERED = "not_delivered", "a message to `peer` could not be sent", "warning"
    ERROR_REPORTED = "error_reported", "`peer` reported an error", "error"
    TASK_FAILED = "task_failed", "task `sequence` of `silo` has no usable reply, for the `reason` given", "warning"
    REPLY_DISCARDED = "reply_discarded", "the reply to task `sequence` of `silo` is not merged", "info"
    REPLY_LEFT_OUT = "reply_left_out", "the aggregation left out the reply of `silo` as an outlier", "info"
    BRANCH_LEFT_ALONE = (
        "branch_left_alone",
        "a secure sum leaves `branch` as it is, as its weights would single a silo out: `why`",
        "warning",
    )
    ROWS_LEFT_ALONE = (
        "rows_left_alone",
        "a secure sum leaves `rows` as they are: they have too few silos, or one dropped out",
        "warning",
    )
    SUM_KEYS = (
        "sum_keys",
        "the process signed `keys` of a secure sum of `version`, which adds payloads `through`",
        "info",
    )
    SUM_SILOS = "sum_silos", "the process takes part in the secure sum of `version` with `silos`", "info"
    SUM_ENDED = "sum_ended", "a round ends without a merge, because its secure sum is not complete; `why`", "warning"
    ALL_MERGED = "all_merged", "the last round is merged", "info"
    CHECKPOINT_REFUSED = "checkpoint_refused", "the checkpoint of `version` merges could not be written", "error"
    EVALUATOR_ABSENT = "evaluator_absent", "the evaluator did not answer within the limit", "warning"
    NOT_MEASURED = "not_measured", "`peer` stayed away, so the evaluation is made without it", "warning"
    # Scripted faults.
    FAULT = "fault", "a scripted fault took effect", "info"
    FAULT_SKIPPED = "fault_skipped", "a scripted fault was not carried out, because no process could do it", "warning"
    WALL_CLOCK_FAULTS = (
        "wall_clock_faults",
        "with a wall clock the scripted faults are real, and the run cannot be replayed",
        "warning",
    )
    # A silo's personal state.
    STATE_KEPT = "state_kept", "the silo stores a personal state from task `task` on", "info"
    STATE_MISSING = (
        "state_missing",
        "the personal state of earlier tasks is gone; the silo continues without it",
        "warning",
    )
    STATE_OUTDATED = (
        "state_outdated",
        "the personal state of task `task` is gone; the silo continues from an older one",
        "warning",
    )
    # About sessions and refused messages.
    WITHHELD = "withheld", "the silo's own policy forbids a message; `rule` says why", "warning"
    HELLO_REFUSED = "hello_refused", "the coordinator refused the handshake", "warning"
    COORDINATOR_STOPPED = (
        "coordinator_stopped",
        "the coordinator was stopped by its operator; this process waits for its return",
        "info",
    )
    HEARTBEAT_MISSED = "heartbeat_missed", "the coordinator was silent for too long; a new handshake begins", "warning"
    PROCESS_SUSPENDED = (
        "process_suspended",
        "this process was suspended for too long; a new handshake begins",
        "warning",
    )
    RECONNECTED = "reconnected", "the connection broke and was made again; a new handshake begins", "info"
    QUEUE_FULL = "queue_full", "the queue to the coordinator stayed full; a new handshake begins", "warning"
    MESSAGE_LOST = "message_lost", "a message of the coordinator did not arrive; a new handshake begins", "warning"
    RATE_LIMITED = "rate_limited", "the coordinator ended the session: this process sent too many messages", "warning"
    REFUSALS_COUNTED = "refusals_counted", "`count` further messages of unknown peers were refused", "warning"
    STALE_SESSIONS = (
        "stale_sessions",
        "`count` messages of sessions before the coordinator's restart were dropped",
        "info",
    )


class TimelineEvent(_Event):
    """An event on the timeline of a run, which a replay must have, too."""

    ARRIVED = "arrived", "a reply arrived"
    FAILED = "failed", "a task failed"
    SWITCHED = "switched", "the availability of a silo changed"
    DEADLINE = "deadline", "the deadline of a round passed"
