"""From a scenario file to a run, which is resolved once and passed to every process.

``read`` checks a scenario against its schema, without torch or any method. ``resolve`` also checks what it names,
through :class:`Known`, as the methods, objectives and data sets are in packages above this one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from fedmq.config import plug_ins
from fedmq.config.faults import Fault
from fedmq.config.plug_ins import UserFileError
from fedmq.config.run_id import name_of
from fedmq.config.scenario import Backbone, Data, Objective, ProtocolChoice, Scenario, long_form
from fedmq.config.yaml_files import ERRORS, place_of, read_yaml, validated
from fedmq.config.yaml_files import parse as parse_yaml
from fedmq.errors import InputError
from fedmq.packages import SCENARIOS
from fedmq.storage.json_files import Problem
from fedmq.storage.regular_files import is_file

#: Keys of a data section that are paths.
DATA_PATHS = ("path", "annotations", "images")


@dataclass(frozen=True)
class MethodFacts:
    """Facts of a scenario's method that do not depend on the data."""

    options: Mapping[str, object]  # all options including defaults, as plain data
    pooled: bool  # it trains centrally on all silos' data, as an upper bound
    personal_only: bool  # the shared model is not fully trained, so that retrieval needs a silo's personal model
    needs_public: bool  # it needs a data set that marks public items
    weighs_single_silos: bool  # ``aggregation.single_weight`` applies to it
    adapter: str | None  # the ``backbone.adapter`` that it needs; None if it works with any
    no_sum: str  # why its options allow no secure sum; empty if they do
    # Options that are set although their switch is off: name, value, and the switch's value.
    without_effect: tuple[tuple[str, object, str], ...]
    # Options that say in which round a part of the method begins: name, round, what begins, and whether the round is
    # the default.
    begins: tuple[tuple[str, int, str, bool], ...] = ()
    # Keys of other sections that the method's preset sets unless the scenario does, e.g. ``training.batch_size``.
    preset: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ObjectiveFacts:
    """Facts of a scenario's objective that do not depend on the data."""

    options: Mapping[str, object]  # all options including defaults, as plain data
    on_features: bool  # it is defined only on frozen features, so that no encoder can be trained with it
    hashes: bool  # it has a separate network, whose sizes are ``objective.bits`` and ``objective.hidden``
    contrasts: bool = False  # it only contrasts the items of a batch, so that a batch of one teaches nothing


class Known(Protocol):
    """Look-up of methods, objectives and data sets by name, which the package ``protocols`` implements."""

    def method_facts(self, choice: ProtocolChoice, objective: Objective, /) -> MethodFacts:
        """Facts of the method; raises InputError, whose place is the scenario key, if something is not allowed."""

    def objective_facts(self, objective: Objective, /) -> ObjectiveFacts:
        """Facts of the objective; the same errors."""

    def check_data(self, data: Data, /) -> None:
        """Refuses an unknown data set or a key that it does not read; the same errors."""


@dataclass(frozen=True)
class Source:
    """A scenario file, read and validated against the schema."""

    file: Path
    scenario: Scenario  # with settings applied; names are not looked up yet
    overridden: tuple[str, ...] = ()  # keys given with ``--set``, for the place in errors

    def place(self, key: str) -> str:
        """File, line and key, or the setting that gave the key; ``key`` is e.g. ``partition.alpha``."""
        return place_of(self.file, key.split("."), self.overridden)

    @contextmanager
    def naming_the_file(self) -> Iterator[None]:
        """Within the block, an InputError about a key of the scenario also names its file and line, or the setting."""
        try:
            yield
        except UserFileError:
            raise
        except InputError as error:
            key, colon, rest = error.place.partition(":")
            if key.partition(".")[0] not in Scenario.model_fields:
                raise
            raise InputError(f"{self.place(key)}{colon}{rest}", error.found, error.allowed) from None


@dataclass(frozen=True)
class ResolvedRun:
    """A run as all its processes see it, created once by :func:`resolve`."""

    source: Source  # the scenario file, for the place in errors
    # With all defaults, including those of the method and the objective; with absolute paths, and with references to
    # the user's Python files (``fedmq.config.plug_ins``).
    scenario: Scenario
    id: str  # the run's name on the wire and in logs
    pooled: bool  # the method trains centrally on all silos' data
    personal_only: bool  # the shared model is not fully trained, so that retrieval needs a silo's personal model
    warnings: tuple[str, ...] = ()  # a line for each setting that has no effect

    def changed(self, scenario: Scenario) -> ResolvedRun:
        """The run with another device or number of rounds; what its scenario names is looked up already."""
        return replace(self, scenario=scenario, id=name_of(scenario.model_dump(mode="json")))


