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

from pydantic import AfterValidator, BeforeValidator, Field, RootModel, TypeAdapter, ValidationError, model_validator

from fedmq.config.plug_ins import titled
from fedmq.evaluation.metrics import Metric, is_known, metric_of
from fedmq.evaluation.recall import HEADLINE
from fedmq.runs.data_records import ItemCounts
from fedmq.storage.json_files import Amount, Count, DateTime, Digest, Finite, Stored


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


class _WithFigures(Stored):
    """A record whose further keys are metrics."""

    __pydantic_extra__: dict[str, Finite] = Field(init=False)

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        check_bounds(self.figures)
        return self

    @property
    def figures(self) -> Figures:
        """Metric name to value."""
        return self.__pydantic_extra__


class SiloSummary(_WithFigures):
    """A silo in a summary; all further keys are metrics of the shared model on the silo's part of the evaluated split.

    Without an evaluator there are none; ``own_heldout`` then has the metrics on the silos' own held-out items.
    """

    # Modalities of its items; empty of a silo that never stated its data, as a run with ``participation.minimum`` does
    # without it.
    modalities: Annotated[list[Literal["image", "text"]], Field(max_length=2)]
    samples: int  # number of training items
    steps: int | None = None  # number of optimiser steps of each of its tasks; None if the method never selects it
    # Jensen-Shannon divergence [bits] of its training labels from those of all silos; None without labels, or if the
    # silos have their own data.
    label_divergence: Amount | None = None
    participations: int  # number of its replies that were merged
    tasks: int  # number of tasks that it was given
    data_digest: Digest | None = None  # salted digest of its data, as it stated it
    # Numbers of its items by split and modalities, as it stated them.
    items: dict[str, ItemCounts] = Field(default_factory=dict)
    heldout: int  # number of its items of the evaluated split, which are the queries of its metrics
    image_only: int = 0  # among these items, those with an image only, in a silo with both modalities
    text_only: int = 0  # likewise with captions only
    # Among the training items, those that the method does not train on: without a pair, or a single pair that has no
    # other to be contrasted with.
    ignored: int = 0

    @model_validator(mode="after")
    def _has_headline(self) -> SiloSummary:
        if self.figures and HEADLINE not in self.figures:
            raise ValueError(f"{HEADLINE} is missing")
        return self


class OwnSiloFigures(_WithFigures):
    """Evaluation of the shared model by a silo on its own held-out items; all further keys are metrics."""

    items: int  # number of these items that have both modalities


class OwnHeldOut(Stored):
    """Evaluation of the shared model by the silos, each on its own held-out items."""

    items: int  # number of held-out pairs of all silos
    metrics: Figures  # means over silos, weighted by their items; metrics that every silo has
    per_silo: dict[str, OwnSiloFigures]  # metrics by silo
    per_silo_mean: Figures  # unweighted means over silos
    fairness: Figures  # ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos
    missing: dict[str, str] = Field(default_factory=dict)  # why a silo with held-out pairs has no metrics, by silo


class EvaluatedItems(Stored):
    """The items on which the evaluator evaluates the shared model."""

    split: str  # split of the data
    images: int  # number of items, each with an image; the gallery of text-to-image retrieval
    # Number of their captions, the gallery of image-to-text retrieval; None if only the evaluator knows it.
    captions: int | None = None


class Traffic(Stored):
    """Size of the payload tensors [bytes], by payload kind."""

    up: dict[str, int]  # sent by the silos
    down: dict[str, int]  # sent to them
    # Once decoded, of the kinds in ``up`` that were sent compressed; empty without compression.
    decoded_up: dict[str, int] = Field(default_factory=dict)
    decoded_down: dict[str, int] = Field(default_factory=dict)  # the same of ``down``


class MessageCounts(Stored):
    """Counts of the coordinator's messages."""

    sent: int = 0  # messages it sent
    received: int = 0  # messages it received
    refused: int = 0  # frames it refused
    logged: bool = True  # whether messages were exchanged and logged; not with ``launcher: inline``


