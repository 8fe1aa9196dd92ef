"""Field declarations of payloads: allowed types, shapes and ranges, checked at construction and at decoding.

A payload's specification maps each field name to one of the frozen dataclasses below. Their method
``check(place, value, dims)`` raises :class:`FieldError` for a value that is not allowed. ``dims`` binds symbolic
dimensions (``"C"``, ``"d"``) to sizes, so that all tensors of a payload must agree on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedmq.errors import LocalWireError

#: Names of runs, silos, error codes.
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
#: Names of layers, as from torch's ``named_parameters``.
LAYER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Names of metrics.
METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
#: Names of labels and words: any text without control characters.
LABEL = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,256}")
#: A SHA-256 in lower-case hexadecimal.
DIGEST = re.compile(r"[0-9a-f]{64}")

#: Maximum size of each symbolic dimension.
DIMENSIONS: Mapping[str, int] = {"n": 1 << 30, "N": 1 << 24, "C": 1 << 20, "d": 1 << 16, "r": 1 << 16}
U64 = (1 << 64) - 1
I63 = (1 << 63) - 1

#: Elements checked at a time: the flags of a block fit into the CPU cache, and the first bad block ends the search.
_BLOCK = 1 << 17


class FieldError(LocalWireError):
    """A field violates its declaration; ``reason`` is the refusal's reason if the value came from a peer."""

    def __init__(self, detail: str, reason: str = "malformed") -> None:
        self.reason = reason
        super().__init__(detail)


def shown(value: object) -> str:
    """A peer's value for an error message: at most 80 characters; for a list or map only its type.

    The repr of a deeply nested value would raise RecursionError.
    """
    plain = value is None or isinstance(value, bool | int | float | str | bytes)
    return f"{value!r:.80}" if plain else f"a {type(value).__name__}"


def all_finite(array: npt.NDArray[Any]) -> bool:
    """Whether an array of float16, float32 or float64 has neither NaN nor infinity; integer arrays are finite.

    It makes one pass in blocks, and stops at the first bad block.
    """
    if array.dtype.kind != "f":
        return True
    flat = array.reshape(-1)
    return all(bool(np.isfinite(flat[start : start + _BLOCK]).all()) for start in range(0, flat.size, _BLOCK))


def check_name(place: str, value: object, pattern: re.Pattern[str] = NAME) -> None:
    """Check a name against a pattern, which bounds its length.

    Raises:
        FieldError: not a string, or the pattern does not match.
    """
    if type(value) is not str or pattern.fullmatch(value) is None:
        raise FieldError(f"{place}: {shown(value)} is not a name of the form {pattern.pattern}")


@lru_cache(256)  # NumPy composes the name each time
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else str(dtype)


@dataclass(frozen=True)
class Tensor:
    """A C-contiguous array; floats must be finite."""

    dtypes: tuple[str, ...]  # allowed NumPy dtypes
    shape: tuple[int | str, ...]  # numbers are exact sizes, letters symbolic dimensions
    bulk: bool = False  # a model or an update, whose finiteness is checked by decode only
    low: int | None = None  # smallest value of an integer tensor
    least: int = 1  # smallest size of each symbolic dimension

    @staticmethod
    def largest(array: npt.NDArray[Any]) -> float:
        """Largest magnitude of an array's numbers, block by block in the cache; NaN or infinite if one is."""
        flat = array.reshape(-1)
        blocks = (flat[start : start + _BLOCK] for start in range(0, flat.size, _BLOCK))
        return float(np.max([(-block.min(), block.max()) for block in blocks], initial=0.0))

    def check(self, place: str, value: object, dims: dict[str, int]) -> None:
        """Check dtype, shape, contiguity, ``low`` and, unless bulk, finiteness."""
        if not isinstance(value, np.ndarray):
            raise FieldError(f"{place}: {type(value).__name__} is not a numpy array")
        self.check_form(place, _name_of(value.dtype), value.shape, dims)
        if not value.flags.c_contiguous:
            raise FieldError(f"{place}: the array is not contiguous in C order")
        if self.low is not None and value.size and int(value.min()) < self.low:
            raise FieldError(f"{place}: a value lies below {self.low}")
        if not self.bulk and not all_finite(value):
            raise FieldError(f"{place}: NaN or infinity", "not_finite")

    def check_form(self, place: str, dtype: object, shape: tuple[int, ...], dims: dict[str, int]) -> None:
        """Check the name of a dtype and a shape alone, as the decoder does before it makes the array."""
        if type(dtype) is not str or dtype not in self.dtypes:
            raise FieldError(f"{place}: dtype {shown(dtype)} is not one of {', '.join(self.dtypes)}")
        if len(shape) != len(self.shape):
            raise FieldError(f"{place}: shape {shape} does not have the {len(self.shape)} dimensions of {self.shape}")
        for size, declared in zip(shape, self.shape, strict=True):
            if isinstance(declared, str):
                if not self.least <= size <= DIMENSIONS[declared]:
                    raise FieldError(f"{place}: {declared} = {size} is not in [{self.least}, {DIMENSIONS[declared]}]")
                if dims.setdefault(declared, size) != size:
                    raise FieldError(f"{place}: {declared} = {size}, but {dims[declared]} elsewhere in the payload")
            elif size != declared:
                raise FieldError(f"{place}: shape {shape} is not {self.shape}")


