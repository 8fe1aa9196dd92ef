"""From a scenario file to a run: read once, resolved once, and carried to every process.

``read`` knows only the scenario's schema and needs neither torch nor a method. ``resolve`` also asks those who know the
methods, the objectives and the data sets, which lie above this package, through :class:`Known`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedmq.config import loader, user_files
from fedmq.config.faults import Fault
from fedmq.config.run_id import name_of
from fedmq.config.scenario import Data, Objective, ProtocolChoice, Scenario
from fedmq.config.user_files import UserFileError
from fedmq.errors import InputError


@dataclass(frozen=True)
class MethodFacts:
    """What is known of a scenario's method before there is any data.

    Args:
        options: all of its options, the defaults written out, as YAML writes them.
        pooled: it trains on everybody's data in one place, as a centralised upper bound.
        own_only: it trains only the silos' own models as a whole, and none that is shared.
        without_effect: options that are set though their switch is off: name, value, and the switch as it stands.
    """

    options: Mapping[str, object]
    pooled: bool
    own_only: bool
    without_effect: tuple[tuple[str, object, str], ...]


@dataclass(frozen=True)
class ObjectiveFacts:
    """What is known of a scenario's objective before there is any data.

    Args:
        options: all of its options, the defaults written out, as YAML writes them.
        on_features: it is defined on frozen features alone, so that no encoder can be trained with it.
        hashes: it has a network of its own, whose sizes are ``objective.bits`` and ``objective.hidden``.
    """

    options: Mapping[str, object]
    on_features: bool
    hashes: bool


class Known(Protocol):
    """Who knows the methods, objectives and data sets that a scenario may name; the package ``protocols`` does."""

    @property
    def method_facts(self) -> Callable[[ProtocolChoice, Objective], MethodFacts]:
        """Facts of the method; InputError with the scenario's key as its place where something is not allowed."""
        ...

    @property
    def objective_facts(self) -> Callable[[Objective], ObjectiveFacts]:
        """Facts of the objective; errors likewise."""
        ...

    @property
    def check_data(self) -> Callable[[Data], None]:
        """Refuses a choice of data that no reader takes; errors likewise."""
        ...


@dataclass(frozen=True)
class Source:
    """A scenario file, read and validated against the schema.

    Args:
        file: the file.
        scenario: with the settings applied; what it names is not looked up yet.
        overridden: keys that ``--set`` gave, for the place in errors.
    """

    file: Path
    scenario: Scenario
    overridden: tuple[str, ...] = ()

    def place(self, key: str) -> str:
        """The file with line and key, or the setting that gave the key; ``key`` is as ``partition.alpha``."""
        return loader.place_of(self.file, key.split("."), self.overridden)


@dataclass(frozen=True)
class ResolvedRun:
    """A run as all of its processes see it: made once by :func:`resolve`, never asked for again.

    Args:
        source: the file it came from, for the place in errors.
        scenario: with every default written out, those of the method and the objective included; paths are absolute,
            a user's Python files are named by their references (``fedmq.config.user_files``).
        id: the run's name on the wire and in logs.
        pooled: the method trains on everybody's data in one place.
        own_only: only the silos' own models are trained as a whole.
        warnings: a line for each setting that has no effect.
    """

    source: Source
    scenario: Scenario
    id: str
    pooled: bool
    own_only: bool
    warnings: tuple[str, ...] = ()


def read(file: Path, settings: Sequence[str] = (), seed: int | None = None) -> Source:
    """Read a scenario file once; no method, data set or torch is needed.

    Args:
        file: YAML.
        settings: ``key=value`` over it.
        seed: over both; None leaves it.

    Raises:
        InputError: the file cannot be read, or a key or value in it is not allowed.
    """
    given = [*settings, *([f"seed={seed}"] if seed is not None else [])]
    raw = loader.apply_settings(loader.read_yaml(file), given)
    return Source(file, loader.parse(raw, file), raw.overridden)


