"""List the arrays in .mat, .h5 and .npz files and identify images, texts and labels of each part by their names.

A name is split into words: ``I_tr``, ``train_imgs_deep`` and ``img_train`` are training images, ``LAll`` and ``Label``
are the labels of all items. Image arrays of two dimensions are features, those of four are pixels. Nothing is
unpickled, and truncated files are rejected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmq.data.readers import sparse
from fedmq.data.readers.npz_bounds import check_characters, check_npz, npz_array
from fedmq.data.splits import SPLITS
from fedmq.encoders.images import is_leftover
from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage.mat_files import check_mat
from fedmq.storage.regular_files import check_regular

Array = npt.NDArray[Any]
Role = Literal["image", "text", "labels"]

ENDINGS = frozenset({".mat", ".h5", ".hdf5", ".h5py", ".npz"})
HDF5 = b"\x89HDF\r\n\x1a\n"
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


@dataclass(frozen=True)
class Stored:
    """An array in a file, not yet read.

    Args:
        path: the file.
        key: name of the array in the file.
        shape: shape as MATLAB or NumPy shows it.
        matlab: stored in HDF5 with reversed axes, as MATLAB does.
        strings: holds strings; a row of a MATLAB character array is one string.
        integers: has an integer dtype, if the file lists dtypes.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    matlab: bool = False
    strings: bool = False
    integers: bool = False

    @property
    def place(self) -> str:
        """Name of the array in error messages."""
        return f"{self.path}: {self.key}"

    def read(self) -> Array:
        """Read the whole array.

        Raises:
            InputError: the array is unreadable or holds Python objects.
        """
        array: Array = guarded(self.path, self._read)
        return array

    def numbers(self) -> Array:
        """Read the whole array, which must be numeric.

        Raises:
            InputError: the array is unreadable or does not hold real numbers.
        """
        array = self.read()
        if array.dtype.kind not in "iufb":
            raise InputError(self.place, f"dtype {array.dtype}", "real numbers")
        return array

    def _read(self) -> Array:
        if self.path.suffix.lower() == ".npz":
            with np.load(self.path, allow_pickle=False) as opened:
                array = np.asarray(opened[self.key])
            check_characters(array)
            return array
        if is_hdf5(self.path):
            h5py = package("h5py", "formats", str(self.path))
            with h5py.File(self.path, "r") as opened:
                node = opened[self.key]
                if isinstance(node, h5py.Group):
                    value = sparse.hdf5_dense(self.place, node)
                elif h5py.check_string_dtype(node.dtype) is not None:
                    return np.array(node.asstr()[()], dtype=np.str_)
                else:
                    value = np.asarray(node[()])
            value = value.transpose() if self.matlab else value
            return _strings(value) if self.strings else value
        value = package("scipy.io", "formats", str(self.path)).loadmat(self.path, variable_names=[self.key])[self.key]
        if value.dtype == object and not hasattr(value, "toarray"):
            # A MATLAB cell array; cells that are not strings are converted here and rejected by the caller.
            return np.array([str(np.squeeze(cell)) for cell in value.reshape(-1)])
        if hasattr(value, "toarray"):
            # Tags are often stored as a sparse matrix. SciPy's own conversion does not check row indices.
            sparse.bounded(self.place, *value.shape)
            value = value.tocsc()
            value = sparse.dense(self.place, value.shape[0], value.data, value.indices, value.indptr).transpose()
        return np.asarray(value)


def _strings(codes: Array) -> Array:
    """Strings [n] from character codes [n, length], the way MATLAB stores them in HDF5."""
    return np.array(["".join(map(chr, row)) for row in np.atleast_2d(codes).tolist()])


def is_hdf5(path: Path) -> bool:
    """Whether a file has the HDF5 signature at its start, or after the 512 bytes that MATLAB puts before it."""
    with path.open("rb") as file:
        head = file.read(520)
    return head.startswith(HDF5) or head[512:] == HDF5


def guarded(path: Path, work: Callable[[], Any]) -> Any:
    """Run a reader of ``path`` and turn any exception into a one-line error.

    Raises:
        InputError: ``work`` raised any exception.
    """
    try:
        return work()
    except InputError:
        raise
    except Exception as error:  # SciPy, h5py, zipfile, zlib and NumPy raise various exceptions on a broken file
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(str(path), reason, f"a readable {path.suffix} file of plain arrays") from None


