"""Splits of a data set: given by its files, or drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True)
class Draw:
    """How many items a set's papers draw for each split, where the set comes without one.

    Args:
        queries: test items; None draws 80/10/10.
        val: validation items.
        train: training items; the rest is ``database``. None trains on the whole rest.
    """

    queries: int | None = None
    val: int = 0
    train: int | None = None


#: For sets that come with a split, and for those nobody has drawn before us.
OWN = Draw()


# A split's number is its place here. `database` is neither trained on nor queried: it only stands in the gallery.
SPLITS = ("train", "val", "test", "public", "database")


def split_codes(path: Path, value: Array, n: int) -> npt.NDArray[np.uint8]:
    """A file's ``split`` as places in ``SPLITS``.

    Args:
        path: what an error names.
        value: [n] names or numbers.
        n: items.

    Raises:
        InputError: another shape or type, an unknown value, or no item to train on or to test on.
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


def draw_split(n: int, seed: int) -> npt.NDArray[np.uint8]:
    """A seeded split: a tenth val, a tenth (at least one item) test, the rest train.

    Returns:
        uint8 [n], places in ``SPLITS``.
    """
    test, val = max(1, n // 10), n // 10
    split = np.zeros(n, dtype=np.uint8)
    order = numpy_generator(seed, "split").permutation(n)
    split[order[:test]] = 2
    split[order[test : test + val]] = 1
    return split


def draw_parts(n: int, sizes: Draw, seed: int) -> U8:
    """Queries, validation and training items drawn at random, in this order; what is left is ``database``.

    Args:
        n: items.
        sizes: how many of each.
        seed: ``data.split_seed``, apart from the run's seed: runs of several seeds share one split.

    Returns:
        uint8 [n], places in ``SPLITS``.

    Raises:
        InputError: the set is too small for these numbers.
    """
    queries = sizes.queries or 0
    rest = n - queries - sizes.val
    train = rest if sizes.train is None else sizes.train
    if queries < 1 or train < 1 or train > rest:
        found = f"queries {queries}, val {sizes.val}, train {'the rest' if sizes.train is None else train}"
        raise InputError("data.queries, data.val, data.train", found, f"together at most the {n} items there are")
    order = numpy_generator(seed, "data", "split").permutation(n)
    split = np.full(n, SPLITS.index("database"), dtype=np.uint8)
    for name, start, size in (("test", 0, queries), ("val", queries, sizes.val), ("train", queries + sizes.val, train)):
        split[order[start : start + size]] = SPLITS.index(name)
    return split


def split_of(own: U8 | None, n: int, data: Data, usual: Draw) -> U8:
    """The split in use: the scenario's numbers, else the set's own, else the numbers its papers use.

    Args:
        own: uint8 [n] of the set, or None.
        n: items.
        data: of the scenario; any of queries, val, train replaces the set's own split.
        usual: of the data set.

    Returns:
        uint8 [n], places in ``SPLITS``.

    Raises:
        InputError: no number of queries, or the set is too small.
    """
    given = (data.queries, data.val, data.train) != (None, None, None)
    if own is not None and not given:
        for name in ("train", "test"):
            if not (own == SPLITS.index(name)).any():
                raise InputError(f"data: {data.name}", f"no {name} item", "at least one train and one test item")
        return own
    if not given and usual.queries is None:
        return draw_split(n, data.split_seed)
    queries = data.queries if data.queries is not None else usual.queries
    if queries is None:
        raise InputError("data.queries", None, "a number of test items where data.val or data.train is given")
    val = usual.val if data.val is None else data.val
    return draw_parts(n, Draw(queries, val, usual.train if data.train is None else data.train), data.split_seed)


def split_numbers(
    place: str, names: Sequence[str], aliases: Mapping[str, str], lines: Sequence[int] | None = None
) -> U8:
    """Split names to places in ``SPLITS``.

    Args:
        place: what an error names.
        names: [n], as the file has them.
        aliases: the file's own words for ours.
        lines: [n], where the items stand in a file that has one in a line.

    Raises:
        InputError: an unknown word, with its item's line or number.
    """
    known = {**{name: name for name in SPLITS}, **aliases}
    for row, name in enumerate(names):
        if name not in known:
            where = f"item {row}" if lines is None else f"line {lines[row]}"
            raise InputError(f"{place}: {where}: split", name or "nothing", ", ".join(known))
    return np.array([SPLITS.index(known[name]) for name in names], dtype=np.uint8)
