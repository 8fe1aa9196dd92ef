"""What an objective (a base loss) tells of itself, and the registry in which objectives register themselves.

An objective says which of the network families it is defined on: towers of its own (:class:`TowerPlan`), DSCMR's two
layers with a common space (:class:`CommonSpacePlan`), or the adapters and heads over the scenario's frozen backbone.
Importing this module brings no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fedmq.config.options import parsed, schema_problem
from fedmq.config.registry import Registry
from fedmq.config.scenario import Objective


@dataclass(frozen=True)
class TowerPlan:
    """What a base's towers look like.

    Args:
        image: widths of the image tower's hidden layers (ReLU).
        text: widths of the text tower's.
        bits: default length of the code.
        tanh: the code is squashed.
        classifier: each tower ends in a linear classifier of its code.
        dropout: before the last layer.
        std: of all weights and biases, normal; None draws uniformly within 1/sqrt(fan in), as torch does.
        last_std: of the last layer's weights alone, normal, its bias zero; None as the others.
        squashed: which towers ``tanh`` is for.
        sign_head: one linear classifier of the binary codes, for both towers together, as GreedyHash has.
    """

    image: tuple[int, ...] = (1024,)
    text: tuple[int, ...] = (1024,)
    bits: int = 64
    tanh: bool = False
    classifier: bool = False
    dropout: bool = False
    std: float | None = None
    last_std: float | None = None
    squashed: Literal["both", "text"] = "both"
    sign_head: bool = False


@dataclass(frozen=True)
class CommonSpacePlan:
    """DSCMR's network: a layer of each modality's own, and a common space with a label head that they share.

    Args:
        hidden: default width of the layers of their own.
        bits: default width of the common space.
        enhance: FedSCMR's EnhanceNet behind it.
        leaky: leaky ReLU after the common layer, as FedCMR has.
    """

    hidden: int = 2048
    bits: int = 1024
    enhance: bool = False
    leaky: bool = False


Network = TowerPlan | CommonSpacePlan | None
"""None stands for the adapters and heads over the frozen backbone, whose sizes the scenario's ``backbone`` says."""


@dataclass(frozen=True)
class ObjectiveKind:
    """An objective, as its module's ``OBJECTIVE`` registers it.

    Args:
        options: frozen dataclass, the schema of the further keys of ``objective:`` in a scenario.
        begin: ``begin(options, local, context, task) -> Work | None``, the loss at work in one task of one silo; None
            where the loss is the method's own, as InfoNCE with its temperature is.
        network: the network that it is defined on, by its options.
        needs_labels: data sets without labels, or silos none of whose training items has one, are refused.
        on_features: defined on frozen features alone, so that no encoder can be trained with it.
        both_levels: of labels on two levels silos train on both, not on the lower one alone.
    """

    options: type[Any]
    begin: Callable[..., Any] | None
    network: Callable[[Any], Network]
    needs_labels: bool = True
    on_features: bool = False
    both_levels: bool = False


def _wrong(found: object) -> str | None:
    if not isinstance(found, ObjectiveKind):
        return f"an object of type {type(found).__name__}"
    problem = schema_problem(found.options)
    return problem and f"options that are {problem}"


OBJECTIVES: Registry[ObjectiveKind] = Registry(
    "objective.base", "fedmq.objectives", "OBJECTIVE", _wrong, "a fedmq.models.objectives.ObjectiveKind"
)
"""Every objective by its name. ``protocols`` adds the built-in ones when it is imported."""


def network_of(objective: Objective) -> Network:
    """The network of a scenario's objective; None for adapters and heads.

    Raises:
        InputError: an unknown objective, an option that is unknown or not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    return kind.network(parsed(kind.options, objective.options, "objective"))