def _arrays_in(path: Path, also: str) -> list[Stored]:
    """List one file's arrays without reading them, and any entry ``also``, so that a bad one is not ignored."""
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as opened:
            found = [(key, *npz_array(opened.zip, key)) for key in opened.files]
        return [
            Stored(path, key, shape, strings=kind.kind in "US", integers=kind.kind in "iu")
            for key, shape, kind in found
        ]
    if is_hdf5(path):
        h5py = package("h5py", "formats", str(path))
        with h5py.File(path, "r") as opened:
            if unnamed := [key for key in opened if not isinstance(key, str)]:
                raise InputError(str(path), f"an array of the name {unnamed[0]!r}", "names in UTF-8")
            datasets = {key: value for key, value in opened.items() if hasattr(value, "shape")}
            # Sparse arrays and MATLAB structs are groups. Structs are skipped; as `split` they are rejected.
            groups = {
                key: value
                for key, value in opened.items()
                if key not in datasets and ("MATLAB_sparse" in getattr(value, "attrs", ()) or key == also)
            }
            return [
                _dataset(path, key, value, strings)
                for key, value in datasets.items()
                if (strings := h5py.check_string_dtype(value.dtype) is not None)
                or value.dtype.kind in "iufb"
                or key == also
            ] + [
                Stored(path, key, sparse.hdf5_shape(f"{path}: {key}", value), matlab=True)
                for key, value in groups.items()
            ]
    check_mat(path)
    listed = package("scipy.io", "formats", str(path)).whosmat(path)
    return [
        Stored(path, key, tuple(map(int, shape)), strings=kind == "char", integers=kind.startswith(("int", "uint")))
        for key, shape, kind in listed
        if kind not in ("cell", "struct", "object") or key == also
    ]


def _dataset(path: Path, key: str, value: Any, strings: bool) -> Stored:
    """One array of an HDF5 file."""
    shape, matlab = tuple(map(int, value.shape)), value.attrs.get("MATLAB_class")
    integers = value.dtype.kind in "iu"
    if matlab is None:
        return Stored(path, key, shape, strings=strings, integers=integers)
    characters = matlab == b"char" and not strings
    return Stored(path, key, shape[:0:-1] if characters else shape[::-1], True, strings or characters, integers)


def list_arrays(path: Path, also: str = "split") -> list[Stored]:
    """List the arrays of a file without reading them.

    Args:
        path: the file.
        also: name of an array that is listed whatever it holds, e.g. a cell array of strings.

    Raises:
        InputError: the file is missing, truncated or unreadable.
    """
    check = check_npz if path.suffix.lower() == ".npz" else _check_file
    guarded(path, lambda: check(path))
    arrays: list[Stored] = guarded(path, lambda: _arrays_in(path, also))
    return arrays


def _check_file(path: Path) -> None:
    """Refuse a pipe or a device, which reading could wait for without end."""
    check_regular(path, 1 << 62, "a file of arrays")


def _array_files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and not is_leftover(file.name))


def files_of(path: Path) -> list[Path]:
    """Array files at a path: the file itself, or those in the folder, or else those in its ``train`` and ``test``."""
    if path.is_dir():
        # No deeper search: a symbolic link may lead back up.
        places = (path,), (path / "test", path / "train")
        candidates = ([file for each in some if each.is_dir() for file in _array_files_in(each)] for some in places)
        return next(filter(None, candidates), [])
    return [path] if path.suffix.lower() in ENDINGS else []


def _words(key: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]", key)}


def meaning(key: str, tra: bool = False) -> tuple[str, Role] | None:
    """The part (``all`` or a split) and the role of an array, from the words of its name; None if the role is unknown.

    Args:
        key: name of the array.
        tra: whether the file also has arrays of a part ``tra``: then ``tr`` is the database, as in LtCMH's files.

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
    """Identify the part and role of each array of a data set; arrays with unknown names are ignored.

    Args:
        path: a file, or a folder whose files form one data set.
        pixels: look for images as pixels (four dimensions) instead of features (two).

    Returns:
        Arrays by part and role; the parts are either ``all`` alone or splits.

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
    """Reject a mix of arrays with and without a part, of which one kind would have to be ignored.

    Raises:
        InputError: some names have a known part and others do not.
    """
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

    Raises:
        InputError: both orientations agree, or items are columns in a file whose axes are known.
    """

    def turn(which: Callable[[Stored], bool]) -> StoredByRole:
        return {
            known: _transposed(array) if len(array.shape) in (2, 3) and which(array) else array
            for known, array in by_role.items()
        }

    def unmarked(array: Stored) -> bool:
        return not array.matlab and array.path.suffix.lower() != ".npz" and is_hdf5(array.path)

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
