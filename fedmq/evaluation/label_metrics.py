"""Metrics of ranked lists at full scale: thousands of queries against hundreds of thousands of items, exactly.

One query at a time, several threads side by side: distances by counting bits, one stable sort, and from then on only
the places of the relevant items. Memory is a few arrays as long as the database, however many queries there are; sums
go in the order of the queries, so the number of threads changes nothing. ``tests/definitions.py`` has the same values
written as their definitions say, on whole matrices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedmq.evaluation import hamming
from fedmq.seeds import numpy_generator

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any] | torch.Tensor
T = TypeVar("T")

Denominator = Literal["retrieved", "total", "min"]
Empty = Literal["zero", "skip"]

#: Queries ranked by one thread before its sums join the others'.
CHUNK_QUERIES = 32
#: Similarities computed at once.
CHUNK_SCORES = 1 << 22


class Curve(NamedTuple):
    """Mean precision and recall, float64, at each place of the list or within each Hamming radius."""

    precision: F64
    recall: F64


@dataclass(frozen=True)
class RankingMetrics:
    """What one pass over the queries finds; all are fractions in [0, 1].

    Args:
        map: mean AP over the whole list, ties by (distance, database index).
        map_expected: the same averaged over all orders of tied items; does not depend on the database's order.
        map_at: R to mean AP over the first R places.
        ndcg: N to NDCG@N, the ideal list taken from the whole database.
        ndcg_retrieved: N to NDCG@N, the ideal list being the N retrieved items reordered.
        top_n: N to precision@N and recall@N, over queries with anything relevant.
        pr_rank: at each of the places of the list, over queries with anything relevant; None unless asked for.
        pr_radius: within Hamming radius 0 to bits, likewise; a query that retrieves nothing is left out of that
            radius's precision, which is NaN where none does. None unless asked for, and for cosine ranking.
    """

    map: float
    map_expected: float
    map_at: Mapping[int, float]
    ndcg: Mapping[int, float]
    ndcg_retrieved: Mapping[int, float]
    top_n: Mapping[int, tuple[float, float]]
    pr_rank: Curve | None = None
    pr_radius: Curve | None = None


# --------------------------------------------------------------------------- one ranked list
@dataclass(frozen=True)
class Ranked:
    """One query's ranked list, as far as metrics look at it.

    Args:
        places: int64 [R], places of the relevant items, from 0, ascending.
        ends: int64 [K], number of items up to the end of each block of equal distance; by distance 0 to bits where
            those are Hamming distances, so that empty blocks repeat a number.
        hits: int64 [K], number of relevant items among those.
    """

    places: I64
    ends: I64
    hits: I64


def hamming_ranked(query: hamming.Words, database: hamming.Words, relevant: Bools, bits: int) -> Ranked:
    """Rank the database by (Hamming distance to one code, index).

    Args:
        query: uint64 [W] of ``codes.words``.
        database: uint64 [W, N].
        relevant: [N].
        bits: largest possible distance.
    """
    distance = hamming.distances(query, database)
    # A stable sort of 8- or 16-bit numbers is a radix sort: linear, and ties stay in the database's order.
    order = np.argsort(distance, kind="stable")
    ends = np.cumsum(np.bincount(distance, minlength=bits + 1))
    places = np.flatnonzero(relevant[order])
    return Ranked(places, ends, np.searchsorted(places, ends))


def similarity_ranked(similarity: npt.NDArray[np.float32], relevant: Bools) -> Ranked:
    """Rank the database by (falling similarity, index); NaN comes last.

    Similarity, index and relevance of an item go into one whole number, and numbers without ties are sorted eight times
    as fast as floats whose order among equals has to be kept.

    Args:
        similarity: [N], N below 2^31.
        relevant: [N].
    """
    # Adding 0 turns -0 into 0: they are equal, and their bits are not.
    ordered = (np.where(np.isnan(similarity), np.float32(-np.inf), similarity) + np.float32(0)).view(np.int32)
    # As whole numbers positive floats keep their order, and negative ones lie the wrong way round.
    rising = ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))
    keys: npt.NDArray[np.uint64] = (~rising).view(np.uint32).astype(np.uint64) ^ np.uint64(0x80000000)
    keys <<= np.uint64(32)
    keys |= np.arange(len(keys), dtype=np.uint64) << np.uint64(1)
    keys |= relevant.astype(np.uint64)
    keys.sort()
    block = keys >> np.uint64(32)
    ends = np.append(np.flatnonzero(block[1:] != block[:-1]) + 1, [len(keys)] if len(keys) else []).astype(np.int64)
    flags = (keys & np.uint64(1)).astype(np.bool_)
    return Ranked(np.flatnonzero(flags), ends, np.cumsum(flags, dtype=np.int64)[ends - 1])


def tie_averaged_ap(items: npt.NDArray[Any], relevant: npt.NDArray[Any], harmonic: F64) -> float:
    """AP of one query averaged over all orders inside tied blocks, in closed form over the whole list.

    In a block of n items, r of them relevant, with A items and B relevant ones before it, the item at place i of the
    block is relevant with probability r/n, and given that, (i-1)(r-1)/(n-1) relevant ones precede it in the block.

    Args:
        items: [K], n of each block, nearest first.
        relevant: [K], r of each block.
        harmonic: [N + 1], 1 + 1/2 + ... + 1/k at place k.

    Returns:
        0 where nothing is relevant.
    """
    kept = relevant > 0
    if not kept.any():
        return 0.0
    before, found = np.cumsum(items) - items, np.cumsum(relevant) - relevant
    n, r, A, B = items[kept], relevant[kept], before[kept], found[kept]
    inner = np.divide(r - 1, n - 1, out=np.zeros(len(n)), where=n > 1)
    inverse = harmonic[A + n] - harmonic[A]  # sum over i of 1 / (A + i)
    precisions = (B + 1) * inverse + inner * (n - (A + 1) * inverse)
    return float((r / n * precisions).sum() / r.sum())


def harmonic_numbers(n: int) -> F64:
    """0, 1, 1 + 1/2, ..., up to 1 + ... + 1/n: float64 [n + 1]."""
    return np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, n + 1))])


@dataclass(frozen=True)
class _Asked:
    """Which values are wanted, and what they share.

    Args:
        items: length of the lists, N.
        at: R of each mAP@R.
        ndcg_at: N of each NDCG@N.
        top_n: N of each precision@N.
        denominator: of mAP@R.
        radii: distances 0 to ``radii`` have a precision and a recall of their own; 0 for none.
        rank_curve: whether sums are kept for each place of the list.
    """

    items: int
    at: tuple[int, ...]
    ndcg_at: tuple[int, ...]
    top_n: tuple[int, ...]
    denominator: Denominator
    radii: int
    rank_curve: bool

    def __post_init__(self) -> None:
        if any(n < 1 for n in (*self.at, *self.ndcg_at, *self.top_n)):
            raise ValueError("places of a list are counted from 1")


@dataclass(frozen=True)
class _Values:
    """One query's values, each vector as long as what was asked for."""

    relevant: int
    ap: float
    expected: float
    at: F64
    ndcg: F64
    ndcg_retrieved: F64
    top_hits: I64
    radius_hits: I64
    radius_found: I64


