"""Which model of a finished run is used: the shared one, or a silo's own where ``--silo`` names it."""

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
    """What the programs know of own models, handed in because the core imports none of them.

    Args:
        traits_of: what a scenario's method is as far as its options tell.
        asked: what the coordinator asked a silo at the end.
        own: a silo's own model by that.
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
        silo: whose own model is used; None uses the shared one.
        programs: see there.
        progress: told while data are prepared.

    Raises:
        InputError: no finished run; no shared model to retrieve by, or no such silo, or no own model of it to use.
    """
    release = open_release(root, device)
    scenario = release.scenario
    names, bare = scenario.silo_names, programs.traits_of(scenario).own_only
    if silo is None:
        if bare:
            method = scenario.protocol.label
            allowed = f"--silo NAME ({names[0]} to {names[-1]}): silos of {method} keep models of their own"
            raise InputError(str(root), f"a shared model that {method} trains in part or not at all", allowed)
        return release
    if silo not in names:
        raise InputError("--silo", silo, ", ".join(names))
    population = build_population(scenario, progress, release.cache)
    message = programs.asked(release, population, silo)
    if bare:
        _check_trained(release, population, silo)
    return replace(release, own=programs.own(release, population, message))


def _check_trained(release: Release, population: Population, silo: str) -> None:
    """Refuse a silo whose own model has layers, or a whole tower, that nobody trained."""
    scenario = release.scenario
    script = FaultSchedule(scenario.faults, scenario.seed, population.silos)
    both = []
    for each in population.silos:
        phases = script.phases(each, scenario.rounds)
        if any(phase.image for phase in phases) and any(phase.text for phase in phases):
            both.append(each.name)
    if silo not in both:
        lacked = "captions" if population.facts(silo).image else "images"
        allowed = f"a silo that trained both towers: {', '.join(both) or 'this run has none'}"
        raise InputError("--silo", f"{silo}, which has no {lacked}", allowed)
    per_silo = read_summary(release.run).per_silo
    if not per_silo[silo].participations:
        took_part = [name for name in both if per_silo[name].participations]
        allowed = f"a silo that trained: {', '.join(took_part) or 'this run has none'}"
        raise InputError("--silo", f"{silo}, which took part in no round", allowed)
