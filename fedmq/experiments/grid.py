"""Build the plan of a comparison from its options: the rows, and the runs of each row.

A row is an :class:`Entry`: a scenario file with settings. Rows compare *methods* (the file, and ``protocol`` or
``protocol.name`` if those are varied) at the same *point*, which the values of all other varied keys make up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedmq.config.resolve import ResolvedRun, apply_settings
from fedmq.config.scenario import Scenario
from fedmq.config.sections import Evaluation
from fedmq.config.yaml_files import ERRORS, read_yaml
from fedmq.config.yaml_files import parse as parse_yaml
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BRIEF
from fedmq.runs.results import Target

Resolve = Callable[[Path, list[str], int | None], ResolvedRun]
"""Reads a scenario file with settings and a seed, with every default written out."""

#: Pseudo-key of a variation: each value is a mapping of several keys, with an optional ``name`` that is shown for it.
TOGETHER = "set"
_METHOD_KEYS = ("protocol", "protocol.name", TOGETHER)
_VARIATION = re.compile(r"(?:(?P<who>[\w.-]+):)?(?P<key>[\w]+(?:\.[\w]+)*)=(?P<values>.+)", re.DOTALL)


@dataclass(frozen=True)
class Variation:
    """A key and the values to try: ``--vary`` and ``--select``."""

    key: str  # key of the scenario, e.g. ``training.learning_rate``
    values: tuple[Any, ...]  # parsed from YAML
    who: str | None = None  # scenario or method to which it applies; None for all

    @property
    def keys(self) -> frozenset[str]:
        """The keys it sets: its key, or the keys of its mappings."""
        together = (str(key) for value in self.values for key in value) if self.key == TOGETHER else ()
        return frozenset(together) or frozenset((self.key,))

    @property
    def settings(self) -> tuple[str, ...]:
        """As ``--set`` takes them; JSON is YAML too."""
        return tuple(f"{self.key}={json.dumps(value, default=str)}" for value in self.values)


@dataclass(frozen=True)
class Entry:
    """One row of a comparison, run with every seed."""

    name: str
    method: str  # the method that is compared
    point: tuple[tuple[str, str], ...]  # the other varied keys and their values as shown
    file: Path
    settings: tuple[str, ...]  # ``--set`` options of all its runs
    # Alternative further settings, one of which is selected on the validation split.
    candidates: tuple[tuple[str, ...], ...] = ((),)
    added: tuple[tuple[str, ...], ...] = ()  # the candidates that :func:`grown` added to the given ones

    def extended(self, more: Sequence[tuple[str, ...]]) -> Entry:
        """The row with further candidates."""
        return replace(self, candidates=(*self.candidates, *more), added=(*self.added, *more))

    def name_but_for(self, key: str) -> str:
        """The row's name without one varied key; rows that differ only in that key share it."""
        return ", ".join([self.method, *(f"{name}={value}" for name, value in self.point if name != key)])


@dataclass(frozen=True)
class ComparisonPlan:
    """The plan of a comparison."""

    entries: tuple[Entry, ...]  # the rows, in order
    seeds: tuple[int, ...]  # each row is run with each seed
    metrics: tuple[str, ...] = BRIEF  # the columns; candidates are selected by the first
    targets: tuple[Target, ...] = ()  # further columns: time to reach a value
    # Name of a method or of a row; None takes the first method. ``NO_BASELINE`` does not compare the rows with each
    # other, for example if they are data sets.
    baseline: str | None = None
    # A varied key whose values are columns of the table instead of rows, as papers print code lengths.
    across: str | None = None
    select_seeds: tuple[int, ...] = (0,)  # seeds of each candidate's runs on the validation split
    select_rounds: int | None = None  # rounds of those runs; None takes the scenario's
    zero_shot: bool = False  # whether to add a first row with version 0 of the first entry's runs
    extensions: int = 0  # how often grids may be extended if a chosen value is at the edge of its grid
    # Linear yardsticks to add as rows, by their keys in ``summary.YARDSTICKS``; they take the first entry's data.
    yardstick: tuple[str, ...] = ()
    same_mask: bool = False  # whether in some scenario the same silos lack a modality with every seed
    measured_on_validation: bool = False  # whether candidates are chosen on the split on which they are then evaluated


#: In place of a baseline's name.
NO_BASELINE = "none"