class _Lists:
    """Values of single ranked lists; what all of them need is computed once."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._harmonic = harmonic_numbers(asked.items)
        self._places = np.arange(1, asked.items + 1, dtype=np.float64)
        self._discount = 1 / np.log2(self._places + 1)
        self._ideal = np.concatenate([[0.0], np.cumsum(self._discount)])

    def values(self, ranked: Ranked) -> _Values:
        """All that was asked for of one list."""
        asked, places = self._asked, ranked.places
        total = len(places)
        precisions = self._places[:total] / (places + 1)
        expected = tie_averaged_ap(np.diff(ranked.ends, prepend=0), np.diff(ranked.hits, prepend=0), self._harmonic)
        hits = np.searchsorted(places, asked.ndcg_at)
        gained = np.array([self._discount[places[:found]].sum() for found in hits])
        best = self._ideal[np.minimum(asked.ndcg_at, total)] if len(hits) else gained
        radii = slice(0, asked.radii + 1 if asked.radii else 0)
        return _Values(
            relevant=total,
            ap=float(precisions.sum() / total) if total else 0.0,
            expected=expected,
            at=np.array([self._ap_at(n, places, precisions) for n in asked.at]),
            ndcg=_ratio(gained, best),
            ndcg_retrieved=_ratio(gained, self._ideal[hits]),
            top_hits=np.searchsorted(places, asked.top_n),
            # Copies: a view would keep the whole list in memory.
            radius_hits=ranked.hits[radii].copy(),
            radius_found=ranked.ends[radii].copy(),
        )

    def _ap_at(self, cutoff: int, places: I64, precisions: F64) -> float:
        hits, total = int(np.searchsorted(places, cutoff)), len(places)
        below = {"retrieved": hits, "total": total, "min": min(cutoff, self._asked.items, total)}
        denominator = below[self._asked.denominator]
        return float(precisions[:hits].sum() / denominator) if denominator else 0.0


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> F64:
    """Quotients, 0 where ``below`` is 0."""
    found: F64 = np.divide(above, below, out=np.zeros(np.shape(above)), where=np.asarray(below) > 0)
    return found


# --------------------------------------------------------------------------- all queries
@dataclass(frozen=True)
class _Chunk:
    """Values of some queries, and their sums for each place of the list where those are wanted.

    Args:
        values: of each query, in order.
        hits: int64 [N], how many queries have a relevant item at a place; empty where not wanted.
        recall: float64 [N], sum over queries of their recall gained at a place; likewise.
    """

    values: list[_Values]
    hits: I64
    recall: F64


def _side_by_side(work: Callable[[T], _Chunk], parts: Iterable[T]) -> Iterator[_Chunk]:
    """``map(work, parts)`` in as many threads as torch may use, in order, reading only a few parts ahead."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield from map(work, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Chunk]] = deque()
        for part in parts:
            waiting.append(pool.submit(work, part))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _summarise(
    parts: Iterable[T], ranked: Callable[[T], Iterator[Ranked]], asked: _Asked, empty: Empty
) -> RankingMetrics:
    """Rank the queries part by part and take the means."""
    lists, length = _Lists(asked), asked.items if asked.rank_curve else 0

    def work(part: T) -> _Chunk:
        chunk = _Chunk([], np.zeros(length, np.int64), np.zeros(length))
        for each in ranked(part):
            chunk.values.append(lists.values(each))
            if length:
                chunk.hits[each.places] += 1
                chunk.recall[each.places] += 1 / max(1, len(each.places))
        return chunk

    values: list[_Values] = []
    hits, recall = np.zeros(length, np.int64), np.zeros(length)
    for chunk in _side_by_side(work, parts):
        values += chunk.values
        hits += chunk.hits
        recall += chunk.recall
    some = [each for each in values if each.relevant]
    counted = values if empty == "zero" else some
    at, ndcg = np.array([each.at for each in counted]), np.array([each.ndcg for each in values])
    retrieved = np.array([each.ndcg_retrieved for each in values])
    curve = None
    if asked.rank_curve:
        queries = max(1, len(some))
        curve = Curve(np.cumsum(hits) / np.arange(1, length + 1) / queries, np.cumsum(recall) / queries)
    return RankingMetrics(
        map=_mean([each.ap for each in counted]),
        map_expected=_mean([each.expected for each in counted]),
        map_at={n: _mean(at[:, i]) if len(at) else 0.0 for i, n in enumerate(asked.at)},
        ndcg={n: _mean(ndcg[:, i]) if len(ndcg) else 0.0 for i, n in enumerate(asked.ndcg_at)},
        ndcg_retrieved={n: _mean(retrieved[:, i]) if len(retrieved) else 0.0 for i, n in enumerate(asked.ndcg_at)},
        top_n={n: _precision_recall(some, i, n) for i, n in enumerate(asked.top_n)},
        pr_rank=curve,
        pr_radius=_radius_curve(some, asked.radii) if asked.radii else None,
    )


