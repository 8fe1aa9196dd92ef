"""FedAvg of the shared layers only; personal layers stay at their silos and are never sent, not even as zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
    take,
)
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, Loss, Model, PartialDelta, Payload
from protocols import fedavg
from protocols.parts import aggregation, personal_model, training

Opts = TypeVar("Opts", bound=fedavg.AnchoredOptions)


class PartialFedAvg:
    """FedAvg of the shared layers, for methods with personal layers.

    The coordinator's theta covers the whole model, with initial values in the personal layers. A silo starts from its
    personal layers after its last task, or from the initial ones.

    Args:
        options: FedAvg's, or a superset.
        context: context of the run.
        names: the shared layers, at least one, in the layout's order.
        modules: average each module like a branch, over the silos that train it.
    """

    def __init__(
        self, options: fedavg.AnchoredOptions, context: Context, names: Sequence[str], *, modules: bool = False
    ) -> None:
        self.context = context
        self.fedavg = fedavg.AnchoredFedAvg(options, context)
        self.shared = tuple(names)
        self.personal = tuple(entry.name for entry in context.layout.entries if entry.name not in set(names))
        slices = aggregation.module_slices if modules else aggregation.branch_slices
        self.branches = slices(context.layout.part(self.shared))

    def uploads(self) -> frozenset[type[Payload]]:
        """FedAvg's, with a PartialDelta instead of a Delta."""
        kinds = self.fedavg.uploads(self.context.silos[0])
        return kinds - {Delta} | {PartialDelta}

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers, and the global prototypes if anchoring is on."""
        model = aggregation.partial_model(self.context.layout, self.shared, state.theta)
        return (model, *self.fedavg.anchoring.download(state.tensors))

    def parameters(self, local: Local, payloads: Sequence[Payload]) -> Tensor:
        """The silo's whole model float32 [P]: downloaded shared layers and its personal layers."""
        layout, theta = self.context.layout, local.model.initial()
        personal = local.state.get(personal_model.OWN)
        if personal is not None and self.personal:
            theta = aggregation.inserted(theta, layout, self.personal, personal)
        received = aggregation.as_tensor(take(payloads, Model).buffer)
        return aggregation.inserted(theta, layout, self.shared, received)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss over all layers; uploads the shared layers' change, keeps the personal ones."""
        layout, model = self.context.layout, local.model
        model.load(self.parameters(local, task.payloads))
        base = model.flat.detach().clone()
        work = self.fedavg.work(local, task)
        outcome = training.train_epochs(local, self.context, task, base, work)
        change = aggregation.extract(outcome.delta, layout, self.shared)
        update = PartialDelta(layout.digest, self.shared, change.numpy(), len(local.dataset))
        up = (update, Loss(outcome.loss), *self.fedavg.anchoring.report(local, task, filled=False))
        state = {} if work is None else dict(work.kept())
        if self.personal:
            state[personal_model.OWN] = aggregation.extract(model.flat.detach().cpu(), layout, self.personal)
        return Trained(up, state, outcome.loss)

    def merge(self, state: State, replies: Sequence[Update], weights: Tensor | None = None) -> MergeResult:
        """Add the weighted average of the shared layers' updates, with stale updates damped.

        Args:
            state: state before the merge.
            replies: replies in any order.
            weights: float64 [M] of the replies in the fixed silo order; None uses FedAvg's.
        """
        layout = self.context.layout
        if weights is None:
            weights = self.fedavg.weights(replies)
        else:
            weights = aggregation.damped(
                weights, torch.tensor([update.factor for update in replies], dtype=torch.float64)
            )
        before = aggregation.extract(state.theta, layout, self.shared)
        after = aggregation.merge_updates(before, replies, weights, self.branches, self.fedavg.options.branch_renorm)
        theta = aggregation.inserted(state.theta, layout, self.shared, after)
        tensors = self.fedavg.anchoring.averaged(state.tensors, replies, weights)
        return MergeResult(State(theta, tensors, state.values))

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """Encoders of the silo's personal model: downloaded shared layers and its personal layers."""
        return personal_model.encoders_of(local, self.parameters(local, payloads))


class LayersMethod(FederatedProtocol):
    """A method that is FedAvg of the layers given to :func:`averaging`."""

    layers_of: ClassVar[Callable[[Any, Layout], Sequence[str]]]

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.partial = PartialFedAvg(options, context, type(self).layers_of(options, context.layout))

    def traits(self) -> Traits:
        """As the options say, with the names of the shared layers."""
        return replace(self.traits_of(self.options), shared_layers=self.partial.shared)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The shared layers' update; otherwise as FedAvg."""
        return self.partial.uploads()

    @override
    def initial(self, theta: Tensor) -> State:
        return self.partial.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The shared layers; otherwise as FedAvg."""
        return self.partial.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs over all layers."""
        return self.partial.train(local, task)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """FedAvg of the shared layers."""
        return self.partial.merge(state, replies)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """Encoders of the personal model: the downloaded shared layers with the silo's personal layers."""
        return self.partial.encoders(local, payloads)


def averaging(
    options: type[Opts], layers: Callable[[Opts, Layout], Sequence[str]], *, first_round_selects_all: bool = False
) -> type[FederatedProtocol]:
    """Define a method that averages some layers and keeps all others personal.

    Args:
        options: its options, a frozen dataclass.
        layers: returns the names of the averaged layers, at least one, in the layout's order; raises InputError if the
            model has none.
        first_round_selects_all: see :class:`Traits`.
    """
    traits = Traits(personal_only=True, personalised=True, first_round_selects_all=first_round_selects_all)
    changes = {"layers_of": staticmethod(layers), "traits_of": staticmethod(lambda _: traits)}
    name = options.__name__.removesuffix("Options")
    return type(name, (LayersMethod,), {"Options": options, "__module__": layers.__module__, **changes})
