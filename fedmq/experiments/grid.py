"""What a comparison is made of, from its options: the rows, and what each of them runs.

A row is an :class:`Entry`: a scenario file with settings. What is compared are *methods* (the file, and ``protocol`` or
``protocol.name`` where those are varied); every other varied key makes a *point*, and methods are compared at the same
point.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedmq.config.run_id import without_younger
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import BRIEF, known_names
from fedmq.evaluation.user_metrics import measures_of
from fedmq.runs.results import Target
from fedmq.text import did_you_mean, nearest

Resolve = Callable[[Path, list[str], int | None], Scenario]
"""A scenario file with settings and a seed, every default written out."""

#: In place of a key: each value is a mapping of several keys that go together, and may have a ``name`` to be shown by.
TOGETHER = "set"
_METHOD_KEYS = ("protocol", "protocol.name", TOGETHER)
_VARIATION = re.compile(r"(?:(?P<who>[\w.-]+):)?(?P<key>[\w]+(?:\.[\w]+)*)=(?P<values>.+)", re.DOTALL)
_METRIC = re.compile(r"\w+(\.[\w-]+)*")


@dataclass(frozen=True)
class Variation:
    """A key and the values to try: ``--vary`` and ``--select``.

    Args:
        key: of the scenario, e.g. ``training.learning_rate``.
        values: as YAML gives them.
        who: method it is for; None for all.
    """

    key: str
    values: tuple[Any, ...]
    who: str | None = None

    @property
    def keys(self) -> frozenset[str]:
        """The keys it sets: its own, or those that go together."""
        together = (str(key) for value in self.values for key in value) if self.key == TOGETHER else ()
        return frozenset(together) or frozenset((self.key,))

    @property
    def settings(self) -> tuple[str, ...]:
        """As ``--set`` takes them; JSON is YAML too."""
        return tuple(f"{self.key}={json.dumps(value, default=str)}" for value in self.values)


@dataclass(frozen=True)
class Entry:
    """One row: what is run with every seed.

    Args:
        name: the row's.
        method: what is compared.
        point: other varied keys and their values as shown.
        file: the scenario.
        settings: ``--set`` for all its runs.
        candidates: further settings, one of which is chosen on the validation split.
    """

    name: str
    method: str
    point: tuple[tuple[str, str], ...]
    file: Path
    settings: tuple[str, ...]
    candidates: tuple[tuple[str, ...], ...] = ((),)

    def name_but_for(self, key: str) -> str:
        """What rows that differ in one varied key alone have in common: the method and the other keys' values."""
        return ", ".join([self.method, *(f"{name}={value}" for name, value in self.point if name != key)])


@dataclass(frozen=True)
class ComparisonPlan:
    """What a comparison is made of.

    Args:
        entries: the rows, in order.
        seeds: each row is run with each.
        metrics: the columns; choices are made by the first.
        targets: further columns: time to reach a value.
        baseline: name of a method or of a row; None takes the first method. ``NO_BASELINE``: rows that are no rivals,
            such as data sets, of which none is compared with another.
        across: a varied key whose values stand side by side in the table, as papers print code lengths, and not one
            below the other.
        select_seed: seed of the runs on the validation split.
        select_rounds: rounds of those runs; None takes the scenario's.
        zero_shot: put a row before the others with version 0 of the first entry's runs.
    """

    entries: tuple[Entry, ...]
    seeds: tuple[int, ...]
    metrics: tuple[str, ...] = BRIEF
    targets: tuple[Target, ...] = ()
    baseline: str | None = None
    across: str | None = None
    select_seed: int = 0
    select_rounds: int | None = None
    zero_shot: bool = False


#: In place of a baseline's name.
NO_BASELINE = "nobody"

#: What a comparison sets itself, and what is said to who would vary it.
#: What the runs that ``--select`` chooses by have of their own.
_NOT_CHOSEN = ("evaluation.split", "evaluation.every", "evaluation.personal_every", "launcher")
_NOT_VARIED = {"seed": "seeds with --seeds", "name": "names of rows in --vary 'set={name: fast, rounds: 10},...'"}


