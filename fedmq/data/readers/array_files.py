"""Arrays of .mat, .h5 and .npz files: images, texts and labels of each part are identified by the arrays' names.

A name is split into words: ``I_tr``, ``train_imgs_deep`` and ``img_train`` are training images, ``LAll`` and ``Label``
are the labels of all items. Image arrays of two dimensions are features, those of four are pixels.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedmq.data.readers.formats import Stored, in_quarantine, list_arrays, read_hdf5_row
from fedmq.data.splits import SPLITS
from fedmq.encoders.image_sets import StoredImages, is_leftover
from fedmq.encoders.images import Pixels
from fedmq.errors import InputError
from fedmq.storage.cache import file_digests

Array = npt.NDArray[Any]
Role = Literal["image", "text", "labels"]

ENDINGS = frozenset({".mat", ".h5", ".hdf5", ".h5py", ".npz"})
PARTS: Mapping[str, frozenset[str]] = {
    "train": frozenset({"tr", "tra", "train", "training"}),
    "val": frozenset({"val", "valid", "validation"}),
    "test": frozenset({"te", "test", "query", "q"}),
    "database": frozenset({"db", "dbase", "base", "database", "ret", "retrieval"}),
}
# The order matters: `train_imgs_labels` are labels.
WORDS: Mapping[Role, frozenset[str]] = {
    "labels": frozenset({"l", "lab", "labs", "label", "labels", "lall"}),
    "text": frozenset({"t", "y", "txt", "txts", "text", "texts", "tag", "tags", "sentence", "sentences", "bow"}),
    "image": frozenset({"i", "f", "x", "img", "imgs", "image", "images"}),
}


def files_of(path: Path) -> list[Path]:
    """Array files at a path: the file itself, or those in the folder, or else those in its ``train`` and ``test``."""
    if not path.is_dir():
        return [path] if path.suffix.lower() in ENDINGS else []
    # No deeper search: a symbolic link may lead back up.
    for folders in ([path], [path / "test", path / "train"]):
        inside = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
        if found := [file for file in inside if file.suffix.lower() in ENDINGS and not is_leftover(file.name)]:
            return found
    return []


def _words(key: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]", key)}


def meaning(key: str, tra: bool = False) -> tuple[str, Role] | None:
    """The part (``all`` or a split) and the role of an array, from the words of its name; None if the role is unknown.

    If the file also has arrays of a part ``tra``, ``tr`` is the database, as in LtCMH's files.

    >>> meaning("train_imgs_labels"), meaning("I_te"), meaning("YAll")
    (('train', 'labels'), ('test', 'image'), ('all', 'text'))
    >>> meaning("I_tr"), meaning("I_tr", tra=True)
    (('train', 'image'), ('database', 'image'))
    """
    words = _words(key)
    part = next((part for part, known in PARTS.items() if words & known), "all")
    if tra and "tr" in words:
        part = "database"
    return next(((part, role) for role, known in WORDS.items() if words & known), None)


#: Generic names, which do not identify an array's part or role.
_BARE = ("data", "feature", "features", "label", "labels")


def _name(array: Stored, *, alone: bool) -> str:
    """An array's name, prefixed by the file's if it is generic and the only array there (FedCMR's files)."""
    return f"{array.path.stem}_{array.key}" if alone and array.key.lower() in _BARE else array.key


StoredByRole = dict[tuple[str, Role], Stored]


def recognise(path: Path, pixels: bool) -> StoredByRole:
    """Identify the part and role of each array of a file or a folder; arrays with unknown names are ignored.

    ``pixels``: look for images as pixels (four dimensions) instead of features (two). The parts of the result are
    either ``all`` alone or splits.

    Raises:
        InputError: a file is unreadable, two arrays have the same part and role, items are columns, or only some of the
            names have a part.
    """
    stored = [array for file in files_of(path) for array in list_arrays(file)]
    split = next((array for array in reversed(stored) if array.key == "split"), None)
    # Arrays of strings are names of labels, images or tags.
    stored = [array for array in stored if array.shape and not array.strings]
    tra = any("tra" in _words(array.key) and meaning(array.key) for array in stored)
    per_file = Counter(array.path for array in stored)
    names = [_name(array, alone=per_file[array.path] == 1) for array in stored]
    meanings = [meaning(name, tra) for name in names]
    known = [(named, array) for named, array in zip(meanings, stored, strict=True) if named is not None]
    known = [(named, array) for named, array in known if named[1] != "image" or (len(array.shape) == 4) == pixels]
    _all_or_parts(known, str(path))
    by_role: StoredByRole = {}
    for named, array in known:
        first = by_role.setdefault(named, array)
        # Labels are often stored once per modality, with the same values.
        if first is not array and named[1] != "labels":
            raise InputError(str(path), f"{first.key} and {array.key}, both {named[0]} {named[1]}", "one of them")
    return _items_in_rows(by_role, str(path), split)


def _all_or_parts(known: Sequence[tuple[tuple[str, Role], Stored]], place: str) -> None:
    """Reject a mix of arrays with and without a part, of which one kind would have to be ignored."""
    without = [array.key for (part, _), array in known if part == "all"]
    parts = [array.key for (part, _), array in known if part != "all"]
    if without and parts:
        words = "; ".join(f"{part}: {', '.join(sorted(known_as))}" for part, known_as in PARTS.items())
        mixed = f"{', '.join(without)} without a known part next to {', '.join(parts)}"
        raise InputError(place, mixed, f"a part in every name, or in none ({words})")


def _transposed(array: Stored) -> Stored:
    return replace(array, matlab=not array.matlab, shape=array.shape[::-1])


def _rows_of(role: Role, shape: tuple[int, ...]) -> set[int]:
    """Possible numbers of items of an array of this shape."""
    if len(shape) == 4:
        return {shape[0], shape[-1]}
    if role == "labels" and len(shape) == 2 and 1 in shape:
        return {max(shape)}
    return {shape[0]}


def _consistent(by_role: StoredByRole, split: Stored | None) -> bool:
    """Whether arrays of a part have the same number of items, and arrays of a role the same width."""
    for part in {part for part, _ in by_role}:
        counts = [_rows_of(role, array.shape) for (other, role), array in by_role.items() if other == part]
        counts += [{max(split.shape, default=0)}] if split is not None and part == "all" else []
        if not set.intersection(*counts):
            return False
    widths: dict[Role, set[tuple[int, ...]]] = {role: set() for role in WORDS}
    for (_, role), array in by_role.items():
        if role != "labels" or 1 not in array.shape:
            widths[role].add(array.shape[1:])
    return all(len(each) < 2 for each in widths.values())


def _items_in_rows(by_role: StoredByRole, place: str, split: Stored | None) -> StoredByRole:
    """Orient all arrays so that items are rows.

    MATLAB marks the arrays that it writes to HDF5, whose axes are reversed. Other programs write HDF5 in either
    orientation without a mark; the orientation in which the arrays' shapes agree is used.
    """

    def turn(which: Callable[[Stored], bool]) -> StoredByRole:
        return {
            known: _transposed(array) if len(array.shape) in (2, 3) and which(array) else array
            for known, array in by_role.items()
        }

    def unmarked(array: Stored) -> bool:
        return array.hdf5 and not array.matlab

    shown = ", ".join(f"{array.key} {list(array.shape)}" for array in by_role.values())
    fits, columns = _consistent(by_role, split), turn(unmarked)
    if columns != by_role and _consistent(columns, split):
        if fits:
            allowed = "labels or a `split` of as many values as there are items, or an .npz file: items are its rows"
            raise InputError(place, f"{shown}: items may be rows or columns", allowed)
        # With only two arrays, the mismatch may instead be due to missing rows.
        if len(by_role) > 2:
            return columns
    if not fits and _consistent(turn(lambda _: True), split):
        raise InputError(
            place,
            f"{shown}: not equally many rows",
            "an item in each row; where items are columns, transpose the arrays",
        )
    return by_role


def parts_of(by_role: Mapping[tuple[str, Role], Stored], place: str) -> list[str]:
    """The parts of a data set: ``["all"]``, or splits that each have image and text.

    Raises:
        InputError: a part lacks its image or its text array, or there are no arrays.
    """
    parts = sorted({part for part, role in by_role if role != "labels"}, key=("all", *SPLITS).index)
    lacking = [f"{part} {role}" for part in parts for role in ("image", "text") if (part, role) not in by_role]
    if lacking or not parts:
        names = ", ".join(stored.key for stored in by_role.values()) or "no array that is known"
        allowed = "image and text under names like I_tr, T_tr, L_tr, I_te, T_te, L_te or IAll, TAll, LAll"
        raise InputError(place, f"{names}; no {lacking[0] if lacking else 'image'}", allowed)
    return parts


# --- pixels ---------------------------------------------------------------------------------------------------------

_OPENING = threading.Lock()
_ALLOWED = "whole numbers 0 to 255 in three channels"


@dataclass(frozen=True)
class PixelArray(StoredImages):
    """Images in one stored array; images in an HDF5 file are read one by one."""

    # Array of four dimensions: images first or last, and three channels before or after height and width.
    stored: Stored
    n: int  # number of images in it

    @override
    def stored_name(self, at: int) -> str:
        return f"{self.stored.place}[{at}]"

    @cached_property
    @override
    def stamp(self) -> str:
        return f"{file_digests([self.stored.path])[0]}|{self.stored.key}"

    @cached_property
    def _all(self) -> Array:
        return self.stored.read()

    def _as_stored(self, at: int) -> Array:
        """One image with its axes as they are stored."""
        if self.stored.hdf5:
            path, shape = self.stored.path, self.stored.shape[::-1] if self.stored.matlab else self.stored.shape
            arguments = (path, self.stored.key, at, shape[0] != self.n)
            return in_quarantine(read_hdf5_row, *arguments, place=self.stored_name(at))
        # Other files can only be read as a whole; the lock keeps threads from doing so several times.
        with _OPENING:
            images = self._all
        if images.ndim != 4 or self.n not in (images.shape[0], images.shape[3]):
            raise InputError(self.stored.place, f"shape {list(images.shape)}", f"{self.n} images")
        return images[at] if images.shape[0] == self.n else images[..., at]

    def checked(self) -> PixelArray:
        """Validate the array, so that it is reported once and not for each image, and return it.

        Raises:
            InputError: there is no channel axis of size 3, or the dtype is not an integer type and the first, middle or
                last image has values other than integers from 0 to 255.
        """
        shape = self.stored.shape[::-1] if self.stored.matlab else self.stored.shape
        rest = shape[1:] if shape[0] == self.n else shape[:-1]
        if 3 not in (rest[0], rest[2]) or 0 in shape:
            raise InputError(self.stored.place, f"shape {list(self.stored.shape)}", _ALLOWED)
        if not self.stored.integers:
            # MATLAB's default type is double. Checking every image would take as long as the extraction.
            for row in sorted({0, self.n // 2, self.n - 1}):
                self.stored_image(row)
        return self

    @override
    def stored_image(self, at: int) -> Pixels:
        image, place = self._as_stored(at), self.stored_name(at)
        if image.ndim != 3:
            raise InputError(place, f"{image.dtype} {list(image.shape)}", _ALLOWED)
        # MATLAB stores arrays in HDF5 with reversed axes.
        image = image.transpose() if self.stored.matlab else image
        image = image.transpose(1, 2, 0) if image.shape[2] != 3 and image.shape[0] == 3 else image
        if image.shape[2] != 3 or image.dtype.kind not in "uif":
            raise InputError(place, f"{image.dtype} {list(image.shape)}", _ALLOWED)
        if image.dtype != np.uint8:
            low, high = image.min(), image.max()
            # The comparisons are false for NaN.
            if not (low >= 0 and high <= 255 and (image == np.round(image)).all()):
                raise InputError(place, f"{image.dtype} values from {low:.6g} to {high:.6g}", _ALLOWED)
        return np.ascontiguousarray(image.astype(np.uint8))
