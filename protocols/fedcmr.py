"""FedCMR: averages the common layer, weighted by size, categories and loss; silos keep a residual (Zong et al., 2021).

A silo trains on the first part of its batches right after the download, and on the rest before the upload. It starts
from the merged layer minus half of its own last displacement; the minus sign follows the official code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Fraction, NonNegative
from fedmq.errors import InputError
from fedmq.federation.protocol import (
    Context,
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
from fedmq.wire.payloads import LabelCount, Loss, PartialDelta, Payload
from protocols.parts import aggregation, training
from protocols.parts.personal_model import PartialFedAvg

#: The common layer of each kind of network: DSCMR's, or the hash layers (FedHAP's comparison).
_COMMON = ("shared.base.", "visual.last.", "text.last.")
#: Silo state: displacement of the common layer in the last task.
_DISPLACEMENT = "common_displacement"
_LOSSES = "cmr_losses"
_VERSIONS = "cmr_versions"


@dataclass(frozen=True)
class FedCmrOptions:
    """Options of FedCMR.

    Args:
        local_share: fraction of the batches trained right after the download, which the displacement leaves out.
        residual_beta: fraction of the silo's last displacement subtracted from the merged layer; 0 uses the merged
            layer unchanged.
        sharpness: factor of the loss term in the weights.
        sums: silos over which the mean loss is taken: the ``reporters`` of a merge, or all silos in the ``table`` of
            last losses. Default: ``table`` if merges have fewer replies than a round (``async``, small buffers), else
            ``reporters``.
    """

    local_share: Fraction = 0.2
    residual_beta: Fraction = 0.5
    sharpness: NonNegative = 100.0
    sums: Literal["reporters", "table"] | None = None


def weights_of(samples: Tensor, labels: Tensor, losses: Tensor, mean: float, sharpness: float) -> Tensor:
    """FedCMR's weights float64 [M]: softmax over silos of p_k + sharpness exp(-exp(l_k / mean)).

    p_k = n_k c_k / sum_j n_j c_j, of numbers of samples n_k and of categories c_k; l_k is summed over the samples. All
    are [M].
    """
    size = samples * labels
    ratio = losses / mean if mean > 0 else torch.ones_like(losses)
    return (size / size.sum() + sharpness * torch.exp(-torch.exp(ratio))).softmax(0)


def residual(merged: Tensor, displacement: Tensor, beta: float) -> Tensor:
    """Start of a silo's training, W_glob - beta (W_k - W_k,start), for flat layers [p]."""
    return merged - beta * displacement


@dataclass(frozen=True)
class SomeBatches(training.Work):
    """Training on a range of the batches of a base loss."""

    work: training.Work  # training on the base loss
    # Batches in one pass over the silo's items. Epochs of DCMH and SHDCH make one pass per tower. The split is between
    # batches, not items: as in the official code each task draws new batches, and with ``draws: fresh`` two batches of
    # a pass may share items.
    per_pass: int
    first: int  # index of the first trained batch of a pass
    stop: int  # index after the last trained batch
    # Generator state at the start of each epoch, stored by the first half of a task and restored by the second, so that
    # both halves see the same order of items even if the base draws random numbers in its batches.
    began: dict[int, Mapping[str, Any]]

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """The steps of the selected batches; a batch begins with its main step."""
        generator.bit_generator.state = self.began.setdefault(epoch, generator.bit_generator.state)
        batch = -1
        for step in self.work.steps(epoch, generator):
            batch += step.main
            if self.first <= batch % self.per_pass < self.stop:
                yield step

    def kept(self) -> Mapping[str, Tensor]:
        """The state that the base keeps."""
        return self.work.kept()


