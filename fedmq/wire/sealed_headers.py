"""Sealed headers and padding: an observer of the network sees neither names nor kinds, and only rounded-up sizes.

The clear header is short (wire version, session, counter). The whole header is sealed in front of the body:

    length of the header (4 bytes, little endian), length of the body (8 bytes), the header,
    zeros up to a multiple of 16, the body, zeros as padding
"""

from __future__ import annotations

import numpy as np

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import ALIGNMENT, MAX_BODY, MAX_HEADER, BytesLike, decode_header
from fedmq.wire.messages import Header, Reason

_LENGTHS = 12
#: Maximum number of bytes that the sealed header adds to a body.
MAX_PREFIX = _LENGTHS + MAX_HEADER + ALIGNMENT
#: Minimum size to which messages are padded [bytes].
LEAST_PADDED = 4096
#: Steps between a power of two and the next.
_STEPS = 4


def padded_size(size: int) -> int:
    """Size to which a sealed content of ``size`` bytes is padded: at least 4096, in four steps to each power of two.

    The padding therefore adds at most a quarter to larger ones.
    """
    size = max(size, LEAST_PADDED)
    step = (1 << size.bit_length() - 1) // _STEPS
    padded = -(-size // step) * step
    return padded if padded <= MAX_BODY else max(size, MAX_BODY)


def prefix_of(header: bytes, body: int) -> bytes:
    """The prefix of a body of ``body`` bytes: two lengths, the encoded header, zeros."""
    prefix = len(header).to_bytes(4, "little") + body.to_bytes(8, "little") + header
    return prefix + bytes(-len(prefix) % ALIGNMENT)


def split_content(content: memoryview) -> tuple[Header, memoryview]:
    """The header and the body of an opened content.

    Raises:
        RemoteWireError: ``malformed`` or ``wire_version``.
    """
    length = int.from_bytes(content[:4], "little")
    body = int.from_bytes(content[4:_LENGTHS], "little")
    start = _LENGTHS + length + -(_LENGTHS + length) % ALIGNMENT
    if content.nbytes < _LENGTHS or length > MAX_HEADER or start + body > content.nbytes:
        raise RemoteWireError(Reason.MALFORMED, "a sealed header or its body is longer than the message")
    if _any(content[_LENGTHS + length : start]) or _any(content[start + body :]):
        raise RemoteWireError(Reason.MALFORMED, "the padding is not zero")
    return decode_header(content[_LENGTHS : _LENGTHS + length]), content[start : start + body]


def _any(raw: BytesLike) -> bool:
    return bool(np.frombuffer(raw, np.uint8).any())