# ----------------------------------------------------------------------------------- from the file to its schema
def read(file: Path, settings: Sequence[str] = (), seed: int | None = None) -> Source:
    """Read a scenario file and check it against the schema.

    Args:
        file: the YAML file, or the name of a scenario that comes with fedmq, e.g. ``smoke``.
        settings: ``key=value`` pairs that override it.
        seed: overrides both; None keeps their seed.

    Raises:
        InputError: the file cannot be read, or a key or value in it is not allowed.
    """
    shipped = SCENARIOS / f"{file}.yaml"
    if not file.exists() and file.suffix not in (".yaml", ".yml") and shipped.is_file():
        file = shipped
    given = [*settings, *([f"seed={seed}"] if seed is not None else [])]
    overridden = tuple(setting.partition("=")[0] for setting in given)
    return Source(file, parse(apply_settings(read_yaml(file), given), file, overridden), overridden)


def parse(raw: Mapping[str, object], path: Path, overridden: Sequence[str] = ()) -> Scenario:
    """Validate a raw scenario.

    Raises:
        InputError: a key or value is not allowed; the place is in ``path``.
    """
    for command, kind in (("compare", "comparison"), ("sweep", "comparison"), ("tune", "tuning")):
        if command in raw:
            raise InputError(str(path), f"a {kind} file", f"a scenario; run it with fedmq {command} {path}")
    return validated(Scenario, raw, path, overridden)


def load(path: Path, settings: Sequence[str] = ()) -> Scenario:
    """The scenario of a file, checked against the schema only.

    Raises:
        InputError: as of :func:`read`.
    """
    return read(path, settings).scenario


def apply_settings(raw: Mapping[str, object], settings: Sequence[str]) -> dict[str, object]:
    """Apply ``key.sub=value`` settings (``--set``) to a raw scenario; values are read as YAML.

    The last setting of a key counts. A setting of a section, such as ``protocol``, replaces the section of the file;
    settings of its keys, such as ``protocol.mu``, are kept unless it comes later and has the key.

    Raises:
        InputError: a setting is not ``key=value``, or is for a key in something that is not a mapping.
    """
    last: dict[str, object] = {}
    for key, value in map(_read_setting, settings):
        last.pop(key, None)
        last[key] = value
    result: dict[str, object] = {**raw}
    for without_file in (True, False):  # first, what the file has for these keys is left out
        for key, value in last.items():
            place = result
            *parents, leaf = key.split(".")
            for parent in parents:
                below = place.get(parent)
                if place is result and below is not None:
                    below = long_form(parent, below)
                if below is not None and not isinstance(below, dict):
                    allowed = f"no key in {parent}, which is not a mapping; set {parent} itself"
                    raise InputError(f"--set {key}", value, allowed)
                inner: dict[str, object] = {**(below or {})}
                place[parent] = inner
                place = inner
            place[leaf] = None if without_file else _merged(place.get(leaf), value)
    return result


def _merged(before: object, value: object) -> object:
    """A value over an earlier one: mappings key by key."""
    if isinstance(before, dict) and isinstance(value, dict):
        return {**before, **{key: _merged(before.get(key), inner) for key, inner in value.items()}}
    return value


def _read_setting(setting: str) -> tuple[str, object]:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise InputError("--set", setting, "key=value, e.g. --set training.learning_rate=0.001")
    try:
        value = parse_yaml(text)
    except ERRORS:
        raise InputError(f"--set {key}", text[:60], "a YAML value") from None
    return key, long_form(key, value)


