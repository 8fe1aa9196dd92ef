"""Exact label metrics of ranked lists (mAP, NDCG, precision, recall) for large galleries.

Queries are ranked a few at a time, several threads in parallel: distances, one stable sort, then only the ranks of the
relevant items. Memory is a few arrays of the gallery's length per thread, independent of the number of queries. Sums
are taken in the order of the queries, so that results do not depend on the number of threads. ``tests/definitions.py``
computes the same values directly from their definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, starmap
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedmq.evaluation import hamming
from fedmq.evaluation.hamming import Array
from fedmq.evaluation.recall import first_of_rows, tied
from fedmq.seeds import numpy_generator

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Denominator = Literal["retrieved", "total", "min"]
Empty = Literal["zero", "skip"]

#: Queries per task of a thread.
CHUNK_QUERIES = 32
#: Number of similarities computed at a time.
CHUNK_SCORES = 1 << 22
#: Number of similarities sorted at a time; threads would wait for each other between shorter steps.
CHUNK_RANKED = 1 << 17


class Curve(NamedTuple):
    """Mean precision and recall, float64, at each rank or within each Hamming radius."""

    precision: F64
    recall: F64


@dataclass(frozen=True)
class RankingMetrics:
    """Label metrics, all fractions in [0, 1]."""

    map: float  # mean average precision over the whole list, ties broken by database index
    # The same averaged over all orders of tied items, which is independent of the database's order; NaN if it was not
    # requested.
    map_expected: float
    map_at: Mapping[int, float]  # mAP over the first R items, by R
    ndcg: Mapping[int, float]  # NDCG@N by N, the ideal list taken from the whole database
    ndcg_retrieved: Mapping[int, float]  # NDCG@N by N, the ideal list being the N retrieved items reordered
    top_n: Mapping[int, tuple[float, float]]  # precision@N and recall@N by N, over queries with a relevant item
    # Precision and recall at each rank, over queries with a relevant item; None unless requested.
    pr_rank: Curve | None = None
    # The same within each Hamming radius from 0 to the code length. Queries that retrieve nothing within a radius are
    # left out of its precision, which is NaN if no query does. None unless requested, and for cosine ranking.
    pr_radius: Curve | None = None
    # The values of each query; None for fabricated metrics.
    queries: Queries | None = field(default=None, repr=False, compare=False)

    def of(self, rows: npt.NDArray[np.int64]) -> RankingMetrics:
        """The metrics of some of the queries, by index, in the same gallery; without the curve by rank."""
        if self.queries is None:
            raise ValueError("metrics without the values of each query")
        return self.queries.averaged(rows)


# --------------------------------------------------------------------------- one ranked list
@dataclass(frozen=True)
class Ranked:
    """One query's ranked list, reduced to what metrics need."""

    places: I64  # int64 [R], ranks of the relevant items, from 0, ascending
    # Int64 [K], number of items up to the end of each block of ties. For Hamming distances there is a block for each
    # distance from 0 to bits, possibly empty.
    ends: I64
    hits: I64  # int64 [K], number of relevant items among those


def hamming_ranked(query: hamming.Words, database: hamming.Words, relevant: Bools, bits: int) -> Ranked:
    """Rank the database by (Hamming distance to one code, index).

    Args:
        query: [W], one column of :func:`hamming.words`.
        database: [W, N], likewise.
        relevant: bool [N].
        bits: largest possible distance.
    """
    from scipy.sparse import csr_array  # noqa: PLC0415 - a tenth of the imports of every run

    distance = hamming.distances(query, database)
    # One row of a sparse matrix, whose columns are the distances. SciPy sorts it by column by counting: linear, and in
    # the database's order within a column. It moves the flags along, which a sort of indices would look up afterwards.
    columns, whole = 8 * database.itemsize * len(database) + 1, np.array([0, len(distance)], np.int32)
    row = csr_array((relevant, distance.astype(np.int32), whole), shape=(1, columns)).tocsc()
    ends, places = row.indptr[1 : bits + 2].astype(np.int64), np.flatnonzero(row.data)
    return Ranked(places, ends, np.searchsorted(places, ends))


