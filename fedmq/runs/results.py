"""What finished runs came to: metrics by name, the time they took to get somewhere, and statistics over seeds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedmq.errors import InputError
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.evaluation.metrics import Metric, higher_is_better
from fedmq.runs.run_records import AnyMetricsLine, EvaluationLine, MergeLine, MetricsLine, PersonalLine, RunSummary
from fedmq.storage.json_files import read_json, read_lines
from fedmq.storage.run_folder import RunFolder

CONFIDENCE = 0.95
_FINISHED = "the folder of a finished run"


def read_summary(folder: RunFolder) -> RunSummary:
    """``summary.json`` of a finished run.

    Raises:
        InputError: there is none, or it is no run's summary.
    """
    if not folder.summary.is_file():
        raise InputError(str(folder.root), "no summary.json in it", _FINISHED)
    return read_json(folder.summary, RunSummary, "a run's summary")


def read_metrics(folder: RunFolder) -> list[MetricsLine]:
    """``metrics.jsonl``: a line per merge and per evaluation.

    Where silos' own models are measured during the run (``evaluation.personal_every``), also a line for each time.

    Raises:
        InputError: a line is none of them.
    """
    allowed = "a line of a merge or an evaluation"
    return [line.root for line in read_lines(folder.metrics, AnyMetricsLine, allowed)]


def made_otherwise(made: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """What runs were not all made with (``versions_of`` of their summaries), by name: of each run.

    Other versions of torch and other processors add up in another order, so the last bits of the weights differ, and
    with them every digest, although nothing was tampered with.
    """
    names = dict.fromkeys(name for own in made for name in own)
    values = {name: tuple(own.get(name, "not said") for own in made) for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation of a run.

    Args:
        version: merges before it.
        now: the run's time of that version [s].
        metrics: name to value.
        fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
        per_silo_mean: name to the mean over silos, each on its own share.
    """

    version: int
    now: float
    metrics: Mapping[str, float]
    fairness: Mapping[str, float]
    per_silo_mean: Mapping[str, float]


@dataclass(frozen=True)
class Personal:
    """One measurement of the silos' own models.

    Args:
        now: the run's time of that version [s].
        line: what was measured.
    """

    now: float
    line: PersonalLine


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Args:
        folder: where it lies.
        summary: its ``summary.json``; None of a run as of version 0, which is told by its first evaluation alone.
        evaluations: in order of versions.
        personal: measurements of the silos' own models that are on file, in order of versions.
        own_metrics: entries of the user's own metrics that it measured.
    """

    folder: RunFolder
    summary: RunSummary | None
    evaluations: tuple[EvaluationResult, ...]
    personal: tuple[Personal, ...] = ()
    own_metrics: tuple[Metric, ...] = ()

    @cached_property
    def figures(self) -> Mapping[str, object]:
        """What it came to, by the keys of the summary."""
        if self.summary is not None:
            return self.summary.plain()
        first = self.evaluations[0]
        return {"metrics": first.metrics, "fairness": first.fairness, "per_silo_mean": first.per_silo_mean}

    def value(self, metric: str) -> float | None:
        """A metric by name: ``mean_r1``, or a place in the summary as ``fairness.worst_r1`` or ``bytes.up``.

        Counts by kind (``bytes.up``) are added up. None if the run has no such number.
        """
        return _number(self.figures if "." in metric else self.figures["metrics"], metric)

    def course(self, metric: str) -> tuple[tuple[int, float, float], ...]:
        """A metric's course, as far as it was measured during the run: version, time [s] and value of each time.

        Of the evaluations those of ``metrics``, ``fairness.*`` and ``per_silo_mean.*`` are known, of the silos' own
        models ``personal*``.
        """
        part, _, name = metric.partition(".")
        found: list[tuple[int, float, float | None]]
        if metric.startswith("personal"):
            found = [(own.line.version, own.now, _number(own.line.plain(), metric)) for own in self.personal]
        elif part in ("fairness", "per_silo_mean"):
            found = [(each.version, each.now, getattr(each, part).get(name)) for each in self.evaluations]
        else:
            found = [(each.version, each.now, each.metrics.get(metric)) for each in self.evaluations]
        return tuple((version, now, value) for version, now, value in found if value is not None)

    def untrained(self) -> FinishedRun:
        """The same run as of version 0: what the frozen encoders and the initial parameters do by themselves."""
        return FinishedRun(self.folder, None, self.evaluations[:1], own_metrics=self.own_metrics)

    def time_to(self, target: Target) -> float | None:
        """The run's time [s] of the first evaluation that reaches a target; None if none does."""
        sign = 1 if higher_is_better(target.metric, self.own_metrics) else -1
        reached = (now for _, now, value in self.course(target.metric) if sign * (value - target.value) >= 0)
        return next(reached, None)