# --------------------------------------------------------------------------------------------------- from the options
def parse_variation(text: str, option: str) -> Variation:
    """Read ``key=a,b,c`` or ``method:key=a,b,c``; values are YAML.

    Raises:
        InputError: it is no such thing.
    """
    match = _VARIATION.fullmatch(text)
    try:
        values = yaml.safe_load(f"[{match['values']}]") if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        values = None
    if not match or not values:
        raise InputError(option, text, "key=value,value,... with YAML values, e.g. silos.count=6,10,30")
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


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read ``0,1,2``.

    Raises:
        InputError: they are no whole numbers from 0, or one is there twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", part) for part in parts) or len({int(part) for part in parts}) < len(parts):
        raise InputError("--seeds", text, "different whole numbers from 0, e.g. 0,1,2")
    return tuple(int(part) for part in parts)


def parse_metrics(text: str) -> tuple[str, ...]:
    """Read ``mean_r1,fairness.worst_r1``.

    Raises:
        InputError: one is no name.
    """
    parts = tuple(part.strip() for part in text.split(","))
    for part in parts:
        if not _METRIC.fullmatch(part):
            raise InputError("--metric", part, "names such as mean_r1, fairness.worst_r1, bytes.up, seconds.virtual")
    return tuple(dict.fromkeys(parts))


def parse_target(text: str) -> Target:
    """Read ``mean_r10=0.5``.

    Raises:
        InputError: it is no such thing.
    """
    metric, _, value = text.partition("=")
    try:
        wanted = float(value)
        if not math.isfinite(wanted):
            raise ValueError
        return Target(metric, wanted)
    except ValueError:
        raise InputError("--target", text, "metric=value, e.g. mean_r10=0.5") from None


def scenarios(plan: ComparisonPlan, resolve: Resolve) -> Iterator[Scenario]:
    """Every scenario of the plan, its candidates for a choice included, but for the seeds."""
    variants = dict.fromkeys(
        (entry.file, (*entry.settings, *candidate)) for entry in plan.entries for candidate in entry.candidates
    )
    return (resolve(file, list(settings), None) for file, settings in variants)


def check_across(plan: ComparisonPlan) -> None:
    """Refuse to put side by side what is not varied.

    Raises:
        InputError: no row has such a varied key, or it says what is compared.
    """
    varied = dict.fromkeys(key for entry in plan.entries for key, _ in entry.point)
    if plan.across is not None and plan.across not in varied:
        allowed = " or ".join(varied) or "a key that --vary has, other than protocol"
        raise InputError("--across", plan.across, allowed)


def check_metrics(plan: ComparisonPlan, resolve: Resolve) -> None:
    """Refuse columns and targets that no run of the plan can have, before hours are spent on it.

    A name with a dot is a place in the summary, where methods put what they like: only the runs can tell.

    Raises:
        InputError: there is no such metric; the nearest ones that there are.
    """
    asked = [*(("--metric", name) for name in plan.metrics), *(("--target", each.metric) for each in plan.targets)]
    evaluations = dict.fromkeys(each.evaluation for each in scenarios(plan, resolve))
    known = dict.fromkeys(name for each in evaluations for name in known_names(each, measures_of(each)))
    for option, name in asked:
        if "." not in name and name not in known:
            more = "cut-offs as evaluation.map_at and evaluation.ndcg_at name them, folds with evaluation.fold_size"
            listed = f"a metric, e.g. {', '.join(nearest(name, known))}; {more}"
            hint = did_you_mean(name, known)
            raise InputError(option, name, f"{listed}; {hint}" if hint else listed)


