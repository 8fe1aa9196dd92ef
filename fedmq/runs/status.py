"""Status of a run, as the coordinator reports it to displays and supervisors, and writes it to ``status.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from fedmq.config.run_id import KeyDigests
from fedmq.errors import RunError
from fedmq.runs.data_records import StatedFormat
from fedmq.runs.run_records import EvaluatedItems, Figures
from fedmq.storage.json_files import Amount, Count, DateTime, Digest, Finite, Stored, read_json
from fedmq.text import printable

#: Interval between two writings of ``status.json`` [s].
STATUS_SECONDS = 1.0
#: Characters kept of an error in a status.
ERROR_CHARACTERS = 300


#: Phase in ``status.json`` of a run that an error has ended; the other phases are those of the rounds' state machine.
FAILED = "failed"
#: Phases in which no coordinator runs.
ENDED_PHASES = ("done", "stopped", FAILED)


class SiloPhase(StrEnum):
    """What a silo is doing, as the coordinator sees it."""

    ABSENT = "absent"  # has not joined since the coordinator started
    WAITING = "waiting"  # joined, without a task, or has replied to it
    TRAINING = "training"  # has a task and has not replied
    OVERDUE = "overdue"  # connected, but its last task exceeded its limit; not selected until it replies or rejoins
    LOST = "lost"  # disconnected; its task is sent again when it rejoins
    STOPPED = "stopped"  # was connected when the run stopped or failed
    DONE = "done"  # is connected, and all rounds are merged
    GIVEN_UP = "given up"  # stayed away; not selected until it rejoins


class SiloStatus(Stored):
    """Status of a silo.

    Args:
        phase: what it is doing.
        heard: date and time of its last message, UTC; None if there was none since the coordinator started.
        task_seconds: real time since its pending task was sent [s]; None without a task at a connected silo.
        limit: real time after which that task has failed [s]; None without a limit.
        error: the last error that it reported, or the reason why its last task failed; empty if there was none since
            the coordinator started, or after it has replied to a later task.
        up: bytes of payload tensors received from it in the whole run.
        down: bytes of payload tensors sent to it, likewise.
    """

    phase: SiloPhase = Field(strict=False)
    heard: DateTime | None = None
    task_seconds: Amount | None = None
    limit: Amount | None = None
    error: str = ""
    up: Count = 0
    down: Count = 0


class Offer(Stored):
    """The run that a coordinator offers to its silos.

    Args:
        scenario: the scenario as YAML, without keys that depend on the machine.
        log: hash of the first record of the coordinator's log, by which runs of one scenario differ.
    """

    scenario: str
    log: Digest


class CoordinatorFacts(Stored):
    """What a coordinator's answer to an inquiry says about itself and the run's data; not in ``status.json``.

    Args:
        versions: of fedmq, torch and Python.
        format: the labels and model inputs on which the silos have agreed, or would agree now; None if the sender of
            the inquiry is neither a silo nor the evaluator, in a simulated partition, and while the data do not fit
            together.
        committed: whether they have agreed.
        scenario: digests of the scenario's values; None if the sender is neither a silo nor the evaluator.
        offer: likewise, the run for a silo that takes part in one run after the other.
    """

    versions: dict[str, str]
    format: StatedFormat | None = None
    committed: bool = False
    scenario: KeyDigests | None = None
    offer: Offer | None = None


class StatusFile(Stored):
    """``status.json`` of a run folder.

    Args:
        run: id of the run.
        written: date and time of this status, UTC.
        phase: phase of the rounds' state machine, or ``failed``.
        error: the error that ended the run; empty without one.
        round: number of merges so far.
        rounds: total number of merges.
        loss: mean training loss of the last merge.
        diverged: whether the run ended because training diverged in all silos.
        metrics: metrics of the latest round evaluated, without recalls that every model reaches in so small a gallery.
        metrics_round: that round, which may be an earlier one than ``round``; None before the first evaluation.
        evaluated: items of the evaluated split; None if only the evaluator knows them.
        up: bytes of payload tensors received in the whole run.
        down: bytes of payload tensors sent in the whole run.
        now: the run's time [s].
        elapsed: real time since the coordinator started [s].
        refused: number of refused messages by reason, since the coordinator started.
        last_refused: one line about the last refused message.
        last_refused_at: its date and time, UTC; None without one.
        silos: status of each silo.
        evaluator: its status, with the age of its pending request as ``task_seconds``; None in a run without one,
            before the rounds.
        coordinator: about the coordinator; only in answers to inquiries.
    """

    run: str
    written: DateTime
    phase: str
    error: str = ""
    round: Count
    rounds: Count
    loss: Finite | None
    diverged: bool = False
    metrics: Figures
    metrics_round: Count | None = None
    evaluated: EvaluatedItems | None = None
    up: Count
    down: Count
    now: Amount
    elapsed: Amount
    refused: dict[str, Count]
    last_refused: str
    last_refused_at: DateTime | None = None
    silos: dict[str, SiloStatus]
    evaluator: SiloStatus | None = None
    coordinator: CoordinatorFacts | None = None

    @model_validator(mode="after")
    def _within_rounds(self) -> StatusFile:
        if max(self.round, self.metrics_round or 0) > self.rounds:
            raise ValueError(f"a round beyond {self.rounds}, the last")
        return self


def status_of(text: str) -> StatusFile:
    """The status that a coordinator sent.

    Raises:
        RunError: it cannot be read, e.g. because the coordinator is of another release.
    """
    try:
        return StatusFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RunError(printable(f"the coordinator's status cannot be read: {place}: {first['msg']}")) from None


def read_status(path: Path) -> StatusFile:
    """Read ``status.json``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    return read_json(path, StatusFile, "the status of a run, which its coordinator writes while it runs")


@dataclass(frozen=True)
class Status:
    """Status of a run.

    Args:
        phase: phase of the rounds' state machine.
        round: number of merges so far.
        rounds: total number of merges.
        training: number of connected silos with a pending task.
        missing: silos, and the evaluator, that have no session.
        refused: number of refused messages by reason, and one line about the last one, with its sender.
        online: number of silos with a session.
        lost: number of silos that lost their session.
        loss: mean training loss of the last merge.
        metrics: metrics of the latest round evaluated, without recalls that every model reaches in so small a gallery.
        bytes: total size [bytes] of payload tensors in both directions.
        now: the run's time [s].
        elapsed: real time since the loop started [s].
        slow: silos whose task takes longer than expected, longest first, and before them the evaluator if it does not
            answer: name, real time since the task was sent or without an answer [s], and the limit [s].
        overdue: silos whose task exceeded its limit, or the evaluator, that have not replied since.
        minimum: number of silos that start the run; None for all.
        metrics_round: round of ``metrics``, which may be an earlier one; None before the first evaluation.
        refused_ago: real time since the last refused message [s].
    """

    phase: str
    round: int
    rounds: int
    training: int
    missing: tuple[str, ...]
    refused: tuple[Mapping[str, int], str]
    online: int
    lost: int
    loss: float | None
    metrics: Mapping[str, float]
    bytes: int
    now: float
    elapsed: float
    slow: tuple[tuple[str, float, float | None], ...] = ()
    overdue: tuple[str, ...] = ()
    minimum: int | None = None
    metrics_round: int | None = None
    refused_ago: float = 0.0
