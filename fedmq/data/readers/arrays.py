"""Data sets of the .mat, .h5 and .npz files that circulate: arrays that ``array_files`` beside this file recognises.

These files are made by hand and copied over many disks: a part without its labels and parts of unequal width are
refused by name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, labelled_rows, refuse_keys
from fedmq.data.readers.array_files import ENDINGS, Stored, StoredByRole, What, files_of, listed, parts_of, recognise
from fedmq.data.readers.folders import (
    WIKIPEDIA_CLASSES,
    WIKIPEDIA_LISTS,
    wikipedia_lists,
    wikipedia_photos,
    wikipedia_split,
)
from fedmq.data.readers.pixel_arrays import Pile
from fedmq.data.splits import SPLITS, split_codes
from fedmq.encoders.images import Rows, is_leftover
from fedmq.errors import InputError

Array = npt.NDArray[Any]

#: Sets that are made for retrieval by labels.
LABELLED = frozenset({"mirflickr", "nuswide", "wikipedia", "pascal"})
#: Coarse and fine labels of the sets with two levels, in the order of their columns (Sun et al. 2019, SHDCH).
LEVELS: Mapping[str, tuple[int, int]] = {"fashionvc": (8, 27), "ssense": (4, 28)}


def _whole(value: Array) -> bool:
    """Whether numbers are whole, and no larger than a class is."""
    return bool((np.abs(value) < 2**31).all()) and np.array_equal(value, np.round(value))


def _own_split(path: Path, n: int) -> npt.NDArray[np.uint8] | None:
    """The ``split`` of a file, or of a folder of files, of n items; None where there is none.

    Raises:
        InputError: as :func:`fedmq.data.readers.features.split_codes`.
    """
    stored = next((array for file in files_of(path) for array in listed(file) if array.key == "split"), None)
    if stored is None:
        return None
    value = stored.read()
    # MATLAB knows no vectors, pads strings with spaces and keeps numbers as doubles.
    if value.shape in ((n, 1), (1, n)):
        value = value.reshape(-1)
    if value.dtype.kind in "US":
        value = np.char.strip(value)
    elif value.dtype.kind == "f" and _whole(value):
        value = value.astype(np.int64)
    return split_codes(stored.path, value, n)


def _flat_labels(stored: Stored, n: int) -> Array:
    """Class numbers [n], or multi-hot [n, L]."""
    value = stored.numbers()
    if value.shape in ((n, 1), (1, n)):
        value = value.reshape(-1)
    if value.ndim not in (1, 2) or len(value) != n:
        raise InputError(stored.place, f"shape {list(value.shape)}", f"{n} labels or rows of labels, as the images are")
    if value.dtype.kind == "f":
        if not _whole(value):
            raise InputError(stored.place, "values that are not whole", "class numbers [n] or multi-hot 0/1 [n, L]")
        value = value.astype(np.int64)
    if value.ndim == 1:
        if len(value) and value.min() < 0:
            raise InputError(stored.place, int(value.min()), "class numbers from 0 or 1")
        return value.astype(np.int64)
    lowest = -1 if (value < 0).any() else 0  # MATLAB's sets have both
    if (other := value[(value != lowest) & (value != 1)]).size:
        raise InputError(stored.place, int(other.flat[0]), f"multi-hot labels of {lowest} and 1")
    return (value > 0).astype(np.uint8)


def _labels(found: StoredByRole, sizes: Mapping[str, int], data: Data) -> dict[str, Array]:
    """``labels`` and ``label_names`` of all parts; empty where there are none.

    Raises:
        InputError: only some parts have labels, or theirs are of another length, kind or width.
    """
    own = [stored for (_, what), stored in found.items() if what == "labels"]
    if not own:
        return {}
    lacking = [part for part in sizes if (part, "labels") not in found]
    if lacking:
        # Without its labels a part would silently make the whole set one without labels.
        allowed = "labels of every part, or of none"
        raise InputError(str(own[0].path), f"{', '.join(s.key for s in own)}; no {lacking[0]} labels", allowed)
    read = {part: _flat_labels(found[part, "labels"], n) for part, n in sizes.items()}
    first = next(iter(sizes))
    for part, value in read.items():
        if value.shape[1:] != read[first].shape[1:]:
            wide = list(read[first].shape[1:]) or "one class number"
            allowed = f"{wide} for each item, as {found[first, 'labels'].key} has"
            raise InputError(found[part, "labels"].place, f"shape {list(value.shape)}", allowed)
    value = np.concatenate(list(read.values()))
    if value.ndim == 1:
        # MATLAB counts classes from 1.
        value = value - value.min()
    names = level_names(data.name, value.shape[1]) if value.ndim == 2 else ()
    return {"labels": value, **({"label_names": np.array(names)} if names else {})}


def level_names(name: str, columns: int) -> tuple[str, ...]:
    """``coarse:`` and ``fine:`` names of a set with two levels; none for other sets.

    Raises:
        InputError: another number of columns.
    """
    if name not in LEVELS:
        return ()
    coarse, fine = LEVELS[name]
    if columns != coarse + fine:
        raise InputError(f"data: {name}: labels", f"{columns} columns", f"{coarse} coarse and {fine} fine labels")
    return (*(f"coarse:{i:02d}" for i in range(coarse)), *(f"fine:{i:02d}" for i in range(fine)))


def _wikipedia(folder: Path, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Labels of ``raw_features.mat``, which has none, from the list files beside it."""
    if not all((folder / name).is_file() for name in WIKIPEDIA_LISTS.values()):
        return {}
    lists = wikipedia_lists(folder)
    if {split: len(pairs) for split, pairs in lists.items()} != dict(sizes):
        raise InputError(str(folder), f"lists of {[len(v) for v in lists.values()]} pairs", f"as the arrays: {sizes}")
    numbers = [number for pairs in lists.values() for _, _, number in pairs]
    return {"labels": np.array(numbers), "label_names": np.array(WIKIPEDIA_CLASSES)}


