"""FedCAFE's memories: centroids of enhanced features, one row per class, per silo and global.

Eqs 3 and 9 treat row c as class c, but plain K-means does not tie rows to classes. By default K-means therefore starts
from class means, which keeps the order of classes; the paper's two stages and its code's random start are options. A
row without samples has support 0 and is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from protocols.parts.class_prototypes import class_means
from protocols.parts.losses import cosines, pair_nll, unit

#: How memories are computed: cosine K-means from class means; class means only; K-means from random rows, as in
#: FedCAFE's code; or K-means per modality and then over both results, as in its paper.
Kind = Literal["kmeans_seeded", "class_mean", "kmeans_random", "kmeans_two_stage"]
#: Rows [C, r] and their supports int64 [C].
Rows = tuple[Tensor, Tensor]

_ITERATIONS = 20


def has_classes(kind: Kind) -> bool:
    """Whether row c of these memories represents class c."""
    return kind in ("kmeans_seeded", "class_mean")


def fused(features: Sequence[Tensor]) -> Tensor:
    """Unit-length mean of the available modalities' enhanced features, [n, r] each."""
    return unit(torch.stack(list(features)).mean(0))


def spherical_kmeans(points: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine K-means of points [n, r] from given centroids [C, r], all normalised here.

    An empty cluster keeps its centroid, and row c continues seed c.

    Returns:
        Centroids [C, r] of unit length, and the cluster int64 [n] of each point.
    """
    points, centroids = unit(points), unit(seeds)
    assigned = nearest(points, centroids)
    for _ in range(_ITERATIONS):
        sums = torch.zeros_like(centroids).index_add_(0, assigned, points)
        filled = torch.bincount(assigned, minlength=len(centroids)) > 0
        centroids = torch.where(filled[:, None], unit(sums), centroids)
        again = nearest(points, centroids)
        if torch.equal(again, assigned):
            break
        assigned = again
    return centroids, assigned


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid [C, r] of largest cosine for each point [n, r] -> int64 [n]."""
    return cosines(points, centroids).argmax(1)


def random_kmeans(points: Tensor, classes: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Cosine K-means from random points; with fewer points than classes, as many clusters as points."""
    chosen = generator.permutation(len(points))[:classes]
    return spherical_kmeans(points, points[torch.from_numpy(chosen)])


def local_memory(
    features: Sequence[Tensor], labels: Tensor, kind: Kind, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """A silo's memory P_k (FedCAFE section 3.2), of V_E [n, r] of each modality and multi-hot labels [n, C].

    Returns:
        Centroids [C, r] and supports int64 [C]: samples per class, or per cluster if rows have no class. Rows of
        support 0 are zero.
    """
    classes, width = labels.shape[1], features[0].shape[1]
    centroids = torch.zeros(classes, width, dtype=features[0].dtype)
    support = torch.zeros(classes, dtype=torch.int64)
    match kind:
        case "class_mean" | "kmeans_seeded":
            points = fused(features)
            means, counts = class_means(points, labels)
            present = counts > 0
            if kind == "kmeans_seeded" and bool(present.any()):
                means[present] = spherical_kmeans(points, means[present])[0]
            return means, counts
        case "kmeans_random":
            centres, assigned = random_kmeans(fused(features), classes, generator)
            counts = torch.bincount(assigned, minlength=len(centres))
        case "kmeans_two_stage":
            stages = [random_kmeans(rows, classes, generator) for rows in features]
            sizes = torch.cat([torch.bincount(assigned, minlength=len(rows)) for rows, assigned in stages])
            centres, assigned = random_kmeans(torch.cat([rows for rows, _ in stages]), classes, generator)
            counts = torch.zeros(len(centres), dtype=torch.int64).index_add_(0, assigned, sizes)
    filled = counts > 0
    centroids[: len(centres)][filled], support[: len(centres)] = centres[filled], counts
    return centroids, support


def global_memory(
    rows: Tensor, support: Tensor, previous: Tensor, kind: Kind, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """The global memory P_g from the silos' last memories [K, C, r] and their supports int64 [K, C].

    K-means starts from the support-weighted class means of the silos' rows, so that row c remains class c. Rows that no
    silo supports keep their values in the previous memory [C, r].

    Returns:
        P_g [C, r], rows of unit length, and bool [C], which rows at least one silo supports.
    """
    memory, filled = previous.clone(), torch.zeros(len(previous), dtype=torch.bool)
    points = rows[support > 0]
    if len(points) == 0:
        return memory, filled
    if has_classes(kind):
        total = support.sum(0)
        filled = total > 0
        weights = support.to(rows.dtype) / total.clamp(min=1)
        means = torch.stack([weights[k][:, None] * rows[k] for k in range(len(rows))]).sum(0)[filled]
        memory[filled] = unit(means) if kind == "class_mean" else spherical_kmeans(points, means)[0]
    else:
        centres, _ = random_kmeans(points, len(memory), generator)
        memory[: len(centres)], filled[: len(centres)] = centres, True
    return memory, filled


def difference(local: Tensor, shared: Tensor, similar: Tensor) -> Tensor:
    """Sim_k = -sum_ij [S_ij theta_ij - log(1 + e^theta_ij)], theta = P_k P_g^T / 2 (FedCAFE eq 9).

    A negative log-likelihood: larger means less similar, although the paper calls it a similarity.

    Args:
        local: [i, r] rows of a silo's memory.
        shared: [j, r] rows of the global memory.
        similar: [i, j] S, 1 where two rows should be similar.
    """
    return pair_nll(0.5 * local @ shared.T, similar).sum()


def differences(memories: Sequence[Rows], shared: Tensor, filled: Tensor, *, by_class: bool) -> Tensor:
    """:func:`difference` of each replying silo's memory over its supported rows, scaled to C x C pairs.

    Without the scaling, a silo that lacks classes would appear more similar because it has fewer pairs.

    Args:
        memories: (rows [C, r], support [C]) of M replying silos.
        shared: [C, r] global memory.
        filled: bool [C], supported rows of the global memory.
        by_class: rows with the same index are similar (S = identity); otherwise each local row and its nearest global
            row are.

    Returns:
        float64 [M]; log 2 per pair for a silo without rows, as for rows that are neither similar nor different.
    """
    classes = len(shared)
    columns = filled.nonzero().squeeze(1)
    result = []
    for rows, support in memories:
        present = (support > 0).nonzero().squeeze(1)
        if len(present) == 0 or len(columns) == 0:
            result.append(torch.tensor(classes**2 * math.log(2.0), dtype=torch.float64))
            continue
        local, common = rows[present].double(), shared[columns].double()
        index = present if by_class else columns[nearest(local, common)]
        similar = (index[:, None] == columns[None]).double()
        result.append(difference(local, common, similar) * classes**2 / (len(present) * len(columns)))
    return torch.stack(result)


def shares(differences_: Tensor, weight: Literal["linear", "softmax"], temperature: float = 1.0) -> Tensor:
    """Weights alpha_k [M] of the replying silos (FedCAFE eq 10).

    ``softmax`` is as printed; it saturates, because differences are in the hundreds. ``linear`` is Sim_k / sum Sim,
    which equals the released code's softmax of logarithms.
    """
    if weight == "linear":
        return differences_ / differences_.sum()
    return (differences_ / temperature).softmax(0)


def capped(weights: Tensor, limits: Tensor) -> Tensor:
    """Weights [M] of sum 1 capped at limits [M], the excess redistributed to the others in proportion.

    Limits are at least 1 / M each, so that the weights can still sum to 1; infinite for no limit.
    """
    at_limit, result = torch.zeros(len(weights), dtype=torch.bool), weights
    while not bool(at_limit.all()):
        free, rest = 1 - limits[at_limit].sum(), weights[~at_limit].sum()
        others = weights / rest if float(rest) > 0 else torch.ones_like(weights) / (~at_limit).sum()
        result = torch.where(at_limit, limits, others * free)
        over = (result > limits) & ~at_limit
        if not bool(over.any()):
            break
        at_limit = at_limit | over
    return result
