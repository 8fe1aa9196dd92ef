"""Scripted faults: one class per fault. ``faults:`` in a scenario is a list of them; docs/faults.md shows each.

A fault says where (``silos``, ``share``), when (``rounds``, ``time``, ``probability``) and what. Its *effect on the
run* is a pure function of the task it strikes, so that a virtual run does not depend on real speed; its *mechanism* (a
process killed, a frame damaged) is really executed, by ``coordinator/trouble.py`` and ``silos/program.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from fedmq.parts import Count, Fraction, Name, NonNegative, Part, Positive

if TYPE_CHECKING:
    import numpy as np

    from fedmq.data.share import Share
    from fedmq.payloads import Payload

Group = Literal["all", "image_only", "text_only", "paired"]
Modality = Literal["image", "text"]
Window = tuple[float, float]
_RANGE = re.compile(r"(\d+)-(\d*)")
_NOTICED = Field(4.0, gt=0.0, description="until the coordinator notices, two heartbeats by default [s]")


@dataclass(frozen=True)
class Fate:
    """What becomes of a task, decided when it is handed out.

    Args:
        handed: the run's time when it was handed out [s].
        work: seconds a silo left in peace needs for it.
        due: when its outcome is here [s].
        fails: why it brings no reply; None if it does.
        sent: whether the silo ever hears of it.
    """

    handed: float
    work: float
    due: float
    fails: str | None = None
    sent: bool = True

    def later(self, seconds: float) -> Fate:
        """The same, so much later [s]."""
        return replace(self, due=self.due + seconds)


class Fault(Part):
    """Where and when; every condition must hold."""

    silos: Group | tuple[Name, ...] = Field("all", description="a group by modality, or silos by name")
    share: Fraction = Field(1.0, gt=0.0, description="share of those silos, drawn from the seed, at least one")
    rounds: tuple[Annotated[int, Field(ge=0)], ...] | str | None = Field(
        None, description="rounds (version a task stands on): a list, or a range like 3-7 or 3-; null means all"
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
        """Rounds at which the fault may go on or off."""
        if self.rounds is None:
            return frozenset({0})
        if isinstance(self.rounds, str):
            first, _, last = self.rounds.partition("-")
            return frozenset({int(first), *([int(last) + 1] if last else [])})
        return frozenset(turn for round_ in self.rounds for turn in (round_, round_ + 1))

    def in_rounds(self, round_: int) -> bool:
        """Whether the fault is on in a round."""
        if self.rounds is None:
            return True
        if isinstance(self.rounds, str):
            first, _, last = self.rounds.partition("-")
            return int(first) <= round_ and (not last or round_ <= int(last))
        return round_ in self.rounds


class TaskFault(Fault):
    """Strikes single tasks."""

    time: tuple[NonNegative, Annotated[float, Field(gt=0.0)]] | None = Field(
        None, description="from and to on the run's clock [s]: when the task was handed out"
    )
    probability: Fraction = Field(1.0, gt=0.0, description="per task")

    @model_validator(mode="after")
    def _forward(self) -> TaskFault:
        if self.time is not None and self.time[1] <= self.time[0]:
            raise ValueError("time is [from, to] with to above from")
        return self

    def in_time(self, at: float) -> bool:
        """Whether the fault is on at a time [s]."""
        return self.time is None or self.time[0] <= at < self.time[1]


# ------------------------------------------------------------------------------------------------ links and processes
class Late(TaskFault):
    """A reply comes later."""

    kind: Literal["late"] = "late"
    seconds: Positive = Field(description="delay [s]")

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The delay."""
        return fate.later(self.seconds)


