"""Hash codes packed eight bits to a byte, and Hamming distances.

Bits are packed as by :func:`numpy.packbits`: bit j of a code is bit 7 - j % 8 of byte j // 8, 1 for +1, and the last
byte is padded with zeros. Multi-hot labels are packed the same way; two items share a label if any bit is set in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
Packed = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64] | npt.NDArray[np.uint32]


def as_numpy(x: Array) -> npt.NDArray[Any]:
    """A NumPy array, sharing memory with ``x`` if it is on the CPU."""
    # Told apart by type and not by isinstance, so that this module does without torch.
    return np.asarray(x) if isinstance(x, np.ndarray) else x.detach().cpu().numpy()


def sign(values: Array) -> npt.NDArray[np.int8]:
    """Signs as int8 -1 and +1, in the shape of ``values``; 0 and -0 give +1, NaN gives -1."""
    return np.where(as_numpy(values) >= 0, np.int8(1), np.int8(-1))


def pack(values: Array) -> Packed:
    """Pack the signs of real numbers [n, bits], 0 counting as +1, or codes in {-1, +1}, into bits.

    Returns:
        uint8 [n, ceil(bits / 8)].
    """
    return np.packbits(as_numpy(values) >= 0, axis=1)


def words(packed: Packed) -> Words:
    """Packed bits as words, one row per word: uint8 [n, bytes] to uint64 [ceil(bytes / 8), n].

    Distances are computed one word at a time over all items, so each row holds one word of every item. Up to 32 bits
    are one word of 32 bits, which takes half the time.
    """
    kind = np.dtype(np.uint32 if packed.shape[1] <= 4 else np.uint64)
    filled = np.zeros((len(packed), -(-packed.shape[1] // kind.itemsize) * kind.itemsize), np.uint8)
    filled[:, : packed.shape[1]] = packed
    return np.ascontiguousarray(filled.view(kind).T)


def distances(query: Words, database: Words) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
    """Hamming distances of one code [W] to the codes of a database [W, n], both columns of :func:`words`.

    Returns:
        [n], uint8 if it can hold the largest distance, else uint16.
    """
    first: npt.NDArray[np.uint8] = np.bitwise_count(database[0] ^ query[0])
    if len(database) == 1:
        return first
    total: npt.NDArray[Any] = first.astype(np.uint16 if len(database) > 3 else np.uint8)
    for word, others in zip(query[1:], database[1:], strict=True):
        total += np.bitwise_count(others ^ word)
    return total


def shared(query: Words, database: Words) -> npt.NDArray[np.bool_]:
    """Whether one item, or each of r items, has a bit (a label) in common with each item of a database.

    [W] and [W, n] to bool [n], or [W, r] and [W, n] to bool [r, n].
    """
    result: npt.NDArray[np.bool_] = (database[0] & query[0][..., None]) != 0
    for word, others in zip(query[1:], database[1:], strict=True):
        result |= (others & word[..., None]) != 0
    return result


def hamming(queries: Array, database: Array) -> npt.NDArray[np.int64]:
    """Hamming distances of codes [Q, bits] to codes [n, bits], or of packed ones, uint8 [Q, bytes] and [n, bytes].

    Returns:
        int64 [Q, n].

    Raises:
        ValueError: the codes have different lengths.
    """
    first, second = packed_codes(queries), packed_codes(database)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"codes of {first.shape[1]} and of {second.shape[1]} bytes")
    items = words(second)
    result = np.empty((len(first), len(second)), np.int64)
    for row, query in zip(result, words(first).T, strict=True):
        row[:] = distances(query, items)
    return result


def packed_codes(values: Array) -> Packed:
    """Packed codes uint8 [n, bytes]: returned as they are if packed already, else the packed signs of [n, bits].

    Raises:
        ValueError: not two-dimensional, or zero bits.
    """
    codes = as_numpy(values)
    if codes.ndim != 2 or not codes.shape[1]:
        raise ValueError(f"codes of shape {list(codes.shape)}, allowed: [n, bits] or packed [n, bytes]")
    return codes if codes.dtype == np.uint8 else pack(codes)
