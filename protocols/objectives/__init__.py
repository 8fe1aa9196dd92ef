"""Base losses: what a silo minimises, whatever federated method it takes part in. One module per base.

A module ``protocols/objectives/<base>.py`` registers itself by ``OBJECTIVE``, an
:class:`~fedmq.models.objectives.ObjectiveKind`: its options, its network, and ``begin(options, local, context, task)``,
the base at work in one task of one silo. Its equations are module-level functions, checked against golden values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedmq.config.options import parsed
from fedmq.config.scenario import Objective
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objectives import OBJECTIVES
from protocols._training import Work

OBJECTIVES.add_package(__name__)


def options_of(objective: Objective, place: str = "objective") -> Any:
    """A base's options, checked.

    Raises:
        InputError: an unknown base or option, or a value that is not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    if objective.options and not dataclasses.fields(kind.options):
        raise InputError(place, "options", f"none with base {objective.base}; its temperature is the method's")
    return parsed(kind.options, objective.options, place)


def begin(options: Any, local: Local, context: Context, task: Task) -> Work | None:
    """The scenario's base at work in one task of one silo.

    Returns:
        None when this silo has nothing to minimise, as one that lacks a modality it needs.
    """
    begun = OBJECTIVES.find(context.objective.base).begin
    if begun is None:
        raise ValueError(f"the loss of base {context.objective.base} is the method's")
    work: Work | None = begun(options, local, context, task)
    return work
