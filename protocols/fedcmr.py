"""FedCMR: only the common layer travels, weighed by size, categories and loss; silos keep a residual (Zong 2021).

A silo trains a part of its batches right after the download, the rest before the upload. It goes on from the merged
layer minus half of its own last displacement: the minus sign is the official code's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.errors import InputError
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
from fedmq.wire.messages import LabelCount, Loss, PartialDelta, Payload
from protocols import _aggregation, _personal_model, _training, fedavg
from protocols._options import check
from protocols._partial import PartialFedAvg

#: The common layer of each kind of network: DSCMR's, or the hash layers (FedHAP's comparison).
_COMMON = ("shared.base.", "visual.last.", "text.last.")
#: Silo-side: the displacement of the common layer in the last task.
_DISPLACEMENT = "common_displacement"
_LOSSES = "cmr_losses"
_VERSIONS = "cmr_versions"


@dataclass(frozen=True)
class FedCmrOptions:
    """Options of FedCMR.

    Args:
        local_share: share of the batches trained right after the download, before the displacement is counted.
        residual_beta: share of the own displacement taken off the merged layer; 0 takes the layer as it comes.
        sharpness: factor of the loss term in the weights.
        sums: the mean loss is that of the ``reporters`` of a merge, or of the ``table`` of all silos' last losses. Not
            given, it is the table where merges are of fewer replies than a round has (``async``, small buffers).
    """

    local_share: float = 0.2
    residual_beta: float = 0.5
    sharpness: float = 100.0
    sums: Literal["reporters", "table"] | None = None

    def __post_init__(self) -> None:
        check("local_share", self.local_share, 0.0, 1.0)
        check("residual_beta", self.residual_beta, 0.0, 1.0)
        check("sharpness", self.sharpness, 0.0)


def weights_of(samples: Tensor, labels: Tensor, losses: Tensor, mean: float, sharpness: float) -> Tensor:
    """Softmax over silos of p_k + sharpness exp(-exp(l_k / mean)), p_k = n_k c_k / sum n_j c_j; [M] float64."""
    size = samples * labels
    ratio = losses / mean if mean > 0 else torch.ones_like(losses)
    return (size / size.sum() + sharpness * torch.exp(-torch.exp(ratio))).softmax(0)


def residual(merged: Tensor, displacement: Tensor, beta: float) -> Tensor:
    """What a silo goes on from, W_glob - beta (W_k - W_k,start); layers flat [p]."""
    return merged - beta * displacement


@dataclass(frozen=True)
class SomeBatches(_training.Work):
    """A base loss on some of its batches.

    Args:
        work: the base.
        per_pass: batches in one pass over the silo's items. DCMH's and SHDCH's epochs make a pass for each tower.
            Batches are split, not items: each task draws them anew, as the official code does, and two batches of a
            pass share items where the base has ``draws: fresh``.
        first: the first batch of a pass that is trained.
        stop: the first that no longer is.
        began: state of the generator at the start of each epoch, filled by the first of a task's two halves. The second
            takes it up: a base that draws in its batches, too, would leave each half at another place, and the halves
            of the later epochs would be of different orders of the items.
    """

    work: _training.Work
    per_pass: int
    first: int
    stop: int
    began: dict[int, Mapping[str, Any]]

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[_training.Step]:
        """The steps of the batches wanted; a batch begins with its main step."""
        generator.bit_generator.state = self.began.setdefault(epoch, generator.bit_generator.state)
        batch = -1
        for step in self.work.steps(epoch, generator):
            batch += step.main
            if self.first <= batch % self.per_pass < self.stop:
                yield step

    def kept(self) -> Mapping[str, Tensor]:
        """The base's."""
        return self.work.kept()


