"""What a run writes, one type each: its summary, the lines of its metrics, and the configuration of its release.

The coordinator builds these records; reports, comparisons, replays and audits read them. Written are the fields that
were given and no defaults (:meth:`fedmq.storage.json_files.Stored.plain`), so a file keeps its keys when it is read and
written again. Fields with a default are missing in files of older versions, or in runs that they say nothing of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, RootModel, TypeAdapter, ValidationError, model_validator

from fedmq.evaluation.metrics import HEADLINE, Metric
from fedmq.storage.json_files import Digest, Stored

#: Metric name to value.
Figures = dict[str, float]
BySilo = dict[str, Figures]

_METRIC = TypeAdapter(Metric)


def _metric(entry: object) -> Metric:
    """An entry of a metric from JSON; strict models take dataclasses only as instances."""
    try:
        return _METRIC.validate_python(entry)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None


class SiloSummary(Stored):
    """A silo in a summary; every further key is a metric of the shared model on the silo's own held-out share.

    Args:
        modalities: what its items have.
        samples: training items.
        participations: replies merged.
    """

    __pydantic_extra__: Figures = Field(init=False)

    modalities: Annotated[list[Literal["image", "text"]], Field(min_length=1, max_length=2)]
    samples: int
    participations: int

    @model_validator(mode="after")
    def _has_the_needed_figure(self) -> SiloSummary:
        if HEADLINE not in self.figures:
            raise ValueError(f"{HEADLINE} is missing")
        return self

    @property
    def figures(self) -> Figures:
        """Metric name to value, ``mean_r1`` among them."""
        return self.__pydantic_extra__


class Traffic(Stored):
    """Bytes of payload tensors by kind: ``up`` from the silos, ``down`` to them."""

    up: dict[str, int]
    down: dict[str, int]


class MessageCounts(Stored):
    """The coordinator's messages.

    Args:
        sent: by it.
        received: by it.
        refused: frames it refused.
        logged: whether there are message logs; none are written where silos are called inside the coordinator.
    """

    sent: int = 0
    received: int = 0
    refused: int = 0
    logged: bool = True


class TaskCounts(Stored):
    """Tasks by their end; None where an older version did not count it.

    Args:
        merged: their replies were merged.
        failed: they brought no usable reply.
        discarded: their replies came, but were not merged.
    """

    merged: int | None = None
    failed: int | None = None
    discarded: int | None = None


class Seconds(Stored):
    """Real seconds by phase, and ``virtual``: the run's time [s] at its end, None on a wall clock."""

    total: float = 0.0
    startup: float = 0.0
    training: float = 0.0
    merge: float = 0.0
    evaluation: float = 0.0
    virtual: float | None = None


class Processes(Stored):
    """How many silos ran, and the most memory that all processes had together [MiB]."""

    silos: int
    peak_pss_mb: float = 0.0


class RunSummary(Stored):
    """``summary.json`` of a finished run.

    Args:
        protocol: the method.
        scenario: its name.
        seed: of the run.
        rounds: asked for.
        versions: merges done.
        model_digest: SHA-256 (hex) of the released model.
        data_digest: of the prepared data's content.
        released_with: digests of what was released with the model, by payload kind.
        unchanged: no silo's update changed the model.
        metrics: of the last evaluation of the shared model.
        per_silo: by silo.
        per_silo_mean: of each metric, the mean over silos on their own shares.
        fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
        personal: of the silos' own models on the whole split, means over silos.
        personal_whole_split: the same by silo.
        personal_per_silo: of each silo's own model on its own share.
        personal_per_silo_mean: means of these over silos.
        personal_fairness: as ``fairness``, of the silos' own models.
        personal_missing: why silos' own models were not measured, by silo.
        own_metrics: entries of the user's own metrics that were measured, by name.
        our_reading: the method is this project's reading of what its paper leaves open.
        own_only: the method trains no shared model as a whole.
        public_items: size of the public set; None for a method without one.
        bytes: traffic.
        messages: counted by the coordinator.
        tasks: by their end.
        seconds: by phase.
        processes: and their memory.
        versions_of: of fedmq, torch and Python, and the processor; they decide the last bits of the weights.
    """

    protocol: str
    scenario: str
    seed: int
    rounds: int | None = None
    versions: int
    model_digest: Digest
    data_digest: Digest | None = None
    released_with: dict[str, Digest] = Field(default_factory=dict)
    unchanged: bool = False
    metrics: Figures
    per_silo: dict[str, SiloSummary]
    per_silo_mean: Figures = Field(default_factory=dict)
    fairness: Figures
    personal: Figures = Field(default_factory=dict)
    personal_whole_split: BySilo = Field(default_factory=dict)
    personal_per_silo: BySilo = Field(default_factory=dict)
    personal_per_silo_mean: Figures = Field(default_factory=dict)
    personal_fairness: Figures = Field(default_factory=dict)
    personal_missing: dict[str, str] = Field(default_factory=dict)
    own_metrics: dict[str, Annotated[Metric, BeforeValidator(_metric)]] = Field(default_factory=dict)
    our_reading: bool = False
    own_only: bool = False
    public_items: int | None = None
    bytes: Traffic
    messages: MessageCounts = Field(default_factory=MessageCounts)
    tasks: TaskCounts = Field(default_factory=TaskCounts)
    seconds: Seconds
    processes: Processes
    versions_of: dict[str, str]


