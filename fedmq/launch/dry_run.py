"""``fedmq scenario --check``: what a scenario would run, and estimates of its time, memory and traffic.

The first rounds are carried out in this process and discarded, or a single training step if a task is long. Nothing is
sent. ``python -m benchmarks --only estimates`` compares the estimates with runs.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from coordinator.build_run_context import run_context_of
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.data.extract import ExtractionPlan
from fedmq.data.prepare import prepare
from fedmq.errors import FedmqError, InputError
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import SiloFacts
from fedmq.launch.hosting import limits_here, plan_hosting
from fedmq.launch.rehearsal import Answer, Rehearsal, Step, measured_step, rehearse, seconds_of
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress

#: A task that takes longer than this is estimated from one step [s].
_LONG_TASK = 10.0
#: Time that both ends together spend on the messages of a task, and for each byte of their payloads [s]. Measured on
#: two cores, with tasks of 1.6 to 9.4 MB, as processes and in one process.
_MESSAGE_SECONDS, _BYTE_SECONDS = 0.025, 1e-9
#: Time of the handshakes and of the first processes, and to start a process of a silo [s].
_READY_SECONDS, _START_SECONDS = 1.5, 0.06
#: Memory of coordinator, evaluator, forkserver and parent together, and of a silo's process [bytes]; and how many times
#: a silo holds the parameters: model, download, gradient, moments of the optimiser, update and encoded reply.
_OTHER_MEMORY, _SILO_MEMORY, _COPIES = 850 << 20, 25 << 20, 8
#: Memory by which a process grows in its first training step, whatever the model [bytes].
_STEP_MEMORY = 80 << 20
#: How far estimates and runs may differ, as measured by the benchmark.
TOLERANCE = "time within a factor of 1.5 if the load stays the same, memory within 30 %, traffic within 5 %"


class _NotExtractedError(Exception):
    """The features are not in the cache."""


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

    if not _extracted(scenario, progress):
        yield "features: not extracted yet, so the silos' items, time and traffic are not known; the run, or"
        yield "  fedmq data features FILE, extracts them"
        return
    population = build_population(scenario, progress, pooled=run.pooled)
    yield from _who(population)
    yield from _estimates(run, population)


def estimates(run: ResolvedRun, progress: Progress | None) -> dict[str, object]:
    """The estimates as plain data.

    Raises:
        InputError: the scenario cannot run on its data, or its features are not extracted yet.
        FedmqError: a task failed.
    """
    if not _extracted(run.scenario, progress):
        raise InputError("--check --json", "features that are not extracted yet", "first `fedmq data features FILE`")
    return asdict(estimate(run, build_population(run.scenario, progress, pooled=run.pooled)))


def _extracted(scenario: Scenario, progress: Progress | None) -> bool:
    """Whether the features of the data are in the cache, or need no extraction."""

    def refuse(_: ExtractionPlan) -> None:
        raise _NotExtractedError

    try:
        prepare(scenario.dealt, scenario.backbone, None, scenario.seed, progress, device_of(scenario.device), refuse)
    except _NotExtractedError:
        return False
    return True


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


@dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Args:
        startup: time until all silos are ready [s].
        rounds: time of all rounds and evaluations [s].
        down: size of all tasks [bytes].
        up: size of all replies [bytes].
        memory: memory of all processes [bytes].
        processes: number of silo processes.
        tasks: number of tasks.
        seconds: mean time of a task in its silo [s].
        rehearsed: number of tasks that were carried out; 0 if a step was measured only.
    """

    startup: float
    rounds: float
    down: float
    up: float
    memory: float
    processes: int
    tasks: int
    seconds: float
    rehearsed: int


def estimate(run: ResolvedRun, population: Population) -> Estimate:
    """Time, memory and traffic of a run, from its first rounds or from one step of a silo of each kind.

    Raises:
        FedmqError: a task failed, or the run would be refused.
    """
    # As in a silo.
    torch.set_num_threads(1)
    started = time.time() - psutil.Process().create_time()
    scenario, kinds = run.scenario, _kinds(population)
    found = {name: step for name, silos in kinds.items() if (step := _step(run, population, silos)) is not None}
    rehearsal = Rehearsal()
    if max((step.seconds for step in found.values()), default=0.0) <= _LONG_TASK:
        rehearsal = rehearse(run, population)
    training, down, up, tasks, replies = 0.0, 0.0, 0.0, 0.0, 0.0
    sent, merged = _tasks(run, population)
    for name, step in found.items():
        answers = _answers(rehearsal, kinds[name], step, population)
        out, back = (sum(counts[silo.name] for silo in kinds[name]) for counts in (sent, merged))
        training += back * seconds_of(answers)
        down += out * _mean([each.down for each in answers])
        up += back * _mean([each.up for each in answers])
        tasks, replies = tasks + out, replies + back
    inline = scenario.launcher == "inline"
    processes = 0 if inline else len(plan_hosting(scenario, limits_here()).hosts) or scenario.silos.count
    at_once = 1 if inline else max(1, min(scenario.slots, len(os.sched_getaffinity(0))))
    messages = 0.0 if inline else _MESSAGE_SECONDS * replies + _BYTE_SECONDS * (down + up)
    evaluations = _evaluations(scenario) * rehearsal.evaluation_seconds
    return Estimate(
        startup=started + (0.0 if inline else _READY_SECONDS) + processes * _START_SECONDS,
        rounds=(training + messages + evaluations) / at_once + scenario.rounds * rehearsal.merge_seconds,
        down=down,
        up=up,
        memory=_memory(scenario, population, processes, [step.memory for step in found.values()]),
        processes=processes,
        tasks=round(tasks),
        seconds=training / max(1.0, replies),
        rehearsed=len(rehearsal.tasks),
    )


