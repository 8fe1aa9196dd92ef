"""The federated methods, one module each, found by name: a new module adds a new method.

This package implements ``fedmq.config.resolve.Known``, the look-up of methods, objectives and data sets.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fedmq.config.plug_ins import Registry, as_plain, beginnings, parsed, preset_values, schema_problem, without_effect
from fedmq.config.resolve import MethodFacts, ObjectiveFacts
from fedmq.config.scenario import Data, Objective, ProtocolChoice, Scenario
from fedmq.data import catalogue
from fedmq.errors import InputError
from fedmq.federation.protocol import (
    Context,
    FederatedProtocol,
    ReportedValue,
    Traits,
    defines_sum,
    protects_items,
    why_no_items,
)
from fedmq.models.objective_registry import OBJECTIVES, ObjectiveKind, network_of
from fedmq.wire.payloads import PartialDelta
from protocols import objectives
from protocols.parts.aggregation import no_sum

_MORE_THAN_A_SUM = "its merge is more than a weighted sum of the updates"


def class_problem(found: object) -> str | None:
    """What keeps an object from being the class of a federated method; None if nothing does."""
    if not isinstance(found, type):
        return f"an object of type {type(found).__name__}, no class"
    if not issubclass(found, FederatedProtocol):
        return f"class {found.__name__}, which is no subclass of FederatedProtocol"
    if missing := sorted(found.__abstractmethods__):
        return f"class {found.__name__} without {', '.join(missing)}"
    problem = schema_problem(found.Options)
    return problem and f"class {found.__name__}, whose Options are {problem}"


METHODS: Registry[type[FederatedProtocol]] = Registry(
    "protocol.name",
    "fedmq.protocols",
    "PROTOCOL",
    class_problem,
    "a subclass of fedmq.federation.protocol.FederatedProtocol",
)
"""All methods by name."""
METHODS.add_package(__name__)


def names() -> tuple[str, ...]:
    """Names of all methods: modules of this package, then those of installed packages."""
    return METHODS.names()


def load(name: str) -> type[FederatedProtocol]:
    """The class of a method.

    Raises:
        InputError: the method is unknown, or its file cannot be used or does not define a method.
    """
    return METHODS.find(name)


def create(choice: ProtocolChoice, context: Context, *, check: bool = True) -> FederatedProtocol:
    """An instance of a scenario's method, for one of its silos or its coordinator.

    Without ``check`` the method is not checked against its traits, which takes time for every silo of the run.

    Raises:
        InputError: the method or an option is unknown, an option is not allowed, the method does not support the run,
            or it does not implement what its traits declare.
    """
    kind = load(choice.name)
    options = options_of(kind, choice.options)
    method = kind(options, context)
    if context.items is not None and (why := why_no_items(method)):
        able = ", ".join(name for name in names() if protects_items(load(name)))
        other = f"{choice.label} without that" if protects_items(kind) else f"a method of {able}"
        raise InputError("privacy.items", f"with {choice.label}: {why}", f"null, or {other}")
    if check:
        check_traits(choice.label, method, options, context)
    return method


def check_traits(name: str, method: FederatedProtocol, options: Any, context: Context) -> None:
    """Check that a method is consistent with its traits.

    Raises:
        InputError: a trait contradicts the method's functions or another trait, or the method keeps no options.
    """
    if not hasattr(method, "options"):
        allowed = "one that calls super().__init__(options, context)"
        raise InputError(f"protocol {name}", f"an __init__ of class {type(method).__name__} without options", allowed)
    place, traits, before = f"protocol {name}: traits", method.traits(), type(method).traits_of(options)
    for trait, at_run, from_options in (
        ("pooled", traits.pooled, before.pooled),
        ("personal_only", traits.personal_only, before.personal_only),
        ("needs_public", traits.needs_public, before.needs_public),
        ("unpaired", traits.unpaired, before.unpaired),
        ("model_per_silo", traits.model_per_silo, before.model_per_silo),
        ("completes_items", traits.completes_items, before.completes_items),
    ):
        if at_run != from_options:
            raise InputError(place, f"{trait} {at_run}, but traits_of says {from_options}", "the same in both")
    if traits.personalised and type(method).encoders is FederatedProtocol.encoders:
        raise InputError(place, "personalised without encoders", "personalised False, or a class that defines encoders")
    if traits.personal_only and not traits.personalised:
        raise InputError(
            place, "personal_only without personalised", "personalised True as well, or personal_only False"
        )
    sends_partial = any(PartialDelta in method.uploads(silo) for silo in context.silos if method.eligible(silo))
    layer_names = [entry.name for entry in context.layout.entries]
    if traits.shared_layers is None:
        if sends_partial:
            raise InputError(place, "a PartialDelta in uploads without shared_layers", "the names of its layers")
        return
    if not sends_partial and any(map(method.eligible, context.silos)):
        raise InputError(place, "shared_layers without a PartialDelta in uploads", "both, or neither")
    shared = list(traits.shared_layers)
    if not shared or shared != [name for name in layer_names if name in shared]:
        found = ", ".join(shared) or "no layer"
        raise InputError(place, f"shared_layers {found}", f"some of {', '.join(layer_names)}, in this order")


def traits_of(scenario: Scenario) -> Traits:
    """The traits of a scenario's method that depend only on its options.

    Raises:
        InputError: the method or an option is unknown, or an option is not allowed.
    """
    kind = load(scenario.protocol.name)
    return kind.traits_of(options_of(kind, scenario.protocol.options))


def reported(name: str) -> Mapping[str, ReportedValue]:
    """How reports show the numbers that a method reports of its merges; a user's file is not executed for a report.

    Raises:
        InputError: the method is unknown.
    """
    return load(name).REPORTED if name in METHODS.names() else {}


def summary(name: str) -> str:
    """First line of a method's docstring, for ``fedmq protocols``.

    Raises:
        InputError: the method is unknown.
    """
    load(name)
    return _first_line(METHODS.module(name))


def default_traits(name: str) -> Traits:
    """The traits of a method with its default options."""
    kind = load(name)
    return kind.traits_of(options_of(kind, {}))


def unpaired(name: str) -> str:
    """What a method, with its default options, does with a paired silo's items that lack a modality."""
    return str(default_traits(name).unpaired)


