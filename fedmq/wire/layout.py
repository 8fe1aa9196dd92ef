"""Model layouts: where each parameter lies in the model's contiguous buffer; messages name a layout by its digest."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.wire.fields import LAYER, FieldError, Whole, check_name, shown

#: The dtype of all parameters, and its size [bytes].
DTYPE, _BYTES = "float32", 4
MAX_ENTRIES = 8192
MAX_RANK = 8
MAX_BYTES = 1 << 30
_SIZE = Whole(0, MAX_BYTES)


@dataclass(frozen=True)
class LayoutEntry:
    """One parameter of a layout.

    Raises:
        FieldError: an argument is of the wrong type or out of bounds.
    """

    name: str  # name of the form ``[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}``
    shape: tuple[int, ...]  # up to 8 dimensions, each at least 0; ``()`` for a scalar
    dtype: str  # DTYPE
    offset: int  # first byte in the buffer [bytes]

    def __post_init__(self) -> None:
        check_name("layout name", self.name, LAYER)
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_RANK:
            raise FieldError(f"layout {self.name}: shape is not a tuple of at most {MAX_RANK} sizes")
        for size in self.shape:
            _SIZE.check(f"layout {self.name}: size", size)
        if self.dtype != DTYPE:
            raise FieldError(f"layout {self.name}: dtype {shown(self.dtype)} is not {DTYPE}")
        _SIZE.check(f"layout {self.name}: offset", self.offset)
        if self.nbytes > MAX_BYTES:
            raise FieldError(f"layout {self.name}: {self.nbytes} bytes, allowed {MAX_BYTES}", "oversized")

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * _BYTES


@dataclass(frozen=True)
class Layout:
    """The layout of a model: its parameters in the order of the buffer, without gaps or overlaps.

    Raises:
        FieldError: a gap, an overlap, a duplicate name, or too many entries or bytes.
    """

    # 1 to 8192 entries with distinct names; the first starts at 0, each other where the previous one ends.
    entries: tuple[LayoutEntry, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.entries, tuple) or not 1 <= len(self.entries) <= MAX_ENTRIES:
            raise FieldError(f"layout: not a tuple of 1 to {MAX_ENTRIES} entries")
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise FieldError("layout: a duplicate name")
        end = 0
        for entry in self.entries:
            if entry.offset != end:
                raise FieldError(f"layout {entry.name}: offset {entry.offset}, the entry before it ends at {end}")
            end += entry.nbytes
        if end > MAX_BYTES:
            raise FieldError(f"layout: {end} bytes, allowed {MAX_BYTES}", "oversized")

    @classmethod
    def of(cls, parts: Iterable[tuple[str, Sequence[int], str]]) -> Layout:
        """The layout of consecutive parameters, given as ``(name, shape, dtype name)`` in the order of the buffer."""
        entries = []
        offset = 0
        for name, shape, dtype in parts:
            entry = LayoutEntry(name, tuple(int(size) for size in shape), dtype, offset)
            entries.append(entry)
            offset += entry.nbytes
        return cls(tuple(entries))

    @cached_property
    def size(self) -> int:
        """Number of elements of all entries."""
        return sum(entry.size for entry in self.entries)

    @cached_property
    def nbytes(self) -> int:
        """Number of bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over :meth:`canonical`."""
        return hashlib.sha256(self.canonical()).hexdigest()

    def model_digest(self, theta: npt.NDArray[Any]) -> str:
        """SHA-256 (hex) over the layout's digest and the parameters [P]; equal digests mean bit-identical models."""
        return hashlib.sha256(bytes.fromhex(self.digest) + np.ascontiguousarray(theta).tobytes()).hexdigest()

    @cached_property
    def by_name(self) -> Mapping[str, LayoutEntry]:
        """Entries by name."""
        return {entry.name: entry for entry in self.entries}

    def canonical(self) -> bytes:
        """The text that is hashed: a header line, then one line of tab-separated values per entry."""
        lines = ["fedmq layout 1"]
        for entry in self.entries:
            lines.append(f"{entry.name}\t{entry.dtype}\t{','.join(map(str, entry.shape))}\t{entry.offset}")
        return ("\n".join(lines) + "\n").encode()

    def part(self, names: Iterable[str]) -> Layout:
        """The layout of the named entries alone, in the order of ``names``; made once for each choice.

        Raises:
            KeyError: a name is not in the layout.
        """
        key = tuple(names)
        if key not in self._parts:
            chosen = [self.by_name[name] for name in key]
            self._parts[key] = Layout.of((entry.name, entry.shape, entry.dtype) for entry in chosen)
        return self._parts[key]

    @cached_property
    def _parts(self) -> dict[tuple[str, ...], Layout]:
        return {}

    def ranges(self, names: Iterable[str]) -> Sequence[slice]:
        """Where the named entries lie in the buffer, in elements and in its order; adjacent entries are one range."""
        key = frozenset(names)
        if key not in self._ranges:
            ends: list[tuple[int, int]] = []
            for entry in (entry for entry in self.entries if entry.name in key):
                start = entry.offset // _BYTES
                if ends and ends[-1][1] == start:
                    start, _ = ends.pop()
                ends.append((start, entry.offset // _BYTES + entry.size))
            self._ranges[key] = [slice(*each) for each in ends]
        return self._ranges[key]

    @cached_property
    def _ranges(self) -> dict[frozenset[str], list[slice]]:
        return {}

    def views(self, buffer: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """The parameters by name, as views of a buffer float32 [P], contiguous: writable if it is, nothing is copied.

        Raises:
            LocalWireError: the buffer's size is not :attr:`nbytes`.
        """
        if buffer.nbytes != self.nbytes:
            raise LocalWireError(f"a buffer of {buffer.nbytes} bytes for a layout of {self.nbytes}")
        raw = buffer.reshape(-1).view(np.uint8)
        return {
            entry.name: raw[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).reshape(entry.shape)
            for entry in self.entries
        }

    def to_plain(self) -> list[list[Any]]:
        """The layout as plain data for the codec: ``[name, dtype, [sizes], offset]`` per entry."""
        return [[entry.name, entry.dtype, list(entry.shape), entry.offset] for entry in self.entries]

    @classmethod
    def from_plain(cls, plain: object) -> Layout:
        """The inverse of :meth:`to_plain`.

        Raises:
            FieldError: another form, or a value out of bounds.
        """
        if not isinstance(plain, list) or len(plain) > MAX_ENTRIES:
            raise FieldError(f"layout: not a list of at most {MAX_ENTRIES} entries")
        entries = []
        for row in plain:
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[2], list):
                raise FieldError("layout: an entry is not [name, dtype, [sizes], offset]")
            name, dtype, shape, offset = row
            entries.append(LayoutEntry(name, tuple(shape), dtype, offset))
        return cls(tuple(entries))


def agree(received: Layout | None, expected: Layout) -> None:
    """Check that the coordinator's layout is that of the model built by this process.

    Raises:
        InputError: they differ, so the two sides have different scenarios or weights.
    """
    if received is None or received.digest != expected.digest:
        found = "none" if received is None else f"{len(received.entries)} tensors, {received.size} parameters"
        allowed = f"{len(expected.entries)} tensors, {expected.size} parameters as in this scenario"
        raise InputError("the coordinator's model layout", found, allowed)


def require_layout(layouts: Mapping[str, Layout], digest: str, buffer: npt.NDArray[Any]) -> Layout:
    """Return the agreed layout whose digest a peer's payload has, after checking that its buffer, 1-D, fits.

    Raises:
        RemoteWireError: reason ``layout``: unknown digest, or a buffer of another size.
    """
    layout = layouts.get(digest)
    if layout is None:
        raise RemoteWireError("layout", f"no layout {digest[:12]} was agreed")
    if buffer.nbytes != layout.nbytes:
        raise RemoteWireError("layout", f"{buffer.nbytes} bytes, the layout has {layout.nbytes}")
    return layout
