"""DCMH (Jiang and Li 2017): pairwise likelihood against buffers of all local codes, a base of FedCAFE.

A silo with one modality takes its pairs within it: likelihood of F F^T instead of F G^T, and B = sign(F).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.parts import Modality
from fedmq.data.label_levels import fine_columns
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objectives import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols import _training
from protocols._options import check
from protocols._training import I64
from protocols.objectives import _alternating

PREFIX = "base.buffer"


@dataclass(frozen=True)
class Options:
    """Options of DCMH; defaults are the paper's.

    Args:
        gamma: weight of the distance to the common codes.
        eta: weight of the balance of each bit.
        buffer: outputs the buffers hold where a method enhances them: ``enhanced``, as FedCAFE's code, or ``plain``.
        likelihood: outputs the batch enters the loss with: ``plain``, as FedCAFE's code, or ``enhanced``.
        draws: batches of one ``permutation``, or each of a ``fresh`` one, as the released code.
        scale: factor of the loss, ``one``, or 1 over the number of ``silos``, as FedCAFE's code.
    """

    gamma: float = 1.0
    eta: float = 1.0
    buffer: _alternating.Which = "enhanced"
    likelihood: _alternating.Which = "plain"
    draws: _alternating.Draws = "permutation"
    scale: _alternating.Scale = "one"

    def __post_init__(self) -> None:
        check("gamma", self.gamma, 0.0)
        check("eta", self.eta, 0.0)


def terms(outputs: Tensor, own: Tensor, other: Tensor, codes: Tensor, similar: Tensor, rows: Tensor) -> Tensor:
    """Negative log-likelihood, quantisation and balance of one batch of one modality, unweighted sums [3].

    Args:
        outputs: [B, r] of the batch.
        own: [n, r] buffer of the same modality; the batch's own rows do not count.
        other: [n, r] buffer the pairs are taken with.
        codes: [B, r] common codes of the batch.
        similar: [B, n] 1 where two items share a label.
        rows: int64 [B], different.
    """
    theta = 0.5 * outputs @ other.T
    likelihood = (functional.softplus(theta) - similar * theta).sum()
    quantisation = (codes - outputs).square().sum()
    balance = (outputs.sum(0) + own.index_fill(0, rows, 0.0).sum(0)).square().sum()
    return torch.stack([likelihood, quantisation, balance])


def batch_loss(found: Tensor, batch: int, size: int, options: Options, scale: float = 1.0) -> Tensor:
    """DCMH's objective on one batch of B of n items: weighted :func:`terms` [3], divided by B n."""
    return scale * (found[0] + options.gamma * found[1] + options.eta * found[2]) / (batch * size)


@dataclass
class Dcmh(_training.Work):
    """DCMH at work: image pass, text pass, common codes, in each epoch.

    Args:
        options: weights and readings.
        local: the silo.
        batch_size: of the scenario.
        scale: factor of the loss.
        labels: float32 [n, L].
        buffers: [n, r] of each modality the silo has.
        codes: [n, r] common codes B.
    """

    options: Options
    local: Local
    batch_size: int
    scale: float
    labels: Tensor
    buffers: dict[Modality, Tensor]
    codes: Tensor

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[_training.Step]:
        """Every batch of the image tower, then of the text tower, then B = sign(F + G)."""
        yield from _alternating.passes(self.local, self.batch_size, self.options.draws, generator, self._loss)
        self.codes = _alternating.common_codes(self.buffers)

    def _loss(self, modality: Modality, rows: I64, out: Out) -> Tensor:
        index = torch.from_numpy(rows).to(self.codes.device)
        own = self.buffers[modality]
        own[index] = _alternating.output(out, self.options.buffer).detach()
        other = self.buffers.get("text" if modality == "image" else "image", own)
        similar = (self.labels[index] @ self.labels.T > 0).to(own.dtype)
        outputs = _alternating.output(out, self.options.likelihood)
        found = terms(outputs, own, other, self.codes[index], similar, index)
        return batch_loss(found, len(rows), len(self.labels), self.options, self.scale)

    @property
    def batches(self) -> int:
        """Batches of one tower's pass."""
        return _alternating.batches(len(self.codes), self.batch_size, self.options.draws)

    def kept(self) -> Mapping[str, Tensor]:
        """The buffers F and G and whose they are; B follows from them."""
        return _alternating.kept(self.local, PREFIX, self.buffers)


def begin(options: Options, local: Local, context: Context, task: Task) -> Dcmh:
    """DCMH at work in one task; buffers go on from the last one."""
    found = _alternating.buffers(local, PREFIX, lambda out: _alternating.output(out, options.buffer))
    return Dcmh(
        options=options,
        local=local,
        batch_size=context.training.batch_size,
        scale=_alternating.factor(options.scale, context),
        labels=_training.labels_of(local, np.arange(len(local.share)))[:, fine_columns(context.label_names)],
        buffers=found,
        codes=_alternating.common_codes(found),
    )


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: TowerPlan((), (8192,), classifier=True, std=0.01))
