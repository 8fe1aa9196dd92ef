"""A scenario: one YAML file that says everything about a run, validated before anything starts."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedmq.errors import InputError
from fedmq.faults import AnyFault, named_silos
from fedmq.parts import Aggregation, Cost, Count, Fraction, Name, NonNegative, Part, Participation, Positive

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]


#: Before the name of a timm model in ``backbone.name``.
TIMM = "timm:"
#: ``backbone.name`` of an image network in a .mat file of MatConvNet, as CNN-F is distributed.
MATCONVNET = "matconvnet"


class ProtocolChoice(BaseModel):
    """Which federated method runs; the other keys are that method's own options, checked by its dataclass."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: Name

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options as written."""
        return dict(self.model_extra or {})


class Data(Part):
    """Which data set the silos share out among themselves, and where it lies. Layouts: docs/data.md."""

    name: str = Field(description="data set, of fedmq data list")
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
    missing: Literal["refuse", "skip"] = Field(
        "refuse", description="items without their picture or without a caption: refuse the set, or leave them out"
    )
    labelled: bool = Field(False, description="leave out the items that have no label")

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        from fedmq.data import sets  # noqa: PLC0415 - the loaders themselves read this class

        if value not in sets.names():
            raise ValueError(f"one of {', '.join(sets.names())}")
        return value

    @model_validator(mode="after")
    def _path_where_needed(self) -> Data:
        if self.name == "features" and self.path is None:
            raise ValueError("data.path is needed when data.name is features: a .npz or .safetensors file")
        if self.name == "openmoji" and self.path is not None:
            raise ValueError("data.path is not for data.name openmoji, which comes from a package")
        if self.path is None and self.name != "openmoji":
            raise ValueError(f"data.path is needed when data.name is {self.name}; docs/data.md shows its layout")
        if self.name in ("openmoji", "features"):
            own = self.model_dump(exclude={"name", "path"}, exclude_defaults=True)
            if own:
                raise ValueError(f"data.{next(iter(own))} is not for data.name {self.name}")
        return self


class Backbone(Part):
    """The frozen encoder under the trainable adapters and heads."""

    name: str = Field("lite", min_length=1, description="lite, features, an open_clip model, timm:NAME, or matconvnet")
    pretrained: str | None = Field(None, description="open_clip tag or local file; null means random weights")
    adapter_site: Literal["feature", "blocks"] = Field("feature", description="where the bottleneck adapters sit")
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


Base = Literal[
    "info_nce", "dcmh", "shdch", "dscmr", "dpsh", "dch", "greedyhash", "csq", "triplet", "dgcpn", "djsrh", "jdsh"
]


#: Bases that are defined on frozen features: adapters behind an encoder, DSCMR's towers, similarities of features.
_ON_FEATURES = ("info_nce", "dscmr", "dgcpn", "djsrh", "jdsh")


class Objective(BaseModel):
    """What the silos learn: a base loss with its network; the other keys are that loss's own options.

    Every federated method runs on every base loss it can be defined on, so that methods are compared on equal terms.
    """

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)
    base: Base = Field(
        "info_nce", description="base loss: info_nce trains adapters and heads, the others hash networks"
    )
    bits: Count | None = Field(None, description="length of a code; null takes the base's own default")
    hidden: Count | None = Field(None, description="width of the layer before the code; null takes the paper's")

    @property
    def options(self) -> dict[str, Any]:
        """The base loss's own options as written."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _fits(self) -> Objective:
        if self.base == "info_nce" and (self.bits or self.hidden):
            raise ValueError("objective.bits and objective.hidden belong to hash networks; info_nce has backbone.dim")
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
    label: Literal["rarest", "first"] = Field(
        "rarest", description="which label of an item with several says whose it is: the rarest, or the first in order"
    )
    balanced: bool = Field(False, description="dir_class: silos that already hold n/K samples get no more")


