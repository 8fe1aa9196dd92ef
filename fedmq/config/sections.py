"""Schema of most sections of a scenario, such as aggregation and participation, and their common base."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedmq.errors import ConflictError

#: Numbers as YAML has them, not true or false and not texts; the largest are far below those of float32.
Whole = Annotated[int, Field(strict=True, lt=2**63)]
Number = Annotated[float, Field(strict=True)]
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]
Positive = Annotated[Number, Field(gt=0.0, le=1e30)]
NonNegative = Annotated[Number, Field(ge=0.0, le=1e30)]
Count = Annotated[Whole, Field(ge=1, le=10**9)]
#: Width of a layer, or number of rows of a table.
Width = Annotated[Whole, Field(ge=1, le=65_536)]
#: Passes over a silo's items in one task.
Passes = Annotated[Whole, Field(ge=1, le=10_000)]
Modality = Literal["image", "text"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
#: A Python file that defines metrics, or the name of an installed metric.
MetricSource = Annotated[str, Field(min_length=1, max_length=4096)]


class Part(BaseModel):
    """Base of every section of a scenario: frozen, and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class MissingModality(Part):
    """Which silos, or which training items, lack a modality."""

    per: Literal["silo", "item"] = Field(
        "silo",
        description="whole silos lack a modality, or single training items, so that a silo holds pairs, images without "
        "captions and captions without images",
    )
    rate: Fraction = Field(0.0, description="fraction of the silos, or of the training pairs, with a single modality")
    seed: Whole | None = Field(
        None, ge=0, description="seed that draws which silos or items lack a modality; null: the run's seed"
    )
    only: Literal["image", "text"] | None = Field(
        None, description="modality that these silos or items keep; null: drawn, both equally likely"
    )
    silos: dict[Name, Literal["image", "text"]] = Field(
        default_factory=dict, description="instead of a rate, single-modality silos by name, each with its modality"
    )

    @model_validator(mode="after")
    def _one_way(self) -> MissingModality:
        if self.silos and self.rate > 0:
            raise ConflictError("missing_modality.rate", "and missing_modality.silos: give one of them")
        if self.silos and self.per == "item":
            raise ConflictError("missing_modality.silos", "names whole silos: it needs missing_modality.per silo")
        if self.only and self.rate == 0:
            raise ConflictError("missing_modality.only", "needs missing_modality.rate above 0")
        return self


class Wire(Part):
    """What an observer of the network learns from messages, and how long keys are used; see docs/reference/wire.md."""

    hide_names: bool = Field(
        False, description="seal names, kinds and sequence numbers together with message bodies, as always over TCP"
    )
    padding: bool = Field(
        False,
        description="like hide_names, and pad each message to 4 KiB, larger ones to the next of four steps "
        "between two powers of two",
    )
    transport: Literal["ipc", "shm"] | None = Field(
        None,
        description="with launcher local: shm: a Unix socket, and shared memory for large messages where both "
        "processes can open it; ipc: only the socket; null: shm",
    )
    rekey_hours: Positive = Field(24.0, description="real time after which a session gets new keys [h]")
    rekey_messages: Count = Field(
        1 << 20, description="messages in both directions after which a session gets new keys"
    )
    rekey_gigabytes: Positive = Field(
        64.0, description="traffic in both directions after which a session gets new keys [10^9 bytes]"
    )

    @property
    def hides(self) -> bool:
        """Whether headers are sealed."""
        return self.hide_names or self.padding


class Staleness(Part):
    """Damping h(s) of a reply with a staleness of s versions; see :mod:`fedmq.federation.updates`."""

    kind: Literal["constant", "polynomial", "hinge"] = Field(
        "polynomial",
        description=(
            "constant: 1; polynomial: (1 + s)^-exponent; hinge: 1 up to s = grace, then 1 / (slope (s - grace) + 1)"
        ),
    )
    exponent: NonNegative = Field(0.5, description="polynomial: exponent")
    slope: NonNegative = Field(10.0, description="hinge: slope")
    grace: NonNegative = Field(4.0, description="hinge: largest staleness without damping [versions]")