#: Keys that the runs on the validation split set themselves, so that ``--select`` cannot.
_NOT_CHOSEN = ("evaluation.split", "evaluation.every", "evaluation.personal_every", "launcher")
#: Keys that cannot be varied, and what to use instead.
_NOT_VARIED = {"seed": "seeds with --seeds", "name": "names of rows in --vary 'set={name: fast, rounds: 10},...'"}


#: What does not change the model that a run trains: where and how it is computed, and what is measured of it.
_SAME_MODEL: Mapping[str, bool | set[str]] = {
    "name": True,
    "device": True,
    "launcher": True,
    "track": True,
    "wire": True,
    "silos": {"slots", "hosts", "needs"},
    "evaluation": set(Evaluation.model_fields) - {"patience", "every"},
}


# --------------------------------------------------------------------------------------------------- from the options
def parse_variation(text: str, option: str) -> Variation:
    """Read ``key=a,b,c`` or ``method:key=a,b,c``; values are YAML.

    Raises:
        InputError: the text has another form, or the key cannot be varied.
    """
    match = _VARIATION.fullmatch(text)
    try:
        values = parse_yaml(f"[{match['values']}]") if match else None
    except ERRORS:
        values = None
    if not match or not values:
        form = "[METHOD:]KEY=A,B,..." if option == "--select" else "[NAME:]KEY=A,B,..."
        alone = ", or in a sweep val alone" if option == "--select" else ""
        raise InputError(option, text, f"{form} with YAML values, e.g. silos.count=6,10,30{alone}")
    texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
    if twice := [value for value, count in Counter(texts).items() if count > 1]:
        raise InputError(f"{option} {match['key']}", twice[0], "each value once")
    if match["key"] == TOGETHER and (option != "--vary" or not all(isinstance(value, dict) for value in values)):
        allowed = "with --vary, mappings of keys, e.g. set={name: fast, rounds: 10, training.learning_rate: 0.01}"
        raise InputError(f"{option} {TOGETHER}", match["values"], allowed)
    if match["key"] in _NOT_VARIED:
        raise InputError(option, match["key"], _NOT_VARIED[match["key"]])
    if option == "--select" and match["key"] in _NOT_CHOSEN:
        raise InputError(option, match["key"], "a key that the runs on the validation split do not set themselves")
    if match["key"] == TOGETHER and any(not value or type(value.get("name", "")) is not str for value in values):
        allowed = "sets of at least one key, whose name is a text"
        raise InputError(f"{option} {TOGETHER}", match["values"], allowed)
    if match["key"] == TOGETHER and any("seed" in value for value in values):
        raise InputError(f"{option} {TOGETHER}", "seed", _NOT_VARIED["seed"])
    return Variation(match["key"], tuple(values), match["who"])


