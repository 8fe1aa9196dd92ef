"""Read and validate a file of precomputed image and text features, from any encoder."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.data.labels import labels_of, strings_in, unique_strings
from fedmq.data.prepared_arrays import Present, first_rows, presence
from fedmq.data.readers.array_files import meaning
from fedmq.data.readers.formats import Stored, list_arrays
from fedmq.data.splits import draw_split, first_of_equals, same_rows, split_codes
from fedmq.data.warnings import NOTHING, DataWarnings, of_vectors
from fedmq.errors import InputError

Array = npt.NDArray[Any]

PRESENT = ("image_present", "text_present")
KNOWN = ("image", "text", "captions", "labels", "label_names", "first_class", "split", "keys", "filename", *PRESENT)
FLOATS = ("float16", "float32", "float64")
CHUNK = 4096  # rows per check for finite values


@dataclass(frozen=True)
class FeatureSet:
    """Validated features."""

    image: npt.NDArray[np.float32]  # float32 [n, d_i], finite; rows of items without an image are zero
    # Float32 [N, d_t], finite: the captions of all items one after the other; one row of zeros for an item without
    # captions.
    text: npt.NDArray[np.float32]
    captions: npt.NDArray[np.int64]  # int64 [n], number of captions of each item, 0 for an item without
    labels: npt.NDArray[np.uint8] | None  # multi-hot uint8 [n, L], or None
    label_names: tuple[str, ...]  # L names; empty without labels
    split: npt.NDArray[np.uint8]  # uint8 [n], indices into ``SPLITS``
    split_given: bool  # whether the file contains the split; otherwise it was sampled
    keys: tuple[str, ...]  # n unique item keys
    # Bool [n, 2], whether each item has an image, and whether it has captions; None if all items have both.
    present: npt.NDArray[np.bool_] | None = None
    column: tuple[str, ...] | None = None  # n values of the key ``data.column``; None without it
    warnings: DataWarnings = NOTHING  # counts of what is probably unintended


#: Range of the largest absolute value of a vector: the sum of its squares must neither overflow nor vanish.
_SMALLEST, _LARGEST = 1e-12, 1e16


def _read_arrays(path: Path, column: str | None) -> dict[str, Array]:
    """Read the arrays of the known keys, and of the key by which the partition distributes the items."""
    if path.suffix not in (".npz", ".safetensors"):
        raise InputError(str(path), path.suffix or "no ending", ".npz or .safetensors")
    if not path.is_file():
        raise InputError(str(path), "no such file", "a file of features (.npz or .safetensors)")
    listed = {stored.key: stored for stored in list_arrays(path)}
    for name in listed:
        near = difflib.get_close_matches(name, KNOWN, 1, 0.8)
        if name not in KNOWN and near and near[0] not in listed:
            raise InputError(
                f"{path}: {name}", "an unknown key", f"did you mean {near[0]}? Known keys: {', '.join(KNOWN)}"
            )
    for name, stored in listed.items():
        if name not in (*KNOWN, column) and _is_part(stored):
            allowed = "image and text with all items, and split [n] with the part of each"
            raise InputError(f"{path}: {name}", "an array of a part of the items, which would be ignored", allowed)
    if column is not None and (column in KNOWN or column not in listed):
        others = [name for name in listed if name not in KNOWN]
        found = f"keys {', '.join(others)} in addition to the known ones" if others else "only the known keys"
        raise InputError(f"{path}: partition.column {column}", found, "a key of its own: strings or whole numbers [n]")
    return {name: listed[name].read() for name in (*KNOWN, *filter(None, [column])) if name in listed}


def _is_part(stored: Stored) -> bool:
    """Whether a name such as ``image_test`` is that of the images or texts of one part, and the array holds vectors."""
    part, role = meaning(stored.key) or ("all", "labels")
    return part != "all" and role != "labels" and len(stored.shape) > 1


def _present(path: Path, arrays: Mapping[str, Array], n: int) -> Present | None:
    """The arrays ``image_present`` and ``text_present`` as bool [n, 2]; None if every item has both modalities."""
    columns = []
    for name in PRESENT:
        value = arrays.get(name, np.ones(n, np.bool_))
        if value.shape != (n,) or value.dtype.kind not in "biu" or not ((value == 0) | (value == 1)).all():
            raise InputError(f"{path}: {name}", f"{value.dtype} {list(value.shape)}", f"true or false (1 or 0) [{n}]")
        columns.append(value)
    found = presence(*columns)
    if found is not None and not (some := found.any(axis=1)).all():
        row = int(np.flatnonzero(~some)[0])
        raise InputError(f"{path}: {PRESENT[0]}", f"neither image nor text in row {row}", "at least one for each item")
    return found


def floats(
    path: Path, name: str, value: Array, dimensions: tuple[int, ...], present: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float32]:
    """Convert features to float32, in which all values must be finite.

    Rows that are not ``present`` [n] may hold any values and become zero.

    Raises:
        InputError: another shape or dtype, or a value that is not finite.
    """
    allowed = f"{' or '.join(map(str, dimensions))} dimensions, none of size 0"
    if value.ndim not in dimensions or 0 in value.shape:
        raise InputError(f"{path}: {name}", f"shape {list(value.shape)}", allowed)
    if value.dtype.name not in FLOATS:
        raise InputError(f"{path}: {name}", f"dtype {value.dtype}", ", ".join(FLOATS))
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(value, dtype=np.float32)
    if present is not None:
        wide = np.where(present.reshape(-1, *[1] * (wide.ndim - 1)), wide, np.float32(0))
    for start in range(0, len(wide), CHUNK):
        fine = np.isfinite(wide[start : start + CHUNK]).reshape(len(wide[start : start + CHUNK]), -1).all(axis=1)
        if not fine.all():
            row = start + int(np.flatnonzero(~fine)[0])
            allowed = f"finite float32 values; {name}_present [n] says which items have no {name}"
            raise InputError(f"{path}: {name}", f"a value in row {row} that is not finite", allowed)
    return wide


def _check_lengths(path: Path, name: str, vectors: npt.NDArray[np.float32], items: npt.NDArray[np.int64]) -> None:
    """Refuse vectors so long or so short that float32 cannot scale them to unit length; zeros are allowed.

    ``items`` int64 [N] has the row in the file of each vector's item.
    """
    largest = np.maximum(vectors.max(axis=1), -vectors.min(axis=1))
    wrong = np.flatnonzero((largest > _LARGEST) | ((largest > 0) & (largest < _SMALLEST)))
    if len(wrong):
        found = f"a vector in row {items[wrong[0]]} whose largest value is {largest[wrong[0]]:.2g}"
        allowed = f"vectors of zeros, or with a largest value from {_SMALLEST:g} to {_LARGEST:g}; scale the features"
        raise InputError(f"{path}: {name}", found, allowed)


def _captions(
    path: Path, value: Array | None, text: npt.NDArray[np.float32], present: Present | None
) -> npt.NDArray[np.int64]:
    """Number of captions of each item; 0 for items without text, even if the file states another number.

    Without the key ``captions``, rows of zeros at the end of an item's captions are padding.
    """
    n, most = text.shape[:2]
    with_text = np.ones(n, np.bool_) if present is None else present[:, 1]
    if value is None and most == 1:
        return np.where(with_text, 1, 0).astype(np.int64)
    if value is None:
        filled = np.stack([part.any(axis=1) for part in text])
        counts = most - filled[:, ::-1].argmax(axis=1)
        counts[~filled.any(axis=1)] = 0
        gaps = np.flatnonzero((filled.sum(axis=1) < counts) & with_text)
        if len(gaps):
            allowed = f"zeros only after an item's captions, or a key captions [{n}] with their numbers"
            raise InputError(f"{path}: text", f"a row of zeros before another caption in row {gaps[0]}", allowed)
        none = np.flatnonzero((counts == 0) & with_text)
        if len(none):
            allowed = f"at least one caption; text_present [{n}] says which items have none"
            raise InputError(f"{path}: text", f"only zeros in row {none[0]}", allowed)
        return np.where(with_text, counts, 0).astype(np.int64)
    place = f"{path}: captions"
    if value.shape != (n,) or value.dtype.kind not in "iu":
        raise InputError(place, f"{value.dtype} {list(value.shape)}", f"whole numbers [{n}]")
    wrong = np.flatnonzero(((value < 1) | (value > most)) & with_text)
    if len(wrong):
        raise InputError(
            place, f"{value[wrong[0]]} in row {wrong[0]}", f"1 to {most}, as text has {most} captions per item"
        )
    return np.where(with_text, value, 0).astype(np.int64)


def _check_axes(path: Path, shape: tuple[int, ...], captions: npt.NDArray[np.int64], *, stated: bool) -> None:
    """Refuse texts [n, C, d] that are probably [n, d, C]: more captions than numbers in each, without gaps or reason.

    ``captions`` are the numbers of captions of the items that have some, ``stated`` whether the file states them.
    """
    n, most, width = shape
    if most <= width or not len(captions) or (captions.max() == most if stated else captions.min() < most):
        return
    found = f"shape {[n, most, width]}: {most} captions of {width} numbers for each item"
    allowed = f"[{n}, captions, numbers]"
    if stated:
        raise InputError(f"{path}: text", f"{found}, of which at most {captions.max()} are used", allowed)
    raise InputError(
        f"{path}: text", found, f"{allowed}; if each item has {most} captions, a key captions [{n}] with their numbers"
    )


def _values(path: Path, name: str, value: Array, n: int) -> tuple[str, ...]:
    """The values of the key by which the partition distributes the items: strings or whole numbers."""
    return strings_in(f"{path}: {name}", value.astype(np.str_) if value.dtype.kind in "iu" else value, n)


def _with_absent(path: Path, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """The arrays of a file of one modality, with a column of zeros for the other one, which no item has."""
    absent = [name for name in ("image", "text") if name not in arrays]
    if len(absent) == 2:
        raise InputError(f"{path}: image", "no such key", "image [n, d_i], or text [n, d_t] or [n, C, d_t], or both")
    for name in absent:
        other = arrays["text" if name == "image" else "image"]
        n, mark = len(other) if other.ndim else 0, f"{name}_present"
        if mark in arrays and np.any(arrays[mark]):
            raise InputError(f"{path}: {mark}", f"items with {name}", f"a key {name}, or no item with {name}")
        arrays = {**arrays, name: np.zeros((n, 1), np.float32), mark: np.zeros(n, np.bool_)}
    return arrays


def checked(
    path: Path, arrays: Mapping[str, Array], seed: int, column: str | None = None, *, merge: bool = False
) -> FeatureSet:
    """Validate arrays with the keys of :func:`read_features`, from any kind of file; errors as there.

    ``merge`` joins rows with the same image to one item, if the file does not name its items. Seed and column as there.
    """
    arrays = _with_absent(path, arrays)
    n = len(arrays["image"]) if arrays["image"].ndim else 0
    if arrays["text"].ndim and len(arrays["text"]) != n:
        raise InputError(f"{path}: text", f"{len(arrays['text'])} items", f"as many as image has, {n}")
    present = _present(path, arrays, n)
    image = floats(path, "image", arrays["image"], (2,), None if present is None else present[:, 0])
    text = floats(path, "text", arrays["text"], (2, 3), None if present is None else present[:, 1])
    if n < 2:
        raise InputError(f"{path}: image", f"{n} item", "at least 2: one to train on, one to test on")
    text = text if text.ndim == 3 else text[:, None, :]
    captions = _captions(path, arrays.get("captions"), text, present)
    _check_axes(path, text.shape, captions[captions > 0], stated="captions" in arrays)
    kept = text[np.arange(text.shape[1]) < np.maximum(captions, 1)[:, None]]
    _check_lengths(path, "image", image, np.arange(n))
    _check_lengths(path, "text", kept, np.repeat(np.arange(n), np.maximum(captions, 1)))
    padding = 0 if "captions" in arrays else int((text.shape[1] - captions[captions > 0]).sum())
    labels: npt.NDArray[np.uint8] | None = None
    label_names: tuple[str, ...] = ()
    if "labels" in arrays:
        labels, label_names = labels_of(path, arrays["labels"], n, arrays.get("label_names"), arrays.get("first_class"))
    key = next((name for name in ("keys", "filename") if name in arrays), None)
    given = split_codes(path, arrays["split"], n) if "split" in arrays else None
    found = FeatureSet(
        image=image,
        text=kept,
        captions=captions,
        labels=labels,
        label_names=label_names,
        split=np.zeros(n, np.uint8) if given is None else given,
        split_given=given is not None,
        keys=unique_strings(path, key, arrays[key], n) if key else tuple(f"{index:06d}" for index in range(n)),
        present=present,
        column=None if column is None else _values(path, column, arrays[column], n),
    )
    merged = _one_item_per_image(path, found) if key is None and merge else found
    if given is None:
        split = draw_split(len(merged.image), seed, same_rows(merged.image))
        merged = replace(merged, split=split)
    counted = of_vectors(merged.image, merged.text, merged.captions, merged.present, merged.split)
    counted = counted.model_copy(update={"padding": padding, "merged": n - len(merged.image)})
    return replace(merged, warnings=counted)


def _one_item_per_image(path: Path, found: FeatureSet) -> FeatureSet:
    """Join rows of one split with equal images: the image once, with the captions and labels of all its rows."""
    n, present = len(found.image), found.present
    same = same_rows(found.image)  # rows of zeros differ, so rows without an image stay apart
    apart = [same.tolist(), found.split.tolist(), found.column or [""] * n, [True] * n]
    if present is not None:
        apart[3] = present[:, 1].tolist()
    first = first_of_equals(zip(*apart, strict=True))
    items, item = np.unique(first, return_inverse=True)
    if len(items) == n:
        return found
    if not same.any():
        raise InputError(f"{path}: image", f"the same image in all {n} rows", "at least 2 images")
    order = np.argsort(item, kind="stable")
    counts, starts = np.maximum(found.captions, 1), first_rows(found.captions)
    text = np.concatenate([found.text[starts[row] : starts[row] + counts[row]] for row in order.tolist()])
    labels = None
    if found.labels is not None:
        labels = np.zeros((len(items), found.labels.shape[1]), np.uint8)
        np.maximum.at(labels, item, found.labels)
    return replace(
        found,
        image=found.image[items],
        text=text,
        captions=np.bincount(item, weights=found.captions).astype(np.int64),
        labels=labels,
        split=found.split[items],
        keys=tuple(found.keys[row] for row in items.tolist()),
        present=None if present is None else present[items],
        column=None if found.column is None else tuple(found.column[row] for row in items.tolist()),
    )


def read_features(path: Path, seed: int = 0, column: str | None = None) -> FeatureSet:
    """Read a ``features`` data set.

    Required keys: ``image`` [n, d_i] and ``text`` [n, d_t] or [n, C, d_t], both float16, float32 or float64; one of
    them is left out if no item has that modality. Optional:
    ``captions`` int [n]; ``labels`` int [n] or 0/1 [n, L]; ``label_names`` strings [L] (in a .safetensors file a JSON
    list in the metadata); ``first_class`` 0 or 1, the number of the first class; ``split`` [n] of train, val, test,
    public, database or 0 to 4; ``keys`` (or ``filename``) strings [n]; ``image_present`` and ``text_present`` bool [n],
    for items that lack one of the two, whose row in ``image`` or ``text`` is ignored. Other keys are ignored.

    Args:
        path: .npz or .safetensors file.
        seed: seed of the 80/10/10 split if the file has no ``split``.
        column: further key [n] by whose values the partition distributes the items.

    Raises:
        InputError: the file or an array is invalid; the message gives file, key, found and allowed values.
    """
    return checked(path, _read_arrays(path, column), seed, column, merge=True)
