"""Variants of FedAvg: methods that differ from it in a loss term, in the eligible silos, or in local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from typing_extensions import override

from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    SiloFacts,
    Task,
    Trained,
    Traits,
    take,
)
from fedmq.wire.payloads import Delta, Payload
from protocols.fedavg import AnchoredFedAvg, AnchoredOptions, FedAvg
from protocols.parts import training

Opts = TypeVar("Opts")


class Variant(AnchoredFedAvg):
    """FedAvg with the changes given to :func:`variant`."""

    extra_loss: ClassVar[Callable[[Any, Context, Local, Task], training.Extra | None] | None] = None
    kept: ClassVar[Callable[[Any, Local, bool], Mapping[str, Tensor]] | None] = None
    local_training: ClassVar[Callable[[FedAvg, Any, Local, Task], Trained] | None] = None

    def __init__(self, options: Any, context: Context) -> None:
        self.refuse(options, context)
        super().__init__(self.fedavg_options(options), context)
        self.changed = options

    @staticmethod
    def refuse(options: Any, context: Context) -> None:
        """Refuse nothing."""

    @staticmethod
    def fedavg_options(options: Any) -> AnchoredOptions:
        """The method's options, a superset of FedAvg's."""
        chosen: AnchoredOptions = options
        return chosen

    @override
    def traits(self) -> Traits:
        return self.traits_of(self.changed)

    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs with the extra loss; adds the method's tensors to the silo's state."""
        changes = type(self)  # accessed on the instance, the functions would be bound methods
        if changes.local_training is not None:
            return changes.local_training(self, self.changed, local, task)
        extra = None if changes.extra_loss is None else changes.extra_loss(self.changed, self.context, local, task)
        trained = self.trained(local, task, extra=extra)
        if changes.kept is None:
            return trained
        kept = changes.kept(self.changed, local, has_trained(self, local, task, trained))
        return replace(trained, state={**trained.state, **kept})


def has_trained(method: FedAvg, local: Local, task: Task, trained: Trained) -> bool:
    """Whether a silo trained; with nothing to minimise, its model is still the downloaded one."""
    return bool(take(trained.payloads, Delta).buffer.any()) or method.work(local, task) is not None


def variant(
    options: type[Opts],
    *,
    extra_loss: Callable[[Opts, Context, Local, Task], training.Extra | None] | None = None,
    kept: Callable[[Opts, Local, bool], Mapping[str, Tensor]] | None = None,
    train: Callable[[FedAvg, Opts, Local, Task], Trained] | None = None,
    eligible: Callable[[SiloFacts], bool] | None = None,
    traits: Callable[[Opts], Traits] | None = None,
    encoders: Callable[[Local, Sequence[Payload]], Encoders] | None = None,
    fedavg_options: Callable[[Opts], AnchoredOptions] | None = None,
    refuse: Callable[[Opts, Context], None] | None = None,
) -> type[FederatedProtocol]:
    """Define a method as FedAvg with the given changes.

    Args:
        options: its options, a frozen dataclass; a subclass of AnchoredOptions unless ``fedavg_options`` is given.
        extra_loss: called once per task; returns the term added to the base loss in each batch's main step, or None.
        kept: returns the tensors a silo keeps after local training; called with the silo, whose model is the trained
            one and whose state is from before the task, and whether it trained.
        train: local training, instead of FedAvg's epochs with the extra loss.
        eligible: whether the method ever selects a silo for training.
        traits: the method's traits, by its options.
        encoders: a silo's personal model; required if the traits say ``personalised``.
        fedavg_options: derives FedAvg's options from the method's.
        refuse: raises InputError for options or runs that the method does not support.
    """
    given = {
        "extra_loss": extra_loss,
        "kept": kept,
        "local_training": train,
        "eligible": eligible,
        "traits_of": traits,
        "encoders": encoders,
        "fedavg_options": fedavg_options,
        "refuse": refuse,
    }
    changes = {name: staticmethod(function) for name, function in given.items() if function is not None}
    name = options.__name__.removesuffix("Options")
    return type(name, (Variant,), {"Options": options, "__module__": options.__module__, **changes})