def resolve(source: Source, known: Known, *, weights: bool = True, adopt: bool = True) -> ResolvedRun:
    """Look up all that a scenario names, and write out what it leaves to defaults.

    Args:
        source: from :func:`read`.
        known: who knows the methods, objectives and data sets.
        weights: the paths of the backbone's weights are made absolute, too. Not where the programs are started
            manually, each on its own machine: they must agree on what the scenario says.
        adopt: Python files that the scenario names by their paths may be executed. False for the scenario of a run
            folder that is only read: there such a path is refused, see ``fedmq.config.user_files``.

    Raises:
        InputError: one line with file, line and key for whatever is not allowed.
    """
    try:
        scenario = _adopted(source, adopt=adopt)
        known.check_data(scenario.data)
        method = known.method_facts(scenario.protocol, scenario.objective)
        objective = known.objective_facts(scenario.objective)
        _check_objective(scenario, objective)
        changes: dict[str, object] = {"protocol": scenario.protocol.with_options(method.options)}
        if objective.options:
            changes["objective"] = scenario.objective.with_options(objective.options)
        scenario = loader.with_absolute_paths(scenario.model_copy(update=changes), weights=weights)
    except UserFileError:
        raise  # its place is the user's file
    except InputError as error:
        unknown = f"{error.place}.{error.found}"  # of an option that is none, its own setting is its place
        key = unknown if unknown in source.overridden else error.place
        raise InputError(source.place(key), error.found, error.allowed) from None
    warnings = (
        *(f"protocol.{name}: {value} has no effect with {off}" for name, value, off in method.without_effect),
        *_late_faults(scenario),
    )
    own_id = name_of(scenario.model_dump(mode="json"))
    return ResolvedRun(source, scenario, own_id, method.pooled, method.own_only, warnings)


def _adopted(source: Source, *, adopt: bool) -> Scenario:
    """The scenario with references in place of the paths of a user's Python files."""
    scenario = source.scenario

    def named(key: str, name: str) -> str:
        if not user_files.is_path(name):
            return name
        if not adopt:
            allowed = "a name or a reference: files that the scenario of a run folder names by path are not executed"
            raise InputError(key, name, allowed)
        # What is set on the command line starts at the working directory, what a file says at that file.
        given = any(f"{key}.".startswith(f"{each}.") for each in source.overridden)
        return user_files.adopt((Path() if given else source.file.parent) / Path(name).expanduser())

    protocol = named("protocol.name", scenario.protocol.name)
    base, data = named("objective.base", scenario.objective.base), named("data.name", scenario.data.name)
    changes: dict[str, object] = {
        "protocol": scenario.protocol.model_copy(update={"name": protocol}),
        "objective": scenario.objective.model_copy(update={"base": base}),
        "data": scenario.data.model_copy(update={"name": data}),
    }
    if metrics := scenario.evaluation.metrics:
        references = tuple(named("evaluation.metrics", each) for each in metrics)
        changes["evaluation"] = scenario.evaluation.model_copy(update={"metrics": references})
    return scenario.model_copy(update=changes)


def _check_objective(scenario: Scenario, facts: ObjectiveFacts) -> None:
    objective = scenario.objective
    if not facts.hashes and (objective.bits or objective.hidden):
        found = f"sizes of a hash network with {objective.base}"
        raise InputError("objective", found, "objective.bits and .hidden with hash networks; here it is backbone.dim")
    if scenario.backbone.end_to_end and facts.on_features:
        allowed = f"false: end_to_end is for hash networks on labels, not objective.base {objective.base}"
        raise InputError("backbone.end_to_end", True, allowed)


def _late_faults(scenario: Scenario) -> list[str]:
    """A line for each fault whose rounds all come after the run's last one."""
    lines = []
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, Fault) and not any(map(fault.in_rounds, range(scenario.rounds))):
            rounds = fault.rounds if isinstance(fault.rounds, str) else ", ".join(map(str, fault.rounds or ()))
            last = f"rounds: {scenario.rounds}, whose last one is {scenario.rounds - 1}"
            lines.append(f"faults[{number}].rounds: {rounds} has no effect with {last}")
    return lines
