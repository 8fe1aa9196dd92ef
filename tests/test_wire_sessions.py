"""Sessions refuse every frame except the peer's next message."""

from __future__ import annotations

import os
from typing import Any

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmq.config.sections import Wire
from fedmq.errors import LocalWireError, RemoteWireError
from fedmq.wire import key_agreement
from fedmq.wire import sessions as crypto
from fedmq.wire.codec import encode_header
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta, Loss, Model
from fedmq.wire.sessions import (
    Sealed,
    Session,
    SharedPart,
    UnreadableError,
    decode_opened,
    open_message,
    seal_message,
    seal_shared,
)
from tests.wire_examples import RUN, assert_same, assert_works, flipped, message, reason


@pytest.fixture
def pair() -> tuple[Session, Session]:
    return sessions()


def sessions(name: bytes = b"s" * 16) -> tuple[Session, Session]:
    up, down = os.urandom(32), os.urandom(32)
    silo = Session(run=RUN, name="silo-00", peer="coordinator", session=name, send_key=up, receive_key=down)
    coordinator = Session(run=RUN, name="coordinator", peer="silo-00", session=name, send_key=down, receive_key=up)
    return silo, coordinator


# Sessions


def test_sealed_frames_open_to_the_original_message(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    buffer = np.arange(100_000, dtype=np.float32)
    sent = Message(message().header, (Delta("0" * 64, buffer, 3), Loss(0.5)))
    sealed = seal_message(silo, sent)
    got, tag = open_message(coordinator, sealed.frames)
    assert tag == sealed.tag
    assert len(bytes.fromhex(tag)) == 16
    assert sealed.header == got.header
    assert (got.header.session, got.header.counter) == (b"s" * 16, 0)
    assert sealed.size == sum(memoryview(frame).nbytes for frame in sealed.frames)
    delta = got.payloads[0]
    assert isinstance(delta, Delta)
    assert delta.buffer.tobytes() == buffer.tobytes()
    assert delta.buffer.ctypes.data % 16 == 0
    assert not delta.buffer.flags.writeable


def test_the_cipher_is_plain_aes_gcm_over_the_joined_buffers() -> None:
    key = bytes(range(32))
    session = Session(
        run=RUN, name="silo-00", peer="coordinator", session=bytes(16), send_key=key, receive_key=bytes(32)
    )
    for counter, buffers in enumerate(([b"abc", bytes(100), b"", b"d" * 17], [], [b"x"])):
        clear, sealed = session.seal(message().header, buffers).frames
        nonce = bytes(4) + counter.to_bytes(8, "big")
        assert AESGCM(key).decrypt(nonce, bytes(sealed), bytes(clear)) == b"".join(buffers)


def test_replays_gaps_and_reordered_messages_are_refused_and_the_session_continues(
    pair: tuple[Session, Session],
) -> None:
    silo, coordinator = pair
    first, lost, after = (seal_message(silo, message(number)) for number in range(3))
    open_message(coordinator, first.frames)
    for sealed, expected in ((first, "replay"), (after, "gap"), (after, "replay"), (lost, "replay")):
        assert reason(lambda sealed=sealed: open_message(coordinator, sealed.frames)) == expected
    assert_works(silo, coordinator)


def test_a_forged_gap_has_no_effect(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    forged = encode_header(Header(**{**vars(sealed.header), "counter": 1000}))
    assert reason(lambda: coordinator.open((forged, sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_a_message_does_not_open_on_the_side_that_sealed_it(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    assert reason(lambda: silo.open(sealed.frames)) == "unknown_sender"
    turned = encode_header(Header(**{**vars(sealed.header), "sender": "coordinator", "receiver": "silo-00"}))
    assert reason(lambda: silo.open((turned, sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_a_changed_header_is_refused_and_the_session_continues(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    expected: list[tuple[dict[str, Any], str]] = [
        ({"run": "run-2"}, "wrong_run"),
        ({"session": b"t" * 16}, "unknown_session"),
        ({"session": b""}, "unknown_session"),
        ({"sender": "silo-01"}, "unknown_sender"),
        ({"receiver": "evaluator"}, "wrong_receiver"),
        ({"counter": 1 << 32}, "exhausted"),
        ({"wire_version": 2}, "wire_version"),
        *(({name: value}, "tampered") for name, value in (("sequence", 9), ("base_version", 5), ("sent_at", 3.0))),
        ({"kind": Kind.HEARTBEAT}, "tampered"),
        ({"reply_to": 7}, "tampered"),
    ]
    for changes, why in expected:
        clear = encode_header(Header(**{**vars(sealed.header), **changes}))
        assert reason(lambda clear=clear: coordinator.open((clear, sealed.frames[1]))) == why, changes
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_a_header_reencoded_in_other_bytes_is_tampered(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    turned = dict(reversed(msgpack.unpackb(bytes(sealed.frames[0])).items()))
    assert reason(lambda: coordinator.open((msgpack.packb(turned), sealed.frames[1]))) == "tampered"
    open_message(coordinator, sealed.frames)


def test_truncated_frames_are_refused_and_the_session_continues(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    clear, body = (bytes(frame) for frame in sealed.frames)
    for size in range(len(body)):
        expected = "malformed" if size < 16 else "tampered"
        assert reason(lambda size=size: coordinator.open((clear, body[:size]))) == expected
    for size in range(len(clear)):
        assert reason(lambda size=size: coordinator.open((clear[:size], body))) == "malformed"
    for frames in ((), (clear,), (clear, body, b"", b"")):
        assert reason(lambda frames=frames: coordinator.open(frames)) == "malformed"
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


def test_an_oversized_body_is_refused_before_it_is_opened(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    sealed = seal_message(silo, message())
    assert reason(lambda: open_message(coordinator, sealed.frames, max_body=8)) == "oversized"
    open_message(coordinator, sealed.frames)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_flipped_bit_is_refused_and_the_session_continues(data: st.DataObject) -> None:
    silo, coordinator = sessions()
    sealed = seal_message(silo, message())
    frames = [bytes(frame) for frame in sealed.frames]
    which = data.draw(st.integers(0, 1))
    frames[which] = flipped(frames[which], data.draw(st.integers(0, len(frames[which]) * 8 - 1)))
    with pytest.raises(RemoteWireError):
        coordinator.open(frames)
    open_message(coordinator, sealed.frames)
    assert_works(silo, coordinator)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.binary(max_size=300), max_size=3))
def test_random_frames_are_refused(frames: list[bytes]) -> None:
    _, coordinator = sessions()
    with pytest.raises(RemoteWireError):
        coordinator.open(frames)


def test_an_authentic_message_that_does_not_decode_is_refused_and_the_session_continues(
    pair: tuple[Session, Session],
) -> None:
    silo, coordinator = pair
    rubbish = silo.seal(message().header, [b"rubbish"])
    assert reason(lambda: open_message(coordinator, rubbish.frames)) == "malformed"
    assert_works(silo, coordinator)


def test_handshake_kinds_are_refused_in_a_session(pair: tuple[Session, Session]) -> None:
    silo, coordinator = pair
    ready = Message(Header(**{**vars(message().header), "kind": Kind.READY}))
    assert reason(lambda: open_message(coordinator, silo.seal(ready.header, []).frames)) == "unexpected"


def test_sealing_a_message_of_another_sender_is_refused(pair: tuple[Session, Session]) -> None:
    for changes in ({"run": "run-2"}, {"sender": "silo-01"}, {"receiver": "evaluator"}):
        with pytest.raises(LocalWireError):
            seal_message(pair[0], message(**changes))
    assert pair[0].sent == 0


def test_a_key_seals_no_more_than_its_limit(pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch) -> None:
    silo, coordinator = pair
    monkeypatch.setattr(crypto, "MAX_MESSAGES", 2)
    sealed: list[Sealed] = [seal_message(silo, message(number)) for number in range(2)]
    with pytest.raises(LocalWireError, match="2 messages"):
        seal_message(silo, message())
    for each in sealed:
        open_message(coordinator, each.frames)


def test_sealing_a_body_above_the_limit_raises_a_local_error(
    pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crypto, "MAX_BODY", 10)
    with pytest.raises(LocalWireError, match="allowed 10"):
        pair[0].seal(message().header, [bytes(11)])


def test_a_nonce_is_used_up_even_if_sealing_fails(pair: tuple[Session, Session]) -> None:
    silo, _ = pair
    strided = memoryview(bytes(8))[::2]
    with pytest.raises(BufferError):
        silo.seal(message().header, [strided])
    assert silo.sent == 1


def test_a_session_needs_keys_of_the_right_length() -> None:
    with pytest.raises(LocalWireError):
        Session(run=RUN, name="a", peer="b", session=b"", send_key=bytes(32), receive_key=bytes(32))
    with pytest.raises(LocalWireError):
        Session(run=RUN, name="a", peer="b", session=bytes(16), send_key=bytes(16), receive_key=bytes(32))


def test_the_keys_depend_on_both_secrets_and_the_transcript() -> None:
    zero, other = bytes(32), b"1" * 32
    secrets = ((zero, zero, zero), (other, zero, zero), (zero, other, zero), (zero, zero, other))
    made = [key_agreement.derive_keys(*each, initiator=True) for each in secrets]
    parts = [part for keys in made for part in keys.values()]
    assert len(set(parts)) == len(parts)
    theirs = key_agreement.derive_keys(zero, zero, zero, initiator=False)
    assert (theirs["send_key"], theirs["receive_key"]) == (made[0]["receive_key"], made[0]["send_key"])


# Shared parts


def ends_of(options: Wire) -> tuple[Session, Session]:
    key, back = os.urandom(32), os.urandom(32)
    coordinator = Session(
        run=RUN, name="coordinator", peer="silo-00", options=options, session=bytes(16), send_key=key, receive_key=back
    )
    return coordinator, Session(
        run=RUN, name="silo-00", peer="coordinator", session=bytes(16), send_key=back, receive_key=key
    )


def with_model(model: Model) -> Message:
    """A message whose model is neither its first payload nor its last."""
    head = message(sender="coordinator", receiver="silo-00").header
    return Message(
        head, (Delta("1" * 64, np.ones(3, np.float32), 3), model, Delta("2" * 64, np.ones(5, np.float32), 3))
    )


@pytest.mark.parametrize("options", [Wire(), Wire(hide_names=True)])
def test_a_part_sealed_once_is_the_same_memory_for_all_and_opens_as_if_sealed_for_each(options: Wire) -> None:
    model = Model("0" * 64, np.arange(1001, dtype=np.float32))
    part = seal_shared(model)
    for _ in range(2):
        coordinator, receiver = ends_of(options)
        for _ in range(2):
            sealed = seal_message(coordinator, with_model(model), shared=part)
            assert sealed.frames[2] is part.sealed
            got, tag = open_message(receiver, sealed.frames)
            assert (tag, got.header) == (sealed.tag, sealed.header)
            assert_same(got, Message(sealed.header, with_model(model).payloads))
        assert coordinator.size == receiver.size
        alone = seal_message(coordinator, with_model(model))
        assert_same(open_message(receiver, alone.frames)[0], Message(alone.header, got.payloads))
        assert len(alone.frames) == 2 and sealed.size - alone.size == 80 + 16, "place, number, key, digest; a tag"
        assert_works(receiver, coordinator)


def changed_part(part: SharedPart, values: np.ndarray[Any, Any]) -> bytes:
    """A part under the same key, as another receiver can make it."""
    return AESGCM(part.key).encrypt(bytes(12), values.tobytes(), None)


@pytest.mark.parametrize(
    ("change", "authentic"),
    [
        pytest.param(lambda clear, own, part, _: (clear, own, flipped(part, 99)), True, id="a bit"),
        pytest.param(lambda clear, own, part, _: (clear, own, part[:-1]), True, id="cut"),
        pytest.param(lambda clear, own, _part, other: (clear, own, other), True, id="another receiver's"),
        pytest.param(lambda clear, own, _part, _other: (clear, own), False, id="taken away"),
        pytest.param(lambda clear, own, part, _: (clear, flipped(own, 9), part), False, id="its key"),
    ],
)
def test_a_part_that_is_not_the_senders_is_tampered_with(change: Any, authentic: bool) -> None:
    model = Model("0" * 64, np.arange(1001, dtype=np.float32))
    part, (coordinator, silo) = seal_shared(model), ends_of(Wire())
    sealed = seal_message(coordinator, with_model(model), shared=part)
    frames = change(*map(bytes, sealed.frames), changed_part(part, model.buffer[::-1]))
    with pytest.raises(RemoteWireError, match="as sealed") as caught:
        open_message(silo, frames)
    assert caught.value.reason == "tampered" and not isinstance(caught.value, UnreadableError)
    assert silo.authentic == authentic
    if not authentic:
        open_message(silo, sealed.frames)
    assert_works(silo, coordinator)


def test_no_part_can_be_added_and_a_senders_wrong_one_is_refused() -> None:
    model = Model("0" * 64, np.arange(1001, dtype=np.float32))
    part, (coordinator, silo) = seal_shared(model), ends_of(Wire())
    alone = seal_message(coordinator, with_model(model))
    assert reason(lambda: silo.open((*alone.frames, part.sealed))) == "tampered"
    open_message(silo, alone.frames)
    sealed = seal_message(coordinator, with_model(model), shared=part)
    assert reason(lambda: silo.open(sealed.frames, max_body=4004)) == "oversized"
    head = alone.header
    for before, why in (
        (bytes(79), "malformed"),
        (crypto._SHARED.pack(1, 0, part.key, bytes(32)), "malformed"),
        (crypto._SHARED.pack(0, 3, part.key, bytes(32)), "malformed"),  # a body that begins with the part
    ):
        frames = coordinator.seal(head, [before], shared=part.sealed).frames
        assert reason(lambda frames=frames: decode_opened(silo.open(frames))) == why
    assert_works(silo, coordinator)