def read_arrays(data: Data) -> dict[str, Array]:
    """Precomputed features of any set, by the keys of ``features.read_features``.

    Raises:
        InputError: the arrays are not recognised, or their sizes differ; or the scenario says where pictures lie.
    """
    refuse_keys(data, ("text", "missing", "images", "annotations", "frames", "captions"), "arrays of features")
    path = data.path
    if path is None or not files_of(path):
        raise InputError("data.path", str(path), f"a file or folder of features ({', '.join(sorted(ENDINGS))})")
    found = recognise(path, pixels=False)
    parts = parts_of(found, str(path))
    arrays: dict[str, Array] = {}
    sizes = {part: found[part, "image"].shape[0] for part in parts}
    if not any(sizes.values()):
        raise InputError(found[parts[0], "image"].place, "no rows", "at least one item")
    for what in ("image", "text"):
        arrays[what] = np.concatenate(_features(found, what, sizes))
    arrays.update(_labels(found, sizes, data))
    if data.name == "wikipedia" and "labels" not in arrays:
        arrays.update(_wikipedia(path if path.is_dir() else path.parent, sizes))
    if "labels" not in arrays and data.name in LABELLED:
        # A .mat file that was cut off between two arrays looks like a whole one that has fewer.
        names = ", ".join(stored.key for stored in found.values())
        raise InputError(str(path), f"{names}; no labels", f"labels, too, e.g. L_tr or LAll: {data.name} has some")
    if parts == ["all"]:
        own = _own_split(path, sizes["all"])
        arrays.update({} if own is None else {"split": own})
    elif data.name == "wikipedia" and list(sizes) == ["train", "test"]:
        arrays["split"] = wikipedia_split(sizes["train"], sizes["test"])
    else:
        codes = [SPLITS.index(part if "train" in parts or part != "database" else "train") for part in parts]
        arrays["split"] = np.repeat(codes, list(sizes.values())).astype(np.uint8)
    again = _again(arrays, sizes) if "database" in sizes else np.zeros(0, dtype=np.bool_)
    if again.any():
        arrays = _only(arrays, np.flatnonzero(~again))
    if data.labelled:
        arrays = _only(arrays, labelled_rows(arrays.get("labels"), str(path)))
    return arrays


def _only(arrays: Mapping[str, Array], rows: npt.NDArray[np.int64]) -> dict[str, Array]:
    return {name: value if name == "label_names" else value[rows] for name, value in arrays.items()}


def _features(found: StoredByRole, what: What, sizes: Mapping[str, int]) -> list[Array]:
    """Images or texts of each part, as floats.

    Raises:
        InputError: a part has another number of items, or another width than the first.
    """
    read: list[Array] = []
    for part, n in sizes.items():
        stored = found[part, what]
        value = stored.numbers()
        if value.ndim < 2 or len(value) != n:
            raise InputError(stored.place, f"shape {list(value.shape)}", f"{n} rows, as the images have")
        if read and value.shape[1:] != read[0].shape[1:]:
            wide = " x ".join(map(str, read[0].shape[1:]))
            first = found[next(iter(sizes)), what].key
            raise InputError(stored.place, f"shape {list(value.shape)}", f"rows of {wide} numbers, as {first} has")
        # Counts and 0/1 tags are features too.
        read.append(value if value.dtype.kind == "f" else value.astype(np.float32))
    return read


