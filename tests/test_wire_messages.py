"""Payloads, headers and layouts refuse values that their declarations do not allow."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import numpy as np
import pytest

from fedmq.errors import InputError, LocalWireError, RemoteWireError
from fedmq.wire.fields import FieldError, Real, all_finite
from fedmq.wire.layout import Layout, LayoutEntry, agree, require_layout
from fedmq.wire.messages import Header, Kind, Message, TaskInfo
from fedmq.wire.payloads import (
    PAYLOADS,
    ClassPrototypes,
    Delta,
    Error,
    Loss,
    Model,
    Payload,
    payload,
    tensor_bytes,
    tensors,
)
from tests import wire_examples

DIGEST = "0" * 64
LAYOUT = Layout.of([("a.weight", (2, 3), "float32"), ("a.bias", (2,), "float32"), ("scale", (), "float32")])


def header(**changes: Any) -> Header:
    return wire_examples.header(**{"kind": Kind.HEARTBEAT, "reply_to": None, **changes})


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_a_payload_is_declared_once_and_describes_each_field() -> None:
    with pytest.raises(TypeError, match=r"Again: the payload loss is already declared by Loss"):

        @payload("loss")
        @dataclasses.dataclass(frozen=True, eq=False)
        class Again(Payload):
            value: Annotated[float, Real()]

    with pytest.raises(TypeError, match=r"Bare\.value: not Annotated with one of Tensor, Whole"):

        @payload("bare")
        @dataclasses.dataclass(frozen=True, eq=False)
        class Bare(Payload):
            value: float

    assert "bare" not in PAYLOADS


def test_a_header_out_of_bounds_is_refused() -> None:
    changes: list[dict[str, Any]] = [
        {"run": ""}, {"run": "Run"}, {"run": "a" * 65}, {"run": "a\n"}, {"run": b"run"}, {"sender": "../x"},
        {"receiver": None}, {"kind": "heartbeat"}, {"sequence": -1}, {"sequence": 1 << 64}, {"sequence": True},
        {"sequence": 1.0}, {"reply_to": -1}, {"base_version": -1}, {"sent_at": float("nan")}, {"sent_at": -1.0},
        {"sent_at": "now"}, {"sent_at": 10**400}, {"session": b"short"}, {"counter": 1 << 64}, {"wire_version": 0},
        {"kind": Kind.REPLY},
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(LocalWireError):
            header(**change)
            pytest.fail(f"accepted {change}")
    for wrong in ({"round": -1}, {"rounds": 0}, {"committed": -1}, {"learning_rate": 0.0}):
        with pytest.raises(FieldError):
            TaskInfo(**{"round": 0, "rounds": 5, "committed": 0, "learning_rate": 0.1, **wrong})


def test_constructing_a_delta_does_not_check_its_values() -> None:
    assert np.isnan(Delta(DIGEST, floats(2) * np.nan, 1).buffer).all()


def test_messages_must_have_the_payloads_their_kind_requires() -> None:
    info = TaskInfo(round=0, rounds=5, committed=0, learning_rate=0.1)
    model = Model(DIGEST, floats(3))
    assert Message(header(kind=Kind.TASK), (model,), info).task is info
    assert Message(header(kind=Kind.EVALUATE), (model,)).task is None
    assert Message(header(kind=Kind.LAYOUT), layout=LAYOUT).layout is LAYOUT
    assert Message(header(kind=Kind.ERROR), (Error("failed", "x"),)).payloads
    wrong: list[Any] = [
        lambda: Message(header(kind=Kind.TASK), (model,)),
        lambda: Message(header(), (model,)),
        lambda: Message(header(), (), info),
        lambda: Message(header(kind=Kind.LAYOUT)),
        lambda: Message(header(), layout=LAYOUT),
        lambda: Message(header(kind=Kind.ERROR)),
        lambda: Message(header(kind=Kind.REPLY, reply_to=1), (Error("failed", "x"),)),
        lambda: Message(header(kind=Kind.REPLY, reply_to=1), (Loss(1.0),) * 65),
        lambda: Message(header(kind=Kind.REPLY, reply_to=1), [Loss(1.0)]),
    ]
    for make in wrong:
        with pytest.raises(LocalWireError):
            make()


def test_tensor_bytes_counts_only_tensors() -> None:
    payload = ClassPrototypes(floats(2, 3), np.ones(2, np.int64), "text")
    assert [array.shape for array in tensors(payload)] == [(2, 3), (2,)]
    assert tensor_bytes(payload) == 2 * 3 * 4 + 2 * 8
    assert tensor_bytes(Loss(1.0)) == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_non_finite_value_anywhere_is_found(dtype: type) -> None:
    for place, bad in ((0, np.nan), (300_000, np.inf), (599_999, -np.inf)):
        array = np.zeros(600_000, dtype)
        assert all_finite(array)
        array[place] = bad
        assert not all_finite(array)


def test_large_finite_values_pass_even_if_their_sum_overflows() -> None:
    assert all_finite(np.full(1000, np.finfo(np.float32).max, np.float32))


def test_a_layout_places_its_entries_consecutively() -> None:
    assert [entry.offset for entry in LAYOUT.entries] == [0, 24, 32]
    assert (LAYOUT.size, LAYOUT.nbytes) == (9, 36)
    assert Layout.from_plain(LAYOUT.to_plain()) == LAYOUT


def test_a_layouts_digest_is_stable_across_versions() -> None:
    assert LAYOUT.canonical() == (
        b"fedmq layout 1\na.weight\tfloat32\t2,3\t0\na.bias\tfloat32\t2\t24\nscale\tfloat32\t\t32\n"
    )
    assert LAYOUT.digest == "e90e4728896f7134cc244ba89f445788dfe91593ca8c93c5aa900f95592e37b3"


def test_views_share_memory_with_the_buffer() -> None:
    buffer = np.arange(9, dtype=np.float32)
    views = LAYOUT.views(buffer)
    views["a.bias"][:] = -1
    assert buffer[6:8].tolist() == [-1, -1]
    assert views["scale"].shape == ()
    with pytest.raises(LocalWireError):
        LAYOUT.views(buffer[:8])


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        [["a", "float32", [1]]],
        [["a", "float32", 1, 0]],
        [["a", "float32", [1], 4]],
        [["a", "float32", [1], 0], ["b", "float32", [1], 0]],
        [["a", "float32", [1], 0], ["b", "float32", [1], 8]],
        [["a", "float32", [1], 0], ["a", "float32", [1], 4]],
        [["a", "object", [1], 0]],
        [["a", "float64", [1], 0]],
        [["a", ["float32"], [1], 0]],
        [["a b", "float32", [1], 0]],
        [["a", "float32", [-1], 0]],
        [["a", "float32", [1.0], 0]],
        [["a", "float32", [1 << 29], 0]],
        [["a", "float32", [1 << 20, 1 << 20, 1 << 20], 0]],
        [["a", "float32", [1] * 9, 0]],
        [["a", "float32", [1], True]],
    ],
)
def test_an_invalid_layout_of_a_peer_is_refused(plain: Any) -> None:
    with pytest.raises(FieldError):
        Layout.from_plain(plain)
    with pytest.raises(FieldError):
        LayoutEntry("a", [1], "float32", 0)  # type: ignore[arg-type]


def test_a_buffer_must_fit_the_layout_it_names() -> None:
    layouts = {LAYOUT.digest: LAYOUT}
    assert require_layout(layouts, LAYOUT.digest, floats(9)) is LAYOUT
    for digest, buffer in [(DIGEST, floats(9)), (LAYOUT.digest, floats(8))]:
        with pytest.raises(RemoteWireError) as caught:
            require_layout(layouts, digest, buffer)
        assert caught.value.reason == "layout"


def test_both_sides_have_the_same_layout_or_an_error_states_the_difference() -> None:
    agree(LAYOUT, LAYOUT)
    other = LAYOUT.part([LAYOUT.entries[0].name])
    for told, found in ((other, f"1 tensors, {other.size} parameters"), (None, "none")):
        with pytest.raises(InputError, match=f"model layout: found '{found}', allowed: {len(LAYOUT.entries)} tensors"):
            agree(told, LAYOUT)


def test_ranges_name_adjacent_layers_together_in_the_order_of_the_buffer() -> None:
    assert LAYOUT.ranges(["scale", "a.weight"]) == [slice(0, 6), slice(8, 9)]
    assert LAYOUT.ranges(["a.bias", "a.weight"]) == [slice(0, 8)]
    assert LAYOUT.ranges([]) == []


def test_the_layout_of_some_layers_has_their_order_and_is_made_once() -> None:
    part = LAYOUT.part(["scale", "a.weight"])
    assert [entry.offset for entry in part.entries] == [0, 4]
    assert part is LAYOUT.part(("scale", "a.weight"))
    assert part != LAYOUT.part(["a.weight", "scale"])
