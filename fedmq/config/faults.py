"""Schema of scripted faults: one class per kind. ``faults:`` in a scenario is a list of them.

docs/reference/faults.md has an example of each. A fault defines where (``silos``, ``share``), when (``rounds``,
``time``, ``probability``) and what happens; :mod:`fedmq.federation.faults` implements its effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from fedmq.config.sections import Count, Fraction, Modality, Name, NonNegative, Number, Part, Positive, Whole, Wire
from fedmq.errors import ConflictError

Group = Literal["all", "image_only", "text_only", "paired"]
Window = tuple[float, float]
_RANGE = re.compile(r"(\d+)-(\d*)")
_NOTICED = Field(4.0, description="time until the coordinator notices, by default two heartbeats [s]")


class Fault(Part):
    """Where and when a fault applies; all conditions must hold."""

    silos: Group | tuple[Name, ...] = Field("all", description="silos, as a group by modality or by name")
    share: Fraction = Field(1.0, gt=0.0, description="fraction of those silos, drawn by the seed, at least one")
    rounds: tuple[Annotated[Whole, Field(ge=0)], ...] | str | None = Field(
        None, description="rounds (base version of a task): a list, or a range like 3-7 or 3-; null: all"
    )

    @field_validator("rounds")
    @classmethod
    def _range(cls, value: tuple[int, ...] | str | None) -> tuple[int, ...] | str | None:
        if isinstance(value, str):
            match = _RANGE.fullmatch(value)
            if match is None or (match[2] and int(match[2]) < int(match[1])):
                raise ValueError("rounds is a list like [2, 5], or a range like 3-7 or 3-")
        return value

    @property
    def turns(self) -> frozenset[int]:
        """Rounds at which the fault may start or end."""
        if self.rounds is None:
            return frozenset({0})
        if isinstance(self.rounds, str):
            first, _, last = self.rounds.partition("-")
            return frozenset({int(first), *([int(last) + 1] if last else [])})
        return frozenset(turn for round_ in self.rounds for turn in (round_, round_ + 1))

    def in_rounds(self, round_: int) -> bool:
        """Whether the fault applies in a round."""
        if self.rounds is None:
            return True
        if isinstance(self.rounds, str):
            first, _, last = self.rounds.partition("-")
            return int(first) <= round_ and (not last or round_ <= int(last))
        return round_ in self.rounds


class TaskFault(Fault):
    """A fault of single tasks."""

    time: tuple[NonNegative, Positive] | None = Field(
        None, description="window [from, to] on the run's clock [s] in which the task was sent"
    )
    probability: Fraction = Field(1.0, gt=0.0, description="probability per task")

    @model_validator(mode="after")
    def _forward(self) -> TaskFault:
        if self.time is not None and self.time[1] <= self.time[0]:
            raise ValueError("time is [from, to] with to above from")
        return self

    def in_time(self, at: float) -> bool:
        """Whether the fault applies at a time [s]."""
        return self.time is None or self.time[0] <= at < self.time[1]


#: Steps of a round: training, and with privacy.secure_aggregation those of the sum.
StepName = Literal["train", "share", "mask", "reveal"]


class StepFault(TaskFault):
    """A fault of one step of a task."""

    step: StepName = Field(
        "train", description="step in which it applies; the others than train need privacy.secure_aggregation"
    )


# ------------------------------------------------------------------------------------------------ links and processes
class Late(TaskFault):
    """A reply is delayed."""

    kind: Literal["late"] = "late"
    seconds: Positive = Field(description="delay [s]")


class Drop(StepFault):
    """A reply is lost; in another step than training, the silo is out of the round's sum."""

    kind: Literal["drop"] = "drop"
    again: Positive | None = Field(
        None, description="time after which the task is sent again [s]; null: it is given up"
    )


