"""The codec round-trips every message, and refuses any other bytes with an error that blames the peer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.wire import codec
from fedmq.wire.codec import decode, decode_header, encode_body, encode_header
from fedmq.wire.fields import LAYER, NAME, Field, FloatMap, Names, NestedFloatMap, Real, Tensor, Text, Whole, Word
from fedmq.wire.layout import DTYPES, Layout
from fedmq.wire.messages import CARRIES, Header, Kind, Message, TaskInfo
from fedmq.wire.payloads import (
    PAYLOADS,
    ClassPrototypes,
    Delta,
    Error,
    Geometry,
    Loss,
    Metrics,
    Model,
    Payload,
    SecretShare,
    SiloModalities,
)

FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


EXAMPLES = (
    "image",
    "text",
    "both",
    "a",
    "silo-00",
    "a.b_c-9",
    "0" * 64,
    "Upper.Case_0",
    "m@5",
    "a" * 128,
    "_x",
    "float32",
    "none",
    "z" * 64,
)


def words(pattern: re.Pattern[str]) -> st.SearchStrategy[str]:
    """Strings that match a pattern; fifty times faster than drawing from the regex itself."""
    return st.sampled_from([word for word in EXAMPLES if pattern.fullmatch(word)])


def field_values(spec: Field, sizes: Mapping[str, int]) -> st.SearchStrategy[Any]:
    """A strategy for a field, derived from its declaration."""
    match spec:
        case Tensor():
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape)
            return st.sampled_from(spec.dtypes).flatmap(lambda dtype: array_values(dtype, shape, spec.low or 0))
        case Whole():
            return optional(spec, st.integers(spec.low, spec.high))
        case Real():
            bounds = {"min_value": max(spec.low, -1e300), "max_value": min(spec.high, 1e300)}
            return optional(spec, st.floats(**bounds, allow_nan=False))
        case Word():
            return words(spec.pattern)
        case Text():
            return st.text(max_size=40)
        case Names():
            return st.lists(words(spec.pattern), min_size=1, max_size=5, unique=True).map(tuple)
        case FloatMap():
            return st.dictionaries(words(spec.pattern), st.floats(allow_nan=False, allow_infinity=False), max_size=4)
        case NestedFloatMap():
            return st.dictionaries(words(spec.pattern), field_values(spec.inner, sizes), max_size=3)


def optional(spec: Whole | Real, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values if spec.nullable else values


def array_values(dtype: str, shape: tuple[int, ...], low: int) -> st.SearchStrategy[Any]:
    if dtype.startswith("float"):
        width = int(dtype[5:])
        return hnp.arrays(dtype, shape, elements=st.floats(width=width, allow_nan=False, allow_infinity=False))
    return hnp.arrays(dtype, shape, elements=st.integers(low, np.iinfo(dtype).max))


@st.composite
def payloads(draw: st.DrawFn, kind: str) -> Payload:
    cls = PAYLOADS[kind]
    sizes = {name: draw(st.integers(1, 5)) for name in "nNCdr"}
    values = {name: draw(field_values(spec, sizes)) for name, spec in cls.FIELDS.items()}
    if cls is SecretShare:
        values["modulus_bits"] = values["values"].dtype.itemsize * 8
    if cls is SiloModalities:
        values["masks"] = np.full(len(values["silos"]), draw(st.integers(1, 3)), np.int64)
    return cls(**values)


@st.composite
def headers(draw: st.DrawFn, kind: Kind) -> Header:
    u64 = st.integers(0, 2**64 - 1)
    name = words(NAME)
    return Header(
        run=draw(name),
        kind=kind,
        sender=draw(name),
        receiver=draw(name),
        sequence=draw(u64),
        sent_at=draw(st.floats(0, 1e12)),
        reply_to=draw(u64 if kind is Kind.REPLY else st.none() | u64),
        base_version=draw(st.integers(0, 2**63 - 1)),
        session=draw(st.binary(min_size=16, max_size=16) | st.just(b"")),
        counter=draw(u64),
    )


@st.composite
def messages(draw: st.DrawFn, kind: str | None = None) -> Message:
    """Any message; with ``kind``, one that carries a payload of that kind."""
    carriers = [each for each in Kind if kind is None or kind in CARRIES[each]]
    message_kind = draw(st.sampled_from(carriers))
    kinds = [kind] if kind else []
    if message_kind is not Kind.ERROR and CARRIES[message_kind]:
        kinds += draw(st.lists(st.sampled_from(sorted(CARRIES[message_kind])), max_size=3))
    elif message_kind is Kind.ERROR:
        kinds = ["error"]
    task = layout = None
    if message_kind in (Kind.TASK, Kind.EVALUATE):
        whole = st.integers(1, 2**40)
        task = TaskInfo(
            round=draw(whole), rounds=draw(whole), settled=draw(whole), learning_rate=draw(st.floats(1e-9, 10))
        )
    if message_kind is Kind.LAYOUT:
        names = draw(st.lists(words(LAYER), min_size=1, max_size=5, unique=True))
        shapes = st.lists(st.integers(0, 9), max_size=3)
        layout = Layout.of((name, draw(shapes), draw(st.sampled_from(DTYPES))) for name in names)
    return Message(draw(headers(message_kind)), tuple(draw(payloads(each)) for each in kinds), task, layout)


def joined(message: Message) -> tuple[bytes, bytes]:
    return encode_header(message.header), b"".join(encode_body(message))


def assert_same(one: Message, other: Message) -> None:
    assert one.header == other.header
    assert one.task == other.task
    assert one.layout == other.layout
    assert [payload.KIND for payload in one.payloads] == [payload.KIND for payload in other.payloads]
    for mine, theirs in zip(one.payloads, other.payloads, strict=True):
        for name in mine.FIELDS:
            a, b = getattr(mine, name), getattr(theirs, name)
            if isinstance(a, np.ndarray):
                assert a.dtype == b.dtype
                assert a.shape == b.shape
                assert a.tobytes() == b.tobytes()
            else:
                assert a == b


@pytest.mark.parametrize("kind", sorted(PAYLOADS))
def test_every_payload_kind_round_trips(kind: str) -> None:
    @FEW
    @given(messages(kind))
    def survives(message: Message) -> None:
        assert_same(decode(*joined(message)), message)

    survives()


@MANY
@given(messages())
def test_every_message_round_trips(message: Message) -> None:
    assert_same(decode(*joined(message)), message)


@MANY
@given(messages(), st.data())
def test_a_truncated_or_extended_body_is_refused(message: Message, data: st.DataObject) -> None:
    clear, body = joined(message)
    cut = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + b"\0", body + bytes(16)):
        with pytest.raises(RemoteWireError):
            decode(clear, wrong)


@pytest.mark.slow
@MANY
@given(messages(), st.data())
def test_a_truncated_or_extended_header_is_refused(message: Message, data: st.DataObject) -> None:
    clear, _ = joined(message)
    for wrong in (clear[: data.draw(st.integers(0, len(clear) - 1))], clear + b"\xc0"):
        with pytest.raises(RemoteWireError):
            decode_header(wrong)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(messages(), st.data())
def test_flipped_bits_raise_nothing_but_a_remote_error(message: Message, data: st.DataObject) -> None:
    clear, body = (bytearray(part) for part in joined(message))
    for part in (clear, body):
        for _ in range(data.draw(st.integers(1, 3))):
            # Most flips hit the msgpack part: flips in tensors change numbers, which no codec can see.
            part[data.draw(st.integers(0, min(len(part), 400) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode(bytes(clear), bytes(body))
    except RemoteWireError as error:
        assert error.reason in ("malformed", "oversized", "not_finite", "wire_version")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_remote_error(clear: bytes, body: bytes) -> None:
    good = header()
    prefixed = len(body).to_bytes(4, "little") + body
    for call in (lambda: decode_header(clear), lambda: decode(good, body), lambda: decode(good, prefixed)):
        with pytest.raises(RemoteWireError):
            call()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9) | st.sampled_from([*PAYLOADS, "payloads", "task", "layout", "float32", "buffer"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@MANY
@given(st.data())
def test_well_formed_msgpack_with_the_wrong_structure_is_refused(data: st.DataObject) -> None:
    """Whole parts of a valid body are replaced by arbitrary msgpack values."""
    message = data.draw(messages("class_prototypes") | messages("metrics") | messages("partial_delta"))
    _, body = joined(message)
    length = int.from_bytes(body[:4], "little")
    plain = msgpack.unpackb(body[4 : 4 + length], strict_map_key=True)
    places = list(containers(plain))
    container, key = data.draw(st.sampled_from(places))
    container[key] = data.draw(PLAIN)
    packed = msgpack.packb(plain)
    try:
        decode(message.header, len(packed).to_bytes(4, "little") + packed + body[4 + length :])
    except RemoteWireError:
        return


def containers(plain: Any) -> Any:
    if isinstance(plain, dict | list):
        for key in plain if isinstance(plain, dict) else range(len(plain)):
            yield plain, key
            yield from containers(plain[key])


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {
        "run": "run-1",
        "kind": Kind.REPLY,
        "sender": "silo-00",
        "receiver": "coordinator",
        "sequence": 3,
        "reply_to": 2,
        "sent_at": 1.5,
    }
    return Header(**{**values, **changes})


def body_of(plain: object, tail: bytes = b"") -> bytes:
    packed = plain if isinstance(plain, bytes) else msgpack.packb(plain)
    raw = len(packed).to_bytes(4, "little") + packed
    return raw + (bytes(-len(raw) % 16) + tail if tail else b"")


def refused(raw: bytes, **options: Any) -> str:
    with pytest.raises(RemoteWireError) as caught:
        decode(header(), raw, **options)
    return caught.value.reason


GEOMETRY = ["geometry", {"values": ["float32", [4]]}]


def with_payload(payload: object, tail: bytes = b"") -> bytes:
    return body_of({"payloads": [payload], "task": None, "layout": None, "head": None}, tail)


def test_the_handwritten_body_of_these_tests_is_valid() -> None:
    message = decode(header(), with_payload(GEOMETRY, np.arange(4, dtype=np.float32).tobytes()))
    assert isinstance(message.payloads[0], Geometry)
    assert message.payloads[0].values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "payload",
    [
        ["geometry"],
        ["unknown", {}],
        [["geometry"], {}],
        [None, {"values": ["float32", [4]]}],
        ["geometry", {}],
        ["geometry", {"values": ["float32", [4]], "more": 1}],
        ["geometry", {"values": ["float64", [2]]}],
        ["geometry", {"values": ["object", [2]]}],
        ["geometry", {"values": [["float32"], [4]]}],
        ["geometry", {"values": ["float32", [2, 2]]}],
        ["geometry", {"values": ["float32", [3]]}],
        ["geometry", {"values": ["float32", [True]]}],
        ["geometry", {"values": ["float32", [4.0]]}],
        ["geometry", {"values": ["float32", [-4]]}],
        ["geometry", {"values": ["float32", [2**63]]}],
        ["geometry", {"values": ["float32", 4]}],
        ["geometry", {"values": bytes(16)}],
        ["error", {"code": "a", "text": "b"}],
    ],
)
def test_a_wrong_claim_about_a_payload_is_malformed(payload: object) -> None:
    assert refused(with_payload(payload, bytes(16))) == "malformed"


def test_huge_claimed_sizes_do_not_make_the_decoder_allocate() -> None:
    huge = ["representations", {"values": ["float32", [1 << 24, 1 << 16]], "modality": "text"}]
    assert refused(with_payload(huge, bytes(64))) == "malformed"
    # Arrays and maps that claim four billion elements in a few bytes.
    assert refused(body_of(b"\xdd\xff\xff\xff\xff")) == "malformed"
    assert refused(body_of(b"\xdf\xff\xff\xff\xff")) == "malformed"
    assert refused(body_of(b"\x91" * 2000 + b"\xc0")) == "malformed"


def test_padding_must_be_zero() -> None:
    raw = bytearray(with_payload(GEOMETRY, bytes(16)))
    assert len(raw) % 16 == 0
    raw[-17] = 1
    assert refused(bytes(raw)) == "malformed"


def test_a_duplicate_key_is_refused() -> None:
    assert refused(body_of(b"\x82\xa4task\xc0\xa4task\xc0")) == "malformed"


def test_extension_types_are_refused() -> None:
    assert refused(body_of(b"\xd6\xff\x00\x00\x00\x00")) == "malformed"
    assert refused(body_of({"payloads": [], "task": msgpack.ExtType(5, b""), "layout": None})) == "malformed"


def test_values_of_the_wrong_type_are_refused() -> None:
    for bad in ({"round": 0}, [0, 1, 2, 0.1], {"round": 0, "rounds": 1, "settled": 0, "learning_rate": "1"}):
        assert refused(body_of({"payloads": [], "task": bad, "layout": None})) == "malformed"
    assert refused(body_of({"payloads": {}, "task": None, "layout": None})) == "malformed"
    assert refused(body_of([])) == "malformed"
    assert refused(body_of({"payloads": [GEOMETRY] * 65, "task": None, "layout": None})) == "malformed"


def test_sizes_above_the_limits_are_oversized() -> None:
    assert refused(with_payload(GEOMETRY, bytes(16)), max_body=32) == "oversized"
    assert refused(body_of(bytes(codec.MAX_BODY_HEADER + 1))) == "oversized"
    with pytest.raises(RemoteWireError) as caught:
        decode_header(bytes(codec.MAX_HEADER + 1))
    assert caught.value.reason == "oversized"


def test_sending_a_message_above_the_limits_raises_a_local_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(header(), (Model("0" * 64, np.zeros(100, np.float32)),))
    monkeypatch.setattr(codec, "MAX_BODY", 300)
    with pytest.raises(LocalWireError):
        encode_body(message)
    monkeypatch.setattr(codec, "MAX_BODY_HEADER", 10)
    with pytest.raises(LocalWireError):
        encode_body(message)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_delta_that_is_not_finite_is_refused(bad: float) -> None:
    buffer = np.zeros(100, np.float32)
    buffer[40] = bad
    clear, body = joined(Message(header(), (Delta("0" * 64, buffer, 1),)))
    with pytest.raises(RemoteWireError) as caught:
        decode(clear, body)
    assert caught.value.reason == "not_finite"


def test_small_floats_that_are_not_finite_are_refused() -> None:
    row = ["loss", {"value": float("nan")}]
    assert refused(with_payload(row)) == "not_finite"
    bad = np.full(4, np.inf, np.float32).tobytes()
    assert refused(with_payload(GEOMETRY, bad)) == "not_finite"


def test_decoded_arrays_are_read_only_views_of_the_body() -> None:
    clear, body = joined(Message(header(), (Model("0" * 64, np.arange(1000, dtype=np.float32)),)))
    held = bytearray(body)
    buffer = decode(clear, held).payloads[0].buffer  # type: ignore[union-attr]
    assert not buffer.flags.writeable
    held[-4:] = np.float32(-7).tobytes()
    assert buffer[-1] == -7


def test_tensors_are_aligned_to_sixteen_bytes() -> None:
    rows = ClassPrototypes(np.ones((3, 1), np.float32), np.ones(3, np.int64), "image")
    message = Message(header(), (rows, Loss(1.0), Geometry(np.ones(4, np.float32))))
    size = 0
    for buffer in encode_body(message):
        if memoryview(buffer).obj is not buffer and memoryview(buffer).nbytes in (12, 24, 16):
            assert size % 16 == 0
        size += memoryview(buffer).nbytes
    assert_same(decode(*joined(message)), message)


def test_encoding_does_not_copy_tensors() -> None:
    buffer = np.ones(1000, np.float32)
    body = encode_body(Message(header(), (Model("0" * 64, buffer),)))
    buffer[:] = 5
    assert b"".join(body).endswith(np.full(1000, 5, np.float32).tobytes())


def test_an_unknown_wire_version_is_refused_by_name_even_if_its_header_is_strange() -> None:
    for plain in ({"wire_version": 4}, {"wire_version": 99, "anything": [1]}):
        with pytest.raises(RemoteWireError, match=str(plain["wire_version"])) as caught:
            decode_header(msgpack.packb(plain))
        assert caught.value.reason == "wire_version"


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "unknown"},
        {"kind": 1},
        {"kind": ["reply"]},
        {"wire_version": "1"},
        {"wire_version": True},
        {"sequence": 1.0},
        {"sequence": -1},
        {"sender": "Silo"},
        {"session": "a" * 16},
        {"session": b"a"},
        {"sent_at": "1"},
        {"reply_to": None},
        {"more": 1},
    ],
)
def test_an_invalid_header_of_a_peer_is_malformed(changes: dict[str, Any]) -> None:
    plain = msgpack.unpackb(encode_header(header()))
    with pytest.raises(RemoteWireError) as caught:
        decode_header(msgpack.packb({**plain, **changes}))
    assert caught.value.reason == "malformed"


def test_metrics_round_trip_as_floats() -> None:
    sent = Metrics({"mean_r1": 1, "i2t_r@5": 0.5}, {"silo-00": {"mean_r1": 0}})
    got = decode(*joined(Message(header(), (sent,)))).payloads[0]
    assert isinstance(got, Metrics)
    assert got.values == {"mean_r1": 1.0, "i2t_r@5": 0.5}
    assert type(got.values["mean_r1"]) is float
    assert got.per_silo == {"silo-00": {"mean_r1": 0.0}}


def test_error_text_keeps_unicode() -> None:
    message = Message(header(kind=Kind.ERROR), (Error("failed", "Fehler: größer als 3 → Ende"),))
    assert_same(decode(*joined(message)), message)
