"""FedAvg: averages the silos' updates, weighted by their numbers of samples (McMahan et al., 2017).

:class:`FedAvg` is the method itself. Silos train the base loss, by default InfoNCE, which needs pairs: under it a silo
with one modality idles. :class:`AnchoredFedAvg`, which ``protocol: fedavg`` runs, adds what the baselines of the RCSR
paper do with such silos; ``single_modality: idle`` turns it off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Update,
    WeightedSum,
    take,
)
from fedmq.federation.sums import SumLayout
from fedmq.wire.payloads import Delta, Loss, Model, Payload
from protocols import objectives
from protocols.parts import aggregation, item_groups, training
from protocols.parts.anchoring import Anchoring, AnchoringOptions
from protocols.parts.losses import TauOptions, info_nce


@dataclass(frozen=True)
class FedAvgOptions(TauOptions):
    """Options of FedAvg.

    Args:
        branch_renorm: average each branch over the silos that trained it; if false, use the papers' plain sum. With
            ``conflict_free``, the single-modality silos' mean update loses its component against the paired silos' mean
            update, is shortened to at most its length, and is added to it by weight
            (``protocols.parts.aggregation.conflict_free``).
        weighting: weight updates by ``samples``, n_k / n, or ``uniform``, 1 / m, as FedHAP and PLFedCMH do.
    """

    branch_renorm: aggregation.BranchRenorm = True
    weighting: Literal["samples", "uniform"] = "samples"


@dataclass(frozen=True)
class AnchoredOptions(AnchoringOptions, FedAvgOptions):
    """Options of FedAvg with anchored silos."""

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "objective.base=info_nce": ("tau", "single_modality", "lambda_anc", "ema", "proto_unit"),
        **AnchoringOptions.OF,
    }


def paired_loss(image: Tensor | None, text: Tensor | None, tau: float) -> Tensor:
    """InfoNCE of a paired silo's batch."""
    if image is None or text is None:
        raise ValueError("a paired silo has both modalities")
    return info_nce(image, text, tau)


class FedAvg(FederatedProtocol):
    """FedAvg: every silo trains the downloaded model for some epochs; the coordinator adds the average update."""

    Options: ClassVar[type[Any]] = FedAvgOptions
    options: FedAvgOptions

    def __init__(self, options: FedAvgOptions, context: Context) -> None:
        super().__init__(options, context)
        self.branches = aggregation.branch_slices(context.layout)
        self.base = None if context.objective.base == "info_nce" else objectives.options_of(context.objective)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update and the loss."""
        return frozenset({Delta, Loss})

    def initial(self, theta: Tensor) -> State:
        """The initial model."""
        return State(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global model."""
        return (state.model(self.context.layout),)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs."""
        return self.trained(local, task)

    def trained(
        self,
        local: Local,
        task: Task,
        *,
        extra: training.Extra | None = None,
        lambda_s: float = 0.0,
        correction: Tensor | None = None,
    ) -> Trained:
        """Local epochs on the base loss; methods that add terms to FedAvg pass them here.

        ``extra`` is a loss term in the main step of each batch, ``lambda_s`` the weight of the proximal term ||theta -
        base||^2, ``correction`` float32 [P] is added to the parameters after every step.
        """
        base = training.load_model(local, take(task.payloads, Model).buffer)
        work = item_groups.protected(self.work(local, task), local, self.context, task)
        outcome = training.train_epochs(
            local, self.context, task, base, work, extra=extra, lambda_s=lambda_s, correction=correction, resumable=True
        )
        update = training.delta_payload(self.context, outcome, len(local.dataset))
        kept = {} if work is None else work.kept()
        return Trained((update, *self.statistics(outcome)), kept, outcome.loss, work is None)

    def no_items(self) -> str:
        """Why other base losses are not covered."""
        return "" if self.base is None else f"the loss of objective.base {self.context.objective.base} has no groups"

    def statistics(self, outcome: training.TrainingResult) -> tuple[Payload, ...]:
        """What a reply reports of local training beside the update: the loss."""
        return (Loss(outcome.loss),)

    def work(self, local: Local, task: Task) -> training.Work | None:
        """The silo's training on the base loss; None if it has nothing to minimise."""
        if self.base is not None:
            return objectives.begin(self.base, local, self.context, task)
        if not local.silo.paired:
            return None
        loss = partial(paired_loss, tau=self.options.tau)
        return training.EveryBatch(local, self.context.training.batch_size, loss, least=2)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Add the average of the updates, weighted by :meth:`weights`."""
        theta, weights = self.averaged(state.theta, replies)
        return self.merged(theta, replies, weights, state=state)

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """The weights of :meth:`merge`, in a secure sum."""
        weights, renorm = self.weights(replies), self.options.branch_renorm
        merged = partial(self.merged, state=state)
        return aggregation.sum_of(state.theta, replies, weights, self.branches, renorm, merged)

    def sum_layout(self) -> SumLayout:
        """The whole update."""
        return SumLayout(self.context.layout, None, self.branches)

    def merged(self, theta: Tensor, replies: Sequence[Update], weights: Tensor, *, state: State) -> MergeResult:
        """The result of a merge from its parameters [P], its replies and their weights float64 [M]."""
        return MergeResult(State(theta, state.tensors, state.values))

    def averaged(self, theta: Tensor, replies: Sequence[Update]) -> tuple[Tensor, Tensor]:
        """The parameters [P] after a merge, and the replies' weights float64 [M]."""
        weights = self.weights(replies)
        return aggregation.merge_updates(theta, replies, weights, self.branches, self.options.branch_renorm), weights

    def weights(self, updates: Sequence[Update]) -> Tensor:
        """Weights of the updates, float64 [M]: by samples or uniform, times the replies' factors, renormalised."""
        samples = [update.samples if self.options.weighting == "samples" else 1 for update in updates]
        return aggregation.damped_of(aggregation.sample_weights(samples), updates)


