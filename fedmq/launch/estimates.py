"""What a scenario would run, and estimates of its time, memory and traffic: ``fedmq scenario --check``.

The first rounds are carried out in this process and discarded (:mod:`fedmq.launch.rehearsal`). If steps take long, a
single one is measured instead. ``python -m benchmarks --only estimates`` compares the estimates with runs.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch

import protocols
from coordinator.participation import RoundsPlan
from coordinator.peers import InProcessPeers
from coordinator.run_context import run_context_of
from fedmq.config.plug_ins import as_plain
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.errors import FedmqError, InputError
from fedmq.federation.population import Population, build_population, device_of
from fedmq.federation.protocol import SiloFacts
from fedmq.launch.preflight import FirstStep, sent_payloads
from fedmq.launch.preparation import planned
from fedmq.launch.processes import limits_here, plan_hosting
from fedmq.launch.rehearsal import Answer, Rehearsal, check_warnings, rehearse, size_of
from fedmq.launch.supervisor import inline_threads
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, duration_text, size_text
from silos.tasks import Silo, SiloArguments

#: Intended time of a rehearsed round [s]; it decides how many of their items silos train on.
_ROUND_SECONDS = 1.5


def _task_of_largest(run: ResolvedRun, population: Population, silos: Sequence[SiloFacts]) -> Answer | None:
    """A task of the largest of some silos, from the second of two equal steps; None if the method never selects it."""
    scenario, name = run.scenario, max(silos, key=lambda silo: len(population.train[silo.index])).name
    before, most = psutil.Process().memory_info().rss, _peak()
    model = population.build_model(scenario, device_of(scenario.device), ("image", "text"))
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as folder:
        place = Path(folder)
        arguments = SiloArguments(run, name, InProcessPeers.uri, place, place, data=population.prepared.folder)
        silo = Silo(arguments, population, model, noise=scenario.seed)
        if not protocols.create(scenario.protocol, silo.context).eligible(silo.facts):
            return None
        if not len(silo.dataset):
            raise InputError(name, "no training items", "at least one")
        step = FirstStep.of(silo)
        step.train()
        trained, seconds = step.train()
    peak, (sent, _) = _peak(), silo.compress(sent_payloads(silo, trained), {})
    memory = peak - before if peak > most else 0
    return Answer(name, seconds * step.steps, size_of(step.task.payloads), size_of(sent), memory)


def _peak() -> int:
    """The largest memory of this process so far [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


#: If two steps take longer than this, tasks are estimated from one step [s].
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


def explain(run: ResolvedRun, progress: Progress | None) -> Iterator[str]:
    """Lines that say what would run and what it would take.

    Raises:
        InputError: the scenario cannot run on its data.
    """
    scenario = run.scenario
    yield from _what(run)

    if not isinstance(known := planned(scenario, progress), Path):
        yield "features: not extracted yet, so the silos' items, time and traffic are not known; the run, or"
        yield "  fedmq data features FILE, extracts them"
        return
    population = build_population(scenario, progress, folder=known, pooled=run.pooled)
    yield from _who(population)
    yield from _estimates(run, population)


def estimates(run: ResolvedRun, progress: Progress | None) -> dict[str, object]:
    """The estimates, and the warnings of settings without effect (``warnings``), as plain data.

    Raises:
        InputError: the scenario cannot run on its data, or its features are not extracted yet.
        FedmqError: a task failed.
    """
    if not isinstance(known := planned(run.scenario, progress), Path):
        raise InputError("--check --json", "features that are not extracted yet", "first `fedmq data features FILE`")
    population = build_population(run.scenario, progress, folder=known, pooled=run.pooled)
    found = estimate(run, population)
    return {
        **asdict(found),
        "warnings": [asdict(each) for each in check_warnings(run, population, found.merges, found.most_items)],
    }


def _what(run: ResolvedRun) -> Iterator[str]:
    scenario = run.scenario
    yield f"{scenario.name}: {scenario.protocol.label}, seed {scenario.seed}, {scenario.rounds} rounds"
    options, kind = scenario.protocol.options, protocols.load(scenario.protocol.name)
    usual = as_plain(protocols.options_of(kind, {}))
    others = ", ".join(f"{key}={value}" for key, value in options.items() if usual.get(key) != value)
    yield f"options: {others or 'the defaults'}{' (others have their defaults)' if others else ''}"
    rate = scenario.participation.rate
    yield f"aggregation: {scenario.aggregation.mode}, {rate:.0%} of the eligible silos selected"
    faults = ", ".join(fault.kind for fault in scenario.faults)
    yield f"faults: {faults or 'none'}"
    yield f"data: {scenario.dataset.name}, backbone {scenario.backbone.name}, objective {scenario.objective.base}"


def _who(population: Population) -> Iterator[str]:
    for name, silos in _kinds(population).items():
        counts = [len(population.train[silo.index]) for silo in silos]
        size = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
        yield f"silos with {name}: {len(silos)}, {size} training items each, {sum(counts)} together"
    yield f"evaluated items: {len(population.evaluated)}"


def _kinds(population: Population) -> dict[str, list[SiloFacts]]:
    kinds: dict[str, list[SiloFacts]] = {}
    for silo in population.silos:
        kinds.setdefault(silo.held, []).append(silo)
    return kinds


@dataclass(frozen=True)
class Estimate:
    """What a run takes."""

    startup: float  # time until all silos are ready [s]
    rounds: float  # time of all rounds and evaluations [s]
    down: float  # size of all tasks [bytes]
    up: float  # size of all replies [bytes]
    memory: float  # memory of all processes [bytes]
    processes: int  # number of silo processes
    tasks: int
    seconds: float  # mean time of a task in its silo [s]
    rehearsed: int  # number of tasks that were carried out; 0 if a step was measured only
    merges: int  # number of merges that were carried out
    most_items: int  # maximum number of items of each kind in a silo's tasks; 0 if only a step was measured
    on_all_items: bool  # false if the tasks or evaluations that were carried out had a part of the items


def estimate(run: ResolvedRun, population: Population) -> Estimate:
    """Time, memory and traffic of a run, from its first rounds or from one step of a silo of each kind.

    Raises:
        FedmqError: a task failed, or the run would be refused.
    """
    # As in a silo.
    torch.set_num_threads(1)
    started = time.time() - psutil.Process().create_time()
    scenario, kinds = run.scenario, _kinds(population)
    alone = {
        kind: task for kind, silos in kinds.items() if (task := _task_of_largest(run, population, silos)) is not None
    }
    plan = run_context_of(scenario, population.counted(scenario), RunFolder(Path()))[0].plan
    rehearsal, most = Rehearsal(), _most_items(scenario, population, kinds, alone, plan.tasks_out(0))
    if most:
        rehearsal = rehearse(run, population, most)
    training, down, up, tasks, replies = 0.0, 0.0, 0.0, 0.0, 0.0
    sent, merged = _tasks(plan, scenario.rounds)
    for kind, task in alone.items():
        answers = _answers(rehearsal, kinds[kind], task, population)
        out, back = (sum(counts[silo.name] for silo in kinds[kind]) for counts in (sent, merged))
        # Without the first third, in which libraries start up.
        training += back * statistics.median(each.seconds for each in answers[len(answers) // 3 :])
        down += out * statistics.mean(each.down for each in answers)
        up += back * statistics.mean(each.up for each in answers)
        tasks, replies = tasks + out, replies + back
    inline = scenario.launcher == "inline"
    processes = 0 if inline else len(plan_hosting(scenario, limits_here()).hosts) or len(scenario.silo_names)
    cores = len(os.sched_getaffinity(0))
    at_once = inline_threads(scenario, device_of(scenario.device)) if inline else max(1, min(scenario.slots, cores))
    messages = 0.0 if inline else _MESSAGE_SECONDS * replies + _BYTE_SECONDS * (down + up)
    evaluated = sum(scenario.evaluation.due(version, scenario.rounds) for version in range(scenario.rounds + 1))
    evaluations = evaluated * min((each.seconds for each in rehearsal.evaluations), default=0.0)
    return Estimate(
        startup=started + (0.0 if inline else _READY_SECONDS) + processes * _START_SECONDS,
        rounds=(training + messages + evaluations) / at_once + scenario.rounds * rehearsal.merge_seconds,
        down=down,
        up=up,
        memory=_memory(scenario, population, processes or at_once, [task.memory for task in alone.values()]),
        processes=processes,
        tasks=round(tasks),
        seconds=training / max(1.0, replies),
        rehearsed=len(rehearsal.tasks),
        merges=rehearsal.merges,
        most_items=most,
        on_all_items=rehearsal.on_all_items,
    )


def _most_items(
    scenario: Scenario,
    population: Population,
    kinds: Mapping[str, list[SiloFacts]],
    alone: Mapping[str, Answer],
    tasks: int,
) -> int:
    """Maximum number of items of a silo in a rehearsal, so that a round of ``tasks`` tasks takes about a second.

    It is enough for two steps; if these take too long, it is 0: no rehearsal.
    """
    largest = {kind: max(len(population.train[silo.index]) for silo in kinds[kind]) for kind in alone}
    an_item = max((task.seconds / max(1, largest[kind]) for kind, task in alone.items()), default=0.0)
    size = scenario.training.batch_size
    if an_item * min(2 * size, max(largest.values(), default=0)) > _LONG_TASK:
        return 0
    items = max(largest.values(), default=1) if not an_item else int(_ROUND_SECONDS / (tasks * an_item))
    return max(2 * size, items // size * size)


def _answers(rehearsal: Rehearsal, silos: Sequence[SiloFacts], largest: Answer, population: Population) -> list[Answer]:
    """The tasks of some silos in the rehearsal; without any, one that is estimated from the largest silo's."""
    samples = [len(population.train[silo.index]) for silo in silos]
    alone = replace(largest, seconds=largest.seconds * statistics.mean(samples) / max(1, *samples))
    names = [silo.name for silo in silos]
    return [each for each in rehearsal.tasks if each.name in names] or [alone]


def _tasks(plan: RoundsPlan, rounds: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Number of tasks of each silo in a run, and of its replies that are merged, if nothing fails.

    In synchronous rounds the selected silos are known, unless selection depends on losses; otherwise all are equally
    likely.
    """
    sent, merged = Counter[str](), 0
    for version in range(rounds):
        merged += plan.wanted(version)
        sent.update(plan.sampling.choose(plan.seed, version, plan.eligible, plan.tasks_out(version), {}))
    if plan.mode == "sync" and plan.sampling.candidates is None:
        share = merged / sent.total()
        return sent, defaultdict(float, {silo: share * count for silo, count in sent.items()})
    total = sent.total() if plan.mode == "sync" else merged + plan.tasks_out(0)
    each = [dict.fromkeys(plan.eligible, count / len(plan.eligible)) for count in (total, merged)]
    return defaultdict(float, each[0]), defaultdict(float, each[1])


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
        f"{size_text(down)} down, {size_text(up)} up"
    )
    yield (
        f"estimated time: {_duration(found.startup + found.rounds)} "
        f"({_duration(found.startup)} until all silos are ready)"
    )
    yield f"estimated traffic: {size_text(found.down)} down, {size_text(found.up)} up"
    how = "one process" if not found.processes else f"{found.processes} silo processes and the others"
    yield f"estimated memory: {size_text(found.memory)} in {how}"
    items = "" if found.on_all_items else ", on a part of the items"
    tasks = f"the first {found.rehearsed} tasks, carried out in this process{items}"
    basis = tasks if found.rehearsed else "one training step"
    left_out = "faults are" if run.scenario.privacy.secure_aggregation is None else "faults and secure sums are"
    yield f"basis: {basis}; measured accuracy on two cores: {TOLERANCE}; {left_out} not considered"
    for warning in check_warnings(run, population, found.merges, found.most_items):
        yield f"warning: {warning.text}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration_text(seconds)