def parse_seeds(text: str, option: str = "--seeds") -> tuple[int, ...]:
    """Read ``0,1,2``.

    Raises:
        InputError: they are not whole numbers from 0, or one is repeated.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", part) for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise InputError(option, text, "different whole numbers from 0, e.g. 0,1,2")
    return tuple(int(part) for part in parts)


def resolved_runs(plan: ComparisonPlan, resolve: Resolve) -> Iterator[ResolvedRun]:
    """Every run of the plan, including candidates, without seeds."""
    variants = dict.fromkeys(
        (entry.file, (*entry.settings, *candidate)) for entry in plan.entries for candidate in entry.candidates
    )
    return (resolve(file, list(settings), None) for file, settings in variants)


def entries(
    files: Sequence[Path],
    settings: Sequence[str],
    varied: Sequence[Variation],
    select: Sequence[Variation],
    resolve: Resolve,
) -> tuple[Entry, ...]:
    """Build the rows, every file with every combination of its varied values, and validate them.

    A varied method that is the file's own keeps the options that the file gives it, as far as the value does not.

    Raises:
        InputError: a scenario, key or value is not allowed, or two rows would be the same.
    """
    if any(_key(setting) == "seed" for setting in settings):
        raise InputError("--set", "seed", _NOT_VARIED["seed"])
    # Settings below a varied key apply to the rows; the file's own method may not have such an option.
    prefixes = tuple(f"{key}." for variation in varied for key in variation.keys)
    file_settings = [setting for setting in settings if not _key(setting).startswith(prefixes)]
    scenarios = {file: resolve(file, file_settings, None).scenario for file in files}
    names_of = {file: {scenario.name, scenario.protocol.label} for file, scenario in scenarios.items()}
    _refuse_idle("--vary", varied, {name for names in names_of.values() for name in names})
    own = {file: _own_method(file, file_settings) for file in files}
    drafts = [
        _Draft(file, scenarios[file].name, tuple(zip(variations, values, strict=True)), own[file])
        for file in files
        for variations in [_fitting(varied, names_of[file])]
        for values in itertools.product(*(variation.values for variation in variations))
    ]
    methods = _methods(drafts)
    made: list[Entry] = []
    known: set[str] = set()
    same: dict[tuple[str, ...], str] = {}
    for draft, method in zip(drafts, methods, strict=True):
        prefix = [method] if len(set(methods)) > 1 or not draft.point else []
        name = ", ".join([*prefix, *(f"{key}={text}" for key, text in draft.point)])
        row_settings = (*settings, *draft.settings)
        with _naming_option("--vary", draft.settings):
            own_method = resolve(draft.file, list(row_settings), None).scenario.protocol.label
            names = {own_method, draft.scenario, method, name}
        known |= names
        candidates = tuple(itertools.product(*(variation.settings for variation in _fitting(select, names))))
        runs = _different_runs(draft.file, row_settings, candidates, resolve)
        if (other := same.setdefault(runs, name)) != name:
            raise InputError("--vary", name, f"rows that differ: its scenario is that of {other}")
        made.append(Entry(name, method, draft.point, draft.file, row_settings, candidates))
    _refuse_idle("--select", select, known)
    if twice := [name for name, count in Counter(entry.name for entry in made).items() if count > 1]:
        allowed = "scenarios (and --vary set=) with different names, so that their rows can be distinguished"
        raise InputError("FILE or --vary", twice[0], allowed)
    return tuple(made)


def _different_runs(
    file: Path, settings: tuple[str, ...], candidates: Sequence[tuple[str, ...]], resolve: Resolve
) -> tuple[str, ...]:
    """The scenarios of a row's candidates as JSON."""
    runs, models = list[str](), dict[str, str]()
    for candidate in candidates:
        with _naming_option("--select", candidate):
            scenario = resolve(file, [*settings, *candidate], None).scenario
        chosen = " ".join(candidate)
        if (other := models.setdefault(scenario.model_dump_json(exclude=_SAME_MODEL), chosen)) != chosen:
            raise InputError("--select", chosen, f"candidates that differ: it trains the same model as {other}")
        runs.append(scenario.model_dump_json())
    return tuple(runs)


@contextmanager
def _naming_option(option: str, settings: Sequence[str]) -> Iterator[None]:
    """Name the option of a bad value in the error; the scenario reports all of them as ``--set``."""
    try:
        yield
    except InputError as error:
        for key in (text.partition("=")[0] for text in settings):
            place, replaced = re.subn(rf"--set {re.escape(key)}(?=:|$)", f"{option} {key}", error.place)
            if replaced:
                raise InputError(place, error.found, error.allowed) from None
        raise


def _key(setting: str) -> str:
    return setting.partition("=")[0]


@dataclass(frozen=True)
class _Draft:
    """A row before it has its name: a file, its scenario's name and method, and each varied key with its value."""

    file: Path
    scenario: str
    pairs: tuple[tuple[Variation, Any], ...]
    own: Mapping[str, Any]

    @property
    def varied_method(self) -> str:
        """As shown; empty if the method is not varied."""
        return " ".join(_label(varied.key, value) for varied, value in self.pairs if varied.key in _METHOD_KEYS)

    @property
    def point(self) -> tuple[tuple[str, str], ...]:
        return tuple((varied.key, shown(value)) for varied, value in self.pairs if varied.key not in _METHOD_KEYS)

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(each for varied, value in self.pairs for each in _settings(varied.key, value, self.own))


def _label(key: str, value: Any) -> str:
    """A varied value in a row's name; a mapping's ``name`` if it has one."""
    return str(value["name"]) if key == TOGETHER and "name" in value else shown(value)


def _own_method(file: Path, settings: Sequence[str]) -> Mapping[str, Any]:
    """The section ``protocol`` of a file with settings, in its long form."""
    given = apply_settings(read_yaml(file), settings).get("protocol")
    return given if isinstance(given, Mapping) else {"name": given}


