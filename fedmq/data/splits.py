"""Splits of a data set, read from its files or sampled from a seed, and how duplicates across splits are avoided.

Where a split is sampled, items with the same image, or nearly the same vector, go into one part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.errors import InputError
from fedmq.seeds import numpy_generator
from fedmq.text import first_few

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """Number of items to sample for each split of a set that is distributed without one."""

    queries: int | None = None  # test items; None means a 80/10/10 split
    val: int = 0  # validation items
    train: int | None = None  # training items; the rest becomes ``database``. None trains on the whole rest.


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
    "testing": "test",
}
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@lru_cache(maxsize=4096)
def split_in(name: str) -> str:
    """The split that the name of a file or folder says; empty if it says none, or several.

    >>> split_in("val2017"), split_in("photos-Train-00000-of-00002"), split_in("train_val"), split_in("trains")
    ('val', 'train', '', '')
    """
    found = {SPLIT_NAMES[word.lower()] for word in _WORD.findall(name) if word.lower() in SPLIT_NAMES}
    return found.pop() if len(found) == 1 else ""


def splits_of_names(paths: Sequence[Sequence[str]]) -> tuple[list[str] | None, str]:
    """The split of each item by the names of its file and folders, at the first level that has a train and a test part.

    Without a test part, ``val`` is the test part, as in COCO. ``paths`` [n] has the names of folders, from the
    outermost, and of the file where that holds many items.

    Returns:
        Names [n], empty for an item outside of the parts, or None if names say no split; and a remark, possibly empty.
    """
    for level in range(max(map(len, paths), default=0)):
        found = [split_in(names[level]) if level < len(names) else "" for names in paths]
        if "train" in found and "test" in found:
            return found, ""
        if "train" in found and "val" in found:
            return ["test" if name == "val" else name for name in found], "val is the test split, as there is no other"
    words = {name: set(map(str.lower, _WORD.findall(name))) for names in paths for name in names}
    alike = sorted(name for name, parts in words.items() if parts & {*SPLIT_NAMES})
    look = "looks like a split" if len(alike) == 1 else "look like splits"
    return None, f"{first_few(alike)} {look}, but a train and a test part are needed" if alike else ""


def origin_of_split(given: bool, data: Data, remark: str = "") -> str:
    """Where :func:`split_of` takes a set's split from, which the files may have ``given``.

    The remark is what to add, e.g. what looks like a split in the names of files.
    """
    sizes = [f"data.{name}" for name in ("queries", "val", "train") if getattr(data, name) is not None]
    if sizes:
        origin = f"drawn, because of {' and '.join(sizes)}"
    else:
        origin = "from the files" if given else "drawn, because the files say none"
    return f"{origin} ({remark})" if remark else origin


def split_line(origin: str, split: U8) -> str:
    """One line on a split: where it comes from, and its numbers of items."""
    counts = [f"{count:,} {name}" for code, name in enumerate(SPLITS) if (count := int((split == code).sum()))]
    return f"split: {origin}: {', '.join(counts)}"


def split_codes(path: Path, value: Array, n: int) -> npt.NDArray[np.uint8]:
    """A file's ``split`` array of names or codes as indices into ``SPLITS``: uint8 [n].

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
    """Assign items to splits, changing ``split``, in an order of rows; items with the same image go into one split.

    Without such items, each split takes the next items. Otherwise a split takes the next groups that still fit, so it
    may stay smaller than its size, or one group if none fits.
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


def draw_split(n: int, seed: int, same: I64 | None = None) -> U8:
    """Sample a split: 10 % validation, 10 % (at least one item) test, the rest training; otherwise as `draw_parts`."""
    return _drawn(n, same, "train", (("test", max(1, n // 10)), ("val", n // 10)), numpy_generator(seed, "split"))


def _drawn(n: int, same: I64 | None, rest: str, sizes: Sequence[tuple[str, int]], generator: np.random.Generator) -> U8:
    """Sample splits of these sizes; ``rest`` is the split of all other items."""
    if same is not None and (same == same[0]).all():
        raise InputError("data", f"one image for all {len(same)} items", "at least two: one to train on, one to test")
    split = np.full(n, SPLITS.index(rest), dtype=np.uint8)
    _assign(generator.permutation(n), same, split, sizes)
    return split


def draw_parts(n: int, sizes: Draw, seed: int, same: I64 | None = None) -> U8:
    """Sample test, validation and training items of n, in this order; the rest becomes ``database``: uint8 [n].

    The seed is ``data.split_seed``, separate from the run's so that runs with different seeds share the split. ``same``
    int64 [n] is the first row with the same image as each row: these go into one split.

    Raises:
        InputError: the set is too small for these sizes, or all items have the same image.
    """
    queries = sizes.queries or 0
    rest = n - queries - sizes.val
    train = rest if sizes.train is None else sizes.train
    if queries < 1 or train < 1 or train > rest:
        found = f"queries {queries}, val {sizes.val}, train {'the rest' if sizes.train is None else train}"
        raise InputError("data.queries, data.val, data.train", found, f"in total at most the {n} items of the data set")
    parts = [("test", queries), ("val", sizes.val)]
    generator = numpy_generator(seed, "data", "split")
    if sizes.train is None:  # all others are for training, also those that a smaller split leaves over
        return _drawn(n, same, "train", parts, generator)
    return _drawn(n, same, "database", [*parts, ("train", sizes.train)], generator)


def split_of(official: U8 | None, n: int, data: Data, usual: Draw, same_images: Callable[[], I64] | None = None) -> U8:
    """The split to use: sampled by the scenario's sizes, else the official split, else sampled by the usual sizes.

    The official split, uint8 [n], is the one distributed with the set. ``same_images`` gives, where a split is sampled,
    the first row with the same image as each row, int64 [n]: these go into one split.

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
    """Map a file's split names, in any case, or numbers to indices into ``SPLITS``: uint8 [n].

    ``aliases`` maps further names, in lower case, to those of ``SPLITS``; ``lines`` has the line of each item.

    Raises:
        InputError: an unknown name; the message gives the item's line or number.
    """
    known = {**{name: name for name in SPLITS}, **aliases}
    numbers = {str(code): name for code, name in enumerate(SPLITS)}
    found = [(known | numbers).get(name.strip().lower(), "") for name in names]
    if "" in found:
        row = found.index("")
        where = f"item {row}" if lines is None else f"line {lines[row]}"
        allowed = f"{', '.join(known)}, or their numbers 0 to {len(SPLITS) - 1}"
        raise InputError(f"{place}: {where}: split", names[row] or "nothing", allowed)
    return np.array([SPLITS.index(name) for name in found], dtype=np.uint8)