def _mean(values: Sequence[float] | F64) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _precision_recall(some: Sequence[_Values], place: int, n: int) -> tuple[float, float]:
    hits = [int(each.top_hits[place]) for each in some]
    return _mean([h / n for h in hits]), _mean([h / each.relevant for h, each in zip(hits, some, strict=True)])


def _radius_curve(some: Sequence[_Values], radii: int) -> Curve:
    if not some:
        return Curve(np.full(radii + 1, np.nan), np.full(radii + 1, np.nan))
    hits = np.stack([each.radius_hits for each in some])
    found = np.stack([each.radius_found for each in some])
    retrieving = (found > 0).sum(axis=0)
    summed = _ratio(hits, found).sum(axis=0)
    precision = np.divide(summed, retrieving, out=np.full(radii + 1, np.nan), where=retrieving > 0)
    return Curve(precision, (hits / np.array([each.relevant for each in some])[:, None]).mean(axis=0))


def _label_words(labels: Array, items: int) -> hamming.Words:
    """Multi-hot labels [n, L] as words."""
    found = hamming.as_numpy(labels)
    if found.ndim != 2 or not found.shape[1] or len(found) != items:
        raise ValueError(f"labels of shape {list(found.shape)} for {items} items: multi-hot [items, labels] is wanted")
    return hamming.words(np.packbits(found > 0, axis=1))


