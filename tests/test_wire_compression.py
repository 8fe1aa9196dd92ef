"""Compressed values: both ends have the same ones, close to the sender's, and no peer's parts are decoded unchecked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedmq.config.sections import ModelCompression, UpdateCompression
from fedmq.errors import RemoteWireError
from fedmq.federation import updates
from fedmq.wire.codec import decode, digest, encode_body
from fedmq.wire.compression import BLOCK, FORMS, MAX_RANK, Settings, decoded, encoded, form_of, sent_bytes
from fedmq.wire.fields import FieldError
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Message
from fedmq.wire.payloads import Delta, DiscriminatorDelta, Model, PartialDelta, decoded_sizes, sizes
from tests.wire_examples import FEW, MANY, header, with_payloads

F32 = npt.NDArray[np.float32]
LAYOUT = Layout.of((("a", (3,), "float32"), ("m", (20, 30), "float32"), ("b", (2, 2, 2), "float32")))
SETTINGS = Settings(fraction=0.1, rank=2, shapes=tuple(entry.shape for entry in LAYOUT.entries))
VALUES = hnp.arrays(np.float32, LAYOUT.size, elements=st.floats(-1e6, 1e6, width=32))


def drawn(seed: int, size: int = LAYOUT.size) -> F32:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def delta(buffer: F32) -> Delta:
    return Delta(LAYOUT.digest, buffer, 7)


def sent(values: F32, form: str) -> bytes:
    message = Message(header(), (delta(encoded(form, values, SETTINGS)),))
    return b"".join(encode_body(message))


def received(body: bytes, **options: Any) -> F32:
    (payload,) = decode(header(), body, **options).payloads
    assert isinstance(payload, Delta)
    return payload.buffer


@MANY
@given(VALUES, st.sampled_from(sorted(FORMS)))
def test_the_receiver_decodes_the_bits_that_the_sender_continues_with(values: F32, form: str) -> None:
    mine = encoded(form, values, SETTINGS)
    theirs = received(sent(values, form))
    assert theirs.tobytes() == mine.tobytes()
    assert form_of(theirs) == form_of(mine) == form
    assert digest(delta(theirs)) == digest(delta(mine)) == digest(delta(np.array(mine)))
    assert sizes([delta(theirs)]) == sizes([delta(mine)]) == [("delta", sent_bytes(mine))]
    assert decoded_sizes([delta(theirs)]) == [4 * LAYOUT.size]
    assert sent_bytes(mine) < 4 * LAYOUT.size


@MANY
@given(VALUES)
def test_bfloat16_and_int8_are_off_by_at_most_half_a_step(values: F32) -> None:
    exact = values.astype(np.float64)
    near = encoded("bfloat16", values, SETTINGS).astype(np.float64)
    assert (abs(near - exact) <= 2.0**-8 * abs(exact) + 1e-40).all()
    near, largest = encoded("int8", values, SETTINGS).astype(np.float64), abs(exact).max()
    assert (abs(near - exact) <= largest / 127 * 0.5001 + 1e-40).all()


def test_bfloat16_rounds_as_torch_does_and_does_not_overflow() -> None:
    values = np.concatenate([drawn(0), np.array([0.0, -0.0, 1e-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8], np.float32)])
    assert encoded("bfloat16", values, SETTINGS).tobytes() == torch.tensor(values).bfloat16().float().numpy().tobytes()
    largest = np.array([np.finfo(np.float32).max, np.finfo(np.float32).min], np.float32)
    assert np.isfinite(encoded("bfloat16", largest, SETTINGS)).all()


def test_int8_has_a_scale_for_each_block() -> None:
    values = drawn(1, 2 * BLOCK + 5)
    values[:BLOCK] *= 1e6
    near = encoded("int8", values, Settings())
    assert sent_bytes(near) == values.size + 3 * 4
    assert abs(near[BLOCK:] - values[BLOCK:]).max() < 0.05


@MANY
@given(hnp.arrays(np.float32, 40, elements=st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0])), st.floats(0.01, 0.5))
def test_top_k_keeps_the_largest_values_and_of_equal_ones_the_first(values: F32, fraction: float) -> None:
    near = encoded("top_k", values, Settings(fraction=fraction))
    count = max(1, int(np.ceil(fraction * 40)))
    first = sorted(sorted(range(40), key=lambda place: (-abs(values[place]), place))[:count])
    assert near.parts[0].tolist() == first  # type: ignore[attr-defined]
    kept = np.zeros(40, np.float32)
    kept[first] = values[first]
    assert np.array_equal(near, kept)


def test_low_rank_sends_a_matrix_of_that_rank_exactly_and_other_tensors_as_they_are() -> None:
    values = drawn(2)
    left, right = drawn(3, 40).reshape(20, 2), drawn(4, 60).reshape(2, 30)
    values[3:603] = (left @ right).reshape(-1)
    near = encoded("low_rank", values, SETTINGS)
    assert np.allclose(near, values, atol=1e-4)
    assert np.array_equal(near[:3], values[:3])
    assert np.array_equal(near[603:], values[603:])
    assert sent_bytes(near) == 4 * (3 + 2 * (20 + 30) + 8) + 8 * 9


def test_low_rank_comes_closer_from_the_factors_before() -> None:
    values, factors, errors = drawn(5), None, []
    for _ in range(10):
        near = encoded("low_rank", values, replace(SETTINGS, factors=factors))
        factors = near.parts[1]  # type: ignore[attr-defined]
        errors.append(float(np.linalg.norm(near - values)))
    best = np.linalg.norm(np.linalg.svd(values[3:603].reshape(20, 30), compute_uv=False)[2:])
    assert errors[-1] < 1.02 * best < errors[0]


@pytest.mark.parametrize("form", sorted(FORMS))
def test_what_is_not_finite_is_sent_as_it_is_and_refused(form: str) -> None:
    values = drawn(6)
    values[5] = np.nan
    assert form_of(encoded(form, values, SETTINGS)) == "none"
    with pytest.raises(RemoteWireError, match="NaN or infinity"):
        received(sent(values, form))


def test_what_is_computed_from_compressed_values_travels_as_it_is() -> None:
    values = encoded("int8", drawn(7), SETTINGS)
    for other in (values[:10], values * np.float32(2), np.array(values), values.copy()):
        assert form_of(other) == "none"
        assert sent_bytes(other) == other.nbytes
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 1


# ------------------------------------------------------------------------------------------------------ a peer's parts
def i32(*values: int) -> npt.NDArray[Any]:
    return np.array(values, np.int32)


def i64(*values: int) -> npt.NDArray[Any]:
    return np.array(values, np.int64)


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("form", "parts", "what"),
    [
        ("bfloat16", (np.zeros(7, np.uint16),), "7 values, expected 8"),
        ("int8", (np.zeros(7, np.int8), f32(1)), "7 values with 1 scales"),
        ("int8", (np.zeros(8, np.int8), f32()), "8 values with 0 scales"),
        ("int8", (np.zeros(8, np.int8), f32(1, 1)), "8 values with 2 scales"),
        ("top_k", (i32(), f32()), "0 places of 0 values"),
        ("top_k", (i32(1, 2), f32(1)), "2 places of 1 values"),
        ("top_k", (i32(2, 1), f32(1, 1)), "not distinct, ascending and below 8"),
        ("top_k", (i32(2, 2), f32(1, 1)), "not distinct"),
        ("top_k", (i32(-1, 2), f32(1, 1)), "not distinct"),
        ("top_k", (i32(2, 8), f32(1, 1)), "below 8"),
        ("low_rank", (i64(8, 1), np.zeros(8, np.float32)), "2 numbers"),
        ("low_rank", (np.ones(3 * 8193, np.int64), np.zeros(8, np.float32)), "at most 8192 segments"),
        ("low_rank", (i64(8, 1, -1), np.zeros(8, np.float32)), "a segment without values"),
        ("low_rank", (i64(-8, -1, 0), np.zeros(8, np.float32)), "a segment without values"),
        ("low_rank", (i64(8, 1, 0, 0, 5, 0), np.zeros(8, np.float32)), "a segment without values"),
        ("low_rank", (i64(4, 2, 2), np.zeros(12, np.float32)), "too high for its size"),
        ("low_rank", (i64(1 << 40, 1 << 40, MAX_RANK + 1), np.zeros(8, np.float32)), "rank above 64"),
        ("low_rank", (i64(9, 1, 0), np.zeros(9, np.float32)), "do not fit 8 values"),
        ("low_rank", (i64(8, 1, 0), np.zeros(7, np.float32)), "do not fit 8 values"),
        ("low_rank", (i64(1 << 62, 4, 0), np.zeros(8, np.float32)), "do not fit 8 values"),
    ],
)
def test_parts_that_do_not_fit_are_refused(form: str, parts: tuple[npt.NDArray[Any], ...], what: str) -> None:
    with pytest.raises(FieldError, match=what):
        decoded(form, parts, 8)


def claimed(claim: object, tail: bytes, *, count: int = 1) -> bytes:
    """A body with deltas whose buffers are said to be this."""
    fields = {"layout_digest": LAYOUT.digest, "buffer": claim, "n_samples": 7}
    return with_payloads(*[["delta", fields]] * count, tail=tail)


@pytest.mark.parametrize(
    "claim",
    [
        ["zip", [8], [8]],
        [["int8"], [8], [8, 1]],
        ["int8", [8], [8]],
        ["int8", [8], [8, True]],
        ["int8", [8], [8, -1]],
        ["int8", [8, 1], [8, 1]],
        ["int8", [0], [0, 0]],
        ["int8", 8, [8, 1]],
        ["int8", [8], 8],
        ["int8", [8.0], [8, 1]],
        ["float32", [8], []],
    ],
)
def test_malformed_claims_are_refused(claim: object) -> None:
    with pytest.raises(RemoteWireError) as caught:
        received(claimed(claim, bytes(48)))
    assert caught.value.reason == "malformed"


def test_a_body_without_the_parts_or_with_infinite_values_is_refused() -> None:
    claim = ["int8", [8], [8, 1]]
    good = bytes(range(8)) + bytes(8) + f32(0.5).tobytes()
    assert received(claimed(claim, good)).tolist() == [x / 2 for x in range(8)]
    for wrong in (good[:-1], good + b"\0", good[:8] + b"\1" + good[9:]):
        with pytest.raises(RemoteWireError):
            received(claimed(claim, wrong))
    for scale in (np.nan, np.inf, 3e38):
        with pytest.raises(RemoteWireError) as caught:
            received(claimed(claim, good[:16] + f32(scale).tobytes()))
        assert caught.value.reason == "not_finite"


def test_a_small_message_cannot_claim_much_memory() -> None:
    claim = ["top_k", [1 << 20], [1, 1]]
    one = i32(5).tobytes() + bytes(12) + f32(1).tobytes()
    assert received(claimed(claim, one), max_body=1 << 22)[5] == 1
    again = claimed(claim, one + bytes(12) + one, count=2)
    assert len(decode(header(), again, max_body=1 << 23).payloads) == 2
    for body, most in ((claimed(claim, one), (1 << 22) - 1), (again, (1 << 23) - 1)):
        with pytest.raises(RemoteWireError) as caught:
            decode(header(), body, max_body=most)
        assert caught.value.reason == "oversized"


def test_only_models_and_updates_may_be_compressed() -> None:
    body = with_payloads(["geometry", {"values": ["bfloat16", [4], [4]]}], tail=bytes(8))
    with pytest.raises(RemoteWireError, match="geometry"):
        decode(header(), body)


# ------------------------------------------------------------------------------------------------------ error feedback
@FEW
@given(st.integers(0, 99), st.sampled_from(["int8", "top_k", "low_rank"]), st.integers(1, 6))
def test_what_was_sent_and_what_is_left_add_up_to_what_was_trained(seed: int, kind: Any, tasks: int) -> None:
    options, state = UpdateCompression(kind=kind, rank=2), dict[str, torch.Tensor]()
    total, arrived = np.zeros(LAYOUT.size), np.zeros(LAYOUT.size)
    for task in range(tasks):
        update = drawn(1000 * seed + task)
        (payload,), state = updates.compress([delta(update)], options, LAYOUT, state, idle=False)
        assert isinstance(payload, Delta)
        total, arrived = total + update, arrived + payload.buffer
    left = state["compression.delta.residual"].numpy()
    assert np.allclose(arrived + left, total, atol=1e-4)
    assert not np.allclose(arrived, total, atol=1e-4)
    assert not updates.of_method(state, options)


def test_each_kind_of_update_has_its_own_memory_and_other_payloads_none() -> None:
    options = UpdateCompression(kind="low_rank", rank=2)
    part = PartialDelta(LAYOUT.digest, ("m",), drawn(8, 600), 7)
    other = DiscriminatorDelta("0" * 64, drawn(9, 12), 7)
    reply = (part, other, Model(LAYOUT.digest, drawn(10)))
    found, state = updates.compress(reply, options, LAYOUT, {}, idle=False)
    assert [form_of(each.buffer) for each in found] == ["low_rank", "low_rank", "none"]  # type: ignore[attr-defined]
    assert np.array_equal(found[1].buffer, other.buffer)  # type: ignore[attr-defined]
    assert {name.rsplit(".", 1)[0] for name in state} == {
        "compression.partial_delta",
        "compression.discriminator_delta",
    }


def test_an_idle_silo_sends_zeros_and_keeps_what_is_left() -> None:
    options = UpdateCompression(kind="top_k")
    _, state = updates.compress([delta(drawn(11))], options, LAYOUT, {}, idle=False)
    (payload,), after = updates.compress([delta(np.zeros(LAYOUT.size, np.float32))], options, LAYOUT, state, idle=True)
    assert isinstance(payload, Delta)
    assert form_of(payload.buffer) == "top_k"
    assert not payload.buffer.any()
    assert after == state


def test_a_residual_of_another_size_is_dropped() -> None:
    options = UpdateCompression(kind="int8")
    _, state = updates.compress(
        [PartialDelta(LAYOUT.digest, ("m",), drawn(12, 600), 7)], options, LAYOUT, {}, idle=False
    )
    small = PartialDelta(LAYOUT.digest, ("a",), drawn(13, 3), 7)
    (payload,), _ = updates.compress([small], options, LAYOUT, state, idle=False)
    assert np.allclose(payload.buffer, small.buffer, atol=0.05)  # type: ignore[attr-defined]


def test_a_model_is_compressed_once_for_all_silos() -> None:
    model, options = Model(LAYOUT.digest, drawn(14)), ModelCompression(kind="bfloat16")
    assert updates.model_to_silos(model, options) is updates.model_to_silos(model, options)
    assert updates.model_to_silos(model, ModelCompression()) is model


@pytest.mark.parametrize("kind", ["none", *sorted(FORMS)])
def test_the_nominal_size_is_that_of_an_update(kind: Any) -> None:
    options = UpdateCompression(kind=kind, rank=2)
    (payload,), _ = updates.compress([delta(drawn(15))], options, LAYOUT, {}, idle=False)
    assert updates.nominal_bytes(LAYOUT, options) == sizes([payload])[0][1]