class Robust(Part):
    """Aggregation that is robust to a minority of Byzantine silos; see :mod:`protocols.parts.robust`."""

    rule: Literal["none", "norm_bound", "median", "trimmed_mean", "krum"] = Field(
        "none", description="aggregation rule: the method's own, or a robust one"
    )
    bound: Positive | None = Field(None, description="norm_bound: maximum L2 norm of an update; null: the median norm")
    trim: Number = Field(0.2, ge=0.0, lt=0.5, description="trimmed_mean: fraction cut off at each end, at least one")
    byzantine: Number = Field(0.2, ge=0.0, lt=0.5, description="krum: fraction of the replies that may be Byzantine")
    keep: Count | None = Field(
        None,
        description="krum: number of replies kept, below the number of silos; 1 is Krum itself; null: all but the "
        "Byzantine ones, which is also the maximum",
    )

    @model_validator(mode="after")
    def _trusts_not_every_reply(self) -> Robust:
        useless = {"trimmed_mean": ("trim", self.trim), "krum": ("byzantine", self.byzantine)}
        name, value = useless.get(self.rule, ("", 1.0))
        if not value:
            raise ConflictError(
                f"aggregation.robust.{name}", f"is 0: {self.rule} would trust every reply, like rule: none"
            )
        return self


class Aggregation(Part):
    """When and how replies are merged. Keys of other modes have no effect."""

    mode: Literal["sync", "buffered", "async"] = Field(
        "sync",
        description=(
            "sync: merge a whole cohort; buffered: merge every `buffer` replies (FedBuff); async: merge each reply "
            "(FedAsync)"
        ),
    )
    quorum: Fraction = Field(1.0, gt=0.0, description="sync: fraction of the cohort that suffices after the deadline")
    deadline: Positive | None = Field(None, description="sync: time a round waits for stragglers [s]; null: no limit")
    over_select: Number = Field(
        1.0,
        ge=1.0,
        le=1e30,
        description="sync: selects this multiple of the cohort, merges the first replies",
    )
    buffer: Count | None = Field(
        None, description="buffered: replies per merge, at most the cohort; null: a third of the cohort"
    )
    timeout: Positive | None = Field(
        None, description="buffered: time after which fewer replies are merged [s]; null: no limit"
    )
    mixing: Annotated[Number, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="buffered and async: fraction of a merge's step that is applied; null: 1 and 0.6, respectively",
    )
    staleness: Staleness = Staleness()
    balance: Annotated[Number, Field(ge=1.0, le=1e30)] | None = Field(
        None,
        description="buffered and async: maximum factor by which replies of rarely merged silos are weighted up, and "
        "those of frequently merged silos down; null: no reweighting",
    )
    single_weight: NonNegative = Field(
        1.0,
        description="factor of the weight of single-modality silos' replies, and of other silos' unpaired items; with "
        "0 they do not count. Statistics that a method does not weight, such as class prototypes, count in full",
    )
    max_staleness: Whole | None = Field(
        None, ge=0, description="replies with a higher staleness are discarded; null: none are"
    )
    max_age: Whole | None = Field(
        None, ge=0, description="versions after which a silo's last-known statistics are dropped; null: never"
    )
    on_lost: Literal["wait", "give_up"] | None = Field(
        None,
        description="pending task of a lost silo: wait for the silo, or give the task up after lost_after; null: wait "
        "with clock virtual, whose results must not depend on real time, and give up with clock wall",
    )
    lost_after: Positive = Field(60.0, description="real time after which a lost silo's task is given up [s]")
    task_limit: Positive | None = Field(
        None,
        description=(
            "real time after which a connected silo that has not replied fails its task [s]; null: 10 times its "
            "longest task so far, at least 60 s, counted from the last reply of any silo (its first task: derived "
            "from the pace of the other silos, at least 600 s; before any silo has replied: 2 s per training sample "
            "and local epoch, at least 3600 s). The limit applies to the evaluator, too (null: 10 times its longest "
            "evaluation, at least 600 s)"
        ),
    )

    @property
    def rate(self) -> float:
        """Fraction of a merge's step that is applied (FedBuff's server learning rate, FedAsync's mixing rate)."""
        match self.mode:
            case "sync":
                return 1.0
            case "buffered":
                return self.mixing or 1.0
            case "async":
                return self.mixing or 0.6

    robust: Robust = Robust()