# --- items with the same image --------------------------------------------------------------------------------------

#: Largest distance of the unit vectors of one image that was encoded twice, e.g. in batches of different sizes.
NEAR = 1.5e-3
#: Largest quotient of the distances from a crop to its image and to the nearest other one. Of 150 crops of Flickr8k's
#: photos to 90, 80 and 70 % of each side it finds 99, 87 and 56 %, by lite vectors, and names 1 of 400 other photos.
MUCH_CLOSER = 0.6
_DIRECTIONS, _CHUNK, _QUERIES = 8, 4096, 256
#: Size of the rows that are compared at a time [bytes].
_CHUNK_BYTES = 1 << 24


def first_of_equals(values: Iterable[Hashable]) -> I64:
    """The first row with the same value as each row: int64 [n].

    >>> first_of_equals("abac").tolist()
    [0, 1, 0, 3]
    """
    first: dict[Hashable, int] = {}
    return np.array([first.setdefault(value, row) for row, value in enumerate(values)], dtype=np.int64)


def same_rows(array: Array) -> I64:
    """The first row of an array [n, ...] with the same values as each row: int64 [n]; rows of zeros are not images.

    Rows are compared by a sum of their bytes with random weights, and those with equal sums byte by byte.

    >>> same_rows(np.array([[1.0], [2.0], [1.0], [0.0], [0.0]])).tolist()
    [0, 1, 0, 3, 4]
    """
    rows = np.arange(len(array), dtype=np.int64)
    if not array.size:
        return rows
    parts = min(len(array), -(-array.nbytes // _CHUNK_BYTES))
    sums = np.concatenate([_weighted(part) for part in np.array_split(array, parts)])
    order = np.argsort(sums, kind="stable")
    starts = np.flatnonzero(np.append(True, sums[order][1:] != sums[order][:-1]))
    first = np.empty_like(rows)
    first[order] = np.repeat(order[starts], np.diff(starts, append=len(rows)))
    for row in np.flatnonzero(first != rows).tolist():
        content = array[row]
        if not content.any():
            first[row] = row
        elif content.tobytes() != array[first[row]].tobytes():  # by chance: one in 2^64 pairs
            return first_of_equals(each.tobytes() if each.any() else number for number, each in enumerate(array))
    return first


def _weighted(rows: Array) -> npt.NDArray[np.uint64]:
    """A sum for each row of an array [n, ...], uint64 [n]: of its bytes, eight at a time, with odd random weights."""
    width = rows[0].nbytes
    padded = np.zeros((len(rows), -(-width // 8) * 8), np.uint8)
    padded[:, :width] = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), width)
    words = padded.view(np.uint64)
    weights = numpy_generator(0, "same rows").integers(0, 1 << 63, words.shape[1], dtype=np.uint64)
    sums: npt.NDArray[np.uint64] = words @ (2 * weights + np.uint64(1))
    return sums


def nearly_equal(vectors: Array, others: Array | None = None) -> npt.NDArray[np.bool_]:
    """Whether the direction of each vector is within :data:`NEAR` of that of one of the others; not that of zeros.

    Vectors that are near are also near on any line. So a vector is compared only with the others that are near on one
    random line, which sorting finds, and then on several.

    Args:
        vectors: [q, d].
        others: [m, d]; None compares each vector with those before it.

    Returns:
        bool [q].

    >>> nearly_equal(np.array([[1.0, 0.0], [2.0, 0.1], [0.0, 0.0]]), np.array([[3.0, 1e-3], [0.0, 1.0]])).tolist()
    [True, False, False]
    """
    found, own = np.zeros(len(vectors), np.bool_), others is None
    others = vectors if others is None else others
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
        before = order[at] < left if own else np.True_
        close = np.flatnonzero((np.abs(there[at] - here[left]) <= NEAR).all(axis=1) & before)
        apart = _unit(vectors[left[close]]) - _unit(others[order[at[close]]])
        found[left[close]] = np.linalg.norm(apart, axis=1) <= NEAR
        step += 1
        left = left[~found[left] & (first[left] + step < last[left])]
    return found


def much_closer_to_one(
    vectors: Array, others: Array, done: Callable[[int], None] = lambda _: None
) -> npt.NDArray[np.bool_]:
    """Whether one of the others is much closer (:data:`MUCH_CLOSER`) to a vector, by cosine distance, than all others.

    Of vectors [q, d] and different others [m, d]: bool [q], False where the others are fewer than two. ``done``
    receives the number of vectors compared so far.

    >>> much_closer_to_one(np.array([[1.0, 0.1], [1.0, 1.0]]), np.eye(2)).tolist()
    [True, False]
    """
    found, unit = np.zeros(len(vectors), np.bool_), _unit(others).astype(np.float32)
    for start in range(0, len(vectors) if len(others) > 1 else 0, _QUERIES):
        block = slice(start, start + _QUERIES)
        distance = 1 - _unit(vectors[block]).astype(np.float32) @ unit.T
        rows, first = np.arange(len(distance)), distance.argmin(axis=1)
        nearest = distance[rows, first]
        distance[rows, first] = np.inf
        found[block] = nearest <= MUCH_CLOSER * distance.min(axis=1)
        done(start + len(distance))
    return found


def _unit(vectors: Array) -> npt.NDArray[np.float64]:
    wide = np.asarray(vectors, np.float64)
    length: npt.NDArray[np.float64] = np.linalg.norm(wide, axis=1, keepdims=True)
    return wide / np.maximum(length, np.finfo(np.float64).tiny)


def _projected(vectors: Array, lines: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Positions of the unit vectors on lines [d, k]: float64 [n, k]."""
    parts = (vectors[start : start + _CHUNK] for start in range(0, len(vectors), _CHUNK))
    return np.concatenate([_unit(part) @ lines for part in parts])
