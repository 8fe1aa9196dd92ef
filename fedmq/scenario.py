"""A scenario: one YAML file that says everything about a run, validated before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedmq.errors import InputError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


class Part(BaseModel):
    """Every part of a scenario is frozen and refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ProtocolChoice(BaseModel):
    """Which federated method runs; the other keys are that method's own options, checked by its dataclass."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Name

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options as written."""
        return dict(self.model_extra or {})


class Data(Part):
    """Which data set the silos share out among themselves."""

    name: Literal["openmoji", "features"] = Field(description="data set")
    path: Path | None = Field(None, description="file of a `features` data set (.npz or .safetensors)")

    @model_validator(mode="after")
    def _path_where_needed(self) -> Data:
        if self.name == "features" and self.path is None:
            raise ValueError("data.path is needed when data.name is features: a .npz or .safetensors file")
        if self.name == "openmoji" and self.path is not None:
            raise ValueError("data.path is for data.name features; openmoji comes from a package")
        return self


class Backbone(Part):
    """The frozen encoder under the trainable adapters and heads."""

    name: str = Field("lite", min_length=1, description="lite, features, or the name of any open_clip model")
    pretrained: str | None = Field(None, description="open_clip tag or local file; null means random weights")
    adapter_site: Literal["feature", "blocks"] = Field("feature", description="where the bottleneck adapters sit")
    bottleneck: Count = Field(64, description="width of the adapters")
    head: Literal["residual", "mlp"] = Field("residual", description="z = x + mlp(x), or z = mlp(x) as RCSR prints it")
    dim: Count | None = Field(None, description="joint dimension of an mlp head; null means the encoder's own")
    adapter_std: NonNegative = Field(0.01, description="initial standard deviation of adapter weights")
    head_std: NonNegative = Field(0.02, description="initial standard deviation of head weights")

    @model_validator(mode="after")
    def _site_fits(self) -> Backbone:
        if self.adapter_site == "blocks" and self.name in ("lite", "features"):
            raise ValueError(f"backbone.adapter_site blocks needs an open_clip model, not {self.name}")
        return self


class Silos(Part):
    """How many silos there are and how many of them train at once on one machine."""

    count: Count = 30
    slots: Count | None = Field(None, description="silos training at once; null means the machine's cores")


class Partition(Part):
    """How the training data is shared out."""

    kind: Literal["iid", "dir_class", "dir_clusters", "shards_classes"] = Field(
        "dir_clusters", description="iid, Dirichlet over labels, Dirichlet over text clusters, classes per silo"
    )
    alpha: Positive = Field(0.1, description="Dirichlet concentration")
    clusters: Count = Field(50, description="text clusters of dir_clusters")
    classes_per_silo: Count = Field(3, description="classes per silo of shards_classes")
    balanced: bool = Field(False, description="dir_class: silos that already hold n/K samples get no more")


class MissingModality(Part):
    """Which silos lack a modality."""

    rate: Fraction = Field(0.0, description="share of silos with a single modality")
    seed: int = Field(42, ge=0, description="of the assignment, apart from the run's seed")
    silos: dict[Name, Literal["image", "text"]] = Field(
        default_factory=dict, description="listed by hand: silo name to the one modality it has; replaces rate"
    )

    @model_validator(mode="after")
    def _one_way(self) -> MissingModality:
        if self.silos and self.rate > 0:
            raise ValueError("give missing_modality.rate or missing_modality.silos, not both")
        return self


class Training(Part):
    """Local training, the same for every method."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: Positive = 1e-4
    weight_decay: NonNegative = 0.01
    batch_size: Count = 128
    local_epochs: Count = 1
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_rounds: int = Field(5, ge=0, description="linear warm-up of the learning rate")
    floor: Fraction = Field(0.01, description="share of the learning rate that the cosine ends at")

    def rate_at(self, round_: int, rounds: int) -> float:
        """Learning rate of a round: linear warm-up, then cosine to the floor over the rest (RCSR, section 5.1)."""
        if round_ < self.warmup_rounds:
            return self.learning_rate * (round_ + 1) / self.warmup_rounds
        if self.schedule == "constant":
            return self.learning_rate
        done = (round_ - self.warmup_rounds) / max(1, rounds - self.warmup_rounds)
        return self.learning_rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Aggregation(Part):
    """When replies are merged."""

    mode: Literal["sync"] = Field("sync", description="a round waits for its cohort")
    quorum: Fraction = Field(1.0, gt=0.0, description="share of the cohort that is enough once the deadline is over")
    deadline: Positive | None = Field(None, description="seconds a round waits for stragglers; null waits for all")
    lost_after: Positive = Field(60.0, description="real seconds after which a silo that stays away is given up")


class Evaluation(Part):
    """What the evaluator measures and when."""

    every: int = Field(10, ge=0, description="rounds between evaluations; 0 only at the end")
    split: Literal["val", "test"] = "test"


class Cost(Part):
    """What a task costs in virtual time."""

    seconds_per_sample: NonNegative = Field(
        0.01, description="compute of one sample in one epoch on an average silo [s]"
    )
    speed_sigma: NonNegative = Field(0.5, description="log-normal spread of silo speeds")
    jitter_sigma: NonNegative = Field(0.1, description="log-normal spread from task to task")
    latency: NonNegative = Field(0.05, description="one way [s]")
    bandwidth: Positive = Field(10e6, description="of a silo's link, both ways [bytes/s]")


class Privacy(Part):
    """Transforms of a silo's update before it is sealed."""

    clip_norm: Positive | None = Field(None, description="the update is scaled down to at most this L2 norm")
    noise_multiplier: NonNegative = Field(
        0.0, description="Gaussian noise of standard deviation noise_multiplier * clip_norm"
    )

    @model_validator(mode="after")
    def _noise_needs_clip(self) -> Privacy:
        if self.noise_multiplier > 0 and self.clip_norm is None:
            raise ValueError("privacy.noise_multiplier needs privacy.clip_norm: noise is scaled by it")
        return self