class Diurnal(Part):
    """Silos that are online for a fraction of each day, each with its own phase."""

    period: Positive = Field(86400.0, description="availability: length of a day [s]")
    share: Fraction = Field(0.5, gt=0.0, description="availability: fraction of a day that a silo is online")


class Participation(Part):
    """Which silos are selected. A bare number is the rate."""

    rate: Number = Field(1.0, gt=0.0, le=1.0, description="fraction of the eligible silos that are selected in a round")
    kind: Literal["uniform", "by_data", "availability", "power_of_choice"] = Field(
        "uniform",
        description=(
            "uniform: with equal probability; by_data: in proportion to their samples; availability: with equal "
            "probability among the silos that are online; power_of_choice: those with the highest last-known loss"
        ),
    )
    minimum: Count | None = Field(
        None,
        description="number of joined silos (of those that the method can select) at which the run starts; later ones "
        "are selected once they have joined, so results then depend on when silos join; with partition.kind own the "
        "labels are those of the silos that start; null: all silos",
    )
    candidates: Count | None = Field(
        None, description="power_of_choice: silos sampled as candidates; null: twice the number selected"
    )
    trace: Path | None = Field(None, description="availability: CSV with the columns silo, on, off [s]")
    repeat: Positive | None = Field(None, description="availability: period after which the trace repeats [s]")
    diurnal: Diurnal | None = Field(None, description="availability: a generated daily cycle instead of a trace")
    interrupted: Literal["wait", "lost"] = Field(
        "wait", description="availability: a silo that goes offline during a task replies once it is back, or never"
    )

    @model_validator(mode="after")
    def _trace_where_needed(self) -> Participation:
        given = (self.trace is not None) + (self.diurnal is not None)
        if self.kind == "availability" and given != 1:
            raise ConflictError("participation.kind", "availability needs participation.trace or participation.diurnal")
        if self.kind != "availability" and (given or self.repeat):
            raise ConflictError(
                "participation.kind", "must be availability with participation.trace, .repeat or .diurnal"
            )
        if self.repeat and self.trace is None:
            raise ConflictError("participation.repeat", "needs participation.trace")
        return self


class DeviceClass(Part):
    """Silos with the same kind of machine."""

    slowdown: Positive = Field(description="slowdown relative to an average silo")
    share: Fraction = Field(0.0, description="fraction of all silos, rounded to whole silos, drawn by the seed")
    silos: tuple[Name, ...] = Field((), description="further silos, by name")


#: Rough orders of magnitude, not measurements. Values given in the scenario override those of its preset.
COST_PRESETS: Mapping[str, Mapping[str, float | str]] = {
    "hospital": {
        "seconds_per_sample": 0.02,
        "jitter_sigma": 0.2,
        "latency": 0.02,
        "down_bandwidth": 25e6,
        "up_bandwidth": 6e6,
        "loss": 0.001,
    },
    "bank": {
        "seconds_per_sample": 0.005,
        "speed_sigma": 0.2,
        "jitter_sigma": 0.05,
        "latency": 0.01,
        "bandwidth": 125e6,
    },
    "edge": {
        "seconds_per_sample": 0.1,
        "speed_sigma": 1.0,
        "jitter": "pareto",
        "latency": 0.1,
        "down_bandwidth": 6e6,
        "up_bandwidth": 1.2e6,
        "loss": 0.02,
    },
    "gpu_farm": {
        "seconds_per_sample": 0.0005,
        "speed_sigma": 0.1,
        "jitter_sigma": 0.05,
        "latency": 0.0005,
        "bandwidth": 1.25e9,
    },
}


