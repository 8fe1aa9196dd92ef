"""Reference definitions on whole matrices against which the program's results are compared.

All values are fractions in [0, 1]. Ties are ordered by (distance, database index), so a value never depends on a sort's
inner workings; for Hamming ranking :func:`mean_expected_ap` gives the value that does not depend on the order of ties.
Distances are [Q, N] arrays where smaller is closer; a similarity is ranked by its negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedmq.config.scenario import Partition
from fedmq.data.partition import deal, plan
from fedmq.evaluation.hamming import Array, as_numpy
from fedmq.evaluation.label_metrics import Denominator, Empty

Floats = npt.NDArray[np.floating[Any]]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def owners(captions: Array) -> I64:
    """The image each caption belongs to, captions laid out image by image: (2, 1) -> (0, 0, 1)."""
    counts = as_numpy(captions)
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def unpacked(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int8]:
    """Codes in {-1, +1} [n, bits] of packed ones, whose last byte is padded with zeros."""
    ones = np.unpackbits(packed, axis=1)
    assert not ones[:, bits:].any()
    return 2 * ones[:, :bits].astype(np.int8) - 1


# --------------------------------------------------------------------------- Hamming ranking and mAP
def hamming(queries: Array, database: Array) -> F64:
    """Hamming distances [Q, N] of codes [Q, r] and [N, r] in {-1, +1}: (r - <q, b>) / 2."""
    q, b = as_numpy(queries).astype(np.float64), as_numpy(database).astype(np.float64)
    distance: F64 = 0.5 * (b.shape[1] - q @ b.T)
    return distance


def relevance(query_labels: Array, database_labels: Array) -> F64:
    """1 where two label rows [Q, C], [N, C] share at least one label, else 0 -> [Q, N]."""
    q, b = as_numpy(query_labels).astype(np.float64), as_numpy(database_labels).astype(np.float64)
    return (q @ b.T > 0).astype(np.float64)


def ranking(distance: Floats) -> I64:
    """Database indices of distances [Q, N] in ranked order [Q, N], ties by index."""
    return np.argsort(distance, axis=1, kind="stable")


def average_precision(
    distance: Floats, relevant: Floats, cutoff: int | None = None, denominator: Denominator = "retrieved"
) -> F64:
    """AP of each query [Q]: sum_j precision(j) rel_j / denominator over the first ``cutoff`` of the ranked list.

    Args:
        distance: [Q, N].
        relevant: 0/1 [Q, N].
        cutoff: R; None is the whole list.
        denominator: ``retrieved`` relevant items among the first R (all public hashing code); ``total`` all relevant
            items; ``min`` the smaller of R and total.
    """
    top = np.take_along_axis(relevant, ranking(distance), axis=1)[:, :cutoff]
    hits = top.cumsum(axis=1)
    summed = (hits / np.arange(1, top.shape[1] + 1) * top).sum(axis=1)
    total = relevant.sum(axis=1)
    below = {"retrieved": top.sum(axis=1), "total": total, "min": np.minimum(top.shape[1], total)}[denominator]
    ap: F64 = np.divide(summed, below, out=np.zeros_like(summed), where=below > 0)
    return ap


def expected_ap(distance: Floats, relevant: Floats) -> F64:
    """AP of each query [Q] averaged over all orders inside tied blocks, rank by rank (METHODS 8.2).

    At place s of a block of n items with r relevant ones, behind N items with R relevant ones, a relevant item stands
    with probability r / n, and (s - 1) (r - 1) / (n - 1) of the others of its block are expected before it.
    """
    result = np.zeros(len(distance))
    for row, (d, rel) in enumerate(zip(distance, relevant, strict=True)):
        before = hits = total = 0.0
        for value in np.unique(d):
            n, r = float((d == value).sum()), float(rel[d == value].sum())
            for s in range(1, int(n) + 1):
                others = (s - 1) * (r - 1) / (n - 1) if n > 1 else 0.0
                total += r / n * (hits + 1 + others) / (before + s)
            before, hits = before + n, hits + r
        result[row] = total / hits if hits else 0.0
    return result


def _mean_over_queries(values: F64, relevant: Floats, empty: Empty) -> float:
    """Mean AP; a query with nothing relevant in the database counts 0 or is left out."""
    kept = values if empty == "zero" else values[relevant.sum(axis=1) > 0]
    return float(kept.mean()) if kept.size else 0.0


def mean_ap(
    distance: Floats,
    relevant: Floats,
    cutoff: int | None = None,
    *,
    denominator: Denominator = "retrieved",
    empty: Empty = "zero",
) -> float:
    """Mean AP, or mAP@R; arguments as in :func:`average_precision`; ``empty`` is zero as in public code."""
    return _mean_over_queries(average_precision(distance, relevant, cutoff, denominator), relevant, empty)


def mean_expected_ap(distance: Floats, relevant: Floats, empty: Empty = "zero") -> float:
    """Mean AP over the whole list averaged over orders of ties."""
    return _mean_over_queries(expected_ap(distance, relevant), relevant, empty)


# --------------------------------------------------------------------------- NDCG, precision, recall, curves
def ndcg(distance: Floats, gains: Floats, n: int, *, ideal: Literal["full", "retrieved"] = "full") -> float:
    """NDCG@n: DCG = sum_i (2^rel_i - 1) / log2(i + 1), over queries; 0 for a query without any gain.

    Args:
        distance: [Q, N].
        gains: relevance [Q, N].
        n: cut-off.
        ideal: the ideal list taken from the whole database, or the retrieved n reordered.
    """
    g = 2.0**gains - 1
    got = np.take_along_axis(g, ranking(distance), axis=1)[:, :n]
    best = np.sort(g if ideal == "full" else got, axis=1)[:, ::-1][:, :n]
    discount = 1 / np.log2(np.arange(2, got.shape[1] + 2))
    above, below = (got * discount).sum(axis=1), (best * discount).sum(axis=1)
    return float(np.divide(above, below, out=np.zeros_like(above), where=below > 0).mean())


def _ranked_with_relevant(distance: Floats, relevant: Floats) -> Floats:
    """Relevance in ranked order of the queries that have anything relevant."""
    kept = relevant.sum(axis=1) > 0
    return np.take_along_axis(relevant[kept], ranking(distance[kept]), axis=1)


def precision_recall_at(distance: Floats, relevant: Floats, n: int) -> tuple[float, float]:
    """Precision@n and Recall@n averaged over queries with anything relevant."""
    ranked = _ranked_with_relevant(distance, relevant)
    if not len(ranked):
        return 0.0, 0.0
    hits = ranked[:, :n].sum(axis=1)
    return float((hits / n).mean()), float((hits / ranked.sum(axis=1)).mean())


def pr_by_rank(distance: Floats, relevant: Floats) -> tuple[F64, F64]:
    """Mean precision and recall [N] at each list position, over queries with anything relevant."""
    ranked = _ranked_with_relevant(distance, relevant)
    hits = ranked.cumsum(axis=1)
    precision = hits / np.arange(1, ranked.shape[1] + 1)
    return precision.mean(axis=0), (hits / ranked.sum(axis=1, keepdims=True)).mean(axis=0)


def pr_by_radius(distance: Floats, relevant: Floats, bits: int) -> tuple[F64, F64]:
    """Mean precision and recall [bits + 1] of everything within Hamming radius 0..bits.

    Queries that retrieve nothing at a radius are left out of its precision; NaN where none retrieves anything.
    """
    kept = relevant.sum(axis=1) > 0
    d, rel = distance[kept], relevant[kept]
    precision, recalled = np.full(bits + 1, np.nan), np.full(bits + 1, np.nan)
    for radius in range(bits + 1):
        inside = d <= radius + 1e-9
        hits, found = (inside * rel).sum(axis=1), inside.sum(axis=1)
        some = found > 0
        if some.any():
            precision[radius] = float((hits[some] / found[some]).mean())
        if len(d):
            recalled[radius] = float((hits / rel.sum(axis=1)).mean())
    return precision, recalled


# --------------------------------------------------------------------------- partitions
def assign(partition: Partition, silos: int, groups: I64, seed: int) -> list[I64]:
    """Plan and assign the training split in one step; for held-out splits keep the plan and call :func:`deal`."""
    return deal(plan(partition, silos, groups, seed), groups)


def js_divergence(p: F64, q: F64) -> float:
    """Jensen-Shannon divergence of two distributions [C], in nats."""
    middle = (p + q) / 2

    def kl(a: F64) -> float:
        some = a > 0
        return float((a[some] * np.log(a[some] / middle[some])).sum())

    return (kl(p) + kl(q)) / 2


def mean_js_divergence(counts: I64) -> float:
    """Mean Jensen-Shannon divergence of the pairs of silos' label distributions, from counts [C, K], in nats."""
    size = counts.sum(axis=0)
    rows = (counts / np.maximum(size, 1)).T[size > 0]
    return float(np.mean([js_divergence(a, b) for a, b in combinations(rows, 2)] or [0.0]))


def group_counts(groups: I64, shares: Sequence[I64]) -> I64:
    """Counts [G, K] of each group in each silo dataset."""
    count = int(groups.max()) + 1
    return np.stack([np.bincount(groups[share], minlength=count) for share in shares], axis=1)


# --------------------------------------------------------------------------- SHDCH
def tie_loss(coarse: torch.Tensor, fine: torch.Tensor, inclusion: torch.Tensor, eta: float) -> torch.Tensor:
    """Tie of two levels' codes [C1, r] and [C2, r]: eta ||r S12 - Y1 Y2^T||^2 with the inclusion S12 [C1, C2]."""
    return eta * (coarse.shape[1] * inclusion - coarse @ fine.T).square().sum()