def _labels_of_both(queries: Array, gallery: Array, asked: int, items: int) -> tuple[hamming.Words, hamming.Words]:
    """Labels of queries and gallery as words; as many labels there as here, or a bit of one would be met by none."""
    found = _label_words(queries, asked), _label_words(gallery, items)
    here, there = (hamming.as_numpy(labels).shape[1] for labels in (queries, gallery))
    if here != there:
        raise ValueError(f"queries of {here} labels, gallery of {there}")
    return found


def _order(items: int, seed: int | None) -> I64 | slice:
    return slice(None) if seed is None else numpy_generator(seed, "database order").permutation(items)


def hamming_metrics(
    query_codes: Array,
    gallery_codes: Array,
    query_labels: Array,
    gallery_labels: Array,
    *,
    at: Sequence[int] = (50,),
    ndcg_at: Sequence[int] = (),
    top_n: Sequence[int] = (),
    curves: bool = False,
    order_seed: int | None = None,
    bits: int | None = None,
    denominator: Denominator = "retrieved",
    empty: Empty = "zero",
) -> RankingMetrics:
    """Hamming ranking of codes, an item being relevant where it shares at least one label.

    Args:
        query_codes: [Q, r], signs are taken (0 is +1); or packed uint8 [Q, bytes] of ``codes.pack``.
        gallery_codes: [N, r] or [N, bytes], likewise.
        query_labels: multi-hot [Q, L].
        gallery_labels: multi-hot [N, L].
        at: cut-offs R of mAP@R.
        ndcg_at: cut-offs N of NDCG@N; gains are 0 or 1, for which 2^rel - 1 and rel are the same.
        top_n: cut-offs N of precision@N and recall@N.
        curves: precision and recall at every place of the list and within every radius, too.
        order_seed: shuffles the gallery first. Ties are ordered by index, and a gallery that lies sorted by class would
            leak its labels into them; None takes the order as it is.
        bits: r of packed codes, where it is not a multiple of 8; only ``pr_radius`` depends on it.
        denominator: of mAP@R: relevant items among the first R (public hashing code), all relevant ones, or the
            smaller of R and those.
        empty: a query with nothing relevant counts 0 in mAP and mAP@R, or is left out (FedCMR). NDCG counts it 0, and
            precision and recall leave it out, in either case.

    Raises:
        ValueError: shapes that do not belong together, or a cut-off below 1.
    """
    queries, gallery = hamming.packed_codes(query_codes), hamming.packed_codes(gallery_codes)
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(f"query codes of {queries.shape[1]} bytes, gallery codes of {gallery.shape[1]}")
    given = hamming.as_numpy(gallery_codes)
    length = bits or (8 if given.dtype == np.uint8 else 1) * given.shape[1]
    order = _order(len(gallery), order_seed)
    query, database = hamming.words(queries), hamming.words(gallery[order])
    query_label, label = _labels_of_both(query_labels, gallery_labels, len(queries), len(gallery))
    label = label[:, order]
    asked = _Asked(len(gallery), tuple(at), tuple(ndcg_at), tuple(top_n), denominator, length if curves else 0, curves)

    def ranked(part: slice) -> Iterator[Ranked]:
        for code, own in zip(query.T[part], query_label.T[part], strict=True):
            yield hamming_ranked(code, database, hamming.shared(own, label), length)

    parts = (slice(start, start + CHUNK_QUERIES) for start in range(0, len(queries), CHUNK_QUERIES))
    return _summarise(parts, ranked, asked, empty)


