"""Mutations of frames: of their bytes, of packed values, and of message bodies."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from fedmq.wire import codec

FRAMES = Path(__file__).parent.parent / "tests" / "frames"
_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
    *(1e308, -1.0, math.nan, math.inf, "", "a", "a" * 300, "\u202e\x1b[2J", "float32", "complex128", "uint8", "hello"),
    *(b"", b"\0" * 16, b"\0" * 33, [], {}, [[]], [0], [1 << 40], [2, 1 << 62], {"a": 1}, ["float32", [1 << 30]]),
)


def golden_messages() -> list[tuple[bytes, bytes]]:
    """Unencrypted header and body of each golden message."""
    files = [json.loads(path.read_text()) for path in sorted(FRAMES.glob("v*.json"))]
    return [(bytes.fromhex(f["clear"]), bytes.fromhex(f["body"])) for f in files if "body" in f]


def mutated_bytes(raw: bytes, generator: np.random.Generator) -> bytes:
    """Bytes with one to four changes: bits flipped, bytes replaced, cut, repeated or inserted."""
    data = bytearray(raw)
    for _ in range(int(generator.integers(1, 5))):
        at = int(generator.integers(0, len(data) + 1))
        match int(generator.integers(0, 6)):
            case 0 if at < len(data):
                data[at] ^= 1 << int(generator.integers(0, 8))
            case 1:
                data[at : at + 4] = generator.bytes(4)
            case 2:
                del data[at:]
            case 3:
                data[at:at] = data[at : at + int(generator.integers(1, 64))]
            case 4:
                data[at:at] = generator.bytes(int(generator.integers(1, 32)))
            case _:
                data[at : at + 4] = struct.pack(
                    "<I", int(generator.choice([0, 1, 255, 1 << 20, 1 << 31, (1 << 32) - 1]))
                )
    return bytes(data)


def mutated_value(plain: Any, generator: np.random.Generator) -> Any:
    """Plain data in which one value, key or element is replaced, removed, repeated or nested."""
    if isinstance(plain, dict) and plain and generator.random() < 0.85:
        key = list(plain)[int(generator.integers(0, len(plain)))]
        match int(generator.integers(0, 8)):
            case 0:
                return {name: value for name, value in plain.items() if name != key}
            case 1:
                return {**plain, f"{key}x": plain[key]}
            case _:
                return {**plain, key: mutated_value(plain[key], generator)}
    if isinstance(plain, list) and plain and generator.random() < 0.85:
        at = int(generator.integers(0, len(plain)))
        match int(generator.integers(0, 8)):
            case 0:
                return [*plain[:at], *plain[at + 1 :]]
            case 1:
                return [*plain, *plain[at:]] * int(generator.integers(1, 40))
            case _:
                return [*plain[:at], mutated_value(plain[at], generator), *plain[at + 1 :]]
    if generator.random() < 0.02:
        nested: Any = []
        for _ in range(int(generator.integers(10, 600))):
            nested = [nested]
        return nested
    return _ODD[int(generator.integers(0, len(_ODD)))]


def mutated_msgpack(raw: bytes, generator: np.random.Generator) -> bytes:
    """Packed data with changed bytes or, as often, with another value somewhere in it."""
    if generator.random() < 0.5:
        return mutated_bytes(raw, generator)
    return bytes(msgpack.packb(mutated_value(msgpack.unpackb(raw), generator), use_bin_type=True))


def mutated_body(raw: bytes, generator: np.random.Generator) -> bytes:
    """A body with changed bytes, or with a changed msgpack part of the right length before the same tensors."""
    if generator.random() < 0.4:
        return mutated_bytes(raw, generator)
    end = 4 + int.from_bytes(raw[:4], "little")
    head = mutated_msgpack(raw[4:end], generator)
    tensors = raw[end + -end % codec.ALIGNMENT :]
    padding = bytes(-(4 + len(head)) % codec.ALIGNMENT) if tensors else b""
    return len(head).to_bytes(4, "little") + head + padding + tensors
