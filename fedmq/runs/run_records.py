"""Types of the records that a run writes: its summary, and the lines of its metrics.

The coordinator builds these records; reports, comparisons, replays and audits read them. Only fields that were set are
written, no defaults (:meth:`fedmq.storage.json_files.Stored.plain`), so a file keeps its keys when it is read and
written again. Fields with a default are missing in runs to which they do not apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    RootModel,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fedmq.config.plug_ins import titled
from fedmq.evaluation.metrics import Metric, is_known, metric_of
from fedmq.evaluation.recall import HEADLINE
from fedmq.runs.data_records import ItemCounts
from fedmq.storage.json_files import Amount, DateTime, Digest, Finite, Stored


@lru_cache(4096)  # the records of a run repeat the same names
def _built_in(name: str) -> Metric | None:
    return metric_of(name) if is_known(name) else None


def check_bounds(values: Mapping[str, float]) -> None:
    """Raise ValueError if a built-in metric is out of its bounds; those of user-defined ones are in their entries."""
    for name, value in values.items():
        if (metric := _built_in(name)) is not None and (wrong := metric.objection(value)) is not None:
            raise ValueError(wrong)


def _checked(values: dict[str, float]) -> dict[str, float]:
    check_bounds(values)
    return values


_METRIC = TypeAdapter(Metric)


def _metric(entry: object) -> Metric:
    """Parse the entry of a metric from JSON, because strict models accept dataclasses only as instances."""
    try:
        return _METRIC.validate_python(entry)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None


#: Metric name to value; of a built-in metric, within its bounds.
Figures = Annotated[dict[str, Finite], AfterValidator(_checked)]
#: Silo name to its figures.
BySilo = dict[str, Figures]
#: The entry of a user-defined metric.
MetricEntry = Annotated[Metric, BeforeValidator(_metric)]


_Version = Annotated[int, Field(ge=0)]
#: Fraction of the initial model's norm below which a run has hardly changed the model.
_HARDLY = 1e-5


class SiloSummary(Stored):
    """A silo in a summary; all further keys are metrics of the shared model on the silo's part of the evaluated split.

    Without an evaluator there are none; ``own_heldout`` then has the metrics on the silos' own held-out items.

    Args:
        modalities: modalities of its items; empty of a silo that never stated its data, as a run with
            ``participation.minimum`` does without it.
        samples: number of training items.
        participations: number of its replies that were merged.
        tasks: number of tasks that it was given.
        data_digest: salted digest of its data, as it stated it.
        items: numbers of its items by split and modalities, as it stated them.
        heldout: number of its items of the evaluated split, which are the queries of its metrics.
        image_only: among these items, those with an image only, in a silo with both modalities.
        text_only: likewise with captions only.
        ignored: among the training items, those that the method does not train on: without a pair, or a single pair
            that has no other to be contrasted with.
    """

    __pydantic_extra__: dict[str, Finite] = Field(init=False)

    modalities: Annotated[list[Literal["image", "text"]], Field(max_length=2)]
    samples: int
    participations: int
    tasks: int
    data_digest: Digest | None = None
    items: dict[str, ItemCounts] = Field(default_factory=dict)
    heldout: int
    image_only: int = 0
    text_only: int = 0
    ignored: int = 0

    @model_validator(mode="after")
    def _has_headline(self) -> SiloSummary:
        if self.figures and HEADLINE not in self.figures:
            raise ValueError(f"{HEADLINE} is missing")
        check_bounds(self.figures)
        return self

    @property
    def figures(self) -> Figures:
        """Metric name to value, ``mean_r1`` among them; empty without an evaluator."""
        return self.__pydantic_extra__


class OwnSiloFigures(Stored):
    """Evaluation of the shared model by a silo on its own held-out items; all further keys are metrics.

    Args:
        items: number of these items that have both modalities.
    """

    __pydantic_extra__: dict[str, Finite] = Field(init=False)

    items: int

    @model_validator(mode="after")
    def _within_bounds(self) -> OwnSiloFigures:
        check_bounds(self.figures)
        return self

    @property
    def figures(self) -> Figures:
        """Metric name to value."""
        return self.__pydantic_extra__


class OwnHeldOut(Stored):
    """Evaluation of the shared model by the silos, each on its own held-out items.

    Args:
        items: number of held-out pairs of all silos.
        metrics: means over silos, weighted by their items; metrics that every silo has.
        per_silo: metrics by silo.
        per_silo_mean: unweighted means over silos.
        fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
        missing: why a silo with held-out pairs has no metrics, by silo.
    """

    items: int
    metrics: Figures
    per_silo: dict[str, OwnSiloFigures]
    per_silo_mean: Figures
    fairness: Figures
    missing: dict[str, str] = Field(default_factory=dict)


class EvaluatedItems(Stored):
    """The items on which the evaluator evaluates the shared model.

    Args:
        split: split of the data.
        images: number of items, each with an image; the gallery of text-to-image retrieval.
        captions: number of their captions, the gallery of image-to-text retrieval; None if only the evaluator knows it.
    """

    split: str
    images: int
    captions: int | None = None


class Traffic(Stored):
    """Size of the payload tensors [bytes], by payload kind.

    Args:
        up: sent by the silos.
        down: sent to them.
        decoded_up: once decoded, of the kinds in ``up`` that were sent compressed; empty without compression.
        decoded_down: the same of ``down``.
    """

    up: dict[str, int]
    down: dict[str, int]
    decoded_up: dict[str, int] = Field(default_factory=dict)
    decoded_down: dict[str, int] = Field(default_factory=dict)


class MessageCounts(Stored):
    """Counts of the coordinator's messages.

    Args:
        sent: messages it sent.
        received: messages it received.
        refused: frames it refused.
        logged: whether messages were exchanged and logged; not with ``launcher: inline``.
    """

    sent: int = 0
    received: int = 0
    refused: int = 0
    logged: bool = True


class TaskCounts(Stored):
    """Counts of tasks by outcome.

    Args:
        merged: the reply was merged.
        failed: there was no usable reply.
        discarded: the reply arrived but was not merged.
    """

    merged: int = 0
    failed: int = 0
    discarded: int = 0


class UnusableReplies(Stored):
    """Tasks of a silo whose reply could not be merged.

    Args:
        refused: the coordinator refused the reply.
        scripted: it refused the reply of an attack that the scenario scripts.
        errors: the silo reported an error instead of a reply.
        diverged: those among the refused replies and the errors that say that training diverged.
        last: why, of the last one.
    """

    refused: int = 0
    scripted: int = 0
    errors: int = 0
    diverged: int = 0
    last: str = ""

    @property
    def total(self) -> int:
        """Number of these tasks."""
        return self.refused + self.scripted + self.errors


class Seconds(Stored):
    """Real time by phase [s], and ``virtual``: the run's virtual time at its end [s], None on a wall clock."""

    total: Amount = 0.0
    startup: Amount = 0.0
    training: Amount = 0.0
    merge: Amount = 0.0
    evaluation: Amount = 0.0
    virtual: Amount | None = None


