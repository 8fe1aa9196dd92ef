"""Golden frames of every wire version still decode, and are still written byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedmq.config.sections import Wire
from fedmq.wire.codec import decode, encode_body
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.messages import WIRE_VERSIONS, Kind, Message
from fedmq.wire.payloads import PAYLOADS, Refusal
from fedmq.wire.rekeying import begin, finish
from fedmq.wire.sealed_sessions import open_message, seal_message
from tools.make_golden_frames import (
    RUN,
    describe,
    golden_ephemeral,
    golden_identity,
    golden_messages,
    golden_session,
    up,
)

FRAMES = Path(__file__).parent / "frames"
OTHER = ("handshake", "rekey", "short")
FILES = sorted(path for path in FRAMES.glob("v*.json") if path.stem.partition("-")[2] not in OTHER)


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def test_every_message_and_payload_kind_of_every_version_has_a_golden_frame() -> None:
    for version in WIRE_VERSIONS:
        messages = [load(path)["message"] for path in FILES if path.stem.startswith(f"v{version}-")]
        later = {Refusal.KIND, "data_statement", "data_format", "silo_modalities", "silo_metrics", "run_status"}
        later = later if version == 1 else set()
        assert {payload["kind"] for message in messages for payload in message["payloads"]} == set(PAYLOADS) - later
        handshake = {Kind.HELLO, Kind.WELCOME, Kind.READY, Kind.REJECT, Kind.INQUIRE, Kind.REKEY, Kind.REKEYED}
        newer = {Kind.STATEMENT, Kind.AGREEMENT, Kind.EVALUATE_SILO, Kind.SILO_RESULT, Kind.STATUS}
        after_handshake = set(Kind) - handshake - (newer if version == 1 else set())
        assert {message["header"]["kind"] for message in messages} == after_handshake


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_body_decodes(path: Path) -> None:
    golden = load(path)
    assert describe(decode(bytes.fromhex(golden["clear"]), bytes.fromhex(golden["body"]))) == golden["message"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_golden_envelope_opens(path: Path) -> None:
    golden = load(path)
    frames = [bytes.fromhex(golden["clear"]), bytes.fromhex(golden["sealed"])]
    session = golden_session(golden["message"]["header"]["receiver"], golden["wire_version"])
    message, tag = open_message(session, frames)
    assert describe(message) == golden["message"]
    assert tag == golden["tag"] == golden["sealed"][-32:]
    # Independent of this project's code: AES-256-GCM, the counter as nonce, the clear header as associated data.
    nonce = golden["message"]["header"]["counter"].to_bytes(12, "big")
    assert AESGCM(bytes.fromhex(golden["key"])).decrypt(nonce, frames[1], frames[0]).hex() == golden["body"]


@pytest.mark.parametrize(
    ("version", "name"), [(each, name) for each in WIRE_VERSIONS for name in golden_messages(each)]
)
def test_frames_of_every_version_are_still_written_byte_for_byte(version: int, name: str) -> None:
    message = golden_messages(version)[name]
    golden = load(FRAMES / f"v{version}-{name}.json")
    assert b"".join(encode_body(message, version)).hex() == golden["body"]
    sealed = seal_message(golden_session(message.header.sender, version), message)
    assert [bytes(frame).hex() for frame in sealed.frames] == [golden["clear"], golden["sealed"]]


@pytest.mark.parametrize("version", WIRE_VERSIONS)
def test_the_golden_handshake_still_gives_its_session(version: int) -> None:
    golden = load(FRAMES / f"v{version}-handshake.json")
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    keys = {identity.name: identity.key.public_key() for identity in (silo, coordinator)}
    hello, initiated = initiate(silo, "coordinator", RUN, 1.0, golden_ephemeral(10), WIRE_VERSIONS[:version])
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
    golden = load(FRAMES / "v3-short.json")[name]
    frames = [bytes.fromhex(golden[key]) for key in ("clear", "sealed")]
    message, _ = open_message(golden_session("coordinator", 3), frames)
    assert describe(message) == golden["message"]
    sealed = seal_message(golden_session("silo-00", 3, options), golden_messages(3)["reply-loss"])
    assert [bytes(frame).hex() for frame in sealed.frames] == [golden[key] for key in ("clear", "sealed")]


def test_the_golden_rekey_still_gives_its_session() -> None:
    golden = load(FRAMES / "v3-rekey.json")
    silo, coordinator = golden_identity("silo-00", 1), golden_identity("coordinator", 2)
    session = golden_session("silo-00", 3)
    asked, state = begin(silo, session, up(Kind.REKEY), golden_ephemeral(30))
    assert [bytes(frame).hex() for frame in asked.frames] == golden["rekey"]
    answered = session.open([bytes.fromhex(frame) for frame in golden["rekeyed"]])
    finish(state, coordinator.key.public_key(), session, answered)
    assert session.session.hex() == golden["session"]
    heartbeat = seal_message(session, Message(up(Kind.HEARTBEAT)))
    assert [bytes(frame).hex() for frame in heartbeat.frames] == golden["heartbeat"]
