"""DCMH (Jiang and Li 2017): pairwise likelihood against buffers of all local codes, a base of FedCAFE.

A single-modality silo pairs items within its modality: likelihood of F F^T instead of F G^T, and B = sign(F).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import Modality
from fedmq.data.labels import fine_columns
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import alternating, training
from protocols.parts.options import check
from protocols.parts.training import I64

PREFIX = "base.buffer"


@dataclass(frozen=True)
class Options:
    """Options of DCMH; defaults are the paper's.

    Args:
        gamma: weight of the distance to the common codes.
        eta: weight of the balance of each bit.
        buffer: outputs stored in the buffers under FedCAFE: ``enhanced``, as in its code, or ``plain``.
        likelihood: outputs of the batch in the loss under FedCAFE: ``plain``, as in its code, or ``enhanced``.
        draws: draw the batches of a pass from one ``permutation``, or each from a ``fresh`` one as in the released
            code.
        scale: factor of the loss: ``one``, or 1 over the number of ``silos`` as in FedCAFE's code.
    """

    gamma: float = 1.0
    eta: float = 1.0
    buffer: alternating.Which = "enhanced"
    likelihood: alternating.Which = "plain"
    draws: alternating.Draws = "permutation"
    scale: alternating.Scale = "one"

    def __post_init__(self) -> None:
        check("gamma", self.gamma, 0.0)
        check("eta", self.eta, 0.0)


def terms(outputs: Tensor, buffer: Tensor, other: Tensor, codes: Tensor, similar: Tensor, rows: Tensor) -> Tensor:
    """Negative log-likelihood, quantisation and balance of one batch of one modality, unweighted sums [3].

    Args:
        outputs: [B, r] of the batch.
        buffer: [n, r] buffer of the same modality; the batch's rows are excluded.
        other: [n, r] buffer to form pairs with.
        codes: [B, r] common codes of the batch.
        similar: [B, n] 1 if two items share a label.
        rows: int64 [B], distinct indices of the batch's items.
    """
    theta = 0.5 * outputs @ other.T
    likelihood = (functional.softplus(theta) - similar * theta).sum()
    quantisation = (codes - outputs).square().sum()
    balance = (outputs.sum(0) + buffer.index_fill(0, rows, 0.0).sum(0)).square().sum()
    return torch.stack([likelihood, quantisation, balance])


def batch_loss(sums: Tensor, batch: int, size: int, options: Options, scale: float = 1.0) -> Tensor:
    """DCMH's objective on one batch of B of n items: the weighted sum of :func:`terms` [3], divided by B n."""
    return scale * (sums[0] + options.gamma * sums[1] + options.eta * sums[2]) / (batch * size)


@dataclass
class Dcmh(training.Work):
    """DCMH in one task: an image pass, a text pass and new common codes in each epoch.

    Args:
        options: options of DCMH.
        local: the silo.
        batch_size: the scenario's batch size.
        scale: factor of the loss.
        labels: float32 [n, L], multi-hot.
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

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """All batches of the image tower, then all of the text tower, then B = sign(F + G)."""
        yield from alternating.passes(self.local, self.batch_size, self.options.draws, generator, self._loss)
        self.codes = alternating.common_codes(self.buffers)

    def _loss(self, modality: Modality, rows: I64, out: Out) -> Tensor:
        index = torch.from_numpy(rows).to(self.codes.device)
        buffer = self.buffers[modality]
        buffer[index] = alternating.output(out, self.options.buffer).detach()
        other = self.buffers.get("text" if modality == "image" else "image", buffer)
        similar = (self.labels[index] @ self.labels.T > 0).to(buffer.dtype)
        outputs = alternating.output(out, self.options.likelihood)
        sums = terms(outputs, buffer, other, self.codes[index], similar, index)
        return batch_loss(sums, len(rows), len(self.labels), self.options, self.scale)

    @property
    def batches(self) -> int:
        """Batches per pass of one tower."""
        return alternating.batches(len(self.codes), self.batch_size, self.options.draws)

    def kept(self) -> Mapping[str, Tensor]:
        """The buffers F and G and the rows of their items; B follows from them."""
        return alternating.kept(self.local, PREFIX, self.buffers)


def begin(options: Options, local: Local, context: Context, task: Task) -> Dcmh:
    """Start DCMH for one task, with the buffers of the last one."""
    buffers = alternating.buffers(local, PREFIX, lambda out: alternating.output(out, options.buffer))
    return Dcmh(
        options=options,
        local=local,
        batch_size=context.training.batch_size,
        scale=alternating.factor(options.scale, context),
        labels=training.labels_of(local, np.arange(len(local.dataset)))[:, fine_columns(context.label_names)],
        buffers=buffers,
        codes=alternating.common_codes(buffers),
    )


OBJECTIVE = ObjectiveKind(Options, begin, lambda options: TowerPlan((), (8192,), classifier=True, std=0.01))
