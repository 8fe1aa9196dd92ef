"""Results of finished runs: metrics by name, time to a target value, and digests of files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError

from fedmq.clock import Clock
from fedmq.errors import InputError
from fedmq.evaluation.metrics import Metric, higher_is_better
from fedmq.evaluation.recall import fairness_of, means
from fedmq.profiling import span
from fedmq.runs.result_limits import Gallery, gallery_of
from fedmq.runs.run_records import (
    AnyMetricsLine,
    EvaluationLine,
    MergeLine,
    MetricsLine,
    OwnHeldOutLine,
    PersonalLine,
    RunSummary,
    SiloSummary,
)
from fedmq.storage.json_files import read_json, read_lines
from fedmq.storage.regular_files import AppendedLines, open_regular
from fedmq.storage.run_folder import RunFolder, append_line

_FINISHED = "the folder of a finished run"


def read_summary(folder: RunFolder) -> RunSummary:
    """Read ``summary.json`` of a finished run.

    Raises:
        InputError: it does not exist or is invalid.
    """
    if not folder.summary.is_file():
        raise InputError(str(folder.root), "no summary.json in it", _FINISHED)
    return read_json(folder.summary, RunSummary, "a run's summary")


def read_metrics(folder: RunFolder) -> list[MetricsLine]:
    """Read ``metrics.jsonl``: a line per merge, per evaluation, and per evaluation of personal models.

    Raises:
        InputError: a line is invalid.
    """
    allowed = "a line of a merge or an evaluation"
    return [line.root for line in read_lines(folder.metrics, AnyMetricsLine, allowed)]


def new_metrics(appended: AppendedLines) -> tuple[list[MetricsLine], bool]:
    """The valid lines that a run has appended to ``metrics.jsonl``, and whether the file was cut before."""
    lines, (texts, cut) = list[MetricsLine](), appended.new()
    for text in texts:
        with contextlib.suppress(ValidationError):
            lines.append(AnyMetricsLine.model_validate_json(text).root)
    return lines, cut


@span("disk")
def append_metrics(folder: RunFolder, line: MetricsLine, clock: Clock) -> None:
    """Append a line to ``metrics.jsonl``, with the real date and time; a checkpoint waits until it is on disk.

    Raises:
        InputError: the file cannot be written.
        DiskError: the disk is full or broken.
    """
    append_line(folder.metrics, line.model_copy(update={"wall": clock.utc()}).plain())


def with_own_figures(summary: RunSummary) -> RunSummary:
    """A summary for display: without an evaluator, the metrics are those on the silos' own held-out items."""
    own = summary.own_heldout
    if own is None or summary.metrics:
        return summary
    per_silo = {
        name: SiloSummary.model_validate(
            {**entry.model_dump(), **(own.per_silo[name].figures if name in own.per_silo else {})}
        )
        for name, entry in summary.per_silo.items()
    }
    measures = {"metrics": own.metrics, "fairness": own.fairness, "per_silo_mean": own.per_silo_mean}
    return summary.model_copy(update={**measures, "per_silo": per_silo})


def shared_evaluations(lines: Sequence[MetricsLine]) -> list[EvaluationLine]:
    """The evaluations of the shared model: the evaluator's, or without one those of the silos on their own items."""
    return [line for line in lines if isinstance(line, EvaluationLine)] or [
        EvaluationLine(
            kind="evaluation",
            version=line.version,
            metrics=line.metrics,
            per_silo={name: measured.figures for name, measured in line.per_silo.items()},
        )
        for line in lines
        if isinstance(line, OwnHeldOutLine)
    ]


