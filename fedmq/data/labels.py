"""Labels of items: class numbers or multi-hot, names and spellings, and coarse and fine levels."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError

Array = npt.NDArray[Any]

MAX_LABELS = 10_000
#: Name prefix of coarse labels in sets of two levels (FashionVC, Ssense); fine labels start with ``fine:``.
COARSE = "coarse:"
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?")


def coarse_columns(names: Sequence[str]) -> list[int]:
    """Columns of coarse labels; empty if labels have one level."""
    return [column for column, name in enumerate(names) if name.startswith(COARSE)]


def fine_columns(names: Sequence[str]) -> list[int]:
    """Columns that define relevance: the fine labels, or all if labels have one level."""
    return [column for column, name in enumerate(names) if not name.startswith(COARSE)]


def trained_columns(names: Sequence[str], *, both_levels: bool) -> list[int]:
    """Columns that silos train on: those of both levels for an objective that uses them, else the lower level's."""
    return list(range(len(names))) if both_levels else fine_columns(names)


def counts_of(labels: npt.NDArray[np.uint8] | None, names: Sequence[str]) -> dict[str, int]:
    """Number of items of each label, of multi-hot labels [n, L] and the L names; empty without labels."""
    if labels is None:
        return {}
    return dict(zip(names, np.asarray(labels).sum(axis=0, dtype=np.int64).tolist(), strict=True))


def label_divergences(counts: Sequence[Array]) -> list[float | None]:
    """Jensen-Shannon divergence [bits, 0 to 1] of each silo's labels from those of all together; None without labels.

    ``counts`` has int64 [L] for each silo, its number of items with each label.

    Returns:
        The divergence of each silo; None for a silo without labels.
    """
    overall = np.sum(counts, axis=0) / max(1, np.sum(counts))
    divergences: list[float | None] = []
    for own in counts:
        if not own.any():
            divergences.append(None)
            continue
        share = own / own.sum()
        mixture = (share + overall) / 2
        # scipy.spatial.distance.jensenshannon is the square root; its import would add a quarter of a second to a run.
        parts = (np.sum(each[each > 0] * np.log2(each[each > 0] / mixture[each > 0])) for each in (share, overall))
        divergences.append(max(0.0, float(sum(parts)) / 2))
    return divergences


def strings_in(place: str, value: Array, count: int) -> tuple[str, ...]:
    """The strings of an array of this length.

    Raises:
        InputError: another length or type, or bytes or characters that are not Unicode.
    """
    if value.shape != (count,) or value.dtype.kind not in "US":
        raise InputError(place, f"{value.dtype} {list(value.shape)}", f"strings [{count}]")
    try:
        texts = tuple(text.decode() if isinstance(text, bytes) else str(text) for text in value.tolist())
        "".join(texts).encode()
    except UnicodeError as error:
        raise InputError(place, str(error)[:80], "strings of whole characters of Unicode") from None
    return texts


def unique_strings(path: Path, name: str, value: Array, count: int) -> tuple[str, ...]:
    """The different strings of an array of this length; errors as of :func:`strings_in`, and for equal strings."""
    names = strings_in(f"{path}: {name}", value, count)
    if len(set(names)) != len(names):
        twice = next(text for text, times in Counter(names).items() if times > 1)
        raise InputError(f"{path}: {name}", f"{twice!r} twice", "different names")
    return names


def is_whole(value: Array) -> bool:
    """Whether floating-point values are whole numbers below 2^31."""
    return bool((np.abs(value) < 2**31).all()) and np.array_equal(value, np.round(value))