class Processes(Stored):
    """Number of silos, and peak memory (PSS) of all processes together [MiB]."""

    silos: int
    peak_pss_mb: Amount = 0.0


class BestVersion(Stored):
    """The version with the highest value of a metric on the validation split.

    Args:
        version: number of merges.
        metric: name of the metric.
        value: its value.
        model_digest: digest (hex) of the version's parameters.
    """

    version: int
    metric: str
    value: Finite
    model_digest: Digest


#: Width of a screen [characters].
_SCREEN = 100


class RunSummary(Stored):
    """``summary.json`` of a finished run.

    Args:
        protocol: the method.
        scenario: its name.
        seed: seed of the run.
        rounds: requested by the scenario.
        versions: number of merges.
        model_digest: SHA-256 (hex) of the released model.
        data_digest: digest of the prepared data's content.
        released_with: digests of the payloads released with the model, by kind.
        change: L2 norm of the difference of the shared model from the initial one, as a fraction of the initial one's
            norm; None for a method that shares no model.
        metrics: last evaluation of the shared model, on the whole split; empty without an evaluator.
        own_heldout: last evaluation of the shared model by the silos; None if they do not evaluate it.
        per_silo: facts and metrics of each silo.
        per_silo_mean: mean over silos of each metric, each silo on its part of the split.
        fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
        personal: means over silos of the personal models' metrics on the whole split.
        personal_whole_split: the same by silo.
        personal_per_silo: metrics of each silo's personal model on the silo's part of the split.
        personal_per_silo_mean: means of these over silos.
        personal_fairness: as ``fairness``, of the personal models.
        personal_missing: why personal models were not evaluated, by silo.
        custom_metrics: entries of the user-defined metrics that were measured, by name.
        unmeasured: user-defined metrics without a value in the last evaluations, and on whose items, by name.
        our_reading: the method fills in details that its paper leaves open.
        personal_only: the method does not train the shared model as a whole.
        public_items: size of the public set; None for a method without one.
        best: the best version by validation, kept in ``best/``; None unless ``evaluation.keep`` is best.
        stopped_early: the run ended before its last round, by ``evaluation.patience``.
        evaluated: items on which the evaluator's metrics are computed; None without an evaluator.
        unevaluated: versions that the evaluator was to evaluate, and did not answer within the limit.
        heldout_without_pair: number of items of the evaluated split that lack a modality and were not evaluated.
        bytes: traffic by payload kind.
        messages: counts of the coordinator's messages.
        tasks: counts of tasks by outcome.
        unusable_replies: refused replies and reported errors, by silo; only silos that had one.
        seconds: time by phase.
        processes: number of silos, and memory.
        versions_of: versions of fedmq, torch and Python, and the processor, on which the last bits of weights depend.
    """

    protocol: str
    scenario: str
    seed: int
    rounds: int
    versions: int
    model_digest: Digest
    data_digest: Digest | None = None
    released_with: dict[str, Digest] = Field(default_factory=dict)
    change: Amount | None = None
    metrics: Figures
    own_heldout: OwnHeldOut | None = None
    per_silo: dict[str, SiloSummary]
    per_silo_mean: Figures = Field(default_factory=dict)
    fairness: Figures
    personal: Figures = Field(default_factory=dict)
    personal_whole_split: BySilo = Field(default_factory=dict)
    personal_per_silo: BySilo = Field(default_factory=dict)
    personal_per_silo_mean: Figures = Field(default_factory=dict)
    personal_fairness: Figures = Field(default_factory=dict)
    personal_missing: dict[str, str] = Field(default_factory=dict)
    custom_metrics: dict[str, MetricEntry] = Field(default_factory=dict)
    unmeasured: dict[str, list[str]] = Field(default_factory=dict)
    our_reading: bool = False
    personal_only: bool = False
    public_items: int | None = None
    best: BestVersion | None = None
    stopped_early: bool = False
    evaluated: EvaluatedItems | None = None
    unevaluated: Annotated[tuple[int, ...], Field(strict=False)] = ()
    heldout_without_pair: int = 0
    bytes: Traffic
    messages: MessageCounts = Field(default_factory=MessageCounts)
    tasks: TaskCounts = Field(default_factory=TaskCounts)
    unusable_replies: dict[str, UnusableReplies] = Field(default_factory=dict)
    seconds: Seconds
    processes: Processes
    versions_of: dict[str, str]

    def __repr__(self) -> str:
        """One screen of a notebook: a line for each field of the file, cut where it is long."""
        lines = [f"{name}: {value!r}" for name, value in self if name in self.model_fields_set]
        return "\n".join(line if len(line) <= _SCREEN else f"{line[: _SCREEN - 3]}..." for line in lines)

    __str__ = __repr__

    @property
    def method(self) -> str:
        """The method for a title: the digest of a file of one's own shortened."""
        return titled(self.protocol)

    @property
    def hardly_changed(self) -> bool:
        """Whether the run hardly changed the shared model."""
        return self.change is not None and self.change < _HARDLY

    @property
    def without_part(self) -> tuple[list[str], list[str]]:
        """Silos without a merged reply: those without a task, and those whose replies were lost or too late."""
        idle = {name: silo for name, silo in self.per_silo.items() if not silo.participations}
        given = [name for name, silo in idle.items() if silo.tasks and name not in self.never_merged]
        return [name for name, silo in idle.items() if not silo.tasks], given

    @property
    def never_merged(self) -> dict[str, UnusableReplies]:
        """The silos of which no reply was merged because all were refused or errors."""
        silos = self.per_silo
        return {name: found for name, found in self.unusable_replies.items() if not silos[name].participations}


