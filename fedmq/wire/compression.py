"""Compressed models and updates: the forms in which their float32 values may travel; see docs/reference/wire.md.

A form is a pair of functions. The sender encodes values as *parts*, flat arrays of fixed types. The receiver decodes
the parts, after checking them, to values that are the same to the bit on every machine: it multiplies and adds element
by element. The sender continues with these values, too, so that both ends have, log and hash the same payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.wire.fields import FieldError, all_finite
from fedmq.wire.layout import MAX_ENTRIES

F32 = npt.NDArray[np.float32]
Array = npt.NDArray[Any]
#: Values of int8 that share a scale.
BLOCK = 1024
#: Largest rank that a receiver decodes, as its work grows with the rank.
MAX_RANK = 64
_LARGEST_INT8 = np.float32(127)


class Compressed(np.ndarray[tuple[int], np.dtype[np.float32]]):
    """Decoded values float32 [n], read-only, with the parts that travel in their place.

    An array that is computed from it, a slice of it included, has no parts and travels as it is.

    Attributes:
        form: name of the form; empty without parts.
    """

    form = ""
    parts: tuple[Array, ...] = ()  # what travels


def form_of(values: Array) -> str:
    """Name of the form in which an array travels; ``none`` if as it is."""
    return (values.form if isinstance(values, Compressed) else "") or "none"


def sent_bytes(values: Array) -> int:
    """Size of an array as it travels [bytes]."""
    parts = values.parts if isinstance(values, Compressed) else ()
    return sum(part.nbytes for part in parts) if parts else values.nbytes


@dataclass(frozen=True)
class Settings:
    """What the forms need beside the values."""

    fraction: float = 1.0  # top_k: fraction of the values that are sent
    rank: int = 1  # low_rank: columns of the two factors of a matrix
    shapes: tuple[tuple[int, ...], ...] = ()  # low_rank: shapes of the tensors that are concatenated in the values
    # Low_rank: the last part of the sender's encoding before, whose right factors this one starts from; None or another
    # size draws them.
    factors: F32 | None = None


@dataclass(frozen=True)
class Form:
    """A form in which float32 values travel."""

    dtypes: tuple[str, ...]  # type of each part
    encode: Callable[[F32, Settings], tuple[Array, ...]]  # finite values float32 [n], and the settings, to the parts
    # Parts, and n, to values float32 [n]; raises FieldError if the parts do not fit n.
    decode: Callable[[Sequence[Array], int], F32]


def encoded(form: str, values: F32, settings: Settings) -> F32:
    """The values float32 [n] in a form; unchanged if one is not finite, which no form can express."""
    if not values.size or not all_finite(values):
        return values
    return decoded(form, FORMS[form].encode(values, settings), values.size)


def decoded(form: str, parts: Sequence[Array], size: int) -> F32:
    """Decode parts, which may come from a peer.

    Args:
        form: a key of :data:`FORMS`.
        parts: arrays of the form's types.
        size: number of values.

    Raises:
        FieldError: the parts do not fit the size, or one is out of bounds. The values may still not be finite.
    """
    with np.errstate(all="ignore"):  # scales of a peer may overflow; what is not finite is refused later
        values = FORMS[form].decode(parts, size).view(Compressed)
    values.form, values.parts = form, tuple(parts)
    values.flags.writeable = False
    return values


def _require(form: str, fits: bool, what: str) -> None:
    if not fits:
        raise FieldError(f"{form}: {what}")


# ----------------------------------------------------------------------------------------------------------- bfloat16
def _to_bfloat16(values: F32, _settings: Settings) -> tuple[Array, ...]:
    """The upper halves of the values, rounded to the nearest, ties to even; a value that would overflow is cut."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    upper = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    infinite = (upper & np.uint32(0x7FFF)) == np.uint32(0x7F80)
    return ((upper - infinite).astype(np.uint16),)


def _from_bfloat16(parts: Sequence[Array], size: int) -> F32:
    _require("bfloat16", parts[0].size == size, f"{parts[0].size} values, expected {size}")
    return (parts[0].astype(np.uint32) << np.uint32(16)).view(np.float32)


# --------------------------------------------------------------------------------------------------------------- int8
def _to_int8(values: F32, _settings: Settings) -> tuple[Array, ...]:
    """Each block of 1024 values as multiples of a 127th of its largest magnitude."""
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: values.size] = values
    scales = np.abs(blocks).max(axis=1) / _LARGEST_INT8
    steps = np.where(scales > 0, scales, np.float32(1))[:, None]
    whole = np.clip(np.rint(blocks / steps), -_LARGEST_INT8, _LARGEST_INT8).astype(np.int8)
    return whole.reshape(-1)[: values.size].copy(), scales


