"""Read data sets from published .mat, .h5 and .npz files, whose arrays ``array_files`` identifies.

Such files vary and are often damaged, so parts without labels and parts of unequal width are rejected.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data.labels import label_array
from fedmq.data.raw_set import RawSet, checked, labelled_rows, refuse_keys
from fedmq.data.readers.array_files import ENDINGS, PixelArray, Role, StoredByRole, files_of, parts_of, recognise
from fedmq.data.readers.folders import (
    WIKIPEDIA_CLASSES,
    WIKIPEDIA_LISTS,
    mirflickr_photos,
    nuswide_photos,
    wikipedia_lists,
    wikipedia_photos,
    wikipedia_split,
)
from fedmq.data.readers.formats import Stored, list_arrays
from fedmq.data.splits import SPLITS, split_codes
from fedmq.encoders.image_sets import is_leftover
from fedmq.errors import InputError

Array = npt.NDArray[Any]

#: Sets used for retrieval by labels, which need them.
LABELLED = frozenset({"mirflickr", "nuswide", "wikipedia", "pascal"})
#: Numbers of coarse and fine labels of two-level sets, in column order (Sun et al. 2019, SHDCH).
LEVELS: Mapping[str, tuple[int, int]] = {"fashionvc": (8, 27), "ssense": (4, 28)}


def _stored_split(path: Path, n: int) -> npt.NDArray[np.uint8] | None:
    """The ``split`` array stored in a file or folder, uint8 [n]; None if there is none."""
    stored = next((array for file in files_of(path) for array in list_arrays(file) if array.key == "split"), None)
    if stored is None:
        return None
    return split_codes(stored.path, stored.vector(n), n)


def _stored_column(path: Path, column: str, sizes: Mapping[str, int]) -> Array:
    """The array by whose values the partition distributes the items, strings or whole numbers [n]."""
    place = f"{path}: partition.column {column}"
    if (parts := list(sizes)) != ["all"]:
        found = f"arrays of the parts {', '.join(parts)}"
        raise InputError(place, found, "arrays of all items in one order, with their parts in an array split")
    listed = [array for file in files_of(path) for array in list_arrays(file, column)]
    stored = next((array for array in listed if array.key == column), None)
    if stored is None:
        raise InputError(place, f"arrays {', '.join(array.key for array in listed)}", "an array of this name")
    return stored.vector(sizes["all"])


def _flat_labels(stored: Stored, n: int) -> Array:
    """Read labels as class numbers int64 [n] or multi-hot uint8 [n, L]."""
    return label_array(stored.place, stored.numbers(), n)


def _labels(by_role: StoredByRole, sizes: Mapping[str, int], data: Data) -> dict[str, Array]:
    """``labels`` and ``label_names`` of all parts, whose kinds and widths must be equal; empty without labels."""
    stored_labels = [stored for (_, role), stored in by_role.items() if role == "labels"]
    if not stored_labels:
        return {}
    lacking = [part for part in sizes if (part, "labels") not in by_role]
    if lacking:
        allowed = "labels of every part, or of none"
        keys = ", ".join(stored.key for stored in stored_labels)
        raise InputError(str(stored_labels[0].path), f"{keys}; no {lacking[0]} labels", allowed)
    read = {part: _flat_labels(by_role[part, "labels"], n) for part, n in sizes.items()}
    first = next(iter(sizes))
    for part, value in read.items():
        if value.shape[1:] != read[first].shape[1:]:
            wide = list(read[first].shape[1:]) or "one class number"
            allowed = f"{wide} for each item, as {by_role[first, 'labels'].key} has"
            raise InputError(by_role[part, "labels"].place, f"shape {list(value.shape)}", allowed)
    value = np.concatenate(list(read.values()))
    names = level_names(data.name, value.shape[1]) if value.ndim == 2 else ()
    return {"labels": value, **({"label_names": np.array(names)} if names else {})}


def level_names(name: str, columns: int) -> tuple[str, ...]:
    """``coarse:`` and ``fine:`` label names of a two-level set; empty for other sets.

    Raises:
        InputError: the number of columns is wrong.
    """
    if name not in LEVELS:
        return ()
    coarse, fine = LEVELS[name]
    if columns != coarse + fine:
        raise InputError(f"data: {name}: labels", f"{columns} columns", f"{coarse} coarse and {fine} fine labels")
    return (*(f"coarse:{i:02d}" for i in range(coarse)), *(f"fine:{i:02d}" for i in range(fine)))


def _wikipedia(folder: Path, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Labels for ``raw_features.mat``, which has none, from the list files in its folder; empty without them."""
    if not all((folder / name).is_file() for name in WIKIPEDIA_LISTS.values()):
        return {}
    lists = wikipedia_lists(folder)
    if {split: len(pairs) for split, pairs in lists.items()} != dict(sizes):
        raise InputError(str(folder), f"lists of {[len(v) for v in lists.values()]} pairs", f"as the arrays: {sizes}")
    numbers = [number for pairs in lists.values() for _, _, number in pairs]
    one_hot = np.eye(len(WIKIPEDIA_CLASSES), dtype=np.uint8)[numbers]
    return {"labels": one_hot, "label_names": np.array(WIKIPEDIA_CLASSES)}


