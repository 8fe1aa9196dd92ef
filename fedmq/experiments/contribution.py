"""What the silos of a run were worth: runs without some of them, and Shapley values over orders of the silos.

A run without silos has ``silos.without``: the others keep their data, names and random draws. With the virtual clock
a repeated run gives the same bits, so each value is exact for the run's seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedmq.audit.replay import require_repeatable
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import higher_is_better
from fedmq.experiments.grid import Entry
from fedmq.experiments.plots import differences
from fedmq.experiments.runner import Run, Workplace, metric_among, run_of
from fedmq.experiments.summary import Statistic, statistic
from fedmq.experiments.tables import Cell, Grid, number
from fedmq.runs import results
from fedmq.runs.report.html import document
from fedmq.runs.results import FinishedRun
from fedmq.runs.run_records import SiloSummary
from fedmq.seeds import numpy_generator
from fedmq.storage.run_folder import RunFolder
from fedmq.text import counted, enumerated

Silos = frozenset[str]


# ------------------------------------------------------------------------------------------ runs without some silos
def require_silos(scenario: Scenario, folder: RunFolder, names: Collection[str]) -> None:
    """Refuse a run that cannot be repeated here without some silos.

    Raises:
        InputError: the sites have their own data, the run cannot be repeated bit for bit, or a name is not that of a
            silo of the run.
    """
    if scenario.data is None:
        allowed = "a run whose data are here; with sites' own data start it again with --set 'silos.without=[NAME]'"
        raise InputError(f"{folder.scenario}: partition.kind", "own", allowed)
    require_repeatable(scenario, folder)
    if unknown := sorted(set(names) - set(scenario.silo_names)):
        raise InputError("--silo", unknown[0], f"a silo of the run: {', '.join(scenario.silo_names)}")
    if len(scenario.silo_names) < 2:
        raise InputError(str(folder.root), "a run with one silo", "a run with at least two")


def settings_without(scenario: Scenario, left_out: Collection[str], *, processes: bool) -> tuple[str, ...]:
    """The run without some of its silos, as settings of its scenario.

    Silos share one process, which gives the same model, unless they exchange messages by ``processes`` or for a secure
    sum; manually launched silos then become processes of this machine.
    """
    without = sorted({*scenario.silos.without, *left_out})
    messages = processes or scenario.privacy.secure_aggregation is not None
    launcher = ("local" if scenario.launcher in ("none", "inline") else scenario.launcher) if messages else "inline"
    return f"silos.without={json.dumps(without)}", f"launcher={launcher}"


def orders_of(scenario: Scenario, count: int) -> tuple[tuple[str, ...], ...]:
    """``count`` random orders of the silos, drawn from the scenario's seed; more of them begin with the same ones."""
    names = scenario.silo_names
    drawn = (numpy_generator(scenario.seed, "shapley", number).permutation(len(names)) for number in range(count))
    return tuple(tuple(names[place] for place in order.tolist()) for order in drawn)


def groups_of(names: Sequence[str], orders: Sequence[Sequence[str]]) -> tuple[Silos, ...]:
    """The groups of silos of which a run is needed: all but one, then the first ones of each order; each group once.

    All silos together are the run itself, and none the untrained model.
    """
    everyone = frozenset(names)
    first = (frozenset(order[:length]) for order in orders for length in range(1, len(order)))
    groups = dict.fromkeys([*(everyone - {name} for name in names), *first])
    return tuple(group for group in groups if group and group != everyone)


