"""Retrieval metrics: recall with several captions per image, Hamming ranking, NDCG, precision-recall, fairness.

All values are fractions in [0, 1]. Ties are ordered by (distance, database index), so a value never depends on a sort's
inner workings; for Hamming ranking :func:`mean_expected_ap` gives the number that does not depend on the order at all.
Distances are [Q, N] arrays where smaller is closer; a similarity is ranked by its negative. Public hashing code leaves
ties to an unstable sort, which moves the third decimal.

These are the definitions, on whole matrices. ``fedmq.ranking`` finds the same values for galleries of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedmq.ranking import Denominator, Empty, harmonic_numbers, tie_averaged_ap

Floats = npt.NDArray[np.floating[Any]]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any] | torch.Tensor

Ties = Literal["stable", "best", "worst"]

RECALLS = (1, 5, 10)
#: Scores looked at together, so that memory stays bounded however large the gallery is.
CHUNK_SCORES = 1 << 22


def _numpy(x: Array) -> npt.NDArray[Any]:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def _chunks(queries: int, gallery: int) -> Iterator[slice]:
    """Ranges of queries whose scores fit in one chunk."""
    step = max(1, CHUNK_SCORES // max(1, gallery))
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


# --------------------------------------------------------------------------- recall
def owners(captions: Array) -> I64:
    """The image each caption belongs to, captions laid out image by image: (2, 1) -> (0, 0, 1)."""
    counts = _numpy(captions)
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts)


def best_ranks(scores: Array, positive: Array) -> I64:
    """Rank, from 0, of each query's best placed positive; ties by gallery index.

    No sort is needed: the best placed positive is the first of those with the highest score, and its rank is the number
    of items with a higher score plus those with the same score before it.

    Args:
        scores: [Q, N], larger is closer; NaN counts as the lowest score, so that a broken model cannot score.
        positive: bool [Q, N], at least one per query.
    """
    s, p = _numpy(scores), _numpy(positive).astype(bool)
    if s.shape[0] and not p.any(axis=1).all():
        raise ValueError("best_ranks: a query without any positive")
    s = np.where(np.isnan(s), -np.inf, s)
    top = np.where(p, s, -np.inf).max(axis=1, keepdims=True)
    first = (p & (s == top)).argmax(axis=1)
    before = np.arange(s.shape[1]) < first[:, None]
    ranks: I64 = ((s > top) | ((s == top) & before)).sum(axis=1).astype(np.int64)
    return ranks


def retrieval_ranks(image: Array, text: Array, owner: Array) -> tuple[I64, I64]:
    """Best ranks image-to-text (any of the image's captions) and text-to-image (the one image), in bounded memory.

    Args:
        image: [n, d] unit-length embeddings.
        text: [m, d] unit-length embeddings of the captions.
        owner: int [m], index of each caption's image; every image owns at least one caption.

    Returns:
        ranks [n] and [m], from 0.
    """
    zi, zt, own = _numpy(image), _numpy(text), _numpy(owner)
    if len(own) != len(zt) or (len(own) and not 0 <= int(own.min()) <= int(own.max()) < len(zi)):
        raise ValueError(f"owner: {len(own)} entries for {len(zt)} captions of {len(zi)} images")
    rows = np.arange(len(zi))
    i2t = [best_ranks(zi[c] @ zt.T, own[None] == rows[c, None]) for c in _chunks(len(zi), len(zt))]
    t2i = [best_ranks(zt[c] @ zi.T, own[c, None] == rows[None]) for c in _chunks(len(zt), len(zi))]
    nothing = np.zeros(0, dtype=np.int64)
    return np.concatenate([nothing, *i2t]), np.concatenate([nothing, *t2i])


def recall(ranks: I64, k: int) -> float:
    """Share of queries whose best positive is among the first ``k``; 0 for no queries."""
    return float(np.mean(ranks < k)) if len(ranks) else 0.0


def median_rank(ranks: I64) -> int:
    """floor(median) + 1 of ranks counted from 0, as retrieval papers print it (METHODS.md 8.4); 0 for no queries."""
    return int(np.floor(np.median(ranks))) + 1 if len(ranks) else 0


def recalls(image: Array, text: Array, owner: Array, ks: Sequence[int] = RECALLS) -> dict[str, float]:
    """Recall@k both ways and their mean, ``i2t_r1``, ``t2i_r1``, ``mean_r1``, ..., and the median ranks ``i2t_medr``,
    ``t2i_medr``; shapes as in retrieval_ranks.
    """
    i2t, t2i = retrieval_ranks(image, text, owner)
    result: dict[str, float] = {"i2t_medr": float(median_rank(i2t)), "t2i_medr": float(median_rank(t2i))}
    for k in ks:
        result[f"i2t_r{k}"], result[f"t2i_r{k}"] = recall(i2t, k), recall(t2i, k)
        result[f"mean_r{k}"] = (result[f"i2t_r{k}"] + result[f"t2i_r{k}"]) / 2
    return result


def per_silo_recalls(silos: Mapping[str, tuple[Array, Array, Array]]) -> dict[str, dict[str, float]]:
    """:func:`recalls` of each silo's own held-out (image, text, owner), the gallery being its own share."""
    return {name: recalls(*share) for name, share in silos.items()}


def spread(z: npt.NDArray[Any]) -> float:
    """How far embeddings [n, d] are from all pointing one way: 1 - |mean of their directions|^2, 0 to 1.

    Anchoring silos to one prototype of what they lack is least where a tower gives all items one embedding (METHODS.md
    6, eq 3); this falls to 0 then, while recall may already be bad for other reasons.
    """
    x = np.asarray(z, dtype=np.float64)
    mean = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)).mean(axis=0)
    return float(max(0.0, 1.0 - mean @ mean))