def read_arrays(data: Data) -> dict[str, Array]:
    """Read precomputed features of any set, by the keys of ``features.read_features``.

    Raises:
        InputError: the arrays cannot be identified, their sizes differ, or ``data`` has keys that apply to images.
    """
    refuse_keys(data, ("text", "missing", "images", "annotations", "frames", "captions"), "arrays of features")
    path = data.path
    if path is None or not files_of(path):
        raise InputError("data.path", str(path), f"a file or folder of features ({', '.join(sorted(ENDINGS))})")
    by_role = recognise(path, pixels=False)
    parts = parts_of(by_role, str(path))
    arrays: dict[str, Array] = {}
    sizes = {part: by_role[part, "image"].shape[0] for part in parts}
    if not any(sizes.values()):
        raise InputError(by_role[parts[0], "image"].place, "no rows", "at least one item")
    for role in ("image", "text"):
        arrays[role] = np.concatenate(_features(by_role, role, sizes))
    arrays.update(_labels(by_role, sizes, data))
    if data.name == "wikipedia" and "labels" not in arrays:
        arrays.update(_wikipedia(path if path.is_dir() else path.parent, sizes))
    if "labels" not in arrays and data.name in LABELLED:
        # A .mat file truncated between two arrays looks like a complete file with fewer arrays.
        names = ", ".join(stored.key for stored in by_role.values())
        raise InputError(str(path), f"{names}; no labels", f"labels, too, e.g. L_tr or LAll: {data.name} has some")
    if parts == ["all"]:
        split = _stored_split(path, sizes["all"])
        arrays.update({} if split is None else {"split": split})
    elif data.name == "wikipedia" and list(sizes) == ["train", "test"]:
        arrays["split"] = wikipedia_split(sizes["train"], sizes["test"])
    else:
        codes = [SPLITS.index(part if "train" in parts or part != "database" else "train") for part in parts]
        arrays["split"] = np.repeat(codes, list(sizes.values())).astype(np.uint8)
    if data.column is not None:
        arrays[data.column] = _stored_column(path, data.column, sizes)
    duplicates = _duplicates(arrays, sizes) if "database" in sizes else np.zeros(0, dtype=np.bool_)
    if duplicates.any():
        arrays = _take(arrays, np.flatnonzero(~duplicates))
    if data.labelled:
        arrays = _take(arrays, labelled_rows(arrays.get("labels"), str(path)))
    return arrays


def _take(arrays: Mapping[str, Array], rows: npt.NDArray[np.int64]) -> dict[str, Array]:
    return {name: value if name == "label_names" else value[rows] for name, value in arrays.items()}


def _features(by_role: StoredByRole, role: Role, sizes: Mapping[str, int]) -> list[Array]:
    """Read the images or the texts of each part as floats."""
    read: list[Array] = []
    for part, n in sizes.items():
        stored = by_role[part, role]
        value = stored.numbers()
        if value.ndim < 2 or len(value) != n:
            raise InputError(stored.place, f"shape {list(value.shape)}", f"{n} rows, as the images have")
        if read and value.shape[1:] != read[0].shape[1:]:
            wide = " x ".join(map(str, read[0].shape[1:]))
            first = by_role[next(iter(sizes)), role].key
            raise InputError(stored.place, f"shape {list(value.shape)}", f"rows of {wide} numbers, as {first} has")
        # Word counts and 0/1 tags are integers.
        read.append(value if value.dtype.kind == "f" else value.astype(np.float32))
    return read