def entries(
    files: Sequence[Path],
    settings: Sequence[str],
    varied: Sequence[Variation],
    select: Sequence[Variation],
    resolve: Resolve,
) -> tuple[Entry, ...]:
    """The rows: every file at every combination of its varied values. Everything is validated here.

    Args:
        files: scenarios.
        settings: ``--set``, for all.
        varied: keys whose values make rows, of all files or of the scenario or method named.
        select: keys whose values are candidates, of all rows or of one method's.
        resolve: reads and checks a scenario.

    Raises:
        InputError: a scenario, key or value is not allowed, or two rows would be the same.
    """
    if any(_key(setting) == "seed" for setting in settings):
        raise InputError("--set", "seed", _NOT_VARIED["seed"])
    # What is below a varied key is for the rows: the file's own method need not know it.
    wide = [f"{key}." for each in varied for key in each.keys]
    own_settings = [setting for setting in settings if not _key(setting).startswith(tuple(wide))]
    scenarios = {file: resolve(file, own_settings, None) for file in files}
    names_of = {file: {own.name, own.protocol.label} for file, own in scenarios.items()}
    _refuse_idle("--vary", varied, {name for names in names_of.values() for name in names})
    drafts = [
        _Draft(file, scenarios[file].name, tuple(zip(own, values, strict=True)))
        for file in files
        for own in [_fitting(varied, names_of[file])]
        for values in itertools.product(*(each.values for each in own))
    ]
    methods = _methods(drafts)
    made: list[Entry] = []
    known: set[str] = set()
    same: dict[tuple[str, ...], str] = {}
    for draft, method in zip(drafts, methods, strict=True):
        whole = [method] if len(set(methods)) > 1 or not draft.point else []
        name = ", ".join([*whole, *(f"{key}={text}" for key, text in draft.point)])
        own = (*settings, *draft.settings)
        with _blaming("--vary", draft.settings), _pointing(name, own, varied):
            names = {resolve(draft.file, list(own), None).protocol.label, draft.scenario, method, name}
        known |= names
        candidates = tuple(itertools.product(*(each.settings for each in _fitting(select, names))))
        runs: list[str] = []
        for candidate in candidates:
            with _blaming("--select", candidate):
                runs.append(resolve(draft.file, [*own, *candidate], None).model_dump_json())
        if (other := same.setdefault(tuple(runs), name)) != name:
            raise InputError("--vary", name, f"rows that differ: its scenario is that of {other}")
        made.append(Entry(name, method, draft.point, draft.file, own, candidates))
    _refuse_idle("--select", select, known)
    if twice := [name for name, count in Counter(entry.name for entry in made).items() if count > 1]:
        allowed = "scenarios (and --vary set=) with different names, so that their rows can be told apart"
        raise InputError("FILE or --vary", twice[0], allowed)
    return tuple(made)


@contextmanager
def _blaming(option: str, settings: Sequence[str]) -> Iterator[None]:
    """Name the option a bad value came with: to the scenario all of them are ``--set``."""
    try:
        yield
    except InputError as error:
        for key in (text.partition("=")[0] for text in settings):
            place, found = re.subn(rf"--set {re.escape(key)}(?=:|$)", f"{option} {key}", error.place)
            if found:
                raise InputError(place, error.found, error.allowed) from None
        raise


@contextmanager
def _pointing(row: str, settings: Sequence[str], varied: Sequence[Variation]) -> Iterator[None]:
    """Where a row does not know an option that is set for several, name the row and how one alone is given it."""
    try:
        yield
    except InputError as error:
        given = {_key(setting) for setting in settings}
        for key, named in (("protocol", "name"), ("objective", "base")):
            if f"{key}.{error.found}" in given and any(key in each.keys for each in varied):
                hint = f"--vary '{key}={{{named}: ..., {error.found}: ...}},...' sets it for one alone"
                raise InputError(f"{error.place} of {row}", error.found, f"{error.allowed}; {hint}") from None
        raise


def _key(setting: str) -> str:
    return setting.partition("=")[0]