def _settings(key: str, value: Any, own: Mapping[str, Any]) -> tuple[str, ...]:
    """A varied value as ``--set`` options; of a mapping one per key."""
    if key == TOGETHER:
        return tuple(f"{name}={json.dumps(option, default=str)}" for name, option in value.items() if name != "name")
    method = {"name": value} if isinstance(value, str) else value
    if key == "protocol" and isinstance(method, Mapping) and method.get("name") == own["name"]:
        return tuple(f"protocol.{name}={json.dumps(option, default=str)}" for name, option in method.items())
    return Variation(key, (value,)).settings


# ------------------------------------------------------------------------------------------------ values at an edge
def _number(setting: str) -> float | None:
    """The number that a setting gives; None for another value."""
    value = json.loads(setting.partition("=")[2])
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers_of(settings: Sequence[str]) -> dict[str, float]:
    """The numbers that settings give, by key."""
    return {_key(setting): value for setting in settings if (value := _number(setting)) is not None}


def _numbers_tried(entry: Entry) -> dict[str, list[float]]:
    """For each key of which a row tries at least two values, all of them numbers: the values, ascending."""
    tried: dict[str, list[float | None]] = {}
    for setting in dict.fromkeys(itertools.chain.from_iterable(entry.candidates)):
        tried.setdefault(_key(setting), []).append(_number(setting))
    numbers = {key: [value for value in values if value is not None] for key, values in tried.items()}
    return {key: sorted(numbers[key]) for key, values in tried.items() if 1 < len(values) == len(numbers[key])}


def at_edge(entry: Entry, chosen: Sequence[str]) -> dict[str, float]:
    """The chosen values that are the smallest or largest of those tried, by key; empty if nothing was chosen."""
    tried = _numbers_tried(entry)
    return {
        key: value
        for key, value in _numbers_of(chosen).items()
        if key in tried and value in (tried[key][0], tried[key][-1])
    }


def _rounded(value: float, tried: Sequence[float]) -> float:
    """A value rounded to three digits, or to an integer if all values tried are integers."""
    return round(value) if all(isinstance(each, int) for each in tried) else float(f"{value:.3g}")


def _beyond(tried: Sequence[float], chosen: float) -> float:
    """The next value beyond the edge of a grid: by the ratio of its last two values; by their distance if one is 0."""
    inner, edge = (tried[-2], tried[-1]) if chosen == tried[-1] else (tried[1], tried[0])
    return _rounded(edge * edge / inner if min(inner, edge) > 0 else 2 * edge - inner, tried)


def _between(tried: Sequence[float], chosen: float) -> Iterator[float]:
    """Values halfway between the chosen one and its neighbours, the larger neighbour first.

    They are geometric means, or arithmetic ones if a value is not positive.
    """
    place = list(tried).index(chosen)
    for other in (*tried[place + 1 : place + 2], *tried[max(0, place - 1) : place]):
        middle = math.sqrt(chosen * other) if min(chosen, other) > 0 else (chosen + other) / 2
        yield _rounded(middle, tried)


def grown(plan: ComparisonPlan, chosen: Mapping[str, Sequence[str] | None], resolve: Resolve) -> ComparisonPlan | None:
    """The plan with further candidates if a chosen value is at the edge of its grid; None if there are none to add.

    A row with such a value also tries the next value beyond the edge, with its other choices. The other rows try the
    same number of values between a chosen one and its neighbours, so that all rows have equally many trials. A row has
    no chosen settings if none could be selected. Values that ``resolve`` refuses are not tried.
    """
    more, rows = dict[str, list[tuple[str, ...]]](), [entry for entry in plan.entries if len(entry.candidates) > 1]
    selecting = [(entry, choice) for entry in rows if (choice := chosen[entry.name]) is not None]
    for entry, choice in selecting:
        edges, numbers = at_edge(entry, choice), _numbers_tried(entry)
        beyond = [_with(choice, key, _beyond(numbers[key], value)) for key, value in edges.items()]
        more[entry.name] = [candidate for candidate in beyond if _is_new(entry, candidate, resolve)]
    most = max(map(len, more.values()), default=0)
    if not most:
        return None
    for entry, choice in selecting:
        own, values = more[entry.name], _numbers_of(choice)
        for key, tried in _numbers_tried(entry).items():
            for middle in _between(tried, values[key]):
                candidate = _with(choice, key, middle)
                if len(own) < most and candidate not in own and _is_new(entry, candidate, resolve):
                    own.append(candidate)
    return replace(plan, entries=tuple(entry.extended(more.get(entry.name, ())) for entry in plan.entries))