class FedCmr(PartialFedAvg):
    """FedCMR, see the module docstring."""

    Options: ClassVar[type[Any]] = FedCmrOptions

    def __init__(self, options: FedCmrOptions, context: Context) -> None:
        super().__init__(options, context)
        self.sums = options.sums or ("reporters" if context.whole_rounds else "table")

    @staticmethod
    def layers_of(options: FedCmrOptions, context: Context) -> list[str]:
        """The common layer of the network.

        Raises:
            InputError: the network has none.
        """
        names = [entry.name for entry in context.layout.entries if entry.name.startswith(_COMMON)]
        if not names:
            allowed = "dscmr, or a base with a hash network: FedCMR needs a common or hash layer and labels"
            raise InputError("objective.base", context.objective.base, allowed)
        return names

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The common layer's update, the loss and the number of categories."""
        return frozenset({PartialDelta, Loss, LabelCount})

    def initial(self, theta: Tensor) -> State:
        """The initial model and an empty table of losses."""
        count = len(self.context.silos)
        losses, versions = torch.full((count,), -1.0, dtype=torch.float64), torch.full((count,), -1, dtype=torch.int64)
        return State(theta, {_LOSSES: losses, _VERSIONS: versions})

    def train(self, local: Local, task: Task) -> Trained:
        """The first batches after the download, then the rest, whose displacement of the common layer is kept."""
        layout, model, shared = self.context.layout, local.model, self.shared
        downloaded = self.parameters(local, task.payloads)
        common = aggregation.extract(downloaded, layout, shared)
        displacement = local.state.get(_DISPLACEMENT)
        start = common if displacement is None else residual(common, displacement, self.options.residual_beta)
        model.load(aggregation.inserted(downloaded, layout, shared, start))
        work = self.fedavg.work(local, task)
        losses, kept = [0.0], dict[str, Tensor]()
        if work is not None:
            batches = training.batches_of(work, len(local.dataset), self.context.training.batch_size)
            cut, began = round(self.options.local_share * batches), dict[int, Mapping[str, Any]]()
            for first, stop in ((0, cut), (cut, batches)):
                start = aggregation.extract(model.flat.detach().cpu(), layout, shared)
                if first < stop:
                    base = model.flat.detach().clone()
                    half = SomeBatches(work, batches, first, stop, began)
                    losses.append(training.train_epochs(local, self.context, task, base, half).loss)
            kept = dict(work.kept())
        end = aggregation.extract(model.flat.detach().cpu(), layout, shared)
        up = (
            PartialDelta(layout.digest, shared, (end - common).numpy(), len(local.dataset)),
            Loss(losses[-1]),
            LabelCount(training.categories(local, self.context)),
        )
        return Trained(up, {**kept, **self.kept(local), _DISPLACEMENT: end - start}, losses[-1])

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Add the weighted, damped updates of the common layer."""
        table, weights = self._weighed(state, replies, round_)
        return MergeResult(replace(self.averaged(state, replies, weights), tensors=table))

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """The weights of :meth:`merge`, in a secure sum; silos that drop out of it are not in the table either."""

        def merged(after: State, arrived: Sequence[Update], weights: Tensor) -> MergeResult:
            return MergeResult(replace(after, tensors=self._weighed(state, arrived, round_)[0]))

        return self.summed(state, replies, self._weighed(state, replies, round_)[1], merged)

    def _weighed(self, state: State, replies: Sequence[Update], round_: int) -> tuple[dict[str, Tensor], Tensor]:
        """The table after a merge, and the damped weights [M] of the replies."""
        samples = [reply.samples for reply in replies]
        labels = [max(1, take(reply.payloads, LabelCount).value) for reply in replies]
        # The rule uses summed losses; replies carry mean losses, as in all methods.
        means = [max(0.0, take(reply.payloads, Loss).value) for reply in replies]
        losses = [mean * size for mean, size in zip(means, samples, strict=True)]
        reported = torch.tensor(losses, dtype=torch.float64)
        table = aggregation.updated_table(state.tensors, replies, _VERSIONS, {_LOSSES: list(reported)})
        known = aggregation.still_known(table[_VERSIONS], round_, self.context.max_age, replies)
        pool = reported if self.sums == "reporters" else table[_LOSSES][known]
        size, count = torch.tensor(samples, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64)
        weights = weights_of(size, count, reported, float(pool.mean()), self.options.sharpness)
        return table, aggregation.damped_of(weights, replies)


PROTOCOL = FedCmr
