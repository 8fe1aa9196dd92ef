"""New keys within a session; sealed headers and padding; a whole run with all of it gives the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.audit.log_checks import audit_run
from fedmq.config.sections import Wire
from fedmq.errors import InputError, RemoteWireError
from fedmq.wire.codec import decode_clear, encode_body
from fedmq.wire.handshake import complete, confirm, initiate, respond
from fedmq.wire.key_agreement import answer_rekey, begin_rekey, finish_rekey, rekey_due
from fedmq.wire.keys import Identity
from fedmq.wire.log_records import MessageRecord, read_log
from fedmq.wire.messages import Header, Kind, Message, ShortHeader
from fedmq.wire.payloads import Error
from fedmq.wire.sessions import (
    LEAST_PADDED,
    TAG_BYTES,
    Session,
    UnreadableError,
    open_message,
    padded_size,
    seal_message,
    split_content,
)
from tests import threaded_run
from tests.threaded_run import resolved

RUN = "run-0-0123456789ab"
SILO, COORDINATOR = (Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", "coordinator"))
KEYS = {each.name: each.key.public_key() for each in (SILO, COORDINATOR)}
PADDED, HIDDEN = Wire(padding=True), Wire(hide_names=True)


def pair(options: Wire = Wire()) -> tuple[Session, Session]:  # noqa: B008
    hello, initiated = initiate(SILO, "coordinator", RUN, 0.0, options=options)
    welcome, responded = respond(COORDINATOR, KEYS, RUN, hello, 0.0, options=options)
    ready, silo = complete(initiated, KEYS, welcome, 0.0)
    return silo, confirm(responded, ready)


def header(session: Session, kind: Kind, **more: int) -> Header:
    return Header(run=RUN, kind=kind, sender=session.name, receiver=session.peer, sequence=0, sent_at=1.5, **more)


def beat(session: Session) -> Message:
    return Message(header(session, Kind.HEARTBEAT))


def passes(sender: Session, receiver: Session) -> None:
    message, _ = open_message(receiver, seal_message(sender, beat(sender)).frames)
    assert message.header.kind is Kind.HEARTBEAT


def rekeyed(silo: Session, coordinator: Session, in_transit: int = 0) -> None:
    asked, state = begin_rekey(SILO, silo, header(silo, Kind.REKEY))
    old = [seal_message(silo, beat(silo)) for _ in range(in_transit)]
    opened = coordinator.open(asked.frames)
    answered = answer_rekey(COORDINATOR, KEYS["silo-00"], coordinator, opened, header(coordinator, Kind.REKEYED))
    new = seal_message(coordinator, beat(coordinator))
    for each in old:
        open_message(coordinator, each.frames)
    finish_rekey(state, KEYS["coordinator"], silo, silo.open(answered.frames))
    open_message(silo, new.frames)


@pytest.mark.parametrize("options", [Wire(), HIDDEN, PADDED])
def test_both_ends_continue_with_new_keys_and_messages_in_transit_arrive(options: Wire) -> None:
    silo, coordinator = pair(options)
    identifiers = {silo.session}
    for in_transit in (0, 2, 5):
        passes(silo, coordinator)
        passes(coordinator, silo)
        before = seal_message(silo, beat(silo))
        open_message(coordinator, before.frames)
        rekeyed(silo, coordinator, in_transit)
        identifiers.add(silo.session)
        assert silo.session == coordinator.session and silo.sent == 0
        for _ in range(3):
            passes(silo, coordinator)
            passes(coordinator, silo)
        with pytest.raises(RemoteWireError) as former:
            open_message(coordinator, before.frames)
        assert former.value.reason == "unknown_session", "the former keys are gone"
    assert len(identifiers) == 4


def test_new_keys_that_another_key_signed_are_refused_and_the_session_continues() -> None:
    silo, coordinator = pair()
    stranger = Identity("silo-00", Ed25519PrivateKey.generate())
    asked, _ = begin_rekey(stranger, silo, header(silo, Kind.REKEY))
    opened = coordinator.open(asked.frames)
    with pytest.raises(RemoteWireError) as refused:
        answer_rekey(COORDINATOR, KEYS["silo-00"], coordinator, opened, header(coordinator, Kind.REKEYED))
    assert refused.value.reason == "bad_signature"
    passes(silo, coordinator)
    asked, state = begin_rekey(SILO, silo, header(silo, Kind.REKEY))
    opened = coordinator.open(asked.frames)
    forged = answer_rekey(
        Identity("coordinator", stranger.key), KEYS["silo-00"], coordinator, opened, header(coordinator, Kind.REKEYED)
    )
    with pytest.raises(RemoteWireError) as refused:
        finish_rekey(state, KEYS["coordinator"], silo, silo.open(forged.frames))
    assert refused.value.reason == "bad_signature"


def test_a_second_rekey_waits_for_the_first() -> None:
    silo, coordinator = pair()
    asked, _ = begin_rekey(SILO, silo, header(silo, Kind.REKEY))
    again, _ = begin_rekey(SILO, silo, header(silo, Kind.REKEY))
    answer = header(coordinator, Kind.REKEYED)
    answer_rekey(COORDINATOR, KEYS["silo-00"], coordinator, coordinator.open(asked.frames), answer)
    with pytest.raises(RemoteWireError) as refused:
        answer_rekey(COORDINATOR, KEYS["silo-00"], coordinator, coordinator.open(again.frames), answer)
    assert refused.value.reason == "unexpected"


def test_keys_are_due_after_their_messages_bytes_or_hours() -> None:
    silo, coordinator = pair()
    assert not rekey_due(silo, Wire(), 23 * 3600.0) and rekey_due(silo, Wire(), 24 * 3600.0)
    for _ in range(5):
        passes(silo, coordinator)
    assert rekey_due(silo, Wire(rekey_messages=6), 0.0) and not rekey_due(silo, Wire(rekey_messages=7), 0.0)
    assert rekey_due(silo, Wire(rekey_gigabytes=1e-7), 0.0)
    assert not rekey_due(silo, Wire(rekey_gigabytes=1e-5), 0.0)


@given(st.text(max_size=3000), st.sampled_from([HIDDEN, PADDED]))
@settings(max_examples=40, deadline=None)
def test_neither_names_nor_kind_nor_size_of_a_hidden_message_are_in_clear(text: str, options: Wire) -> None:
    silo, coordinator = pair(options)
    message = Message(header(silo, Kind.ERROR), (Error("failed", text),))
    size = silo.sealed_size(message)
    sealed = seal_message(silo, message)
    clear, body = map(bytes, sealed.frames)
    assert sealed.size == size == len(clear) + len(body)
    assert isinstance(decode_clear(clear), ShortHeader)
    assert not any(name.encode() in clear for name in (RUN, "silo-00", "coordinator", "error"))
    if options.padding:
        assert len(body) - TAG_BYTES == padded_size(len(body) - TAG_BYTES) >= LEAST_PADDED
    opened, _ = open_message(coordinator, sealed.frames)
    assert opened.header == sealed.header and opened.payloads[0].text == message.payloads[0].text


def test_padding_adds_at_most_a_quarter_and_few_sizes_remain() -> None:
    sizes = {0: 4096, 4096: 4096, 4097: 5120, 5121: 6144, 8192: 8192, 8193: 10240}
    assert {size: padded_size(size) for size in sizes} == sizes
    for size in (*range(4096, 70000, 97), 2**30 - 5, 2**30, 2**30 + 16):
        assert size <= padded_size(size) <= max(size * 1.25, 4096)
    assert len({padded_size(size) for size in range(1, 1 << 20, 64)}) == 1 + 4 * 8


def test_damaged_sealed_headers_and_padding_are_refused() -> None:
    silo, coordinator = pair(PADDED)
    body = b"".join(map(bytes, encode_body(beat(silo))))
    content = bytearray(coordinator.open(seal_message(silo, beat(silo)).frames).body)
    assert bytes(content) == body
    for damaged in (
        b"",
        b"\xff" * 64,
        bytes(12),
        (5).to_bytes(4, "little") + (2**60).to_bytes(8, "little") + bytes(99),
    ):
        with pytest.raises(RemoteWireError) as refused:
            split_content(memoryview(damaged))
        assert refused.value.reason == "malformed"
    whole = memoryview(bytes(4096))
    with pytest.raises(RemoteWireError):
        split_content(whole)


def test_an_unreadable_hidden_message_is_refused_with_its_header() -> None:
    silo, coordinator = pair(HIDDEN)
    sealed = silo.seal(header(silo, Kind.REPLY, reply_to=7), [b"no body"])
    with pytest.raises(UnreadableError) as refused:
        open_message(coordinator, sealed.frames)
    assert refused.value.header.reply_to == 7 and refused.value.reason == "malformed"


def test_faults_on_messages_need_names_in_clear(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"wire\.padding needs.*drop"):
        resolved(tiny, "wire.padding=true", 'faults=[{"kind": "drop", "silos": ["silo-00"]}]')


@pytest.mark.slow
def test_a_run_with_padding_and_many_new_keys_gives_the_same_model_and_a_clean_audit(
    tiny: Path, tmp_path: Path
) -> None:
    plain = threaded_run.run(resolved(tiny, "rounds=8"), tmp_path / "plain")
    scenario = resolved(tiny, "rounds=8", "wire.padding=true", "wire.rekey_messages=4")
    hidden = threaded_run.run(scenario, tmp_path / "hidden")
    assert plain.summary is not None and hidden.summary is not None
    assert hidden.summary.model_digest == plain.summary.model_digest
    assert hidden.summary.messages.refused == 0
    assert not audit_run(tmp_path / "hidden").findings
    records = [
        record
        for _, record in read_log(tmp_path / "hidden" / "messages" / "coordinator.jsonl")
        if isinstance(record, MessageRecord)
    ]
    agreed = [record for record in records if record.header.kind is Kind.REKEYED]
    assert len(agreed) >= 5
    assert len({record.header.session for record in records}) >= len(agreed) + 5
    others = [record.bytes for record in records if record.header.kind not in (Kind.TASK, Kind.REPLY, Kind.EVALUATE)]
    assert max(others) - min(others) < 10 and min(record.bytes for record in records) == min(others) > 4096
