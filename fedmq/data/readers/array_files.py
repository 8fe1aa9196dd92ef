"""Arrays in .mat, .h5 and .npz files, and which of them is the image, the text, the labels, and of which part.

Names are read as words: ``I_tr``, ``train_imgs_deep`` and ``img_train`` are the training images, ``LAll`` and ``Label``
all labels. An array of two dimensions is features, one of four is pixels. Nothing is ever unpickled, and a file that
was cut off is refused by name, never read as far as it goes.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from fedmq.data.readers import sparse
from fedmq.data.splits import SPLITS
from fedmq.encoders.images import is_leftover
from fedmq.errors import InputError
from fedmq.extras import package

Array = npt.NDArray[Any]
What = Literal["image", "text", "labels"]

ENDINGS = frozenset({".mat", ".h5", ".hdf5", ".h5py", ".npz"})
HDF5 = b"\x89HDF\r\n\x1a\n"
PARTS: Mapping[str, frozenset[str]] = {
    "train": frozenset({"tr", "tra", "train", "training"}),
    "val": frozenset({"val", "valid", "validation"}),
    "test": frozenset({"te", "test", "query", "q"}),
    "database": frozenset({"db", "dbase", "base", "database", "ret", "retrieval"}),
}
# Labels come first: `train_imgs_labels` are labels.
WORDS: Mapping[What, frozenset[str]] = {
    "labels": frozenset({"l", "lab", "labs", "label", "labels", "lall"}),
    "text": frozenset({"t", "y", "txt", "txts", "text", "texts", "tag", "tags", "sentence", "sentences", "bow"}),
    "image": frozenset({"i", "f", "x", "img", "imgs", "image", "images"}),
}


@dataclass(frozen=True)
class Stored:
    """One array in a file.

    Args:
        path: the file.
        key: its name there.
        shape: as MATLAB or NumPy would say it.
        matlab: stored in HDF5 with the axes the other way round, as MATLAB does.
        words: holds strings, not numbers; a row of characters that MATLAB stored counts as one string.
        integers: of a type of whole numbers, as far as the file lists types.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    matlab: bool = False
    words: bool = False
    integers: bool = False

    @property
    def place(self) -> str:
        """What a message calls it."""
        return f"{self.path}: {self.key}"

    def read(self) -> Array:
        """The whole array.

        Raises:
            InputError: unreadable, or of Python objects.
        """
        found: Array = guarded(self.path, self._read)
        return found

    def numbers(self) -> Array:
        """The whole array.

        Raises:
            InputError: unreadable, or not of real numbers.
        """
        found = self.read()
        if found.dtype.kind not in "iufb":
            raise InputError(self.place, f"dtype {found.dtype}", "real numbers")
        return found

    def _read(self) -> Array:
        if self.path.suffix.lower() == ".npz":
            with np.load(self.path, allow_pickle=False) as opened:
                return np.asarray(opened[self.key])
        if is_hdf5(self.path):
            h5py = package("h5py", "formats", str(self.path))
            with h5py.File(self.path, "r") as opened:
                inside = opened[self.key]
                if isinstance(inside, h5py.Group):
                    value = sparse.hdf5_dense(self.place, inside)
                elif h5py.check_string_dtype(inside.dtype) is not None:
                    return np.array(inside.asstr()[()], dtype=np.str_)
                else:
                    value = np.asarray(inside[()])
            value = value.transpose() if self.matlab else value
            return _joined(value) if self.words else value
        value = package("scipy.io", "formats", str(self.path)).loadmat(self.path, variable_names=[self.key])[self.key]
        if value.dtype == object and not hasattr(value, "toarray"):
            # A cell array of MATLAB; what is no string in it is refused as a string.
            return np.array([str(np.squeeze(cell)) for cell in value.reshape(-1)])
        if hasattr(value, "toarray"):
            # Tags are often stored as a sparse matrix. SciPy's own way back does not look where a row number points to.
            sparse.bounded(self.place, *value.shape)
            value = value.tocsc()
            value = sparse.dense(self.place, value.shape[0], value.data, value.indices, value.indptr).transpose()
        return np.asarray(value)


