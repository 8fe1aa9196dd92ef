"""Read arrays, tables and archives of other people with the libraries that are made for them.

:mod:`fedmq.storage.quarantine` runs these functions in its child process, where paths are strings. SciPy, h5py, NumPy,
safetensors, pyarrow and tarfile read the files, and nothing is unpickled.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedmq.data.labels import is_whole
from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage import quarantine

Array = npt.NDArray[Any]
T = TypeVar("T")

_LIBRARIES = ("h5py", "scipy.io", "scipy.sparse")

_HDF5 = b"\x89HDF\r\n\x1a\n"


# --- arrays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An array in a file, not yet read."""

    path: Path
    key: str  # name of the array in the file
    shape: tuple[int, ...]  # shape as MATLAB or NumPy shows it
    matlab: bool = False  # stored in HDF5 with reversed axes, as MATLAB does
    strings: bool = False  # holds strings; a row of a MATLAB character array is one string
    integers: bool = False  # has an integer dtype, if the file lists dtypes
    hdf5: bool = False  # the file is HDF5

    @property
    def place(self) -> str:
        """Name of the array in error messages."""
        return f"{self.path}: {self.key}"

    def read(self) -> Array:
        """Read the whole array.

        Raises:
            InputError: the array is unreadable or holds Python objects.
        """
        return in_quarantine(read_array, self.path, self.key, self.matlab, self.strings, place=self.place)

    def vector(self, n: int) -> Array:
        """Read a value for each of n items, which MATLAB stores as a matrix, of strings with spaces or of doubles."""
        value = self.read()
        value = value.reshape(-1) if value.shape in ((n, 1), (1, n)) else value
        if value.dtype.kind in "US":
            return np.char.strip(value)
        return value.astype(np.int64) if value.dtype.kind == "f" and is_whole(value) else value

    def numbers(self) -> Array:
        """Read the whole array, which must be numeric.

        Raises:
            InputError: the array is unreadable or does not hold real numbers.
        """
        array = self.read()
        if array.dtype.kind not in "iufb":
            raise InputError(self.place, f"dtype {array.dtype}", "real numbers")
        return array


def in_quarantine(function: Callable[..., T], path: Path, *arguments: object, place: str = "") -> T:
    """What a function of this module reads from a file of arrays, in the quarantine."""
    allowed, place = f"a readable {path.suffix} file of plain arrays", place or str(path)
    libraries = () if path.suffix.lower() in (".npz", ".safetensors") else _LIBRARIES
    return quarantine.read(function, path, *arguments, place=place, allowed=allowed, files=[path], libraries=libraries)


def list_arrays(path: Path, also: str = "split") -> list[Stored]:
    """List the arrays of a file without reading them, and ``also`` whatever it holds, e.g. a cell array of strings.

    Raises:
        InputError: the file is missing, truncated or unreadable.
    """
    return in_quarantine(arrays_in, path, also)


# in the quarantine ----------------------------------------------------------------------------------------------


def arrays_in(path: str, also: str) -> list[Stored]:
    """See :func:`list_arrays`."""
    match Path(path).suffix.lower():
        case ".npz":
            return _in_npz(path)
        case ".safetensors":
            return _in_safetensors(path)
    if _is_hdf5(path):
        return _in_hdf5(path, also)
    listed = package("scipy.io", "formats", path).whosmat(path)
    return [
        Stored(Path(path), key, tuple(shape), strings=kind == "char", integers=kind.startswith(("int", "uint")))
        for key, shape, kind in listed
        if kind not in ("cell", "struct", "object") or key == also
    ]


def read_array(path: str, key: str, matlab: bool, strings: bool) -> Array:
    """Read a whole array; ``matlab``: its axes are reversed in the file, ``strings``: it holds strings."""
    match Path(path).suffix.lower():
        case ".npz":
            with np.load(path, allow_pickle=False) as opened:
                return np.asarray(opened[key])
        case ".safetensors":
            return _of_safetensors(path, key)
    if _is_hdf5(path):
        return _of_hdf5(path, key, matlab, strings)
    value = package("scipy.io", "formats", path).loadmat(path, variable_names=[key])[key]
    if hasattr(value, "toarray"):
        return _dense(value)
    if value.dtype == object:  # a cell array; cells that are not strings are converted here and refused by the caller
        return np.array([str(np.squeeze(cell)) for cell in value.reshape(-1)])
    return np.asarray(value)


