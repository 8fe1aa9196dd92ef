"""Schema of a scenario, the YAML file that defines a run; ``fedmq.config.resolve`` reads it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fedmq.config import yaml_files
from fedmq.config.faults import ON_MESSAGES, AnyFault, check_own_data, named_silos
from fedmq.config.plug_ins import label
from fedmq.config.privacy import Privacy
from fedmq.config.sections import (
    Aggregation,
    Compression,
    Cost,
    Count,
    Evaluation,
    Fraction,
    MissingModality,
    NonNegative,
    Number,
    Part,
    Participation,
    Passes,
    Positive,
    Silos,
    Whole,
    Width,
    Wire,
    silo_names,
)
from fedmq.errors import ConflictError, InputError

TrackerName = Literal["tensorboard", "mlflow", "wandb", "csv"]
Decay = Annotated[Number, Field(ge=0.0, lt=1.0)]
#: Allowed names of devices.
DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
Device = Annotated[str, Field(pattern=DEVICE)]

#: Prefix of timm models in ``backbone.name``.
TIMM = "timm:"
#: ``backbone.name`` of an image network in a MatConvNet file (.mat), the format of CNN-F.
MATCONVNET = "matconvnet"


class ProtocolChoice(BaseModel):
    """The federated method. All other keys are options of the method, checked by its dataclass."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(
        min_length=1, description="a method listed by `fedmq protocols`, or your own Python file: ./mine.py"
    )

    @property
    def options(self) -> Mapping[str, object]:
        """The method's options as written."""
        return dict(self.model_extra or {})

    @property
    def label(self) -> str:
        """The method's name for display and for file names."""
        return label(self.name)

    def with_options(self, options: Mapping[str, object]) -> ProtocolChoice:
        """The same method with other options."""
        return ProtocolChoice.model_validate({"name": self.name, **options})


class Data(Part):
    """The data set that is partitioned among the silos. docs/reference/data_sets.md has the layouts."""

    name: str = Field(description="a data set listed by `fedmq data list`, or your own Python file: ./mine.py")
    path: Path | None = Field(None, description="folder or file of the data set")
    annotations: Path | None = Field(None, description="captions or labels, if not in their usual place")
    images: Path | None = Field(None, description="folder of the images or videos, if not in its usual place")
    text: Literal["sentences", "bag"] | None = Field(
        None, description="texts as encoded sentences or as bags of words; null: the data set's default"
    )
    queries: Count | None = Field(None, description="number of test items to sample; null: the data set's own split")
    val: Whole | None = Field(None, ge=0, description="number of validation items to sample")
    train: Count | None = Field(
        None, description="number of training items to sample; the rest is only in the gallery (database)"
    )
    split_seed: Whole = Field(0, ge=0, description="seed of a sampled split, independent of the run's seed")
    frames: Count = Field(12, le=10_000, description="frames per video, evenly spaced")
    captions: Count | None = Field(None, description="captions kept per item, the first ones; null: all")
    missing: Literal["refuse", "skip", "keep"] = Field(
        "refuse",
        description="items without an image or a caption: refuse the data set, skip them, or keep images without "
        "captions; a manifest's items that name no image or no caption are kept, unless skipped",
    )
    labelled: bool = Field(False, description="leave out items without a label")
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="column or key of the file whose values assign the items to silos; set by partition.column"
    )


