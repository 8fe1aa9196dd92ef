"""The rows of a comparison: statistics over seeds, each row against its baseline, the best at each point."""

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
        entry: what ran.
        chosen: settings chosen on the validation split.
        outcomes: by seed; a run that failed is not there.
        columns: statistics by column.
        best: columns in which no other row of the same point is better.
        against: name of the row the differences are to; None for a baseline.
    """

    entry: Entry
    chosen: tuple[str, ...]
    outcomes: Mapping[int, FinishedRun]
    columns: Mapping[str, Statistic]
    best: frozenset[str]
    against: str | None


def entries_of(plan: ComparisonPlan) -> tuple[Entry, ...]:
    """All rows: those that are run, and version 0 before them where it is asked for."""
    if not plan.zero_shot:
        return plan.entries
    first = plan.entries[0]
    return (Entry(ZERO_SHOT, ZERO_SHOT, first.point, first.file, first.settings), *plan.entries)


def _peers(entry: Entry, plan: ComparisonPlan) -> list[Entry]:
    """The rows an entry is compared with: other methods at its point, or all rows if there is but one method."""
    everything = entries_of(plan)
    if len({each.method for each in plan.entries}) == 1:
        return list(everything)
    return [each for each in everything if each.point == entry.point]


def baselines(plan: ComparisonPlan) -> dict[str, str | None]:
    """The row that each row is compared to, by name; None for one that others are compared to, or nobody is.

    Raises:
        InputError: there is no method or row of the name asked for.
    """
    found: dict[str, str | None] = {}
    everything = entries_of(plan)
    if plan.baseline == NO_BASELINE:
        return dict.fromkeys(entry.name for entry in everything)
    for entry in everything:
        peers = _peers(entry, plan)
        fitting = [each for each in everything if each.name == plan.baseline]
        fitting = fitting or [each for each in peers if plan.baseline in (None, each.method)]
        fitting = [each for each in fitting if each.name != ZERO_SHOT or plan.baseline == ZERO_SHOT]
        if not fitting:
            names = dict.fromkeys(name for each in everything for name in (each.method, each.name))
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
        plan: what is compared.
        chosen: settings chosen, by row.
        finished: outcomes by row and seed.

    Raises:
        InputError: there is no such baseline.
    """
    results = dict(finished)
    if plan.zero_shot:
        results[ZERO_SHOT] = {seed: own.untrained() for seed, own in finished[plan.entries[0].name].items()}
    columns = {name: _columns(own, plan) for name, own in results.items()}
    own_metrics = tuple({metric for own in results.values() for run in own.values() for metric in run.own_metrics})
    against = baselines(plan)
    statistics = {
        name: {
            column: outcomes.statistic(values, columns[base][column] if (base := against[name]) else None)
            for column, values in own.items()
        }
        for name, own in columns.items()
    }
    return tuple(
        Row(
            entry,
            chosen.get(entry.name) or (),
            results[entry.name],
            statistics[entry.name],
            _best_columns(entry, plan, statistics, own_metrics),
            against[entry.name],
        )
        for entry in entries_of(plan)
    )


def _columns(results: Mapping[int, FinishedRun], plan: ComparisonPlan) -> dict[str, dict[int, float]]:
    """Values by column and seed; a run without a value is left out."""
    metrics = {metric: {seed: own.value(metric) for seed, own in results.items()} for metric in plan.metrics}
    times = {target.title: {seed: own.time_to(target) for seed, own in results.items()} for target in plan.targets}
    return {
        column: {seed: value for seed, value in values.items() if value is not None}
        for column, values in {**metrics, **times}.items()
    }


#: What metrics of labels are called.
_OF_LABELS = ("map", "ndcg")


def empty_columns(plan: ComparisonPlan, made: Sequence[Row]) -> tuple[str, ...]:
    """A warning, one line, for each column that no finished run has a value for: what was asked for is no name there.

    The table is there all the same, with dashes in that column: what the runs cost is not to be lost by a wrong name.
    A target that is merely not reached is none of these.
    """
    done = [own for row in made for own in row.outcomes.values()]
    if not done:
        return ()
    names = list(dict.fromkeys(name for own in done for name in _names(own)))
    measured = list(dict.fromkeys(name for own in done for each in own.evaluations for name in each.metrics))
    lacking = [(metric, metric, names) for metric in plan.metrics if not any(row.columns[metric].n for row in made)]
    never = [each for each in plan.targets if not any(own.course(each.metric) for own in done)]
    lacking += [(each.title, each.metric, measured) for each in never]
    return tuple(
        f"column {title!r} holds only dashes: no run has {metric}{_instead(metric, known)}"
        for title, metric, known in lacking
    )


def _instead(metric: str, known: Sequence[str]) -> str:
    """What to ask for in place of a metric no run has."""
    if metric.removeprefix("personal.").startswith(_OF_LABELS) and not any(name.startswith("map") for name in known):
        return ", which needs labels, and the data has none"
    return f"; nearest: {', '.join(nearest(metric, known)[:8])}"


def _names(own: FinishedRun) -> list[str]:
    """What :meth:`FinishedRun.value` finds; no silo by its name, of which there may be hundreds."""
    below = [
        f"{key}.{name}"
        for key, value in own.figures.items()
        if isinstance(value, Mapping) and key not in ("metrics", "per_silo")
        for name in value
    ]
    measured = own.evaluations[-1].metrics if own.summary is None else own.summary.metrics
    return [name for name in (*measured, *below) if own.value(name) is not None]


def _best_columns(
    entry: Entry,
    plan: ComparisonPlan,
    statistics: Mapping[str, Mapping[str, Statistic]],
    own_metrics: Sequence[Metric],
) -> frozenset[str]:
    if plan.baseline == NO_BASELINE:
        return frozenset()
    peers = [each.name for each in _peers(entry, plan)]
    place = peers.index(entry.name)
    return frozenset(
        column
        for column in statistics[entry.name]
        if place in outcomes.best([statistics[name][column] for name in peers], column, own_metrics)
    )
