"""Base losses: what a silo minimises, whatever federated method it takes part in. One module per base.

A module ``protocols/objectives/<base>.py`` holds a frozen dataclass ``Options`` and a function
``begin(options, local, context, task) -> Work | None``: the base at work in one task of one silo. Its equations are
module-level functions, checked against golden values. ``fedmq.config.scenario.Base`` names the bases and
``fedmq.models.hash_networks`` their networks; info_nce, which needs none, is in ``protocols/fedavg.py``.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from fedmq.config.scenario import Objective
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, Task
from protocols._options import parsed
from protocols._training import Work


class Base(Protocol):
    """What a module of this package offers."""

    Options: type[Any]

    def begin(self, options: Any, local: Local, context: Context, task: Task) -> Work | None:
        """The base at work; None when this silo has nothing to minimise, as one that lacks a modality it needs."""
        ...


def module_of(base: str) -> Base:
    """The module of a base.

    Raises:
        InputError: info_nce, which has no options of its own.
    """
    if base == "info_nce":
        raise InputError("objective", "options", "none with base info_nce; its temperature is the method's")
    return cast(Base, importlib.import_module(f"protocols.objectives.{base}"))


def options_of(objective: Objective, place: str = "objective") -> Any:
    """A base's options, checked.

    Raises:
        InputError: an unknown option, or a value that is not allowed.
    """
    return parsed(module_of(objective.base).Options, objective.options, place)


def begin(options: Any, local: Local, context: Context, task: Task) -> Work | None:
    """The scenario's base at work in one task of one silo."""
    return module_of(context.objective.base).begin(options, local, context, task)