def similarity_ranked(similarity: npt.NDArray[np.float32], relevant: Bools, *, ties: bool = True) -> Iterator[Ranked]:
    """Rank the database for each of r queries by (descending similarity, index); NaN comes last.

    Args:
        similarity: float32 [r, N].
        relevant: bool [r, N].
        ties: whether to find the blocks of ties; without them, ``ends`` and ``hits`` are empty.
    """
    if np.isnan(similarity.max(initial=-np.inf)):  # the maximum of any NaN is NaN
        similarity = np.where(np.isnan(similarity), np.float32(-np.inf), similarity)
    # Adding 0 turns -0 into 0: they are equal but differ in their bits.
    bits = (similarity + np.float32(0)).view(np.int32)
    # The bits of negative floats rise as these fall. Those of positive ones are inverted, all but the sign.
    bits ^= ~(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)
    # Keys, then indices, then flags in one number each: no two are equal, so that any sort orders ties by index. NumPy
    # sorts them with vector instructions.
    items = bits.view(np.uint32).astype(np.uint64) << np.uint64(32)
    items |= np.arange(0, 2 * items.shape[1], 2, dtype=np.uint64)
    items |= relevant
    items.sort(axis=1)
    flags = (items & np.uint64(1)).astype(np.bool_)
    for row, ranked in zip(flags, items, strict=True):
        places, ends = np.flatnonzero(row), np.zeros(0, np.int64)
        if ties:
            rising = ranked >> np.uint64(32)
            ends = np.flatnonzero(np.append(rising[1:] != rising[:-1], [True] * (len(rising) > 0))) + 1
        yield Ranked(places, ends, np.searchsorted(places, ends))


def tie_averaged_ap(ends: I64, hits: I64, harmonic: F64) -> float:
    """AP of one query averaged over all orders of tied items, in closed form; 0 if no item is relevant.

    In a block of n tied items, r of them relevant, with A items and B relevant items before the block, the item at
    position i of the block is relevant with probability r/n; given that, (i-1)(r-1)/(n-1) relevant items are expected
    before it in the block.

    Args:
        ends: int64 [K], number of items up to the end of each block, nearest first.
        hits: int64 [K], number of relevant items among those.
        harmonic: [N + 1], 1 + 1/2 + ... + 1/k at index k.
    """
    ends, hits = np.concatenate([[0], ends]), np.concatenate([[0], hits])
    kept = np.flatnonzero(hits[1:] != hits[:-1])
    if not len(kept):
        return 0.0
    A, B = ends[kept], hits[kept]
    n, r = ends[kept + 1] - A, hits[kept + 1] - B
    inner = np.divide(r - 1, n - 1, out=np.zeros(len(n)), where=n > 1)
    inverse = harmonic[A + n] - harmonic[A]  # sum over i of 1 / (A + i)
    precisions = (B + 1) * inverse + inner * (n - (A + 1) * inverse)
    return float((r / n * precisions).sum() / r.sum())


_Ranker = Callable[[slice], Iterator[Iterable[Ranked]]]  # ranks the queries of a block, part by part


@dataclass(frozen=True)
class _Requested:
    """The requested metrics."""

    items: int  # length N of the ranked lists
    at: tuple[int, ...]  # R of each mAP@R
    ndcg_at: tuple[int, ...]  # N of each NDCG@N
    top_n: tuple[int, ...]  # N of each precision@N and recall@N
    denominator: Denominator  # denominator of mAP@R
    radii: int  # largest Hamming radius of the curve by radius; 0 for no such curve
    rank_curve: bool  # whether to compute the curve by rank
    expected: bool  # whether to compute the values averaged over orders of ties

    def __post_init__(self) -> None:
        if min((*self.at, *self.ndcg_at, *self.top_n), default=1) < 1:
            raise ValueError("cut-offs must be at least 1")


@dataclass(frozen=True)
class _Values:
    """Values of one query; each vector has an entry per requested cut-off or radius."""

    relevant: int
    ap: float
    expected: float
    at: F64
    ndcg: F64
    ndcg_retrieved: F64
    top_hits: I64
    radius_hits: I64
    radius_found: I64


_NOTHING: F64 = np.zeros(0)  # values at no cut-off


