"""Similarities of unlabelled pairs, the targets of the unsupervised hashing bases, and training towards them.

Features are frozen, so a silo's targets do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmq.config.scenario import Training
from fedmq.data.silo_dataset import CaptionRows, SiloDataset
from fedmq.federation.protocol import Local
from fedmq.models.hash_networks import towers_with
from fedmq.models.objective_registry import TowerPlan
from fedmq.models.two_tower import Out
from protocols.parts import training
from protocols.parts.losses import cosines, unit

_EPOCHS = "base.epochs"
#: The towers of DJSRH and JDSH, initialised as in their code: with DGCPN's wide last layer the growing factor of tanh's
#: inputs would saturate all outputs. In their code the hidden layer and the dropout of the image tower are AlexNet's,
#: which is trained, and the text tower has no dropout.
RECONSTRUCTING_TOWERS = TowerPlan((4096,), (4096,), tanh=True, dropout=True)


def mean_square(a: Tensor, b: Tensor) -> Tensor:
    """MSE over all entries of two matrices of the same shape."""
    return (a - b).square().mean()


def affinity(features: Tensor) -> Tensor:
    """S_m = 2 F F^T - 1 with the rows of F [B, d] normalised -> [B, B] (DJSRH, JDSH)."""
    return 2 * cosines(features, features) - 1


# --------------------------------------------------------------------------------------------------- batch features
def batch_features(local: Local, step_rows: training.I64, caption: training.I64 | None) -> tuple[Tensor, Tensor]:
    """Image and text features [B, d_i] and [B, d_t] of a batch, given by its rows int64 [B].

    The other modality replaces a missing one. For a single-modality silo, a weighted similarity of both modalities thus
    becomes that of its modality. ``caption`` int64 [n] is the caption index of every item; None if the silo has no
    text.
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


# ------------------------------------------------------------------------- training that reconstructs a similarity
@dataclass(frozen=True)
class Reconstruction(training.Work):
    """One step per batch towards the batch's similarity; the sharpness of codes grows with every epoch."""

    local: Local  # the silo
    settings: Training  # batch size and epochs
    # Computes the similarity [B, B] from image and text features [B, d_i] and [B, d_t].
    target: Callable[[Tensor, Tensor], Tensor]
    # Returns the loss from image and text codes [B, r], None for a modality the silo lacks, and the similarity.
    loss: Callable[[Tensor | None, Tensor | None, Tensor], Tensor]

    @property
    def before(self) -> int:
        """Epochs the silo has trained in its earlier tasks."""
        return int(self.local.state[_EPOCHS]) if _EPOCHS in self.local.state else 0

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """One step per batch of a permutation."""
        caption = training.choose_captions(self.local, generator)
        device = self.local.model.flat.device
        # The factor of tanh's inputs counts epochs over all tasks of the silo; within one it would stay near 1.
        with towers_with(self.local.model, sharpness=math.sqrt(self.before + epoch + 1)):
            for rows in training.batches(len(self.local.dataset), self.settings.batch_size, generator):
                similar = self.target(*(features.to(device) for features in batch_features(self.local, rows, caption)))

                def batch_loss(image: Out | None, text: Out | None, similar: Tensor = similar) -> Tensor:
                    return self.loss(*training.codes(image, text), similar)

                yield training.Step(rows, caption, batch_loss)

    def kept(self) -> Mapping[str, Tensor]:
        """The number of epochs the silo has trained, this task's included."""
        return {_EPOCHS: torch.tensor(self.before + self.settings.local_epochs)}
