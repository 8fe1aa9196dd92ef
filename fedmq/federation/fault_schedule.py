"""Which faults strike what: every draw from the scenario's seed, so that coordinator and silos agree unasked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, get_args

import numpy as np

from fedmq import seeds
from fedmq.config.faults import (
    AnyFault,
    CoordinatorCrash,
    DiskFull,
    Fault,
    ModalityGained,
    ModalityLost,
    Poison,
    Standing,
    TaskFault,
    Timed,
)
from fedmq.errors import InputError
from fedmq.federation.fault_effects import TaskOutcome, outcome_after
from fedmq.federation.protocol import SiloFacts

_TIMED, _POISON, _STANDING = get_args(Timed), get_args(Poison), get_args(Standing)


class Strike(NamedTuple):
    """A fault that strikes a task.

    Args:
        place: number of the fault in the scenario's list, from 0.
        fault: the fault.
    """

    place: int
    fault: AnyFault


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of a run.

    Args:
        faults: as in the scenario.
        seed: the scenario's seed.
        silos: facts of all silos as the run begins, in the fixed order.
    """

    faults: tuple[AnyFault, ...]
    seed: int
    silos: tuple[SiloFacts, ...]

    @cached_property
    def _targets(self) -> tuple[frozenset[str], ...]:
        return tuple(
            self._chosen(place, fault) if isinstance(fault, Fault) else frozenset()
            for place, fault in enumerate(self.faults)
        )

    def _chosen(self, place: int, fault: Fault) -> frozenset[str]:
        group = [silo.name for silo in self.silos if _belongs(silo, fault)]
        group.sort(key=lambda silo: seeds.derive(self.seed, "fault-share", place, silo))
        return frozenset(group[: max(1, round(fault.share * len(group)))])

    def strikes(self, silo: str, sequence: int, round_: int, handed: float) -> Iterator[Strike]:
        """The faults whose where and when fit a task.

        Args:
            silo: its name.
            sequence: the task's number.
            round_: the version it stands on.
            handed: the run's time when it was handed out [s].
        """
        for place, fault in enumerate(self.faults):
            if not isinstance(fault, Fault) or silo not in self._targets[place] or not fault.in_rounds(round_):
                continue
            if isinstance(fault, TaskFault) and not (
                fault.in_time(handed) and self._draw(place, silo, sequence) < fault.probability
            ):
                continue
            yield Strike(place, fault)

    def _draw(self, place: int, silo: str, what: int | str) -> float:
        """A number in [0, 1)."""
        return seeds.derive(self.seed, "fault", place, silo, what) / 2**63

    def outcome(
        self, silo: str, sequence: int, round_: int, handed: float, work: float
    ) -> tuple[TaskOutcome, list[Strike]]:
        """What becomes of a task, and the faults that did it, in the scenario's order.

        Args:
            silo: its name.
            sequence: the task's number.
            round_: the version it stands on.
            handed: the run's time when it is handed out [s].
            work: seconds a silo left in peace needs for it.
        """
        outcome, struck = TaskOutcome(handed, work, handed + work), list[Strike]()
        for strike in self.strikes(silo, sequence, round_, handed):
            if isinstance(strike.fault, _TIMED):
                changed = outcome_after(strike.fault, outcome, self._draw(strike.place, silo, "phase"))
                if changed is None:
                    continue
                outcome = changed
            struck.append(strike)
            if outcome.fails is not None:
                break
        return outcome, struck

    def facts(self, silo: SiloFacts, round_: int) -> SiloFacts:
        """The silo as it is in a round, with modalities it lost or gained by then."""
        for place, fault in enumerate(self.faults):
            if isinstance(fault, ModalityLost | ModalityGained) and (
                silo.name in self._targets[place] and fault.in_rounds(round_)
            ):
                owned = isinstance(fault, ModalityGained)
                silo = replace(silo, image=owned) if fault.modality == "image" else replace(silo, text=owned)
        return silo

    def phases(self, silo: SiloFacts, rounds: int) -> frozenset[SiloFacts]:
        """Every state the silo is in during a run.

        Raises:
            InputError: it would be left without any modality.
        """
        changing = (fault for fault in self.faults if isinstance(fault, ModalityLost | ModalityGained))
        turns = {0, *(turn for fault in changing for turn in fault.turns)}
        states = frozenset(self.facts(silo, round_) for round_ in turns if round_ < rounds)
        if any(not (state.image or state.text) for state in states):
            raise InputError("faults: modality_lost", f"{silo.name} without any modality", "silos that keep one")
        return states

    def poisons(self, silo: str, sequence: int, round_: int, handed: float) -> list[tuple[Poison, np.random.Generator]]:
        """What a Byzantine silo does to the payloads of a task, each with a generator of its own."""
        return [
            (strike.fault, seeds.numpy_generator(self.seed, "poison", strike.place, silo, sequence))
            for strike in self.strikes(silo, sequence, round_, handed)
            if isinstance(strike.fault, _POISON)
        ]

    def standing(self, silo: str, round_: int) -> tuple[Strike, ...]:
        """The faults of a silo's data that are on in a round."""
        return tuple(s for s in self.strikes(silo, 0, round_, 0.0) if isinstance(s.fault, _STANDING))

    def generator(self, place: int, silo: str) -> np.random.Generator:
        """The generator of a fault that stays with a silo's data, the same in every task."""
        return seeds.numpy_generator(self.seed, "fault-data", place, silo)

    def crashes(self) -> list[tuple[int, CoordinatorCrash]]:
        """The coordinator's own crashes, with their places."""
        return [(place, fault) for place, fault in enumerate(self.faults) if isinstance(fault, CoordinatorCrash)]

    def refusals(self, version: int) -> list[tuple[int, DiskFull]]:
        """The disk's refusals of a checkpoint, with their places."""
        found = [(place, fault) for place, fault in enumerate(self.faults) if isinstance(fault, DiskFull)]
        return [(place, fault) for place, fault in found if fault.round == version]


def _belongs(silo: SiloFacts, fault: Fault) -> bool:
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
