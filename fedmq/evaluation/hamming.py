"""Hash codes: signs, eight to a byte, and Hamming distances by counting the bits that differ.

Bits lie as :func:`numpy.packbits` puts them: bit j of a code is bit 7 - j % 8 of byte j // 8, 1 for +1, and the last
byte is filled up with zeros. Multi-hot labels are packed the same way; two items share a label where any bit is set in
both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any] | torch.Tensor
Packed = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_WORD = 8  # bytes


def as_numpy(x: Array) -> npt.NDArray[Any]:
    """A NumPy array of the same memory, where a tensor's device allows it."""
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def sign(values: Array) -> npt.NDArray[np.int8]:
    """int8 of -1 and +1 in the shape of ``values``; 0 (and -0) is +1, NaN is -1."""
    return np.where(as_numpy(values) >= 0, np.int8(1), np.int8(-1))


def pack(values: Array) -> Packed:
    """The signs of real numbers, or of a code in {-1, +1}, as bits.

    Args:
        values: [n, bits]; 0 counts as +1.

    Returns:
        uint8 [n, ceil(bits / 8)].
    """
    return np.packbits(as_numpy(values) >= 0, axis=1)


def words(packed: Packed) -> Words:
    """Packed bits in machine words, one row per word: uint8 [n, bytes] to uint64 [ceil(bytes / 8), n].

    Word by word over all items is how distances are counted, so items lie side by side.
    """
    filled = np.zeros((len(packed), -(-packed.shape[1] // _WORD) * _WORD), np.uint8)
    filled[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(filled.view(np.uint64).T)


def distances(query: Words, database: Words) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Hamming distances of one code to all others.

    Args:
        query: [W], one code in words.
        database: [W, n], of :func:`words`.

    Returns:
        [n], uint8 where it can hold the largest distance (which sorts four times as fast), else uint16.
    """
    first: npt.NDArray[np.uint8] = np.bitwise_count(database[0] ^ query[0])
    if len(database) == 1:
        return first
    total: npt.NDArray[Any] = first.astype(np.uint16 if len(database) > 3 else np.uint8)
    for own, others in zip(query[1:], database[1:], strict=True):
        total += np.bitwise_count(others ^ own)
    return total


def shared(query: Words, database: Words) -> npt.NDArray[np.bool_]:
    """Whether one item has a bit (a label) in common with each of the others: [W] and [W, n] to bool [n]."""
    found: npt.NDArray[np.bool_] = (database[0] & query[0]) != 0
    for own, others in zip(query[1:], database[1:], strict=True):
        found |= (others & own) != 0
    return found


def hamming(queries: Array, database: Array) -> npt.NDArray[np.int64]:
    """Hamming distances int64 [Q, n] of codes as :func:`packed_codes` takes them.

    Raises:
        ValueError: codes of different lengths.
    """
    first, second = packed_codes(queries), packed_codes(database)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"codes of {first.shape[1]} and of {second.shape[1]} bytes")
    items = words(second)
    found = np.empty((len(first), len(second)), np.int64)
    for row, query in zip(found, words(first).T, strict=True):
        row[:] = distances(query, items)
    return found


def packed_codes(values: Array) -> Packed:
    """Packed codes as they are (uint8 [n, bytes]); anything else by its signs.

    Raises:
        ValueError: not two-dimensional, or without a bit.
    """
    found = as_numpy(values)
    if found.ndim != 2 or not found.shape[1]:
        raise ValueError(f"codes of shape {list(found.shape)}: [n, bits] or packed [n, bytes] are wanted")
    return found if found.dtype == np.uint8 else pack(found)
