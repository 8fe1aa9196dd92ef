"""FedAvg over some layers; the others stay in the silos, and nothing of them is ever sent, not even zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
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
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Delta, Loss, Model, PartialDelta, Payload
from protocols import _aggregation, _personal_model, _training, fedavg

Opts = TypeVar("Opts", bound=fedavg.FedAvgOptions)


class PartialFedAvg:
    """FedAvg of some layers, for methods whose silos keep the rest.

    The coordinator's theta is of the whole model, its personal layers as they were drawn. A silo's personal layers are
    those that its last task left, before the first the initial ones.

    Args:
        options: FedAvg's, or more.
        context: of the run.
        names: the shared layers, at least one, in the layout's order.
        modules: each module is averaged as a branch by itself, over the silos that train it.
    """

    def __init__(
        self, options: fedavg.FedAvgOptions, context: Context, names: Sequence[str], *, modules: bool = False
    ) -> None:
        self.context = context
        self.fedavg = fedavg.FedAvg(options, context)
        self.shared = tuple(names)
        self.personal = tuple(entry.name for entry in context.layout.entries if entry.name not in set(names))
        slices = _aggregation.module_slices if modules else _aggregation.branch_slices
        self.branches = slices(context.layout.part(self.shared))

    def uploads(self) -> frozenset[type[Payload]]:
        """FedAvg's, the update of the shared layers alone."""
        kinds = self.fedavg.uploads(self.context.silos[0])
        return kinds - {Delta} | {PartialDelta}

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers, and the prototypes if anybody is anchored to them."""
        model = _aggregation.partial_model(self.context.layout, self.shared, state.theta)
        return (model, *self.fedavg.anchoring.download(state.tensors))

    def parameters(self, local: Local, payloads: Sequence[Payload]) -> Tensor:
        """The silo's whole model float32 [P]: downloaded layers and its own."""
        layout, theta = self.context.layout, local.model.initial()
        own = local.state.get(_personal_model.OWN)
        if own is not None and self.personal:
            theta = _aggregation.inserted(theta, layout, self.personal, own)
        received = _aggregation.as_tensor(take(payloads, Model).buffer)
        return _aggregation.inserted(theta, layout, self.shared, received)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss, over all layers; the shared ones' change goes up, the others are kept."""
        layout, model = self.context.layout, local.model
        model.load(self.parameters(local, task.payloads))
        base = model.flat.detach().clone()
        work = self.fedavg.work(local, task)
        outcome = _training.train_epochs(local, self.context, task, base, work)
        change = _aggregation.extract(outcome.delta, layout, self.shared)
        update = PartialDelta(layout.digest, self.shared, change.numpy(), len(local.share))
        up = (update, Loss(outcome.loss), *self.fedavg.anchoring.report(local, task, filled=False))
        state = {} if work is None else dict(work.kept())
        if self.personal:
            state[_personal_model.OWN] = _aggregation.extract(model.flat.detach().cpu(), layout, self.personal)
        return Trained(up, state, outcome.loss)

    def merge(self, state: State, replies: Sequence[Reply], weights: Tensor | None = None) -> MergeResult:
        """The weighted average of the shared layers' updates, stale ones damped.

        Args:
            state: before.
            replies: in any order.
            weights: float64 [M] of the replies in the fixed silo order; None weighs as FedAvg.
        """
        layout, replies = self.context.layout, _aggregation.ordered(replies)
        updates = [_aggregation.partial_update_of(reply, layout, self.shared) for reply in replies]
        if weights is None:
            weights = self.fedavg.weights(updates)
        else:
            weights = _aggregation.damped(
                weights, torch.tensor([update.factor for update in updates], dtype=torch.float64)
            )
        before = _aggregation.extract(state.theta, layout, self.shared)
        after = _aggregation.merge_updates(before, updates, weights, self.branches, self.fedavg.options.branch_renorm)
        theta = _aggregation.inserted(state.theta, layout, self.shared, after)
        tensors = self.fedavg.anchoring.averaged(state.tensors, replies, weights)
        return MergeResult(State(theta, tensors, state.values))

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's own model: downloaded layers and its own."""
        return _personal_model.encoders_of(local, self.parameters(local, payloads))


class LayersMethod(FederatedProtocol):
    """FedAvg of some layers as a whole method; :func:`averaging` says of which."""

    layers_of: ClassVar[Callable[[Any, Layout], Sequence[str]]]

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.partial = PartialFedAvg(options, context, type(self).layers_of(options, context.layout))

    def traits(self) -> Traits:
        """The layers that are shared; the rest of the model is the silos' own."""
        return replace(self.traits_of(self.options), shared_layers=self.partial.shared)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return self.partial.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of the shared layers; otherwise as FedAvg."""
        return self.partial.uploads()

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.partial.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers; otherwise as FedAvg."""
        return self.partial.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs over all layers."""
        return self.partial.train(local, task)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """FedAvg of the shared layers."""
        return self.partial.merge(state, replies)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The shared layers of now with the silo's own."""
        return self.partial.encoders(local, payloads)


def averaging(
    options: type[Opts], layers: Callable[[Opts, Layout], Sequence[str]], *, first_round_selects_all: bool = False
) -> type[FederatedProtocol]:
    """A method that averages some layers while all others stay personal.

    Args:
        options: its options, a frozen dataclass.
        layers: names of the layers that are averaged, at least one, in the layout's order; raises InputError where the
            model has none.
        first_round_selects_all: see :class:`Traits`.
    """
    traits = Traits(own_only=True, personalised=True, first_round_selects_all=first_round_selects_all)
    changes = {"layers_of": staticmethod(layers), "traits_of": staticmethod(lambda _: traits)}
    name = options.__name__.removesuffix("Options")
    return type(name, (LayersMethod,), {"Options": options, "__module__": layers.__module__, **changes})
