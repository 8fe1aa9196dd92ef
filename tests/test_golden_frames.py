"""Golden frames of the wire format decode, and are written byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmq.config.sections import Wire
from fedmq.wire.codec import decode, encode_body
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.key_agreement import begin_rekey, finish_rekey
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import PAYLOADS
from fedmq.wire.sessions import open_message, seal_message
from tools.make_golden_frames import (
    RUN,
    describe,
    golden_ephemeral,
    golden_identity,
    golden_messages,
    golden_session,
    golden_shared,
    up,
)

FRAMES = Path(__file__).parent / "frames"
OTHER = ("handshake", "rekey", "shared", "short")
FILES = sorted(path for path in FRAMES.glob("v*.json") if path.stem.partition("-")[2] not in OTHER)


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_every_message_and_payload_kind_has_a_golden_frame() -> None:
    messages = [load(path)["message"] for path in FILES]
    assert {path.stem.removeprefix("v1-") for path in FILES} == set(golden_messages())
    assert {payload["kind"] for message in messages for payload in message["payloads"]} == set(PAYLOADS)
    handshake = {Kind.HELLO, Kind.WELCOME, Kind.READY, Kind.REJECT, Kind.INQUIRE, Kind.REKEY, Kind.REKEYED}
    assert {message["header"]["kind"] for message in messages} == set(Kind) - handshake


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_frame_opens_decodes_and_is_written_byte_for_byte(path: Path) -> None:
    golden = load(path)
    assert describe(decode(bytes.fromhex(golden["clear"]), bytes.fromhex(golden["body"]))) == golden["message"]
    frames = [bytes.fromhex(golden["clear"]), bytes.fromhex(golden["sealed"])]
    session = golden_session(golden["message"]["header"]["receiver"])
    opened, tag = open_message(session, frames)
    assert describe(opened) == golden["message"]
    assert tag == golden["tag"] == golden["sealed"][-32:]
    # Independent of this project's code: AES-256-GCM, the counter as nonce, the clear header as associated data.
    nonce = golden["message"]["header"]["counter"].to_bytes(12, "big")
    assert AESGCM(bytes.fromhex(golden["key"])).decrypt(nonce, frames[1], frames[0]).hex() == golden["body"]
    message = golden_messages()[path.stem.removeprefix("v1-")]
    assert b"".join(encode_body(message)).hex() == golden["body"]
    sealed = seal_message(golden_session(message.header.sender), message)
    assert [bytes(frame).hex() for frame in sealed.frames] == [golden["clear"], golden["sealed"]]


def test_the_golden_handshake_gives_its_session() -> None:
    golden = load(FRAMES / "v1-handshake.json")
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    keys = {identity.name: identity.key.public_key() for identity in (silo, coordinator)}
    hello, initiated = initiate(silo, "coordinator", RUN, 1.0, golden_ephemeral(10))
    assert [frame.hex() for frame in hello] == golden["hello"]
    ready, session = complete(initiated, keys, [bytes.fromhex(frame) for frame in golden["welcome"]], 3.0)
    assert [bytes(frame).hex() for frame in ready] == golden["ready"]
    assert session.session.hex() == golden["session"]
    heartbeat = seal_message(session, Message(up(Kind.HEARTBEAT)))
    assert [bytes(frame).hex() for frame in heartbeat.frames] == golden["heartbeat"]


@pytest.mark.parametrize(("name", "options"), [("hidden", Wire(hide_names=True)), ("padded", Wire(padding=True))])
def test_golden_messages_with_a_sealed_header_open_and_are_still_written_byte_for_byte(
    name: str, options: Wire
) -> None:
    golden = load(FRAMES / "v1-short.json")[name]
    frames = [bytes.fromhex(golden[key]) for key in ("clear", "sealed")]
    message, _ = open_message(golden_session("coordinator"), frames)
    assert describe(message) == golden["message"]
    sealed = seal_message(golden_session("silo-00", options), golden_messages()["reply-loss"])
    assert [bytes(frame).hex() for frame in sealed.frames] == [golden[key] for key in ("clear", "sealed")]


@pytest.mark.parametrize(("name", "options"), [("whole", Wire()), ("hidden", Wire(hide_names=True))])
def test_a_golden_message_with_a_shared_part_opens_and_is_still_written_byte_for_byte(name: str, options: Wire) -> None:
    golden = load(FRAMES / "v1-shared.json")
    message, _ = open_message(golden_session("silo-00"), [bytes.fromhex(frame) for frame in golden[name]])
    assert describe(message) == golden["message"]
    sent, part = golden_shared()
    sealed = seal_message(golden_session("coordinator", options), sent, shared=part)
    assert [bytes(frame).hex() for frame in sealed.frames] == golden[name]


def test_the_golden_rekey_gives_its_session() -> None:
    golden = load(FRAMES / "v1-rekey.json")
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    session = golden_session("silo-00")
    asked, state = begin_rekey(silo, session, up(Kind.REKEY), golden_ephemeral(30))
    assert [bytes(frame).hex() for frame in asked.frames] == golden["rekey"]
    answered = session.open([bytes.fromhex(frame) for frame in golden["rekeyed"]])
    finish_rekey(state, coordinator.key.public_key(), session, answered)
    assert session.session.hex() == golden["session"]
    heartbeat = seal_message(session, Message(up(Kind.HEARTBEAT)))
    assert [bytes(frame).hex() for frame in heartbeat.frames] == golden["heartbeat"]