class Drop(TaskFault):
    """A reply is lost on the way."""

    kind: Literal["drop"] = "drop"
    again: Positive | None = Field(
        None, description="seconds after which the task is handed out again; null gives it up"
    )

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The task is done twice, or fails when its reply was due."""
        return replace(fate, fails="dropped") if self.again is None else fate.later(self.again + fate.work)


class Leave(TaskFault):
    """A silo leaves and rejoins with its personal state: in ``time``, in ``rounds``, or again and again (``every``)."""

    kind: Literal["leave"] = "leave"
    every: Positive | None = Field(
        None, description="seconds from one absence to the next; each silo has its own phase"
    )
    away: Positive | None = Field(None, description="length of an absence [s]; needs every")
    noticed: float = _NOTICED

    @model_validator(mode="after")
    def _some_window(self) -> Leave:
        if (self.every is None) != (self.away is None) or (self.every or math.inf) <= (self.away or 0.0):
            raise ValueError("every and away go together, and away is below every")
        if (self.time is None) + (self.every is None) + (self.rounds is None) != 2:
            raise ValueError("leave needs one of time, rounds, or every with away")
        return self

    def in_time(self, _at: float) -> bool:
        """Always: :meth:`befall` looks at the whole task."""
        return True

    def befall(self, fate: Fate, phase: float) -> Fate | None:
        """A task handed out while the silo is away fails; one it left behind is done again when it is back."""
        window = self._window(fate, phase)
        if window is None:
            return None
        if window[0] <= fate.handed:
            return replace(fate, due=fate.handed + self.noticed, fails="away", sent=False)
        return replace(fate, due=window[1] + fate.work)

    def _window(self, fate: Fate, phase: float) -> Window | None:
        """The first absence that touches the task."""
        if self.time is not None:
            return _touched(fate, self.time)
        if self.every is None or self.away is None:
            return fate.handed, math.inf
        first = math.floor(fate.handed / self.every - phase) + phase
        begins = (first * self.every, (first + 1) * self.every)  # the first may have begun before the run
        return next((w for w in (_touched(fate, (b, b + self.away)) for b in begins) if w), None)


class Split(TaskFault):
    """The network is split: these silos cannot be reached for a while, nor can they reach the coordinator."""

    kind: Literal["split"] = "split"
    noticed: float = _NOTICED

    @model_validator(mode="after")
    def _needs_time(self) -> Split:
        if self.time is None:
            raise ValueError("split needs time: [from, to]")
        return self

    def in_time(self, _at: float) -> bool:
        """Always: :meth:`befall` looks at the whole task."""
        return True

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """A task handed out meanwhile fails; a reply on its way arrives when the split is mended."""
        window = _touched(fate, self.time or (0.0, 0.0))
        if window is None:
            return None
        if window[0] <= fate.handed:
            return replace(fate, due=fate.handed + self.noticed, fails="unreachable", sent=False)
        return replace(fate, due=max(fate.due, window[1]))


def _touched(fate: Fate, window: Window) -> Window | None:
    return window if window[0] < fate.due and fate.handed < window[1] else None


class Crash(TaskFault):
    """The silo's process is killed (SIGKILL) at its task and started again."""

    kind: Literal["crash"] = "crash"
    restart: Positive = Field(10.0, description="until it is up again [s]; the task is then done from the start")

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The restart, and the work once more."""
        return fate.later(self.restart + fate.work)


class Freeze(TaskFault):
    """The silo's process stands still (SIGSTOP) and goes on (SIGCONT)."""

    kind: Literal["freeze"] = "freeze"
    seconds: Positive = Field(description="on the run's clock [s]")
    beats: Positive = Field(3.0, description="real heartbeats it stands still for")

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The delay."""
        return fate.later(self.seconds)


class Duplicate(TaskFault):
    """A reply's frames arrive twice; the second copy is refused."""

    kind: Literal["duplicate"] = "duplicate"

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """Nothing changes."""
        return fate


