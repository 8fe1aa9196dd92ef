"""Scripted faults: when each one occurs, and what it does to a task's outcome, a silo's payloads and a silo's data.

The schedule is drawn from the scenario's seed, so that all processes derive the same one. Effects are pure functions.
:mod:`fedmq.config.faults` has the schema. Virtual runs depend only on these functions, not on real durations;
``coordinator/faults.py``, ``silos/tasks.py`` and, for processes, ``fedmq/launch/processes.py`` carry the faults out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, assert_never, get_args

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.config.faults import (
    AnyFault,
    CoordinatorCrash,
    Corrupt,
    Crash,
    DiskFull,
    Drift,
    Drop,
    Duplicate,
    Fault,
    Freeze,
    LabelNoise,
    Late,
    Leave,
    ModalityGained,
    ModalityLost,
    Noise,
    NotANumber,
    Persistent,
    Poison,
    PrototypePoisoning,
    Reorder,
    Scaled,
    SignFlip,
    Split,
    StepFault,
    TaskFault,
    Timed,
    Window,
)
from fedmq.data.silo_dataset import SiloDataset
from fedmq.errors import InputError
from fedmq.federation.protocol import SiloFacts
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Memory,
    ModalityPrototypes,
    PartialDelta,
    Payload,
)

I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class FailureReason(StrEnum):
    """Why a task has no usable reply; a refused reply has a Reason of the wire instead."""

    # By a scripted fault.
    DROPPED = "dropped"  # the reply was lost
    UNREACHABLE = "unreachable"  # the network was partitioned
    AWAY = "away"  # the silo had left
    # By the run itself.
    WENT_OFF = "went_off"  # the silo was offline by the availability trace
    NOT_ELIGIBLE = "not_eligible"  # after a fault the silo's data is of no use to the method
    STAYED_AWAY = "stayed_away"  # the silo was disconnected for too long
    ERROR = "error"  # the silo reported a failure
    POLICY = "policy"  # the silo's own policy forbids the reply
    EXPELLED = "expelled"  # the silo's key was removed
    WEIGHTS = "weights"  # the weights of the silos left in a secure sum would single one out
    OVERDUE = "overdue"  # the silo was connected but did not reply within the task's limit of real time


@dataclass(frozen=True)
class TaskOutcome:
    """How a task ends, decided when it is sent."""

    issued_at: float  # the run's time when the task was sent [s]
    work: float  # the task's duration without faults [s]
    due: float  # the run's time when its reply arrives or its failure is detected [s]
    fails: FailureReason | None = None  # why it has no reply; None if it has one
    sent: bool = True  # whether the task reaches the silo

    def delayed(self, seconds: float) -> TaskOutcome:
        """The same outcome, ``seconds`` later."""
        return replace(self, due=self.due + seconds)


def outcome_after(fault: Timed, outcome: TaskOutcome, phase: float) -> TaskOutcome | None:
    """A task's outcome under a fault, of which the silo is at ``phase`` in [0, 1) of its period; None if unaffected."""
    match fault:
        case Late(seconds=seconds) | Freeze(seconds=seconds) | Reorder(seconds=seconds) | Corrupt(seconds=seconds):
            return outcome.delayed(seconds)
        case Drop(again=None):
            return replace(outcome, fails=FailureReason.DROPPED)
        case Drop(again=again):  # the task is done twice
            return outcome.delayed((again or 0.0) + outcome.work)
        case Crash(restart=restart):  # the task starts over after the restart
            return outcome.delayed(restart + outcome.work)
        case Duplicate():
            return outcome
        case Leave():
            return _outcome_of_absence(fault, outcome, phase)
        case Split():
            window = _overlap(outcome, fault.time or (0.0, 0.0))
            if window is None:
                return None
            if window[0] <= outcome.issued_at:
                return replace(
                    outcome, due=outcome.issued_at + fault.noticed, fails=FailureReason.UNREACHABLE, sent=False
                )
            return replace(outcome, due=max(outcome.due, window[1]))
        case _:
            assert_never(fault)


def _outcome_of_absence(fault: Leave, outcome: TaskOutcome, phase: float) -> TaskOutcome | None:
    """A task sent during an absence fails; one interrupted by an absence starts over when the silo returns."""
    window = _first_absence(fault, outcome, phase)
    if window is None:
        return None
    if window[0] <= outcome.issued_at:
        return replace(outcome, due=outcome.issued_at + fault.noticed, fails=FailureReason.AWAY, sent=False)
    return replace(outcome, due=window[1] + outcome.work)


def _first_absence(fault: Leave, outcome: TaskOutcome, phase: float) -> Window | None:
    """The first absence that overlaps the task."""
    if fault.time is not None:
        return _overlap(outcome, fault.time)
    if fault.every is None or fault.away is None:
        return outcome.issued_at, math.inf
    first = math.floor(outcome.issued_at / fault.every - phase) + phase
    begins = (first * fault.every, (first + 1) * fault.every)  # the first may have begun before the run
    return next((w for w in (_overlap(outcome, (b, b + fault.away)) for b in begins) if w), None)


