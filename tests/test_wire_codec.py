"""The codec round-trips every message, and refuses any other bytes with an error that blames the peer."""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.wire import codec
from fedmq.wire.codec import decode, decode_header, encode_body, encode_header
from fedmq.wire.messages import Message
from fedmq.wire.payloads import PAYLOADS, ClassPrototypes, Geometry, Loss, Metrics, Model
from tests.wire_examples import MANY, assert_same, body_of, header, joined, messages, with_payloads


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


def refused(raw: bytes, **options: Any) -> str:
    with pytest.raises(RemoteWireError) as caught:
        decode(header(), raw, **options)
    return caught.value.reason


GEOMETRY = ["geometry", {"values": ["float32", [4]]}]


def test_the_handwritten_body_of_these_tests_is_valid() -> None:
    message = decode(header(), with_payloads(GEOMETRY, tail=np.arange(4, dtype=np.float32).tobytes()))
    assert isinstance(message.payloads[0], Geometry)
    assert message.payloads[0].values.tolist() == [0, 1, 2, 3]


def test_a_payload_that_is_no_known_kind_with_its_fields_is_malformed() -> None:
    for row in (
        ["geometry"],
        ["unknown", {}],
        [["geometry"], {}],
        [None, {"values": ["float32", [4]]}],
        ["geometry", {}],
        ["geometry", {"values": ["float32", [4]], "more": 1}],
        ["geometry", {"values": bytes(16)}],
        ["error", {"code": "a", "text": "b"}],
    ):
        assert refused(with_payloads(row, tail=bytes(16))) == "malformed", row


def test_huge_claimed_sizes_do_not_make_the_decoder_allocate() -> None:
    huge = ["representations", {"values": ["float32", [1 << 24, 1 << 16]], "modality": "text"}]
    assert refused(with_payloads(huge, tail=bytes(64))) == "malformed"
    # Arrays and maps that claim four billion elements in a few bytes.
    assert refused(body_of(b"\xdd\xff\xff\xff\xff")) == "malformed"
    assert refused(body_of(b"\xdf\xff\xff\xff\xff")) == "malformed"
    assert refused(body_of(b"\x91" * 2000 + b"\xc0")) == "malformed"


def test_padding_must_be_zero() -> None:
    raw = bytearray(with_payloads(GEOMETRY, tail=bytes(16)))
    assert len(raw) % 16 == 0
    raw[-17] = 1
    assert refused(bytes(raw)) == "malformed"


def test_other_msgpack_than_a_bodys_is_malformed() -> None:
    valid = {"payloads": [], "task": None, "layout": None, "head": None}
    for bad in (
        b"\x82\xa4task\xc0\xa4task\xc0",  # a key twice
        b"\xd6\xff\x00\x00\x00\x00",  # an extension type
        [],
        {**valid, "task": msgpack.ExtType(5, b"")},
        {**valid, "task": {"round": 0}},
        {**valid, "task": [0, 1, 2, 0.1]},
        {**valid, "task": {"round": 0, "rounds": 1, "committed": 0, "learning_rate": "1"}},
        {**valid, "payloads": {}},
        {**valid, "payloads": [GEOMETRY] * 65},
        {**valid, "head": b"short"},
        {**valid, "more": None},
    ):
        assert refused(body_of(bad)) == "malformed", bad


def test_sizes_above_the_limits_are_oversized() -> None:
    assert refused(with_payloads(GEOMETRY, tail=bytes(16)), max_body=32) == "oversized"
    assert refused(body_of(bytes(codec.MAX_BODY_HEADER + 1))) == "oversized"
    with pytest.raises(RemoteWireError) as caught:
        decode_header(bytes(codec.MAX_HEADER + 1))
    assert caught.value.reason == "oversized"


def test_sending_a_message_above_the_limits_raises_a_local_error(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Message(header(), (Model("0" * 64, np.zeros(100, np.float32)),))
    monkeypatch.setattr(codec, "MAX_BODY_HEADER", 10)
    with pytest.raises(LocalWireError):
        encode_body(message)


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


def test_an_invalid_header_of_a_peer_is_malformed() -> None:
    plain = msgpack.unpackb(encode_header(header()))
    for change in (
        {"kind": "unknown"}, {"kind": 1}, {"kind": ["reply"]}, {"wire_version": "1"}, {"wire_version": True},
        {"sequence": 1.0}, {"sequence": -1}, {"sender": "Silo"}, {"session": "a" * 16}, {"session": b"a"},
        {"sent_at": "1"}, {"reply_to": None}, {"more": 1},
    ):  # fmt: skip
        with pytest.raises(RemoteWireError) as caught:
            decode_header(msgpack.packb({**plain, **change}))
        assert caught.value.reason == "malformed", change


def test_metrics_round_trip_as_floats() -> None:
    sent = Metrics({"mean_r1": 1, "i2t_r@5": 0.5}, {"silo-00": {"mean_r1": 0}})
    got = decode(*joined(Message(header(), (sent,)))).payloads[0]
    assert isinstance(got, Metrics)
    assert got.values == {"mean_r1": 1.0, "i2t_r@5": 0.5}
    assert type(got.values["mean_r1"]) is float
    assert got.per_silo == {"silo-00": {"mean_r1": 0.0}}


def test_another_thread_hashes_a_large_payload_once_it_is_encoded_or_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (Model("0" * 64, np.ones(size, np.float32)) for size in (1000, 1 << 18))
    alone = [codec._digest(each) for each in (small, large)]
    hashing = list[str]()

    def counted(*content: bytes, **options: int) -> blake3:
        hashing.append(threading.current_thread().name.partition("_")[0])
        return blake3(*content, **options)

    monkeypatch.setattr(codec, "blake3", counted)
    message = Message(header(), (small, large))
    decoded = decode(*joined(message))
    assert [codec.digest(each) for each in (*message.payloads, *decoded.payloads)] == alone * 2
    assert sorted(hashing) == ["MainThread"] * 2 + ["digest"] * 2
