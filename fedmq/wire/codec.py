"""Encoding, decoding and digests: header and small fields as msgpack, tensors as raw bytes.

A body consists of the length of its msgpack part (4 bytes, little endian), the msgpack part, and the tensors in the
order of their declarations, each zero-padded to start at a multiple of 16 bytes. Nothing follows the last tensor.
Decoding copies no tensor: the arrays of a decoded message are read-only views of the body.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import msgpack
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.profiling import span
from fedmq.wire.compression import FORMS, Compressed, decoded
from fedmq.wire.fields import Field, FieldError, FloatMap, Names, Real, Tensor, shown
from fedmq.wire.layout import Layout
from fedmq.wire.messages import MAX_PAYLOADS, WIRE_VERSION, Header, Kind, Message, Reason, ShortHeader, TaskInfo
from fedmq.wire.payloads import PAYLOADS, Payload, decoded_bytes, tensors

BytesLike: TypeAlias = bytes | bytearray | memoryview

ALIGNMENT = 16
MAX_HEADER = 1024
MAX_BODY_HEADER = 2 << 20
MAX_BODY = 1 << 30

#: Keys of the maps, in the order of the wire.
_HEADER_KEYS = tuple(each.name for each in fields(Header))
_SHORT_KEYS = tuple(each.name for each in fields(ShortHeader))
_TASK_KEYS = tuple(each.name for each in fields(TaskInfo))
_BODY_KEYS = ("payloads", "task", "layout", "head")
_LENGTH_BYTES = 4


def decode(header: Header | BytesLike, body: BytesLike, *, max_body: int = MAX_BODY) -> Message:
    """Decode a message from its header and its opened body.

    NaN and infinity are refused in all declared floats, including the buffers of models and deltas.

    Args:
        header: the unencrypted header, as bytes or decoded.
        body: the decrypted body; it stays alive as long as a decoded array does.
        max_body: maximum size of an accepted body [bytes].

    Raises:
        RemoteWireError: reason ``malformed``, ``oversized``, ``not_finite`` or ``wire_version``.
    """
    if not isinstance(header, Header):
        header = decode_header(header)
    try:
        return Message(header, *_decode_body(byte_view(body), max_body))
    except FieldError as error:
        raise RemoteWireError(error.reason, str(error)) from error


def encode_header(header: Header) -> bytes:
    """Encode a header: a msgpack map with the keys in the order of docs/reference/wire.md."""
    plain = {key: getattr(header, key) for key in _HEADER_KEYS}
    plain["kind"] = header.kind.value
    plain["sent_at"] = float(header.sent_at)
    return pack(plain)


def encode_short_header(header: Header) -> bytes:
    """Encode what stays in clear of a header that is sealed with its body."""
    return pack({key: getattr(header, key) for key in _SHORT_KEYS})


def decode_header(raw: BytesLike, *, any_version: bool = False) -> Header:
    """Decode a whole header.

    The wire version is checked first, so that a peer of another version gets that reason and not ``malformed``.

    Args:
        raw: the encoded header.
        any_version: whether to accept other wire versions; a hello and a reject have this form in all of them.

    Raises:
        RemoteWireError: reason ``oversized``, ``malformed`` or ``wire_version``.
    """
    found = decode_clear(raw, any_version=any_version)
    if isinstance(found, ShortHeader):
        raise RemoteWireError(Reason.MALFORMED, "a short header, where a whole one is needed")
    return found


def decode_clear(raw: BytesLike, *, any_version: bool = False) -> Header | ShortHeader:
    """Decode a clear header: a whole one, or a short one; arguments as for :func:`decode_header`.

    Raises:
        RemoteWireError: see :func:`decode_header`.
    """
    plain = unpack(raw, MAX_HEADER)
    if not isinstance(plain, dict):
        raise RemoteWireError(Reason.MALFORMED, "the header is not a map")
    version = plain.get("wire_version")
    other = type(version) is int and version != WIRE_VERSION
    if other and not any_version:
        raise unknown_version(version)
    try:
        if plain.keys() == set(_SHORT_KEYS):
            return ShortHeader(**plain)
        _require_keys("header", plain, _HEADER_KEYS)
        return Header(**{**plain, "kind": _kind(plain["kind"])})
    except FieldError as error:
        raise (unknown_version(version) if other else RemoteWireError(error.reason, str(error))) from error


def unknown_version(version: object) -> RemoteWireError:
    """The refusal of a wire version that this program does not speak."""
    return RemoteWireError(Reason.WIRE_VERSION, f"wire version {version}, supported here: {WIRE_VERSION}")


def encode_body(message: Message) -> list[BytesLike]:
    """Encode everything but the header.

    Returns:
        Buffers whose concatenation is the body; each tensor is a view of the payload's array.

    Raises:
        LocalWireError: the msgpack part is larger than the wire allows.
    """
    return [buffer for _, buffer in _encoded(message)]


def encode_around(message: Message, payload: Payload) -> tuple[list[BytesLike], int]:
    """Encode everything but the header and the tensors of one of the payloads, which has tensors.

    Returns:
        Buffers as of :func:`encode_body`, and where in the body the missing tensors begin [bytes].

    Raises:
        LocalWireError: as by :func:`encode_body`.
    """
    encoded = _encoded(message)
    first = next(place for place, (owner, _) in enumerate(encoded) if owner is payload)
    start = body_size(buffer for _, buffer in encoded[:first])
    return [buffer for owner, buffer in encoded if owner is not payload], start


def encode_tensors(payload: Payload) -> list[BytesLike]:
    """A payload's tensors as they are in a body: views of its arrays, with padding in between."""
    start_hashing(payload)
    buffers: list[BytesLike] = []
    size = 0
    for array in (part for each in tensors(payload) for part in _parts(each)):
        if padding := -size % ALIGNMENT:
            buffers.append(bytes(padding))
        buffers.append(array.reshape(-1).view(np.uint8).data)
        size += padding + array.nbytes
    return buffers