class Cost(Part):
    """Cost of a task in virtual time."""

    preset: Literal["hospital", "bank", "edge", "gpu_farm"] | None = Field(
        None, description="defaults for the keys that are not given"
    )
    seconds_per_sample: NonNegative = Field(
        0.01, description="compute time per sample and epoch on an average silo [s]"
    )
    speed_sigma: Number = Field(0.5, ge=0.0, le=10.0, description="log-normal spread of silo speeds")
    classes: dict[Name, DeviceClass] = Field(default_factory=dict, description="device classes, by name")
    jitter: Literal["lognormal", "pareto"] = Field(
        "lognormal", description="distribution of a task's time factor; median 1"
    )
    jitter_sigma: Number = Field(0.1, ge=0.0, le=10.0, description="lognormal: spread between tasks")
    jitter_tail: Positive = Field(1.5, ge=0.1, description="pareto: tail exponent; smaller means a heavier tail")
    latency: NonNegative = Field(0.05, description="one-way latency [s]")
    bandwidth: Positive = Field(10e6, description="bandwidth of a silo's link, each way [bytes/s]")
    down_bandwidth: Positive | None = Field(None, description="bandwidth to the silo; null: `bandwidth` [bytes/s]")
    up_bandwidth: Positive | None = Field(None, description="bandwidth from the silo; null: `bandwidth` [bytes/s]")
    loss: Number = Field(0.0, ge=0.0, lt=1.0, description="fraction of the messages that are lost and sent again")

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        return {**COST_PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given

    @model_validator(mode="after")
    def _shares_fit(self) -> Cost:
        if sum(machines.share for machines in self.classes.values()) > 1.0 + 1e-9:
            raise ConflictError("cost.classes", "must have shares that sum to at most 1")
        named = [silo for machines in self.classes.values() for silo in machines.silos]
        twice = next((silo for silo in named if named.count(silo) > 1), None)
        if twice is not None:
            raise ConflictError("cost.classes", f"lists {twice} more than once; keep it in one class")
        return self


class Needs(Part):
    """What the processes of silos and the evaluator need of a cluster's machines (launchers ray and slurm)."""

    cpus: Number = Field(
        1.0, ge=0.0, le=1024, description="processor cores of each process; may be a fraction, which Slurm rounds up"
    )
    gpus: Number = Field(0.0, ge=0.0, le=16, description="GPUs of each process; 0.25 lets four share one, not on Slurm")
    memory_gb: Positive | None = Field(None, description="memory of each process [GB]; null: not considered")


class Silos(Part):
    """The number of silos, and how many of them train in parallel on one machine."""

    count: Whole = Field(30, ge=1, le=1024, description="number of silos")
    slots: Count | None = Field(None, description="silos that train in parallel; null: the number of cores")
    hosts: Count | None = Field(
        None,
        description=(
            "launcher local: number of host processes, each of which runs several silos in turn; null: one process "
            "per silo if memory and file descriptors suffice, otherwise twice as many hosts as slots"
        ),
    )
    needs: Needs = Needs()
    without: tuple[Name, ...] = Field(
        (),
        # Not part of the id of a run without such silos.
        exclude_if=lambda names: not names,
        description="silos that take no part; the others keep their data, names and random draws, see "
        "docs/howto/forget.md",
    )

    @field_validator("without")
    @classmethod
    def _in_one_order(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(given)))


@functools.lru_cache
def silo_names(count: int) -> tuple[str, ...]:
    """``silo-00``, ``silo-01``, ... with as many digits as needed, at least two."""
    width = max(2, len(str(count - 1)))
    return tuple(f"silo-{index:0{width}d}" for index in range(count))


