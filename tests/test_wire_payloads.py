"""Every payload kind obeys its declaration: it round-trips, and any other value of a field is refused at both ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import decode
from fedmq.wire.fields import Field, FieldError, FloatMap, Names, Real, Tensor, Text, Whole, Word
from fedmq.wire.messages import CARRIES, Kind, Message
from fedmq.wire.payloads import PAYLOADS, Loss, Payload
from tests.wire_examples import EXAMPLES, FEW, assert_same, header, joined, messages

SIZES = {"n": 3, "N": 2, "C": 2, "d": 4, "r": 5}
_NAN = float("nan")


def example(spec: Field) -> Any:
    """A value that a declaration allows."""
    match spec:
        case Tensor():
            shape = tuple(SIZES[size] if isinstance(size, str) else size for size in spec.shape)
            return np.ones(shape, spec.dtypes[0])
        case Whole():
            return max(spec.low, 1)
        case Real():
            return 0.5
        case Word():
            return next(word for word in EXAMPLES if spec.pattern.fullmatch(word))
        case Text():
            return "größer"
        case Names():
            return tuple(word for word in EXAMPLES if spec.pattern.fullmatch(word))[:2]
        case FloatMap():
            return {"silo-00": {"a": 0.5}} if spec.inner else {"a": 0.5}


def wrong_numbers(spec: Whole | Real) -> Iterator[Any]:
    """Numbers out of bounds, and values of other types."""
    bounds = [each for each in (spec.low - 1, spec.high + 1) if not isinstance(each, float) or math.isfinite(each)]
    others: list[Any] = [0.5, np.int64(1)] if isinstance(spec, Whole) else [_NAN, math.inf]
    yield from (*bounds, *others, True, "1", [1], None)


def wrong_values(spec: Field) -> Iterator[Any]:
    """Values that a declaration does not allow."""
    match spec:
        case Tensor():
            yield from wrong_arrays(spec, example(spec))
        case Whole() | Real():
            yield from wrong_numbers(spec)
        case Word():
            yield from ("", "no word\n", "x" * 300, 7, None, b"a")
        case Text():
            yield from (7, None, "\ud800", "é" * spec.longest)
        case Names():
            names = example(spec)
            many = tuple(f"a{number}" for number in range(spec.most + 1))
            yield from (names[0], (*names, names[0]), (*names, 7), (*names, "a\n"), many)
            if spec.least:
                yield ()
        case FloatMap() if spec.inner:
            yield from ({"silo-00": 1.0}, {"a b": {}}, {"silo-00": {"a": {"b": 1.0}}})
            yield {f"a{number}": {} for number in range(spec.most + 1)}
        case FloatMap():
            many_numbers = {f"a{number}": 1.0 for number in range(spec.most + 1)}
            yield from ([1.0], {"a b": 1.0}, {"a": _NAN}, {"a": "1"}, {"a": {"b": 1.0}}, {7: 1.0}, many_numbers)


def wrong_arrays(spec: Tensor, array: Any) -> Iterator[Any]:
    """Arrays of another dtype, byte order, shape or layout in memory, and with other values."""
    yield from (array.tolist(), array[None], array.astype(np.complex64), array.astype(bool))
    if array.itemsize > 1:
        yield array.astype(array.dtype.newbyteorder(">"))
    yield np.repeat(array, 2, axis=-1)[..., ::2]
    for axis, size in enumerate(spec.shape):
        if not isinstance(size, str):
            yield np.repeat(array, 2, axis=axis)
        elif spec.least:
            yield np.empty([0 if place == axis else length for place, length in enumerate(array.shape)], array.dtype)
    if spec.low is not None:
        yield np.full_like(array, spec.low - 1)
    if array.dtype.kind == "f" and not spec.bulk:
        yield from (np.full_like(array, _NAN), np.full_like(array, -np.inf))


def values_of(kind: str) -> dict[str, Any]:
    """Allowed values of all fields of a kind."""
    return {name: example(spec) for name, spec in PAYLOADS[kind].FIELDS.items()}


def carried(payload: Payload) -> Message:
    """A message with the payload."""
    kind = next(kind for kind in (Kind.REPLY, *Kind) if payload.KIND in CARRIES[kind])
    return Message(header(kind=kind), (payload,))


@pytest.mark.parametrize("kind", PAYLOADS)
def test_a_payload_obeys_its_declaration_at_both_ends(kind: str) -> None:
    cls, values = PAYLOADS[kind], values_of(kind)
    assert list(cls.FIELDS) == [field.name for field in dataclasses.fields(cls)]

    @FEW
    @given(messages(kind))
    def survives(message: Message) -> None:
        assert_same(decode(*joined(message)), message)

    survives()
    for name, wrong in ((name, wrong) for name, spec in cls.FIELDS.items() for wrong in wrong_values(spec)):
        with pytest.raises(FieldError):
            cls(**{**values, name: wrong})
            pytest.fail(f"accepted {name}: {wrong!r:.80}")
    message = carried(cls(**values))
    clear, body = joined(message)
    length = int.from_bytes(body[:4], "little")
    tensors = body[4 + length + -(4 + length) % 16 :]

    def received(**wrong: Any) -> Message:
        plain = msgpack.unpackb(body[4 : 4 + length])
        plain["payloads"][0][1] |= wrong
        packed = msgpack.packb(plain)
        raw = len(packed).to_bytes(4, "little") + packed
        return decode(clear, raw + (bytes(-len(raw) % 16) + tensors if tensors else b""))

    assert_same(received(), message)
    for name, wrong in ((name, wrong) for name, spec in cls.FIELDS.items() for wrong in wrong_claims(spec)):
        try:
            msgpack.packb(wrong)
        except (TypeError, ValueError, OverflowError):
            continue  # not a value of msgpack
        with pytest.raises(RemoteWireError) as caught:
            received(**{name: wrong})
            pytest.fail(f"accepted {name}: {wrong!r:.80}")
        assert caught.value.reason in ("malformed", "not_finite", "oversized")


def wrong_claims(spec: Field) -> Iterator[Any]:
    """What a peer's msgpack part may wrongly say of a field."""
    if not isinstance(spec, Tensor):
        yield from (list(value) if isinstance(value, tuple) else value for value in wrong_values(spec))
        return
    array = example(spec)
    sizes, dtype = list(array.shape), array.dtype.name
    yield from ([dtype], dtype, None, [dtype, sizes, 0], [dtype, [*sizes, 1]], [dtype, sizes[:-1]])
    yield from (["float64" if dtype != "float64" else "int8", sizes], ["object", sizes], [[dtype], sizes])
    yield from ([dtype, [float(size) for size in sizes]], [dtype, [True for _ in sizes]], [dtype, [-1 for _ in sizes]])
    yield [dtype, [1 << 40 for _ in sizes]]


