"""Recall@k with several captions per image, the spread of embeddings, and means and fairness over silos.

Recalls are fractions in [0, 1]. Ties are broken by gallery index, so that values do not depend on the sorting
algorithm. Metrics that use labels (mAP, NDCG, precision and recall) are in ``label_metrics``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
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
#: Number of distinct images in a block of scores, and maximum number of captions in it: if images have k captions each,
#: a block has k times as many captions as images. Blocks bound memory, and products of this size are fast.
BLOCK, MOST_CAPTIONS = 512, 4096


def first_of_rows(vectors: Array) -> I64 | None:
    """The first row equal to each row of vectors [n, d], int64 [n]; None if all rows differ.

    Rows of zeros count as different: their products are all zero.
    """
    first = same_rows(as_numpy(vectors) + np.float32(0))  # -0 equals 0
    return None if np.array_equal(first, np.arange(len(first))) else first


def tied(scores: npt.NDArray[Any], first: I64 | None) -> npt.NDArray[Any]:
    """Make the scores [Q, N] of equal gallery rows equal, in place: a matrix product may round by a row's place.

    ``first`` is :func:`first_of_rows` of the gallery.
    """
    if first is not None:
        repeated = np.flatnonzero(first != np.arange(len(first)))
        scores[:, repeated] = scores[:, first[repeated]]
    return scores


@dataclass(frozen=True, eq=False)
class _Items:
    """The items of a modality, grouped by vector: equal vectors are scored once, so that their scores are equal."""

    vectors: npt.NDArray[Any]  # [n, d], of all items
    distinct: I64  # int64 [u], for each distinct vector, an item that has it
    place: I64  # int64 [n], index of each item's vector in ``distinct``
    order: I64  # int64 [n], the items sorted by ``place``, and by index if they have the same vector
    starts: I64  # int64 [u + 1], where the items of each distinct vector begin in ``order``
    keys: I64  # int64 [n], place * n + item of the items in ``order``, ascending
    block: int  # number of distinct vectors in a block

    @classmethod
    def of(cls, vectors: npt.NDArray[Any], by: I64, block: int) -> _Items:
        """Group items by vector; the distinct vectors are sorted by ``by``, int64 [n], a number of each item."""
        n, items = len(vectors), np.arange(len(vectors))
        first = first_of_rows(vectors)
        first = items if first is None else first
        distinct = np.flatnonzero(first == items)
        distinct = distinct[np.argsort(by[distinct], kind="stable")]
        places = np.empty(n, np.int64)
        places[distinct] = np.arange(len(distinct))
        place = places[first]
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(distinct) + 1))
        return cls(vectors, distinct, place, order, starts, place[order] * n + order, block)

    def blocks(self) -> Iterator[int]:
        """The numbers of the blocks, from 0."""
        return iter(range(-(-len(self.distinct) // self.block)))

    def span(self, block: int) -> tuple[int, int]:
        """First index in ``distinct`` of a block's vectors, and the index after the last one."""
        start = block * self.block
        return start, min(start + self.block, len(self.distinct))

    def rows(self, block: int) -> npt.NDArray[Any]:
        """The distinct vectors of a block, [b, d]."""
        return self.vectors[self.distinct[slice(*self.span(block))]]