class Evaluation(Part):
    """What is measured on which held-out items, and when."""

    heldout: Literal["shared", "own", "both"] | None = Field(
        None,
        description=(
            "partition.kind own: held-out items on which models are evaluated: those of the evaluator (shared), "
            "those of each silo, by the silo itself (own), or both; null: own with partition.kind own, otherwise "
            "shared"
        ),
    )

    every: Whole = Field(
        10, ge=0, description="rounds between evaluations; 0: only before the first and after the last round"
    )
    personal_every: Whole = Field(
        0,
        ge=0,
        description="rounds between evaluations of personal models, for methods that have them; 0: only at the end",
    )
    split: Literal["val", "test"] = Field("test", description="split whose items are the queries")
    gallery: Literal["split", "database"] = Field(
        "split",
        description="gallery of label-based metrics: the split's other modality, or all items outside the split except "
        "public ones (for Wikipedia also except validation items)",
    )
    silo_gallery: Literal["whole", "own"] = Field(
        "whole", description="gallery for a silo's held-out items: the whole one, or its own part, which is easier"
    )
    fold_size: Count | None = Field(
        None, description="also report recall as the mean over consecutive folds of this number of items of the split"
    )
    within: bool = Field(False, description="also retrieve images by images and texts by texts; needs gallery database")
    map_at: tuple[Count, ...] = Field(
        (), description="cut-offs R of mAP@R, in addition to the mAP over the whole ranking"
    )
    map_denominator: Literal["retrieved", "total", "min"] = Field(
        "retrieved",
        description="denominator of AP@R: number of relevant items among the first R, of all relevant items, or the "
        "smaller of the latter and R",
    )
    map_empty: Literal["zero", "skip"] = Field(
        "zero", description="queries without relevant items count as 0 in the mAP, or are left out"
    )
    ndcg_at: tuple[Count, ...] = Field((), description="cut-offs N of NDCG@N")
    ndcg_ideal: Literal["database", "retrieved"] = Field("database", description="items of NDCG's ideal ranking")
    metrics: tuple[MetricSource, ...] = Field(
        (), description="additional metrics: Python files (./mine.py), or names in the entry point group fedmq.metrics"
    )

    keep: Literal["last", "best"] = Field(
        "last",
        description="best: also keep the model with the highest mean R@1 of all evaluated versions, in `best/` of the "
        "run folder; needs split val",
    )
    patience: Count | None = Field(
        None,
        description="end the run after this number of evaluations without a higher mean R@1; the rounds wait for each "
        "evaluation; needs split val and every above 0; null: all rounds are run",
    )

    def due(self, version: int, rounds: int) -> bool:
        """Whether a version of a run with this number of rounds is evaluated."""
        return version in (0, rounds) or bool(self.every and version % self.every == 0)

    @model_validator(mode="after")
    def _validation_decides(self) -> Evaluation:
        if (self.keep == "best" or self.patience is not None) and self.split != "val":
            key, needs = ("keep", "best needs") if self.keep == "best" else ("patience", "needs")
            why = "test items must not choose the model"
            raise ConflictError(f"evaluation.{key}", f"{needs} evaluation.split val: {why}")
        if self.patience is not None and not self.every:
            raise ConflictError("evaluation.patience", "needs evaluation.every above 0")
        return self

    @model_validator(mode="after")
    def _no_query_finds_itself(self) -> Evaluation:
        if self.within and self.gallery != "database":
            why = "in the split a query finds itself"
            raise ConflictError("evaluation.within", f"needs evaluation.gallery database: {why}")
        return self


class UpdateCompression(Part):
    """How a silo compresses its updates. What it leaves out of one is added to its next, except with bfloat16."""

    kind: Literal["none", "bfloat16", "int8", "top_k", "low_rank"] = Field(
        "none",
        description="bfloat16: half of the bytes; int8: a quarter, with a scale for each 1024 values; top_k: the "
        "values of largest magnitude, 8 bytes each; low_rank: two factors of each matrix (PowerSGD). What one of the "
        "last three leaves out of an update is added to the silo's next one",
    )
    fraction: Number = Field(0.1, gt=0.0, le=0.5, description="top_k: fraction of the values that are sent")
    rank: Whole = Field(
        8, ge=1, le=64, description="low_rank: columns of each factor; other tensors and small matrices are sent whole"
    )


class ModelCompression(Part):
    """How the model is compressed that is sent to silos; the coordinator and the evaluator keep the exact one."""

    kind: Literal["none", "bfloat16", "int8"] = Field(
        "none", description="bfloat16: half of the bytes; int8: a quarter, with a scale for each 1024 values"
    )


class Compression(Part):
    """Fewer bytes for models and updates: each end continues with the values that the other decodes."""

    updates: UpdateCompression = UpdateCompression()
    model: ModelCompression = ModelCompression()
