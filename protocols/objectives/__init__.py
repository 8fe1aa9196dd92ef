"""Base losses, which silos minimise with any federated method. One module per base loss.

A module ``protocols/objectives/<base>.py`` defines ``OBJECTIVE``, an
:class:`~fedmq.models.objective_registry.ObjectiveKind` with the options, the network, and
``begin(options, local, context, task)``, which starts the loss in one task of one silo. Equations are module-level
functions, checked against golden values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedmq.config.plug_ins import parsed
from fedmq.config.scenario import Objective
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import OBJECTIVES
from protocols.parts.training import Work

OBJECTIVES.add_package(__name__)


def options_of(objective: Objective, place: str = "objective") -> Any:
    """A base loss's options, checked.

    Raises:
        InputError: the base loss or an option is unknown, or a value is not allowed.
    """
    kind = OBJECTIVES.find(objective.base)
    if objective.options and not dataclasses.fields(kind.options):
        elsewhere = ", and its temperature is an option of the method" if objective.base == "info_nce" else ""
        allowed = f"base; {objective.base} has no options{elsewhere}"
        raise InputError(place, next(iter(objective.options)), allowed)
    return parsed(kind.options, objective.options, place)


def begin(options: Any, local: Local, context: Context, task: Task) -> Work | None:
    """Start the scenario's base loss in one task of one silo.

    Returns:
        None if the silo has nothing to minimise, e.g. because it lacks a modality.
    """
    begin_loss = OBJECTIVES.find(context.objective.base).begin
    if begin_loss is None:
        raise ValueError(f"the method defines the loss of base {context.objective.base}")
    work: Work | None = begin_loss(options, local, context, task)
    return work