class TaskCounts(Stored):
    """Counts of tasks by outcome."""

    merged: int = 0  # the reply was merged
    failed: int = 0  # there was no usable reply
    discarded: int = 0  # the reply arrived but was not merged


class UnusableReplies(Stored):
    """Tasks of a silo whose reply could not be merged."""

    refused: int = 0  # the coordinator refused the reply
    scripted: int = 0  # it refused the reply of an attack that the scenario scripts
    errors: int = 0  # the silo reported an error instead of a reply
    diverged: int = 0  # those among the refused replies and the errors that say that training diverged
    last: str = ""  # why, of the last one

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
    """The version with the highest value of a metric on the validation split."""

    version: int  # number of merges
    metric: str
    value: Finite
    model_digest: Digest  # digest (hex) of the version's parameters


class PrivacySpent(Stored):
    """The (epsilon, delta) that a run's noise guarantees each silo, or each training item, from numbers of tasks.

    Audits count replies.
    """

    epsilon: Amount  # largest over silos, of all payloads with noise; says nothing about other payloads
    delta: Amount  # that of privacy.budget, otherwise 1e-5
    tasks: Count  # of that silo
    without_noise: list[str]  # payload kinds in replies to which no noise is added


class BelowStart(Stored):
    """The metric in which training made retrieval worse: mAP with hash networks, otherwise mean R@1."""

    metric: str
    before: Finite  # its value for the untrained model
    after: Finite  # its value in the last evaluation


#: Width of a screen [characters].
_SCREEN = 100