class MissingModality(Part):
    """Which silos lack a modality."""

    rate: Fraction = Field(0.0, description="share of silos with a single modality")
    seed: int = Field(42, ge=0, description="of the assignment, apart from the run's seed")
    only: Literal["image", "text"] | None = Field(
        None, description="the modality that silos with a single one have; null draws it, either alike"
    )
    silos: dict[Name, Literal["image", "text"]] = Field(
        default_factory=dict, description="listed by hand: silo name to the one modality it has; replaces rate"
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

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: Positive = 1e-4
    weight_decay: NonNegative = 0.01
    momentum: float = Field(0.9, ge=0.0, lt=1.0, description="of sgd")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="of adam and adamw: what their two averages keep")
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


class Evaluation(Part):
    """What the evaluator measures and when."""

    every: int = Field(10, ge=0, description="rounds between evaluations; 0 only at the end")
    split: Literal["val", "test"] = "test"
    gallery: Literal["split", "database"] = Field(
        "split",
        description="what label metrics retrieve from: the split's other modality, or all items outside the split",
    )
    fold_size: Count | None = Field(
        None, description="also recall within consecutive folds of so many items of the split, the mean over folds"
    )
    within: bool = Field(False, description="also retrieve images by images and texts by texts, from the database")
    map_at: tuple[Count, ...] = Field((), description="cut-offs R of mAP@R, beside the mAP over the whole list")
    ndcg_at: tuple[Count, ...] = Field((), description="cut-offs N of NDCG@N")
    ndcg_ideal: Literal["database", "retrieved"] = Field("database", description="what NDCG's ideal list is made of")

    @model_validator(mode="after")
    def _no_query_finds_itself(self) -> Evaluation:
        if self.within and self.gallery != "database":
            raise ValueError("evaluation.within needs evaluation.gallery database: in the split a query finds itself")
        return self


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
    faults: tuple[AnyFault, ...] = Field((), description="scripted faults; docs/faults.md lists them")
    clock: Literal["virtual", "wall"] = "virtual"
    device: Device = "cpu"
    launcher: Literal["local", "inline", "none"] = Field(
        "local",
        description="local starts the silos here; inline runs them in the coordinator's process without messages: the "
        "same model to the bit, no message logs; none waits for silos started by hand",
    )

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
    def _trains_end_to_end(self) -> Scenario:
        base = self.objective.base
        if self.backbone.end_to_end and base in _ON_FEATURES:
            raise ValueError(f"backbone.end_to_end is for hash networks on labels, not objective.base {base}")
        return self

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
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            what = "a mapping or list in place of a key; text with braces needs quotes"
            raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
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
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, such as 2026-13-01
        raise InputError(str(path), str(error).splitlines()[0], "valid YAML") from None
    except RecursionError:
        raise InputError(str(path), "brackets or indents nested far too deep", "valid YAML") from None
    if not isinstance(loaded, dict):
        raise InputError(str(path), type(loaded).__name__, "a mapping of scenario keys")
    return loaded


class Overridden(dict[str, Any]):
    """A raw scenario that knows which of its keys were set over the file's, for errors to name the right place.

    Args:
        values: of the raw scenario.
        keys: as ``--set`` names them, the last one last.
    """

    def __init__(self, values: Mapping[str, Any], keys: Sequence[str]) -> None:
        super().__init__(values)
        self.overridden = tuple(keys)