def read_hdf5_row(path: str, key: str, row: int, last: bool) -> Array:
    """One image of a pixel array in HDF5; ``last``: images are along the last axis instead of the first."""
    with package("h5py", "formats", path).File(path, "r") as opened:
        return np.asarray(opened[key][..., row] if last else opened[key][row])


# NumPy and safetensors ------------------------------------------------------------------------------------------


def _in_npz(path: str) -> list[Stored]:
    found = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".npy"):
                with archive.open(name) as member:
                    version = np.lib.format.read_magic(member)
                    header = np.lib.format.read_array_header_1_0
                    header = header if version == (1, 0) else np.lib.format.read_array_header_2_0
                    shape, _, kind = header(member)
                strings, integers = kind.kind in "US", kind.kind in "iu"
                found.append(Stored(Path(path), name.removesuffix(".npy"), shape, strings=strings, integers=integers))
    return found


def _in_safetensors(path: str) -> list[Stored]:
    """The tensors, and the lists of strings in the metadata, as safetensors has no string arrays."""
    with package("safetensors", "embedded", path).safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata() or {}
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no mapping
    tensors = [Stored(Path(path), name, tuple(shape)) for name, shape in shapes.items()]
    return tensors + [
        Stored(Path(path), name, (len(json.loads(text)),), strings=True)
        for name, text in metadata.items()
        if text.startswith("[")
    ]


def _of_safetensors(path: str, key: str) -> Array:
    with package("safetensors", "embedded", path).safe_open(path, framework="numpy") as opened:
        strings = (opened.metadata() or {}).get(key)
        array: Array = opened.get_tensor(key) if strings is None else np.array(json.loads(strings))
    return array


# --- HDF5 -----------------------------------------------------------------------------------------------------------


def _is_hdf5(path: str) -> bool:
    """Whether a file has the HDF5 signature at its start, or after the 512 bytes that MATLAB puts before it."""
    with Path(path).open("rb") as file:
        head = file.read(520)
    return head.startswith(_HDF5) or head[512:] == _HDF5


def _in_hdf5(path: str, also: str) -> list[Stored]:
    """Arrays, and sparse arrays of MATLAB, which are groups; other groups are listed only as ``also``."""
    h5py, found, listed = package("h5py", "formats", path), list[Stored](), partial(Stored, Path(path), hdf5=True)
    with h5py.File(path, "r") as opened:
        for key, node in opened.items():
            if not isinstance(key, str):
                raise TypeError(f"an array of the name {key!r}, which is not UTF-8")
            if not isinstance(node, h5py.Dataset):
                if "MATLAB_sparse" in getattr(node, "attrs", ()):
                    rows = np.asarray(node.attrs["MATLAB_sparse"]).item()
                    found.append(listed(key, (rows, len(node["jc"]) - 1), matlab=True))
                elif key == also:
                    found.append(listed(key, ()))
                continue
            strings, integers = h5py.check_string_dtype(node.dtype) is not None, node.dtype.kind in "iu"
            if not (strings or node.dtype.kind in "iufb" or key == also):
                continue
            of_class = node.attrs.get("MATLAB_class")
            characters = of_class is not None and of_class == b"char" and not strings
            shape: tuple[int, ...] = node.shape or ()
            if of_class is not None:
                shape = shape[:0:-1] if characters else shape[::-1]
            matlab, strings = of_class is not None, strings or characters
            found.append(listed(key, shape, matlab=matlab, strings=strings, integers=integers))
    return found