def test_tensors_that_share_a_dimension_agree_on_its_size() -> None:
    refused = set()
    for kind, cls in PAYLOADS.items():
        values, tensors = values_of(kind), {name: f for name, f in cls.FIELDS.items() if isinstance(f, Tensor)}
        for name, axis in ((name, axis) for name, spec in tensors.items() for axis in range(len(spec.shape))):
            size = tensors[name].shape[axis]
            if isinstance(size, str) and any(size in spec.shape for key, spec in tensors.items() if key != name):
                refused.add(kind)
                with pytest.raises(FieldError):
                    cls(**{**values, name: np.repeat(values[name], 2, axis=axis)})
    assert refused >= {"modality_prototypes", "class_prototypes", "memory", "data_format"}


@pytest.mark.parametrize("kind", ["model", "delta", "partial_delta", "discriminator_delta"])
def test_a_model_or_an_update_that_is_not_finite_is_refused_when_it_is_received(kind: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        values = values_of(kind)
        values["buffer"][1] = bad
        with pytest.raises(RemoteWireError) as caught:
            decode(*joined(carried(PAYLOADS[kind](**values))))
        assert caught.value.reason == "not_finite"


@pytest.mark.parametrize("kind", ["model", "delta", "partial_delta", "discriminator_delta"])
def test_the_largest_magnitude_of_a_buffer_shows_every_value_that_is_not_finite(kind: str) -> None:
    values = values_of(kind)
    for numbers, largest in (([-3.0, 2.0], 3.0), ([-1.0, 2.0], 2.0), ([0.0, -np.inf], np.inf), ([np.nan, 9.0], np.nan)):
        found = PAYLOADS[kind](**{**values, "buffer": np.array(numbers, np.float32)}).largest
        assert found == largest or (np.isnan(found) and np.isnan(largest))


def test_a_payload_without_a_model_or_an_update_has_no_largest_magnitude() -> None:
    empty = PAYLOADS["partial_delta"](**{**values_of("partial_delta"), "buffer": np.empty(0, np.float32)})
    assert empty.largest == Loss(9.0).largest == 0.0