class RunSummary(Stored):
    """``summary.json`` of a finished run."""

    protocol: str
    scenario: str
    seed: int  # seed of the run
    rounds: int  # requested by the scenario
    versions: int  # number of merges
    model_digest: Digest  # SHA-256 (hex) of the released model
    data_digest: Digest | None = None  # digest of the prepared data's content
    # Digests of the payloads released with the model, by kind.
    released_with: dict[str, Digest] = Field(default_factory=dict)
    # L2 norm of the difference of the shared model from the initial one, as a fraction of the initial one's norm; None
    # for a method that shares no model.
    change: Amount | None = None
    metrics: Figures  # last evaluation of the shared model, on the whole split; empty without an evaluator
    below_start: BelowStart | None = None  # set if the model, or the personal ones, retrieve worse than before training
    # Last evaluation of the shared model by the silos; None if they do not evaluate it.
    own_heldout: OwnHeldOut | None = None
    per_silo: dict[str, SiloSummary]  # facts and metrics of each silo
    # Mean over silos of each metric, each silo on its part of the split.
    per_silo_mean: Figures = Field(default_factory=dict)
    fairness: Figures  # ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos
    # Means over silos of the personal models' metrics on the whole split.
    personal: Figures = Field(default_factory=dict)
    personal_whole_split: BySilo = Field(default_factory=dict)  # the same by silo
    # Metrics of each silo's personal model on the silo's part of the split.
    personal_per_silo: BySilo = Field(default_factory=dict)
    personal_per_silo_mean: Figures = Field(default_factory=dict)  # means of these over silos
    personal_fairness: Figures = Field(default_factory=dict)  # as ``fairness``, of the personal models
    personal_missing: dict[str, str] = Field(default_factory=dict)  # why personal models were not evaluated, by silo
    # Entries of the user-defined metrics that were measured, by name.
    custom_metrics: dict[str, MetricEntry] = Field(default_factory=dict)
    # User-defined metrics without a value in the last evaluations, and on whose items, by name.
    unmeasured: dict[str, list[str]] = Field(default_factory=dict)
    our_reading: bool = False  # the method fills in details that its paper leaves open
    personal_only: bool = False  # the method does not train the shared model as a whole
    public_items: int | None = None  # size of the public set; None for a method without one
    # The best version by validation, kept in ``best/``; None unless ``evaluation.keep`` is best.
    best: BestVersion | None = None
    # Key of the scenario that ended the run before its last round: ``evaluation.patience`` or ``privacy.budget``.
    ended_by: str | None = None
    privacy: PrivacySpent | None = None  # of silos; None without noise on what they send
    item_privacy: PrivacySpent | None = None  # of single training items; None without noise in local steps
    # Items on which the evaluator's metrics are computed; None without an evaluator.
    evaluated: EvaluatedItems | None = None
    # Versions that the evaluator was to evaluate, and did not answer within the limit.
    unevaluated: Annotated[tuple[int, ...], Field(strict=False)] = ()
    heldout_without_pair: int = 0  # number of items of the evaluated split that lack a modality and were not evaluated
    bytes: Traffic  # traffic by payload kind
    messages: MessageCounts = Field(default_factory=MessageCounts)  # counts of the coordinator's messages
    tasks: TaskCounts = Field(default_factory=TaskCounts)  # counts of tasks by outcome
    # Refused replies and reported errors, by silo; only silos that had one.
    unusable_replies: dict[str, UnusableReplies] = Field(default_factory=dict)
    seconds: Seconds  # time by phase
    processes: Processes  # number of silos, and memory
    # Versions of fedmq, torch and Python, and the processor, on which the last bits of weights depend.
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
    def one_step_tasks(self) -> bool:
        """Whether every task of the run was one optimiser step."""
        return {silo.steps for silo in self.per_silo.values() if silo.tasks and silo.steps is not None} == {1}

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
    """A line of ``metrics.jsonl`` for a merge; all further keys are values that the method reports of the merge."""

    kind: Literal["merge"]
    version: _Version  # version of the merged model
    now: Amount  # the run's time of the merge [s]
    replies: list[str]  # names of the silos whose replies were merged, one for each reply
    # For each reply, the number of merges since the model it was trained from.
    staleness: list[Annotated[int, Field(ge=0)]]
    # Mean training loss of the silos that had something to train on; None if no silo reported a loss.
    loss: Finite | None = None
    # Training loss by silo; exactly 0 of a silo that had nothing to train on in that round.
    losses: dict[str, Finite] = Field(default_factory=dict)
    # Real date and time of the line, ISO 8601; :func:`fedmq.runs.results.append_metrics` sets it.
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
    """A line of ``metrics.jsonl`` for an evaluation of the shared model."""

    kind: Literal["evaluation"]
    version: _Version  # version of the model
    metrics: Figures  # metrics on the whole split
    per_silo: BySilo  # metrics on each silo's part of the split
    wall: DateTime | None = None  # as for a merge


class OwnHeldOutLine(OwnHeldOut):
    """A line of ``metrics.jsonl`` for an evaluation of the shared model by the silos; further fields as there."""

    kind: Literal["own_heldout"]
    version: _Version  # version of the model
    wall: DateTime | None = None  # as for a merge


class PersonalLine(Stored):
    """A line of ``metrics.jsonl`` for an evaluation of the personal models; the names are those of the summary."""

    kind: Literal["personal"]
    version: _Version  # version of the shared model at that time
    personal: Figures  # means over silos on the whole split
    personal_whole_split: BySilo  # by silo, on the whole split
    personal_per_silo: BySilo  # by silo, on the silo's part of the split
    personal_per_silo_mean: Figures  # means of these over silos
    personal_fairness: Figures  # ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos
    wall: DateTime | None = None  # as for a merge


#: A line of ``metrics.jsonl``, discriminated by ``kind``.
MetricsLine = MergeLine | EvaluationLine | OwnHeldOutLine | PersonalLine


class AnyMetricsLine(RootModel[Annotated[MetricsLine, Field(discriminator="kind")]]):
    """Reads a line as the type that its ``kind`` names."""