# ------------------------------------------------------------------------------------ from the schema to the run
def resolve(source: Source, known: Known, *, weights: bool = True, adopt: bool = True) -> ResolvedRun:
    """Look up everything that a scenario names, and fill in all defaults.

    Args:
        source: from :func:`read`.
        known: looks up methods, objectives and data sets.
        weights: also make paths of the backbone's weights absolute; not with manually launched programs, which run on
            several machines and must agree on the scenario.
        adopt: allow to execute Python files that the scenario names by path. False for the scenario of a run folder,
            in which such a path is refused, see ``fedmq.config.plug_ins``.

    Raises:
        InputError: something is not allowed; names file, line and key.
    """
    try:
        scenario = _adopted(source, adopt=adopt)
        if scenario.data is not None:
            known.check_data(scenario.data)
        method = known.method_facts(scenario.protocol, scenario.objective)
        scenario = _with_preset(scenario, method.preset)
        if scenario.data is None and method.pooled:
            allowed = "a federated method: with partition.kind own no process holds the data of all silos"
            raise InputError("protocol.name", scenario.protocol.label, allowed)
        if scenario.data is None and method.needs_public:
            allowed = "a method without public items: with partition.kind own the sites state none"
            raise InputError("protocol.name", scenario.protocol.label, allowed)
        if scenario.aggregation.single_weight != 1 and not method.weighs_single_silos:
            allowed = f"1: {scenario.protocol.label} gives no single-modality silo's reply a weight"
            raise InputError("aggregation.single_weight", scenario.aggregation.single_weight, allowed)
        if method.adapter not in (None, scenario.backbone.adapter):
            allowed = f"{method.adapter}, whose layers {scenario.protocol.label} averages"
            raise InputError("backbone.adapter", scenario.backbone.adapter, allowed)
        if scenario.privacy.secure_aggregation is not None and method.no_sum:
            raise no_secure_sum(scenario.protocol, method.no_sum)
        objective = known.objective_facts(scenario.objective)
        _check_objective(scenario, objective)
        _check_compression(scenario)
        changes: dict[str, object] = {"protocol": scenario.protocol.with_options(method.options)}
        if objective.options:
            changes["objective"] = scenario.objective.with_options(objective.options)
        scenario = with_absolute_paths(scenario.model_copy(update=changes), weights=weights)
    except UserFileError:
        raise  # the place is the user's file
    except InputError as error:
        unknown = f"{error.place}.{error.found}"  # an unknown option may come from --set
        key = unknown if unknown in source.overridden else error.place
        raise InputError(source.place(key), error.found, error.allowed) from None
    warnings = (
        *(f"protocol.{name}: {value} has no effect with {off}" for name, value, off in method.without_effect),
        *_never_begin(scenario.rounds, method.begins),
        *_late_faults(scenario),
        *_captured_inline(scenario),
        *_items_without_noise(scenario),
    )
    run_id = name_of(scenario.model_dump(mode="json"))
    return ResolvedRun(source, scenario, run_id, method.pooled, method.personal_only, warnings)


def no_secure_sum(method: ProtocolChoice, why: str) -> InputError:
    """The error of a method that has no secure sum."""
    allowed = "null, or a method and options in the table of docs/explanation/secure_sums.md"
    return InputError("privacy.secure_aggregation", f"with {method.label}: {why}", allowed)


def _with_preset(scenario: Scenario, preset: Mapping[str, object]) -> Scenario:
    """The scenario with the keys of a method's preset that it does not give itself, which must fit it."""
    if not preset:
        return scenario
    given = scenario.model_dump(exclude_unset=True)
    for key, value in preset.items():
        section, _, leaf = key.partition(".")
        given.setdefault(section, {}).setdefault(leaf, value)
    try:
        return Scenario.model_validate(given)
    except ValidationError as error:
        problem = Problem.of(error.errors(include_url=False)[0])
        key = ".".join(map(str, problem.location))
        allowed = f"a scenario that the preset fits; here {key or 'a section'} would be refused: {problem.allowed}"
        raise InputError("protocol.preset", scenario.protocol.options["preset"], allowed) from None


def _never_begin(rounds: int, begins: Sequence[tuple[str, int, str, bool]]) -> Iterator[str]:
    """A line for each part of the method that begins after the last round."""
    for name, round_, what, default in begins:
        if round_ >= rounds:
            where = f"protocol.{name}: {round_}{' (the default)' if default else ''} with rounds: {rounds}"
            yield f"{where}: the run ends before the start of {what}; lower {name} or raise rounds"


def _adopted(source: Source, *, adopt: bool) -> Scenario:
    """The scenario with references instead of paths of Python files."""
    scenario = source.scenario

    def named(key: str, name: str) -> str:
        if not plug_ins.is_path(name):
            return name
        if not adopt:
            allowed = "a name or a reference, as files that a run folder's scenario names by path are not executed"
            raise InputError(key, name, allowed)
        # Paths from the command line are relative to the working directory, those of a file to that file.
        given = any(f"{key}.".startswith(f"{setting}.") for setting in source.overridden)
        return plug_ins.adopt((Path() if given else source.file.parent) / Path(name).expanduser())

    protocol = named("protocol.name", scenario.protocol.name)
    base = named("objective.base", scenario.objective.base)
    changes: dict[str, object] = {
        "protocol": scenario.protocol.model_copy(update={"name": protocol}),
        "objective": scenario.objective.model_copy(update={"base": base}),
    }
    if scenario.data is not None:
        changes["data"] = scenario.data.model_copy(update={"name": named("data.name", scenario.data.name)})
    if metrics := scenario.evaluation.metrics:
        references = tuple(named("evaluation.metrics", metric) for metric in metrics)
        changes["evaluation"] = scenario.evaluation.model_copy(update={"metrics": references})
    return scenario.model_copy(update=changes)