def _overlap(outcome: TaskOutcome, window: Window) -> Window | None:
    return window if window[0] < outcome.due and outcome.issued_at < window[1] else None


def attacked(fault: Poison, payload: Payload, generator: np.random.Generator) -> Payload:
    """A payload as sent by a Byzantine silo; only the attack ``noise`` draws from the generator."""
    match fault:
        case SignFlip(scale=scale):
            return _with_buffer(payload, lambda delta: -delta * delta.dtype.type(scale))
        case Scaled(factor=factor):
            return _with_buffer(payload, lambda delta: delta * delta.dtype.type(factor))
        case NotANumber():
            return _with_buffer(payload, lambda delta: delta * delta.dtype.type(math.nan))
        case Noise(factor=factor):
            return _with_buffer(payload, lambda delta: _noisy(delta, factor, generator))
        case PrototypePoisoning(scale=scale):
            return _with_reversed_prototypes(payload, scale)
        case _:
            assert_never(fault)


def _noisy(delta: Array, factor: float, generator: np.random.Generator) -> Array:
    """Δ + N(0, (factor rms(Δ))²)."""
    square = float((delta.astype("float64") ** 2).sum()) / max(1, delta.size)
    deviation = delta.dtype.type(factor * math.sqrt(square))
    drawn: Array = generator.standard_normal(delta.size, dtype=delta.dtype.type)
    noisy: Array = delta + deviation * drawn
    return noisy


def _with_reversed_prototypes(payload: Payload, scale: float) -> Payload:
    def reverse(array: Array) -> Array:
        reversed_: Array = -array * array.dtype.type(scale)
        return reversed_

    match payload:
        case ModalityPrototypes(image=image, text=text):
            return replace(payload, image=reverse(image), text=reverse(text))
        case ClassPrototypes(prototypes=prototypes):
            return replace(payload, prototypes=reverse(prototypes))
        case Memory(centroids=centroids):
            return replace(payload, centroids=reverse(centroids))
        case _:
            return payload


def _with_buffer(payload: Payload, change: Callable[[Array], Array]) -> Payload:
    """An update with ``change`` applied to its buffer; other payloads unchanged."""
    if isinstance(payload, Delta | DiscriminatorDelta | PartialDelta) and payload.buffer.dtype == "float32":
        return replace(payload, buffer=change(payload.buffer))
    return payload


def drifted_rows(fault: Drift, rows: I64, pool: I64, generator: np.random.Generator) -> I64:
    """Rows int64 [n] of the data set that a silo holds after a drift, some of them from the ``pool`` [N]."""
    drifted = rows.copy()
    places = generator.permutation(len(rows))[: max(1, round(fault.amount * len(rows)))]
    drifted[places] = generator.choice(pool, len(places))
    return drifted


def with_noisy_labels(fault: LabelNoise, dataset: SiloDataset, generator: np.random.Generator) -> SiloDataset:
    """A silo's dataset with captions and labels permuted among a fraction of its samples."""
    n_samples = len(dataset)
    chosen = generator.permutation(n_samples)[: round(fault.amount * n_samples)]
    order = generator.permutation(n_samples)
    order.sort()
    order[chosen[:-1]], order[chosen[-1:]] = chosen[1:], chosen[:1]
    text = None if dataset.text is None or dataset.image is None else dataset.text.of(order)
    return replace(
        dataset,
        text=dataset.text if text is None else text,
        captions=dataset.captions if text is None else dataset.captions[order],
        labels=None if dataset.labels is None else dataset.labels[order],
    )


_TIMED, _POISON, _PERSISTENT = get_args(Timed), get_args(Poison), get_args(Persistent)