class Backbone(Part):
    """The frozen encoder below the trainable adapters and heads."""

    name: str = Field("lite", min_length=1, description="lite, features, an open_clip model, timm:NAME, or matconvnet")
    pretrained: str | None = Field(None, description="open_clip tag or local weights file; null: random weights")
    adapter_site: Literal["feature", "blocks"] = Field(
        "feature", description="position of the adapters: on the features, or in the encoder's blocks"
    )
    text_encoder: Path | None = Field(
        None, description="folder of a sentence encoder, e.g. BERT; null: the backbone's own text encoder"
    )
    end_to_end: bool = Field(
        False, description="also train the image network of a .mat file, starting from its weights; updates include it"
    )
    bottleneck: Width = Field(64, description="bottleneck width of the adapters; lora: rank")
    adapter: Literal["bottleneck", "mma", "lora"] = Field(
        "bottleneck",
        description="kind; after each block or the features; mma: with a middle layer of both towers; lora: low-rank",
    )
    adapter_scale: NonNegative = Field(0.5, description="mma, lora: factor of the adapters' output; lora: alpha / rank")
    head: Literal["residual", "mlp"] = Field("residual", description="z = x + mlp(x), or z = mlp(x)")
    dim: Width | None = Field(None, description="joint dimension of an mlp head; null: the encoder's own")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="arithmetic of the frozen towers with adapters in the blocks; bfloat16: by autocast"
    )
    adapter_std: NonNegative = Field(0.01, description="initial standard deviation of bottlenecks; mma: of `up`")
    head_std: NonNegative = Field(0.02, description="initial standard deviation of head weights")

    @model_validator(mode="after")
    def _site_fits(self) -> Backbone:
        if self.text_encoder is not None and (self.name == "features" or self.adapter_site == "blocks"):
            other = "backbone.name features" if self.name == "features" else "backbone.adapter_site blocks"
            raise ConflictError("backbone.text_encoder", f"cannot be combined with {other}")
        if self.pretrained is not None and self.name in ("lite", "features"):
            has = "includes its weights" if self.name == "lite" else "has no encoder"
            raise ConflictError(
                "backbone.pretrained", f"cannot be combined with backbone.name {self.name}, which {has}"
            )
        if self.end_to_end and self.name != MATCONVNET:
            raise ConflictError("backbone.end_to_end", f"needs backbone.name {MATCONVNET}, not {self.name}")
        if self.adapter_site == "blocks" and (
            self.name in ("lite", "features", MATCONVNET) or self.name.startswith(TIMM)
        ):
            raise ConflictError("backbone.adapter_site", f"blocks needs an open_clip model, not {self.name}")
        if self.precision == "bfloat16" and self.adapter_site == "feature":
            raise ConflictError(
                "backbone.precision", "bfloat16 needs backbone.adapter_site blocks; features are extracted in float32"
            )
        return self


class Objective(BaseModel):
    """The training objective: a base loss and its network. All other keys are options of the base loss.

    Every method runs on every base loss for which it is defined, so that methods can be compared on equal terms.
    """

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)
    base: str = Field(
        "info_nce",
        min_length=1,
        description="base loss: info_nce, which trains adapters and heads; one listed by `fedmq losses`, most of which "
        "train hash networks; or your own Python file: ./mine.py",
    )
    bits: Width | None = Field(None, description="code length; null: the base loss's default (`fedmq losses`)")
    hidden: Width | None = Field(None, description="width of the layer before the code; null: the base loss's default")

    @property
    def options(self) -> Mapping[str, object]:
        """The base loss's options as written."""
        return dict(self.model_extra or {})

    def with_options(self, options: Mapping[str, object]) -> Objective:
        """The same base loss and sizes with other options."""
        sizes = {"base": self.base, "bits": self.bits, "hidden": self.hidden}
        return Objective.model_validate({**sizes, **options})


class Partition(Part):
    """How the training data is partitioned among the silos."""

    kind: Literal["iid", "dir_class", "dir_clusters", "shards_classes", "column", "own"] = Field(
        "dir_clusters",
        description=(
            "iid: at random; dir_class: Dirichlet over labels; dir_clusters: Dirichlet over text clusters; "
            "shards_classes: a number of classes per silo; column: one silo per value of a column of the data; "
            "own: each silo has its own data, which its site file names, and the scenario has no `data`"
        ),
    )
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None,
        description="column: name of the manifest's column or of the features file's key; the silos get its distinct "
        "values in sorted order",
    )
    alpha: Number = Field(0.1, gt=0.0, le=1e6, description="Dirichlet concentration")
    clusters: Count = Field(50, description="dir_clusters: number of text clusters")
    classes_per_silo: Count = Field(
        3,
        description="shards_classes: classes per silo; if they do not cover all classes, equal shards of the items "
        "sorted by class",
    )
    shots: Count | None = Field(
        None, description="shards_classes: most training samples per class and silo (n-way k-shot); null: no limit"
    )
    label: Literal["rarest", "first"] = Field(
        "rarest",
        description="label by which an item with several labels is assigned to a silo: its rarest or its first",
    )
    balanced: bool = Field(False, description="dir_class: silos that already hold n/K samples receive no more")
    sizes: Literal["proportional", "equal", "dirichlet"] = Field(
        "proportional",
        description="sizes of the silos. proportional: each group is divided in proportion to the silos' shares of it, "
        "n_gk = n_g p_gk / sum_j p_gj, with dir_clusters; equal sizes with iid. equal: n/K items each, sampled by the "
        "silos in turn. dirichlet: sizes from a Dirichlet distribution. equal and dirichlet need dir_clusters or iid",
    )
    sizes_alpha: Number = Field(0.5, gt=0.0, le=1e6, description="sizes dirichlet: concentration; lower is more uneven")
    least: Count = Field(1, description="minimum training items of a silo; smaller silos take items from the largest")

    @model_validator(mode="after")
    def _keys_of_kind(self) -> Partition:
        if self.sizes != "proportional" and self.kind not in ("dir_clusters", "iid"):
            raise ConflictError(
                "partition.sizes", f"{self.sizes} needs partition.kind dir_clusters or iid, found {self.kind}"
            )
        if self.shots is not None and self.kind != "shards_classes":
            raise ConflictError("partition.shots", f"needs partition.kind shards_classes, found {self.kind}")
        if (self.column is None) is (self.kind == "column"):
            raise ConflictError("partition.kind", "column and partition.column need each other")
        return self