def _step(run: ResolvedRun, population: Population, silos: Sequence[SiloFacts]) -> Step | None:
    """One step of the largest of some silos; None if the method never selects them."""
    return measured_step(run, population, max(silos, key=lambda silo: len(population.train[silo.index])).name)


def _answers(rehearsal: Rehearsal, silos: Sequence[SiloFacts], step: Step, population: Population) -> list[Answer]:
    """The tasks of some silos in the rehearsal; without any, one that is estimated from a step of the largest silo."""
    samples = [len(population.train[silo.index]) for silo in silos]
    alone = Answer(silos[0].name, step.seconds * _mean(samples) / max(1, *samples), step.down, step.up)
    return rehearsal.of([silo.name for silo in silos]) or [alone]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _tasks(run: ResolvedRun, population: Population) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Number of tasks of each silo in a run, and of its replies that are merged, if nothing fails.

    In synchronous rounds the selected silos are known, unless selection depends on losses; otherwise all are equally
    likely.
    """
    plan = run_context_of(run.scenario, population.counted(run.scenario), RunFolder(Path()))[0].plan
    sent, merged = Counter[str](), 0
    for version in range(run.scenario.rounds):
        merged += plan.wanted(version)
        sent.update(plan.sampling.choose(plan.seed, version, plan.eligible, plan.tasks_out(version), {}))
    if plan.mode == "sync" and plan.sampling.candidates is None:
        share = merged / sent.total()
        return sent, defaultdict(float, {silo: share * count for silo, count in sent.items()})
    total = sent.total() if plan.mode == "sync" else merged + plan.tasks_out(0)
    each = [dict.fromkeys(plan.eligible, count / len(plan.eligible)) for count in (total, merged)]
    return defaultdict(float, each[0]), defaultdict(float, each[1])


def _evaluations(scenario: Scenario) -> int:
    """Number of evaluations of the shared model."""
    every, rounds = scenario.evaluation.every, scenario.rounds
    return len({0, rounds, *(range(0, rounds + 1, every) if every else ())})


def _memory(scenario: Scenario, population: Population, processes: int, steps: Sequence[int]) -> float:
    """Memory of all processes: parameters, data, what training needs, and the programs themselves [bytes]."""
    model = population.build_model(scenario, "cpu", ("image", "text"))
    parameters = model.layout.nbytes
    frozen = sum(each.nbytes for each in (*model.parameters(), *model.buffers())) - parameters
    a_silo = max(population.silos, key=lambda silo: len(population.train[silo.index]))
    held = population.load(population.train[a_silo.index], image=True, text=True)
    rows = sum(map(len, population.train)) + 2 * len(population.evaluated)
    data = rows * (sum(_bytes(each) for each in vars(held).values()) / max(1, len(held)))
    working = max(0, max(steps, default=0) - _STEP_MEMORY - _COPIES * parameters)
    at_once = min(scenario.slots, max(1, processes))
    each = _SILO_MEMORY + _COPIES * parameters
    return _OTHER_MEMORY + max(1, processes) * each + max(0, frozen) + data + at_once * working


def _bytes(held: object) -> int:
    """Size of a tensor, or of the tensors in a record."""
    if isinstance(held, torch.Tensor):
        return held.nbytes
    return sum(map(_bytes, vars(held).values())) if hasattr(held, "__dataclass_fields__") else 0


def _estimates(run: ResolvedRun, population: Population) -> Iterator[str]:
    """The estimates in words."""
    try:
        found = estimate(run, population)
    except FedmqError as error:
        yield f"no estimates, as the first tasks failed: {error}"
        return
    if not found.tasks:
        yield "the method selects no silo"
        return
    down, up = found.down / found.tasks, found.up / found.tasks
    yield (
        f"tasks: {found.tasks:,}, of {_duration(found.seconds)} each on average, "
        f"{down / 1e6:.1f} MB down, {up / 1e6:.1f} MB up"
    )
    yield (
        f"estimated time: {_duration(found.startup + found.rounds)} "
        f"({_duration(found.startup)} until all silos are ready)"
    )
    yield f"estimated traffic: {found.down / 1e6:,.1f} MB down, {found.up / 1e6:,.1f} MB up"
    how = "one process" if not found.processes else f"{found.processes} silo processes and the others"
    yield f"estimated memory: {found.memory / (1 << 20):,.0f} MB in {how}"
    basis = (
        f"the first {found.rehearsed} tasks, carried out in this process" if found.rehearsed else "one training step"
    )
    yield f"basis: {basis}; measured accuracy on two cores: {TOLERANCE}; faults are not considered"


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2g} s"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