class _Lists:
    """Computes the values of ranked lists from tables that all lists share."""

    def __init__(self, requested: _Requested) -> None:
        self._requested = requested
        self._places = np.arange(1, requested.items + 1, dtype=np.float64)
        self._harmonic = np.concatenate([[0.0], np.cumsum(1 / self._places)])
        self._discount = 1 / np.log2(self._places + 1)
        self._ideal = np.concatenate([[0.0], np.cumsum(self._discount)])

    def values(self, ranked: Ranked) -> _Values:
        """The requested values of one list."""
        requested, places = self._requested, ranked.places
        total = len(places)
        precisions: F64 = np.add(places, 1, dtype=np.float64)
        np.divide(self._places[:total], precisions, out=precisions)
        expected = tie_averaged_ap(ranked.ends, ranked.hits, self._harmonic) if requested.expected else math.nan
        ndcg, ndcg_retrieved = self._ndcg_at(places) if requested.ndcg_at else (_NOTHING, _NOTHING)
        radii = slice(0, requested.radii + 1 if requested.radii else 0)
        return _Values(
            relevant=total,
            ap=float(precisions.sum() / total) if total else 0.0,
            expected=expected,
            at=np.array([self._ap_at(n, places, precisions) for n in requested.at]),
            ndcg=ndcg,
            ndcg_retrieved=ndcg_retrieved,
            top_hits=np.searchsorted(places, requested.top_n),
            # Copies: a view would keep the whole list in memory.
            radius_hits=ranked.hits[radii].copy(),
            radius_found=ranked.ends[radii].copy(),
        )

    def _ndcg_at(self, places: I64) -> tuple[F64, F64]:
        """NDCG at each requested cut-off, with both ideal lists."""
        hits = np.searchsorted(places, self._requested.ndcg_at)
        dcg = np.array([self._discount[places[:count]].sum() for count in hits])
        ideal = self._ideal[np.minimum(self._requested.ndcg_at, len(places))]
        return _ratio(dcg, ideal), _ratio(dcg, self._ideal[hits])

    def _ap_at(self, cutoff: int, places: I64, precisions: F64) -> float:
        hits, total = int(np.searchsorted(places, cutoff)), len(places)
        below = {"retrieved": hits, "total": total, "min": min(cutoff, self._requested.items, total)}
        denominator = below[self._requested.denominator]
        return float(precisions[:hits].sum() / denominator) if denominator else 0.0


def _ratio(above: npt.NDArray[Any], below: npt.NDArray[Any]) -> F64:
    """Quotients, 0 where ``below`` is 0."""
    result: F64 = np.divide(above, below, out=np.zeros(np.shape(above)), where=np.asarray(below) > 0)
    return result


# --------------------------------------------------------------------------- all queries
@dataclass(frozen=True)
class _Chunk:
    """Values of some queries, and sums over them for the curve by rank."""

    values: list[_Values]  # values of each query, in order
    hits: I64  # int64 [N], number of queries with a relevant item at each rank; empty unless requested
    recall: F64  # float64 [N], sum over queries of the recall gained at each rank; likewise


def _in_threads(work: Callable[[slice], list[_Chunk]], blocks: list[slice], threads: int | None) -> Iterator[_Chunk]:
    """The work on each block, in order, on some threads; None takes as many as torch, which then has one in each."""
    import torch  # noqa: PLC0415 - the audit of message logs does without torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or before) as pool:
            yield from chain.from_iterable(pool.map(work, blocks))
    finally:
        torch.set_num_threads(before)


def _rows(array: npt.NDArray[Any], step: int) -> Iterator[npt.NDArray[Any]]:
    """The rows of an array, ``step`` at a time."""
    return (array[start : start + step] for start in range(0, len(array), step))


def _summarise(
    blocks: list[slice], ranked: _Ranker, requested: _Requested, empty: Empty, threads: int | None
) -> RankingMetrics:
    """Rank the queries block by block, in each of them part by part, and average their values."""
    lists, length = _Lists(requested), requested.items if requested.rank_curve else 0

    def chunk_of(part: Iterable[Ranked]) -> _Chunk:
        chunk = _Chunk([], np.zeros(length, np.int64), np.zeros(length))
        for query in part:
            chunk.values.append(lists.values(query))
            if length:
                chunk.hits[query.places] += 1
                chunk.recall[query.places] += 1 / max(1, len(query.places))
        return chunk

    values: list[_Values] = []
    hits, recall = np.zeros(length, np.int64), np.zeros(length)
    for chunk in _in_threads(lambda block: [*map(chunk_of, ranked(block))], blocks, threads):
        values += chunk.values
        hits += chunk.hits
        recall += chunk.recall
    curve = None
    if requested.rank_curve:
        queries = max(1, sum(query.relevant > 0 for query in values))
        curve = Curve(np.cumsum(hits) / np.arange(1, length + 1) / queries, np.cumsum(recall) / queries)
    return replace(Queries(tuple(values), requested, empty).averaged(), pr_rank=curve)