class MergeLine(Stored):
    """A merge's line of ``metrics.jsonl``; every further key is something that the method reports of the merge.

    Args:
        kind: ``merge``.
        version: of the merged model.
        now: the run's time of the merge [s].
        replies: names of the silos whose replies were merged, one for each reply.
        staleness: of each reply, merges since the model it stands on.
        loss: mean training loss of the silos; None where none reported one.
        losses: training loss by silo.
    """

    kind: Literal["merge"]
    version: int
    now: float
    replies: list[str] = Field(default_factory=list)
    staleness: list[int] = Field(default_factory=list)
    loss: float | None = None
    losses: Figures = Field(default_factory=dict)

    @property
    def reported(self) -> Figures:
        """What the method reports of the merge: name to number."""
        extra: Mapping[str, object] = self.model_extra or {}
        return {name: value for name, value in extra.items() if isinstance(value, int | float)}


class EvaluationLine(Stored):
    """An evaluation's line of ``metrics.jsonl``.

    Args:
        kind: ``evaluation``.
        version: of the shared model that was measured.
        metrics: on the whole split.
        per_silo: on each silo's own share.
    """

    kind: Literal["evaluation"]
    version: int
    metrics: Figures
    per_silo: BySilo


class PersonalLine(Stored):
    """The line of ``metrics.jsonl`` of a measurement of the silos' own models; the names are those of the summary.

    Args:
        kind: ``personal``.
        version: of the shared model at that time.
        personal: means over silos on the whole split.
        personal_whole_split: by silo, on the whole split.
        personal_per_silo: by silo, on its own share.
        personal_per_silo_mean: means of these over silos.
        personal_fairness: ``std_r1``, ``worst_r1`` and ``gap_r1`` over silos.
    """

    kind: Literal["personal"]
    version: int
    personal: Figures
    personal_whole_split: BySilo
    personal_per_silo: BySilo
    personal_per_silo_mean: Figures
    personal_fairness: Figures


#: A line of ``metrics.jsonl``; ``kind`` says which.
MetricsLine = MergeLine | EvaluationLine | PersonalLine


class AnyMetricsLine(RootModel[Annotated[MetricsLine, Field(discriminator="kind")]]):
    """Reads a line as the type that its ``kind`` names."""


class ReleaseConfig(Stored):
    """``model/config.json``: what a released model is.

    Args:
        backbone: of the scenario.
        objective: of the scenario.
        protocol: the method.
        dim: of the embeddings.
        layout_digest: SHA-256 (hex) of the parameters' layout.
        layout: names of its entries in their order, which ``model.safetensors`` does not keep.
        model_digest: of the parameters.
        data_digest: of the prepared data's content.
        released_with: digests of what lies beside the model, by payload kind.
    """

    backbone: dict[str, JsonValue]
    objective: dict[str, JsonValue] = Field(default_factory=dict)
    protocol: str
    dim: int
    layout_digest: Digest
    layout: list[str] = Field(default_factory=list)
    model_digest: Digest
    data_digest: Digest | None = None
    released_with: dict[str, Digest]