def _of_hdf5(path: str, key: str, matlab: bool, strings: bool) -> Array:
    h5py = package("h5py", "formats", path)
    with h5py.File(path, "r") as opened:
        node = opened[key]
        if isinstance(node, h5py.Group):
            values, indices = (node[name][()] if name in node else np.zeros(0, np.uint8) for name in ("data", "ir"))
            ends, rows = node["jc"][()], np.asarray(node.attrs["MATLAB_sparse"]).item()
            sparse = package("scipy.sparse", "formats", path)
            value = _dense(sparse.csc_matrix((values, indices, ends), (rows, len(ends) - 1))).transpose()
        elif h5py.check_string_dtype(node.dtype) is not None:
            return np.array(node.asstr()[()], dtype=np.str_)
        else:
            value = np.asarray(node[()])
    value = value.transpose() if matlab else value
    # MATLAB stores strings as rows of character codes.
    return np.array(["".join(map(chr, row)) for row in np.atleast_2d(value).tolist()]) if strings else value


def _dense(matrix: Any) -> Array:
    """A sparse array of SciPy, whose own conversion does not check row indices, as an array."""
    columns = matrix.tocsc()
    columns.check_format(full_check=True)
    return np.asarray(columns.toarray())


# --- tables ---------------------------------------------------------------------------------------------------------


def describe_table(path: str) -> tuple[dict[str, str], list[int], str]:
    """Type of each column of a Parquet or Arrow file, rows of each row group, and Hugging Face's metadata in JSON."""
    table = _table(path, Path(path).stat().st_mtime_ns)
    if isinstance(table, list):
        schema, groups = table[0].schema, [len(batch) for batch in table]
    else:
        about = table.metadata
        schema, groups = table.schema_arrow, [about.row_group(group).num_rows for group in range(about.num_row_groups)]
    metadata = (schema.metadata or {}).get(b"huggingface", b"")
    return {field.name: str(field.type) for field in schema}, groups, metadata.decode(errors="replace")


def read_column(path: str, column: str, group: int) -> list[Any]:
    """The values of a column of a row group: texts, numbers, bytes, and lists and structures of these."""
    table = _table(path, Path(path).stat().st_mtime_ns)
    if isinstance(table, list):
        values = table[group].column(column).to_pylist()
    else:
        values = table.read_row_group(group, columns=[column], use_threads=False).column(column).to_pylist()
    plain = (str, bytes, int, float, list, dict, type(None))
    return [value if isinstance(value, plain) else str(value) for value in values]


def read_images(path: str, column: str, group: int) -> list[bytes | None]:
    """The image files in a column of a row group: bytes, or the field ``bytes`` of structures."""
    values = read_column(path, column, group)
    return [value.get("bytes") if isinstance(value, dict) else value for value in values]


@lru_cache(maxsize=8)
def _table(path: str, _changed: int) -> Any:
    """An opened Parquet file, or the batches of an Arrow file."""
    if path.lower().endswith(".parquet"):
        return package("pyarrow.parquet", "parquet", path).ParquetFile(path)
    arrow = package("pyarrow", "parquet", path)
    mapped = arrow.memory_map(path)
    as_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    table = (arrow.ipc.open_file if as_file else arrow.ipc.open_stream)(mapped).read_all()
    table.validate(full=True)  # pyarrow would follow a damaged offset out of the file
    if not (batches := table.to_batches()):
        raise ValueError("no row")
    return batches


# --- archives -------------------------------------------------------------------------------------------------------


def list_members(path: str) -> list[tuple[str, int, int]]:
    """Name, and start and size [bytes] of the content, of each file in an uncompressed tar file.

    Raises:
        InputError: the archive was cut off, or has links, devices or paths that lead out of it.
    """
    size, members = Path(path).stat().st_size, []
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            inside, place = PurePosixPath(info.name), f"{path}: {info.name}"
            if inside.is_absolute() or ".." in inside.parts:
                raise InputError(place, "a path that leads out of the archive", "paths within it")
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                raise InputError(place, "a link, a device or a sparse file", "regular files only")
            if info.offset_data + info.size > size:
                raise InputError(place, "a file that was cut off", "a complete archive")
            members.append((info.name, info.offset_data, info.size))
    return members