def fairness(values: Sequence[float] | F64) -> dict[str, float]:
    """Mean, population standard deviation, worst and gap (best - worst) over silos; zeros for no silo."""
    v = np.asarray(values, dtype=np.float64)
    if not v.size:
        return {"mean": 0.0, "std": 0.0, "worst": 0.0, "gap": 0.0}
    return {"mean": float(v.mean()), "std": float(v.std()), "worst": float(v.min()), "gap": float(v.max() - v.min())}


# --------------------------------------------------------------------------- Hamming ranking and mAP
def hamming(queries: Array, database: Array) -> F64:
    """Hamming distances [Q, N] of codes [Q, r] and [N, r] in {-1, +1}: (r - <q, b>) / 2."""
    q, b = _numpy(queries).astype(np.float64), _numpy(database).astype(np.float64)
    distance: F64 = 0.5 * (b.shape[1] - q @ b.T)
    return distance


def relevance(query_labels: Array, database_labels: Array) -> F64:
    """1 where two label rows [Q, C], [N, C] share at least one label, else 0 -> [Q, N]."""
    q, b = _numpy(query_labels).astype(np.float64), _numpy(database_labels).astype(np.float64)
    return (q @ b.T > 0).astype(np.float64)


def ranking(distance: Floats, relevant: Floats | None = None, ties: Ties = "stable") -> I64:
    """Database indices in ranked order [Q, N].

    Args:
        distance: [Q, N].
        relevant: 0/1 [Q, N], only for ``best`` and ``worst``.
        ties: ``stable`` by index; ``best`` relevant first; ``worst`` relevant last.
    """
    if ties == "stable":
        return np.argsort(distance, axis=1, kind="stable")
    if relevant is None:
        raise ValueError(f"ties {ties!r} needs the relevance")
    second = -relevant if ties == "best" else relevant
    return np.stack([np.lexsort((second[i], distance[i])) for i in range(len(distance))])


def average_precision(
    distance: Floats,
    relevant: Floats,
    cutoff: int | None = None,
    ties: Ties = "stable",
    denominator: Denominator = "retrieved",
) -> F64:
    """AP of each query [Q]: sum_j precision(j) rel_j / denominator over the first ``cutoff`` of the ranked list.

    Args:
        distance: [Q, N].
        relevant: 0/1 [Q, N].
        cutoff: R; None is the whole list.
        ties: see :func:`ranking`.
        denominator: ``retrieved`` relevant items among the first R (all public hashing code); ``total`` all relevant
            items; ``min`` the smaller of R and total.
    """
    top = np.take_along_axis(relevant, ranking(distance, relevant, ties), axis=1)[:, :cutoff]
    hits = top.cumsum(axis=1)
    summed = (hits / np.arange(1, top.shape[1] + 1) * top).sum(axis=1)
    total = relevant.sum(axis=1)
    below = {"retrieved": top.sum(axis=1), "total": total, "min": np.minimum(top.shape[1], total)}[denominator]
    ap: F64 = np.divide(summed, below, out=np.zeros_like(summed), where=below > 0)
    return ap


def expected_ap(distance: Floats, relevant: Floats) -> F64:
    """AP of each query [Q] averaged over all orders inside tied blocks; see ``fedmq.ranking.tie_averaged_ap``."""
    harmonic = harmonic_numbers(distance.shape[1])
    result = np.zeros(len(distance))
    for row, (d, rel) in enumerate(zip(distance, relevant, strict=True)):
        _, block = np.unique(d, return_inverse=True)
        result[row] = tie_averaged_ap(np.bincount(block), np.bincount(block, weights=rel), harmonic)
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
    ties: Ties = "stable",
    denominator: Denominator = "retrieved",
    empty: Empty = "zero",
) -> float:
    """Mean AP, or mAP@R; arguments as in :func:`average_precision`, ``empty`` as public code: zero."""
    return _mean_over_queries(average_precision(distance, relevant, cutoff, ties, denominator), relevant, empty)


def mean_expected_ap(distance: Floats, relevant: Floats, empty: Empty = "zero") -> float:
    """Mean AP over the whole list averaged over orders of ties."""
    return _mean_over_queries(expected_ap(distance, relevant), relevant, empty)


# --------------------------------------------------------------------------- NDCG, precision, recall, curves
def ndcg(
    distance: Floats,
    gains: Floats,
    n: int,
    *,
    ideal: Literal["full", "retrieved"] = "full",
    form: Literal["exp", "linear"] = "exp",
) -> float:
    """NDCG@n: DCG = sum_i g_i / log2(i + 1), over queries; 0 for a query without any gain.

    Args:
        distance: [Q, N].
        gains: graded relevance [Q, N].
        n: cut-off.
        ideal: the ideal list taken from the whole database, or the retrieved n reordered.
        form: g = 2^rel - 1, or rel itself.
    """
    g = 2.0**gains - 1 if form == "exp" else np.asarray(gains, dtype=np.float64)
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