@span("encode")
def _encoded(message: Message) -> list[tuple[Payload | None, BytesLike]]:
    """The buffers of a body, each with the payload that it is a tensor of, or padding between two of its tensors."""
    plain = {
        "payloads": [
            [payload.KIND, {name: _plain(spec, getattr(payload, name)) for name, spec in payload.FIELDS.items()}]
            for payload in message.payloads
        ],
        "task": None if message.task is None else {key: getattr(message.task, key) for key in _TASK_KEYS},
        "layout": None if message.layout is None else message.layout.to_plain(),
        "head": message.head,
    }
    packed = pack(plain)
    if len(packed) > MAX_BODY_HEADER:
        raise LocalWireError(f"the body's msgpack part has {len(packed)} bytes, allowed {MAX_BODY_HEADER}")
    first = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    encoded: list[tuple[Payload | None, BytesLike]] = [(None, first)]
    size = len(first)
    for payload in message.payloads:
        buffers = encode_tensors(payload)
        if buffers and (padding := -size % ALIGNMENT):
            encoded.append((None, bytes(padding)))
            size += padding
        encoded += [(payload, buffer) for buffer in buffers]
        size += body_size(buffers)
    return encoded


def body_size(buffers: Iterable[BytesLike]) -> int:
    """Total size of buffers [bytes]."""
    return sum(memoryview(buffer).nbytes for buffer in buffers)


def byte_view(raw: BytesLike) -> memoryview:
    """A 1-D view of single bytes; an empty view cannot be cast and need not be."""
    view = memoryview(raw)
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")


def fresh_memory(size: int) -> memoryview:
    """Allocate writable memory of a size [bytes]; its contents are undefined."""
    return np.empty(size, np.uint8).data


def keep_buffers(unused: int = MAX_BODY) -> None:
    """Make the C library reuse freed buffers of a model's size instead of returning them to the kernel.

    Otherwise the kernel maps and zeroes new pages for every message, a quarter of the time of sealing and opening. The
    process keeps at most as much memory as it ever used at the same time.

    Args:
        unused: amount of free memory above which the C library returns some to the kernel [bytes].
    """
    mmap_threshold, top_pad, trim_threshold = -3, -2, -1
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        library = ctypes.CDLL(None)
        library.mallopt(top_pad, min(unused, 1 << 26))  # a thread returns each heap, of 64 MB, that leaves it less
        library.mallopt(mmap_threshold, MAX_BODY)
        library.mallopt(trim_threshold, unused)


def pack(plain: object) -> bytes:
    """Pack plain data as msgpack, with integers and lengths in their shortest form."""
    return bytes(msgpack.packb(plain, use_bin_type=True))


def unpack(raw: BytesLike, longest: int) -> Any:
    """Unpack untrusted msgpack: bounded lengths, string keys, no extensions, no duplicate keys, no trailing bytes.

    Raises:
        RemoteWireError: reason ``oversized`` above ``longest`` bytes, otherwise ``malformed``.
    """
    size = memoryview(raw).nbytes
    if size > longest:
        raise RemoteWireError(Reason.OVERSIZED, f"{size} bytes of msgpack, allowed {longest}")
    try:
        return msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size // 2,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteWireError(Reason.MALFORMED, f"not msgpack: {error}") from error


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a duplicate key")
    return plain


