"""A whole run of thirty silos against the same local steps and merges in one process without any message."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

import protocols
from benchmarks.measure import Number, Result
from benchmarks.startup import scenario_file, simulated
from coordinator.rounds import RoundsPlan
from fedmq.config import loader as scenarios
from fedmq.config.scenario import Scenario
from fedmq.data.silo_dataset import load_silo_dataset
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import Local, Reply, Task

METHODS = ("rcsr", "fedavg")


@dataclass(frozen=True)
class Bare:
    """A run without messages: its seconds, and its model's digest."""

    seconds: float
    digest: str


def bare(scenario: Scenario, population: Population, threads: int) -> Bare:
    """The same rounds, silos, shares, batches, losses, steps and merges as a run of the scenario, one by one."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = population.build_model(scenario, "cpu", ("image", "text"))
        context = population.context(scenario, model)
        method = protocols.build(scenario, context)
        names = tuple(silo.name for silo in population.silos)
        eligible = tuple(silo.name for silo in population.silos if method.eligible(silo))
        plan = RoundsPlan(scenario.seed, scenario.rounds, names, eligible, scenario.participation.rate)
        shares = {
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
                trained = method.train(Local(silo, shares[name], model, kept[name]), task)
                kept[name] = dict(trained.state)
                replies.append(Reply(silo, sequences[name], round_, 0, 1.0, trained.payloads))
            state = method.merge(state, replies, round_).state
        return Bare(time.perf_counter() - began, context.layout.model_digest(state.theta.numpy()))
    finally:
        torch.set_num_threads(before)


def _loop_seconds(log: Path) -> float:
    """From the first task to the last merge, by the coordinator's message log."""
    first, last = None, None
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if first is None and record.get("kind") == "task":
            first = datetime.fromisoformat(record["wall"])
        if record.get("text") == "all rounds merged":
            last = datetime.fromisoformat(record["wall"])
    if first is None or last is None:
        raise ValueError("the run merged nothing")
    return (last - first).total_seconds()


def run(rounds: int = 40) -> Result:
    """Measure each method."""
    numbers, notes = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        for method in METHODS:
            settings = (f"rounds={rounds}", f"protocol.name={method}")
            summary = simulated(folder, method, *settings)
            seconds = _loop_seconds(folder / method / "messages" / "coordinator.jsonl")
            scenario = scenarios.load(scenario_file(folder), settings)
            population = build_population(scenario)
            bare(scenarios.load(scenario_file(folder), (*settings, "rounds=6")), population, 1)  # warm
            alone = {threads: bare(scenario, population, threads) for threads in sorted({1, torch.get_num_threads()})}
            best = min(each.seconds for each in alone.values())
            numbers += [
                Number(f"{method}: {rounds} rounds as processes", seconds, "s"),
                *(Number(f"{method}: bare, torch threads {n}", each.seconds, "s") for n, each in alone.items()),
                Number(f"{method}: as a multiple of the faster bare loop", seconds / best, "x", "at most 1.5"),
            ]
            same = alone[1].digest == summary["model_digest"]
            notes.append(f"{method}: the bare loop's model is {'the same to the bit' if same else 'another one'}")
    return Result("loop", tuple(numbers), (*notes, "30 silos, half of them asked a round, openmoji on lite"))
