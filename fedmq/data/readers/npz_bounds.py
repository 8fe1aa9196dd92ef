"""Refuse ``.npz`` files that expand to far more than their size: a file of 10 MB can hold 10 GB of zeros."""

from __future__ import annotations

import zipfile
from pathlib import Path

import psutil

from fedmq.errors import InputError
from fedmq.storage.regular_files import check_regular

#: Size up to which arrays may be compressed to any degree, as labels are mostly zeros [bytes].
_FREE_BYTES = 1 << 30
#: Largest ratio of an array's size to that of its compressed form, beyond that size.
_MAX_RATIO = 100


def check_npz(path: Path) -> None:
    """Refuse a file before any of it is decompressed.

    Raises:
        InputError: it is not a regular file, holds more than this machine's free memory, or expands suspiciously.
        OSError, zipfile.BadZipFile: it cannot be read; the caller reports that.
    """
    check_regular(path, 1 << 62, "a .npz file")
    if not zipfile.is_zipfile(path):
        return  # the caller says what it is instead
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
    free, packed = psutil.virtual_memory().available, path.stat().st_size
    if size > free:
        raise InputError(str(path), f"arrays of {size:,} bytes", f"at most the free memory, {free:,} bytes")
    if size > _FREE_BYTES and size > _MAX_RATIO * packed:
        found = f"{packed:,} bytes that expand to {size:,}"
        raise InputError(str(path), found, f"at most {_MAX_RATIO} times the file's size; save it uncompressed")