def _joined(codes: Array) -> Array:
    """Rows of characters' numbers [n, length] to n strings, as MATLAB stores them in HDF5."""
    return np.array(["".join(map(chr, row)) for row in np.atleast_2d(codes).tolist()])


def is_hdf5(path: Path) -> bool:
    """Whether a file begins as HDF5 does, or as what MATLAB writes to it: after 512 bytes of its own."""
    with path.open("rb") as file:
        head = file.read(520)
    return head.startswith(HDF5) or head[512:] == HDF5


def guarded(path: Path, work: Callable[[], Any]) -> Any:
    """Run a reader; whatever it raises on a broken file becomes one line.

    Raises:
        InputError: anything went wrong.
    """
    try:
        return work()
    except InputError:
        raise
    except Exception as error:  # SciPy, h5py, zipfile, zlib and NumPy each raise something else on a broken file
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(str(path), reason, f"a readable {path.suffix} file of plain arrays") from None


#: Bytes of a value, by the third digit of a version 4 file's type number.
_MAT4_BYTES = (8, 4, 4, 2, 2, 1)


def _mat_lengths(file: BinaryIO, size: int) -> Iterator[int]:
    """Where each array of a .mat file of version 4 or 5 ends; nothing where the file is neither."""
    head = file.read(128)
    if len(head) < 128 or 0 in head[:4]:
        start = 0
        while start + 20 <= size:
            file.seek(start)
            fields = file.read(20)
            order = "<" if struct.unpack("<i", fields[:4])[0] in range(5000) else ">"
            kind, rows, columns, complex_, name = struct.unpack(f"{order}5i", fields)
            width = kind // 10 % 10
            if kind not in range(5000) or width >= len(_MAT4_BYTES) or min(rows, columns, name - 1) < 0:
                return
            start += 20 + name + rows * columns * _MAT4_BYTES[width] * (2 if complex_ else 1)
            yield start
        if start < size:
            yield start + 20
        return
    start, known = 128, {b"IM": "<", b"MI": ">"}.get(head[126:128])
    while known and start < size:
        file.seek(start)
        tag = file.read(8)
        start += 8 + (struct.unpack(f"{known}I", tag[4:])[0] if len(tag) == 8 else 0)
        yield start


