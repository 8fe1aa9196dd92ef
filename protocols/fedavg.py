"""FedAvg: averages the silos' updates, weighted by their numbers of samples (McMahan et al., 2017).

Paired silos train the base loss, by default InfoNCE. ``protocols/parts/anchoring.py`` defines what a silo with one
modality trains under InfoNCE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    take,
)
from fedmq.wire.payloads import Delta, Loss, Model, Payload
from protocols import objectives
from protocols.parts import aggregation, training
from protocols.parts.anchoring import Anchoring, InfoNceOptions
from protocols.parts.losses import info_nce


@dataclass(frozen=True)
class FedAvgOptions(InfoNceOptions):
    """Options of FedAvg.

    Args:
        branch_renorm: average each branch over the silos that trained it; if false, use the papers' plain sum.
        weighting: weight updates by ``samples``, n_k / n, or ``uniform``, 1 / m, as FedHAP and PLFedCMH do.
    """

    branch_renorm: bool = True
    weighting: Literal["samples", "uniform"] = "samples"


def paired_loss(image: Tensor | None, text: Tensor | None, tau: float) -> Tensor:
    """InfoNCE of a paired silo's batch."""
    if image is None or text is None:
        raise ValueError("a paired silo has both modalities")
    return info_nce(image, text, tau)


class FedAvg(FederatedProtocol):
    """FedAvg, see the module docstring."""

    Options: ClassVar[type[Any]] = FedAvgOptions

    def __init__(self, options: FedAvgOptions, context: Context) -> None:
        self.options = options
        self.context = context
        self.branches = aggregation.branch_slices(context.layout)
        self.base = None if context.objective.base == "info_nce" else objectives.options_of(context.objective)
        self.anchoring = Anchoring(options, context)

    def eligible(self, silo: SiloFacts) -> bool:
        """All silos are eligible."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update and the loss; with anchoring also prototypes."""
        return frozenset({Delta, Loss}) | self.anchoring.uploads

    def initial(self, theta: Tensor) -> State:
        """The initial model."""
        return State(theta, self.anchoring.initial())

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global model, and prototypes if silos with one modality are anchored."""
        return (state.model(self.context.layout), *self.anchoring.download(state.tensors))

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs."""
        return self.trained(local, task)

    def trained(
        self, local: Local, task: Task, *, extra: training.Extra | None = None, lambda_s: float = 0.0
    ) -> Trained:
        """Local epochs on the base loss; methods that add terms to FedAvg pass them here.

        Args:
            local: the silo.
            task: with the model.
            extra: loss term added in the main step of each batch.
            lambda_s: weight of the proximal term ||theta - base||^2.
        """
        base = training.load_model(local, take(task.payloads, Model).buffer)
        work = self.work(local, task)
        outcome = training.train_epochs(
            local, self.context, task, base, work, extra=extra, lambda_s=lambda_s, resumable=True
        )
        update = training.delta_payload(self.context, outcome, len(local.dataset))
        up = (update, Loss(outcome.loss), *self.anchoring.report(local, task))
        return Trained(up, {} if work is None else work.kept(), outcome.loss)

    def work(self, local: Local, task: Task) -> training.Work | None:
        """The silo's training on the base loss; None if it has no loss, or none yet."""
        if self.base is not None:
            return objectives.begin(self.base, local, self.context, task)
        if not local.silo.paired:
            return self.anchoring.work(local, task)
        loss = partial(paired_loss, tau=self.options.tau)
        return training.EveryBatch(local, self.context.training.batch_size, loss, least=2)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Add the average of the updates, weighted by :meth:`weights`."""
        replies = aggregation.ordered(replies)
        updates = [aggregation.update_of(reply, self.context.layout) for reply in replies]
        weights = self.weights(updates)
        theta = aggregation.merge_updates(state.theta, updates, weights, self.branches, self.options.branch_renorm)
        return MergeResult(State(theta, self.anchoring.averaged(state.tensors, replies, weights), state.values))

    def weights(self, updates: Sequence[aggregation.Update]) -> Tensor:
        """Weights of the updates, float64 [M]: by samples or uniform, times the replies' factors, renormalised."""
        samples = [update.samples if self.options.weighting == "samples" else 1 for update in updates]
        factors = torch.tensor([update.factor for update in updates], dtype=torch.float64)
        return aggregation.damped(aggregation.sample_weights(samples), factors)


PROTOCOL = FedAvg