def _number(figures: object, metric: str) -> float | None:
    """The number at a place such as ``fairness.worst_r1``, counts by kind added up; None if there is no such number."""
    found = figures
    for part in metric.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping) and found and all(isinstance(each, int) for each in found.values()):
        found = sum(found.values())
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


@dataclass(frozen=True)
class Target:
    """A value that a metric of the evaluations is to reach."""

    metric: str
    value: float

    @property
    def title(self) -> str:
        """Of its column."""
        return f"seconds to {self.metric} {self.value:g}"


def read(folder: RunFolder) -> FinishedRun:
    """Read a finished run.

    Raises:
        InputError: it is not finished, or its files are no run's.
    """
    summary, lines = read_summary(folder), read_metrics(folder)
    times = {0: 0.0, **{line.version: line.now for line in lines if isinstance(line, MergeLine)}}
    evaluations, personal = dict[int, EvaluationResult](), dict[int, Personal]()
    for line in lines:
        version = line.version
        if version not in times:
            article = "an evaluation" if isinstance(line, EvaluationLine) else "a measurement"
            raise InputError(str(folder.metrics), f"{article} of version {version}", "one of a version merged")
        if isinstance(line, EvaluationLine):
            shares = line.per_silo
            mean = means(shares) if shares else {}
            evaluations[version] = EvaluationResult(version, times[version], line.metrics, fairness_of(shares), mean)
        elif isinstance(line, PersonalLine):
            personal[version] = Personal(times[version], line)
    if not evaluations:
        raise InputError(str(folder.metrics), "no evaluation", _FINISHED)
    ordered = tuple(evaluations[version] for version in sorted(evaluations))
    measured = tuple(personal[version] for version in sorted(personal))
    return FinishedRun(folder, summary, ordered, measured, tuple(summary.own_metrics.values()))


def unknown_metric(metric: str, outcome: FinishedRun) -> InputError:
    """That no run has a metric, with those that an outcome has."""
    last = outcome.evaluations[-1] if outcome.summary is None else outcome.summary
    known = ", ".join((*last.metrics, *(f"fairness.{name}" for name in last.fairness)))
    return InputError("--metric", metric, f"{known}, bytes.up, bytes.down, seconds.virtual and the like")


@dataclass(frozen=True)
class Statistic:
    """A column of a row.

    Args:
        n: seeds that have a value.
        mean: over seeds; nan without any.
        std: sample standard deviation; nan below two seeds.
        difference: mean paired difference to the baseline over the seeds that both have; nan without a baseline.
        low: lower end of its 95 % t-interval; nan below two seeds.
        high: upper end.
        pairs: seeds behind the difference.
    """

    n: int
    mean: float
    std: float
    difference: float
    low: float
    high: float
    pairs: int


def statistic(values: Mapping[int, float], baseline: Mapping[int, float] | None) -> Statistic:
    """Mean, spread, and the paired difference to a baseline that ran with the same seeds.

    Args:
        values: by seed.
        baseline: by seed; None for the baseline itself.
    """
    import numpy as np  # noqa: PLC0415
    from scipy import stats  # noqa: PLC0415 - a second that only a comparison needs

    nan = math.nan
    own = np.array([values[seed] for seed in sorted(values)])
    mean = float(own.mean()) if len(own) else nan
    std = float(own.std(ddof=1)) if len(own) > 1 else nan
    common = sorted(set(values) & set(baseline or {}))
    if baseline is None or not common:
        return Statistic(len(own), mean, std, nan, nan, nan, 0)
    pairs = np.array([(values[seed], baseline[seed]) for seed in common])
    difference = float((pairs[:, 0] - pairs[:, 1]).mean())
    if len(common) < 2:
        return Statistic(len(own), mean, std, difference, nan, nan, len(common))
    with warnings.catch_warnings():
        # Equal differences have no spread: scipy then warns about precision, and the interval is the point it is.
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = stats.ttest_rel(pairs[:, 0], pairs[:, 1]).confidence_interval(CONFIDENCE)
    return Statistic(len(own), mean, std, difference, float(interval.low), float(interval.high), len(common))


def best(statistics: Sequence[Statistic], column: str, own: Sequence[Metric] = ()) -> set[int]:
    """Which of several rows are best in a column; rows with fewer seeds than the others do not take part.

    Args:
        statistics: of the rows.
        column: a metric or a place in the summary.
        own: entries of the user's own metrics.

    Returns:
        Indices; none if there is nothing to compare.
    """
    most = max((each.n for each in statistics), default=0)
    means = {index: each.mean for index, each in enumerate(statistics) if each.n == most and most > 0}
    if len(means) < 2:
        return set()
    top = max(means.values()) if higher_is_better(column, own) else min(means.values())
    return {index for index, mean in means.items() if mean == top}