def planned(
    groups: Sequence[Silos], whole: ResolvedRun, file: Path, place: Workplace, check: Callable[[ResolvedRun], object]
) -> tuple[dict[Silos, Run], dict[Silos, str]]:
    """The run of each group of silos; for groups that cannot train, e.g. as the method can select none, the reason.

    ``whole`` is the finished run of all silos and ``file`` its scenario; ``check`` raises InputError for a run that
    cannot start.
    """
    runs, untrained = dict[Silos, Run](), dict[Silos, str]()
    for group in groups:
        left_out = [name for name in whole.scenario.silo_names if name not in group]
        name = f"without {enumerated(left_out)}" if len(left_out) == 1 else f"only {enumerated(sorted(group))}"
        settings = settings_without(whole.scenario, left_out, processes=place.processes)
        try:
            run = run_of(
                Entry(name, name, (), file, (*settings, "privacy.capture=false")), (), whole.scenario.seed, place
            )
            if not run.done:
                check(run.resolved)
            runs[group] = run
        except InputError as error:
            untrained[group] = str(error)
    return runs, untrained


# ------------------------------------------------------------------------------------------------------------ values
@dataclass(frozen=True)
class Worth:
    """What one silo was worth, by a metric. NaN stands for a run that failed."""

    silo: str
    samples: int
    merges: int  # number of its replies that were merged
    without: float  # value of the run without it
    contribution: float  # value of the run minus that
    shapley: Statistic | None  # marginal contributions over the orders; None without orders


def worths(
    silos: Mapping[str, SiloSummary], orders: Sequence[Sequence[str]], values: Mapping[Silos, float]
) -> tuple[Worth, ...]:
    """What each silo of a run was worth; ``values`` are those of each group of silos, NaN if its run failed.

    A silo's Shapley value is its mean marginal contribution v(S + silo) - v(S) over orders of the silos, with S those
    before it (Castro, Gomez and Tejada 2009); ``low`` and ``high`` of the statistic are the 95 % t-interval over them.
    Groups are needed of all silos, of none, and those of the orders, if there are any.
    """
    everyone = frozenset(silos)
    marginal = dict[str, dict[int, float]]({name: {} for name in silos})
    for number_, order in enumerate(orders):
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            gained = values[before | {name}] - values[before]
            if not math.isnan(gained):
                marginal[name][number_] = gained
    return tuple(
        Worth(
            name,
            silo.samples,
            silo.participations,
            without := values[everyone - {name}],
            values[everyone] - without,
            statistic(marginal[name], dict.fromkeys(marginal[name], 0.0)) if orders else None,
        )
        for name, silo in silos.items()
    )


def metric_of_run(run: FinishedRun, metric: str | None) -> str:
    """The metric by which silos are compared; by default mean R@1, of personal models where only these are whole.

    Raises:
        InputError: the run has no such metric.
    """
    metric = metric or metric_among([run], "mean_r1")
    if run.value(metric) is None:
        raise results.unknown_metric(metric, run)
    return metric


@dataclass(frozen=True)
class Contributions:
    """What the silos of a run were worth."""

    metric: str
    whole: float  # value of the run
    start: float  # value of the untrained model
    silos: tuple[Worth, ...]  # in their order
    table: Grid
    versions_of: Mapping[str, str]  # versions and hardware with which the run was made


def contributions(
    run: FinishedRun,
    scenario: Scenario,
    orders: Sequence[Sequence[str]],
    runs: Mapping[Silos, Run],
    untrained: Collection[Silos],
    metric: str,
) -> Contributions:
    """What the silos of a run were worth; groups that cannot train have the value of the untrained model.

    Raises:
        InputError: there are orders, for Shapley values, and the untrained model has no such metric.
    """
    summary, untrained_model = run.summary, run.untrained()
    assert summary is not None  # noqa: S101 - it was read from a folder
    whole, start = _value(run, metric), _value(untrained_model, metric)
    if orders and math.isnan(start):
        raise InputError("--metric", metric, "a metric of the shared model, with --shapley, e.g. mean_r1")
    values = {
        frozenset(summary.per_silo): whole,
        frozenset[str](): start,
        **{group: _value(results.read(each.folder), metric) if each.done else math.nan for group, each in runs.items()},
        **dict.fromkeys(untrained, start),
    }
    found = worths(summary.per_silo, orders, values)
    notes = _notes(scenario, (whole, start), metric, len(orders), len(untrained))
    return Contributions(metric, whole, start, found, _grid(found, metric, notes), summary.versions_of)