class FedCmr(FederatedProtocol):
    """FedCMR, see the module's text."""

    Options: ClassVar[type[Any]] = FedCmrOptions

    def __init__(self, options: FedCmrOptions, context: Context) -> None:
        self.options = options
        self.context = context
        names = [entry.name for entry in context.layout.entries if entry.name.startswith(_COMMON)]
        if not names:
            allowed = "dscmr, or a base with a hash network: FedCMR needs a common or hash layer, and labels"
            raise InputError("objective.base", context.objective.base, allowed)
        self.partial = PartialFedAvg(fedavg.FedAvgOptions(), context, names)
        self.sums = options.sums or ("reporters" if context.whole_rounds else "table")

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The common layer's update, the loss and the number of categories."""
        return frozenset({PartialDelta, Loss, LabelCount})

    def initial(self, theta: Tensor) -> State:
        """The model, and no silo's loss."""
        count = len(self.context.silos)
        losses, versions = torch.full((count,), -1.0, dtype=torch.float64), torch.full((count,), -1, dtype=torch.int64)
        return State(theta, {_LOSSES: losses, _VERSIONS: versions})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The common layer."""
        return self.partial.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """A few batches after the download, then the rest, whose displacement of the common layer is remembered."""
        layout, model, shared = self.context.layout, local.model, self.partial.shared
        downloaded = self.partial.parameters(local, task.payloads)
        common = _aggregation.extract(downloaded, layout, shared)
        displacement = local.state.get(_DISPLACEMENT)
        start = common if displacement is None else residual(common, displacement, self.options.residual_beta)
        model.load(_aggregation.inserted(downloaded, layout, shared, start))
        work = self.partial.fedavg.work(local, task)
        losses, kept = [0.0], dict[str, Tensor]()
        if work is not None:
            batches = _training.batches_of(work, len(local.share), self.context.training.batch_size)
            cut, began = round(self.options.local_share * batches), dict[int, Mapping[str, Any]]()
            for first, stop in ((0, cut), (cut, batches)):
                start = _aggregation.extract(model.flat.detach().cpu(), layout, shared)
                if first < stop:
                    here = model.flat.detach().clone()
                    some = SomeBatches(work, batches, first, stop, began)
                    losses.append(_training.train_epochs(local, self.context, task, here, some).loss)
            kept = dict(work.kept())
        end = _aggregation.extract(model.flat.detach().cpu(), layout, shared)
        up = (
            PartialDelta(layout.digest, shared, (end - common).numpy(), len(local.share)),
            Loss(losses[-1]),
            LabelCount(_training.categories(local, self.context)),
        )
        own = _aggregation.extract(model.flat.detach().cpu(), layout, self.partial.personal)
        return Trained(up, {**kept, _personal_model.OWN: own, _DISPLACEMENT: end - start}, losses[-1])

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """Of the coordinator's model the common layer alone is trained, which is no model by itself."""
        return Traits(own_only=True, personalised=True)

    def traits(self) -> Traits:
        """The common layer is what is shared."""
        return replace(self.traits_of(self.options), shared_layers=self.partial.shared)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The common layer as it came, without what a next task would take off, and the silo's own around it."""
        return self.partial.encoders(local, payloads)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """The weighted, damped updates of the common layer."""
        replies = _aggregation.ordered(replies)
        samples = [take(reply.payloads, PartialDelta).n_samples for reply in replies]
        labels = [max(1, take(reply.payloads, LabelCount).value) for reply in replies]
        # The rule is of a round's summed losses; on the wire a loss is a mean, as every method's.
        means = [max(0.0, take(reply.payloads, Loss).value) for reply in replies]
        losses = [mean * size for mean, size in zip(means, samples, strict=True)]
        table = state.tensors[_LOSSES].clone()
        reported = torch.tensor(losses, dtype=torch.float64)
        table[[reply.silo.index for reply in replies]] = reported
        before = state.tensors.get(_VERSIONS)
        versions, here = _aggregation.heard(before, state.tensors[_LOSSES], replies, round_, self.context.max_age)
        pool = reported if self.sums == "reporters" else table[here]
        size, count = torch.tensor(samples, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64)
        weights = weights_of(size, count, reported, float(pool.mean()), self.options.sharpness)
        merged = self.partial.merge(state, replies, weights)
        tensors = {**merged.state.tensors, _LOSSES: table, _VERSIONS: versions}
        return MergeResult(State(merged.state.theta, tensors, state.values))


PROTOCOL = FedCmr
