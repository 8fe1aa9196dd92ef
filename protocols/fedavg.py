"""FedAvg: the average of the silos' models weighted by their samples (McMahan et al. 2017), for two towers.

Paired silos train InfoNCE. A silo with one modality either trains the anchoring loss of RCSR (eq 3) against the global
prototype of the modality it lacks, as RCSR's baselines do, or stays idle: it is asked, and answers with a zero update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmq.federation.protocol import Context, Local, MergeResult, Reply, SiloFacts, State, Task, Trained, take
from fedmq.wire.messages import Delta, Loss, ModalityPrototypes, Model, Payload
from protocols import _aggregation, _prototypes, _training, objectives
from protocols._losses import anchor, info_nce
from protocols._options import check


@dataclass(frozen=True)
class FedAvgOptions:
    """Options of FedAvg.

    Args:
        tau: temperature of InfoNCE; this and the next four are of the base ``info_nce`` alone.
        single_modality: what silos with one modality do, ``anchor`` or ``idle``.
        lambda_anc: weight of the anchoring loss; this and the next two are of ``anchor`` alone.
        ema: share of the old global prototype kept at a full round.
        proto_unit: global prototypes are kept at length 1.
        branch_renorm: each branch is averaged over the silos that trained it; the papers' plain sum if false.
        weighting: by ``samples``, n_k / n, or ``uniform``, 1 / m, as FedHAP and PLFedCMH average.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "objective.base=info_nce": ("tau", "single_modality", "lambda_anc", "ema", "proto_unit"),
        "single_modality=anchor": ("lambda_anc", "ema", "proto_unit"),
    }

    tau: float = 0.07
    single_modality: Literal["anchor", "idle"] = "anchor"
    lambda_anc: float = 1.0
    ema: float = 0.9
    proto_unit: bool = True
    branch_renorm: bool = True
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        check("tau", self.tau, 0.0, open_low=True)
        check("lambda_anc", self.lambda_anc, 0.0)
        check("ema", self.ema, 0.0, 1.0)


def paired_loss(image: Tensor | None, text: Tensor | None, tau: float) -> Tensor:
    """InfoNCE of a paired silo's batch."""
    if image is None or text is None:
        raise ValueError("a paired silo has both modalities")
    return info_nce(image, text, tau)


def anchored_loss(image: Tensor | None, text: Tensor | None, missing: Tensor, weight: float) -> Tensor:
    """Anchoring of a single-modality silo's batch to the prototype [d] of what it lacks."""
    held = image if image is not None else text
    if held is None:
        raise ValueError("a silo has at least one modality")
    return weight * anchor(held, missing)


class FedAvg:
    """FedAvg, see the module's text."""

    Options: ClassVar[type[Any]] = FedAvgOptions

    def __init__(self, options: FedAvgOptions, context: Context) -> None:
        self.options = options
        self.context = context
        self.branches = _aggregation.branch_slices(context.layout)
        contrastive = context.objective.base == "info_nce"
        self.anchored = contrastive and options.single_modality == "anchor"
        self.base = None if contrastive else objectives.options_of(context.objective)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss, and prototypes if anybody is anchored to them."""
        return frozenset({Delta, Loss, ModalityPrototypes} if self.anchored else {Delta, Loss})

    def initial(self, theta: Tensor) -> State:
        """The model, and no prototype yet."""
        return State(theta, _prototypes.initial(self.context.dim) if self.anchored else {})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model, and the prototypes if anybody is anchored to them."""
        model = state.model(self.context.layout)
        return (model, _prototypes.download(state.tensors)) if self.anchored else (model,)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs."""
        return self.trained(local, task)

    def trained(
        self, local: Local, task: Task, *, extra: _training.Extra | None = None, lambda_s: float = 0.0
    ) -> Trained:
        """Local epochs on the base loss; a method that is FedAvg with a term of its own passes it here.

        Args:
            local: the silo.
            task: with the model and, where silos are anchored, the prototypes.
            extra: added in each batch's main step.
            lambda_s: weight of the proximal term ||theta - base||^2.
        """
        base = _training.load_model(local, take(task.payloads, Model).buffer)
        work = self.work(local, task)
        outcome = _training.train_epochs(local, self.context, task, base, work, extra=extra, lambda_s=lambda_s)
        update = _training.delta_payload(self.context, outcome, len(local.share))
        up: tuple[Payload, ...] = (update, Loss(outcome.loss))
        if self.anchored:
            own = _training.own_prototypes(local, self.context, task)
            up = (*up, _prototypes.upload(own, self._received(task)))
        return Trained(up, {} if work is None else work.kept(), outcome.loss)

    def work(self, local: Local, task: Task) -> _training.Work | None:
        """The silo's base loss at work; None if it has none, or none yet."""
        if self.base is not None:
            return objectives.begin(self.base, local, self.context, task)
        loss = self._loss(local, self._received(task))
        return None if loss is None else _training.EveryBatch(local, self.context.training.batch_size, loss)

    def _received(self, task: Task) -> tuple[Tensor | None, Tensor | None]:
        return _prototypes.read_download(take(task.payloads, ModalityPrototypes)) if self.anchored else (None, None)

    def _loss(self, local: Local, shared: tuple[Tensor | None, Tensor | None]) -> _training.LossFunction | None:
        if local.silo.paired:
            return partial(paired_loss, tau=self.options.tau)
        missing = shared[1] if local.silo.image else shared[0]
        if missing is None:
            return None
        return partial(anchored_loss, missing=missing.to(local.model.flat.device), weight=self.options.lambda_anc)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Add the damped, sample-weighted updates; average the prototypes in."""
        replies = _aggregation.ordered(replies)
        updates = [_aggregation.update_of(reply, self.context.layout) for reply in replies]
        weights = self.weights(updates)
        theta = _aggregation.merge_updates(state.theta, updates, weights, self.branches, self.options.branch_renorm)
        return MergeResult(State(theta, self.averaged(state.tensors, replies, weights), state.values))

    def weights(self, updates: Sequence[_aggregation.Update]) -> Tensor:
        """Damped weights float64 [M] of the updates, by samples or uniform."""
        samples = [update.samples if self.options.weighting == "samples" else 1 for update in updates]
        factors = torch.tensor([update.factor for update in updates], dtype=torch.float64)
        return _aggregation.damped(_aggregation.sample_weights(samples), factors)

    def averaged(
        self, tensors: Mapping[str, Tensor], replies: Sequence[Reply], weights: Tensor
    ) -> Mapping[str, Tensor]:
        """The coordinator's tensors after a merge: the prototypes averaged in, if anybody is anchored to them."""
        if not self.anchored:
            return tensors
        local, mask = _prototypes.read_uploads(replies, self.context.dim)
        options = self.options
        rate = _aggregation.kept_share(options.ema, len(replies), self.context.cohort)
        updated = _prototypes.updated(tensors, local, mask, weights, rate, unit_length=options.proto_unit)
        return {**tensors, **updated}


PROTOCOL = FedAvg