class Leave(TaskFault):
    """A silo leaves and rejoins with its personal state: in ``time``, in ``rounds``, or periodically (``every``)."""

    kind: Literal["leave"] = "leave"
    every: Positive | None = Field(
        None, description="time from one absence to the next [s]; each silo has its own phase"
    )
    away: Positive | None = Field(None, description="length of an absence [s]; needs every")
    noticed: Positive = _NOTICED

    @model_validator(mode="after")
    def _some_window(self) -> Leave:
        if (self.every is None) != (self.away is None) or (self.every or math.inf) <= (self.away or 0.0):
            raise ValueError("every and away go together, and away is below every")
        if (self.time is None) + (self.every is None) + (self.rounds is None) != 2:
            raise ValueError("leave needs one of time, rounds, or every with away")
        return self

    def in_time(self, _at: float) -> bool:
        """Always true: whether the fault applies depends on the whole task, not on its start."""
        return True


class Split(TaskFault):
    """The network is partitioned: for a while, these silos and the coordinator cannot reach each other."""

    kind: Literal["split"] = "split"
    noticed: Positive = _NOTICED

    @model_validator(mode="after")
    def _needs_time(self) -> Split:
        if self.time is None:
            raise ValueError("split needs time: [from, to]")
        return self

    def in_time(self, _at: float) -> bool:
        """Always true: whether the fault applies depends on the whole task, not on its start."""
        return True


class Crash(StepFault):
    """The silo's process is killed (SIGKILL) during a task and restarted."""

    kind: Literal["crash"] = "crash"
    restart: Positive = Field(10.0, description="time until it is up again [s]; the task then starts over")


class Freeze(TaskFault):
    """The silo's process is paused (SIGSTOP) and continued (SIGCONT)."""

    kind: Literal["freeze"] = "freeze"
    seconds: Positive = Field(description="length of the pause on the run's clock [s]")
    beats: Positive = Field(3.0, description="real length of the pause [heartbeats]")


class Duplicate(TaskFault):
    """A reply's frames arrive twice; the second copy is refused."""

    kind: Literal["duplicate"] = "duplicate"


class Reorder(TaskFault):
    """A reply's frames arrive after the next message; both are refused, and the task is sent again."""

    kind: Literal["reorder"] = "reorder"
    seconds: NonNegative = Field(4.0, description="delay until the reply is accepted [s]")


class Corrupt(TaskFault):
    """One bit of a reply's frames is flipped; the reply is refused, and the task is sent again."""

    kind: Literal["corrupt"] = "corrupt"
    seconds: NonNegative = Field(4.0, description="delay until the reply is accepted [s]")


# -------------------------------------------------------------------------------------------------- the coordinator
class CoordinatorCrash(Part):
    """The coordinator kills itself (SIGKILL) once and restarts from its last checkpoint."""

    kind: Literal["coordinator_crash"] = "coordinator_crash"
    after_round: Count | None = Field(None, description="number of merges after which it crashes")
    after_event: Count | None = Field(None, description="number of events after which it crashes")

    @model_validator(mode="after")
    def _one(self) -> CoordinatorCrash:
        if (self.after_round is None) == (self.after_event is None):
            raise ValueError("coordinator_crash needs after_round or after_event")
        return self


class DiskFull(Part):
    """Writing a checkpoint fails because the disk is full (ENOSPC)."""

    kind: Literal["disk_full"] = "disk_full"
    round: Count = Field(description="merge whose checkpoint cannot be written")
    times: Count = Field(1, description="consecutive failures; at the third the run stops, and it can be resumed")


# ------------------------------------------------------------------------------------------------------------- data
class ModalityLost(Fault):
    """Silos lose a modality in ``rounds`` (``5-``: from round 5 on)."""

    kind: Literal["modality_lost"] = "modality_lost"
    modality: Modality = Field(description="the modality that is lost")


class ModalityGained(Fault):
    """Silos that lack a modality have it in ``rounds``."""

    kind: Literal["modality_gained"] = "modality_gained"
    modality: Modality = Field(description="the modality that is gained")


