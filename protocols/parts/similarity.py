"""Similarities of unlabelled pairs, the targets of the unsupervised hashing bases, and training towards them.

Features are frozen, so a silo's targets do not change. DGCPN's targets depend on the silo's whole training set; they
are computed per batch, since a step only needs the batch's rows and columns of the n x n matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmq.config.scenario import Training
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.federation.protocol import Local
from fedmq.models.hash_networks import Tower
from fedmq.models.objective_registry import TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import training
from protocols.parts.losses import EPSILON, unit

_EPOCHS = "base.epochs"
#: The towers of DGCPN, DJSRH and JDSH.
UNSUPERVISED_TOWERS = TowerPlan((4096,), (4096,), tanh=True, dropout=True, last_std=0.3)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of ``a`` [A, d] with each row of ``b`` [B, d] -> [A, B]."""
    return unit(a) @ unit(b).T


def mean_square(a: Tensor, b: Tensor) -> Tensor:
    """MSE over all entries of two matrices of the same shape."""
    return (a - b).square().mean()


def affinity(features: Tensor) -> Tensor:
    """S_m = 2 F F^T - 1 with the rows of F [B, d] normalised -> [B, B] (DJSRH, JDSH)."""
    return 2 * cosines(features, features) - 1


# --------------------------------------------------------------------------------------------------- batch features
def batch_features(local: Local, step_rows: training.I64, caption: training.I64 | None) -> tuple[Tensor, Tensor]:
    """Image and text features [B, d_i] and [B, d_t] of a batch; a missing modality is replaced by the other one.

    For a single-modality silo, a weighted similarity of both modalities thus becomes that of its modality.

    Args:
        local: the silo.
        step_rows: int64 [B].
        caption: int64 [n], the caption index of every item; None if the silo has no text.
    """
    rows = torch.from_numpy(step_rows)
    image = text = None
    if local.dataset.image is not None:
        image = local.dataset.image[rows].float()
    if local.dataset.text is not None and caption is not None:
        text = local.dataset.text[rows, torch.from_numpy(caption[step_rows])].float()
    return _both(image, text)


def item_features(share: SiloDataset) -> tuple[Tensor, Tensor]:
    """Features of all items [n, d_i] and [n, d_t]; several captions are normalised and summed.

    A missing modality is replaced by the other one. Items with one caption each are not copied.
    """
    image = None if share.image is None else share.image.float()
    return _both(image, None if share.text is None else _mean_caption(share.text, share.captions))


def _mean_caption(text: CaptionRows, counts: Tensor) -> Tensor:
    if not (counts > 1).any():
        return text[:, 0].float()
    total = torch.zeros(len(text), text.values.shape[1])
    for number in range(int(counts.max())):
        items = torch.nonzero(number < counts)[:, 0]
        total[items] += unit(text[items, number].float())
    return total


def _both(image: Tensor | None, text: Tensor | None) -> tuple[Tensor, Tensor]:
    """Replace a missing modality's features by the other's."""
    present = image if image is not None else text
    if present is None:
        raise ValueError("a silo has at least one modality")
    return present if image is None else image, present if text is None else text