class Scenario(Part):
    """Everything about a run. Two equal scenarios on one machine give the same model to the bit."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,47}$")]
    seed: int = Field(0, ge=0, lt=2**63)
    rounds: Count = 200
    participation: float = Field(1.0, gt=0.0, le=1.0, description="share of the eligible silos asked in a round")
    protocol: ProtocolChoice
    data: Data
    backbone: Backbone = Backbone()
    silos: Silos = Silos()
    partition: Partition = Partition()
    missing_modality: MissingModality = MissingModality()
    training: Training = Training()
    aggregation: Aggregation = Aggregation()
    evaluation: Evaluation = Evaluation()
    cost: Cost = Cost()
    privacy: Privacy = Privacy()
    clock: Literal["virtual", "wall"] = "virtual"
    device: Device = "cpu"
    launcher: Literal["local", "none"] = Field("local", description="local starts the silos here; none waits for them")

    @field_validator("protocol", mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        names = set(self.silo_names)
        unknown = sorted(set(self.missing_modality.silos) - names)
        if unknown:
            raise ValueError(
                f"missing_modality.silos names {unknown[0]}, silos are {self.silo_names[0]} to {self.silo_names[-1]}"
            )
        if (
            self.training.warmup_rounds >= self.rounds > 1
            and self.training.schedule == "cosine"
            and self.training.warmup_rounds > 0
        ):
            raise ValueError(
                f"training.warmup_rounds ({self.training.warmup_rounds}) must be below rounds ({self.rounds})"
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


class _Lines(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, which YAML would silently let win."""


def _mapping(loader: _Lines, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Lines.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        InputError: the file is missing, unreadable, no YAML, or no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "a scenario file (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), str(error), "a readable UTF-8 file") from None
    try:
        loaded = yaml.load(text, Loader=_Lines)  # noqa: S506 - a SafeLoader subclass
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise InputError(f"{path}: line {line}", error.problem or "not YAML", "valid YAML") from None
    except yaml.YAMLError as error:
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, "a mapping of scenario keys")
    return loaded


def apply_settings(raw: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    Raises:
        InputError: a setting is not ``key=value``, or goes below something that is no mapping.
    """
    result: dict[str, Any] = {**raw}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError("--set", setting, "key=value, e.g. --set training.learning_rate=0.001")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(f"--set {key}", text, "a YAML value") from None
        place = result
        *parents, leaf = key.split(".")
        for parent in parents:
            below = place.get(parent)
            if isinstance(below, str) and parent == "protocol":
                below = {"name": below}
            if below is not None and not isinstance(below, dict):
                raise InputError(f"--set {key}", setting, f"{parent} holds no further keys")
            place[parent] = {**(below or {})}
            place = place[parent]
        if leaf == "protocol" and not parents and isinstance(value, str):
            value = {"name": value}
        place[leaf] = value
    return result


def _line_of(path: Path, location: Sequence[str | int]) -> int | None:
    """The line of a key in a YAML file, or None (key came from --set or from a default)."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    line = None
    for part in location:
        if not isinstance(node, yaml.MappingNode):
            break
        match = [(key, value) for key, value in node.value if key.value == str(part)]
        if not match:
            break
        line, node = match[0][0].start_mark.line + 1, match[0][1]
    return line


def input_error(error: ValidationError, path: Path, prefix: Sequence[str] = ()) -> InputError:
    """One line for the first thing pydantic found wrong, with file, line and key."""
    first = error.errors()[0]
    location = [*prefix, *(part for part in first["loc"] if isinstance(part, str | int))]
    line = _line_of(path, location)
    where = f"{path}" + (f": line {line}" if line else "") + (f": {'.'.join(map(str, location))}" if location else "")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        found: object = "nothing"
        message = "a value is required here"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        found, message = str(location[-1]), "a known key"
    elif not location or isinstance(first["input"], dict | BaseModel):
        found = "an inconsistent scenario"
    else:
        found = first["input"]
    return InputError(where, found, message[0].lower() + message[1:])


def parse(raw: Mapping[str, Any], path: Path) -> Scenario:
    """Validate a raw scenario.

    Raises:
        InputError: anything is not allowed; ``path`` is named as the place.
    """
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise input_error(error, path) from None


def load(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """Read, override and validate a scenario file.

    Raises:
        InputError: anything is not allowed.
    """
    return parse(apply_settings(read_yaml(path), settings), path)
