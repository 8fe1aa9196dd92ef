"""Inputs and outputs of the rounds machine: events, actions, and what a checkpoint stores of it, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, assert_never

from pydantic import Field

from fedmq.federation.faults import FailureReason
from fedmq.storage.json_files import Count, Stored


class Phase(StrEnum):
    """Phase of a run."""

    GATHERING = "gathering"  # waiting for the silos to join
    COLLECTING = "collecting"  # tasks are pending, replies arrive
    SHARING = "sharing"  # secure aggregation: the silos that reported share their secrets
    MASKING = "masking"  # secure aggregation: they send their masked updates
    REVEALING = "revealing"  # secure aggregation: they reveal what removes the masks from the sum
    MERGING = "merging"  # a merge is in progress, including its checkpoint
    DONE = "done"  # all rounds merged
    STOPPED = "stopped"  # stopped early; can be resumed


class DiscardReason(StrEnum):
    """Why a reply is discarded."""

    DUPLICATE = "duplicate"  # its task is not pending
    LATE = "late"  # its round is already merged
    SURPLUS = "surplus"  # its round was merged with enough other replies
    INCOMPLETE = "incomplete"  # too few silos answered a step of its round's secure sum
    STALE = "stale"  # staleness above the limit


class Stage(StrEnum):
    """What a silo's pending task waits for: training, or a step of a secure sum."""

    TRAIN = "train"  # local training; in a secure sum its reply has no update
    SHARE = "share"  # shares of the silo's secrets, sealed for the other silos that reported
    MASK = "mask"  # the masked update
    REVEAL = "reveal"  # its shares of the secrets that the sum needs


# --------------------------------------------------------------------------------------------------- events in
@dataclass(frozen=True)
class Joined:
    """A silo has an authenticated session and is ready for tasks."""

    silo: str


@dataclass(frozen=True)
class StillConnected:
    """These silos kept their sessions while the coordinator went back to its checkpoint, to include late silos."""

    silos: tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    """A silo's connection was lost; its task stays pending until the silo rejoins or the task is given up."""

    silo: str


@dataclass(frozen=True)
class Arrived:
    """A valid reply arrived, with the training loss it reports, if the method has silos report one."""

    silo: str
    sequence: int
    loss: float | None = None


@dataclass(frozen=True)
class Failed:
    """A silo's task has no usable reply: it was refused, the silo reported an error, or the silo stayed away."""

    silo: str
    sequence: int
    reason: FailureReason | str  # reason of the failure; the wire's reason where the reply was refused
    gone: bool = False  # the silo is given up with its task
    # Number of the log record of what made it fail; None if there is none.
    cause: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Switched:
    """The availability trace turns a silo on or off; a silo that is off is not selected."""

    silo: str
    on: bool


@dataclass(frozen=True)
class Deadline:
    """The time that a round waits for more replies is over."""

    round: int


@dataclass(frozen=True)
class Merged:
    """The requested merge is done and its checkpoint is on disk."""

    version: int
    last: bool = False  # no further rounds are wanted, as evaluations no longer improve


@dataclass(frozen=True)
class Stop:
    """The user or the operating system requests a stop."""


@dataclass(frozen=True)
class Expelled:
    """A silo's key was removed: it is not selected any more, unless it joins again with an accepted key."""

    silo: str


@dataclass(frozen=True)
class WaitEnded:
    """The time is over for which a resumed run waits for all silos that took part; the minimum suffices now."""


@dataclass(frozen=True)
class EvaluationAborted:
    """All rounds are merged, but a stop was requested before the last evaluation; a resumed run evaluates."""


Event = (
    Joined
    | StillConnected
    | Lost
    | Switched
    | Arrived
    | Failed
    | Deadline
    | Merged
    | Stop
    | Expelled
    | WaitEnded
    | EvaluationAborted
)


def silos_of(event: Event) -> tuple[str, ...]:
    """The silos that an event names."""
    match event:
        case StillConnected(silos):
            return silos
        case Joined() | Lost() | Switched() | Arrived() | Failed() | Expelled():
            return (event.silo,)
        case Deadline() | Merged() | Stop() | WaitEnded() | EvaluationAborted():
            return ()
        case _:
            assert_never(event)


# --------------------------------------------------------------------------------------------------- actions out
@dataclass(frozen=True, kw_only=True)
class _Action:
    """Base of all actions."""

    cause: int | None = None  # number of the log record of the event that caused the action; None without a log


@dataclass(frozen=True)
class Send(_Action):
    """Send a task to a silo."""

    silo: str
    sequence: int
    base_version: int
    round: int
    stage: Stage = Stage.TRAIN


@dataclass(frozen=True)
class Collect(_Action):
    """Continue a secure sum with these replies of a stage; without any it has ended."""

    round: int
    stage: Stage
    replies: tuple[Arrived, ...]


@dataclass(frozen=True)
class SetDeadline(_Action):
    """Schedule a :class:`Deadline` event ``after`` [s] from now."""

    round: int
    after: float


@dataclass(frozen=True)
class Merge(_Action):
    """Merge these replies, in this order, into version + 1."""

    round: int
    replies: tuple[Arrived, ...]


@dataclass(frozen=True)
class Discard(_Action):
    """Discard a reply without merging it."""

    silo: str
    sequence: int
    reason: DiscardReason


@dataclass(frozen=True)
class Finish(_Action):
    """All rounds are merged; no more tasks are sent."""


Action = Send | Collect | SetDeadline | Merge | Discard | Finish


# --------------------------------------------------------------------------------------------------- stored
@dataclass(frozen=True)
class PendingTask:
    """A task without an outcome yet."""

    sequence: int
    base_version: int
    round: int
    stage: Stage = Stage.TRAIN


class RoundsRecord(Stored):
    """The rounds machine between two rounds."""

    version: Count
    last: bool  # no further rounds are wanted, as evaluations no longer improve
    gone: list[str]  # silos that were given up
    # Number, base version and round of each pending task, by silo.
    pending: dict[str, Annotated[list[Count], Field(min_length=3, max_length=3)]]
    sequences: dict[str, Count]  # number of each silo's last task
    losses: dict[str, float]  # last training loss reported by each silo