@dataclass(frozen=True)
class _Draft:
    """A row before it has its name: a file, its scenario's name, and each varied key with the row's value."""

    file: Path
    scenario: str
    pairs: tuple[tuple[Variation, Any], ...]

    @property
    def varied_method(self) -> str:
        """As shown; empty where the method is not varied."""
        return " ".join(_label(each.key, value) for each, value in self.pairs if each.key in _METHOD_KEYS)

    @property
    def point(self) -> tuple[tuple[str, str], ...]:
        return tuple((each.key, shown(value)) for each, value in self.pairs if each.key not in _METHOD_KEYS)

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(setting for each, value in self.pairs for setting in _settings(each.key, value))


def _label(key: str, value: Any) -> str:
    """What a row is called after: a set's name where it has one."""
    return str(value["name"]) if key == TOGETHER and "name" in value else shown(value)


def _settings(key: str, value: Any) -> tuple[str, ...]:
    """A varied value as ``--set`` takes it; one for each key of a mapping of several."""
    if key != TOGETHER:
        return Variation(key, (value,)).settings
    return tuple(f"{own}={json.dumps(each, default=str)}" for own, each in value.items() if own != "name")


def _methods(drafts: Sequence[_Draft]) -> list[str]:
    """Names of the methods: what is varied, else the scenario; both where several files vary the same methods."""
    taken = Counter((draft.varied_method, draft.point) for draft in drafts)
    return [
        f"{draft.scenario} {draft.varied_method}"
        if draft.varied_method and taken[draft.varied_method, draft.point] > 1
        else draft.varied_method or draft.scenario
        for draft in drafts
    ]


def _refuse_idle(option: str, variations: Sequence[Variation], names: Collection[str]) -> None:
    for each in variations:
        if each.who is not None and each.who not in names:
            raise InputError(f"{option} {each.who}:{each.key}", each.who, f"one of {', '.join(sorted(names))}")


def _fitting(select: Sequence[Variation], names: Collection[str]) -> list[Variation]:
    """What a row chooses from; its own list of a key takes the place of the list for all."""
    own = [each for each in select if each.who in names]
    return [each for each in select if each in own or (each.who is None and each.key not in {one.key for one in own})]


def shown(value: Any) -> str:
    """A varied value as people read it: a protocol with options as ``rcsr filler=zero``."""
    if isinstance(value, dict):
        named = [str(value["name"])] if "name" in value else []
        return " ".join([*named, *(f"{key}={shown(own)}" for key, own in value.items() if key != "name")])
    return value if isinstance(value, str) else json.dumps(value, default=str)


def default_folder(plan: ComparisonPlan, kind: str, resolve: Resolve) -> Path:
    """``runs/<kind>-<names>-<digest>``: the same for the same rows, so that a second call goes on in it.

    Seeds and columns do not count: more of them can be asked for later.
    """
    facts = [[named_by(resolve(entry.file, list(entry.settings), 0)), entry.candidates] for entry in plan.entries]
    names = "-".join(dict.fromkeys(entry.method for entry in plan.entries))
    slug = re.sub(r"[^a-z0-9_.]+", "-", names.lower())[:40].strip("-")
    return Path("runs") / f"{kind}-{slug}-{digest(facts)}"


def named_by(scenario: Scenario, leave_out: Mapping[str, bool | set[str]] | None = None) -> dict[str, Any]:
    """A scenario as the plain data whose digest stands in names.

    A path reached by a link is the one it leads to, and a weights file below the working directory is named from there,
    as scenarios name it: they were so when the names of finished runs were made.

    Args:
        scenario: as resolved.
        leave_out: parts and keys that do not count.
    """
    facts = scenario.model_dump(mode="json", exclude=dict(leave_out or {}))
    for part, keys in (("data", ("path", "annotations", "images")), ("participation", ("trace",))):
        facts[part] |= {key: os.path.realpath(path) for key in keys if (path := facts[part].get(key))}
    below = f"{Path.cwd()}{os.sep}"
    weights = {key: value for key in ("name", "pretrained", "text_encoder") if (value := facts["backbone"].get(key))}
    facts["backbone"] |= {key: value.removeprefix(below) for key, value in weights.items()}
    return without_younger(facts)


def digest(facts: object) -> str:
    """Twelve hexadecimal digits that stand for plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
