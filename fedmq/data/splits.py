"""Splits of a data set, read from its files or sampled from a seed, and how duplicates across splits are avoided.

Where a split is sampled, items with the same image, or nearly the same vector, go into one part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.errors import InputError
from fedmq.seeds import numpy_generator

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Number of items to sample for each split of a set that is distributed without one.

    Args:
        queries: test items; None means a 80/10/10 split.
        val: validation items.
        train: training items; the rest becomes ``database``. None trains on the whole rest.
    """

    queries: int | None = None
    val: int = 0
    train: int | None = None


#: For sets distributed with a split, and for sets without published split sizes.
OWN = Draw()


# A split's code is its index here. `database` items belong to the gallery only: no training, no queries.
SPLITS = ("train", "val", "test", "public", "database")

#: Splits by the names that files and folders of other programs give them.
SPLIT_NAMES: Mapping[str, str] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
}


def split_codes(path: Path, value: Array, n: int) -> npt.NDArray[np.uint8]:
    """A file's ``split`` array as indices into ``SPLITS``: uint8 [n].

    Args:
        path: the file, for error messages.
        value: [n] names or codes.
        n: number of items.

    Raises:
        InputError: wrong shape or dtype, an unknown value, or no training or no test item.
    """
    place, allowed = f"{path}: split", f"[{n}] of {', '.join(SPLITS)}, or of their numbers 0 to {len(SPLITS) - 1}"
    if value.shape != (n,) or value.dtype.kind not in "USiu":
        raise InputError(place, f"{value.dtype} {list(value.shape)}", allowed)
    if value.dtype.kind == "S":
        value = np.char.decode(value, "utf-8", "replace")
    numbers = np.full(n, -1, dtype=np.int64)
    for index, name in enumerate(SPLITS):
        numbers[value == (name if value.dtype.kind == "U" else index)] = index
    wrong = np.flatnonzero(numbers < 0)
    if len(wrong):
        raise InputError(place, f"{value[wrong[0]].item()!r} in row {wrong[0]}", allowed)
    for index in (0, 2):
        if not (numbers == index).any():
            raise InputError(place, f"no {SPLITS[index]} item", "at least one train and one test item")
    return numbers.astype(np.uint8)


def _assign(order: I64, same: I64 | None, split: U8, sizes: Sequence[tuple[str, int]]) -> None:
    """Assign items to splits in an order; items with the same image go into one split.

    Without such items, each split takes the next items. Otherwise a split takes the next groups that still fit, so it
    may stay smaller than its size, or one group if none fits.

    Args:
        order: int64 [n], a permutation of the rows.
        same: int64 [n], the first row with the same image as each row; None if all images differ.
        split: uint8 [n], indices into ``SPLITS``; changed in place.
        sizes: name and number of items of each split, in the order of assignment.
    """
    groups: dict[int, list[int]] = {}
    for row in order.tolist():
        groups.setdefault(row if same is None else int(same[row]), []).append(row)
    left = list(groups.values())
    for name, size in sizes:
        room, rest = size, list[list[int]]()
        for rows in left:
            if len(rows) <= room:
                split[rows] = SPLITS.index(name)
                room -= len(rows)
            else:
                rest.append(rows)
        if room == size > 0 and len(rest) > (name != "train"):  # one group remains to train on
            rows = min(rest, key=len)
            split[rows] = SPLITS.index(name)
            rest.remove(rows)
        left = rest