@dataclass(frozen=True)
class Whole:
    """An integer in ``[low, high]``."""

    low: int
    high: int

    def check(self, place: str, value: object, _dims: dict[str, int] | None = None) -> None:
        """Check type and bounds; booleans and NumPy integers are not integers here."""
        if type(value) is not int or not self.low <= value <= self.high:
            raise FieldError(f"{place}: {shown(value)} is not an integer in [{self.low}, {self.high}]")


@dataclass(frozen=True)
class Real:
    """A finite float in ``[low, high]``."""

    low: float = -math.inf
    high: float = math.inf

    def check(self, place: str, value: object, _dims: dict[str, int] | None = None) -> None:
        """Check type, bounds and finiteness, whose violation has the reason ``not_finite``."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FieldError(f"{place}: {shown(value)} is not a number")
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise FieldError(f"{place}: {shown(value)} is not finite", "not_finite")
        if not self.low <= value <= self.high:
            raise FieldError(f"{place}: {shown(value)} is not in [{self.low}, {self.high}]")


_FINITE = Real()


@dataclass(frozen=True)
class Word:
    """A string fully matched by ``pattern``."""

    pattern: re.Pattern[str]

    def check(self, place: str, value: object, _dims: dict[str, int]) -> None:
        """Check type and pattern."""
        check_name(place, value, self.pattern)


@dataclass(frozen=True)
class Text:
    """Free text of at most ``longest`` bytes of UTF-8."""

    longest: int

    def check(self, place: str, value: object, _dims: dict[str, int]) -> None:
        """Check type, length and that it can be encoded."""
        if type(value) is not str:
            raise FieldError(f"{place}: {type(value).__name__} is not a string")
        try:
            size = len(value.encode())
        except UnicodeEncodeError as error:
            raise FieldError(f"{place}: not valid Unicode") from error
        if size > self.longest:
            raise FieldError(f"{place}: {size} bytes of text, allowed {self.longest}")


@dataclass(frozen=True)
class Names:
    """A tuple of ``least`` to ``most`` distinct names."""

    most: int
    pattern: re.Pattern[str]
    least: int = 1

    def check(self, place: str, value: object, _dims: dict[str, int]) -> None:
        """Check count, pattern and that the names are distinct."""
        if not isinstance(value, tuple) or not self.least <= len(value) <= self.most:
            raise FieldError(f"{place}: not a tuple of {self.least} to {self.most} names")
        for name in value:
            check_name(place, name, self.pattern)
        if len(set(value)) != len(value):
            raise FieldError(f"{place}: a duplicate name")


@dataclass(frozen=True)
class FloatMap:
    """A mapping of at most ``most`` names to finite floats, or each to an ``inner`` mapping of floats."""

    most: int
    pattern: re.Pattern[str]
    inner: FloatMap | None = None  # there is no deeper nesting

    def check(self, place: str, value: object, _dims: dict[str, int] | None = None) -> None:
        """Check count, names and numbers, or the inner mappings."""
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise FieldError(f"{place}: not a mapping of at most {self.most} {'mappings' if self.inner else 'numbers'}")
        of_each = self.inner or _FINITE
        for name, each in value.items():
            check_name(place, name, self.pattern)
            of_each.check(f"{place}.{name}", each)


Field: TypeAlias = Tensor | Whole | Real | Word | Text | Names | FloatMap