class AnchoredFedAvg(FedAvg):
    """FedAvg with anchored silos, see ``protocols/parts/anchoring.py``.

    Methods that differ from it in a loss term, in the eligible silos or in local training are its subclasses.
    """

    Options: ClassVar[type[Any]] = AnchoredOptions
    options: AnchoredOptions

    def __init__(self, options: AnchoredOptions, context: Context) -> None:
        super().__init__(options, context)
        self.anchoring = Anchoring(options, context)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss and the silo's prototypes."""
        return super().uploads(silo) | self.anchoring.uploads

    def initial(self, theta: Tensor) -> State:
        """The initial model, and no prototype yet."""
        return State(theta, self.anchoring.initial())

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global model and the global prototypes."""
        return (*super().task(state, silo), *self.anchoring.download(state.tensors))

    def extra_loss(self, local: Local, task: Task) -> training.Extra | None:
        """A method's term in the loss of each batch's main step of a task; None adds nothing."""
        return None

    def kept(self, local: Local, *, trained: bool) -> Mapping[str, Tensor]:
        """A method's tensors that a silo keeps after local training; its state is from before the task.

        Its model is the trained one; a silo with nothing to minimise has not ``trained`` and holds the downloaded one.
        """
        return {}

    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs with the extra loss; adds the method's tensors to the silo's state."""
        result = self.trained(local, task, extra=self.extra_loss(local, task))
        return replace(result, state={**result.state, **self.kept(local, trained=not result.idle)})

    def trained(
        self,
        local: Local,
        task: Task,
        *,
        extra: training.Extra | None = None,
        lambda_s: float = 0.0,
        correction: Tensor | None = None,
    ) -> Trained:
        """FedAvg's local epochs, then the silo's prototypes."""
        result = super().trained(local, task, extra=extra, lambda_s=lambda_s, correction=correction)
        return replace(result, payloads=(*result.payloads, *self.anchoring.report(local, task)))

    def work(self, local: Local, task: Task) -> training.Work | None:
        """FedAvg's, and that of an anchored silo."""
        if local.silo.paired or self.base is not None:
            return super().work(local, task)
        return self.anchoring.work(local, task)

    def no_items(self) -> str:
        """As FedAvg's: anchors are global prototypes."""
        return super().no_items()

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """FedAvg's weights, and those of the prototypes."""
        return self.anchoring.weighed(super().weigh(state, replies, round_), state.tensors, replies, self.sum_layout())

    def sum_layout(self) -> SumLayout:
        """The whole update, and the prototypes."""
        return self.anchoring.sum_layout(super().sum_layout())

    def merged(self, theta: Tensor, replies: Sequence[Update], weights: Tensor, *, state: State) -> MergeResult:
        """The average of the updates and, with the same weights, of the prototypes."""
        return MergeResult(State(theta, self.anchoring.averaged(state.tensors, replies, weights), state.values))


PROTOCOL = AnchoredFedAvg