class Drift(Fault):
    """A silo's data changes in ``rounds``: a fraction of its samples is replaced by samples drawn from all silos."""

    kind: Literal["drift"] = "drift"
    amount: Fraction = Field(0.5, gt=0.0, description="fraction of the samples that is replaced")


class LabelNoise(Fault):
    """Byzantine: in ``rounds``, captions and labels are permuted within a fraction of the samples."""

    kind: Literal["label_noise"] = "label_noise"
    amount: Fraction = Field(0.5, gt=0.0, description="fraction of the samples")


# -------------------------------------------------------------------------------------------------- Byzantine silos
class SignFlip(TaskFault):
    """Byzantine: the sign of the update is flipped."""

    kind: Literal["sign_flip"] = "sign_flip"
    scale: Positive = Field(1.0, description="factor by which the update is also scaled")


class Scaled(TaskFault):
    """Byzantine: the update is scaled."""

    kind: Literal["scaled"] = "scaled"
    factor: Number = Field(10.0, ge=-1e30, le=1e30, description="scale factor")


class Noise(TaskFault):
    """Byzantine: Gaussian noise is added to the update."""

    kind: Literal["noise"] = "noise"
    factor: Positive = Field(10.0, description="standard deviation, in multiples of the update's root mean square")


class NotANumber(TaskFault):
    """Byzantine: the update is NaN; the coordinator refuses it, and the task fails."""

    kind: Literal["nan"] = "nan"


class PrototypePoisoning(TaskFault):
    """Byzantine: the signs of prototypes and centroids are flipped."""

    kind: Literal["prototype_poisoning"] = "prototype_poisoning"
    scale: Positive = Field(1.0, description="factor by which they are also scaled")


Timed = Late | Drop | Leave | Split | Crash | Freeze | Duplicate | Reorder | Corrupt
#: Faults on single messages, which are recognised by their clear headers.
ON_MESSAGES = Drop | Split | Duplicate | Reorder | Corrupt
Poison = SignFlip | Scaled | Noise | NotANumber | PrototypePoisoning
Persistent = ModalityLost | ModalityGained | Drift | LabelNoise
OfCoordinator = CoordinatorCrash | DiskFull
AnyFault = Annotated[Timed | Poison | Persistent | OfCoordinator, Field(discriminator="kind")]

#: Fault classes by ``kind``.
FAULTS: dict[str, type[Part]] = {
    fault.model_fields["kind"].default: fault
    for union in (Timed, Poison, Persistent, OfCoordinator)
    for fault in get_args(union)
}


def wire_over(uri: str, wire: Wire, faults: Iterable[AnyFault]) -> Wire:
    """What messages hide on a connection: over TCP, where others can listen, always the names.

    Other connections hide what the scenario says; faults on messages recognise them by their names.
    """
    listened = uri.removeprefix("shared+").startswith("tcp:")
    if not listened or any(isinstance(fault, ON_MESSAGES) for fault in faults):
        return wire
    return wire.model_copy(update={"hide_names": True})


def named_silos(faults: Iterable[AnyFault]) -> frozenset[str]:
    """The silo names that faults list."""
    aims = [fault.silos for fault in faults if isinstance(fault, Fault)]
    return frozenset(name for aim in aims if not isinstance(aim, str) for name in aim)


def check_own_data(faults: Sequence[AnyFault], minimum: int | None) -> None:
    """Refuse faults that sites with their own data cannot have; the minimum is ``participation.minimum``.

    Raises:
        ConflictError: what was found and why.
    """
    groups = {"paired", "image_only", "text_only"} & {getattr(fault, "silos", None) for fault in faults}
    if minimum is not None and groups:
        raise ConflictError(
            "faults",
            f"silos {min(groups)} with partition.kind own and participation.minimum; which silos "
            "belong to it is not known until all have stated their data, so list silos by name",
        )
    if others := sorted({fault.kind for fault in faults} & {"drift", "modality_gained"}):
        raise ConflictError("faults", f"of kind {others[0]} need data of other silos; not with partition.kind own")
