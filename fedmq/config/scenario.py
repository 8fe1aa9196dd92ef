"""A scenario: one YAML file that says everything about a run; ``fedmq.config.loader`` reads it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedmq.config.faults import AnyFault, named_silos
from fedmq.config.parts import Aggregation, Cost, Count, Fraction, Name, NonNegative, Part, Participation, Positive
from fedmq.config.user_files import label

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
#: What a device may be called.
DEVICE = r"^(auto|cpu|cuda(:\d+)?)$"
Device = Annotated[str, Field(pattern=DEVICE)]


#: A file of the user's own metrics, or the name of an installed one.
MetricSource = Annotated[str, Field(min_length=1, max_length=4096)]
#: Before the name of a timm model in ``backbone.name``.
TIMM = "timm:"
#: ``backbone.name`` of an image network in a .mat file of MatConvNet, as CNN-F is distributed.
MATCONVNET = "matconvnet"


class ProtocolChoice(BaseModel):
    """Which federated method runs; the other keys are that method's own options, checked by its dataclass."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(min_length=1, description="of a method, of fedmq protocols, or a file of your own: ./mine.py")

    @property
    def options(self) -> Mapping[str, object]:
        """The method's own options as written."""
        return dict(self.model_extra or {})

    @property
    def label(self) -> str:
        """The method's name for people and for file names."""
        return label(self.name)

    def with_options(self, options: Mapping[str, object]) -> ProtocolChoice:
        """The same method with other options."""
        return ProtocolChoice.model_validate({"name": self.name, **options})


class Data(Part):
    """Which data set the silos share out among themselves, and where it lies. Layouts: docs/reference/data_sets.md."""

    name: str = Field(description="data set, of fedmq data list, or a file of your own: ./mine.py")
    path: Path | None = Field(None, description="folder or file of the data set")
    annotations: Path | None = Field(None, description="captions or labels where they are not in their usual place")
    images: Path | None = Field(None, description="folder of the images or videos, likewise")
    text: Literal["sentences", "bag"] | None = Field(
        None, description="encoded sentences or a bag of words; null takes the data set's own"
    )
    queries: Count | None = Field(None, description="test items to draw; null takes the data set's own split")
    val: int | None = Field(None, ge=0, description="validation items to draw")
    train: Count | None = Field(None, description="training items to draw; the rest is database (gallery only)")
    split_seed: int = Field(0, ge=0, description="of a drawn split, apart from the run's seed")
    frames: Count = Field(12, description="frames of a video, evenly spaced")
    captions: Count | None = Field(None, description="captions kept of each item, the first ones; null keeps all")
    missing: Literal["refuse", "skip"] = Field(
        "refuse", description="items without their picture or without a caption: refuse the set, or leave them out"
    )
    labelled: bool = Field(False, description="leave out the items that have no label")


class Backbone(Part):
    """The frozen encoder under the trainable adapters and heads."""

    name: str = Field("lite", min_length=1, description="lite, features, an open_clip model, timm:NAME, or matconvnet")
    pretrained: str | None = Field(None, description="open_clip tag or local file; null means random weights")
    adapter_site: Literal["feature", "blocks"] = Field("feature", description="where the bottleneck adapters sit")
    text_encoder: Path | None = Field(
        None, description="folder of a sentence encoder such as BERT for the texts; null takes the backbone's own"
    )
    end_to_end: bool = Field(
        False, description="train the image network of a .mat file, too, from its weights; it travels with the updates"
    )
    bottleneck: Count = Field(64, description="width of the adapters")
    adapter: Literal["bottleneck", "mma"] = Field(
        "bottleneck", description="each tower's own, or multi-modal with a middle layer both towers share, for pfedmma"
    )
    adapter_scale: NonNegative = Field(0.5, description="factor of what multi-modal adapters add; others know none")
    head: Literal["residual", "mlp"] = Field("residual", description="z = x + mlp(x), or z = mlp(x) as RCSR prints it")
    dim: Count | None = Field(None, description="joint dimension of an mlp head; null means the encoder's own")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the frozen towers' products with adapters in the blocks; bfloat16 by autocast"
    )
    adapter_std: NonNegative = Field(0.01, description="initial standard deviation of adapter weights")
    head_std: NonNegative = Field(0.02, description="initial standard deviation of head weights")

    @model_validator(mode="after")
    def _site_fits(self) -> Backbone:
        if self.text_encoder is not None and (self.name == "features" or self.adapter_site == "blocks"):
            other = "backbone.name features" if self.name == "features" else "backbone.adapter_site blocks"
            raise ValueError(f"backbone.text_encoder is not for {other}")
        if self.pretrained is not None and self.name in ("lite", "features"):
            has = "brings its own weights" if self.name == "lite" else "has no encoder"
            raise ValueError(f"backbone.pretrained is not for backbone.name {self.name}, which {has}")
        if self.end_to_end and self.name != MATCONVNET:
            raise ValueError(f"backbone.end_to_end needs backbone.name {MATCONVNET}, not {self.name}")
        if self.adapter_site == "blocks" and (
            self.name in ("lite", "features", MATCONVNET) or self.name.startswith(TIMM)
        ):
            raise ValueError(f"backbone.adapter_site blocks needs an open_clip model, not {self.name}")
        if self.precision == "bfloat16" and self.adapter_site == "feature":
            raise ValueError(
                "backbone.precision bfloat16 is for adapter_site blocks; features are extracted in float32"
            )
        return self