def _from_int8(parts: Sequence[Array], size: int) -> F32:
    whole, scales = parts
    fits = whole.size == size and scales.size == -(-size // BLOCK)
    _require("int8", fits, f"{whole.size} values with {scales.size} scales, expected {size} with one for {BLOCK}")
    values: F32 = whole.astype(np.float32) * np.repeat(scales, BLOCK)[:size]
    return values


# -------------------------------------------------------------------------------------------------------------- top_k
def _to_top_k(values: F32, settings: Settings) -> tuple[Array, ...]:
    """The values of largest magnitude with their places, in ascending order; of equal ones the first."""
    count, magnitudes = max(1, math.ceil(settings.fraction * values.size)), np.abs(values)
    least = np.partition(magnitudes, values.size - count)[values.size - count]
    above = np.flatnonzero(magnitudes > least)
    equal = np.flatnonzero(magnitudes == least)[: count - above.size]
    places = np.sort(np.concatenate([above, equal]))
    return places.astype(np.int32), np.ascontiguousarray(values)[places]


def _from_top_k(parts: Sequence[Array], size: int) -> F32:
    places, kept = parts
    _require("top_k", places.size == kept.size > 0, f"{places.size} places of {kept.size} values")
    ascending = bool((places[1:] > places[:-1]).all()) and places[0] >= 0 and places[-1] < size
    _require("top_k", ascending, f"the places are not distinct, ascending and below {size}")
    values = np.zeros(size, np.float32)
    values[places] = kept
    return values


# ----------------------------------------------------------------------------------------------------------- low_rank
def _segments(shapes: Sequence[tuple[int, ...]], rank: int) -> list[tuple[int, int, int]]:
    """Rows, columns and rank of each run of values; rank 0 for values that are sent as they are."""
    found: list[tuple[int, int, int]] = []
    for shape in shapes:
        if len(shape) == 2 and rank * sum(shape) < math.prod(shape):
            found.append((shape[0], shape[1], rank))
        elif found and found[-1][2] == 0:
            found[-1] = (found[-1][0] + math.prod(shape), 1, 0)
        else:
            found.append((math.prod(shape), 1, 0))
    return found


def _placed(segments: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, slice, slice]]:
    """Rows, columns and rank of each segment, its place in the values, and that in the part that travels."""
    at, start = 0, 0
    for rows, columns, rank in segments:
        size, length = rows * columns, rank * (rows + columns) or rows * columns
        yield rows, columns, rank, slice(at, at + size), slice(start, start + length)
        at, start = at + size, start + length


def _to_low_rank(values: F32, settings: Settings) -> tuple[Array, ...]:
    """Each matrix M [n, m] as P [n, r] and Q [m, r] by a step of power iteration (PowerSGD, Vogels et al. 2019).

    P is an orthonormal basis of M Q', where Q' is the Q of the encoding before, and Q = M^T P.
    """
    import torch  # noqa: PLC0415 - only a silo that trains encodes

    segments = _segments(settings.shapes, settings.rank)
    before, found = settings.factors, np.empty(_length(segments), np.float32)
    generator = seeds.numpy_generator(0, "low_rank")
    for rows, columns, rank, place, sent in _placed(segments):
        if not rank:
            found[sent] = values[place]
            continue
        right = generator.standard_normal((columns, rank), np.float32)
        if before is not None and before.size == found.size:
            right = before[sent][rank * rows :].reshape(columns, rank)
        # In torch's own memory: the order of a product's sums depends on the alignment of its operands.
        matrix = torch.tensor(values[place]).reshape(rows, columns)
        left, _ = torch.linalg.qr(matrix @ torch.tensor(right))
        found[sent] = torch.cat([left.reshape(-1), (matrix.T @ left).reshape(-1)]).numpy()
    return np.array(segments, np.int64).reshape(-1), found


def _length(segments: Sequence[tuple[int, int, int]]) -> int:
    return sum(rank * (rows + columns) or rows * columns for rows, columns, rank in segments)


def _from_low_rank(parts: Sequence[Array], size: int) -> F32:
    numbers, factors = parts
    whole = numbers.size % 3 == 0 and numbers.size <= 3 * MAX_ENTRIES
    _require("low_rank", whole, f"{numbers.size} numbers, allowed three for each of at most {MAX_ENTRIES} segments")
    segments = [(rows, columns, rank) for rows, columns, rank in numbers.reshape(-1, 3).tolist()]
    # Python's integers do not overflow.
    bounded = all(
        min(rows, columns) >= 1 and 0 <= rank <= MAX_RANK and rank * (rows + columns) < max(2, rows * columns)
        for rows, columns, rank in segments
    )
    _require("low_rank", bounded, f"a segment without values, or of a rank above {MAX_RANK} or too high for its size")
    covered = sum(rows * columns for rows, columns, _ in segments) == size
    _require("low_rank", covered and factors.size == _length(segments), f"the segments do not fit {size} values")
    values = np.zeros(size, np.float32)
    for rows, columns, rank, place, sent in _placed(segments):
        if not rank:
            values[place] = factors[sent]
            continue
        left, right = np.split(factors[sent], [rank * rows])
        matrix = values[place].reshape(rows, columns)
        for p, q in zip(left.reshape(rows, rank).T, right.reshape(columns, rank).T, strict=True):
            matrix += p[:, None] * q
    return values


#: All forms by name, on the wire and in a scenario's ``compression``.
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "bfloat16": Form(("uint16",), _to_bfloat16, _from_bfloat16),
        "int8": Form(("int8", "float32"), _to_int8, _from_int8),
        "top_k": Form(("int32", "float32"), _to_top_k, _from_top_k),
        "low_rank": Form(("int64", "float32"), _to_low_rank, _from_low_rank),
    }
)
