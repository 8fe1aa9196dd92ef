"""DCHMT (Tu et al., MM 2022): each bit is a choice between two outputs, on features of CLIP.

The paper's head (official code, kalenforn/DCHMT) has a hidden layer of 128 units and two outputs per bit. Their softmax
is (p, 1 - p), and the bit is their argmax. With h the 2 r numbers of all bits, D_ij = |h_i - h_j|, and S_ij = 1 if two
items share a label, each pair of modalities (image-text, image-image, text-text) adds

mean_ij S_ij D_ij^2 + mean_ij (1 - S_ij) max(0, m - D_ij)^2, m = sqrt(2 r theta)

Neither head nor loss uses token sequences. The paper trains CLIP below the head; here its features are frozen.
Departure: a softmax of two outputs depends on their difference u alone, so a tower has one output per bit, p = 1 / (1 +
e^-u), and the bit is the sign of u. A single-modality silo has one pair, of its modality with itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmq.config.sections import Fraction
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from protocols.objectives.triplet import distances
from protocols.parts.labelled import on_outputs, pairs_of, similar_items
from protocols.parts.training import codes


@dataclass(frozen=True)
class Options:
    """Options of DCHMT; the default is the official code's.

    Args:
        theta: fraction of the bits in which items without a common label should differ.
    """

    theta: Fraction = 0.5


def loss(image: Tensor | None, text: Tensor | None, labels: Tensor, theta: float) -> Tensor:
    """The loss of a batch, summed over the pairs of modalities.

    Args:
        image: outputs u [B, r]; None if the silo has no images.
        text: likewise.
        labels: float [B, C], multi-hot.
        theta: see :class:`Options`.
    """
    similar, terms = similar_items(labels, labels), []
    for a, b in pairs_of(image, text):
        # |h_i - h_j|^2 = 2 |p_i - p_j|^2
        apart = math.sqrt(2) * distances(a.sigmoid(), b.sigmoid(), "euclidean")
        missing = (math.sqrt(2 * a.shape[1] * theta) - apart).clamp_min(0)
        terms.append((similar * apart.square() + (1 - similar) * missing.square()).mean())
    return torch.stack(terms).sum()


OBJECTIVE = ObjectiveKind(
    Options,
    on_outputs(lambda options, image, text, labels: loss(*codes(image, text), labels, options.theta)),
    lambda options: TowerPlan((128,), (128,)),
)
