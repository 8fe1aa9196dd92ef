"""Declarations of objectives (base losses), and the registry of objectives. Does not import torch.

An objective is defined on one of the network families: separate towers (:class:`TowerPlan`), DSCMR's two layers with a
common space (:class:`CommonSpacePlan`), or adapters and heads over the scenario's frozen backbone (None).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedmq.config.plug_ins import Registry, parsed, schema_problem
from fedmq.config.scenario import Objective


@dataclass(frozen=True)
class TowerPlan:
    """Architecture and initialisation of a base loss's towers."""

    image: tuple[int, ...] = (1024,)  # widths of the image tower's hidden layers (ReLU)
    text: tuple[int, ...] = (1024,)  # widths of the text tower's hidden layers
    bits: int = 64  # default code length
    tanh: bool = False  # apply tanh to the code
    classifier: bool = False  # each tower has a linear classifier of its code
    dropout: bool = False  # use dropout before the last layer
    # Standard deviation of normally distributed initial weights and biases; None draws them uniformly within 1/sqrt(fan
    # in), as torch does.
    std: float | None = None
    # Like ``std`` for the last layer's weights, with zero biases; None as the other layers.
    last_std: float | None = None
    squashed: Literal["both", "text"] = "both"  # towers to which ``tanh`` applies
    # One vector per label for both towers: linear classifier of the signs (GreedyHash), or cosines with proxies (DSPH).
    shared_head: Literal["signs", "cosines"] | None = None


@dataclass(frozen=True)
class CommonSpacePlan:
    """DSCMR's network: a layer per modality, and a shared common space with a label head."""

    hidden: int = 2048  # default width of the modality-specific layers
    bits: int = 1024  # default width of the common space
    enhance: bool = False  # add FedSCMR's EnhanceNet
    leaky: bool = False  # leaky ReLU after the common layer, as in FedCMR


Network = TowerPlan | CommonSpacePlan | None
"""None stands for adapters and heads over the frozen backbone, whose sizes are in the scenario's ``backbone``."""


@dataclass(frozen=True)
class ObjectiveKind:
    """An objective, which its module defines as ``OBJECTIVE``."""

    options: type[Any]  # frozen dataclass, the schema of its options in ``objective:`` of a scenario
    # ``begin(options, local, context, task) -> Work | None``, the loss in one task of one silo; None if the method
    # defines the loss, as with InfoNCE and its temperature.
    begin: Callable[..., Any] | None
    network: Callable[[Any], Network]  # returns the network for given options
    needs_labels: bool = True  # refuse data sets without labels, and silos without labelled training items
    on_features: bool = False  # defined only on frozen features, so that no encoder can be trained with it
    both_levels: bool = False  # train on both levels of two-level labels, not only on the lower one
    contrasts: bool = False  # the loss only contrasts the items of a batch, so that a batch of one teaches nothing


def _wrong(plug_in: object) -> str | None:
    if not isinstance(plug_in, ObjectiveKind):
        return f"an object of type {type(plug_in).__name__}"
    problem = schema_problem(plug_in.options)
    return problem and f"options that are {problem}"


OBJECTIVES: Registry[ObjectiveKind] = Registry(
    "objective.base", "fedmq.objectives", "OBJECTIVE", _wrong, "a fedmq.models.objective_registry.ObjectiveKind"
)
"""All objectives by name. Importing ``protocols`` adds the built-in ones."""


def network_of(objective: Objective) -> Network:
    """The network of a scenario's objective; None for adapters and heads.

    Raises:
        InputError: the objective is unknown, or one of its options is unknown or not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    return kind.network(parsed(kind.options, objective.options, "objective"))
