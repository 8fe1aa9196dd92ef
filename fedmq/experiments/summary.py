"""The columns and rows of a comparison: which columns runs can have, and the statistics of each row over seeds."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedmq.errors import InputError
from fedmq.evaluation.custom_metrics import measures_of
from fedmq.evaluation.metrics import Metric, higher_is_better, is_known, known_names, metric_of
from fedmq.evaluation.recall import fairness_of
from fedmq.experiments.grid import NO_BASELINE, ComparisonPlan, Entry, Resolve, resolved_runs
from fedmq.runs.results import FinishedRun, Target
from fedmq.runs.run_records import RunSummary
from fedmq.storage.json_files import Stored
from fedmq.text import did_you_mean, nearest

ZERO_SHOT = "zero-shot"
#: Linear yardsticks (:mod:`fedmq.experiments.yardstick`), each with its description in the notes of a table.
YARDSTICKS: Mapping[str, str] = {
    "classes": "a logistic regression of the classes on each modality's features, fitted to the pooled pairs",
    "pairs": "canonical correlation analysis of both modalities' features, fitted to the pooled pairs",
}
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Statistic:
    """A column of a row."""

    n: int  # number of seeds with a value
    mean: float  # over seeds; NaN without any
    std: float  # sample standard deviation; NaN below two seeds
    difference: float  # mean paired difference to the baseline over their common seeds; NaN without a baseline
    low: float  # lower bound of its 95 % t-interval; NaN below two seeds
    high: float  # upper bound; likewise
    pairs: int  # number of common seeds
    p: float = math.nan  # p-value of a paired t-test of the difference; NaN below two seeds
    holm: float = math.nan  # p with Holm's correction for all rows of the column that have a baseline


#: Number of seeds from which a difference may be claimed, and the significance level of the corrected test.
ENOUGH_SEEDS, LEVEL = 5, 0.05


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction of p-values for multiple comparisons (Holm 1979); NaN stands for no comparison."""
    tested = sorted((p, place) for place, p in enumerate(p_values) if not math.isnan(p))
    corrected, least = list(p_values), 0.0
    for rank, (p, place) in enumerate(tested):
        least = corrected[place] = max(least, min(1.0, (len(tested) - rank) * p))
    return corrected


def statistic(values: Mapping[int, float], baseline: Mapping[int, float] | None) -> Statistic:
    """Mean, standard deviation, and paired difference to a baseline with the same seeds."""
    from scipy import stats  # noqa: PLC0415 - takes a second to import

    sample = np.array([values[seed] for seed in sorted(values)])
    common = sorted(values.keys() & (baseline or {}).keys())
    differences = np.array([values[seed] - (baseline or {})[seed] for seed in common])
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # too few values give NaN
        middle, error = differences.mean(), differences.std(ddof=1) / np.sqrt(len(common))
        half = stats.t.ppf((1 + _CONFIDENCE) / 2, len(common) - 1) * error
        p = 2 * stats.t.sf(abs(middle) / error, len(common) - 1) if middle else 1.0 if len(common) > 1 else math.nan
        figures = (sample.mean(), sample.std(ddof=1), middle, middle - half, middle + half)
    mean, std, difference, low, high = map(float, figures)
    return Statistic(len(sample), mean, std, difference, low, high, len(common), float(p))


def best(values: Sequence[Mapping[int, float]], column: str, custom: Sequence[Metric] = ()) -> set[int]:
    """The row that is better than every other one beyond chance: each paired 95 % interval leaves out 0.

    Rows with fewer seeds than others are not considered.

    Returns:
        Its index; empty if there is no such row.
    """
    most = max(map(len, values), default=0)
    rows = {index: by_seed for index, by_seed in enumerate(values) if len(by_seed) == most and most > 0}
    sign = 1 if higher_is_better(column, custom) else -1
    top = max(rows, key=lambda index: sign * sum(rows[index].values()), default=None)
    if top is None or len(rows) < 2:
        return set()
    against = [statistic(rows[top], other) for index, other in rows.items() if index != top]
    return {top} if all(sign * (each.low if sign > 0 else each.high) > 0 for each in against) else set()


@dataclass(frozen=True)
class Row:
    """One row of the result."""

    entry: Entry
    chosen: tuple[str, ...]  # settings selected on the validation split
    outcomes: Mapping[int, FinishedRun]  # finished runs by seed, without failed ones
    columns: Mapping[str, Statistic]  # statistics by column
    best: frozenset[str]  # columns in which it is better than every other row at the same point, beyond chance
    against: str | None  # name of the row's baseline; None if it has none
    # Its runs whose training diverged, candidates included; neither chosen nor in the statistics.
    diverged: tuple[str, ...] = ()


def yardstick_row(kind: str) -> str:
    """Name of a yardstick's row."""
    return f"yardstick ({kind})"


def references_of(plan: ComparisonPlan) -> tuple[str, ...]:
    """Names of the requested rows that need no training: zero-shot, then the yardsticks."""
    return (*((ZERO_SHOT,) if plan.zero_shot else ()), *map(yardstick_row, plan.yardstick))