class Objective(BaseModel):
    """What the silos learn: a base loss with its network; the other keys are that loss's own options.

    Every federated method runs on every base loss it can be defined on, so that methods are compared on equal terms.
    """

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)
    base: str = Field(
        "info_nce",
        min_length=1,
        description="base loss: info_nce trains adapters and heads, those of fedmq losses mostly hash networks; or a "
        "file of your own: ./mine.py",
    )
    bits: Count | None = Field(None, description="length of a code; null: the base's own default (`fedmq losses`)")
    hidden: Count | None = Field(None, description="width of the layer before the code; likewise")

    @property
    def options(self) -> Mapping[str, object]:
        """The base loss's own options as written."""
        return dict(self.model_extra or {})

    def with_options(self, options: Mapping[str, object]) -> Objective:
        """The same base and sizes with other options."""
        sizes = {"base": self.base, "bits": self.bits, "hidden": self.hidden}
        return Objective.model_validate({**sizes, **options})


class Silos(Part):
    """How many silos there are and how many of them train at once on one machine."""

    count: int = Field(30, ge=1, le=1024, description="silos of the federation")
    slots: Count | None = Field(None, description="silos training at once; null means the machine's cores")


class Partition(Part):
    """How the training data is shared out."""

    kind: Literal["iid", "dir_class", "dir_clusters", "shards_classes"] = Field(
        "dir_clusters", description="iid, Dirichlet over labels, Dirichlet over text clusters, classes per silo"
    )
    alpha: Positive = Field(0.1, le=1e6, description="Dirichlet concentration")
    clusters: Count = Field(50, description="text clusters of dir_clusters")
    classes_per_silo: Count = Field(
        3,
        description="shards_classes: classes of a silo; fewer places than classes make it equal shards of sorted items",
    )
    shots: Count | None = Field(
        None, description="shards_classes: training samples of a class in a silo at most (n-way k-shot); null deals all"
    )
    label: Literal["rarest", "first"] = Field(
        "rarest", description="which label of an item with several says whose it is: the rarest, or the first in order"
    )
    balanced: bool = Field(False, description="dir_class: silos that already hold n/K samples get no more")

    @model_validator(mode="after")
    def _shots(self) -> Partition:
        if self.shots is not None and self.kind != "shards_classes":
            raise ValueError(f"partition.shots is for partition.kind shards_classes, found {self.kind}")
        return self


class MissingModality(Part):
    """Which silos lack a modality."""

    rate: Fraction = Field(0.0, description="share of silos with a single modality")
    seed: int = Field(42, ge=0, description="of the assignment, apart from the run's seed")
    only: Literal["image", "text"] | None = Field(
        None, description="the modality that the rate's silos have; null draws it, either alike"
    )
    silos: dict[Name, Literal["image", "text"]] = Field(
        default_factory=dict, description="listed by hand: silo name to the one modality it has; in place of a rate"
    )

    @model_validator(mode="after")
    def _one_way(self) -> MissingModality:
        if self.silos and self.rate > 0:
            raise ValueError("give missing_modality.rate or missing_modality.silos, not both")
        if self.only and self.rate == 0:
            raise ValueError("missing_modality.only is for missing_modality.rate above 0")
        return self


