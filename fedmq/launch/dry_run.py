"""``fedmq scenario --check``: what a scenario would run, and estimates of its time, memory and traffic.

One training step of one silo of each kind is measured; its result is discarded. Nothing is sent or written.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import protocols
from coordinator.in_process_peers import InProcessPeers
from fedmq.config.resolve import ResolvedRun
from fedmq.data.extract import ExtractionPlan
from fedmq.data.prepare import prepare
from fedmq.errors import FedmqError, InputError
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import SiloFacts, Task
from fedmq.progress import Progress
from fedmq.wire.payloads import Payload, tensor_bytes
from silos.preflight import first_items
from silos.program import Silo, SiloArguments

#: Memory of a silo's process, and of coordinator, evaluator and the parent together [MB], measured on features.
_SILO_MB, _OTHER_MB = 60, 900


class _NotExtractedError(Exception):
    """The features are not in the cache."""


@dataclass(frozen=True)
class Step:
    """One measured training step of a silo.

    Args:
        seconds: of a whole task, estimated from the step [s].
        down: size of a task [bytes].
        up: size of a reply [bytes].
    """

    seconds: float
    down: int
    up: int


def explain(run: ResolvedRun, progress: Progress | None) -> Iterator[str]:
    """Lines that say what would run and what it would take.

    Args:
        run: the run.
        progress: called during long steps.

    Raises:
        InputError: the scenario cannot run on its data.
    """
    scenario = run.scenario
    yield from _what(run)

    def refuse(_: ExtractionPlan) -> None:
        raise _NotExtractedError

    try:
        device = device_of(scenario.device)
        prepare(scenario.dealt, scenario.backbone, None, scenario.seed, progress, device, refuse)
    except _NotExtractedError:
        yield "features: not extracted yet, so the silos' items, time and traffic are not known; the run, or"
        yield "  fedmq data features FILE, extracts them"
        return
    population = build_population(scenario, progress, pooled=run.pooled)
    yield from _who(population)
    yield from _estimates(run, population)


def _what(run: ResolvedRun) -> Iterator[str]:
    scenario = run.scenario
    yield f"{scenario.name}: {scenario.protocol.label}, seed {scenario.seed}, {scenario.rounds} rounds"
    options = ", ".join(f"{key}={value}" for key, value in scenario.protocol.options.items())
    yield f"options: {options or 'none'}"
    rate = scenario.participation.rate
    yield f"aggregation: {scenario.aggregation.mode}, {rate:.0%} of the eligible silos selected"
    faults = ", ".join(fault.kind for fault in scenario.faults)
    yield f"faults: {faults or 'none'}"
    yield f"data: {scenario.dealt.name}, backbone {scenario.backbone.name}, objective {scenario.objective.base}"


def _who(population: Population) -> Iterator[str]:
    for name, silos in _kinds(population).items():
        counts = [len(population.train[silo.index]) for silo in silos]
        size = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        yield f"silos with {name}: {len(silos)}, {size} training items each, {sum(counts)} together"
    yield f"evaluated items: {len(population.evaluated)}"


def _kinds(population: Population) -> dict[str, list[SiloFacts]]:
    found: dict[str, list[SiloFacts]] = {}
    for silo in population.silos:
        kind = "images and captions" if silo.paired else "images only" if silo.image else "captions only"
        found.setdefault(kind, []).append(silo)
    return found


def _estimates(run: ResolvedRun, population: Population) -> Iterator[str]:
    """Time, memory and traffic from one measured step of the largest silo of each kind."""
    scenario = run.scenario
    rounds, rate = scenario.rounds, scenario.participation.rate
    tasks, down, up = 0.0, 0.0, 0.0
    for name, silos in _kinds(population).items():
        samples = [len(population.train[silo.index]) for silo in silos]
        largest = silos[samples.index(max(samples))]
        try:
            step = _measured(run, population, largest.name)
        except FedmqError as error:
            yield f"silos with {name} could not be measured: {error}"
            continue
        if step is None:
            yield f"silos with {name}: the method never selects them"
            continue
        share = rate * len(silos) * rounds
        mean = sum(samples) / len(silos) / max(1, *samples)
        tasks += share * step.seconds * mean
        down, up = down + share * step.down, up + share * step.up
        traffic = f"{step.down / 1e6:.1f} MB down, {step.up / 1e6:.1f} MB up"
        yield f"a task of {largest.name}: {step.seconds:.1f} s, {traffic}"
    at_once = 1 if scenario.launcher == "inline" else min(scenario.slots, scenario.silos.count)
    training = _duration(tasks / at_once)
    yield f"estimated training time: {training} with {at_once} silos at once; start and evaluation add to it"
    yield f"estimated traffic of tasks: at most {down / 1e6:,.3f} MB down, {up / 1e6:,.3f} MB up"
    memory = _OTHER_MB + (0 if scenario.launcher == "inline" else _SILO_MB * scenario.silos.count)
    parts = f"{_SILO_MB} MB per silo, {_OTHER_MB} MB for all others, as in runs on features"
    yield f"estimated memory: about {memory:,} MB ({parts})"
    yield "basis: one training step and the size of its payloads, times tasks, silos and rounds"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _measured(run: ResolvedRun, population: Population, name: str) -> Step | None:
    """Measure one step of a silo; None if the method never selects it."""
    scenario = run.scenario
    model = population.build_model(scenario, device_of(scenario.device), ("image", "text"))
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as folder:
        place = Path(folder)
        arguments = SiloArguments(run, name, InProcessPeers.uri, place, place, data=population.prepared.folder)
        silo = Silo(arguments, population, model, noise=scenario.seed)
        training = silo.context.training
        context = replace(silo.context, training=training.model_copy(update={"local_epochs": 1}))
        protocol = protocols.create(scenario.protocol, context)
        if not protocol.eligible(silo.facts):
            return None
        size = min(training.batch_size, len(silo.dataset))
        if size == 0:
            raise InputError(name, "no training items", "at least one")
        initial = protocol.initial(silo.model.flat.detach().cpu().clone())
        payloads = protocol.task(initial, silo.facts)
        task = Task(1, 0, 0, training.rate_at(0, scenario.schedule_rounds), payloads)
        local = replace(silo.local({}), dataset=first_items(silo.dataset, size), unpaired=())
        began = time.monotonic()
        trained = protocol.train(local, task)
        seconds = time.monotonic() - began
    steps = training.local_epochs * math.ceil(len(silo.dataset) / size)
    return Step(seconds * steps, _size(payloads), _size(trained.payloads))


def _size(payloads: tuple[Payload, ...]) -> int:
    return sum(map(tensor_bytes, payloads))
