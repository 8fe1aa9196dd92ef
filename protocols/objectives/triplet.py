"""FedHAP's base: triplets of labelled codes and a quantisation loss (Yang et al. 2022, eqs 2 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.models.hash_networks import signs
from fedmq.models.objective_registry import ObjectiveKind, TowerPlan
from protocols.parts.labelled import Samples, on_samples, similar_items
from protocols.parts.losses import cosines

Distance = Literal["cosine", "euclidean"]
Mining = Literal["random", "all", "hard", "nearest"]
Reduce = Literal["mean", "sum"]


@dataclass(frozen=True)
class Options:
    """Options of the triplet base; FedHAP's triplets with global prototypes (eq 3) use them too.

    Args:
        distance: ``cosine`` is 1 - cos; ``euclidean`` the L2 norm.
        margin: a of eq 2, in units of r / 4 for the Euclidean distance.
        mining: positive and negative of each anchor from the batch: a ``random`` pair, ``all`` pairs, the farthest
            positive and the nearest negative (``hard``), or the ``nearest`` of both.
        reduce: ``sum`` over triplets and samples, as printed, or ``mean``.
        mu: weight of the quantisation loss.
    """

    distance: Distance = "cosine"
    margin: NonNegative = 0.5
    mining: Mining = "random"
    reduce: Reduce = "sum"
    mu: NonNegative = 0.05


def distances(a: Tensor, b: Tensor, kind: Distance) -> Tensor:
    """Distance of each row of ``a`` [A, r] to each row of ``b`` [B, r] -> [A, B]."""
    if kind == "cosine":
        return 1 - cosines(a, b)
    result: Tensor = torch.linalg.vector_norm(a[:, None] - b[None], dim=-1)
    return result


def triplet_loss(positive: Tensor, negative: Tensor, margin: float, reduce: Reduce) -> Tensor:
    """Sum or mean over triplets of max(d+ - d- + a, 0) (eqs 2 and 3), of distances [T]; 0 if there are none."""
    total = (positive - negative + margin).clamp_min(0).sum()
    return total / max(1, len(positive)) if reduce == "mean" else total


def mined(
    apart: Tensor, positive: Tensor, negative: Tensor, mining: Mining, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Distances d+ and d- of triplets, [T] each; anchors without a positive or a negative are left out.

    Args:
        apart: [A, M] distances of anchors to candidates.
        positive: bool [A, M], which candidates are positives.
        negative: bool [A, M], which are negatives.
        mining: see :class:`Options`.
        generator: draws for ``random``.
    """
    if mining == "all":
        triplets = positive[:, :, None] & negative[:, None, :]
        return apart[:, :, None].expand(triplets.shape)[triplets], apart[:, None, :].expand(triplets.shape)[triplets]
    anchors = positive.any(1) & negative.any(1)
    if mining in ("hard", "nearest"):
        farthest = apart.masked_fill(~positive, -torch.inf).amax(1)
        matched = farthest if mining == "hard" else apart.masked_fill(~positive, torch.inf).amin(1)
        nearest = apart.masked_fill(~negative, torch.inf).amin(1)
        return matched[anchors], nearest[anchors]
    chosen = [
        torch.from_numpy(generator.random(apart.shape)).to(apart.device).masked_fill(~mask, -1.0).argmax(1)[anchors]
        for mask in (positive, negative)
    ]
    rows = apart[anchors]
    return rows.gather(1, chosen[0][:, None])[:, 0], rows.gather(1, chosen[1][:, None])[:, 0]


def quantisation(codes: Tensor, reduce: Reduce) -> Tensor:
    """Sum or mean over samples of ||b - sign b||^2 for codes [n, r] (eq 7)."""
    lost = (codes - signs(codes.detach())).square().sum(1)
    return lost.mean() if reduce == "mean" else lost.sum()


def ranking_loss(
    codes: Tensor,
    candidates: Tensor,
    positive: Tensor,
    negative: Tensor,
    options: Options,
    generator: np.random.Generator,
) -> Tensor:
    """Triplets of codes [A, r] with candidates [M, r], mined by masks bool [A, M] (eqs 2 and 3)."""
    apart = distances(codes, candidates, options.distance)
    triplets = mined(apart, positive, negative, options.mining, generator)
    unit = codes.shape[1] / 4 if options.distance == "euclidean" else 1.0
    return triplet_loss(*triplets, options.margin * unit, options.reduce)


def loss(samples: Samples, options: Options, generator: np.random.Generator) -> Tensor:
    """Local triplets (eq 2) and mu times the quantisation loss (eq 7) of a batch; a positive shares a label."""
    codes = samples.codes
    similar = similar_items(samples.labels, samples.labels) > 0
    others = ~torch.eye(len(codes), dtype=torch.bool, device=codes.device)
    ranked = ranking_loss(codes, codes, similar & others, ~similar & others, options, generator)
    return ranked + options.mu * quantisation(codes, options.reduce)


OBJECTIVE = ObjectiveKind(
    Options,
    on_samples(lambda options, samples, generator: loss(samples, options, generator)),
    lambda options: TowerPlan(bits=48),
)
