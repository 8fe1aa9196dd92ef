"""The federated methods, one file each; found by name, so that a new file is all a new method needs.

This package is what ``fedmq.config.resolve`` asks about methods and objectives, its ``Known``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedmq.config.options import as_plain, parsed, without_effect
from fedmq.config.registry import Registry
from fedmq.config.resolve import MethodFacts, ObjectiveFacts
from fedmq.config.scenario import Data, Objective, ProtocolChoice, Scenario
from fedmq.data import catalogue
from fedmq.federation.protocol import Context, FederatedProtocol, Traits, check_traits, class_problem
from fedmq.models.objectives import OBJECTIVES, ObjectiveKind, network_of
from protocols import objectives

METHODS: Registry[type[FederatedProtocol]] = Registry(
    "protocol.name",
    "fedmq.protocols",
    "PROTOCOL",
    class_problem,
    "a subclass of fedmq.federation.protocol.FederatedProtocol",
)
"""Every method by its name."""
METHODS.add_package(__name__)


def names() -> tuple[str, ...]:
    """Names of all methods: the modules of this package without a leading underscore, then installed packages'."""
    return METHODS.names()


def load(name: str) -> type[FederatedProtocol]:
    """The class of a method.

    Raises:
        InputError: there is no such method, its file cannot be used, or what it holds is no method.
    """
    return METHODS.find(name)


def create(choice: ProtocolChoice, context: Context) -> FederatedProtocol:
    """The method of a scenario, for one of its silos or for its coordinator.

    Raises:
        InputError: an unknown method, an option that is unknown or not allowed, a run that the method is not made for,
            or a method that does not implement what its traits say.
    """
    kind = load(choice.name)
    options = options_of(kind, choice.options)
    method = kind(options, context)
    check_traits(choice.label, method, options, context)
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
    return _first_line(METHODS.module(name))


def losses() -> tuple[str, ...]:
    """Names of the base losses with options of their own: not of one whose loss is the method's."""
    return tuple(name for name in OBJECTIVES.names() if OBJECTIVES.find(name).begin is not None)


def loss(name: str) -> ObjectiveKind:
    """A base loss: its options, its network.

    Raises:
        InputError: there is none of that name.
    """
    return OBJECTIVES.find(name)


def loss_summary(name: str) -> str:
    """First line of a base loss's docstring, for ``fedmq losses``.

    Raises:
        InputError: there is none of that name.
    """
    return _first_line(OBJECTIVES.module(name))


def _first_line(module: object) -> str:
    return (inspect.getdoc(module) or "").partition("\n")[0]


def options_of(protocol: type[FederatedProtocol], raw: Mapping[str, object], place: str = "protocol") -> Any:
    """A method's options from the scenario's ``protocol:`` keys, defaults filled in, types and bounds checked.

    Args:
        protocol: from :func:`load`.
        raw: option name to value as YAML gives it.
        place: what the names stand under, for the error, e.g. ``"scenarios/x.yaml: protocol"``.

    Raises:
        InputError: an unknown option, a wrong type or a value out of bounds.
    """
    return parsed(protocol.Options, raw, place)


def method_facts(choice: ProtocolChoice, objective: Objective) -> MethodFacts:
    """What a run needs to know of its method before there is any data.

    Args:
        choice: ``protocol`` of the scenario.
        objective: ``objective`` of the scenario, on which may depend whether an option has an effect.

    Raises:
        InputError: an unknown method, or an option that is unknown or not allowed.
    """
    kind = load(choice.name)
    options = options_of(kind, choice.options)
    traits = kind.traits_of(options)
    return MethodFacts(
        as_plain(options),
        pooled=traits.pooled,
        own_only=traits.own_only,
        without_effect=tuple(without_effect(options, {"objective.base": objective.base})),
    )


def objective_facts(objective: Objective) -> ObjectiveFacts:
    """What a run needs to know of its objective before there is any data.

    Raises:
        InputError: an unknown base, or an option that is unknown or not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    options = objectives.options_of(objective)
    return ObjectiveFacts(as_plain(options), on_features=kind.on_features, hashes=network_of(objective) is not None)


def check_data(data: Data) -> None:
    """Refuse a choice of data that no reader takes.

    Raises:
        InputError: an unknown data set, or a key that it does not read.
    """
    catalogue.check(data)