@dataclass(frozen=True)
class Queries:
    """The values of each query, in order, to be averaged over any of them."""

    values: tuple[_Values, ...]
    requested: _Requested
    empty: Empty

    def averaged(self, rows: npt.NDArray[np.int64] | None = None) -> RankingMetrics:
        """The metrics of some queries, by index, or of all, without the curve by rank."""
        values = self.values if rows is None else tuple(self.values[row] for row in rows.tolist())
        some, requested = [query for query in values if query.relevant], self.requested
        counted = values if self.empty == "zero" else some
        at, ndcg = np.array([query.at for query in counted]), np.array([query.ndcg for query in values])
        retrieved = np.array([query.ndcg_retrieved for query in values])
        return RankingMetrics(
            map=_mean([query.ap for query in counted]),
            map_expected=_mean([query.expected for query in counted]),
            map_at={n: _mean(at[:, i]) if len(at) else 0.0 for i, n in enumerate(requested.at)},
            ndcg={n: _mean(ndcg[:, i]) if len(ndcg) else 0.0 for i, n in enumerate(requested.ndcg_at)},
            ndcg_retrieved={n: _mean(retrieved[:, i]) if len(values) else 0.0 for i, n in enumerate(requested.ndcg_at)},
            top_n={n: _precision_recall(some, i, n) for i, n in enumerate(requested.top_n)},
            pr_radius=_radius_curve(some, requested.radii) if requested.radii else None,
            queries=self,
        )


def _mean(values: Sequence[float] | F64) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _precision_recall(some: Sequence[_Values], place: int, n: int) -> tuple[float, float]:
    hits = [int(query.top_hits[place]) for query in some]
    return _mean([h / n for h in hits]), _mean([h / query.relevant for h, query in zip(hits, some, strict=True)])


def _radius_curve(some: Sequence[_Values], radii: int) -> Curve:
    if not some:
        return Curve(np.full(radii + 1, np.nan), np.full(radii + 1, np.nan))
    hits = np.stack([query.radius_hits for query in some])
    retrieved = np.stack([query.radius_found for query in some])
    retrieving = (retrieved > 0).sum(axis=0)
    summed = _ratio(hits, retrieved).sum(axis=0)
    precision = np.divide(summed, retrieving, out=np.full(radii + 1, np.nan), where=retrieving > 0)
    return Curve(precision, (hits / np.array([query.relevant for query in some])[:, None]).mean(axis=0))


def _label_words(labels: Array, items: int) -> hamming.Words:
    """Multi-hot labels [n, L] as words."""
    flags = hamming.as_numpy(labels)
    if flags.ndim != 2 or not flags.shape[1] or len(flags) != items:
        raise ValueError(f"labels of shape {list(flags.shape)} for {items} items, allowed: multi-hot [items, labels]")
    return hamming.words(np.packbits(flags > 0, axis=1))


