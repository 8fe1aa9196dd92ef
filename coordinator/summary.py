"""Build the summary of a finished run from its counters, its last evaluation and its processes."""

from __future__ import annotations

import platform

import psutil
import torch

import fedmq
from coordinator.counters import Counters
from coordinator.evaluation import personal_figures
from coordinator.loop import Loop
from fedmq.clock import Clock
from fedmq.encoders.gpu import kind_of
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.evaluation.user_metrics import described, measures_of
from fedmq.federation.population import Population, device_here
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import (
    EvaluationLine,
    MessageCounts,
    Processes,
    ReleaseConfig,
    RunSummary,
    Seconds,
    SiloSummary,
    TaskCounts,
    Traffic,
)

#: Phases whose time is measured; the rest is training.
_MEASURED = ("startup", "merge", "evaluation")


def summary_of(
    loop: Loop, population: Population, clock: Clock, config: ReleaseConfig, *, unchanged: bool
) -> RunSummary:
    """The summary of a run whose last version has been evaluated.

    Args:
        loop: at its end.
        population: the silos and their data.
        clock: of the run.
        config: of the release.
        unchanged: whether no silo's update changed the model.
    """
    scenario, counters = loop.run_context.scenario, loop.counters
    last = _last_evaluation(loop)
    summary = RunSummary(
        protocol=scenario.protocol.name,
        scenario=scenario.name,
        seed=scenario.seed,
        rounds=scenario.rounds,
        versions=loop.rounds.version,
        model_digest=config.model_digest,
        data_digest=config.data_digest,
        metrics=last.metrics,
        per_silo=_per_silo(population, counters, last),
        per_silo_mean=means(last.per_silo),
        fairness=fairness_of(last.per_silo),
        bytes=Traffic(up=dict(sorted(counters.up.items())), down=dict(sorted(counters.down.items()))),
        messages=_messages(loop),
        tasks=TaskCounts(
            merged=counters.participations.total(), failed=counters.failed, discarded=counters.discarded.total()
        ),
        seconds=_seconds(counters, clock),
        processes=Processes(
            silos=len(population.silos), peak_pss_mb=round(psutil.Process().memory_full_info().pss / 2**20, 1)
        ),
        versions_of=_versions_of(loop),
    )
    return summary.model_copy(update=_optional_keys(loop, config, last, unchanged=unchanged))


def _last_evaluation(loop: Loop) -> EvaluationLine:
    lines = [line for line in read_metrics(loop.run_context.folder) if isinstance(line, EvaluationLine)]
    return max(reversed(lines), key=lambda line: line.version)


def _per_silo(population: Population, counters: Counters, last: EvaluationLine) -> dict[str, SiloSummary]:
    summaries: dict[str, SiloSummary] = {}
    for silo in population.silos:
        entry = {
            "modalities": [name for name, present in (("image", silo.image), ("text", silo.text)) if present],
            "samples": len(population.train[silo.index]),
            "participations": counters.participations[silo.name],
            **last.per_silo[silo.name],
        }
        summaries[silo.name] = SiloSummary.model_validate(entry)
    return summaries


def _messages(loop: Loop) -> MessageCounts:
    counters = loop.counters
    return MessageCounts(
        sent=counters.sent,
        received=counters.received,
        refused=counters.refused.total(),
        logged=loop.roster.wired,
    )


def _seconds(counters: Counters, clock: Clock) -> Seconds:
    spent = {name: counters.seconds.get(name, 0.0) for name in _MEASURED}
    total = counters.seconds["total"]
    return Seconds(
        total=round(total, 3),
        startup=round(spent["startup"], 3),
        training=round(max(0.0, total - sum(spent.values())), 3),
        merge=round(spent["merge"], 3),
        evaluation=round(spent["evaluation"], 3),
        virtual=round(clock.now(), 6) if clock.virtual else None,
    )


def _versions_of(loop: Loop) -> dict[str, str]:
    """Versions and hardware on which rounding depends: where they agree, a scenario gives bit-identical models."""
    return {
        "fedmq": fedmq.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        **kind_of(device_here(loop.run_context.scenario.device)),
    }


def _optional_keys(loop: Loop, config: ReleaseConfig, last: EvaluationLine, *, unchanged: bool) -> dict[str, object]:
    """Keys of a summary that only some runs have."""
    traits, keys = loop.run_context.traits, dict[str, object]()
    if config.released_with:
        keys["released_with"] = config.released_with
    if unchanged:
        keys["unchanged"] = True
    if loop.evaluation.personal:
        line = personal_figures(loop.rounds.version, loop.evaluation.personal)
        keys |= {name: value for name, value in line if name.startswith("personal")}
    if loop.evaluation.missing:
        keys["personal_missing"] = dict(sorted(loop.evaluation.missing.items()))
    if own_metrics := described(measures_of(loop.run_context.scenario.evaluation), last.metrics):
        keys["own_metrics"] = own_metrics
    if traits.our_reading:
        keys["our_reading"] = True
    if traits.own_only:
        keys["own_only"] = True
    if traits.public_items is not None:
        keys["public_items"] = traits.public_items
    return keys