class Reorder(TaskFault):
    """A reply's frames arrive after the message behind them; both are refused, and the task is handed out again."""

    kind: Literal["reorder"] = "reorder"
    seconds: NonNegative = Field(4.0, description="until the reply is here after all [s]")

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The delay."""
        return fate.later(self.seconds)


class Corrupt(TaskFault):
    """One bit of a reply's frames is flipped; it is refused, and the task is handed out again."""

    kind: Literal["corrupt"] = "corrupt"
    seconds: NonNegative = Field(4.0, description="until the reply is here after all [s]")

    def befall(self, fate: Fate, _phase: float) -> Fate | None:
        """The delay."""
        return fate.later(self.seconds)


# -------------------------------------------------------------------------------------------------- the coordinator
class CoordinatorCrash(Part):
    """The coordinator kills itself (SIGKILL) once and is started again from its last checkpoint."""

    kind: Literal["coordinator_crash"] = "coordinator_crash"
    after_round: Count | None = Field(None, description="when so many merges are done")
    after_event: Count | None = Field(None, description="after so many events of the run")

    @model_validator(mode="after")
    def _one(self) -> CoordinatorCrash:
        if (self.after_round is None) == (self.after_event is None):
            raise ValueError("coordinator_crash needs after_round or after_event")
        return self


class DiskFull(Part):
    """The disk refuses a checkpoint (ENOSPC)."""

    kind: Literal["disk_full"] = "disk_full"
    round: Count = Field(description="the merge whose checkpoint is refused")
    times: Count = Field(1, description="how often in a row; from the third on the run stops and can be resumed")


# ------------------------------------------------------------------------------------------------------------- data
class ModalityLost(Fault):
    """Silos lose a modality in ``rounds`` (``5-``: from round 5 on)."""

    kind: Literal["modality_lost"] = "modality_lost"
    modality: Modality = Field(description="that they lose")


class ModalityGained(Fault):
    """Silos get the modality they lack in ``rounds``."""

    kind: Literal["modality_gained"] = "modality_gained"
    modality: Modality = Field(description="that they get")