# --------------------------------------------------------------------------------------------------- DGCPN's graph
def smallest(values: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` smallest entries in each row [B, n], ties to the lowest index as in a stable sort."""
    if count == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    threshold = values.kthvalue(count, dim=1, keepdim=True).values
    below, equal = values < threshold, values == threshold
    room = count - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= room))


@dataclass(frozen=True)
class Graph:
    """DGCPN's similarity over a silo's whole training set, computed batch by batch.

    A batch needs memory for [B, n]; the n x n matrix is never stored. Rows are recomputed for every batch, which is
    cheap compared with the networks. Products of features are normalised, which avoids a normalised copy of them.

    Args:
        image: [n, d_i] features of any length.
        text: [n, d_t] features of any length.
        a1: weight of the text in the pairwise similarity.
        a2: weight of the neighbours' agreement in the result.
        scale_share: rho / n, the scale of the neighbours' agreement.
        zeroed_share: z / rho, the fraction of a row's smallest entries that are set to 0.
    """

    image: Tensor
    text: Tensor
    a1: float = 0.3
    a2: float = 0.3
    scale_share: float = 0.9
    zeroed_share: float = 0.45

    @property
    def scale(self) -> int:
        """The scale rho of the neighbours' agreement."""
        return round(self.scale_share * len(self.image))

    @property
    def zeroed(self) -> int:
        """The number z of entries per row that are set to 0."""
        return min(round(self.zeroed_share * self.scale), len(self.image))

    def pairs(self, rows: Tensor) -> Tensor:
        """P[rows] = a1 F_T F_T^T + (1 - a1) F_I F_I^T -> [B, n]."""
        text, image = self._cosines(self.text, rows), self._cosines(self.image, rows)
        return self.a1 * text + (1 - self.a1) * image

    def _cosines(self, features: Tensor, rows: Tensor) -> Tensor:
        lengths = self._lengths[0 if features is self.image else 1]
        return unit(features[rows]) @ features.T / lengths

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        """Lengths of the image and the text features, each [n]."""
        image, text = (torch.linalg.vector_norm(rows, dim=1).clamp_min(EPSILON) for rows in (self.image, self.text))
        return image, text

    def neighbours(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """A[rows]: P without each row's z smallest entries and the item itself, rows summing to 1 -> [B, n].

        Negative entries are dropped too: the papers' features have none, and a row whose entries sum to nearly 0 could
        not be normalised.

        Args:
            rows: int64 [B].
            pairs: [B, n], P[rows].
        """
        kept = pairs.clamp_min(0).masked_fill(smallest(pairs, self.zeroed), 0)
        kept[torch.arange(len(rows)), rows] = 0
        return kept / kept.sum(1, keepdim=True).clamp_min(EPSILON)

    def agreement(self, rows: Tensor, pairs: Tensor) -> Tensor:
        """The neighbours' agreement rho A A^T between the given rows -> [B, B]."""
        near = self.neighbours(rows, pairs)
        return self.scale * near @ near.T

    def similarity(self, rows: Tensor) -> Tensor:
        """S = 2 [(1 - a2) P + a2 rho A A^T] - 1 between the given rows -> [B, B].

        Args:
            rows: int64 [B].
        """
        pairs = self.pairs(rows)
        return 2 * ((1 - self.a2) * pairs[:, rows] + self.a2 * self.agreement(rows, pairs)) - 1


# ------------------------------------------------------------------------- training that reconstructs a similarity
def sharpness(epochs: int) -> float:
    """Factor of the inputs of tanh after ``epochs`` epochs: alpha = sqrt(epochs + 1).

    Epochs are counted over all tasks of the silo; counted per task, the factor would stay near 1.
    """
    return math.sqrt(epochs + 1)


@contextmanager
def sharpened(local: Local, factor: float) -> Iterator[None]:
    """Multiply the inputs of tanh by a factor; outside training it is 1, which gives the same signs."""
    towers = [tower for tower in (local.model.visual, local.model.text) if isinstance(tower, Tower)]
    for tower in towers:
        tower.sharpness = factor
    try:
        yield
    finally:
        for tower in towers:
            tower.sharpness = 1.0


@dataclass(frozen=True)
class Reconstruction(training.Work):
    """One step per batch towards the batch's similarity; the sharpness of codes grows with every epoch.

    Args:
        local: the silo.
        settings: batch size and epochs.
        target: computes the similarity [B, B] from image and text features [B, d_i] and [B, d_t].
        loss: returns the loss from image and text codes [B, r], None for a modality the silo lacks, and the similarity.
    """

    local: Local
    settings: Training
    target: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor | None, Tensor | None, Tensor], Tensor]

    @property
    def before(self) -> int:
        """Epochs the silo has trained in its earlier tasks."""
        return int(self.local.state[_EPOCHS]) if _EPOCHS in self.local.state else 0

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """One step per batch of a permutation."""
        caption = training.choose_captions(self.local, generator)
        device = self.local.model.flat.device
        with sharpened(self.local, sharpness(self.before + epoch)):
            for rows in training.batches(len(self.local.dataset), self.settings.batch_size, generator):
                similar = self.target(*(features.to(device) for features in batch_features(self.local, rows, caption)))

                def batch_loss(image: Out | None, text: Out | None, similar: Tensor = similar) -> Tensor:
                    return self.loss(*training.codes(image, text), similar)

                yield training.Step(rows, caption, batch_loss)

    def kept(self) -> Mapping[str, Tensor]:
        """The number of epochs the silo has trained, this task's included."""
        return {_EPOCHS: torch.tensor(self.before + self.settings.local_epochs)}
