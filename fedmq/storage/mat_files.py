"""Check a .mat file before SciPy reads it.

SciPy lists only the arrays before the end of a truncated file, takes as much memory as a damaged length says, and
crashes the process on types that do not exist.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from fedmq.errors import InputError

_NUMERIC = frozenset({1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 16, 17, 18})  # miINT8 to miUINT64, and UTF-8, -16 and -32
_MATRIX, _COMPRESSED = 14, 15
_CLASSES = range(1, 19)  # mxCELL_CLASS to SciPy's mxOPAQUE_CLASS and mxOBJECT_CLASS_FROM_MATRIX_H
_CHARACTERS, _SPARSE, _NUMBERS = 4, 5, range(6, 16)  # mxDOUBLE_CLASS to mxUINT64_CLASS
_COMPLEX = 8  # bit of the flags
_HEADER = 128  # bytes before the first element
_DEPTH = 16  # of cells in cells
_BLOCK = 1 << 20
#: Bytes per value in version 4 files, by the tens digit of the type number.
_MAT4_BYTES = (8, 4, 4, 2, 2, 1)


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Inflated:
    """A compressed element, decompressed piece by piece."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._left, self._inflate, self._rest = file, size, zlib.decompressobj(), b""

    def read(self, size: int, /) -> bytes:
        parts = list[bytes]()
        while size > 0 and not self._inflate.eof:
            block = self._rest or self._file.read(min(_BLOCK, self._left))
            self._left -= 0 if self._rest else len(block)
            part = self._inflate.decompress(block, size)
            self._rest = self._inflate.unconsumed_tail
            if not part and not block:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class _DamagedError(Exception):
    """A tag that is not one of a .mat file."""


def check_mat(path: Path) -> None:
    """Refuse a .mat file that ends before its last array does, or whose arrays are damaged.

    Raises:
        InputError: the file is truncated, or has a type that does not exist or an element longer than its array.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if any(end > size for end in _ends(file, size)):
            raise InputError(str(path), f"a file cut off after {size} bytes", "a complete .mat file")
    _check_tags(path)


def _ends(file: BinaryIO, size: int) -> Iterator[int]:
    """End offset [bytes] of each array of a version 4 or 5 .mat file; nothing for other files."""
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


def _check_tags(path: Path) -> None:
    """Refuse a version 5 .mat file with a type that does not exist; other files are left to their reader.

    Raises:
        InputError: such a type, or an element that ends after the element that contains it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            order = {b"IM": "<", b"MI": ">"}.get(file.read(_HEADER)[126:128])
            while order and file.tell() + 8 <= size:
                kind, length = struct.unpack(f"{order}II", file.read(8))
                start = file.tell()
                if kind == _COMPRESSED:
                    inner = _Inflated(file, length)
                    _element(inner, order, 0)
                elif kind == _MATRIX:
                    _matrix(file, order, length, 0)
                else:
                    raise _DamagedError
                file.seek(start + length)
    except (_DamagedError, struct.error, zlib.error):
        raise InputError(str(path), "a damaged array", "a readable .mat file") from None
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), "a readable .mat file") from None


def _skip(source: _Source, size: int) -> None:
    while size > 0 and (block := source.read(min(size, _BLOCK))):
        size -= len(block)
    if size > 0:
        raise _DamagedError


def _element(source: _Source, order: str, depth: int) -> tuple[int, int, bytes]:
    """Read one element: its type, its whole length with tag and padding, and its first 8 bytes."""
    tag = source.read(8)
    first, length = struct.unpack(f"{order}II", tag)
    if first >> 16:  # a small element: length and type in the first word, up to four bytes in the second
        kind, length = first & 0xFFFF, first >> 16
        if kind not in _NUMERIC or length > 4:
            raise _DamagedError
        return kind, 8, tag[4 : 4 + length]
    if first == _MATRIX:
        _matrix(source, order, length, depth + 1)
        return first, 8 + length, b""
    if first not in _NUMERIC:
        raise _DamagedError
    padded = length + -length % 8
    head = source.read(min(8, padded))
    _skip(source, padded - len(head))
    return first, 8 + padded, head


def _matrix(source: _Source, order: str, length: int, depth: int) -> None:
    """Check the elements of one array: flags, dimensions, name, and values or further arrays."""
    if depth > _DEPTH:
        raise _DamagedError
    if not length:
        return  # an empty cell
    kind, used, flags = _element(source, order, depth)
    if kind != 6 or len(flags) < 4 or flags[0 if order == "<" else 3] not in _CLASSES:
        raise _DamagedError
    of_class, bits = (flags[0], flags[1]) if order == "<" else (flags[3], flags[2])
    kinds = list[int]()
    while used < length:
        kind, size, _ = _element(source, order, depth)
        kinds.append(kind)
        used += size
    # After the flags: dimensions, name, and the values; SciPy reads missing ones from the data that follow.
    parts = {_SPARSE: 5, _CHARACTERS: 3}.get(of_class, 3) + bool(bits & _COMPLEX)
    simple = of_class in (_SPARSE, _CHARACTERS) or of_class in _NUMBERS
    if used > length + 7 or (simple and (len(kinds) != parts or _MATRIX in kinds)):
        raise _DamagedError  # the last element's padding may lie outside