class Training(Part):
    """Local training; the same for every method."""

    optimizer: Literal["adamw", "adam", "sgd"] = Field("adamw", description="optimiser of local training")
    learning_rate: Positive = Field(1e-4, description="learning rate after the warm-up")
    weight_decay: NonNegative = Field(0.01, description="decoupled with adamw, otherwise added to the gradient")
    momentum: Number = Field(0.9, ge=0.0, lt=1.0, description="sgd: momentum")
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.999), description="adam and adamw: decay rates of the two moment estimates"
    )
    batch_size: Count = Field(128, description="items per batch; a smaller last batch is used, too")
    local_epochs: Passes = Field(1, description="epochs over the silo's dataset per task")
    validation: Number = Field(
        0.0,
        ge=0.0,
        le=0.9,
        description="fraction of a paired silo's pairs that no method trains on; methods that weight replies by a "
        "measurement at the silo measure on them",
    )
    schedule: Literal["cosine", "linear", "step", "constant"] = Field(
        "cosine", description="learning rate over the rounds: decay to `decay_to`, decay in steps, or constant"
    )
    warmup_rounds: Whole = Field(
        5,
        ge=0,
        description="rounds of linear learning rate warm-up; with cosine and linear below rounds; the default is "
        "rounds - 1 in runs of at most 5 rounds",
    )
    decay_to: Fraction = Field(0.01, description="cosine, linear: rate one round after the last, per learning_rate")
    schedule_rounds: Count | None = Field(
        None,
        description="rounds over which the learning rate and the methods' schedules run, at most rounds; later rounds "
        "keep the final learning rate; null: rounds. `--extend` sets it to the number of rounds before",
    )
    step_rounds: Count = Field(30, description="step: rounds between steps")
    step_factor: Number = Field(0.1, gt=0.0, lt=1.0, description="step: factor of the learning rate at each step")

    def rate_at(self, round_: int, rounds: int) -> float:
        """Learning rate of a round: linear warm-up, then the schedule over the remaining rounds.

        ``cosine`` is the schedule of RCSR, section 5.1; ``linear`` that of DCMH's code, which decays to 1e-6
        (``decay_to`` 3.2e-5); ``step`` that of GreedyHash's code, a tenth every 30 epochs.
        """
        if round_ < self.warmup_rounds:
            return self.learning_rate * (round_ + 1) / self.warmup_rounds
        after = round_ - self.warmup_rounds
        done = min(1.0, after / max(1, rounds - self.warmup_rounds))
        match self.schedule:
            case "cosine":
                share = self.decay_to + (1 - self.decay_to) * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                share = 1 - (1 - self.decay_to) * done
            case "step":
                share = self.step_factor ** (after // self.step_rounds)
            case "constant":
                share = 1.0
        return self.learning_rate * share


def long_form(key: str, value: object) -> object:
    """The mapping that the short form of a section stands for; other values unchanged."""
    if key == "participation" and not isinstance(value, dict | Participation):
        return {"rate": value}
    if isinstance(value, str) and key in ("protocol", "objective"):
        return {"name" if key == "protocol" else "base": value}
    return value


def _short_form(key: str, kinds: Any) -> BeforeValidator:
    return BeforeValidator(partial(long_form, key), json_schema_input_type=kinds)


class Scenario(Part):
    """Definition of a run. Equal scenarios give bit-identical models on the same machine."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,47}$",
        description="name of the run, for folders and tables: at most 48 lower-case letters, digits, `_`, `.` and `-`",
    )
    seed: Whole = Field(0, ge=0, description="seed from which all random draws are derived")
    rounds: Whole = Field(
        200, ge=1, le=10**6, description="number of merges of the shared model, in every aggregation mode"
    )
    participation: Annotated[Participation, _short_form("participation", Fraction | Participation)] = Participation()
    protocol: Annotated[ProtocolChoice, _short_form("protocol", str | ProtocolChoice)]
    data: Data | None = Field(
        None, description="the data set that is partitioned among the silos; none with partition.kind own"
    )
    backbone: Backbone = Backbone()
    objective: Annotated[Objective, _short_form("objective", str | Objective)] = Objective()
    silos: Silos = Silos()
    partition: Partition = Partition()
    missing_modality: MissingModality = MissingModality()
    training: Training = Training()
    aggregation: Aggregation = Aggregation()
    evaluation: Evaluation = Evaluation()
    cost: Cost = Cost()
    privacy: Privacy = Privacy()
    compression: Compression = Compression()
    wire: Wire = Wire()
    faults: tuple[AnyFault, ...] = Field((), description="scripted faults, see docs/reference/faults.md")
    clock: Literal["virtual", "wall"] = Field(
        "virtual", description="virtual: time is simulated from `cost`, and runs are bit-reproducible; wall: real time"
    )
    device: Device = Field("cpu", description="device of every silo and the evaluator: auto, cpu, cuda or cuda:N")
    launcher: Literal["local", "inline", "none", "ray", "slurm"] = Field(
        "local",
        description="local: silos are processes on this machine; inline: silos run in the coordinator's process "
        "without messages, which gives a bit-identical model and logs only the coordinator's notes; none: "
        "coordinator, evaluator and silos are launched manually with their own commands; ray, slurm: evaluator and "
        "silos are processes on the machines of a Ray cluster, or jobs of Slurm, see docs/howto/clusters.md",
    )
    track: tuple[TrackerName, ...] = Field(
        (),
        description="experiment trackers that receive the run's parameters, metrics and files, see docs/howto/track.md",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_warmup(cls, given: object) -> object:
        """Shorten the default warm-up of a schedule of at most five rounds, so that it ends before its last round."""
        training = (given.get("training") or {}) if isinstance(given, dict) else None
        if not isinstance(given, dict) or not isinstance(training, dict) or "warmup_rounds" in training:
            return given
        lengths = (given.get("rounds"), training.get("schedule_rounds"))
        most = min((length for length in lengths if type(length) is int), default=0) - 1
        short = 0 <= most < Training.model_fields["warmup_rounds"].default
        return {**given, "training": {**training, "warmup_rounds": most}} if short else given

    @model_validator(mode="before")
    @classmethod
    def _column_to_read(cls, given: object) -> object:
        """Tell the data set's reader which column the partition needs."""
        partition, data = (given.get(key) for key in ("partition", "data")) if isinstance(given, dict) else (None, None)
        if not isinstance(given, dict) or not isinstance(partition, dict) or not isinstance(data, dict):
            return given
        column = partition.get("column")
        return given if column is None else {**given, "data": {"column": column, **data}}

    @field_validator("track", mode="before", json_schema_input_type=TrackerName | tuple[TrackerName, ...])
    @classmethod
    def _one_tracker(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("track")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in value if value.count(name) > 1]:
            raise ValueError(f"{twice[0]} is listed twice")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        self._check_data()
        silos = {
            "silos.without": self.silos.without,
            "missing_modality.silos": self.missing_modality.silos,
            "faults": named_silos(self.faults),
            "cost.classes": [silo for machines in self.cost.classes.values() for silo in machines.silos],
        }
        for place, named in silos.items():
            if unknown := sorted(set(named) - set(self.all_silo_names)):
                known = f"{self.all_silo_names[0]} to {self.all_silo_names[-1]}"
                raise ConflictError(place, f"names {unknown[0]}, silos are {known}")
        if self.wire.hides and (kinds := [fault.kind for fault in self.faults if isinstance(fault, ON_MESSAGES)]):
            hidden = f"found faults of kind {kinds[0]}, which recognise messages by their names"
            key = "wire.padding" if self.wire.padding else "wire.hide_names"
            raise ConflictError(key, f"needs faults on processes or replies: {hidden}")
        planned = self.training.schedule_rounds
        if planned is not None and planned > self.rounds:
            raise ConflictError("training.schedule_rounds", f"({planned}) must be at most rounds ({self.rounds})")
        if (
            self.training.warmup_rounds >= self.schedule_rounds > 1
            and self.training.schedule in ("cosine", "linear")
            and self.training.warmup_rounds > 0
        ):
            raise ConflictError(
                "training.warmup_rounds",
                f"({self.training.warmup_rounds}) must be below "
                f"{'rounds' if planned is None else 'training.schedule_rounds'} ({self.schedule_rounds}): set "
                f"training.warmup_rounds as well, e.g. to {self.schedule_rounds // 2}",
            )
        if not self.training.rate_at(self.rounds - 1, self.schedule_rounds) > 0:
            raise ConflictError("training.decay_to", "gives a last rate of 0: raise it or training.step_factor")
        robust, count, minimum = self.aggregation.robust, len(self.silo_names), self.participation.minimum
        if not count:
            raise ConflictError("silos.without", "names all silos: leave at least one")
        number = f"silos.count ({count})" if not self.silos.without else f"the number of silos that take part ({count})"
        if minimum is not None and minimum > count:
            raise ConflictError("participation.minimum", f"({minimum}) must be at most {number}")
        if robust.rule == "krum" and robust.keep is not None and robust.keep >= count:
            raise ConflictError(
                "aggregation.robust.keep", f"({robust.keep}) must be below {number}: krum would keep all replies"
            )
        self.privacy.check_fits(self.aggregation, self.compression, self.launcher, self.faults)
        return self

    def _check_data(self) -> None:
        """Refuse sections that do not fit where the data are."""
        if (self.data is None) is not (self.partition.kind == "own"):
            if self.data is None:
                raise ValueError("a section data; only with partition.kind own are the data in each silo's site file")
            raise ConflictError("data", "with partition.kind own; remove it, as each site file has its silo's data")
        if self.data is not None and self.data.column != self.partition.column:
            raise ConflictError(
                "data.column", f"({self.data.column}) must be partition.column ({self.partition.column})"
            )
        if self.data is None and self.missing_modality != MissingModality():
            raise ConflictError("missing_modality", "with partition.kind own; a site file lists its silo's modalities")
        chosen = self.evaluation.keep == "best" or self.evaluation.patience is not None
        if chosen and not self.evaluator:
            raise ConflictError(
                "evaluation.keep", "best and patience need an evaluator: evaluation.heldout shared or both"
            )
        if self.data is None:
            check_own_data(self.faults, self.participation.minimum)
        if self.data is not None and self.evaluation.heldout in ("own", "both"):
            raise ConflictError("evaluation.heldout", f"{self.evaluation.heldout} needs partition.kind own")

    @property
    def dataset(self) -> Data:
        """The data set that is partitioned among the silos.

        Raises:
            InputError: there is none, as each silo has its own data.
        """
        if self.data is None:
            raise InputError("data", "nothing", "a data set: with partition.kind own only the sites have data")
        return self.data

    @property
    def evaluator(self) -> bool:
        """Whether the run has an evaluator with its own held-out items."""
        return self.data is not None or self.evaluation.heldout in ("shared", "both")

    @property
    def silos_evaluate(self) -> bool:
        """Whether silos evaluate the shared model on their own held-out items."""
        return self.data is None and self.evaluation.heldout != "shared"

    @property
    def schedule_rounds(self) -> int:
        """Rounds over which the learning rate and the methods' schedules run."""
        return self.training.schedule_rounds or self.rounds

    @property
    def all_silo_names(self) -> tuple[str, ...]:
        """``silo-00``, ``silo-01``, ... with as many digits as needed, at least two."""
        return silo_names(self.silos.count)

    @property
    def silo_names(self) -> tuple[str, ...]:
        """The silos that take part: all but ``silos.without``."""
        without = self.silos.without
        return tuple(name for name in self.all_silo_names if name not in without) if without else self.all_silo_names

    @property
    def slots(self) -> int:
        """Number of silos that train in parallel on this machine."""
        return self.silos.slots or os.cpu_count() or 1

    def dump(self) -> str:
        """The scenario as YAML with every default written out."""
        return yaml_files.dump(self.model_dump(mode="json"))