def apply_settings(raw: Mapping[str, Any], settings: Sequence[str]) -> Overridden:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    Raises:
        InputError: a setting is not ``key=value``, or goes below something that is no mapping.
    """
    result: dict[str, Any] = {**raw}
    keys = [*(raw.overridden if isinstance(raw, Overridden) else ())]
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError("--set", setting, "key=value, e.g. --set training.learning_rate=0.001")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise InputError(f"--set {key}", text[:60], "a YAML value") from None
        place = result
        *parents, leaf = key.split(".")
        for parent in parents:
            below = place.get(parent)
            if isinstance(below, str) and parent in ("protocol", "objective"):
                below = {"name" if parent == "protocol" else "base": below}
            if isinstance(below, int | float) and parent == "participation":
                below = {"rate": below}
            if below is not None and not isinstance(below, dict):
                raise InputError(f"--set {key}", setting, f"{parent} holds no further keys")
            place[parent] = {**(below or {})}
            place = place[parent]
        if leaf in ("protocol", "objective") and not parents and isinstance(value, str):
            value = {"name" if leaf == "protocol" else "base": value}
        place[leaf] = value
        keys.append(key)
    return Overridden(result, keys)


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


def nearest(name: str, known: Collection[str]) -> list[str]:
    """The names a user may have meant, best first; all of them if none is near."""
    return difflib.get_close_matches(name, known, n=5) or list(known)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a type: of its options, items and values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _keys_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """The keys that a place in a model knows; pydantic's places also hold indices and kinds of a union."""
    models = [model]
    for part in location:
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        of_kind = [
            each for each in models if any(part in get_args(field.annotation) for field in each.model_fields.values())
        ]
        models = [below for field in fields for below in _models(field.annotation)] or of_kind or models
    return list(dict.fromkeys(name for each in models for name in each.model_fields))


def _place_of(path: Path, location: Sequence[str | int], settings: Sequence[str]) -> str:
    """File with line and key; for what was set over the file, the setting in place of the line."""
    key = ".".join(map(str, location))
    given = [each for each in settings if f"{key}.".startswith(f"{each}.")]
    if given:
        return f"{path}: --set {given[-1]}" + (f": {key}" if given[-1] != key else "")
    line = _line_of(path, location)
    return f"{path}" + (f": line {line}" if line else "") + (f": {key}" if key else "")


def input_error(
    error: ValidationError,
    path: Path,
    prefix: Sequence[str] = (),
    *,
    model: type[BaseModel] | None = None,
    settings: Sequence[str] = (),
) -> InputError:
    """One line for the first thing pydantic found wrong, with file, line and key.

    Args:
        error: what pydantic found.
        path: the file.
        prefix: keys above what was validated.
        model: what was validated; with it an unknown key's error names the nearest ones there are.
        settings: keys whose values are not the file's but ``--set``'s.
    """
    first = error.errors()[0]
    location = [*prefix, *(part for part in first["loc"] if isinstance(part, str | int))]
    where = _place_of(path, location, settings)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        found: object = "nothing"
        message = "a value is required here"
    elif first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        found, message = str(location[-1]), "a known key"
        if model is not None:
            below = first["loc"][:-1]
            message += f": {', '.join(nearest(found, _keys_at(model, below)))}"
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
    for command in ("compare", "sweep"):
        if command in raw:
            raise InputError(str(path), "a comparison file", f"a scenario; fedmq {command} {path} runs comparisons")
    settings = raw.overridden if isinstance(raw, Overridden) else ()
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        raise input_error(error, path, model=Scenario, settings=settings) from None
    for location, value in _truths_for_numbers(raw, scenario):
        raise InputError(_place_of(path, location, settings), value, "a number; true and false are none")
    return scenario


def _truths_for_numbers(raw: Any, made: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, bool]]:
    """Where a raw value is true or false and became something else: pydantic takes them for 1 and 0.

    Its strict mode would also refuse ``1e-4``, which is a text to YAML 1.1, and a path, which always is.
    """
    if isinstance(raw, bool):
        if not isinstance(made, bool):
            yield above, raw
    elif isinstance(raw, Mapping):
        for key, value in raw.items():
            below = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), value)
            yield from _truths_for_numbers(value, below, (*above, key))
    elif isinstance(raw, list | tuple) and isinstance(made, list | tuple):
        for place, pair in enumerate(zip(raw, made, strict=False)):
            yield from _truths_for_numbers(*pair, (*above, place))


def load(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """Read, override and validate a scenario file.

    Raises:
        InputError: anything is not allowed.
    """
    return parse(apply_settings(read_yaml(path), settings), path)