class Drift(Fault):
    """A silo's data changes in ``rounds``: a share of its samples gives way to samples drawn from everybody's."""

    kind: Literal["drift"] = "drift"
    amount: Fraction = Field(0.5, gt=0.0, description="share of the samples that change")

    def rows(self, own: np.ndarray, everybody: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Rows int64 [n] of the data set that the silo holds from now on.

        Args:
            own: [n] rows it held.
            everybody: [N] rows of all silos.
            generator: of this silo and fault.
        """
        changed = own.copy()
        places = generator.permutation(len(own))[: max(1, round(self.amount * len(own)))]
        changed[places] = generator.choice(everybody, len(places))
        return changed


class LabelNoise(Fault):
    """Byzantine: in ``rounds`` captions and labels of a share of the samples are exchanged among each other."""

    kind: Literal["label_noise"] = "label_noise"
    amount: Fraction = Field(0.5, gt=0.0, description="share of the samples")

    def spoil(self, share: Share, generator: np.random.Generator) -> Share:
        """The share with wrong captions for right images; a silo with one modality and no labels has nothing to mix."""
        size = len(share)
        chosen = generator.permutation(size)[: round(self.amount * size)]
        order = generator.permutation(size)
        order.sort()
        order[chosen[:-1]], order[chosen[-1:]] = chosen[1:], chosen[:1]
        text = None if share.text is None or share.image is None else share.text[order]
        return replace(
            share,
            text=share.text if text is None else text,
            captions=share.captions if text is None else share.captions[order],
            labels=None if share.labels is None else share.labels[order],
        )


# -------------------------------------------------------------------------------------------------- Byzantine silos
class SignFlip(TaskFault):
    """Byzantine: the update points the other way."""

    kind: Literal["sign_flip"] = "sign_flip"
    scale: Positive = Field(1.0, description="and is so many times as long")

    def poison(self, payload: Payload, _generator: np.random.Generator) -> Payload:
        """-scale Δ."""
        return _changed(payload, lambda delta: -delta * delta.dtype.type(self.scale))


class Scaled(TaskFault):
    """Byzantine: the update is far too long."""

    kind: Literal["scaled"] = "scaled"
    factor: float = Field(10.0, allow_inf_nan=False, description="times as long")

    def poison(self, payload: Payload, _generator: np.random.Generator) -> Payload:
        """The factor times Δ."""
        return _changed(payload, lambda delta: delta * delta.dtype.type(self.factor))


class Noise(TaskFault):
    """Byzantine: Gaussian noise on the update."""

    kind: Literal["noise"] = "noise"
    factor: Positive = Field(10.0, description="standard deviation in root mean squares of the update")

    def poison(self, payload: Payload, generator: np.random.Generator) -> Payload:
        """Δ + N(0, (factor rms(Δ))²), drawn from the task's own seed."""

        def noisy(delta: np.ndarray) -> np.ndarray:
            square = float((delta.astype("float64") ** 2).sum()) / max(1, delta.size)
            deviation = delta.dtype.type(self.factor * math.sqrt(square))
            drawn: np.ndarray = generator.standard_normal(delta.size, dtype=delta.dtype.type)
            changed: np.ndarray = delta + deviation * drawn
            return changed

        return _changed(payload, noisy)


class NotANumber(TaskFault):
    """Byzantine: the update is NaN; the coordinator refuses it, and the task fails."""

    kind: Literal["nan"] = "nan"

    def poison(self, payload: Payload, _generator: np.random.Generator) -> Payload:
        """NaN throughout."""
        return _changed(payload, lambda delta: delta * delta.dtype.type(math.nan))


class PrototypePoisoning(TaskFault):
    """Byzantine: prototypes and centroids point the other way."""

    kind: Literal["prototype_poisoning"] = "prototype_poisoning"
    scale: Positive = Field(1.0, description="and are so many times as long")

    def poison(self, payload: Payload, _generator: np.random.Generator) -> Payload:
        """-scale p."""
        from fedmq.payloads import ClassPrototypes, Memory, ModalityPrototypes  # noqa: PLC0415 - see _changed

        match payload:
            case ModalityPrototypes(image=image, text=text):
                return replace(payload, image=self._turned(image), text=self._turned(text))
            case ClassPrototypes(prototypes=prototypes):
                return replace(payload, prototypes=self._turned(prototypes))
            case Memory(centroids=centroids):
                return replace(payload, centroids=self._turned(centroids))
            case _:
                return payload

    def _turned(self, array: np.ndarray) -> np.ndarray:
        turned: np.ndarray = -array * array.dtype.type(self.scale)
        return turned


def _changed(payload: Payload, change: Callable[[Any], Any]) -> Payload:
    """An update with its buffer changed; any other payload as it is."""
    # Imported here because payloads bring numpy, which reading a scenario does without.
    from fedmq.payloads import Delta, DiscriminatorDelta, PartialDelta  # noqa: PLC0415

    if isinstance(payload, Delta | DiscriminatorDelta | PartialDelta) and payload.buffer.dtype == "float32":
        return replace(payload, buffer=change(payload.buffer))
    return payload


Timed = Late | Drop | Leave | Split | Crash | Freeze | Duplicate | Reorder | Corrupt
Poison = SignFlip | Scaled | Noise | NotANumber | PrototypePoisoning
Standing = ModalityLost | ModalityGained | Drift | LabelNoise
OfCoordinator = CoordinatorCrash | DiskFull
AnyFault = Annotated[Timed | Poison | Standing | OfCoordinator, Field(discriminator="kind")]

#: Every fault by the ``kind`` that names it in a scenario.
FAULTS: dict[str, type[Part]] = {
    each.model_fields["kind"].default: each
    for union in (Timed, Poison, Standing, OfCoordinator)
    for each in get_args(union)
}


def named_silos(faults: Iterable[AnyFault]) -> frozenset[str]:
    """The silos that faults name, to be compared with those there are."""
    aims = [fault.silos for fault in faults if isinstance(fault, Fault)]
    return frozenset(name for aim in aims if not isinstance(aim, str) for name in aim)