def _with(chosen: Sequence[str], key: str, value: float) -> tuple[str, ...]:
    """Settings with another value of a key."""
    return tuple(f"{key}={json.dumps(value)}" if _key(setting) == key else setting for setting in chosen)


def _is_new(entry: Entry, candidate: tuple[str, ...], resolve: Resolve) -> bool:
    """Whether a row does not try these settings yet, and they are allowed."""
    if candidate in entry.candidates:
        return False
    try:
        resolve(entry.file, [*entry.settings, *candidate], None)
    except InputError:
        return False
    return True


def without_options(entries: Sequence[Entry]) -> Iterator[str]:
    """A line for each file whose method has options that the rows of other methods do not have."""
    for file in dict.fromkeys(entry.file for entry in entries):
        own = _own_method(file, ())
        options = ", ".join(f"{name}: {shown(option)}" for name, option in own.items() if name != "name")
        rows = dict.fromkeys(entry.method for entry in entries if entry.file == file and _method(entry) != own["name"])
        if options and rows:
            yield f"{file}: the rows {', '.join(rows)} are without the options of {own['name']} ({options})"


def _method(entry: Entry) -> object:
    """Name of a row's method as written."""
    return _own_method(entry.file, entry.settings)["name"]


def _methods(drafts: Sequence[_Draft]) -> list[str]:
    """Names of the methods: the varied method, else the scenario; both if several files vary the same methods."""
    taken = Counter((draft.varied_method, draft.point) for draft in drafts)
    return [
        f"{draft.scenario} {draft.varied_method}"
        if draft.varied_method and taken[draft.varied_method, draft.point] > 1
        else draft.varied_method or draft.scenario
        for draft in drafts
    ]


def _refuse_idle(option: str, variations: Sequence[Variation], names: Collection[str]) -> None:
    for variation in variations:
        if variation.who is not None and variation.who not in names:
            raise InputError(
                f"{option} {variation.who}:{variation.key}", variation.who, f"one of {', '.join(sorted(names))}"
            )


def _fitting(select: Sequence[Variation], names: Collection[str]) -> list[Variation]:
    """The variations that apply to a row; one for its method replaces the one of the same key for all."""
    special = [variation for variation in select if variation.who in names]
    keys = {variation.key for variation in special}
    return [
        variation
        for variation in select
        if variation in special or (variation.who is None and variation.key not in keys)
    ]


def shown(value: Any) -> str:
    """A varied value in readable form, a protocol with options as ``rcsr filler=zero``."""
    if isinstance(value, dict):
        named = [str(value["name"])] if "name" in value else []
        return " ".join([*named, *(f"{key}={shown(option)}" for key, option in value.items() if key != "name")])
    return value if isinstance(value, str) else json.dumps(value, default=str)


def default_folder(plan: ComparisonPlan, kind: str, resolve: Resolve) -> Path:
    """``runs/<kind>-<names>-<digest>``: the same for the same rows, so that a second call continues in it.

    It does not depend on seeds and columns, so that more of them can be added later.
    """
    rows = [(resolve(entry.file, list(entry.settings), 0).scenario, entry.candidates) for entry in plan.entries]
    facts = [[named_by(scenario), candidates] for scenario, candidates in rows]
    names = "-".join(dict.fromkeys(entry.method for entry in plan.entries))
    slug = re.sub(r"[^a-z0-9_.]+", "-", names.lower())[:40].strip("-")
    return Path("runs") / f"{kind}-{slug}-{digest(facts)}"


def named_by(scenario: Scenario, leave_out: Mapping[str, bool | set[str]] | None = None) -> dict[str, Any]:
    """A scenario as plain data, whose digest is part of names.

    Symbolic links are resolved, and weights files below the working directory are relative to it, as in scenarios.
    """
    facts = scenario.model_dump(mode="json", exclude={"track": True, **(leave_out or {})})
    facts["wire"]["transport"] = "ipc"  # has no effect on results, and must not rename runs
    for part, keys in (("data", ("path", "annotations", "images")), ("participation", ("trace",))):
        facts[part] |= {key: os.path.realpath(path) for key in keys if (path := facts[part].get(key))}
    below = f"{Path.cwd()}{os.sep}"
    weights = {key: value for key in ("name", "pretrained", "text_encoder") if (value := facts["backbone"].get(key))}
    facts["backbone"] |= {key: value.removeprefix(below) for key, value in weights.items()}
    return facts


def digest(facts: object) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
