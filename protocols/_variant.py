"""Variants of FedAvg: methods that differ from it in a loss term, in which silos take part, or in local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    take,
)
from fedmq.wire.messages import Delta, Payload
from protocols import _training
from protocols.fedavg import FedAvg, FedAvgOptions

Opts = TypeVar("Opts")


class Variant(FederatedProtocol):
    """FedAvg with the changes given to :func:`variant`."""

    extra_loss: ClassVar[Callable[[Any, Context, Local, Task], _training.Extra | None] | None] = None
    kept: ClassVar[Callable[[Any, Local, bool], Mapping[str, Tensor]] | None] = None
    training: ClassVar[Callable[[FedAvg, Any, Local, Task], Trained] | None] = None

    def __init__(self, options: Any, context: Context) -> None:
        self.refuse(options, context)
        self.options = options
        self.context = context
        self.fedavg = FedAvg(self.fedavg_options(options), context)

    @staticmethod
    def refuse(options: Any, context: Context) -> None:
        """Nothing is refused."""

    @staticmethod
    def fedavg_options(options: Any) -> FedAvgOptions:
        """The method's own, which are FedAvg's and more."""
        chosen: FedAvgOptions = options
        return chosen

    def traits(self) -> Traits:
        """What the options alone tell."""
        return self.traits_of(self.options)

    def eligible(self, silo: SiloFacts) -> bool:
        """As FedAvg."""
        return self.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg."""
        return self.fedavg.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs with the extra loss; the silo keeps what the method wants kept."""
        changes = type(self)  # plain functions; found on the instance they would be methods
        if changes.training is not None:
            return changes.training(self.fedavg, self.options, local, task)
        extra = None if changes.extra_loss is None else changes.extra_loss(self.options, self.context, local, task)
        trained = self.fedavg.trained(local, task, extra=extra)
        if changes.kept is None:
            return trained
        own = changes.kept(self.options, local, has_trained(self.fedavg, local, task, trained))
        return replace(trained, state={**trained.state, **own})

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """As FedAvg."""
        return self.fedavg.merge(state, replies, round_)


def has_trained(method: FedAvg, local: Local, task: Task, trained: Trained) -> bool:
    """Whether a silo trained, so that its model is its own: one with nothing to minimise still holds the download."""
    return bool(take(trained.payloads, Delta).buffer.any()) or method.work(local, task) is not None


def variant(
    options: type[Opts],
    *,
    extra_loss: Callable[[Opts, Context, Local, Task], _training.Extra | None] | None = None,
    kept: Callable[[Opts, Local, bool], Mapping[str, Tensor]] | None = None,
    train: Callable[[FedAvg, Opts, Local, Task], Trained] | None = None,
    eligible: Callable[[SiloFacts], bool] | None = None,
    traits: Callable[[Opts], Traits] | None = None,
    encoders: Callable[[Local, Sequence[Payload]], Encoders] | None = None,
    fedavg_options: Callable[[Opts], FedAvgOptions] | None = None,
    refuse: Callable[[Opts, Context], None] | None = None,
) -> type[FederatedProtocol]:
    """A method that is FedAvg but for what is given.

    Args:
        options: its options, a frozen dataclass; a subclass of FedAvgOptions unless ``fedavg_options`` is given.
        extra_loss: made once a task, the term that is added to the base loss in each batch's main step; None adds none.
        kept: personal tensors a silo keeps after its local epochs; told the silo as the task found it, whose model is
            now the trained one, and whether it trained at all.
        train: local training, in place of FedAvg's epochs with the extra loss.
        eligible: whether the method ever selects a silo for training.
        traits: what it does beyond FedAvg, by its options.
        encoders: a silo's personal model, where the traits say ``personalised``.
        fedavg_options: FedAvg's options by the method's own.
        refuse: raises InputError for options or a run that the method is not made for.
    """
    given = {
        "extra_loss": extra_loss,
        "kept": kept,
        "training": train,
        "eligible": eligible,
        "traits_of": traits,
        "encoders": encoders,
        "fedavg_options": fedavg_options,
        "refuse": refuse,
    }
    changes = {name: staticmethod(function) for name, function in given.items() if function is not None}
    name = options.__name__.removesuffix("Options")
    return type(name, (Variant,), {"Options": options, "__module__": options.__module__, **changes})
