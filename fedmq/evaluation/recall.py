"""Recall@k with several captions per image, the spread of embeddings, and means and fairness over silos.

Recalls are fractions in [0, 1]. Ties are broken by gallery index, so that values do not depend on the sorting
algorithm. Metrics that use labels (mAP, NDCG, precision and recall) are in ``label_metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.data.splits import same_rows
from fedmq.evaluation.hamming import Array, as_numpy

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

#: The metric that every evaluation has; fairness over silos is computed from it.
HEADLINE = "mean_r1"
RECALLS = (1, 5, 10)
#: Number of scores computed at a time, which bounds memory, and the number of queries from which products are fast.
CHUNK_SCORES, LEAST_QUERIES = 1 << 22, 16


def _chunks(queries: int, gallery: int) -> Iterator[slice]:
    """Ranges of queries whose scores fit in one chunk."""
    step = max(LEAST_QUERIES, CHUNK_SCORES // max(1, gallery))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


def first_of_rows(vectors: Array) -> I64 | None:
    """The first row equal to each row of vectors [n, d], int64 [n]; None if all rows differ.

    Rows of zeros count as different: their products are all zero.
    """
    first = same_rows(as_numpy(vectors) + np.float32(0))  # -0 equals 0
    return None if np.array_equal(first, np.arange(len(first))) else first


def tied(scores: npt.NDArray[Any], first: I64 | None) -> npt.NDArray[Any]:
    """Make the scores [Q, N] of equal gallery rows equal, in place: a matrix product may round by a row's place.

    Args:
        scores: products with the gallery's rows.
        first: :func:`first_of_rows` of the gallery.
    """
    if first is not None:
        repeated = np.flatnonzero(first != np.arange(len(first)))
        scores[:, repeated] = scores[:, first[repeated]]
    return scores


def best_ranks(scores: Array, positive: Array) -> I64:
    """Rank, from 0, of each query's best ranked positive; ties are broken by gallery index.

    Args:
        scores: [Q, N], larger is closer; NaN counts as the lowest score, so that a diverged model ranks nothing first.
        positive: bool [Q, N], at least one per query.

    Returns:
        int64 [Q].

    Raises:
        ValueError: a query has no positive.
    """
    s, p = as_numpy(scores), as_numpy(positive).astype(bool)
    return _best_ranks(s, *np.nonzero(p))


def _best_ranks(scores: npt.NDArray[Any], queries: I64, items: I64) -> I64:
    """:func:`best_ranks` of scores [Q, N], of which each positive is a query and an item: int64 [P], in this order.

    No sort is needed: the best ranked positive is the first of those with the highest score, and its rank is the number
    of items with a higher score plus those with the same score before it.
    """
    starts = np.searchsorted(queries, np.arange(len(scores)))
    if (np.diff(starts, append=len(queries)) == 0).any():
        raise ValueError("best_ranks: a query has no positive")
    if not len(scores):
        return np.zeros(0, np.int64)
    values = scores[queries, items]
    values = np.where(np.isnan(values), -np.inf, values)
    top = np.maximum.reduceat(values, starts)
    firsts = np.minimum.reduceat(np.where(values == top[queries], items, scores.shape[1]), starts)
    ranks = np.empty(len(scores), np.int64)
    for query, (line, best, first) in enumerate(zip(scores, top, firsts.tolist(), strict=True)):
        # NaN compares as lower than everything, except with the lowest score, which it equals.
        before = first if best == -np.inf else np.count_nonzero(line[:first] >= best)
        ranks[query] = before + np.count_nonzero(line[first:] > best)
    return ranks


def retrieval_ranks(image: Array, text: Array, owner: Array) -> tuple[I64, I64]:
    """Best ranks image-to-text (any of the image's captions) and text-to-image (the one image), in bounded memory.

    Args:
        image: [n, d] unit-length embeddings.
        text: [m, d] unit-length embeddings of the captions.
        owner: int [m], index of each caption's image; every image owns at least one caption.

    Returns:
        int64 ranks [n] and [m], from 0.

    Raises:
        ValueError: ``owner`` does not fit the images and captions.
    """
    zi, zt, own = as_numpy(image), as_numpy(text), as_numpy(owner)
    if len(own) != len(zt) or (len(own) and not 0 <= int(own.min()) <= int(own.max()) < len(zi)):
        raise ValueError(f"owner: {len(own)} entries for {len(zt)} captions of {len(zi)} images")
    images, texts, captions = first_of_rows(zi), first_of_rows(zt), np.argsort(own, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(own, minlength=len(zi)))])
    i2t, t2i = np.zeros(len(zi), np.int64), np.zeros(len(zt), np.int64)
    for c in _chunks(len(zi), len(zt)):
        held = captions[ends[c.start] : ends[c.stop]]
        i2t[c] = _best_ranks(tied(zi[c] @ zt.T, texts), own[held] - c.start, held)
    for c in _chunks(len(zt), len(zi)):
        t2i[c] = _best_ranks(tied(zt[c] @ zi.T, images), np.arange(c.stop - c.start), own[c])
    return i2t, t2i


def recall(ranks: I64, k: int) -> float:
    """Fraction of queries whose best positive is among the first ``k``; 0 without queries."""
    return float(np.mean(ranks < k)) if len(ranks) else 0.0


def median_rank(ranks: I64) -> int:
    """Median rank from 1, as in retrieval papers: floor(median) + 1 of ranks counted from 0; 0 without queries."""
    return int(np.floor(np.median(ranks))) + 1 if len(ranks) else 0


def recalls(image: Array, text: Array, owner: Array, ks: Sequence[int] = RECALLS) -> dict[str, float]:
    """Recall@k in both directions and their mean (``i2t_r1``, ``t2i_r1``, ``mean_r1``, ...), and the median ranks
    ``i2t_medr`` and ``t2i_medr``; arguments as in :func:`retrieval_ranks`.
    """
    return recalls_of(*retrieval_ranks(image, text, owner), ks)


def recalls_of(i2t: I64, t2i: I64, ks: Sequence[int] = RECALLS) -> dict[str, float]:
    """As :func:`recalls`, from the ranks [n] and [m] of :func:`retrieval_ranks`."""
    result: dict[str, float] = {"i2t_medr": float(median_rank(i2t)), "t2i_medr": float(median_rank(t2i))}
    for k in ks:
        result[f"i2t_r{k}"], result[f"t2i_r{k}"] = recall(i2t, k), recall(t2i, k)
        result[f"mean_r{k}"] = (result[f"i2t_r{k}"] + result[f"t2i_r{k}"]) / 2
    return result


def spread(z: npt.NDArray[Any]) -> float:
    """Spread of embeddings [n, d]: 1 - ||mean of the unit vectors||^2, in [0, 1]; 0 if all have the same direction.

    It detects collapse. Anchoring a tower to the prototype of a missing modality (RCSR, eq. 3) is minimal if the tower
    maps all items to one embedding; the spread then drops to 0, whereas recall may be low for other reasons, too.
    """
    x = np.asarray(z, dtype=np.float64)
    mean = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).mean(axis=0)
    return float(max(0.0, 1.0 - mean @ mean))


def means(by_silo: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over silos of each metric that all silos have."""
    names = sorted(set.intersection(*(set(values) for values in by_silo.values())))
    return {name: math.fsum(values[name] for values in by_silo.values()) / len(by_silo) for name in names}


def weighted_means(by_silo: Mapping[str, Mapping[str, float]], items: Mapping[str, int]) -> dict[str, float]:
    """Mean over silos of each metric that all silos have, each silo weighted by its number of items; {} for no silo."""
    if not by_silo:
        return {}
    total = math.fsum(items[silo] for silo in by_silo)
    first, *others = by_silo.values()
    names = [name for name in first if all(name in other for other in others)]
    return {name: math.fsum(items[silo] * by_silo[silo][name] for silo in by_silo) / total for name in names}


def fairness(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean, population standard deviation, worst and gap (best - worst) over silos; zeros for no silo."""
    v = np.asarray(values, dtype=np.float64)
    if not v.size:
        return {"mean": 0.0, "std": 0.0, "worst": 0.0, "gap": 0.0}
    return {"mean": float(v.mean()), "std": float(v.std()), "worst": float(v.min()), "gap": float(v.max() - v.min())}


def fairness_of(per_silo: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """``std_r1``, ``worst_r1`` and ``gap_r1`` over the silos that have a ``mean_r1``."""
    spread = fairness([values[HEADLINE] for values in per_silo.values() if HEADLINE in values])
    return {f"{name}_r1": spread[name] for name in ("std", "worst", "gap")}
