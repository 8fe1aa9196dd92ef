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
    """Status of a silo."""

    phase: SiloPhase = Field(strict=False)  # what it is doing
    # Date and time of its last message, UTC; None if there was none since the coordinator started.
    heard: DateTime | None = None
    # Real time since its pending task was sent [s]; None without a task at a connected silo.
    task_seconds: Amount | None = None
    limit: Amount | None = None  # real time after which that task has failed [s]; None without a limit
    # The last error that it reported, or the reason why its last task failed; empty if there was none since the
    # coordinator started, or after it has replied to a later task.
    error: str = ""
    up: Count = 0  # bytes of payload tensors received from it in the whole run
    down: Count = 0  # bytes of payload tensors sent to it, likewise


class Offer(Stored):
    """The run that a coordinator offers to its silos."""

    scenario: str  # the scenario as YAML, without keys that depend on the machine
    log: Digest  # hash of the first record of the coordinator's log, by which runs of one scenario differ


class CoordinatorFacts(Stored):
    """What a coordinator's answer to an inquiry says about itself and the run's data; not in ``status.json``."""

    versions: dict[str, str]  # of fedmq, torch and Python
    # The labels and model inputs on which the silos have agreed, or would agree now; None if the sender of the inquiry
    # is neither a silo nor the evaluator, in a simulated partition, and while the data do not fit together.
    format: StatedFormat | None = None
    committed: bool = False  # whether they have agreed
    # Digests of the scenario's values; None if the sender is neither a silo nor the evaluator.
    scenario: KeyDigests | None = None
    offer: Offer | None = None  # likewise, the run for a silo that takes part in one run after the other


class StatusFile(Stored):
    """``status.json`` of a run folder."""

    run: str  # id of the run
    written: DateTime  # date and time of this status, UTC
    phase: str  # phase of the rounds' state machine, or ``failed``
    error: str = ""  # the error that ended the run; empty without one
    round: Count  # number of merges so far
    rounds: Count  # total number of merges
    loss: Finite | None  # mean training loss of the last merge
    diverged: bool = False  # whether the run ended because training diverged in all silos
    # Metrics of the latest round evaluated, without recalls that every model reaches in so small a gallery.
    metrics: Figures
    # That round, which may be an earlier one than ``round``; None before the first evaluation.
    metrics_round: Count | None = None
    evaluated: EvaluatedItems | None = None  # items of the evaluated split; None if only the evaluator knows them
    up: Count  # bytes of payload tensors received in the whole run
    down: Count  # bytes of payload tensors sent in the whole run
    now: Amount  # the run's time [s]
    elapsed: Amount  # real time since the coordinator started [s]
    refused: dict[str, Count]  # number of refused messages by reason, since the coordinator started
    last_refused: str  # one line about the last refused message
    last_refused_at: DateTime | None = None  # its date and time, UTC; None without one
    silos: dict[str, SiloStatus]  # status of each silo
    # Its status, with the age of its pending request as ``task_seconds``; None in a run without one, before the rounds.
    evaluator: SiloStatus | None = None
    coordinator: CoordinatorFacts | None = None  # about the coordinator; only in answers to inquiries

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
    """Status of a run."""

    phase: str  # phase of the rounds' state machine
    round: int  # number of merges so far
    rounds: int  # total number of merges
    training: int  # number of connected silos with a pending task
    missing: tuple[str, ...]  # silos, and the evaluator, that have no session
    # Number of refused messages by reason, and one line about the last one, with its sender.
    refused: tuple[Mapping[str, int], str]
    online: int  # number of silos with a session
    lost: int  # number of silos that lost their session
    loss: float | None  # mean training loss of the last merge
    # Metrics of the latest round evaluated, without recalls that every model reaches in so small a gallery.
    metrics: Mapping[str, float]
    bytes: int  # total size [bytes] of payload tensors in both directions
    now: float  # the run's time [s]
    elapsed: float  # real time since the loop started [s]
    # Silos whose task takes longer than expected, longest first, and before them the evaluator if it does not answer:
    # name, real time since the task was sent or without an answer [s], and the limit [s].
    slow: tuple[tuple[str, float, float | None], ...] = ()
    overdue: tuple[str, ...] = ()  # silos whose task exceeded its limit, or the evaluator, that have not replied since
    minimum: int | None = None  # number of silos that start the run; None for all
    # Round of ``metrics``, which may be an earlier one; None before the first evaluation.
    metrics_round: int | None = None
    refused_ago: float = 0.0  # real time since the last refused message [s]
