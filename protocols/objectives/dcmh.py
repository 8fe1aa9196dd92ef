"""DCMH (Jiang and Li 2017): pairwise likelihood against buffers of all local codes, a base of FedCAFE.

With outputs F and G of a silo's n items, B = sign(F + G), S_ij = 1 if two items share a label and
theta_ij = F_i . G_j / 2, the objective is

J = sum_ij (log(1 + e^theta_ij) - S_ij theta_ij) + gamma (|B - F|^2 + |B - G|^2) + eta (|F^T 1|^2 + |G^T 1|^2)

The towers take turns; a batch's step has its own rows from the tower and all other rows from the buffers F and G.

The paper's eta is 1. Its gradient 2 eta F^T 1 is the same for all items, and stays as it is until an epoch has replaced
the buffer's rows, so that under Adam at rates of 1e-3 and above all outputs swing together; with eta = 0 some bits are
the same for all items. The buffers start from the downloaded model's outputs, where the paper's start from N(0, 1), as
a silo's first task may start from a model that others trained.

A single-modality silo pairs items within its modality: likelihood of F F^T instead of F G^T, and B = sign(F).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Modality, NonNegative
from fedmq.data.labels import fine_columns
from fedmq.federation.protocol import Context, Local, Task
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import alternating, training
from protocols.parts.labelled import similar_items
from protocols.parts.losses import pair_nll
from protocols.parts.training import I64


@dataclass(frozen=True)
class Options:
    """Options of DCMH; defaults are the paper's, but for ``eta`` and ``image_layers``.

    Args:
        gamma: weight of the distance to the common codes.
        eta: weight of the balance of each bit.
        image_layers: hidden layers of the image tower: 1 over frozen features, 0 as in the paper, which trains CNN-F
            below it (``backbone.end_to_end``).
        buffer: outputs stored in the buffers under FedCAFE: ``enhanced``, as in its code, or ``plain``.
        likelihood: outputs of the batch in the loss under FedCAFE: ``plain``, as in its code, or ``enhanced``.
        draws: draw the batches of a pass from one ``permutation``, or each from a ``fresh`` one as in the released
            code.
        scale: factor of the loss: ``one``, or 1 over the number of ``silos`` as in FedCAFE's code.
    """

    gamma: NonNegative = 1.0
    eta: NonNegative = 1e-3
    image_layers: Literal[0, 1] = 1
    buffer: alternating.Which = "enhanced"
    likelihood: alternating.Which = "plain"
    draws: alternating.Draws = "permutation"
    scale: alternating.Scale = "one"


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
    likelihood = pair_nll(0.5 * outputs @ other.T, similar).sum()
    quantisation = (codes - outputs).square().sum()
    balance = (outputs.sum(0) + buffer.index_fill(0, rows, 0.0).sum(0)).square().sum()
    return torch.stack([likelihood, quantisation, balance])


def batch_loss(sums: Tensor, batch: int, size: int, options: Options, scale: float = 1.0) -> Tensor:
    """DCMH's objective on one batch of B of n items: the weighted sum of :func:`terms` [3], divided by B n."""
    return scale * (sums[0] + options.gamma * sums[1] + options.eta * sums[2]) / (batch * size)


@dataclass
class Dcmh(alternating.Alternating):
    """DCMH in one task: an image pass, a text pass and new common codes in each epoch."""

    labels: Tensor  # float32 [n, L], multi-hot

    def loss(self, modality: Modality, rows: I64, out: Out) -> Tensor:
        """Loss of a batch; the batch's outputs enter the buffer."""
        index = torch.from_numpy(rows).to(self.codes.device)
        buffer = self.buffers[modality]
        buffer[index] = alternating.output(out, self.options.buffer).detach()
        other = self.buffers.get("text" if modality == "image" else "image", buffer)
        similar = similar_items(self.labels[index], self.labels)
        outputs = alternating.output(out, self.options.likelihood)
        sums = terms(outputs, buffer, other, self.codes[index], similar, index)
        return batch_loss(sums, len(rows), len(self.labels), self.options, self.scale)


def begin(options: Options, local: Local, context: Context, task: Task) -> Dcmh:
    """Start DCMH for one task, with the buffers of the last one."""
    labels = training.labels_of(local, np.arange(len(local.dataset)))[:, fine_columns(context.label_names)]
    return Dcmh(*alternating.begun(options, local, context), labels)


def network(options: Options) -> TowerPlan:
    """DCMH's towers: the paper's text tower, and the image tower with or without a hidden layer."""
    return TowerPlan((4096,) * options.image_layers, (8192,), classifier=True, std=0.01)


OBJECTIVE = ObjectiveKind(Options, begin, network)
