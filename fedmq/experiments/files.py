"""Files of experiments, in YAML: the options of ``fedmq compare`` or ``fedmq sweep``, and what ``fedmq tune`` searches.

The keys of a comparison file are the options of the same names. A file with the key ``compare`` or ``sweep`` is a
comparison file, one with ``tune`` a tuning file; no scenario has these keys. Options of execution (``--out``,
``--jobs``, ...) stay on the command line.

:func:`schema_of` makes JSON schemas of all kinds of files that a user writes, with which editors check them. The models
check more than a schema can say, e.g. that two keys fit together.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from fedmq.config.resolve import ResolvedRun, apply_settings
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Count
from fedmq.config.site import Site
from fedmq.config.yaml_files import read_yaml, validated
from fedmq.errors import InputError
from fedmq.evaluation.custom_metrics import measures_of
from fedmq.evaluation.metrics import known_names
from fedmq.experiments import grid
from fedmq.experiments.grid import Entry, Resolve
from fedmq.experiments.summary import allowed_instead, parse_metrics, parse_target
from fedmq.storage.regular_files import is_file
from fedmq.text import nearest

KINDS = ("compare", "sweep")
#: Value of a sweep's ``select``: the varied values are candidates, selected on the validation split.
ON_VALIDATION = "val"


def _checked(parse: Callable[[str], object]) -> AfterValidator:
    """Validate a text with the parser of its option."""

    def check(text: str) -> str:
        try:
            parse(text)
        except InputError as error:
            raise ValueError(error.allowed) from None
        return text

    return AfterValidator(check)


def _together(value: object) -> object:
    """Join a list into the comma-separated text that an option takes."""
    parts = value if isinstance(value, list) else [value]
    # YAML parses whole numbers, which the option takes as text; booleans are not whole numbers here.
    plain = all(isinstance(part, str | int) and not isinstance(part, bool) for part in parts)
    return ",".join(map(str, parts)) if plain else value


def _selection(text: str) -> None:
    if text != ON_VALIDATION:
        grid.parse_variation(text, "--select")


_Vary = Annotated[str, _checked(partial(grid.parse_variation, option="--vary"))]
_Select = Annotated[str, _checked(_selection)]
_Setting = Annotated[str, _checked(lambda text: apply_settings({}, [text]))]
_Target = Annotated[str, _checked(parse_target)]
_Repeated = BeforeValidator(
    lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | tuple[str, ...]
)
_Listed = BeforeValidator(_together, json_schema_input_type=str | int | tuple[str | int, ...])


class ComparisonFile(BaseModel):
    """A comparison file. Repeatable options are lists; texts are in the form of their options."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    compare: Annotated[tuple[str, ...], _Repeated] = Field(
        (), min_length=1, description="scenarios, relative to this file's folder"
    )
    sweep: str | None = Field(None, description="scenario of fedmq sweep, likewise")
    settings: Annotated[tuple[_Setting, ...], _Repeated] = Field((), alias="set")
    vary: Annotated[tuple[_Vary, ...], _Repeated] = ()
    select: Annotated[tuple[_Select, ...], _Repeated] = ()
    select_seeds: Annotated[str, _checked(grid.parse_seeds), _Listed] | None = None
    select_rounds: Annotated[Count, Field(strict=True)] | None = None
    extensions: int | None = Field(None, ge=0, strict=True)
    seeds: Annotated[str, _checked(grid.parse_seeds), _Listed] | None = None
    metric: Annotated[str, _checked(parse_metrics), _Listed] | None = None
    baseline: str | None = None
    across: str | None = None
    target: Annotated[tuple[_Target, ...], _Repeated] = ()
    zero_shot: bool = False
    yardstick: Annotated[tuple[Literal["classes", "pairs"], ...], _Repeated] = ()
    runs: Path | None = None

    @property
    def kind(self) -> str:
        """The command to which it applies."""
        return "sweep" if self.sweep is not None else "compare"

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Scenario files as written."""
        return self.compare if self.sweep is None else (self.sweep,)


def is_comparison(raw: Mapping[str, object]) -> bool:
    """Whether a YAML file is a comparison file rather than a scenario."""
    return any(kind in raw for kind in KINDS)


def read_comparison(path: Path) -> ComparisonFile | None:
    """Read a comparison file; None if the file is a scenario.

    Raises:
        InputError: it cannot be read, or a key or value in it is not allowed; the error names file, line and key.
    """
    raw = read_yaml(path, "a scenario or comparison")
    if not is_comparison(raw):
        return None
    if all(kind in raw for kind in KINDS):
        raise InputError(str(path), "both compare and sweep", "one of them")
    file = validated(ComparisonFile, raw, path)
    if file.kind == "compare" and ON_VALIDATION in file.select:
        raise InputError(f"{path}: select", ON_VALIDATION, "with sweep; here [METHOD:]KEY=A,B,...")
    for name in file.scenarios:
        scenario = path.parent / name
        if not is_file(scenario):
            raise InputError(f"{path}: {file.kind}", name, f"a scenario file, relative to {path.parent}")
        if is_comparison(read_yaml(scenario)):
            raise InputError(f"{path}: {file.kind}", name, "a scenario, not a comparison file")
    return file


# ------------------------------------------------------------------------------------------------------ tuning files
#: Keys that a search cannot vary, and why.
_FIXED = {
    "seed": "seeds: each trial runs with all of them",
    "name": "another key: the name does not affect the model",
    "rounds": "rounds outside of search, so that trials have equal budgets",
    "protocol": "methods, so that each has the same number of trials",
    "protocol.name": "methods, so that each has the same number of trials",
    "launcher": "another key: the launcher does not affect the model",
    "device": "another key: the device does not affect the model",
    "track": "another key: trackers do not affect the model",
    "wire": "another key: what the wire hides does not affect the model",
    "evaluation": "a key that the trials do not set themselves",
}
_KEY = re.compile(r"\w+(\.[\w-]+)*")


class Range(BaseModel):
    """Numbers from ``low`` to ``high``; whole numbers if both bounds are."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    low: int | float = Field(description="least value")
    high: int | float = Field(description="largest value")
    log: bool = Field(False, description="search on a logarithmic scale")
    step: Annotated[int | float, Field(gt=0)] | None = Field(None, description="distance of two values; not with log")

    @model_validator(mode="after")
    def _consistent(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError("low must be below high, both finite")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low above 0 and no step")
        if self.whole and self.step is not None and not isinstance(self.step, int):
            raise ValueError("step must be whole, as low and high are")
        if self.step is not None and self.step > self.high - self.low:
            raise ValueError("step must be at most high - low, or low is the only value")
        return self

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def _different(values: tuple[Any, ...]) -> tuple[Any, ...]:
    texts = [json.dumps(value, sort_keys=True) for value in values]
    if len(set(texts)) < len(texts):
        raise ValueError("lists a value twice")
    return values


Choices = Annotated[tuple[Any, ...], Field(min_length=2), AfterValidator(_different)]


def _searchable(space: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in space:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key} is not a scenario key, e.g. training.learning_rate")
        for fixed, instead in _FIXED.items():
            if key == fixed or (fixed in ("evaluation", "wire") and key.startswith(f"{fixed}.")):
                raise ValueError(f"{key} cannot be searched; use {instead}")
    return space


Space = Annotated[Mapping[str, Range | Choices], AfterValidator(_searchable)]


class TuneFile(BaseModel):
    """A tuning file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tune: str = Field(min_length=1, description="the scenario, relative to this file's folder")
    set: Annotated[tuple[_Setting, ...], _Repeated] = Field(
        (), description="key=value settings of all trials, as of `--set`"
    )
    search: Space = Field(
        {}, description="scenario keys, each with a list of values or `{low, high}` with `log: true` or `step`"
    )
    methods: Mapping[str, Space] = Field(
        {}, description="methods to tune, each with further keys of its own; the scenario's method by default"
    )
    metric: str = Field("mean_r1", description="metric on the validation split that trials are compared by")
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)] = Field(
        (0,), description="seeds; a trial's value is the mean over them"
    )
    trials: Annotated[Count, Field(strict=True)] = Field(20, description="trials of each method")
    rounds: Annotated[Count, Field(strict=True)] | None = Field(
        None, description="rounds of a trial; null: the scenario's"
    )
    pruning: Literal["none", "median"] = Field(
        "none", description="median: stop a trial whose evaluation is below the median of the finished ones"
    )
    evaluate_every: Annotated[Count, Field(strict=True)] | None = Field(
        None, description="rounds between the evaluations that pruning looks at; null: a fifth of the rounds"
    )
    startup: Annotated[Count, Field(strict=True)] = Field(
        5, description="trials of a method that are drawn at random, and finished trials before pruning begins"
    )
    sampler: Literal["tpe", "random"] = Field("tpe", description="tpe: tree-structured Parzen estimator; or random")
    seed: int = Field(0, ge=0, strict=True, description="seed of the search")
    batch: Annotated[Count, Field(strict=True)] = Field(
        4, description="trials of a method that are proposed, and may run, at once; affects the proposals"
    )

    @model_validator(mode="after")
    def _consistent(self) -> TuneFile:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds lists a seed twice")
        if not self.search and not all(self.methods.values() or [{}]):
            raise ValueError("search is empty: give at least one key for each method")
        if self.evaluate_every is not None and self.pruning == "none":
            raise ValueError("evaluate_every has no effect without pruning: median")
        if self.pruning == "median" and "." in self.metric:
            raise ValueError(f"pruning median needs a metric of the shared model without a dot, not {self.metric}")
        return self


@dataclass(frozen=True)
class TunedMethod:
    """A method with its search space."""

    name: str
    entry: Entry  # scenario file and settings
    space: Mapping[str, Range | tuple[Any, ...]]  # scenario key to range or values
    first: Mapping[str, Any]  # a value of each key, with which its scenario was checked
    rounds: int  # number of rounds of a trial
    evaluate_every: int  # rounds between evaluations; 0 evaluates at the end only


@dataclass(frozen=True)
class TunePlan:
    """A checked tuning file."""

    source: Path
    spec: TuneFile
    methods: tuple[TunedMethod, ...]

    @property
    def facts(self) -> dict[str, object]:
        """What identifies the search: everything but the number of trials, which may grow."""
        plain = self.spec.model_dump(mode="json", exclude={"trials"})
        return {**plain, "settings": [list(method.entry.settings) for method in self.methods]}


def read_search(path: Path) -> TuneFile:
    """Read a tuning file.

    Raises:
        InputError: it cannot be read, or a key or value in it is not allowed; the error names file, line and key.
    """
    raw = read_yaml(path, "a tuning")
    if "tune" not in raw:
        raise InputError(str(path), "no key tune", "a tuning file, see docs/howto/tune.md")
    spec = validated(TuneFile, raw, path)
    if not is_file(path.parent / spec.tune):
        raise InputError(f"{path}: tune", spec.tune, f"a scenario file, relative to {path.parent}")
    return spec


def plan_search(path: Path, spec: TuneFile, resolve: Resolve) -> TunePlan:
    """The plan of a tuning file; every bound of its search spaces is tried on the scenario.

    Raises:
        InputError: a key, a bound, a method or the metric is not allowed.
    """
    file = path.parent / spec.tune
    own = _resolved(path, "set", resolve, file, spec.set).scenario
    named = spec.methods or {own.protocol.label: {}}
    methods = []
    for name, more in named.items():
        switch = () if name == own.protocol.label else (f"protocol={json.dumps(name)}",)
        settings = (*spec.set, *switch)
        space = {**spec.search, **more}
        run = _resolved(path, f"methods.{name}", resolve, file, settings)
        first = {key: values[0] for key, values in _extremes(space)}
        for key, values in _extremes(space):
            by_scenario = dict[str, object]()
            for value in values:
                tried, place = [*settings, *as_settings({**first, key: value})], f"search space of {name}: {key}"
                content = _resolved(path, place, resolve, file, tried).scenario.model_dump_json()
                if (other := by_scenario.setdefault(content, value)) is not value:
                    raise InputError(
                        f"{path}: {place}", value, f"values that differ: its scenario is that of {other!r}"
                    )
        rounds = spec.rounds or run.scenario.rounds
        if spec.pruning != "none" and (spec.evaluate_every or 1) >= rounds:
            most = f"less than the {rounds} rounds of a trial, or nothing is pruned"
            raise InputError(f"{path}: evaluate_every", spec.evaluate_every or 1, most)
        # Without a shared model that is trained as a whole, no evaluation of it says which trial is behind.
        pruned = spec.pruning != "none" and not run.personal_only
        every = (spec.evaluate_every or max(1, rounds // 5)) if pruned else 0
        entry = Entry(name, name, (), file, settings, ((),))
        methods.append(TunedMethod(name, entry, space, first, rounds, every))
    known = known_names(own.evaluation, measures_of(own.evaluation))
    if "." not in spec.metric and spec.metric not in known:
        raise InputError(f"{path}: metric", spec.metric, f"a metric, e.g. {', '.join(nearest(spec.metric, known))}")
    if "." in spec.metric and (allowed := allowed_instead(spec.metric, known)):
        raise InputError(f"{path}: metric", spec.metric, allowed)
    return TunePlan(path, spec, tuple(methods))


def _extremes(space: Mapping[str, Range | tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """By key its values, or the bounds of its range and, unless all are whole numbers, a value between them."""
    for key, values in space.items():
        if not isinstance(values, Range):
            yield key, values
        elif values.whole:
            yield key, (values.low, values.high)
        else:
            inside = values.low + (values.step or 0.381966 * (values.high - values.low))
            yield key, (values.low, inside, values.high)[: 3 if inside < values.high else 2]


def as_settings(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values by scenario key in the form of ``--set``."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in values.items())


def _resolved(path: Path, what: str, resolve: Resolve, file: Path, settings: Any) -> ResolvedRun:
    try:
        return resolve(file, list(settings), None)
    except InputError as error:
        raise InputError(f"{path}: {what}: {error.place}", error.found, error.allowed) from None


# ------------------------------------------------------------------------------------------------- schemas for editors
#: What a file of each kind holds.
SCHEMAS: Mapping[str, type[BaseModel]] = {
    "scenario": Scenario,
    "site": Site,
    "comparison": ComparisonFile,
    "tuning": TuneFile,
}


def schema_of(kind: str) -> dict[str, object]:
    """The JSON schema (draft 2020-12) of a kind of files, a key of :data:`SCHEMAS`."""
    schema = SCHEMAS[kind].model_json_schema(by_alias=True)
    if kind == "site":
        del schema["properties"]["file"]  # fedmq sets it
    if kind == "comparison":
        schema["oneOf"] = [{"required": [command]} for command in KINDS]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": f"fedmq {kind} file"}