class Training(Part):
    """Local training, the same for every method."""

    optimizer: Literal["adamw", "adam", "sgd"] = Field("adamw", description="of local training")
    learning_rate: Positive = Field(1e-4, description="after the warm-up")
    weight_decay: NonNegative = Field(0.01, description="decoupled with adamw, else added to the gradient")
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="of sgd")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="of adam and adamw: what their two averages keep")
    batch_size: Count = Field(128, description="items; a last batch of fewer counts as well")
    local_epochs: Count = Field(1, description="passes over a silo's own data in a task")
    schedule: Literal["cosine", "linear", "step", "constant"] = Field(
        "cosine", description="of the learning rate over the rounds: falling to the floor, or in steps, or not"
    )
    warmup_rounds: int = Field(
        5,
        ge=0,
        description="linear warm-up of the learning rate; not given, fewer in a run of no more rounds than 5; "
        "with cosine and linear below rounds",
    )
    floor: Fraction = Field(0.01, description="share of the learning rate that cosine and linear end at")
    step_rounds: Count = Field(30, description="step: rounds from one to the next")
    step_factor: float = Field(0.1, gt=0.0, lt=1.0, description="step: what the learning rate is multiplied by")

    def rate_at(self, round_: int, rounds: int) -> float:
        """Learning rate of a round: linear warm-up, then by the schedule over the rest.

        The cosine is that of RCSR, section 5.1; the line that of DCMH's code (to 1e-6, a floor of 3.2e-5), the steps, a
        tenth each 30 epochs, those of GreedyHash's.
        """
        if round_ < self.warmup_rounds:
            return self.learning_rate * (round_ + 1) / self.warmup_rounds
        after = round_ - self.warmup_rounds
        done = min(1.0, after / max(1, rounds - self.warmup_rounds))
        match self.schedule:
            case "cosine":
                share = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
            case "linear":
                share = 1 - (1 - self.floor) * done
            case "step":
                share = self.step_factor ** (after // self.step_rounds)
            case "constant":
                share = 1.0
        return self.learning_rate * share


class Evaluation(Part):
    """What the evaluator measures and when."""

    every: int = Field(10, ge=0, description="rounds between evaluations; 0 only before the first and after the last")
    personal_every: int = Field(
        0,
        ge=0,
        description="rounds between measurements of the silos' own models, where a method has such; 0 only at the end",
    )
    split: Literal["val", "test"] = Field("test", description="whose items are the queries")
    gallery: Literal["split", "database"] = Field(
        "split",
        description="what label metrics retrieve from: the split's other modality, or all items outside the split but "
        "public ones (of Wikipedia but validation ones, too)",
    )
    fold_size: Count | None = Field(
        None, description="also recall within consecutive folds of so many items of the split, the mean over folds"
    )
    within: bool = Field(
        False, description="also retrieve images by images and texts by texts, from gallery database, which it needs"
    )
    map_at: tuple[Count, ...] = Field((), description="cut-offs R of mAP@R, beside the mAP over the whole list")
    map_denominator: Literal["retrieved", "total", "min"] = Field(
        "retrieved",
        description="what mAP@R divides by: relevant items among the first R, all relevant ones, or the lesser of "
        "these and R",
    )
    map_empty: Literal["zero", "skip"] = Field(
        "zero", description="a query with nothing relevant counts 0 in the mAP, or is left out"
    )
    ndcg_at: tuple[Count, ...] = Field((), description="cut-offs N of NDCG@N")
    ndcg_ideal: Literal["database", "retrieved"] = Field("database", description="what NDCG's ideal list is made of")
    metrics: tuple[MetricSource, ...] = Field(
        (), description="further metrics: Python files (./mine.py) or names of the entry point group fedmq.metrics"
    )

    @model_validator(mode="after")
    def _no_query_finds_itself(self) -> Evaluation:
        if self.within and self.gallery != "database":
            raise ValueError("evaluation.within needs evaluation.gallery database: in the split a query finds itself")
        return self


class Privacy(Part):
    """Transforms of a silo's update before it is sealed."""

    clip_norm: Positive | None = Field(None, description="the update is scaled down to at most this L2 norm")
    noise_multiplier: NonNegative = Field(
        0.0, description="Gaussian noise of standard deviation noise_multiplier * clip_norm, which must be given, too"
    )
    noise_from: Literal["seed", "key"] = Field(
        "seed",
        description="seed: noise repeats with the run and hides nothing from whoever knows the scenario; key: it comes "
        "from the silo's private key and the update, nobody else can derive it, a run cannot be replayed, and launcher "
        "inline has no keys",
    )

    @model_validator(mode="after")
    def _noise_needs_clip(self) -> Privacy:
        if self.noise_multiplier > 0 and self.clip_norm is None:
            raise ValueError("privacy.noise_multiplier needs privacy.clip_norm: noise is scaled by it")
        if self.noise_from == "key" and self.noise_multiplier == 0:
            raise ValueError("privacy.noise_from key needs privacy.noise_multiplier above 0: there is no noise")
        return self


class Scenario(Part):
    """Everything about a run. Two equal scenarios on one machine give the same model to the bit."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,47}$",
        description="of the run, for folders and tables: small letters, digits, `_`, `.` and `-`, at most 48",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="every random draw derives from it")
    rounds: Count = Field(200, description="merges of the shared model, in every mode of aggregation")
    participation: Participation = Participation()
    protocol: ProtocolChoice
    data: Data
    backbone: Backbone = Backbone()
    objective: Objective = Objective()
    silos: Silos = Silos()
    partition: Partition = Partition()
    missing_modality: MissingModality = MissingModality()
    training: Training = Training()
    aggregation: Aggregation = Aggregation()
    evaluation: Evaluation = Evaluation()
    cost: Cost = Cost()
    privacy: Privacy = Privacy()
    faults: tuple[AnyFault, ...] = Field((), description="scripted faults; docs/reference/faults.md lists them")
    clock: Literal["virtual", "wall"] = Field(
        "virtual", description="virtual: time is made up from `cost`, and a run repeats to the bit; wall: real time"
    )
    device: Device = Field("cpu", description="of every silo and the evaluator: auto, cpu, cuda or cuda:N")
    launcher: Literal["local", "inline", "none"] = Field(
        "local",
        description="local starts the silos here; inline runs them in the coordinator's process without messages: the "
        "same model to the bit, no logged messages but the coordinator's notes; none is for silos started "
        "by hand, with the programs' own commands",
    )

    @model_validator(mode="before")
    @classmethod
    def _short_warmup(cls, given: object) -> object:
        """In a run of five rounds or fewer the default warm-up, which nobody chose, leaves the last round to itself."""
        rounds = given.get("rounds") if isinstance(given, dict) else None
        # 4.0 is taken for 4 as everywhere; what is no number of rounds has an error of its own.
        if not isinstance(given, dict) or isinstance(rounds, bool) or not isinstance(rounds, int | float) or rounds % 1:
            return given
        training, most = given.get("training") or {}, int(rounds) - 1
        default = Training.model_fields["warmup_rounds"].default
        if not isinstance(training, dict) or "warmup_rounds" in training or not 0 <= most < default:
            return given
        return {**given, "training": {**training, "warmup_rounds": most}}

    @field_validator("protocol", mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("objective", mode="before")
    @classmethod
    def _short_objective(cls, value: object) -> object:
        return {"base": value} if isinstance(value, str) else value

    @field_validator("participation", mode="before")
    @classmethod
    def _short_participation(cls, value: object) -> object:
        return value if isinstance(value, dict | Participation) else {"rate": value}

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = set(self.silo_names)
        unknown = sorted(set(self.missing_modality.silos) - names)
        if unknown:
            raise ValueError(
                f"missing_modality.silos names {unknown[0]}, silos are {self.silo_names[0]} to {self.silo_names[-1]}"
            )
        aimed = sorted(named_silos(self.faults) - names)
        if aimed:
            raise ValueError(f"faults names {aimed[0]}, silos are {self.silo_names[0]} to {self.silo_names[-1]}")
        strange = [silo for each in self.cost.classes.values() for silo in each.silos if silo not in names]
        if strange:
            known = f"{self.silo_names[0]} to {self.silo_names[-1]}"
            raise ValueError(f"cost.classes names {strange[0]}, silos are {known}")
        if (
            self.training.warmup_rounds >= self.rounds > 1
            and self.training.schedule in ("cosine", "linear")
            and self.training.warmup_rounds > 0
        ):
            raise ValueError(
                f"training.warmup_rounds ({self.training.warmup_rounds}) must be below rounds ({self.rounds})"
            )
        robust, count = self.aggregation.robust, self.silos.count
        if robust.rule == "krum" and robust.keep is not None and robust.keep >= count:
            raise ValueError(
                f"aggregation.robust.keep ({robust.keep}) must be below silos.count ({count}): krum leaves nobody out"
            )
        if self.privacy.noise_from == "key" and self.launcher == "inline":
            raise ValueError(
                "privacy.noise_from key is not for launcher inline, whose silos have no keys (compare and sweep: give "
                "--processes)"
            )
        return self

    @property
    def silo_names(self) -> tuple[str, ...]:
        """``silo-00``, ``silo-01``, ... with as many digits as needed, at least two."""
        width = max(2, len(str(self.silos.count - 1)))
        return tuple(f"silo-{index:0{width}d}" for index in range(self.silos.count))

    @property
    def slots(self) -> int:
        """How many silos train at once on this machine."""
        return self.silos.slots or os.cpu_count() or 1

    def dump(self) -> str:
        """The scenario as YAML with every default written out."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
