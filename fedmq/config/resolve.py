"""From a scenario file to a run, which is resolved once and passed to every process.

``read`` checks a scenario against its schema, without torch or any method. ``resolve`` also checks what it names,
through :class:`Known`, as the methods, objectives and data sets are in packages above this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedmq.config import loader, user_files
from fedmq.config.faults import Fault
from fedmq.config.run_id import name_of
from fedmq.config.scenario import Data, Objective, ProtocolChoice, Scenario
from fedmq.config.user_files import UserFileError
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError


@dataclass(frozen=True)
class MethodFacts:
    """Facts of a scenario's method that do not depend on the data.

    Args:
        options: all options including defaults, as plain data.
        pooled: it trains centrally on all silos' data, as an upper bound.
        personal_only: the shared model is not fully trained, so that retrieval needs a silo's personal model.
        needs_public: it needs a data set that marks public items.
        without_effect: options that are set although their switch is off: name, value, and the switch's value.
        begins: options that say in which round a part of the method begins: name, round, what begins, and whether the
            round is the default.
    """

    options: Mapping[str, object]
    pooled: bool
    personal_only: bool
    needs_public: bool
    without_effect: tuple[tuple[str, object, str], ...]
    begins: tuple[tuple[str, int, str, bool], ...] = ()


@dataclass(frozen=True)
class ObjectiveFacts:
    """Facts of a scenario's objective that do not depend on the data.

    Args:
        options: all options including defaults, as plain data.
        on_features: it is defined only on frozen features, so that no encoder can be trained with it.
        hashes: it has a separate network, whose sizes are ``objective.bits`` and ``objective.hidden``.
        contrasts: it only contrasts the items of a batch, so that a batch of one teaches nothing.
    """

    options: Mapping[str, object]
    on_features: bool
    hashes: bool
    contrasts: bool = False


class Known(Protocol):
    """Look-up of methods, objectives and data sets by name, which the package ``protocols`` implements."""

    @property
    def method_facts(self) -> Callable[[ProtocolChoice, Objective], MethodFacts]:
        """Facts of the method; raises InputError, whose place is the scenario key, if something is not allowed."""
        ...

    @property
    def objective_facts(self) -> Callable[[Objective], ObjectiveFacts]:
        """Facts of the objective; the same errors."""
        ...

    @property
    def check_data(self) -> Callable[[Data], None]:
        """Refuses an unknown data set or a key that it does not read; the same errors."""
        ...


@dataclass(frozen=True)
class Source:
    """A scenario file, read and validated against the schema.

    Args:
        file: the file.
        scenario: with settings applied; names are not looked up yet.
        overridden: keys given with ``--set``, for the place in errors.
    """

    file: Path
    scenario: Scenario
    overridden: tuple[str, ...] = ()

    def place(self, key: str) -> str:
        """File, line and key, or the setting that gave the key; ``key`` is e.g. ``partition.alpha``."""
        return loader.place_of(self.file, key.split("."), self.overridden)


@dataclass(frozen=True)
class ResolvedRun:
    """A run as all its processes see it, created once by :func:`resolve`.

    Args:
        source: the scenario file, for the place in errors.
        scenario: with all defaults, including those of the method and the objective; with absolute paths, and with
            references to the user's Python files (``fedmq.config.user_files``).
        id: the run's name on the wire and in logs.
        pooled: the method trains centrally on all silos' data.
        personal_only: the shared model is not fully trained, so that retrieval needs a silo's personal model.
        warnings: a line for each setting that has no effect.
    """

    source: Source
    scenario: Scenario
    id: str
    pooled: bool
    personal_only: bool
    warnings: tuple[str, ...] = ()


def read(file: Path, settings: Sequence[str] = (), seed: int | None = None) -> Source:
    """Read a scenario file and check it against the schema.

    Args:
        file: the YAML file.
        settings: ``key=value`` pairs that override it.
        seed: overrides both; None keeps their seed.

    Raises:
        InputError: the file cannot be read, or a key or value in it is not allowed.
    """
    given = [*settings, *([f"seed={seed}"] if seed is not None else [])]
    raw = loader.apply_settings(read_yaml(file), given)
    return Source(file, loader.parse(raw, file), raw.overridden)


def resolve(source: Source, known: Known, *, weights: bool = True, adopt: bool = True) -> ResolvedRun:
    """Look up everything that a scenario names, and fill in all defaults.

    Args:
        source: from :func:`read`.
        known: looks up methods, objectives and data sets.
        weights: also make paths of the backbone's weights absolute; not with manually launched programs, which run on
            several machines and must agree on the scenario.
        adopt: allow to execute Python files that the scenario names by path. False for the scenario of a run folder,
            in which such a path is refused, see ``fedmq.config.user_files``.

    Raises:
        InputError: something is not allowed; names file, line and key.
    """
    try:
        scenario = _adopted(source, adopt=adopt)
        if scenario.data is not None:
            known.check_data(scenario.data)
        method = known.method_facts(scenario.protocol, scenario.objective)
        if scenario.data is None and method.pooled:
            allowed = "a federated method: with partition.kind own no process holds the data of all silos"
            raise InputError("protocol.name", scenario.protocol.label, allowed)
        if scenario.data is None and method.needs_public:
            allowed = "a method without public items: with partition.kind own the sites state none"
            raise InputError("protocol.name", scenario.protocol.label, allowed)
        objective = known.objective_facts(scenario.objective)
        _check_objective(scenario, objective)
        changes: dict[str, object] = {"protocol": scenario.protocol.with_options(method.options)}
        if objective.options:
            changes["objective"] = scenario.objective.with_options(objective.options)
        scenario = loader.with_absolute_paths(scenario.model_copy(update=changes), weights=weights)
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
    )
    run_id = name_of(scenario.model_dump(mode="json"))
    return ResolvedRun(source, scenario, run_id, method.pooled, method.personal_only, warnings)


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
        if not user_files.is_path(name):
            return name
        if not adopt:
            allowed = "a name or a reference, as files that a run folder's scenario names by path are not executed"
            raise InputError(key, name, allowed)
        # Paths from the command line are relative to the working directory, those of a file to that file.
        given = any(f"{key}.".startswith(f"{each}.") for each in source.overridden)
        return user_files.adopt((Path() if given else source.file.parent) / Path(name).expanduser())

    protocol = named("protocol.name", scenario.protocol.name)
    base = named("objective.base", scenario.objective.base)
    changes: dict[str, object] = {
        "protocol": scenario.protocol.model_copy(update={"name": protocol}),
        "objective": scenario.objective.model_copy(update={"base": base}),
    }
    if scenario.data is not None:
        changes["data"] = scenario.data.model_copy(update={"name": named("data.name", scenario.data.name)})
    if metrics := scenario.evaluation.metrics:
        references = tuple(named("evaluation.metrics", each) for each in metrics)
        changes["evaluation"] = scenario.evaluation.model_copy(update={"metrics": references})
    return scenario.model_copy(update=changes)


def _check_objective(scenario: Scenario, facts: ObjectiveFacts) -> None:
    objective = scenario.objective
    if not facts.hashes and (objective.bits or objective.hidden):
        found = f"sizes of a hash network with {objective.base}"
        raise InputError(
            "objective", found, "objective.bits and .hidden only with hash networks; use backbone.dim instead"
        )
    if facts.contrasts and scenario.training.batch_size == 1:
        allowed = f"2 or more: {objective.base} contrasts the items of a batch, and a single one teaches nothing"
        raise InputError("training.batch_size", 1, allowed)
    if scenario.backbone.end_to_end and facts.on_features:
        allowed = f"false: end_to_end is for hash networks on labels, not objective.base {objective.base}"
        raise InputError("backbone.end_to_end", True, allowed)


def _late_faults(scenario: Scenario) -> list[str]:
    """A warning for each fault whose rounds are all after the run's last round."""
    lines = []
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, Fault) and not any(map(fault.in_rounds, range(scenario.rounds))):
            rounds = fault.rounds if isinstance(fault.rounds, str) else ", ".join(map(str, fault.rounds or ()))
            last = f"rounds: {scenario.rounds}, as the last round is {scenario.rounds - 1}"
            lines.append(f"faults[{number}].rounds: {rounds} has no effect with {last}")
    return lines
