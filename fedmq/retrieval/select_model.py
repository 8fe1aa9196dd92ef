"""Select the model of a finished run for retrieval: the shared model, or with ``--silo`` a personal model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.federation.fault_schedule import FaultSchedule
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Traits
from fedmq.progress import Progress
from fedmq.retrieval.released_model import PersonalModel, Release, open_release
from fedmq.runs.results import read_summary
from fedmq.wire.messages import Message


@dataclass(frozen=True)
class Programs:
    """Functions of the programs that rebuild personal models; passed in because the core does not import them.

    Args:
        traits_of: traits of a scenario's method.
        asked: the coordinator's last evaluation request to a silo.
        own: a silo's personal model, built from that request.
    """

    traits_of: Callable[[Scenario], Traits]
    asked: Callable[[Release, Population, str], Message]
    own: Callable[[Release, Population, Message], PersonalModel]


def opened(
    root: Path, device: str | None, silo: str | None, programs: Programs, progress: Progress | None = None
) -> Release:
    """Open a finished run for retrieval.

    Args:
        root: the run folder.
        device: None takes the scenario's.
        silo: the silo whose personal model to use; None uses the shared model.
        programs: rebuild personal models.
        progress: called while data are prepared.

    Raises:
        InputError: the run is not finished, has no trained shared model, or no such silo, or the silo has no trained
            personal model.
    """
    release = open_release(root, device)
    scenario = release.scenario
    names, personal_only = scenario.silo_names, programs.traits_of(scenario).personal_only
    if scenario.data is None and (personal_only or silo is not None):
        _refuse_personal(release, silo, personal_only=personal_only)
    if silo is None:
        if personal_only:
            method = scenario.protocol.label
            allowed = f"--silo NAME ({names[0]} to {names[-1]}): silos of {method} have personal models"
            raise InputError(str(root), f"a shared model that {method} trains in part or not at all", allowed)
        return release
    if silo not in names:
        raise InputError("--silo", silo, ", ".join(names))
    population = build_population(scenario, progress, release.cache)
    message = programs.asked(release, population, silo)
    if personal_only:
        _check_trained(release, population, silo)
    return replace(release, own=programs.own(release, population, message))


def _refuse_personal(release: Release, silo: str | None, *, personal_only: bool) -> None:
    """Refuse to rebuild a personal model of a run whose data only the sites have."""
    why = "personal models are rebuilt from the run's data, which with partition.kind own only the sites have"
    if personal_only:
        found = f"{release.scenario.protocol.label}, whose models are personal, on sites' own data"
        raise InputError(str(release.run.root), found, f"a run on one data set: {why}")
    raise InputError("--silo", str(silo), f"no --silo, which uses the shared model: {why}")


def _check_trained(release: Release, population: Population, silo: str) -> None:
    """Refuse a silo whose personal model has untrained layers or an untrained tower."""
    scenario = release.scenario
    schedule = FaultSchedule(scenario.faults, scenario.seed, population.silos)
    both = []
    for each in population.silos:
        phases = schedule.phases(each, scenario.rounds)
        if any(phase.image for phase in phases) and any(phase.text for phase in phases):
            both.append(each.name)
    if silo not in both:
        missing = "captions" if population.facts(silo).image else "images"
        allowed = f"a silo that trained both towers: {', '.join(both) or 'none in this run'}"
        raise InputError("--silo", f"{silo}, which has no {missing}", allowed)
    per_silo = read_summary(release.run).per_silo
    if not per_silo[silo].participations:
        took_part = [name for name in both if per_silo[name].participations]
        allowed = f"a silo that trained: {', '.join(took_part) or 'none in this run'}"
        raise InputError("--silo", f"{silo}, which took part in no round", allowed)
