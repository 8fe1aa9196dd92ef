"""DNpH (Qin et al., TMM 2024): quadratic spherical mutual information of codes and labels, on features of CLIP.

With Y_ij = (1 + cos(a_i, b_j)) / 2 of the codes of a batch, D_ij = 1 if two items share a label, and M = B^2 / sum D,
each pair of modalities (image-image, text-text, image-text) adds, in the clamped form of the official code
(QinLab-WFU/DNpH),

sum_ij (D_ij Y_ij - 1)^2 + Y_ij^2 / M

The constant 1 of each pair with D_ij = 0 is left out. Head and loss need no token sequences. The paper's head is one
linear layer with tanh above CLIP, which is trained with it; here the features are frozen, and a hidden layer stands
between them and the head. Its dropout (rate 0.2) before tanh is left out. DNPH (Huo et al., TOMM 2024),
with proxies and noise, is another method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from protocols.parts.labelled import on_outputs, pairs_of, similar_items
from protocols.parts.losses import cosines
from protocols.parts.training import codes


@dataclass(frozen=True)
class Options:
    """DNpH has no options."""


def loss(image: Tensor | None, text: Tensor | None, labels: Tensor) -> Tensor:
    """The loss of a batch, summed over its pairs of items and of modalities.

    Args:
        image: codes [B, r]; None if the silo has no images.
        text: likewise.
        labels: float [B, C], multi-hot.
    """
    similar, terms = similar_items(labels, labels), []
    for a, b in pairs_of(image, text):
        near = (1 + cosines(a, b)) / 2
        terms.append((similar * (near - 1).square() + similar.mean() * near.square()).sum())
    return torch.stack(terms).sum()


OBJECTIVE = ObjectiveKind(
    Options,
    on_outputs(lambda options, image, text, labels: loss(*codes(image, text), labels)),
    lambda options: TowerPlan(tanh=True),
)
