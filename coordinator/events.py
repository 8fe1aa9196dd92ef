"""What comes into the rounds machine and what goes out of it: events and actions, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fedmq.federation.fault_effects import FailureReason


class DiscardReason(StrEnum):
    """Why a reply is thrown away."""

    DUPLICATE = "duplicate"  # its task is not open
    LATE = "late"  # its round is merged
    SURPLUS = "surplus"  # so it is, with enough of those asked
    STALE = "stale"  # older than allowed


# --------------------------------------------------------------------------------------------------- events in
@dataclass(frozen=True)
class Joined:
    """A silo has an authenticated session and is ready for tasks."""

    silo: str


@dataclass(frozen=True)
class Lost:
    """A silo's connection went silent; its task stays open until it rejoins or the task expires."""

    silo: str


@dataclass(frozen=True)
class Arrived:
    """A well-formed reply is here; ``loss`` is what it reports, if its method reports one."""

    silo: str
    sequence: int
    loss: float | None = None


@dataclass(frozen=True)
class Failed:
    """A silo's task will bring no usable reply: it was refused, the silo said it failed, or the silo stayed away."""

    silo: str
    sequence: int
    reason: FailureReason | str  # or the wire's reason, where the reply was refused
    gone: bool = False


@dataclass(frozen=True)
class Switched:
    """The availability trace turns a silo on or off; one that is off is not asked."""

    silo: str
    on: bool


@dataclass(frozen=True)
class Deadline:
    """The time a merge waits for more replies is over."""

    round: int


@dataclass(frozen=True)
class Merged:
    """The merge asked for is done and its checkpoint is on disk."""

    version: int


@dataclass(frozen=True)
class Stop:
    """The user or the operating system asks to stop."""


@dataclass(frozen=True)
class Expelled:
    """A silo's key was taken back while the run was stopped: its task has failed, and it is asked nothing more.

    It comes before anybody joins a resumed run.
    """

    silo: str


@dataclass(frozen=True)
class EvaluationAborted:
    """All rounds are merged, but somebody asked to stop before everything was measured; a resume measures it."""


Event = Joined | Lost | Switched | Arrived | Failed | Deadline | Merged | Stop | Expelled | EvaluationAborted


# --------------------------------------------------------------------------------------------------- actions out
@dataclass(frozen=True, kw_only=True)
class _Action:
    """What every action has.

    Args:
        cause: number of the event of the run that it follows from; 0 where it follows from none of them, but from a
            silo that joined or was lost, or from the operator.
    """

    cause: int = 0


@dataclass(frozen=True)
class Send(_Action):
    """Hand a task to a silo."""

    silo: str
    sequence: int
    base_version: int
    round: int


@dataclass(frozen=True)
class SetDeadline(_Action):
    """Call back with :class:`Deadline` after this many seconds."""

    round: int
    after: float


@dataclass(frozen=True)
class Merge(_Action):
    """Merge these replies, in this order, into version + 1."""

    round: int
    replies: tuple[Arrived, ...]


@dataclass(frozen=True)
class Discard(_Action):
    """Throw a reply away; it will never be merged."""

    silo: str
    sequence: int
    reason: DiscardReason


@dataclass(frozen=True)
class Finish(_Action):
    """Nothing more will be asked of anyone."""


Action = Send | SetDeadline | Merge | Discard | Finish
