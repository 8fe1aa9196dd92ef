"""Strategies of messages and payloads, derived from their declarations, and helpers of the tests of the wire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedmq.errors import RemoteWireError
from fedmq.wire.codec import encode_body, encode_header
from fedmq.wire.fields import LAYER, NAME, Field, FloatMap, Names, Real, Tensor, Text, Whole, Word
from fedmq.wire.layout import DTYPE, Layout
from fedmq.wire.messages import CARRIES, Header, Kind, Message, TaskInfo
from fedmq.wire.payloads import PAYLOADS, Loss, Payload, SiloModalities
from fedmq.wire.sessions import Session, open_message, seal_message

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
    "kinds",
    "reply",
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
            return st.integers(spec.low, spec.high)
        case Real():
            bounds = {"min_value": max(spec.low, -1e300), "max_value": min(spec.high, 1e300)}
            return st.floats(**bounds, allow_nan=False)
        case Word():
            return words(spec.pattern)
        case Text():
            return st.text(max_size=40)
        case Names():
            return st.lists(words(spec.pattern), min_size=1, max_size=5, unique=True).map(tuple)
        case FloatMap():
            return st.dictionaries(words(spec.pattern), field_values(spec.inner or Real(), sizes), max_size=4)


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
        kinds = [kind or "error"]
    task = layout = None
    if message_kind in (Kind.TASK, Kind.EVALUATE):
        whole = st.integers(1, 2**40)
        task = TaskInfo(
            round=draw(whole), rounds=draw(whole), committed=draw(whole), learning_rate=draw(st.floats(1e-9, 10))
        )
    if message_kind is Kind.LAYOUT:
        names = draw(st.lists(words(LAYER), min_size=1, max_size=5, unique=True))
        shapes = st.lists(st.integers(0, 9), max_size=3)
        layout = Layout.of((name, draw(shapes), DTYPE) for name in names)
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


def header(**changes: Any) -> Header:
    """A header of a reply, with some fields changed."""
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
    """A body with this msgpack part, or these bytes in its place, and tensors behind it."""
    packed: bytes = plain if isinstance(plain, bytes) else msgpack.packb(plain)
    raw = len(packed).to_bytes(4, "little") + packed
    return raw + (bytes(-len(raw) % 16) + tail if tail else b"")


def with_payloads(*rows: object, tail: bytes = b"") -> bytes:
    """A body with these payloads, each given as its ``[kind, fields]``."""
    return body_of({"payloads": list(rows), "task": None, "layout": None, "head": None}, tail)


# ------------------------------------------------------------------------------------ of keys, handshake and sessions
RUN = "run-1"
NAMES = ("coordinator", "evaluator", "silo-00", "silo-01")


def message(sequence: int = 1, **changes: Any) -> Message:
    return Message(header(**{"sequence": sequence, "reply_to": 1, **changes}), (Loss(0.5),))


def reason(work: Any) -> str:
    with pytest.raises(RemoteWireError) as caught:
        work()
    return caught.value.reason


def flipped(raw: Any, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_works(silo: Session, coordinator: Session) -> None:
    """Assert that both directions carry a message."""
    sealed = seal_message(silo, message(77))
    assert open_message(coordinator, sealed.frames)[0].header.sequence == 77
    back = seal_message(coordinator, message(78, sender="coordinator", receiver="silo-00"))
    assert open_message(silo, back.frames)[0].header.sequence == 78