class MergeLine(Stored):
    """A line of ``metrics.jsonl`` for a merge; all further keys are values that the method reports of the merge.

    Args:
        kind: ``merge``.
        version: version of the merged model.
        now: the run's time of the merge [s].
        replies: names of the silos whose replies were merged, one for each reply.
        staleness: for each reply, the number of merges since the model it was trained from.
        loss: mean training loss of the silos that had something to train on; None if no silo reported a loss.
        losses: training loss by silo; exactly 0 of a silo that had nothing to train on in that round.
        wall: real date and time of the line, ISO 8601; :func:`fedmq.runs.results.append_metrics` sets it.
    """

    kind: Literal["merge"]
    version: _Version
    now: Amount
    replies: list[str]
    staleness: list[Annotated[int, Field(ge=0)]]
    loss: Finite | None = None
    losses: dict[str, Finite] = Field(default_factory=dict)
    wall: DateTime | None = None

    @model_validator(mode="after")
    def _reports_numbers(self) -> Self:
        for name, value in self.reported.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value}, not a finite number")
        return self

    @property
    def reported(self) -> Figures:
        """Values that the method reports of the merge, by name."""
        extra: Mapping[str, object] = self.model_extra or {}
        return {name: value for name, value in extra.items() if isinstance(value, int | float)}