class ScheduledFault(NamedTuple):
    """A fault that hits a task."""

    place: int  # index of the fault in the scenario's list, from 0
    fault: AnyFault


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of a run, by silo, task and round."""

    faults: tuple[AnyFault, ...]
    seed: int
    silos: tuple[SiloFacts, ...]  # facts about all silos at the start of the run, in the fixed order

    @cached_property
    def _targets(self) -> tuple[frozenset[str], ...]:
        return tuple(
            self._targets_of(place, fault) if isinstance(fault, Fault) else frozenset()
            for place, fault in enumerate(self.faults)
        )

    def _targets_of(self, place: int, fault: Fault) -> frozenset[str]:
        group = [silo.name for silo in self.silos if _in_group(silo, fault)]
        group.sort(key=lambda silo: seeds.derive(self.seed, "fault-share", place, silo))
        return frozenset(group[: max(1, round(fault.share * len(group)))])

    def strikes(self, silo: str, sequence: int, round_: int, issued_at: float) -> Iterator[ScheduledFault]:
        """The faults that apply to a task, issued at ``issued_at`` [s], by silo, round, time and probability."""
        for place, fault in enumerate(self.faults):
            if not isinstance(fault, Fault) or silo not in self._targets[place] or not fault.in_rounds(round_):
                continue
            if isinstance(fault, TaskFault) and not (
                fault.in_time(issued_at) and self._draw(place, silo, sequence) < fault.probability
            ):
                continue
            yield ScheduledFault(place, fault)

    def _draw(self, place: int, silo: str, what: int | str) -> float:
        """A uniform draw in [0, 1)."""
        return seeds.derive(self.seed, "fault", place, silo, what) / 2**63

    def outcome(
        self, silo: str, sequence: int, round_: int, issued_at: float, work: float
    ) -> tuple[TaskOutcome, list[ScheduledFault]]:
        """The outcome of a task that takes ``work`` [s], and the faults that affect it, in the scenario's order."""
        outcome, struck = TaskOutcome(issued_at, work, issued_at + work), list[ScheduledFault]()
        for strike in self.strikes(silo, sequence, round_, issued_at):
            if isinstance(strike.fault, StepFault) and strike.fault.step != "train":
                continue
            if isinstance(strike.fault, _TIMED):
                changed = outcome_after(strike.fault, outcome, self._draw(strike.place, silo, "phase"))
                if changed is None:
                    continue
                outcome = changed
            struck.append(strike)
            if outcome.fails is not None:
                break
        return outcome, struck

    def of_step(self, silo: str, sequence: int, round_: int, at: float, step: str) -> list[ScheduledFault]:
        """The faults of a step of a secure sum, whose task was sent at a time [s]."""
        strikes = self.strikes(silo, sequence, round_, at)
        return [strike for strike in strikes if isinstance(strike.fault, StepFault) and strike.fault.step == step]

    def facts(self, silo: SiloFacts, round_: int) -> SiloFacts:
        """The silo's facts in a round, with the modalities that it has lost or gained by then."""
        for place, fault in enumerate(self.faults):
            if isinstance(fault, ModalityLost | ModalityGained) and (
                silo.name in self._targets[place] and fault.in_rounds(round_)
            ):
                has = isinstance(fault, ModalityGained)
                silo = replace(silo, image=has) if fault.modality == "image" else replace(silo, text=has)
        return silo

    def phases(self, silo: SiloFacts, rounds: int) -> frozenset[SiloFacts]:
        """All facts that the silo has at some time during a run of ``rounds`` rounds.

        A silo that has not stated its own data yet has no modality, and faults change nothing about it.

        Raises:
            InputError: the silo would lose its last modality.
        """
        if not (silo.image or silo.text):
            return frozenset({silo})
        changing = (fault for fault in self.faults if isinstance(fault, ModalityLost | ModalityGained))
        turns = {0, *(turn for fault in changing for turn in fault.turns)}
        states = frozenset(self.facts(silo, round_) for round_ in turns if round_ < rounds)
        if any(not (state.image or state.text) for state in states):
            raise InputError("faults: modality_lost", f"{silo.name} without any modality", "silos that keep one")
        return states

    def attacks(
        self, silo: str, sequence: int, round_: int, issued_at: float
    ) -> list[tuple[Poison, np.random.Generator]]:
        """The attacks of a Byzantine silo on the payloads of a task, each with its own generator."""
        return [
            (strike.fault, seeds.numpy_generator(self.seed, "poison", strike.place, silo, sequence))
            for strike in self.strikes(silo, sequence, round_, issued_at)
            if isinstance(strike.fault, _POISON)
        ]

    def persistent(self, silo: str, round_: int) -> tuple[ScheduledFault, ...]:
        """The faults of a silo's data that are active in a round."""
        return tuple(s for s in self.strikes(silo, 0, round_, 0.0) if isinstance(s.fault, _PERSISTENT))

    def generator(self, place: int, silo: str) -> np.random.Generator:
        """The generator of a fault of a silo's data, the same for all tasks."""
        return seeds.numpy_generator(self.seed, "fault-data", place, silo)

    def crashes(self) -> list[tuple[int, CoordinatorCrash]]:
        """The coordinator's crashes, with their indices in the scenario's list."""
        return [(place, fault) for place, fault in enumerate(self.faults) if isinstance(fault, CoordinatorCrash)]

    def full_disks(self, version: int) -> list[tuple[int, DiskFull]]:
        """The disk-full faults of a version's checkpoint, with their indices in the scenario's list."""
        full = [(place, fault) for place, fault in enumerate(self.faults) if isinstance(fault, DiskFull)]
        return [(place, fault) for place, fault in full if fault.round == version]


def _in_group(silo: SiloFacts, fault: Fault) -> bool:
    match fault.silos:
        case "all":
            return True
        case "paired":
            return silo.paired
        case "image_only":
            return silo.image and not silo.text
        case "text_only":
            return silo.text and not silo.image
        case names:
            return silo.name in names
