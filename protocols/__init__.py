"""The federated methods, one file each; found by name, so that a new file is all a new method needs.

This package is what ``fedmq.config.resolve`` asks about methods and objectives, its ``Known``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, cast

from fedmq.config.options import as_plain, parsed, without_effect
from fedmq.config.registry import Registry
from fedmq.config.resolve import MethodFacts, ObjectiveFacts
from fedmq.config.scenario import Data, Objective, ProtocolChoice, Scenario
from fedmq.data import catalogue
from fedmq.federation.protocol import Context, FederatedProtocol, OwnOnly, Pooling
from fedmq.models.objectives import OBJECTIVES, ObjectiveKind, network_of
from protocols import objectives


def _wrong(found: object) -> str | None:
    """What a class lacks of a method's interface."""
    if not isinstance(found, type):
        return f"an object of type {type(found).__name__}, no class"
    wanted = [name for name, each in vars(FederatedProtocol).items() if inspect.isfunction(each)]
    missing = [name for name in wanted if not name.startswith("_") and not callable(getattr(found, name, None))]
    if missing:
        return f"class {found.__name__} without {', '.join(missing)}"
    if not dataclasses.is_dataclass(getattr(found, "Options", None)):
        return f"class {found.__name__} without Options, a frozen dataclass"
    return None


METHODS: Registry[type[FederatedProtocol]] = Registry(
    "protocol.name",
    "fedmq.protocols",
    "PROTOCOL",
    _wrong,
    "a class with the methods of fedmq.federation.protocol.FederatedProtocol and Options",
)
"""Every method by its name."""
METHODS.add_package(__name__)


def names() -> tuple[str, ...]:
    """Names of all methods: the modules of this package without a leading underscore, then installed packages'."""
    return METHODS.names()


def load(name: str) -> type[FederatedProtocol]:
    """The class of a method.

    Raises:
        InputError: there is no such method, or its file cannot be used.
    """
    return METHODS.find(name)


def build(scenario: Scenario, context: Context) -> FederatedProtocol:
    """A scenario's method with its options.

    Raises:
        InputError: an unknown method, an option that is unknown or not allowed, or a context that it is not for.
    """
    kind = load(scenario.protocol.name)
    return kind(options_of(kind, scenario.protocol.options), context)


def pooled(name: str) -> bool:
    """Whether a method trains on everybody's data in one place, as a centralised upper bound.

    Raises:
        InputError: there is no such method.
    """
    kind: object = load(name)  # asked of the class: there is no context yet to make a method with
    return isinstance(kind, Pooling) and kind.pooled


def own_only(scenario: Scenario) -> bool:
    """Whether a scenario trains only the silos' own models as a whole, and none that is shared.

    Raises:
        InputError: an unknown method, or an option that is unknown or not allowed.
    """
    return method_facts(scenario.protocol, scenario.objective).own_only


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
    options, asked = options_of(kind, choice.options), cast(object, kind)
    return MethodFacts(
        as_plain(options),
        pooled=pooled(choice.name),
        own_only=isinstance(asked, OwnOnly) and asked.own_only(options),
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
