"""Seeded K-means on weighted points, small enough to run at a silo or in a merge."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ITERATIONS = 50


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Index int64 [n] of the nearest centre, ties to the lowest index; points [n, d], centres [C, d]."""
    x, c = points.double(), centres.double()
    return (c.square().sum(1)[None] - 2 * x @ c.T).argmin(1)


def k_means(points: Tensor, weights: Tensor, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from k-means++ seeds, at most 50 iterations.

    Args:
        points: [n, d], at least one.
        weights: [n], above 0.
        count: number of clusters.
        generator: draws the seeds.

    Returns:
        Centres float64 [count, d] and the total weight of each cluster float64 [count]. Rows of weight 0 are zero:
        there are fewer distinct points than clusters, or a cluster lost all its points.
    """
    x, mass = points.double(), weights.double()
    centres = x[_seeds(x, mass, count, generator)]
    owner = nearest(x, centres)
    for _ in range(ITERATIONS):
        centres, held = _means(x, mass, owner, centres)
        before, owner = owner, nearest(x, centres)
        if torch.equal(owner, before):
            break
    _, held = _means(x, mass, owner, centres)
    result, total = torch.zeros(count, x.shape[1], dtype=x.dtype), torch.zeros(count, dtype=x.dtype)
    result[: len(centres)], total[: len(centres)] = torch.where(held[:, None] > 0, centres, 0), held
    return result, total


def _seeds(x: Tensor, mass: Tensor, count: int, generator: np.random.Generator) -> list[int]:
    """k-means++ seeds, each row drawn by weight times squared distance to the nearest seed; fewer if points repeat."""
    chosen: list[int] = []
    distance = torch.ones_like(mass)
    for _ in range(count):
        edges = (mass * distance).cumsum(0)
        if float(edges[-1]) <= 0.0:
            break
        drawn = torch.tensor(generator.random() * float(edges[-1]), dtype=edges.dtype)
        chosen.append(min(int(torch.searchsorted(edges, drawn, right=True)), len(x) - 1))
        new = (x - x[chosen[-1]]).square().sum(1)
        distance = new if len(chosen) == 1 else torch.minimum(distance, new)
    return chosen


def _means(x: Tensor, mass: Tensor, owner: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and weights of the clusters; an empty cluster keeps its previous centre."""
    held = torch.zeros(len(before), dtype=x.dtype).index_add_(0, owner, mass)
    total = torch.zeros_like(before).index_add_(0, owner, x * mass[:, None])
    return torch.where(held[:, None] > 0, total / held.clamp(min=1e-300)[:, None], before), held
