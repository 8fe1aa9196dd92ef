"""Results of runs: metrics by name, time to a target value, digests of files, and what limits what a result means."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import ValidationError

from fedmq.clock import Clock
from fedmq.errors import InputError
from fedmq.evaluation.metrics import Metric, higher_is_better, metric_of, shown
from fedmq.evaluation.recall import fairness_of, means
from fedmq.profiling import span
from fedmq.runs.run_records import (
    AnyMetricsLine,
    EvaluatedItems,
    EvaluationLine,
    MergeLine,
    MetricsLine,
    OwnHeldOut,
    OwnHeldOutLine,
    PersonalLine,
    RunSummary,
    SiloSummary,
)
from fedmq.runs.status import StatusFile
from fedmq.storage.json_files import read_json, read_lines
from fedmq.storage.regular_files import AppendedLines, open_regular
from fedmq.storage.run_folder import RunFolder, append_line
from fedmq.text import counted, enumerated, first_few, printable, spread
from fedmq.wire.messages import EVALUATOR

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


#: Galleries with fewer items give coarse metrics.
COARSE = 100
_RECALL = re.compile(r"(?P<way>i2t|t2i|mean)_r(?P<k>\d+)")


@dataclass(frozen=True)
class Gallery:
    """The items that queries retrieve from."""

    items: str  # what was evaluated, in words, e.g. ``5 test images, 5 captions``
    images: int  # number of images
    captions: int | None = None  # number of captions; None if unknown, then there is at least one for each image
    # Queries of the direction with fewer of them; those of all silos together where each has its own gallery. None if
    # they are the items of the gallery.
    queries: int | None = None

    @property
    def smallest(self) -> int:
        """Size of the smaller gallery of the two directions."""
        return self.images if self.captions is None else min(self.images, self.captions)

    @property
    def step(self) -> float:
        """Change of mean R@1, the mean of both directions, if one more query retrieves the right item first."""
        return 1 / (2 * max(1, self.smallest if self.queries is None else self.queries))

    def uncertainty(self, recall: float) -> float:
        """Standard error of a mean R@1, as if all queries of both directions were independent; at least ``step``.

        The variance of a proportion p of n queries is p (1 - p) / n; n is twice the queries of the direction that has
        fewer, because captions of one image are not independent.
        """
        return max(self.step, math.sqrt(max(0.0, recall * (1 - recall)) * self.step))

    def certain(self, name: str) -> bool:
        """Whether a metric is recall@k with k at least the size of the gallery, which is 1 for any model."""
        match = _RECALL.fullmatch(name.rpartition(".")[2])
        if match is None:
            return False
        captions = self.images if self.captions is None else self.captions
        sizes = {"i2t": captions, "t2i": self.images, "mean": self.smallest}
        return int(match["k"]) >= sizes[match["way"]]

    def remarks(self, values: Mapping[str, float]) -> list[str]:
        """Sentences on recalls that are not shown, and on coarse metrics; empty for a large gallery."""
        sentences = []
        hidden = list(dict.fromkeys(metric.heading for metric in shown(values) if self.certain(metric.name)))
        if hidden:
            sentences.append(
                f"{' and '.join(hidden)} {'is' if len(hidden) == 1 else 'are'} not shown: "
                f"with {counted(self.smallest, 'item')} to retrieve from, any model reaches 1"
            )
        if self.smallest < COARSE:
            sentences.append(
                f"few items ({self.items}): a single query changes the R@1 of its direction by {2 * self.step:.2g}, "
                f"and the mean of both directions by {self.step:.2g}"
            )
        return sentences


def gallery_of(summary: RunSummary) -> Gallery | None:
    """The gallery of a run's main metrics: the evaluator's, or without one the silos'; None if unknown."""
    items = summary.evaluated
    if items is None:
        return None if summary.own_heldout is None else own_gallery(summary.own_heldout)
    return gallery_with(items)


def gallery_of_status(status: StatusFile) -> Gallery | None:
    """The gallery of a run in progress; None if only the evaluator knows it."""
    return None if status.evaluated is None else gallery_with(status.evaluated)


def gallery_with(items: EvaluatedItems) -> Gallery:
    """The gallery of the evaluator's items."""
    captions = "" if items.captions is None else f", {counted(items.captions, 'caption')}"
    return Gallery(f"{counted(items.images, f'{items.split} image')}{captions}", items.images, items.captions)


def own_gallery(heldout: OwnHeldOut) -> Gallery | None:
    """The smallest of the silos' own galleries, each with the silo's held-out pairs; None if no silo evaluated."""
    sizes = [silo.items for silo in heldout.per_silo.values()]
    if not sizes:
        return None
    few, most = min(sizes), max(sizes)
    size = f"{few}" if few == most else f"{few} to {most}"
    return Gallery(
        f"{counted(heldout.items, 'held-out pair')}, {size} in each silo's gallery", few, queries=heldout.items
    )


