"""A complete run of thirty silos, compared with the same local steps and merges in one process without messages."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import protocols
from benchmarks.measure import Number, Result, torch_threads
from benchmarks.runs import loop_seconds, rcsr_scenario, simulated
from coordinator.participation import RoundsPlan
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Scenario
from fedmq.data.silo_dataset import load_silo_dataset
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Local, Task, Update

METHODS = ("rcsr", "fedavg")


@dataclass(frozen=True)
class Bare:
    """Result of a run without messages: its seconds and the digest of its model."""

    seconds: float
    digest: str


def bare(scenario: Scenario, population: Population, threads: int) -> Bare:
    """The same rounds, silos, batches, losses, steps and merges as a run of the scenario, in sequence."""
    with torch_threads(threads):
        model = population.build_model(scenario, "cpu", ("image", "text"))
        context = population.context(scenario, model)
        method = protocols.create(scenario.protocol, context)
        names = tuple(silo.name for silo in population.silos)
        eligible = tuple(silo.name for silo in population.silos if method.eligible(silo))
        plan = RoundsPlan(scenario.seed, scenario.rounds, names, eligible, scenario.participation.rate)
        datasets = {
            silo.name: load_silo_dataset(
                population.prepared, population.train[silo.index], image=silo.image, text=silo.text
            )
            for silo in population.silos
        }
        state = method.initial(model.flat.detach().clone())
        kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
        sequences = dict.fromkeys(names, 0)
        began = time.perf_counter()
        for round_ in range(scenario.rounds):
            rate = scenario.training.rate_at(round_, scenario.rounds)
            replies = []
            for name in plan.sampling.choose(plan.seed, round_, eligible, plan.cohort_size(round_), {}):
                silo = population.facts(name)
                sequences[name] += 1
                task = Task(sequences[name], round_, round_, rate, method.task(state, silo))
                trained = method.train(Local(silo, datasets[name], model, kept[name]), task)
                kept[name] = dict(trained.state)
                replies.append(Update(silo, sequences[name], round_, 0, 1.0, trained.payloads))
            state = method.merge(state, replies, round_).state
        return Bare(time.perf_counter() - began, context.layout.model_digest(state.theta.numpy()))


def run(*, smoke: bool = False) -> Result:
    """Measure each method; ``smoke``: four rounds of three silos on synthetic features."""
    rounds, warm = (4, 3) if smoke else (24, 6)
    numbers, notes = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        file = rcsr_scenario(folder, smoke=smoke)
        for method in METHODS:
            settings = (f"rounds={rounds}", f"protocol.name={method}")
            scenario = scenarios.load(file, settings)
            population = build_population(scenario)
            few = scenarios.load(file, (*settings, f"rounds={warm}"))
            counts = sorted({1, torch.get_num_threads()})
            quick = {threads: bare(few, population, threads).seconds for threads in counts}  # also warms up
            # With one thread, as a silo has, and with more if the few rounds were faster with them.
            chosen = [threads for threads in counts if threads == 1 or quick[threads] < quick[1]]
            alone = {threads: bare(scenario, population, threads) for threads in chosen}
            best = min(each.seconds for each in alone.values())
            numbers += [Number(f"{method}: bare, torch threads {n}", each.seconds, "s") for n, each in alone.items()]
            for launcher, how, aim in (("local", "as processes", 1.5), ("inline", "inline", 1.15)):
                out = folder / f"{method}-{launcher}"
                summary = simulated(file, out, *settings, f"launcher={launcher}")
                seconds = loop_seconds(out)
                numbers += [
                    Number(f"{method}: {rounds} rounds {how}", seconds, "s"),
                    Number(f"{method}: {how}, to the faster bare loop", seconds / best, "x", f"at most {aim}"),
                ]
                same = alone[1].digest == summary["model_digest"]
                notes.append(
                    f"{method}, {how}: the bare loop's model is {'bitwise identical' if same else 'different'}"
                )
    return Result("loop", tuple(numbers), (*notes, f"{scenario.silos.count} silos, half of them selected each round"))