def _scores(image: npt.NDArray[Any], text: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scores [a, b] of images [a, d] and captions [b, d]; NaN becomes the lowest score."""
    scores = image @ text.T
    return np.where(np.isnan(scores), -np.inf, scores) if np.isnan(scores.max(initial=-np.inf)) else scores


def _own_scores(images: _Items, texts: _Items, owner: I64) -> npt.NDArray[Any]:
    """The score of each caption with its image, [m].

    It is computed in the same blocks as all other scores, so that it has the same bits. The distinct captions are
    sorted by image, so that few blocks hold such a score.
    """
    own = np.empty(len(owner), np.result_type(images.vectors, texts.vectors))
    row, column = images.place[owner], texts.place
    text_blocks = max(1, len([*texts.blocks()]))
    block = row // images.block * text_blocks + column // texts.block
    order = np.argsort(block, kind="stable")
    for held in np.split(order, np.flatnonzero(np.diff(block[order])) + 1):
        if len(held):
            image_block, text_block = divmod(int(block[held[0]]), text_blocks)
            scores = _scores(images.rows(image_block), texts.rows(text_block))
            own[held] = scores[row[held] - images.span(image_block)[0], column[held] - texts.span(text_block)[0]]
    return own


@dataclass(frozen=True, eq=False)
class _Ranking:
    """Counts the items that rank before each query's best positive, block by block."""

    queries: _Items
    gallery: _Items
    best: npt.NDArray[Any]  # [n], score of each query's best positive
    first: I64  # int64 [n], the first positive with this score
    ranks: I64  # int64 [n], number of items found before it so far
    _adding: Lock = field(default_factory=Lock)

    def add(self, scores: npt.NDArray[Any], query_block: int, gallery_block: int) -> None:
        """Count the items of a block of scores [a, b] of distinct vectors."""
        (start, end), vectors = self.queries.span(query_block), self.gallery.span(gallery_block)
        queries = self.queries.order[self.queries.starts[start] : self.queries.starts[end]]
        if len(queries) == end - start:
            self._add(scores, queries, *vectors)
            return
        for some in np.array_split(queries, -(-len(queries) // BLOCK)):
            self._add(scores[self.queries.place[some] - start], some, *vectors)

    def _add(self, scores: npt.NDArray[Any], queries: I64, start: int, end: int) -> None:
        best, first, starts = self.best[queries, None], self.first[queries], self.gallery.starts[start : end + 1]
        # Vectors that several items share, and the number of items of each after the first.
        several = np.flatnonzero(np.diff(starts) > 1)
        further = np.diff(starts)[several] - 1
        above = scores > best
        found = _count(above)
        if len(several):
            found += above[:, several] @ further
        level = scores == best
        if level.any():  # the items with the same score before the first positive
            found += _count(level & (self.gallery.order[starts[:-1]] < first[:, None]))
            query, column = np.nonzero(level[:, several])
            until = (several[column] + start) * len(self.gallery.place) + first[query]
            before = np.searchsorted(self.gallery.keys, until) - starts[several[column]] - 1
            found += np.bincount(query, np.maximum(before, 0), minlength=len(queries)).astype(np.int64)
        with self._adding:
            self.ranks[queries] += found


def _count(flags: npt.NDArray[np.bool_]) -> I64:
    """Number of true flags in each row of [a, b], int64 [a]; b is less than 2^16."""
    counts: npt.NDArray[np.uint16] = flags.view(np.uint8).sum(axis=1, dtype=np.uint16)
    return counts.astype(np.int64)


def retrieval_ranks(image: Array, text: Array, owner: Array, threads: int | None = None) -> tuple[I64, I64]:
    """Best ranks image-to-text (any of the image's captions) and text-to-image (the one image), in bounded memory.

    Ties are broken by gallery index. NaN counts as the lowest score, so that a diverged model ranks nothing first. No
    sort is needed: the rank of a query's best positive is the number of items with a higher score plus those with the
    same score before it. Each score is computed once for both directions, except that those of positives are computed
    twice.

    Args:
        image: [n, d] unit-length embeddings.
        text: [m, d] unit-length embeddings of the captions.
        owner: int [m], index of each caption's image; every image owns at least one caption.
        threads: number of threads that compute scores; None takes one, which NumPy may share among its own.

    Returns:
        int64 ranks [n] and [m], from 0.

    Raises:
        ValueError: ``owner`` does not fit the images and captions, or an image has no caption.
    """
    zi, zt, own = as_numpy(image), as_numpy(text), as_numpy(owner)
    if len(own) != len(zt) or (len(own) and not 0 <= int(own.min()) <= int(own.max()) < len(zi)):
        raise ValueError(f"owner: {len(own)} entries for {len(zt)} captions of {len(zi)} images")
    i2t, t2i = np.zeros(len(zi), np.int64), np.zeros(len(zt), np.int64)
    if not np.bincount(own, minlength=len(zi)).all():
        raise ValueError("owner: an image without a caption")
    if not len(zi):
        return i2t, t2i
    captions_per_block = min(MOST_CAPTIONS, max(1, BLOCK * len(zt) // len(zi)))
    images, texts = _Items.of(zi, np.arange(len(zi)), BLOCK), _Items.of(zt, own, captions_per_block)
    scores = _own_scores(images, texts, own)
    captions = np.argsort(own, kind="stable")
    begins = np.searchsorted(own[captions], np.arange(len(zi)))
    best = np.maximum.reduceat(scores[captions], begins)
    firsts = np.minimum.reduceat(np.where(scores == best[own], np.arange(len(zt)), len(zt))[captions], begins)
    by_image, by_text = _Ranking(images, texts, best, firsts, i2t), _Ranking(texts, images, scores, own, t2i)

    def add(image_block: int) -> None:
        rows = images.rows(image_block)
        for text_block in texts.blocks():
            block = _scores(rows, texts.rows(text_block))
            by_image.add(block, image_block, text_block)
            by_text.add(block.T, text_block, image_block)

    with ThreadPoolExecutor(threads or 1) as pool:
        list(pool.map(add, images.blocks()))
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


def chance_std(value: float, items: Sequence[int]) -> float:
    """Standard deviation of R@1 over silos that is expected by chance if the model is equally good for all silos.

    The binomial error of the mean of both directions, as if all queries were independent: sqrt(mean of p (1 - p) / 2n).
    p is ``value``, the mean R@1 over silos, n the number of held-out items of each silo, at least one.
    """
    return math.sqrt(value * (1 - value) * float(np.mean([1 / (2 * n) for n in items])))


def fairness_of(per_silo: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """``std_r1``, ``worst_r1`` and ``gap_r1`` over the silos that have a ``mean_r1``."""
    spread = fairness([values[HEADLINE] for values in per_silo.values() if HEADLINE in values])
    return {f"{name}_r1": spread[name] for name in ("std", "worst", "gap")}
