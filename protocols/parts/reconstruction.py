"""Local training of unsupervised bases that reconstruct a similarity of the batch's features: DJSRH and JDSH."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmq.config.scenario import Training
from fedmq.federation.protocol import Local
from fedmq.models.hash_networks import Tower
from fedmq.models.two_tower import Out
from protocols.parts import training
from protocols.parts.similarity import batch_features, codes

_EPOCHS = "base.epochs"


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
                similar = self.target(*(each.to(device) for each in batch_features(self.local, rows, caption)))

                def batch_loss(image: Out | None, text: Out | None, similar: Tensor = similar) -> Tensor:
                    return self.loss(*codes(image, text), similar)

                yield training.Step(rows, caption, batch_loss)

    def kept(self) -> Mapping[str, Tensor]:
        """The number of epochs the silo has trained, this task's included."""
        return {_EPOCHS: torch.tensor(self.before + self.settings.local_epochs)}