def _duplicates(arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> npt.NDArray[np.bool_]:
    """Mask, bool [n], of rows of the part ``database`` that duplicate items of other parts.

    In most published hashing files the database also holds the training items, and in some the queries, each of which
    would retrieve itself. Items are duplicates if image, text and labels are equal in float32. Of several equal rows,
    as many are marked as the other parts hold.
    """
    compared = [arrays[name] for name in ("image", "text", "labels") if name in arrays]

    def digest(row: int) -> bytes:
        # In float32, the type in use: a part may be stored in double precision.
        return hashlib.blake2b(b"".join(np.asarray(each[row], np.float32).tobytes() for each in compared)).digest()

    ends = dict(zip(sizes, np.cumsum(list(sizes.values())).tolist(), strict=True))
    database = range(ends["database"] - sizes["database"], ends["database"])
    known = Counter(
        digest(row) for part, n in sizes.items() if part != "database" for row in range(ends[part] - n, ends[part])
    )
    duplicates = np.zeros(len(arrays["image"]), dtype=np.bool_)
    for row in database:
        content = digest(row)
        if known[content] > 0:
            known[content] -= 1
            duplicates[row] = True
    return duplicates


# --- pixels ---------------------------------------------------------------------------------------------------------


def holds_pixels(data: Data) -> bool:
    """Whether ``data.path`` is an array file, or a folder of array files without subfolders."""
    path = data.path
    if path is None or not files_of(path):
        return False
    return not (path.is_dir() and any(inner.is_dir() and not is_leftover(inner.name) for inner in path.iterdir()))


def read_pixels(data: Data) -> RawSet:
    """Read a set stored as arrays of pixels, tags and labels, named ``IAll``, ``YAll``, ``LAll`` or similar.

    Sources: FLICKR-25K.mat of DCMH; *-iall.mat, *-yall.mat, *-lall.mat of DJSRH and DGCPN; image.mat, tag.mat and
    label.mat of SHDCH (FashionVC, Ssense).

    Raises:
        InputError: the arrays cannot be identified, are split into parts, are not images or differ in size, or
            ``data`` has keys that apply to image files.
    """
    refuse_keys(data, ("images", "annotations", "frames"), "arrays of pixels")
    path = data.path
    if path is None or not files_of(path):
        allowed = f"a folder or file of {data.name}; see docs/reference/data_sets.md for its layout"
        raise InputError("data.path", str(path), allowed)
    by_role = recognise(path, pixels=True)
    keys = ", ".join(stored.key for stored in by_role.values())
    if parts_of(by_role, str(path)) != ["all"]:
        # Finding training items in the database would require reading and comparing all pixels.
        allowed = "every item once: IAll, YAll and LAll of all items, and a `split` that says the part of each"
        raise InputError(str(path), f"pixels that are split already, {keys}", allowed)
    if ("all", "labels") not in by_role:
        raise InputError(str(path), keys, "pixels, tags and labels of all items")
    bag, image = by_role["all", "text"].numbers(), by_role["all", "image"]
    n = len(bag)
    if bag.ndim != 2 or n not in (image.shape[0], image.shape[-1]):
        raise InputError(str(path), f"tags {list(bag.shape)}, images {list(image.shape)}", "equally many, tags in rows")
    labels = _flat_labels(by_role["all", "labels"], n)
    if bag.shape[1] == 0:
        raise InputError(by_role["all", "text"].place, f"shape {list(bag.shape)}", "at least one tag")
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.flatnonzero(~np.isfinite(bag.astype(np.float32)).all(axis=1))
    if len(wrong):
        allowed = "finite float32 numbers"
        raise InputError(by_role["all", "text"].place, f"a value in row {wrong[0]} that is not finite", allowed)
    numbers = np.unique(labels) if labels.ndim == 1 else np.arange(labels.shape[1])
    if labels.ndim == 1:
        labels = (labels[:, None] == numbers).astype(np.uint8)
    names = level_names(data.name, labels.shape[1]) or tuple(f"label-{number:03d}" for number in numbers)
    # MATLAB stores even 0/1 tags as doubles.
    with np.errstate(invalid="ignore"):
        narrow = bag.astype(np.uint8)
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(f"{row:06d}" for row in range(n)),
            images=PixelArray(tuple(range(n)), image, n).checked(),
            captions=((),) * n,
            bag=narrow if np.array_equal(narrow, bag) else bag.astype(np.float32),
            labels=labels.astype(np.uint8),
            label_names=names,
            split=_stored_split(path, n),
        )
    )


def _photos_or_pixels(photos: Callable[[Data], RawSet], data: Data) -> RawSet:
    """Read a set as distributed, or as arrays of pixels, tags and labels (Wikipedia: FedUCH's ``WikiPedia.mat``)."""
    return read_pixels(data) if holds_pixels(data) else photos(data)


read_wikipedia = partial(_photos_or_pixels, wikipedia_photos)
read_mirflickr = partial(_photos_or_pixels, mirflickr_photos)
read_nuswide = partial(_photos_or_pixels, nuswide_photos)
