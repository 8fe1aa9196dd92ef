"""Compute the rows of a comparison: statistics over seeds, differences to the baseline, and the best at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedmq.errors import InputError
from fedmq.evaluation.metrics import Metric
from fedmq.experiments.grid import NO_BASELINE, ComparisonPlan, Entry
from fedmq.runs import results as outcomes
from fedmq.runs.results import FinishedRun, Statistic
from fedmq.text import nearest

ZERO_SHOT = "zero-shot"


@dataclass(frozen=True)
class Row:
    """One row of the result.

    Args:
        entry: entry of the plan.
        chosen: settings selected on the validation split.
        outcomes: finished runs by seed, without failed ones.
        columns: statistics by column.
        best: columns in which no other row at the same point is better.
        against: name of the row's baseline; None if it has none.
        diverged: its runs whose training diverged, candidates included; neither chosen nor in the statistics.
    """

    entry: Entry
    chosen: tuple[str, ...]
    outcomes: Mapping[int, FinishedRun]
    columns: Mapping[str, Statistic]
    best: frozenset[str]
    against: str | None
    diverged: tuple[str, ...] = ()


def entries_of(plan: ComparisonPlan) -> tuple[Entry, ...]:
    """All rows: the zero-shot row first, if requested, then those of the plan."""
    if not plan.zero_shot:
        return plan.entries
    first = plan.entries[0]
    return (Entry(ZERO_SHOT, ZERO_SHOT, first.point, first.file, first.settings), *plan.entries)


def _peers(entry: Entry, plan: ComparisonPlan) -> list[Entry]:
    """The rows with which a row is compared: all methods at its point, or all rows if there is only one method."""
    all_entries = entries_of(plan)
    if len({each.method for each in plan.entries}) == 1:
        return list(all_entries)
    return [each for each in all_entries if each.point == entry.point]


def baselines(plan: ComparisonPlan) -> dict[str, str | None]:
    """The baseline of each row, by name; None for baselines, and without any baseline.

    Raises:
        InputError: no method or row has the name in ``plan.baseline``.
    """
    found: dict[str, str | None] = {}
    all_entries = entries_of(plan)
    if plan.baseline == NO_BASELINE:
        return dict.fromkeys(entry.name for entry in all_entries)
    for entry in all_entries:
        peers = _peers(entry, plan)
        fitting = [each for each in all_entries if each.name == plan.baseline]
        fitting = fitting or [each for each in peers if plan.baseline in (None, each.method)]
        fitting = [each for each in fitting if each.name != ZERO_SHOT or plan.baseline == ZERO_SHOT]
        if not fitting:
            names = dict.fromkeys(name for each in all_entries for name in (each.method, each.name))
            allowed = ", ".join([*names, NO_BASELINE])
            raise InputError("--baseline", plan.baseline, allowed)
        found[entry.name] = None if fitting[0].name == entry.name else fitting[0].name
    return found


def rows(
    plan: ComparisonPlan,
    chosen: Mapping[str, tuple[str, ...] | None],
    finished: Mapping[str, Mapping[int, FinishedRun]],
) -> tuple[Row, ...]:
    """Statistics of every row against its baseline.

    Args:
        plan: plan of the comparison.
        chosen: selected settings, by row.
        finished: finished runs by row and seed.

    Raises:
        InputError: the baseline does not exist.
    """
    results = dict(finished)
    if plan.zero_shot:
        results[ZERO_SHOT] = {seed: run.untrained() for seed, run in finished[plan.entries[0].name].items()}
    columns = {name: _columns(runs, plan) for name, runs in results.items()}
    custom_metrics = tuple(
        {metric for runs in results.values() for run in runs.values() for metric in run.custom_metrics}
    )
    against = baselines(plan)
    statistics = {
        name: {
            column: outcomes.statistic(values, columns[base][column] if (base := against[name]) else None)
            for column, values in by_column.items()
        }
        for name, by_column in columns.items()
    }
    return tuple(
        Row(
            entry,
            chosen.get(entry.name) or (),
            results[entry.name],
            statistics[entry.name],
            _best_columns(entry, plan, statistics, custom_metrics),
            against[entry.name],
        )
        for entry in entries_of(plan)
    )


def _columns(results: Mapping[int, FinishedRun], plan: ComparisonPlan) -> dict[str, dict[int, float]]:
    """Values by column and seed; a run without a value, or with one that every model reaches, is left out."""
    metrics = {
        metric: {seed: run.value(metric) for seed, run in results.items() if run.shows(metric)}
        for metric in plan.metrics
    }
    times = {
        target.title: {seed: run.time_to(target) for seed, run in results.items() if run.shows(target.metric)}
        for target in plan.targets
    }
    return {
        column: {seed: value for seed, value in values.items() if value is not None}
        for column, values in {**metrics, **times}.items()
    }


#: Prefixes of names of label metrics.
_OF_LABELS = ("map", "ndcg")


def empty_columns(plan: ComparisonPlan, made: Sequence[Row]) -> tuple[str, ...]:
    """A one-line warning for each column whose metric no finished run has.

    The table is printed with dashes in that column, so that a wrong name does not waste the runs. A target that is not
    reached gives no warning.
    """
    done = [run for row in made for run in row.outcomes.values()]
    if not done:
        return ()
    names = list(dict.fromkeys(name for run in done for name in _names(run)))
    measured = list(dict.fromkeys(name for run in done for each in run.evaluations for name in each.metrics))
    columns = [(metric, metric) for metric in plan.metrics] + [(each.title, each.metric) for each in plan.targets]
    hidden = [title for title, metric in columns if not any(run.shows(metric) for run in done)]
    lacking = [(metric, metric, names) for metric in plan.metrics if not any(row.columns[metric].n for row in made)]
    never = [each for each in plan.targets if not any(run.course(each.metric) for run in done)]
    lacking += [(each.title, each.metric, measured) for each in never]
    items = min((run.gallery.smallest for run in done if run.gallery is not None), default=0)
    return (
        *(
            f"column {title!r} holds only dashes: in a gallery of {items} items every model reaches 1"
            for title in hidden
        ),
        *(
            f"column {title!r} holds only dashes: no run has {metric}{_instead(metric, known)}"
            for title, metric, known in lacking
            if title not in hidden
        ),
    )


def _instead(metric: str, known: Sequence[str]) -> str:
    """Advice for a metric that no run has."""
    if metric.removeprefix("personal.").startswith(_OF_LABELS) and not any(name.startswith("map") for name in known):
        return ", which needs labels, and the data has none"
    return f"; nearest: {', '.join(nearest(metric, known)[:8])}"


def _names(run: FinishedRun) -> list[str]:
    """Names that :meth:`FinishedRun.value` accepts, without those of single silos, of which there may be hundreds."""
    below = [
        f"{key}.{name}"
        for key, value in run.figures.items()
        if isinstance(value, Mapping) and key not in ("metrics", "per_silo")
        for name in value
    ]
    measured = run.evaluations[-1].metrics if run.summary is None or not run.summary.metrics else run.summary.metrics
    return [name for name in (*measured, *below) if run.value(name) is not None]


def _best_columns(
    entry: Entry,
    plan: ComparisonPlan,
    statistics: Mapping[str, Mapping[str, Statistic]],
    custom_metrics: Sequence[Metric],
) -> frozenset[str]:
    if plan.baseline == NO_BASELINE:
        return frozenset()
    peers = [each.name for each in _peers(entry, plan)]
    place = peers.index(entry.name)
    return frozenset(
        column
        for column in statistics[entry.name]
        if place in outcomes.best([statistics[name][column] for name in peers], column, custom_metrics)
    )
