"""The federated methods, one file each; found by name, so that a new file is all a new method needs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any, get_args

from fedmq.config.faults import Fault
from fedmq.config.scenario import Base, Objective, ProtocolChoice, Scenario
from fedmq.data import catalogue
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, FederatedProtocol, Traits, check_class, check_traits
from protocols import objectives
from protocols._options import as_plain, parsed
from protocols._options import without_effect as _without_effect


def names() -> tuple[str, ...]:
    """Names of all methods, sorted: every module of this package whose name has no leading underscore."""
    modules = (found for found in pkgutil.iter_modules(__path__) if not found.ispkg)
    return tuple(sorted(found.name for found in modules if not found.name.startswith("_")))


def load(name: str) -> type[FederatedProtocol]:
    """The class of a method.

    Raises:
        InputError: there is no such method, or its class is none.
    """
    if name not in names():
        raise InputError("protocol.name", name, ", ".join(names()))
    protocol: type[FederatedProtocol] = importlib.import_module(f"{__name__}.{name}").PROTOCOL
    check_class(name, protocol)
    return protocol


def create(choice: ProtocolChoice, context: Context) -> FederatedProtocol:
    """The method of a scenario, for one of its silos or for its coordinator.

    Raises:
        InputError: an unknown method, an option that is unknown or not allowed, a run that the method is not made for,
            or a method that does not implement what its traits say.
    """
    kind = load(choice.name)
    options = options_of(kind, choice.options)
    method = kind(options, context)
    check_traits(choice.name, method, options, context)
    return method


def traits_of(scenario: Scenario) -> Traits:
    """What a scenario's method is as far as its options tell: whether it is ``pooled``, or ``own_only``.

    Raises:
        InputError: an unknown method, or an option that is unknown or not allowed.
    """
    kind = load(scenario.protocol.name)
    return kind.traits_of(options_of(kind, scenario.protocol.options))


def summary(name: str) -> str:
    """First line of a method's docstring, for ``fedmq protocols``.

    Raises:
        InputError: there is no such method.
    """
    load(name)
    text = importlib.import_module(f"{__name__}.{name}").__doc__ or ""
    return text.strip().partition("\n")[0]


def losses() -> tuple[Base, ...]:
    """Names of the base losses with options of their own: all but info_nce, whose temperature is the method's."""
    return tuple(sorted(set(get_args(Base)) - {"info_nce"}))


def loss_options(name: str) -> type[Any]:
    """The dataclass of a base loss's own options.

    Raises:
        InputError: there is no such loss, or it has none.
    """
    if name not in losses():
        raise InputError("objective.base", name, ", ".join(losses()))
    return objectives.module_of(name).Options


def loss_summary(name: str) -> str:
    """First line of a base loss's docstring, for ``fedmq losses``.

    Raises:
        InputError: there is no such loss, or it has no options.
    """
    return (inspect.getdoc(inspect.getmodule(loss_options(name))) or "").partition("\n")[0]


def options_of(protocol: type[FederatedProtocol], raw: Mapping[str, Any], place: str = "protocol") -> Any:
    """A method's options from the scenario's ``protocol:`` keys, defaults filled in, types and bounds checked.

    Args:
        protocol: from :func:`load`.
        raw: option name to value as YAML gives it.
        place: what the names stand under, for the error, e.g. ``"scenarios/x.yaml: protocol"``.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    return parsed(protocol.Options, raw, place)


def resolved(scenario: Scenario, place: str = "") -> Scenario:
    """The scenario with the defaults of its method's and its base loss's own options written out.

    Args:
        scenario: as validated.
        place: the file it came from, for errors.

    Raises:
        InputError: an unknown method, or an option that is unknown or not allowed.
    """
    prefix = f"{place}: " if place else ""
    catalogue.check(scenario.data)
    kind = load(scenario.protocol.name)
    options = options_of(kind, scenario.protocol.options, f"{prefix}protocol")
    changes: dict[str, Any] = {"protocol": ProtocolChoice(name=scenario.protocol.name, **as_plain(options))}
    objective = scenario.objective
    if objective.base != "info_nce" or objective.options:
        base = objectives.options_of(objective, f"{prefix}objective")
        chosen = {"base": objective.base, "bits": objective.bits, "hidden": objective.hidden}
        changes["objective"] = Objective(**chosen, **as_plain(base))
    return scenario.model_copy(update=changes)


def without_effect(scenario: Scenario) -> tuple[str, ...]:
    """A line for each option of the method that is set though what it is an option of is switched off.

    And for each fault whose rounds all come after the run's last one.

    Args:
        scenario: from :func:`resolved`; an option at its default goes without a word.
    """
    options = options_of(load(scenario.protocol.name), scenario.protocol.options)
    found = _without_effect(options, {"objective.base": scenario.objective.base})
    idle = [f"protocol.{name}: {value} has no effect with {off}" for name, value, off in found]
    for number, fault in enumerate(scenario.faults):
        if isinstance(fault, Fault) and not any(map(fault.in_rounds, range(scenario.rounds))):
            rounds = fault.rounds if isinstance(fault.rounds, str) else ", ".join(map(str, fault.rounds or ()))
            last = f"rounds: {scenario.rounds}, whose last one is {scenario.rounds - 1}"
            idle.append(f"faults[{number}].rounds: {rounds} has no effect with {last}")
    return tuple(idle)