def meaningful(values: Mapping[str, float], gallery: Gallery | None) -> dict[str, float]:
    """The values without recalls that every model reaches in this gallery; all of them if it is unknown."""
    return {name: value for name, value in values.items() if gallery is None or not gallery.certain(name)}


#: Maximum number of names listed individually.
_MANY = 5


def name_some(names: Sequence[str]) -> str:
    """``silo-02, silo-03 and the evaluator``; for many names, the first few and the number of others."""
    shown_names = ["the evaluator" if name == EVALUATOR else name for name in names]
    return first_few(shown_names, _MANY) if len(shown_names) > _MANY else enumerated(shown_names)


#: The warning of a scenario or run whose tasks are all single steps.
ONE_STEP_TASKS = (
    "every task is one optimiser step, in which a proximal term or any other pull towards the downloaded model has no "
    "effect; a smaller training.batch_size or more training.local_epochs give more steps"
)


def about_silos(silos: Sequence[tuple[int, int | None, float | None]]) -> str:
    """A line about some silos: their training items, optimiser steps of a task, and divergence of labels.

    Steps are None if a silo has no tasks, and the Jensen-Shannon divergence [bits] of its labels from those of all
    silos is None without labels.
    """
    steps = [count for _, count, _ in silos if count is not None]
    divergences = [value for *_, value in silos if value is not None]
    parts = [f"training items of a silo: {spread([items for items, _, _ in silos])}"]
    parts += [f"optimiser steps of a task: {spread(steps)}"] if steps else []
    parts += [f"Jensen-Shannon divergence of labels: {spread(divergences, '.3f')}"] if divergences else []
    return "; ".join(parts)


def training_warnings(summary: RunSummary) -> Iterator[str]:
    """Lines that warn that a run trained only in part, in single steps or hardly at all, or made the model worse."""
    without_task, not_merged = summary.without_part
    if without_task:
        yield (
            f"given no task in any round: {name_some(without_task)}; {summary.method} does not train them, or they "
            "were not selected or were offline"
        )
    if not_merged:
        yield f"none of their replies was merged, as they were lost or too late: {name_some(not_merged)}"
    if summary.hardly_changed:
        yield (
            f"the run hardly changed the model: by {summary.change:.1g} of its norm; a larger training.learning_rate, "
            "privacy.clip_norm, aggregation.robust.bound or aggregation.mixing changes it more"
        )
    if summary.one_step_tasks:
        yield ONE_STEP_TASKS
    if (below := summary.below_start) is not None:
        model = "the personal models retrieve" if summary.personal_only else "the model retrieves"
        yield (
            f"{model} worse than before training: {metric_of(below.metric).heading} {below.after:.4f}, "
            f"untrained {below.before:.4f}"
        )
    for name, whose in summary.unmeasured.items():
        yield f"metric {name}: no value that can be used in the last evaluation of {name_some(whose)}"
    for silo, replies in summary.never_merged.items():
        yield (
            f"{silo}: none of its replies was merged: {replies.refused + replies.scripted} refused, "
            f"{replies.errors} errors; the last one: {printable(replies.last)}"
        )


def chosen_by_validation(summary: RunSummary) -> Iterator[str]:
    """Lines on the best version by validation, and on a run that ended before its last round."""
    if summary.ended_by is not None:
        spent = summary.ended_by == "privacy.budget"
        why = "no silo may send another reply" if spent else "mean R@1 did not rise in the last evaluations"
        yield f"ended early, after {summary.versions} of {summary.rounds} rounds: {why} ({summary.ended_by})"
    if summary.best is not None:
        title = metric_of(summary.best.metric).heading
        yield f"best version by validation: {summary.best.version}, {title} {summary.best.value:.4f}, in best/model"


def items_left_out(summary: RunSummary) -> Iterator[str]:
    """Lines on the items that were not trained on, and on the items and personal models that were not evaluated."""
    ignored = {name: silo.ignored for name, silo in summary.per_silo.items() if silo.ignored}
    if ignored:
        held, most = sum(silo.samples for silo in summary.per_silo.values()), sorted(ignored, key=lambda k: -ignored[k])
        named = name_some([f"{name} {ignored[name]}" for name in most])
        yield (
            f"{sum(ignored.values())} of {held} training items were not trained on, as they lack a modality or are "
            f"a silo's only pair: {named}"
        )
    if summary.heldout_without_pair:
        yield f"{summary.heldout_without_pair} held-out items lack a modality and were not evaluated"
    for silo, why in summary.personal_missing.items():
        what = "its personal model was not evaluated and is missing from means over silos"
        yield f"{silo}: {what}: {printable(why)}"


def items_each(summary: RunSummary) -> str:
    """Number of items on which each silo's metrics are computed, in parentheses."""
    counts = [silo.heldout for silo in summary.per_silo.values() if silo.heldout]  # one without items has no metrics
    if not counts:
        return ""
    few, most = min(counts), max(counts)
    return f" ({counted(few, 'item') if few == most else f'{few} to {most} items'} each)"