def cosine_metrics(
    query: Array,
    gallery: Array,
    query_labels: Array,
    gallery_labels: Array,
    *,
    at: Sequence[int] = (50,),
    ndcg_at: Sequence[int] = (),
    top_n: Sequence[int] = (),
    curves: bool = False,
    order_seed: int | None = None,
    denominator: Denominator = "retrieved",
    empty: Empty = "zero",
) -> RankingMetrics:
    """Cosine ranking of real-valued embeddings; similarities are computed in float32.

    Args:
        query: [Q, d]; brought to unit length here, a zero vector stays zero.
        gallery: [N, d], likewise.
        query_labels: as the rest, see :func:`hamming_metrics`; there is no ``pr_radius``.
        gallery_labels: multi-hot [N, L].
        at: cut-offs R of mAP@R.
        ndcg_at: cut-offs N of NDCG@N.
        top_n: cut-offs N of precision@N and recall@N.
        curves: precision and recall at every place of the list, too.
        order_seed: shuffles the gallery first.
        denominator: of mAP@R.
        empty: whether a query with nothing relevant counts in the mAP; see :func:`hamming_metrics`.

    Raises:
        ValueError: shapes that do not belong together, or a cut-off below 1.
    """
    first, second = (torch.nn.functional.normalize(torch.as_tensor(each).float(), dim=1) for each in (query, gallery))
    order = _order(len(second), order_seed)
    second = second[torch.from_numpy(order)] if isinstance(order, np.ndarray) else second
    query_label, label = _labels_of_both(query_labels, gallery_labels, len(first), len(second))
    label = label[:, order]
    asked = _Asked(len(second), tuple(at), tuple(ndcg_at), tuple(top_n), denominator, 0, curves)
    step = max(1, min(CHUNK_QUERIES, CHUNK_SCORES // max(1, len(second))))

    def products() -> Iterator[tuple[npt.NDArray[np.float32], hamming.Words]]:
        for start in range(0, len(first), step):
            part = slice(start, start + step)
            yield (first[part] @ second.T).cpu().numpy(), query_label[:, part]

    def ranked(part: tuple[npt.NDArray[np.float32], hamming.Words]) -> Iterator[Ranked]:
        for similarity, own in zip(part[0], part[1].T, strict=True):
            yield similarity_ranked(similarity, hamming.shared(own, label))

    return _summarise(products(), ranked, asked, empty)