def draw_split(n: int, seed: int, same: I64 | None = None) -> npt.NDArray[np.uint8]:
    """Sample a split: 10 % validation, 10 % (at least one item) test, the rest training.

    Args:
        n: number of items.
        seed: seed of the draw.
        same: int64 [n], the first row with the same image as each row: these go into one split. None if all differ.

    Returns:
        uint8 [n], indices into ``SPLITS``.

    Raises:
        InputError: all items have the same image.
    """
    _check_images(same)
    split = np.zeros(n, dtype=np.uint8)
    order = numpy_generator(seed, "split").permutation(n)
    _assign(order, same, split, (("test", max(1, n // 10)), ("val", n // 10)))
    return split


def _check_images(same: I64 | None) -> None:
    if same is not None and (same == same[0]).all():
        raise InputError("data", f"one image for all {len(same)} items", "at least two: one to train on, one to test")


def draw_parts(n: int, sizes: Draw, seed: int, same: I64 | None = None) -> U8:
    """Sample test, validation and training items, in this order; the rest becomes ``database``.

    Args:
        n: number of items.
        sizes: number of items of each split.
        seed: ``data.split_seed``, separate from the run's seed so that runs with different seeds share the split.
        same: as in :func:`draw_split`.

    Returns:
        uint8 [n], indices into ``SPLITS``.

    Raises:
        InputError: the set is too small for these sizes, or all items have the same image.
    """
    queries = sizes.queries or 0
    rest = n - queries - sizes.val
    train = rest if sizes.train is None else sizes.train
    if queries < 1 or train < 1 or train > rest:
        found = f"queries {queries}, val {sizes.val}, train {'the rest' if sizes.train is None else train}"
        raise InputError("data.queries, data.val, data.train", found, f"in total at most the {n} items of the data set")
    _check_images(same)
    order = numpy_generator(seed, "data", "split").permutation(n)
    # Without a number of training items all others are for training, also those that a smaller split leaves over.
    split = np.full(n, SPLITS.index("train" if sizes.train is None else "database"), dtype=np.uint8)
    parts = [("test", queries), ("val", sizes.val), *([] if sizes.train is None else [("train", train)])]
    _assign(order, same, split, parts)
    return split


def split_of(official: U8 | None, n: int, data: Data, usual: Draw, same_images: Callable[[], I64] | None = None) -> U8:
    """The split to use: sampled by the scenario's sizes, else the official split, else sampled by the usual sizes.

    Args:
        official: uint8 [n], the split distributed with the set, or None.
        n: number of items.
        data: the scenario's data section; any of queries, val and train overrides the official split.
        usual: the data set's split sizes from the literature.
        same_images: gives, where a split is sampled, the first row with the same image as each row, int64 [n]:
            these go into one split. None if all images differ.

    Returns:
        uint8 [n], indices into ``SPLITS``.

    Raises:
        InputError: the number of queries is missing, the set is too small, or there is no training or no test item.
    """
    given = (data.queries, data.val, data.train) != (None, None, None)
    if official is not None and not given:
        for name in ("train", "test"):
            if not (official == SPLITS.index(name)).any():
                raise InputError(f"data: {data.name}", f"no {name} item", "at least one train and one test item")
        return official
    if not given and usual.queries is None:
        return draw_split(n, data.split_seed, same_images() if same_images else None)
    queries = data.queries if data.queries is not None else usual.queries
    if queries is None:
        raise InputError("data.queries", None, "a number of test items where data.val or data.train is given")
    val = usual.val if data.val is None else data.val
    sizes = Draw(queries, val, usual.train if data.train is None else data.train)
    return draw_parts(n, sizes, data.split_seed, same_images() if same_images else None)


def split_numbers(
    place: str, names: Sequence[str], aliases: Mapping[str, str], lines: Sequence[int] | None = None
) -> U8:
    """Map a file's split names to indices into ``SPLITS``: uint8 [n].

    Args:
        place: the file, for error messages.
        names: [n] split names as in the file.
        aliases: the file's split names mapped to those of ``SPLITS``.
        lines: [n] line numbers of the items, for error messages; None numbers the items instead.

    Raises:
        InputError: an unknown name; the message gives the item's line or number.
    """
    known = {**{name: name for name in SPLITS}, **aliases}
    for row, name in enumerate(names):
        if name not in known:
            where = f"item {row}" if lines is None else f"line {lines[row]}"
            raise InputError(f"{place}: {where}: split", name or "nothing", ", ".join(known))
    return np.array([SPLITS.index(known[name]) for name in names], dtype=np.uint8)


# --- items with the same image --------------------------------------------------------------------------------------

#: Largest distance of the unit vectors of one image that was encoded twice, e.g. in batches of different sizes.
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
    """The first row of an array [n, ...] with the same values as each row: int64 [n]; rows of zeros are not images.

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
