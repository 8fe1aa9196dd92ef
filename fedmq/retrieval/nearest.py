"""Rank vectors for a query: with NumPy, or from 10,000 vectors on with faiss."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedmq.packages import package

Array = npt.NDArray[Any]

#: Number of vectors from which faiss ranks instead of NumPy.
FAISS_FROM: Final = 10_000


def faiss() -> Any:
    """The faiss package.

    Raises:
        InputError: it is not installed; the error names the extra that installs it.
    """
    return package("faiss", "search", f"a search among {FAISS_FROM:,} vectors or more")


def flat_index(vectors: Array) -> Any:
    """An exact faiss index of packed codes uint8 [n, bytes] or of embeddings float32 [n, d].

    Raises:
        InputError: faiss is not installed.
    """
    library, binary = faiss(), vectors.dtype == np.uint8
    index = library.IndexBinaryFlat(8 * vectors.shape[1]) if binary else library.IndexFlatIP(vectors.shape[1])
    index.add(np.ascontiguousarray(vectors))
    return index


def nearest(vectors: Array, query: Array, top: int, index: Any = None) -> list[tuple[float, int]]:
    """The vectors nearest to a query, by Hamming distance of packed codes, else by inner product.

    Args:
        vectors: float32 [n, d], or packed codes uint8 [n, bytes].
        query: one row of the same kind, [1, d] or [1, bytes].
        top: number of results.
        index: exact faiss index of ``vectors``, to rank with; None ranks with NumPy, or with an index made here if
            there are :data:`FAISS_FROM` vectors or more.

    Returns:
        Scores and rows, nearest first; ties in the order of the rows.

    Raises:
        InputError: faiss is needed and not installed.
    """
    if index is None and len(vectors) >= FAISS_FROM:
        index = flat_index(vectors)
    binary, count = vectors.dtype == np.uint8, min(top, len(vectors))
    if index is not None:
        scores, rows = _with_faiss(index, np.ascontiguousarray(query), count, binary=binary)
    elif binary:
        scores, rows = np.bitwise_count(vectors ^ query).sum(axis=1), np.arange(len(vectors))
    else:
        # Not a matrix product, in which the last bits of equal rows can differ with their places.
        scores, rows = (vectors * query).sum(axis=1), np.arange(len(vectors))
    order = np.lexsort((rows, scores if binary else -scores))[:count]
    return [(float(scores[place]), int(rows[place])) for place in order]


def _with_faiss(index: Any, query: Array, count: int, *, binary: bool) -> tuple[Array, Array]:
    """Scores and rows of at least the ``count`` nearest, with all that tie with the last of them."""
    # faiss does not define which of several equally near vectors it returns: retrieve all of them.
    scores, _ = (each[0] for each in index.search(query, count))
    limit = int(scores.max()) + 1 if binary else float(np.nextafter(scores.min(), np.float32(-np.inf)))
    _, scores, rows = index.range_search(query, limit)
    return scores, rows