def entries_of(plan: ComparisonPlan) -> tuple[Entry, ...]:
    """All rows: first those that need no training, with the first entry's data, then those of the plan."""
    first = plan.entries[0]
    references = (Entry(name, name, first.point, first.file, first.settings) for name in references_of(plan))
    return (*references, *plan.entries)


def _peers(entry: Entry, plan: ComparisonPlan) -> list[Entry]:
    """The rows with which a row is compared: all methods at its point, or all rows if there is only one method."""
    all_entries = entries_of(plan)
    if len({other.method for other in plan.entries}) == 1:
        return list(all_entries)
    return [other for other in all_entries if other.point == entry.point]


def baselines(plan: ComparisonPlan) -> dict[str, str | None]:
    """The baseline of each row, by name; None for baselines, and without any baseline.

    Raises:
        InputError: no method or row has the name in ``plan.baseline``.
    """
    against: dict[str, str | None] = {}
    all_entries, references = entries_of(plan), references_of(plan)
    if plan.baseline == NO_BASELINE:
        return dict.fromkeys(entry.name for entry in all_entries)
    for entry in all_entries:
        peers = _peers(entry, plan)
        fitting = [other for other in all_entries if other.name == plan.baseline]
        fitting = fitting or [other for other in peers if plan.baseline in (None, other.method)]
        fitting = [other for other in fitting if other.name not in references or other.name == plan.baseline]
        if not fitting:
            names = dict.fromkeys(name for other in all_entries for name in (other.method, other.name))
            allowed = ", ".join([*names, NO_BASELINE])
            raise InputError("--baseline", plan.baseline, allowed)
        against[entry.name] = None if fitting[0].name == entry.name else fitting[0].name
    return against


def rows(
    plan: ComparisonPlan,
    chosen: Mapping[str, tuple[str, ...] | None],
    finished: Mapping[str, Mapping[int, FinishedRun]],
    yardsticks: Mapping[str, Mapping[int, Mapping[str, object]]] | None = None,
) -> tuple[Row, ...]:
    """Statistics of every row against its baseline.

    A row has the settings selected on the validation split, and its finished runs by seed. ``yardsticks`` has the
    figures of each of the plan's yardsticks, by its name and seed.

    Raises:
        InputError: the baseline does not exist.
    """
    results = dict(finished)
    first = finished[plan.entries[0].name]
    if plan.zero_shot:
        results[ZERO_SHOT] = {seed: run.untrained() for seed, run in first.items()}
    for kind in plan.yardstick:
        by_seed = (yardsticks or {}).get(kind, {})
        results[yardstick_row(kind)] = {
            seed: run.with_figures(by_seed[seed]) for seed, run in first.items() if seed in by_seed
        }
    columns = {name: _columns(runs, plan) for name, runs in results.items()}
    custom_metrics = tuple(
        {metric for runs in results.values() for run in runs.values() for metric in run.custom_metrics}
    )
    against = baselines(plan)
    statistics = {
        name: {
            column: statistic(values, columns[base][column] if (base := against[name]) else None)
            for column, values in by_column.items()
        }
        for name, by_column in columns.items()
    }
    correct(statistics)
    return tuple(
        Row(
            entry,
            chosen.get(entry.name) or (),
            results[entry.name],
            statistics[entry.name],
            _best_columns(entry, plan, columns, custom_metrics),
            against[entry.name],
        )
        for entry in entries_of(plan)
    )


def correct(statistics: Mapping[str, dict[str, Statistic]]) -> None:
    """Fill in the corrected p-values: in each column, the rows that have a baseline are one family of comparisons."""
    for column in dict.fromkeys(column for by_column in statistics.values() for column in by_column):
        corrected = holm([by_column[column].p for by_column in statistics.values()])
        for by_column, value in zip(statistics.values(), corrected, strict=True):
            by_column[column] = replace(by_column[column], holm=value)


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


def empty_columns(plan: ComparisonPlan, made: Sequence[Row]) -> tuple[str, ...]:
    """A one-line warning for each column whose metric no finished run has.

    The table is printed with dashes in that column. A target that is not reached gives no warning.
    """
    done = [run for row in made for run in row.outcomes.values()]
    if not done:
        return ()
    items = min((run.gallery.smallest for run in done if run.gallery is not None), default=0)
    metrics = [(metric, metric, any(row.columns[metric].n for row in made)) for metric in plan.metrics]
    targets = [(target.title, target.metric, any(run.course(target.metric) for run in done)) for target in plan.targets]
    lines = []
    for title, metric, measured in (*metrics, *targets):
        if not any(run.shows(metric) for run in done):
            lines.append(f"column {title!r} holds only dashes: in a gallery of {items} items every model reaches 1")
        elif not measured:
            lines.append(f"column {title!r} holds only dashes: no run has {metric}")
    return tuple(lines)