def losses() -> tuple[str, ...]:
    """Names of the base losses, except those whose loss the method defines."""
    return tuple(name for name in OBJECTIVES.names() if OBJECTIVES.find(name).begin is not None)


def loss(name: str) -> ObjectiveKind:
    """The declaration of a base loss, with its options and network.

    Raises:
        InputError: the base loss is unknown.
    """
    return OBJECTIVES.find(name)


def loss_summary(name: str) -> str:
    """First line of a base loss's docstring, for ``fedmq losses``.

    Raises:
        InputError: the base loss is unknown.
    """
    return _first_line(OBJECTIVES.module(name))


def _first_line(module: object) -> str:
    return (inspect.getdoc(module) or "").partition("\n")[0]


def options_of(protocol: type[FederatedProtocol], raw: Mapping[str, object], place: str = "protocol") -> Any:
    """A method's options from the scenario's ``protocol:`` keys, with defaults filled in, types and bounds checked.

    ``place`` is the options' section in errors, e.g. ``"scenarios/x.yaml: protocol"``.

    Raises:
        InputError: an option is unknown, of a wrong type or out of bounds.
    """
    return parsed(protocol.Options, raw, place)


def method_facts(choice: ProtocolChoice, objective: Objective) -> MethodFacts:
    """Facts of a scenario's method that do not depend on the data; some options have an effect with some losses only.

    Raises:
        InputError: the method or an option is unknown, or an option is not allowed.
    """
    kind = load(choice.name)
    options = options_of(kind, choice.options)
    traits, around = kind.traits_of(options), {"objective.base": objective.base}
    of_base = {f"objective.{name}" for name in vars(OBJECTIVES.find(objective.base).options())}
    preset, own = preset_values(kind.Options, choice.options.get("preset")), f"objective.{objective.base}."
    preset = {f"objective.{key.removeprefix(own)}" if key.startswith(own) else key: preset[key] for key in preset}
    others = [key for key in preset if "." in key and (key in of_base or not key.startswith("objective."))]
    return MethodFacts(
        as_plain(options),
        pooled=traits.pooled,
        personal_only=traits.personal_only,
        needs_public=traits.needs_public,
        weighs_single_silos=traits.weighs_single_silos,
        adapter=traits.adapter,
        no_sum=no_sum(getattr(options, "branch_renorm", True)) if defines_sum(kind) else _MORE_THAN_A_SUM,
        without_effect=tuple(without_effect(options, around)),
        begins=tuple(beginnings(options, around)),
        preset={key: preset[key] for key in others},
    )


def objective_facts(objective: Objective) -> ObjectiveFacts:
    """Facts of a scenario's objective that do not depend on the data.

    Raises:
        InputError: the base loss or an option is unknown, or an option is not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    options = objectives.options_of(objective)
    return ObjectiveFacts(
        as_plain(options),
        on_features=kind.on_features,
        hashes=network_of(objective) is not None,
        contrasts=kind.contrasts,
    )


def check_data(data: Data) -> None:
    """Refuse an unknown data set or a key that it does not read.

    Raises:
        InputError: the data set is unknown, or does not read a key.
    """
    catalogue.check(data)
