"""The schedule of a run's faults: drawn from the scenario's seed, so that all processes derive the same one."""

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
    Persistent,
    Poison,
    TaskFault,
    Timed,
)
from fedmq.errors import InputError
from fedmq.federation.fault_effects import TaskOutcome, outcome_after
from fedmq.federation.protocol import SiloFacts

_TIMED, _POISON, _PERSISTENT = get_args(Timed), get_args(Poison), get_args(Persistent)


class FaultHit(NamedTuple):
    """A fault that hits a task.

    Args:
        place: index of the fault in the scenario's list, from 0.
        fault: the fault.
    """

    place: int
    fault: AnyFault


@dataclass(frozen=True)
class FaultSchedule:
    """The faults of a run, by silo, task and round.

    Args:
        faults: the scenario's list.
        seed: the scenario's seed.
        silos: facts about all silos at the start of the run, in the fixed order.
    """

    faults: tuple[AnyFault, ...]
    seed: int
    silos: tuple[SiloFacts, ...]

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

    def strikes(self, silo: str, sequence: int, round_: int, issued_at: float) -> Iterator[FaultHit]:
        """The faults that apply to a task by silo, round, time and probability.

        Args:
            silo: the silo's name.
            sequence: the task's number.
            round_: the task's base version.
            issued_at: the run's time when the task was sent [s].
        """
        for place, fault in enumerate(self.faults):
            if not isinstance(fault, Fault) or silo not in self._targets[place] or not fault.in_rounds(round_):
                continue
            if isinstance(fault, TaskFault) and not (
                fault.in_time(issued_at) and self._draw(place, silo, sequence) < fault.probability
            ):
                continue
            yield FaultHit(place, fault)

    def _draw(self, place: int, silo: str, what: int | str) -> float:
        """A uniform draw in [0, 1)."""
        return seeds.derive(self.seed, "fault", place, silo, what) / 2**63

    def outcome(
        self, silo: str, sequence: int, round_: int, issued_at: float, work: float
    ) -> tuple[TaskOutcome, list[FaultHit]]:
        """The outcome of a task, and the faults that affect it, in the scenario's order.

        Args:
            silo: the silo's name.
            sequence: the task's number.
            round_: the task's base version.
            issued_at: the run's time when the task is sent [s].
            work: the task's duration without faults [s].
        """
        outcome, struck = TaskOutcome(issued_at, work, issued_at + work), list[FaultHit]()
        for strike in self.strikes(silo, sequence, round_, issued_at):
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

    def persistent(self, silo: str, round_: int) -> tuple[FaultHit, ...]:
        """The faults of a silo's data that are active in a round."""
        return tuple(s for s in self.strikes(silo, 0, round_, 0.0) if isinstance(s.fault, _PERSISTENT))

    def generator(self, place: int, silo: str) -> np.random.Generator:
        """The generator of a fault of a silo's data, the same for all tasks."""
        return seeds.numpy_generator(self.seed, "fault-data", place, silo)

    def crashes(self) -> list[tuple[int, CoordinatorCrash]]:
        """The coordinator's crashes, with their indices in the scenario's list."""
        return [(place, fault) for place, fault in enumerate(self.faults) if isinstance(fault, CoordinatorCrash)]

    def refusals(self, version: int) -> list[tuple[int, DiskFull]]:
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