def _value(run: FinishedRun, metric: str) -> float:
    """The metric of a run; NaN if it has none."""
    found = run.value(metric)
    return math.nan if found is None else found


# ------------------------------------------------------------------------------------------------- tables and plots
def _grid(found: Sequence[Worth], metric: str, notes: Sequence[str]) -> Grid:
    """A row for each silo, the one that was worth most first."""
    head = ["", "items", "merges", "without it", "contribution"]
    head += ["Shapley value"] if any(each.shapley for each in found) else []
    body = []
    for each in _ordered(found, metric):
        signed = number(each.contribution, each.without, sign=True)
        cells = [each.silo, f"{each.samples:,}", str(each.merges), number(each.without, each.without), signed]
        if (value := each.shapley) is not None:
            parts = (value.difference, value.low, value.high)
            middle, low, high = (number(part, each.without, sign=True) for part in parts)
            cells.append(middle if math.isnan(value.low) else f"{middle} [{low}, {high}]")
        body.append(tuple(map(Cell, cells)))
    return Grid(tuple(head), tuple(body), tuple(notes))


def _ordered(found: Sequence[Worth], metric: str) -> list[Worth]:
    """The silo that was worth most first, by Shapley value if it is known; failed runs last."""
    sign = 1 if higher_is_better(metric) else -1

    def key(each: Worth) -> tuple[bool, float]:
        value = each.contribution if each.shapley is None else each.shapley.difference
        return math.isnan(value), -sign * value

    return sorted(found, key=key)


def _notes(scenario: Scenario, values: tuple[float, float], metric: str, orders: int, untrained: int) -> list[str]:
    """Explanations for the reader of the table; the values are those of all silos and of the untrained model."""
    whole, start = (number(value, value) for value in values)
    notes = [
        f"{metric} {whole} with all {len(scenario.silo_names)} silos, {start} untrained",
        f"without it: {metric} of the run without the silo",
        f"contribution: {whole} minus that, exact for seed {scenario.seed}; other seeds give other values",
    ]
    if orders:
        interval = ", with a 95 % t-interval over orders" if orders > 1 else ""
        notes.append(f"Shapley value: mean marginal contribution over {counted(orders, 'random order')}{interval}")
    if untrained:
        notes.append(f"{counted(untrained, 'group')} cannot train, and count as untrained")
    return notes


def plain(found: Sequence[Worth]) -> list[dict[str, object]]:
    """The rows as plain data, one mapping each; unknown values are None."""
    rows = list[dict[str, object]]()
    for each in found:
        value = each.shapley
        shapley = {} if value is None else {"shapley": value.difference, "low": value.low, "high": value.high}
        figures = {"without": each.without, "contribution": each.contribution, **shapley}
        known = {name: None if math.isnan(figure) else figure for name, figure in figures.items()}
        rows.append({"silo": each.silo, "samples": each.samples, "merges": each.merges, **known})
    return rows


def page(made: Contributions, title: str, command: str) -> str:
    """The table and a figure of the silos' contributions, and of their Shapley values, as an HTML page."""
    rows = _ordered(made.silos, made.metric)
    names = [each.silo for each in rows]
    note = "How much the metric falls without the silo; left of the line, it rises."
    losses = [each.contribution for each in rows]
    figures = [differences("Contribution of each silo", made.metric, names, losses, None, note)]
    if shapley := [each.shapley for each in rows if each.shapley is not None]:
        note = "Mean marginal contribution over orders of the silos, with its 95 % t-interval; one that covers 0 is no "
        note += "evidence that the silo helps or harms."
        middles, errors = [each.difference for each in shapley], [each.high - each.difference for each in shapley]
        figures.append(differences("Shapley value of each silo", made.metric, names, middles, errors, note))
    table = [made.table.head, *([cell.text for cell in row] for row in made.table.body)]
    return document(title, (f"Made by: {command}", *made.table.notes), figures, table)
