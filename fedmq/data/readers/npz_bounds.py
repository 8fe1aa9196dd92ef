"""What is known of a ``.npz`` file before its arrays are read: their sizes, shapes and types.

A file of 10 MB can hold 10 GB of zeros; such files are refused.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from fedmq.errors import InputError
from fedmq.storage.regular_files import check_regular

#: Size up to which arrays may be compressed to any degree, as labels are mostly zeros [bytes].
_FREE_BYTES = 1 << 30
#: Maximum ratio of an array's size to its compressed size, for larger arrays.
_MAX_RATIO = 100
_LAST_CHARACTER = 0x10FFFF


def check_npz(path: Path) -> None:
    """Refuse a file before any of it is decompressed.

    Raises:
        InputError: it is not a regular file, holds more than this machine's free memory, or expands suspiciously.
        OSError, zipfile.BadZipFile: it cannot be read; the caller reports that.
    """
    check_regular(path, 1 << 62, "a .npz file")
    if not zipfile.is_zipfile(path):
        return  # the caller reports what it is instead
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    free, packed = psutil.virtual_memory().available, path.stat().st_size
    if size > free:
        raise InputError(str(path), f"arrays of {size:,} bytes", f"at most the free memory, {free:,} bytes")
    if size > _FREE_BYTES and size > _MAX_RATIO * packed:
        found = f"{packed:,} bytes that expand to {size:,}"
        raise InputError(str(path), found, f"at most {_MAX_RATIO} times the file's size; save it uncompressed")


def npz_array(archive: zipfile.ZipFile, key: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, from its header.

    Args:
        archive: the open file.
        key: the array's name.

    Raises:
        KeyError, OSError, ValueError, zipfile.BadZipFile: there is no such array, or its header cannot be read.
    """
    with archive.open(f"{key}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, kind = read(member)
    return tuple(map(int, shape)), kind


def check_characters(array: npt.NDArray[Any]) -> None:
    """Refuse an array of strings with numbers that are no characters, which NumPy cannot convert to strings.

    Args:
        array: an array of any type; only one of Unicode strings is checked.

    Raises:
        ValueError: a number is above the last character of Unicode.
    """
    if array.dtype.kind != "U" or not array.nbytes:
        return
    numbers = np.ascontiguousarray(array).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    if (largest := int(numbers.max())) > _LAST_CHARACTER:
        raise ValueError(f"a string holds the number {largest:#x}, which is no character")