def _kind(value: object) -> Kind:
    if type(value) is not str or value not in Kind._value2member_map_:
        raise FieldError(f"kind: {shown(value)} is unknown")
    return Kind(value)


def _require_keys(place: str, plain: object, keys: Iterable[str]) -> None:
    expected = set(keys)
    if not isinstance(plain, dict) or plain.keys() != expected:
        found = sorted(map(repr, plain)) if isinstance(plain, dict) else type(plain).__name__
        raise FieldError(f"{place}: keys {found!s:.200}, expected {sorted(expected)}")


def _plain(spec: Field, value: Any) -> Any:
    """A field's value as plain data for msgpack."""
    match spec:
        case Tensor() if isinstance(value, Compressed) and value.parts:
            return [value.form, list(value.shape), [part.size for part in value.parts]]
        case Tensor():
            return [value.dtype.name, list(value.shape)]
        case Real():
            return float(value)
        case Names():
            return list(value)
        case FloatMap():
            return {name: _plain(spec.inner or Real(), each) for name, each in value.items()}
        case _:
            return value


def _parts(array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
    """The arrays that travel in the place of a payload's array: itself, unless it is compressed."""
    return (isinstance(array, Compressed) and array.parts) or (array,)


def _decode_body(
    body: memoryview, max_body: int
) -> tuple[tuple[Payload, ...], TaskInfo | None, Layout | None, bytes | None]:
    """The contents of a message, in the order of the fields of ``Message``."""
    if body.nbytes > max_body:
        raise FieldError(f"body: {body.nbytes} bytes, allowed {max_body}", Reason.OVERSIZED)
    if body.nbytes < _LENGTH_BYTES:
        raise FieldError(f"body: {body.nbytes} bytes, too short for its length prefix")
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    if end > body.nbytes:
        raise FieldError(f"body: {body.nbytes} bytes, its msgpack part ends at {end}")
    plain = unpack(body[_LENGTH_BYTES:end], MAX_BODY_HEADER)
    _require_keys("body", plain, _BODY_KEYS)
    task = None
    if plain["task"] is not None:
        _require_keys("task", plain["task"], _TASK_KEYS)
        task = TaskInfo(**plain["task"])
    layout = None if plain["layout"] is None else Layout.from_plain(plain["layout"])
    rows = plain["payloads"]
    if not isinstance(rows, list) or len(rows) > MAX_PAYLOADS:
        raise FieldError(f"payloads: not a list of at most {MAX_PAYLOADS}")
    payloads, room = [], max_body
    for row in rows:
        payload, end, room = _decode_payload(row, body, end, room)
        payloads.append(payload)
    if end != body.nbytes:
        raise FieldError(f"body: {body.nbytes} bytes, its last part ends at {end}")
    return tuple(payloads), task, layout, plain["head"]


def _decode_payload(row: object, body: memoryview, end: int, room: int) -> tuple[Payload, int, int]:
    """Decode a payload from its ``[kind, fields]`` and its tensors, which start at or after byte ``end`` of the body.

    Returns the payload, the end of its last tensor, and the room [bytes] that it leaves: how much memory compressed
    tensors may take once decoded.
    """
    if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not str or row[0] not in PAYLOADS:
        raise FieldError("payloads: an entry is not [known kind, fields]")
    kind, plain = row
    cls = PAYLOADS[kind]
    _require_keys(kind, plain, cls.FIELDS)
    values: dict[str, Any] = {}
    for name, spec in cls.FIELDS.items():
        value = plain[name]
        match spec:
            case Tensor():
                if spec.bulk and isinstance(value, list) and len(value) == 3:
                    value, end = _compressed_on(f"{kind}.{name}", spec, value, body, end, room)
                    room -= value.nbytes
                else:
                    value, end = _array_on(f"{kind}.{name}", spec, value, body, end)
            case Names():
                value = tuple(value) if isinstance(value, list) else value
            case _:
                pass
        values[name] = value
    payload = cls(**values)
    start_hashing(payload)
    if not math.isfinite(payload.largest):
        raise FieldError(f"{kind}: NaN or infinity", Reason.NOT_FINITE)
    return payload, end, room


def _array_on(place: str, spec: Tensor, claim: object, body: memoryview, end: int) -> tuple[npt.NDArray[Any], int]:
    """A read-only view of the body with the declared dtype and shape, after checking that they are allowed and fit."""
    if not isinstance(claim, list) or len(claim) != 2 or not isinstance(claim[1], list):
        raise FieldError(f"{place}: not [dtype, [sizes]]")
    name, shape = claim
    if any(type(size) is not int for size in shape):
        raise FieldError(f"{place}: a size is not an integer")
    spec.check_form(place, name, tuple(shape), {})
    array, stop = _numbers_on(place, np.dtype(name), math.prod(shape), body, end)
    return array.reshape(shape), stop


def _compressed_on(
    place: str, spec: Tensor, claim: list[Any], body: memoryview, end: int, room: int
) -> tuple[npt.NDArray[Any], int]:
    """The values of a compressed tensor, decoded from its parts in the body if they take no more than the room."""
    name, shape, counts = claim
    if type(name) is not str or name not in FORMS:
        raise FieldError(f"{place}: the form {shown(name)} is not one of {', '.join(FORMS)}")
    dtypes = FORMS[name].dtypes
    if not isinstance(shape, list) or not isinstance(counts, list) or len(counts) != len(dtypes):
        raise FieldError(f"{place}: not [form, [sizes], [sizes of {len(dtypes)} parts]]")
    if any(type(size) is not int or size < 0 for size in (*shape, *counts)):
        raise FieldError(f"{place}: a size is not an integer of at least 0")
    spec.check_form(place, "float32", tuple(shape), {})
    if 4 * shape[0] > room:
        raise FieldError(f"{place}: {4 * shape[0]} bytes once decoded, allowed {room}", Reason.OVERSIZED)
    parts = []
    for dtype, count in zip(dtypes, counts, strict=True):
        part, end = _numbers_on(place, np.dtype(dtype), count, body, end)
        parts.append(part)
    return decoded(name, parts, shape[0]), end


def _numbers_on(
    place: str, dtype: np.dtype[Any], count: int, body: memoryview, end: int
) -> tuple[npt.NDArray[Any], int]:
    """A read-only view [count] of the body, at the first aligned byte from ``end`` on, and its end [bytes]."""
    start = end + -end % ALIGNMENT
    stop = start + count * dtype.itemsize
    if stop > body.nbytes:
        raise FieldError(f"{place}: ends at byte {stop} of a body of {body.nbytes}")
    if any(body[end:start]):
        raise FieldError(f"{place}: the padding before it is not zero")
    array = np.frombuffer(body, dtype, count, start)
    array.flags.writeable = False
    return array, stop


#: Digests of live payloads, so that a model sent to many silos is hashed once.
_DIGESTS: WeakKeyDictionary[Payload, str | Future[str]] = WeakKeyDictionary()
#: Size of a payload's tensors from which another thread hashes it, while this one seals or checks it [bytes].
_HASHED_BY_A_THREAD = 1 << 20
#: Cores that hash one payload. The thread starts with the first large payload, so a process may fork before it.
_CORES = 2
_HASHING = ThreadPoolExecutor(1, "digest")


def start_hashing(payload: Payload) -> None:
    """Have a thread hash a large payload, whose digest will be logged; :func:`digest` waits for it."""
    if payload not in _DIGESTS and decoded_bytes(payload) >= _HASHED_BY_A_THREAD:
        _DIGESTS[payload] = _HASHING.submit(_digest, payload)


def is_hashed(payload: Payload) -> bool:
    """Whether no thread is hashing a payload, so that :func:`digest` need not wait."""
    known = _DIGESTS.get(payload)
    return not isinstance(known, Future) or known.done()


def digest(payload: Payload) -> str:
    """BLAKE3 (hex) over a payload's kind and all its fields; equal digests mean bit-identical payloads.

    SHA-256 is four times slower on one core; it took a third of the time from receiving an update to aggregating it.
    """
    known = _DIGESTS.get(payload)
    if not isinstance(known, str):
        known = _DIGESTS[payload] = _digest(payload) if known is None else known.result()
    return known


@span("encode")
def _digest(payload: Payload) -> str:
    total = blake3(payload.KIND.encode(), max_threads=_CORES if decoded_bytes(payload) >= _HASHED_BY_A_THREAD else 1)
    for name, spec in payload.FIELDS.items():
        value = getattr(payload, name)
        if isinstance(value, np.ndarray):
            total.update(f"\0{name}\0{value.dtype.name}{value.shape}\0".encode())
            total.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        else:
            total.update(f"\0{name}\0{_as_decoded(spec, value)!r}".encode())
    return total.hexdigest()


def _as_decoded(spec: Field, value: Any) -> Any:
    """A field's value as the receiver decodes it, so that both ends log the same digest."""
    match spec:
        case Real():
            return float(value)
        case FloatMap():
            return dict(sorted(_plain(spec, value).items()))
        case _:
            return value