def _best_columns(
    entry: Entry,
    plan: ComparisonPlan,
    values: Mapping[str, Mapping[str, Mapping[int, float]]],
    custom_metrics: Sequence[Metric],
) -> frozenset[str]:
    if plan.baseline == NO_BASELINE:
        return frozenset()
    peers = [peer.name for peer in _peers(entry, plan)]
    place = peers.index(entry.name)
    return frozenset(
        column
        for column in values[entry.name]
        if place in best([values[name][column] for name in peers], column, custom_metrics)
    )


# ----------------------------------------------------------------------------------------------------------- columns
_METRIC = re.compile(r"\w+(\.[\w-]+)*")
#: Parts of the summary that evaluations during a run have, too; with names of metrics below, or of fairness.
EVALUATED = ("fairness", "per_silo_mean", "personal", "personal_fairness", "personal_per_silo_mean")


def allowed_instead(path: str, known: Collection[str]) -> str | None:
    """What is allowed instead of a path that no summary has; None for a path that a summary may have."""
    head, _, name = path.partition(".")
    if head not in RunSummary.model_fields:
        return f"a value of the summary, e.g. {', '.join(nearest(head, RunSummary.model_fields))}"
    if head in ("fairness", "personal_fairness"):
        names: Collection[str] = fairness_of({})
    elif head in ("metrics", "personal", "per_silo_mean", "personal_per_silo_mean"):
        names = known
    else:
        kind = RunSummary.model_fields[head].annotation
        if kind in (bool, float, int, str):
            return f"a number below a part of the summary; {head} has no parts"
        if not (isinstance(kind, type) and issubclass(kind, Stored)):
            return None
        first, names = name.partition(".")[0], kind.model_fields
        return None if first in names else f"{head} with one of {', '.join(names)}"
    return None if name in names else f"{head} with one of {', '.join(nearest(name, names))}"


def parse_metrics(text: str) -> tuple[str, ...]:
    """Read ``mean_r1,fairness.worst_r1``.

    Raises:
        InputError: one is not a valid name.
    """
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if not _METRIC.fullmatch(part):
            raise InputError("--metric", part, "names such as mean_r1, fairness.worst_r1, bytes.up, seconds.virtual")
    return tuple(dict.fromkeys(parts))


def parse_target(text: str) -> Target:
    """Read ``mean_r10=0.5``.

    Raises:
        InputError: the text has another form.
    """
    metric, _, value = text.partition("=")
    try:
        target = float(value)
        if not math.isfinite(target):
            raise ValueError
        return Target(metric, target)
    except ValueError:
        raise InputError("--target", text, "metric=value, e.g. mean_r10=0.5") from None


def parse_yardsticks(kinds: Sequence[str]) -> tuple[str, ...]:
    """Check the requested yardsticks; a repeated one counts once.

    Raises:
        InputError: one does not exist.
    """
    for kind in kinds:
        if kind not in YARDSTICKS:
            raise InputError("--yardstick", kind, " or ".join(YARDSTICKS))
    return tuple(dict.fromkeys(kinds))


def check_across(plan: ComparisonPlan) -> None:
    """Refuse ``--across`` with a key that is not varied.

    Raises:
        InputError: no row has such a varied key, or it is the method.
    """
    varied = dict.fromkeys(key for entry in plan.entries for key, _ in entry.point)
    if plan.across is not None and plan.across not in varied:
        allowed = " or ".join(varied) or "a key that --vary has, other than protocol"
        raise InputError("--across", plan.across, allowed)


def check_metrics(plan: ComparisonPlan, resolve: Resolve) -> None:
    """Refuse columns and targets that no run of the plan can have, before hours of computation.

    Names with a dot are paths in the summary; of those, parts that depend on the data or the method are not checked.

    Raises:
        InputError: there is no such metric; the error suggests similar ones. Or no metric reaches the target's value.
    """
    requested = [
        *(("--metric", name) for name in plan.metrics),
        *(("--target", target.metric) for target in plan.targets),
    ]
    evaluations = dict.fromkeys(run.scenario.evaluation for run in resolved_runs(plan, resolve))
    known = dict.fromkeys(
        name for evaluation in evaluations for name in known_names(evaluation, measures_of(evaluation))
    )
    for option, name in requested:
        if "." not in name and name not in known:
            more = "cut-offs as evaluation.map_at and evaluation.ndcg_at name them, folds with evaluation.fold_size"
            listed = f"a metric, e.g. {', '.join(nearest(name, known))}; {more}"
            hint = did_you_mean(name, known)
            raise InputError(option, name, f"{listed}; {hint}" if hint else listed)
        if "." in name and (allowed := allowed_instead(name, known)):
            raise InputError(option, name, allowed)
    for target in plan.targets:
        name, text = target.metric, f"{target.metric}={target.value:g}"
        if "." in name and name.partition(".")[0] not in EVALUATED:
            raise InputError(
                "--target", text, f"a metric of evaluations, e.g. mean_r1, or below {', '.join(EVALUATED)}"
            )
        if is_known(name) and not (metric := metric_of(name)).low <= target.value <= metric.high:
            raise InputError("--target", text, f"a value from {metric.low:g} to {metric.high:g}")
