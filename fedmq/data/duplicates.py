"""Items with the same picture, or nearly the same vector, which must not be spread over training and test items."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.seeds import numpy_generator

I64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

#: Largest distance of the unit vectors of one picture that was encoded twice, e.g. in batches of different sizes.
NEAR = 1.5e-3
_DIRECTIONS, _CHUNK = 8, 4096


def first_of_equals(values: Iterable[Hashable]) -> I64:
    """The first row with the same value as each row: int64 [n].

    >>> first_of_equals("abac").tolist()
    [0, 1, 0, 3]
    """
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(value, row) for row, value in enumerate(values)], dtype=np.int64)


def same_rows(array: Array) -> I64:
    """The first row of an array [n, ...] with the same values as each row: int64 [n]; rows of zeros are not pictures.

    >>> same_rows(np.array([[1.0], [2.0], [1.0], [0.0], [0.0]])).tolist()
    [0, 1, 0, 3, 4]
    """
    return first_of_equals(
        hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest() if row.any() else number
        for number, row in enumerate(array)
    )


def nearly_equal(vectors: Array, others: Array) -> npt.NDArray[np.bool_]:
    """Whether the direction of each vector is within :data:`NEAR` of that of one of the others; not that of zeros.

    Vectors that are near are also near on any line. So a vector is compared only with the others that are near on one
    random line, which sorting finds, and then on several.

    Args:
        vectors: [q, d].
        others: [m, d].

    Returns:
        bool [q].

    >>> nearly_equal(np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 0.0]]), np.array([[3.0, 1e-3], [0.0, 1.0]])).tolist()
    [True, False, False]
    """
    found = np.zeros(len(vectors), np.bool_)
    if not (len(vectors) and len(others)):
        return found
    lines = numpy_generator(0, "near vectors").normal(size=(vectors.shape[1], _DIRECTIONS))
    lines /= np.linalg.norm(lines, axis=0)
    here, there = _projected(vectors, lines), _projected(others, lines)
    order = np.argsort(there[:, 0])
    there = there[order]
    first = np.searchsorted(there[:, 0], here[:, 0] - NEAR)
    last = np.searchsorted(there[:, 0], here[:, 0] + NEAR, "right")
    left, step = np.flatnonzero((first < last) & here.any(axis=1)), 0
    while len(left):
        at = first[left] + step
        close = np.flatnonzero((np.abs(there[at] - here[left]) <= NEAR).all(axis=1))
        apart = _unit(vectors[left[close]]) - _unit(others[order[at[close]]])
        found[left[close]] = np.linalg.norm(apart, axis=1) <= NEAR
        step += 1
        left = left[~found[left] & (first[left] + step < last[left])]
    return found


def _unit(vectors: Array) -> npt.NDArray[np.float64]:
    wide = np.asarray(vectors, np.float64)
    length: npt.NDArray[np.float64] = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.maximum(length, np.finfo(np.float64).tiny)


def _projected(vectors: Array, lines: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Positions of the unit vectors on lines [d, k]: float64 [n, k]."""
    parts = (vectors[start : start + _CHUNK] for start in range(0, len(vectors), _CHUNK))
    return np.concatenate([_unit(part) @ lines for part in parts])
