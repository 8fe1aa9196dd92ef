"""Items that have the same picture, which must not be spread over training and test items."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def first_of_equals(values: Iterable[Hashable]) -> I64:
    """The first row with the same value as each row: int64 [n].

    >>> first_of_equals("abac").tolist()
    [0, 1, 0, 3]
    """
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(value, row) for row, value in enumerate(values)], dtype=np.int64)


def same_rows(array: npt.NDArray[Any]) -> I64:
    """The first row of an array [n, ...] with the same values as each row: int64 [n]; rows of zeros are not pictures.

    >>> same_rows(np.array([[1.0], [2.0], [1.0], [0.0], [0.0]])).tolist()
    [0, 1, 0, 3, 4]
    """
    return first_of_equals(
        hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=16).digest() if row.any() else number
        for number, row in enumerate(array)
    )