def _labels_of_both(queries: Array, gallery: Array, count: int, items: int) -> tuple[hamming.Words, hamming.Words]:
    """Labels of ``count`` queries and ``items`` gallery items as words, checked to have the same number of labels."""
    both = _label_words(queries, count), _label_words(gallery, items)
    widths = [hamming.as_numpy(labels).shape[1] for labels in (queries, gallery)]
    if widths[0] != widths[1]:
        raise ValueError(f"queries with {widths[0]} labels, gallery with {widths[1]}")
    return both


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
    threads: int | None = None,
) -> RankingMetrics:
    """Label metrics of ranking codes by Hamming distance; an item is relevant if it shares a label with the query.

    Args:
        query_codes: [Q, r], reduced to signs (0 is +1); or packed uint8 [Q, bytes] from :func:`hamming.pack`.
        gallery_codes: [N, r] or [N, bytes], likewise.
        query_labels: multi-hot [Q, L].
        gallery_labels: multi-hot [N, L].
        at: cut-offs R of mAP@R.
        ndcg_at: cut-offs N of NDCG@N; relevance is 0 or 1, for which the gains 2^rel - 1 and rel are the same.
        top_n: cut-offs N of precision@N and recall@N.
        curves: also compute precision and recall at every rank and within every Hamming radius.
        order_seed: seed that shuffles the gallery first; None keeps its order. Ties are broken by index, so a gallery
            sorted by class would leak its labels into the ranking.
        bits: length r of packed codes if it is not a multiple of 8; only ``pr_radius`` depends on it.
        denominator: denominator of mAP@R: the number of relevant items among the first R (``retrieved``, as in public
            hashing code), of all relevant items (``total``), or the smaller of R and the latter (``min``).
        empty: whether a query without relevant items counts as 0 in mAP and mAP@R (``zero``), or is left out (``skip``,
            as in FedCMR). In either case, NDCG counts it as 0, and precision and recall leave it out.
        threads: number of threads that rank; None takes torch's number.

    Raises:
        ValueError: shapes do not match, or a cut-off is below 1.
    """
    queries, gallery = hamming.packed_codes(query_codes), hamming.packed_codes(gallery_codes)
    if queries.shape[1] != gallery.shape[1]:
        raise ValueError(f"query codes of {queries.shape[1]} bytes, gallery codes of {gallery.shape[1]} bytes")
    given = hamming.as_numpy(gallery_codes)
    length = bits or (8 if given.dtype == np.uint8 else 1) * given.shape[1]
    order = _order(len(gallery), order_seed)
    query, database = hamming.words(queries), hamming.words(gallery[order])
    query_label, label = _labels_of_both(query_labels, gallery_labels, len(queries), len(gallery))
    label = label[:, order]
    requested = _Requested(
        len(gallery), tuple(at), tuple(ndcg_at), tuple(top_n), denominator, length if curves else 0, curves, True
    )

    def ranked(block: slice) -> Iterator[Iterable[Ranked]]:
        both = zip(query.T[block], query_label.T[block], strict=True)
        yield (hamming_ranked(code, database, hamming.shared(labels, label), length) for code, labels in both)

    blocks = [slice(start, start + CHUNK_QUERIES) for start in range(0, len(queries), CHUNK_QUERIES)]
    return _summarise(blocks, ranked, requested, empty, threads)


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
    expected: bool = True,
    threads: int | None = None,
) -> RankingMetrics:
    """Label metrics of ranking real-valued embeddings by cosine similarity, computed in float32.

    Args:
        query: [Q, d], of any length.
        gallery: [N, d], likewise.
        query_labels: multi-hot [Q, L].
        gallery_labels: multi-hot [N, L].
        at: cut-offs R of mAP@R.
        ndcg_at: cut-offs N of NDCG@N.
        top_n: cut-offs N of precision@N and recall@N.
        curves: also compute precision and recall at every rank.
        order_seed: seed that shuffles the gallery first; see :func:`hamming_metrics`.
        denominator: denominator of mAP@R; see :func:`hamming_metrics`.
        empty: how queries without relevant items count; see :func:`hamming_metrics`.
        expected: whether to compute ``map_expected``, a third of the time; embeddings hardly tie.
        threads: number of threads that rank; None takes torch's number.

    Raises:
        ValueError: shapes do not match, or a cut-off is below 1.
    """
    import torch  # noqa: PLC0415 - the audit of message logs does without torch

    first, second = (torch.nn.functional.normalize(torch.as_tensor(z).float(), dim=1) for z in (query, gallery))
    order = _order(len(second), order_seed)
    second = second[torch.from_numpy(order)] if isinstance(order, np.ndarray) else second
    query_label, label = _labels_of_both(query_labels, gallery_labels, len(first), len(second))
    label = label[:, order]
    requested = _Requested(len(second), tuple(at), tuple(ndcg_at), tuple(top_n), denominator, 0, curves, expected)
    fitting, same = max(1, CHUNK_SCORES // max(1, len(second))), first_of_rows(second)
    step, rows = min(CHUNK_QUERIES, fitting), max(1, CHUNK_RANKED // max(1, len(second)))
    # One product for all parts of a block takes half the time of a product for each, with the same bits. The bits of
    # a shorter last part may depend on its length, so that it is a block of its own.
    block, whole = fitting // step * step, len(first) // step * step
    ends = [*range(block, whole, block), whole, len(first)]

    def ranked(block: slice) -> Iterator[Iterable[Ranked]]:
        scores = tied((first[block] @ second.T).cpu().numpy(), same)
        for part, labels in zip(_rows(scores, step), _rows(query_label.T[block], step), strict=True):
            few = zip(_rows(part, rows), _rows(labels, rows), strict=True)
            yield chain.from_iterable(
                similarity_ranked(some, hamming.shared(own.T, label), ties=expected) for some, own in few
            )

    return _summarise(list(starmap(slice, pairwise([0, *ends]))), ranked, requested, empty, threads)