def _again(arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Rows of the part ``database`` that are items of another part once more: bool [n].

    In most published hashing files the database holds the training items too, and in some the queries, each of which
    would find itself. They are the same items where image, text and labels are equal to the last digit; of several
    equal rows, as many are taken away as the other parts have.
    """
    compared = [arrays[name] for name in ("image", "text", "labels") if name in arrays]

    def digest(row: int) -> bytes:
        # In the type that is used: a part stored in double precision holds the same items.
        return hashlib.blake2b(b"".join(np.asarray(each[row], np.float32).tobytes() for each in compared)).digest()

    ends = dict(zip(sizes, np.cumsum(list(sizes.values())).tolist(), strict=True))
    inside = range(ends["database"] - sizes["database"], ends["database"])
    known = Counter(
        digest(row) for part, n in sizes.items() if part != "database" for row in range(ends[part] - n, ends[part])
    )
    again = np.zeros(len(arrays["image"]), dtype=np.bool_)
    for row in inside:
        mark = digest(row)
        if known[mark] > 0:
            known[mark] -= 1
            again[row] = True
    return again


# --- pixels ---------------------------------------------------------------------------------------------------------


def holds_pixels(data: Data) -> bool:
    """Whether ``data.path`` is a file of arrays, or a folder of such files and of no folders: no set as distributed."""
    path = data.path
    if path is None or not files_of(path):
        return False
    return not (path.is_dir() and any(inner.is_dir() and not is_leftover(inner.name) for inner in path.iterdir()))


def read_wikipedia(data: Data) -> RawSet:
    """Wikipedia, as distributed or as arrays of pixels, texts and labels (FedUCH's ``WikiPedia.mat``).

    Raises:
        InputError: as :func:`read_pixels` and ``folders.wikipedia_photos``.
    """
    return read_pixels(data) if holds_pixels(data) else wikipedia_photos(data)


def read_pixels(data: Data) -> RawSet:
    """A set whose pictures are pixels in an array, beside tags and labels: ``IAll``, ``YAll``, ``LAll`` and the like.

    Sources: FLICKR-25K.mat of DCMH; *-iall.mat, *-yall.mat, *-lall.mat of DJSRH and DGCPN; image.mat, tag.mat and
    label.mat of SHDCH (FashionVC, Ssense).

    Raises:
        InputError: the arrays are not recognised, split into parts or no pictures, or their sizes differ; or the
            scenario says where pictures lie.
    """
    refuse_keys(data, ("images", "annotations", "frames"), "arrays of pixels")
    path = data.path
    if path is None or not files_of(path):
        allowed = f"a folder or file of {data.name}; see docs/reference/data_sets.md for its layout"
        raise InputError("data.path", str(path), allowed)
    found = recognise(path, pixels=True)
    keys = ", ".join(stored.key for stored in found.values())
    if parts_of(found, str(path)) != ["all"]:
        # Whether an item of the database is trained on, too, its pixels alone say: to compare them is to read them all.
        allowed = "every item once: IAll, YAll and LAll of all items, and a `split` that says the part of each"
        raise InputError(str(path), f"pixels that are split already, {keys}", allowed)
    if ("all", "labels") not in found:
        raise InputError(str(path), keys, "pixels, tags and labels of all items")
    bag, image = found["all", "text"].numbers(), found["all", "image"]
    n = len(bag)
    if bag.ndim != 2 or n not in (image.shape[0], image.shape[-1]):
        raise InputError(str(path), f"tags {list(bag.shape)}, images {list(image.shape)}", "equally many, tags in rows")
    labels = _flat_labels(found["all", "labels"], n)
    if bag.shape[1] == 0:
        raise InputError(found["all", "text"].place, f"shape {list(bag.shape)}", "at least one tag")
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.flatnonzero(~np.isfinite(bag.astype(np.float32)).all(axis=1))
    if len(wrong):
        allowed = "finite float32 numbers"
        raise InputError(found["all", "text"].place, f"a value in row {wrong[0]} that is not finite", allowed)
    if labels.ndim == 1:
        labels = (labels[:, None] == np.unique(labels)).astype(np.uint8)
    names = level_names(data.name, labels.shape[1]) or tuple(f"label-{i:03d}" for i in range(labels.shape[1]))
    # MATLAB keeps even 0 and 1 as doubles.
    with np.errstate(invalid="ignore"):
        narrow = bag.astype(np.uint8)
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(f"{row:06d}" for row in range(n)),
            pictures=Rows(Pile(image, n).checked(), tuple(range(n))),
            captions=((),) * n,
            bag=narrow if np.array_equal(narrow, bag) else bag.astype(np.float32),
            labels=labels.astype(np.uint8),
            label_names=names,
            split=_own_split(path, n),
        )
    )