def label_array(place: str, value: Array, n: int) -> Array:
    """Labels by the one rule of all array files: class numbers int64 [n] or multi-hot uint8 [n, L].

    A column [n, 1] or a row [1, n] is a vector of class numbers, also if these are 0 and 1. Whole floating-point
    numbers are whole numbers (MATLAB's default type is double), and multi-hot labels may be -1 and 1.

    Raises:
        InputError: another shape, or values that are neither class numbers nor multi-hot labels.
    """
    allowed = f"class numbers [{n}] or multi-hot 0/1 [{n}, L]"
    if value.shape in ((n, 1), (1, n)):
        value = value.reshape(-1)
    if value.dtype.kind not in "iufb" or value.ndim not in (1, 2) or len(value) != n:
        raise InputError(place, f"{value.dtype} {list(value.shape)}", allowed)
    if value.dtype.kind == "f":
        if not is_whole(value):
            raise InputError(place, "values that are not whole", allowed)
        value = value.astype(np.int64)
    if value.ndim == 1:
        value = value.astype(np.int64)
        if len(value) and value.min() < 0:
            raise InputError(place, int(value.min()), "class numbers from 0 or 1")
        return value
    lowest = -1 if (value < 0).any() else 0  # published .mat files use either -1 and 1 or 0 and 1
    if (other := value[(value != lowest) & (value != 1)]).size:
        raise InputError(place, int(other.flat[0]), f"multi-hot labels of {lowest} and 1")
    return (value > 0).astype(np.uint8)


def labels_of(
    path: Path, value: Array, n: int, names: Array | None, first_class: Array | None = None
) -> tuple[npt.NDArray[np.uint8], tuple[str, ...]]:
    """Multi-hot labels uint8 [n, L] and their names, from class numbers [n] or multi-hot labels [n, L].

    Without ``names`` [L], labels are named by the numbers of the file: of classes, or of columns from 0. So two files
    fit together only if both count from the same number. ``first_class`` is a single 0 or 1, found from the class
    numbers if not given.

    Raises:
        InputError: invalid labels, names or first class, or class numbers that may count the names from 0 or from 1.
    """
    place = f"{path}: labels"
    if first_class is not None and (first_class.size != 1 or first_class.item() not in (0, 1)):
        found = first_class.item() if first_class.size == 1 else f"{first_class.dtype} {list(first_class.shape)}"
        raise InputError(f"{path}: first_class", found, "0 or 1, the number of the first class")
    if value.shape == (n, 1) and names is not None and names.shape == (1,):
        multi = (value == 1).astype(np.uint8)  # the file names one label, which an item has or lacks
        if not ((value == 0) | multi.astype(np.bool_)).all():
            raise InputError(place, f"shape {list(value.shape)} and other values", "0 and 1 for one label name")
        return multi, unique_strings(path, "label_names", names, 1)
    value, first = label_array(place, value, n), 0
    if value.ndim == 1:
        lowest, highest = int(value.min()), int(value.max())
        first = int(lowest == 1) if first_class is None else int(first_class.item())  # MATLAB counts from 1
        count = highest + 1 - first
        if names is not None and names.ndim == 1:
            count = len(names)
            if first_class is None:
                first = int(lowest >= 1 and highest == count)
            if first_class is None and lowest >= 1 and highest < count:
                allowed = "a key first_class of 0 or 1, as they may count the names from either"
                raise InputError(place, f"class numbers {lowest} to {highest} for {count} label_names", allowed)
        last = first + min(count, MAX_LABELS) - 1
        if lowest < first or highest > last:
            raise InputError(place, lowest if lowest < first else highest, f"class numbers {first} to {last}")
        multi = np.zeros((n, count), dtype=np.uint8)
        multi[np.arange(n), value - first] = 1
    else:
        if not 1 <= value.shape[1] <= MAX_LABELS:
            raise InputError(place, f"shape {list(value.shape)}", f"1 to {MAX_LABELS} columns of 0 and 1")
        multi = value
    if names is None:
        return multi, tuple(f"label-{index:03d}" for index in range(first, first + multi.shape[1]))
    return multi, unique_strings(path, "label_names", names, multi.shape[1])


def one_spelling(labels: Sequence[Collection[str]]) -> list[tuple[str, ...]]:
    """Labels of each item in which equal labels have one spelling, the shortest that occurs.

    Equal are whole numbers, ``1`` and ``1.0``, as a column of numbers with gaps becomes floating-point in pandas; and
    texts that differ only in white space or in Unicode's form of a character, such as an accent.
    """
    names = sorted({name for item in labels for name in item}, key=lambda name: (len(name), name))
    shortest: dict[str, str] = {}
    spelling = {name: shortest.setdefault(_canonical(name), name) for name in names}
    return [tuple(dict.fromkeys(spelling[name] for name in item)) for item in labels]


def _canonical(label: str) -> str:
    number = _WHOLE.fullmatch(label)
    return number[1] if number else " ".join(unicodedata.normalize("NFC", label).split())
