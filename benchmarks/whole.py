"""A complete run of thirty silos, compared with the same local steps and merges in one process without messages.

Neither evaluates during its rounds. The bare loop has what each process of fedmq has: one torch thread, and freed
memory that the C library keeps.
"""

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
from fedmq.wire.codec import keep_buffers

METHODS = ("rcsr", "fedavg")


@dataclass(frozen=True)
class Bare:
    """Result of a run without messages: its seconds and the digest of its model."""

    seconds: float
    digest: str


def bare(scenario: Scenario, population: Population) -> Bare:
    """The same rounds, silos, batches, losses, steps and merges as a run of the scenario, in sequence."""
    keep_buffers()
    with torch_threads(1):
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
            settings = (f"rounds={rounds}", f"protocol.name={method}", "evaluation.every=0")
            scenario = scenarios.load(file, settings)
            population = build_population(scenario)
            bare(scenarios.load(file, (*settings, f"rounds={warm}")), population)  # warms up
            alone = bare(scenario, population)
            numbers.append(Number(f"{method}: bare loop", alone.seconds, "s"))
            for launcher, how, aim in (("local", "as processes", 1.5), ("inline", "inline", 1.15)):
                out = folder / f"{method}-{launcher}"
                summary = simulated(file, out, *settings, f"launcher={launcher}")
                seconds = loop_seconds(out)
                numbers += [
                    Number(f"{method}: {rounds} rounds {how}", seconds, "s"),
                    Number(f"{method}: {how}, to the bare loop", seconds / alone.seconds, "x", f"at most {aim}"),
                ]
                same = alone.digest == summary["model_digest"]
                notes.append(
                    f"{method}, {how}: the bare loop's model is {'bitwise identical' if same else 'different'}"
                )
    notes.append(f"{scenario.silos.count} silos, half of them selected each round; no evaluations during the rounds")
    notes.append("the bare loop and each process of fedmq have one torch thread")
    return Result("loop", tuple(numbers), tuple(notes))