def made_otherwise(made: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Versions and hardware (``versions_of`` in summaries) in which runs differ: value of each run, by name.

    Other versions of torch and other processors sum in another order, so that the last bits of the weights, and with
    them every digest, differ without any tampering.
    """
    names = dict.fromkeys(name for versions in made for name in versions)
    values = {name: tuple(versions.get(name, "not recorded") for versions in made) for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


class Evaluated(NamedTuple):
    """What was measured of one version: its number, the run's time [s], and figures by the keys of the summary."""

    version: int
    now: float
    figures: Mapping[str, object]  # metrics, fairness, per_silo_mean; and those of personal models


@dataclass(frozen=True)
class FinishedRun:
    """A finished run."""

    folder: RunFolder
    summary: RunSummary | None  # its ``summary.json``; None of :meth:`untrained` and :meth:`with_figures`
    # What was measured, in order of versions; without an evaluator on the silos' own held-out items.
    evaluations: tuple[Evaluated, ...]
    custom_metrics: tuple[Metric, ...] = ()  # entries of the user-defined metrics that it measured
    gallery: Gallery | None = None  # the gallery of its queries; None if unknown

    def shows(self, metric: str) -> bool:
        """Whether a metric says something about the model: no recall that every model reaches in so small a gallery."""
        return self.gallery is None or not self.gallery.certain(metric)

    @cached_property
    def figures(self) -> Mapping[str, object]:
        """Its results, by the keys of the summary."""
        return self.evaluations[0].figures if self.summary is None else with_own_figures(self.summary).plain()

    def value(self, metric: str) -> float | None:
        """A metric by name, such as ``mean_r1``, or a summary value by path, such as ``fairness.worst_r1``.

        Counts by kind (``bytes.up``) are summed. None if the run has no such number.
        """
        return _number(self.figures, metric)

    def course(self, metric: str) -> tuple[tuple[int, float, float], ...]:
        """A metric over the run: version, the run's time [s] and value of each evaluation that has it."""
        points = ((each.version, each.now, _number(each.figures, metric)) for each in self.evaluations)
        return tuple((version, now, value) for version, now, value in points if value is not None)

    def untrained(self) -> FinishedRun:
        """The same run at version 0: the frozen encoders with the initial parameters."""
        first = next(each for each in self.evaluations if "metrics" in each.figures)
        shared = {key: value for key, value in first.figures.items() if not key.startswith("personal")}
        return replace(self, summary=None, evaluations=(first._replace(figures=shared),))

    def with_figures(self, figures: Mapping[str, object]) -> FinishedRun:
        """Replace the run's evaluations by the figures of a model that it did not train, e.g. a yardstick's.

        They count as an evaluation of version 0 at time 0.
        """
        return replace(self, summary=None, evaluations=(Evaluated(0, 0.0, figures),))

    def time_to(self, target: Target) -> float | None:
        """The run's time [s] of the first evaluation that reaches a target; None if none does."""
        sign = 1 if higher_is_better(target.metric, self.custom_metrics) else -1
        reached = (now for _, now, value in self.course(target.metric) if sign * (value - target.value) >= 0)
        return next(reached, None)


def _number(figures: Mapping[str, object], metric: str) -> float | None:
    """A metric, or the number at a path such as ``fairness.worst_r1``, counts by kind summed; None without one."""
    value: object = figures
    for part in metric.split(".") if "." in metric else ("metrics", metric):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and value and all(isinstance(count, int) for count in value.values()):
        value = sum(value.values())
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Target:
    """A target value of a metric of the evaluations."""

    metric: str
    value: float

    @property
    def title(self) -> str:
        """Title of its column."""
        return f"seconds to {self.metric} {self.value:g}"


def read(folder: RunFolder) -> FinishedRun:
    """Read a finished run.

    Raises:
        InputError: it is not finished, or its files are invalid.
    """
    summary, lines = read_summary(folder), read_metrics(folder)
    times = {0: 0.0, **{line.version: line.now for line in lines if isinstance(line, MergeLine)}}
    if unknown := [line.version for line in lines if line.version not in times]:
        raise InputError(str(folder.metrics), f"an evaluation of version {unknown[0]}", "one of a merged version")
    shared = {
        line.version: {
            "metrics": line.metrics,
            "fairness": fairness_of(line.per_silo),
            "per_silo_mean": means(line.per_silo) if line.per_silo else {},
        }
        for line in shared_evaluations(lines)
    }
    if not shared:
        raise InputError(str(folder.metrics), "no evaluation", _FINISHED)
    personal = {line.version: line.plain() for line in lines if isinstance(line, PersonalLine)}
    evaluations = tuple(
        Evaluated(version, times[version], {**shared.get(version, {}), **personal.get(version, {})})
        for version in sorted(shared.keys() | personal.keys())
    )
    return FinishedRun(folder, summary, evaluations, tuple(summary.custom_metrics.values()), gallery_of(summary))


def unknown_metric(metric: str, outcome: FinishedRun) -> InputError:
    """The error for a metric that no run has; it lists the metrics of one run."""
    parts = (("", outcome.figures["metrics"]), ("fairness.", outcome.figures["fairness"]))
    known = ", ".join(f"{prefix}{name}" for prefix, names in parts if isinstance(names, Mapping) for name in names)
    return InputError("--metric", metric, f"{known}, bytes.up, bytes.down, seconds.virtual and similar paths")


#: Files of a run folder that nothing changes after the run has ended, unless it is resumed or extended.
FILES = (
    "scenario.yaml",
    "agreement.json",
    "metrics.jsonl",
    "model/config.json",
    "model/model.safetensors",
    "model/README.md",
)
SUMMARY = "summary.json"
#: Maximum size of such a file [bytes], that of the largest model and more.
_LARGEST = 1 << 31
#: Keys of a summary that the command completes after the coordinator has ended: real times, and memory.
_COMPLETED_LATER = {"seconds", "processes"}


def result_digest(folder: RunFolder, name: str) -> str:
    """SHA-256 (hex) of a file of :data:`FILES`, or of the summary without real times and memory.

    Raises:
        InputError: it cannot be read.
    """
    if name != SUMMARY:
        with open_regular(folder.root / name, "a file of a finished run", _LARGEST) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    summary = read_summary(folder)
    plain = summary.plain()
    kept = {key: value for key, value in plain.items() if key not in _COMPLETED_LATER}
    kept["virtual"] = summary.seconds.virtual
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def result_digests(folder: RunFolder) -> dict[str, str]:
    """The digests of all files of a finished run that are there, by name."""
    return {name: result_digest(folder, name) for name in (*FILES, SUMMARY) if (folder.root / name).is_file()}