class EvaluationLine(Stored):
    """A line of ``metrics.jsonl`` for an evaluation of the shared model.

    Args:
        kind: ``evaluation``.
        version: version of the model.
        metrics: metrics on the whole split.
        per_silo: metrics on each silo's part of the split.
        wall: as for a merge.
    """

    kind: Literal["evaluation"]
    version: _Version
    metrics: Figures
    per_silo: BySilo
    wall: DateTime | None = None


class OwnHeldOutLine(OwnHeldOut):
    """A line of ``metrics.jsonl`` for an evaluation of the shared model by the silos; further fields as there.

    Args:
        kind: ``own_heldout``.
        version: version of the model.
        wall: as for a merge.
    """

    kind: Literal["own_heldout"]
    version: _Version
    wall: DateTime | None = None


class PersonalLine(Stored):
    """A line of ``metrics.jsonl`` for an evaluation of the personal models; the names are those of the summary.

    Args:
        kind: ``personal``.
        version: version of the shared model at that time.
        personal: means over silos on the whole split.
        personal_whole_split: by silo, on the whole split.
        personal_per_silo: by silo, on the silo's part of the split.
        personal_per_silo_mean: means of these over silos.
        personal_fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
        wall: as for a merge.
    """

    kind: Literal["personal"]
    version: _Version
    personal: Figures
    personal_whole_split: BySilo
    personal_per_silo: BySilo
    personal_per_silo_mean: Figures
    personal_fairness: Figures
    wall: DateTime | None = None


#: A line of ``metrics.jsonl``, discriminated by ``kind``.
MetricsLine = MergeLine | EvaluationLine | OwnHeldOutLine | PersonalLine


class AnyMetricsLine(RootModel[Annotated[MetricsLine, Field(discriminator="kind")]]):
    """Reads a line as the type that its ``kind`` names."""