def _complete(path: Path) -> None:
    """Look whether a .mat file ends where its last array does: SciPy lists the arrays of a cut one as far as they go.

    Raises:
        InputError: it ends before.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if any(end > size for end in _mat_lengths(file, size)):
            raise InputError(str(path), f"a file cut off after {size} bytes", "a whole .mat file")


def _inside(path: Path) -> list[Stored]:
    """The arrays of one file, without reading them; a ``split`` of whatever kind is one, lest another be drawn."""
    if path.suffix.lower() == ".npz":
        with np.load(path, allow_pickle=False) as opened:
            # The header of each member has its shape.
            return [_npy_header(opened, path, key) for key in opened.files]
    if is_hdf5(path):
        h5py = package("h5py", "formats", str(path))
        with h5py.File(path, "r") as opened:
            datasets = {key: value for key, value in opened.items() if hasattr(value, "shape")}
            # A structure of MATLAB is a group, too: as a split it is refused, otherwise passed over.
            sparsely = {
                key: value
                for key, value in opened.items()
                if key not in datasets and ("MATLAB_sparse" in getattr(value, "attrs", ()) or key == "split")
            }
            return [
                _dataset(path, key, value, words)
                for key, value in datasets.items()
                if (words := h5py.check_string_dtype(value.dtype) is not None)
                or value.dtype.kind in "iufb"
                or key == "split"
            ] + [
                Stored(path, key, sparse.hdf5_shape(f"{path}: {key}", value), matlab=True)
                for key, value in sparsely.items()
            ]
    _complete(path)
    listed = package("scipy.io", "formats", str(path)).whosmat(path)
    return [
        Stored(path, key, tuple(map(int, shape)), words=kind == "char", integers=kind.startswith(("int", "uint")))
        for key, shape, kind in listed
        if kind not in ("cell", "struct", "object") or key == "split"
    ]


def _dataset(path: Path, key: str, value: Any, words: bool) -> Stored:
    """One array of an HDF5 file."""
    shape, matlab = tuple(map(int, value.shape)), value.attrs.get("MATLAB_class")
    integers = value.dtype.kind in "iu"
    if matlab is None:
        return Stored(path, key, shape, words=words, integers=integers)
    characters = matlab == b"char" and not words
    return Stored(path, key, shape[:0:-1] if characters else shape[::-1], True, words or characters, integers)


def listed(path: Path) -> list[Stored]:
    """The arrays of a file, not yet read.

    Raises:
        InputError: no such file, one that was cut off, or one with pickled objects.
    """
    found: list[Stored] = guarded(path, lambda: _inside(path))
    return found


def _npy_header(opened: Any, path: Path, key: str) -> Stored:
    with opened.zip.open(f"{key}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(member)
        return Stored(path, key, tuple(map(int, shape)), words=kind.kind in "US", integers=kind.kind in "iu")


def _inside_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in ENDINGS and not is_leftover(file.name))


def files_of(path: Path) -> list[Path]:
    """The files with arrays: the path itself, or those in the folder, or else those in its ``train`` and ``test``."""
    if path.is_dir():
        # Of the folders below these two alone, and nothing below them: a link may lead back up.
        places = (path,), (path / "test", path / "train")
        found = ([file for place in some if place.is_dir() for file in _inside_of(place)] for some in places)
        return next(filter(None, found), [])
    return [path] if path.suffix.lower() in ENDINGS else []


def _words(key: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[A-Z]", key)}


def meaning(key: str, tra: bool = False) -> tuple[str, What] | None:
    """The part (``all``, or a split) and what an array is, from the words of its name; None where they do not say.

    Args:
        key: the name.
        tra: whether a name beside it has the part ``tra``: then ``tr`` is what is retrieved from, as in LtCMH's files.

    >>> meaning("train_imgs_labels"), meaning("I_te"), meaning("YAll")
    (('train', 'labels'), ('test', 'image'), ('all', 'text'))
    >>> meaning("I_tr"), meaning("I_tr", tra=True)
    (('train', 'image'), ('database', 'image'))
    """
    words = _words(key)
    part = next((part for part, known in PARTS.items() if words & known), "all")
    if tra and "tr" in words:
        part = "database"
    return next(((part, what) for what, known in WORDS.items() if words & known), None)


#: Names of arrays that say nothing of a part, and next to nothing of what they are.
_BARE = ("data", "feature", "features", "label", "labels")


def _name(array: Stored, *, alone: bool) -> str:
    """An array's name; where it says little and its file holds nothing else, the file's with it (FedCMR's files)."""
    return f"{array.path.stem}_{array.key}" if alone and array.key.lower() in _BARE else array.key


StoredByRole = dict[tuple[str, What], Stored]


def recognise(path: Path, pixels: bool) -> StoredByRole:
    """Which array is what.

    Args:
        path: a file, or a folder whose files belong together.
        pixels: whether the images wanted are pixels (four dimensions) or features (two).

    Returns:
        By part and meaning; parts are either ``all`` or splits.

    Raises:
        InputError: a file is unreadable, two arrays are the same thing, items lie in columns, or only some of the
            arrays are of a part.
    """
    stored = [array for file in files_of(path) for array in listed(file)]
    split = next((array for array in reversed(stored) if array.key == "split"), None)
    # Names of labels, of images or of tags are not what they name.
    stored = [array for array in stored if array.shape and not array.words]
    tra = any("tra" in _words(array.key) and meaning(array.key) for array in stored)
    beside = Counter(array.path for array in stored)
    names = [_name(array, alone=beside[array.path] == 1) for array in stored]
    meanings = [meaning(name, tra) for name in names]
    known = [(named, array) for named, array in zip(meanings, stored, strict=True) if named is not None]
    known = [(named, array) for named, array in known if named[1] != "image" or (len(array.shape) == 4) == pixels]
    _all_or_parts(known, str(path))
    found: StoredByRole = {}
    for named, array in known:
        before = found.setdefault(named, array)
        # Labels are often there once for each modality, and agree.
        if before is not array and named[1] != "labels":
            raise InputError(str(path), f"{before.key} and {array.key}, both {named[0]} {named[1]}", "one of them")
    return _upright(found, str(path), split)


def _all_or_parts(known: Sequence[tuple[tuple[str, What], Stored]], place: str) -> None:
    """Refuse arrays of parts beside arrays of none: whichever of the two were read, the others would be lost.

    Raises:
        InputError: some names have a part and others have none that is known.
    """
    whole = [array.key for (part, _), array in known if part == "all"]
    parts = [array.key for (part, _), array in known if part != "all"]
    if whole and parts:
        words = "; ".join(f"{part}: {', '.join(sorted(own))}" for part, own in PARTS.items())
        found = f"{', '.join(whole)} of no part that is known beside {', '.join(parts)}"
        raise InputError(place, found, f"a part in every name, or in none ({words})")


def _turned(array: Stored) -> Stored:
    return replace(array, matlab=not array.matlab, shape=array.shape[::-1])


def _rows_of(what: What, shape: tuple[int, ...]) -> set[int]:
    """How many items an array may have."""
    if len(shape) == 4:
        return {shape[0], shape[-1]}
    if what == "labels" and len(shape) == 2 and 1 in shape:
        return {max(shape)}
    return {shape[0]}


def _consistent(found: StoredByRole, split: Stored | None) -> bool:
    """Whether the arrays of each part have equally many items, and those of one meaning are equally wide."""
    for part in {part for part, _ in found}:
        counts = [_rows_of(what, array.shape) for (other, what), array in found.items() if other == part]
        counts += [{max(split.shape, default=0)}] if split is not None and part == "all" else []
        if not set.intersection(*counts):
            return False
    widths: dict[What, set[tuple[int, ...]]] = {what: set() for what in WORDS}
    for (_, what), array in found.items():
        if what != "labels" or 1 not in array.shape:
            widths[what].add(array.shape[1:])
    return all(len(each) < 2 for each in widths.values())


def _upright(found: StoredByRole, place: str, split: Stored | None) -> StoredByRole:
    """The arrays with items in rows.

    MATLAB marks what it writes to HDF5, and there all axes are the other way round. Other programs that write HDF5 do
    the one or the other without a mark: what counts is which way the arrays fit each other.

    Raises:
        InputError: both ways fit, or only columns do in a file whose axes are as it says.
    """

    def turn(which: Callable[[Stored], bool]) -> StoredByRole:
        return {
            known: _turned(array) if len(array.shape) in (2, 3) and which(array) else array
            for known, array in found.items()
        }

    def unmarked(array: Stored) -> bool:
        return not array.matlab and array.path.suffix.lower() != ".npz" and is_hdf5(array.path)

    shown = ", ".join(f"{array.key} {list(array.shape)}" for array in found.values())
    fits, columns = _consistent(found, split), turn(unmarked)
    if columns != found and _consistent(columns, split):
        if fits:
            allowed = "labels or a `split` of as many values as there are items, or an .npz file: items are its rows"
            raise InputError(place, f"{shown}: items may be rows or columns", allowed)
        # Two arrays alone may as well be rows of which one has lost some.
        if len(found) > 2:
            return columns
    if not fits and _consistent(turn(lambda _: True), split):
        raise InputError(
            place,
            f"{shown}: not equally many rows",
            "an item in each row; where items are columns, transpose the arrays",
        )
    return found


def parts_of(found: Mapping[tuple[str, What], Stored], place: str) -> list[str]:
    """The parts there are: ``["all"]``, or splits that each have image and text.

    Raises:
        InputError: an image array without its text or the other way round, or none at all.
    """
    parts = sorted({part for part, what in found if what != "labels"}, key=("all", *SPLITS).index)
    lacking = [f"{part} {what}" for part in parts for what in ("image", "text") if (part, what) not in found]
    if lacking or not parts:
        names = ", ".join(stored.key for stored in found.values()) or "no array that is known"
        allowed = "image and text under names like I_tr, T_tr, L_tr, I_te, T_te, L_te or IAll, TAll, LAll"
        raise InputError(place, f"{names}; no {lacking[0] if lacking else 'image'}", allowed)
    return parts