def _check_objective(scenario: Scenario, facts: ObjectiveFacts) -> None:
    objective = scenario.objective
    if not facts.hashes and (objective.bits or objective.hidden):
        problem = f"sizes of a hash network with {objective.base}"
        raise InputError(
            "objective", problem, "objective.bits and .hidden only with hash networks; use backbone.dim instead"
        )
    if facts.contrasts and scenario.training.batch_size == 1:
        allowed = f"2 or more: {objective.base} contrasts the items of a batch, and a single one teaches nothing"
        raise InputError("training.batch_size", 1, allowed)
    if facts.contrasts and scenario.privacy.items is not None and scenario.privacy.items.group == 1:
        allowed = f"2 or more: {objective.base} contrasts the items of a group, and a single one teaches nothing"
        raise InputError("privacy.items.group", 1, allowed)
    if scenario.backbone.end_to_end and facts.on_features:
        allowed = f"false: end_to_end is for hash networks on labels, not objective.base {objective.base}"
        raise InputError("backbone.end_to_end", True, allowed)


def _check_compression(scenario: Scenario) -> None:
    """Refuse forms of updates that undo clipping: what they leave out is added later, to more than the norm.

    Noise is added before, so that with it every form is post-processing.
    """
    kind, privacy = scenario.compression.updates.kind, scenario.privacy
    if kind in ("top_k", "low_rank") and privacy.clip_norm is not None and privacy.noise_multiplier == 0:
        allowed = (
            "none, bfloat16 or int8 with privacy.clip_norm and without noise, as error feedback adds to later updates"
        )
        raise InputError("compression.updates.kind", kind, allowed)


def _captured_inline(scenario: Scenario) -> list[str]:
    """A warning if a run captures payloads that ``fedmq audit`` cannot attack."""
    if not scenario.privacy.capture or scenario.launcher != "inline":
        return []
    return [
        "privacy.capture: true is of no use with launcher inline: fedmq audit refuses the run, as its silos sent no "
        "messages; launcher: local gives the same model"
    ]


def _items_without_noise(scenario: Scenario) -> list[str]:
    """A warning if local steps clip the gradients of items, but get no noise."""
    items = scenario.privacy.items
    if items is None or items.noise_multiplier:
        return []
    return ["privacy.items.noise_multiplier: 0 gives no epsilon, as local steps are clipped, but get no noise"]


def _late_faults(scenario: Scenario) -> list[str]:
    """A warning for each fault whose rounds are all after the run's last round."""
    lines = []
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, Fault) and not any(map(fault.in_rounds, range(scenario.rounds))):
            rounds = fault.rounds if isinstance(fault.rounds, str) else ", ".join(map(str, fault.rounds or ()))
            last = f"rounds: {scenario.rounds}, as the last round is {scenario.rounds - 1}"
            lines.append(f"faults[{number}].rounds: {rounds} has no effect with {last}")
    return lines


# -------------------------------------------------------------------------------------------------------------- paths
def with_absolute_paths(scenario: Scenario, *, weights: bool) -> Scenario:
    """A scenario with absolute paths. Symbolic links are kept, as related files may lie next to the link."""
    data, trace = scenario.data, scenario.participation.trace
    places = {key: getattr(data, key) for key in DATA_PATHS} if data is not None else {}
    parts: dict[str, dict[str, object]] = {
        "data": {key: absolute(f"data.{key}", path) for key, path in places.items() if path},
        "participation": {"trace": absolute("participation.trace", trace)} if trace else {},
        "backbone": _weights(scenario.backbone) if weights else {},
    }
    return scenario.model_copy(
        update={part: getattr(scenario, part).model_copy(update=changed) for part, changed in parts.items() if changed}
    )


def absolute(key: str, path: Path) -> Path:
    """An absolute path, with ``~`` expanded; symbolic links are kept.

    Raises:
        InputError: the path is invalid; its place is the key.
    """
    try:
        path = path.expanduser()
        path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # circular links, or a character that paths cannot contain
        raise InputError(key, str(path)[:200], f"a path ({error})") from None
    return path.absolute()


def _weights(backbone: Backbone) -> dict[str, object]:
    """Absolute paths of the backbone's existing files and folders, by key, without names of models and tags."""
    paths: dict[str, object] = {}
    name, pretrained, text_encoder = backbone.name, backbone.pretrained, backbone.text_encoder
    # A tag contains neither dot nor slash, and has precedence over a file of the same name.
    if pretrained and re.search(r"[./]", pretrained) and is_file(Path(pretrained)):
        paths["pretrained"] = str(Path(pretrained).absolute())
        # Only with weights: random weights are drawn from the model's name as written.
        if name.endswith(".json") and is_file(Path(name)):
            paths["name"] = str(Path(name).absolute())
    if text_encoder is not None and text_encoder.exists():
        paths["text_encoder"] = text_encoder.absolute()
    return paths
