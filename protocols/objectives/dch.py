"""DCH (Cao et al. 2018): pairwise Cauchy likelihood of labelled codes, a base in FedHAP's comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from protocols.parts.labelled import on_samples, similar_items
from protocols.parts.losses import cosines

#: Upper bound of cosines: equal codes would have distance 0, whose logarithm is infinite.
_MOST_ALIKE = 0.99


@dataclass(frozen=True)
class Options:
    """Options of DCH.

    Args:
        gamma: scale of the Cauchy distribution.
        lamb: weight of the quantisation loss.
    """

    gamma: Positive = 20.0
    lamb: NonNegative = 0.1


def distances(a: Tensor, b: Tensor) -> Tensor:
    """d(a, b) = r / 2 (1 - min(cos, 0.99)) of each row of ``a`` [A, r] to each of ``b`` [B, r] -> [A, B]."""
    return (1 - cosines(a, b).clamp_max(_MOST_ALIKE)) * a.shape[1] / 2


def pair_weights(similar: Tensor) -> Tensor:
    """Weights [B, B] that give similar and dissimilar pairs the same total; all 1 if either kind is missing."""
    alike, apart = similar.sum(), (1 - similar).sum()
    if float(alike) == 0 or float(apart) == 0:
        return torch.ones_like(similar)
    return similar * similar.numel() / alike + (1 - similar) * similar.numel() / apart


def loss(codes: Tensor, labels: Tensor, options: Options) -> Tensor:
    """Mean weighted Cauchy cross-entropy of all pairs plus lamb times the Cauchy quantisation loss.

    Args:
        codes: [B, r].
        labels: float [B, C], multi-hot.
        options: scale and weight.
    """
    similar = similar_items(labels, labels)
    distance = distances(codes, codes)
    entropy = similar * torch.log(distance / options.gamma) + torch.log1p(options.gamma / distance)
    binary = distances(codes.abs(), torch.ones_like(codes[:1]))
    lost = torch.log1p(binary / options.gamma)
    return (pair_weights(similar) * entropy).mean() + options.lamb * lost.mean()


OBJECTIVE = ObjectiveKind(
    Options,
    on_samples(lambda options, samples, generator: loss(samples.codes, samples.labels, options)),
    lambda options: TowerPlan(),
)
