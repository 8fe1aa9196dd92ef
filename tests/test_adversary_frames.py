"""Frames of strangers, and damaged, replayed or captured frames of a real silo, in whole runs over memory://."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coordinator.rounds import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.federation.population import run_name
from fedmq.wire.codec import decode_header, encode_header
from fedmq.wire.handshake import initiate
from fedmq.wire.keys import init_keys, load_identity
from fedmq.wire.log_records import RefusedRecord
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta
from fedmq.wire.sessions import seal_message
from fedmq.wire.transports import memory, registry
from fedmq.wire.transports.base import Connection, Listener, Transport
from fedmq.wire.transports.registry import connect
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.log_causes import records
from tests.threaded_run import hold, joined, resolved, run, run_of
from tests.waiting import PATIENCE, wait_for


def stranger(scenario: Scenario, tried: list[str]) -> Callable[[str, Path], None]:
    """A peer that knows the protocol and all names but has a self-made key."""

    def knock(uri: str, keys: Path) -> None:
        own = keys.parent / "strange-keys"
        init_keys(own, ("silo-00",))
        connection = connect(uri)
        hello, _ = initiate(load_identity(own, "silo-00"), "coordinator", run_name(scenario), 0.0)
        connection.send(hello)
        tried.append("sent")
        frames = connection.receive(PATIENCE)
        assert frames is not None
        tried.append(str(decode_header(frames[0]).kind))
        connection.close()

    return knock


@pytest.mark.slow
def test_a_silo_with_an_unknown_key_never_joins(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, tried = resolved(tiny), list[str]()
    hold(monkeypatch, lambda: len(tried) == 2)
    outcome = run(scenario, tmp_path, others=[stranger(scenario, tried)])
    assert outcome.phase is Phase.DONE
    assert tried == ["sent", "reject"], "a stranger learns that its key is not accepted, and no more"
    assert audit_run(tmp_path).refused["coordinator"]["bad_signature"] >= 1


def reasons_of_refusals(out: Path) -> set[str]:
    """Why a run's coordinator has refused messages so far."""
    return {record.reason for record in records(out) if isinstance(record, RefusedRecord)}


def hostile(scenario: Scenario, done: list[str]) -> Callable[[str, Path], None]:
    """A peer that sends noise, a hello of another run and a hello under an unknown name."""

    def attack(uri: str, keys: Path) -> None:
        connection = connect(uri)
        noise = np.random.default_rng(0)
        for size in (1, 10, 300):
            connection.send((noise.bytes(size), noise.bytes(size)))
        hello, _ = initiate(load_identity(keys, "silo-01"), "coordinator", "another-run", 0.0)
        connection.send(hello)
        header = Header(
            run=run_name(scenario), kind=Kind.HELLO, sender="silo-09", receiver="coordinator", sequence=0, sent_at=0.0
        )
        connection.send((encode_header(header), b"\x80"))
        wait_for(lambda: {"wrong_run", "unknown_sender"} <= reasons_of_refusals(keys.parent))
        connection.close()
        done.append("sent")

    return attack


@pytest.mark.slow
def test_noise_other_runs_and_unknown_names_are_refused_counted_and_logged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, done = resolved(tiny), list[str]()
    undisturbed = run(scenario, tmp_path / "undisturbed")
    hold(monkeypatch, lambda: done)
    outcome = run(scenario, tmp_path / "attacked", others=[hostile(scenario, done)])
    assert done == ["sent"]
    assert outcome.summary.model_digest == undisturbed.summary.model_digest
    refused = audit_run(tmp_path / "attacked").refused["coordinator"]
    assert refused["malformed"] >= 3
    assert refused["wrong_run"] == 1
    assert refused["unknown_sender"] == 1
    assert outcome.summary.messages.refused == refused.total()


@pytest.mark.slow
def test_replayed_reordered_and_damaged_frames_of_a_real_silo_are_refused_and_the_run_completes(
    tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny)
    reasons: list[str] = []

    def silo(uri: str, keys: Path) -> None:
        """Join as silo-00, misbehave and leave; then the honest silo-00 takes its place."""
        connection, session, beat = joined(scenario, uri, keys)
        first = seal_message(session, Message(beat))
        connection.send(first.frames)
        connection.send(first.frames)  # replayed
        second = seal_message(session, Message(beat))
        damaged = bytearray(second.frames[1])
        damaged[0] ^= 1
        connection.send((second.frames[0], bytes(damaged)))  # one bit flipped
        clear = first.frames[0]
        connection.send((clear, b"\0" * 3))  # truncated below its tag
        connection.send((clear, bytes((1 << 26) + 17)))  # oversized
        connection.send((bytes(clear).replace(session.session, b"f" * 16), first.frames[1]))  # of an unknown session
        kept = seal_message(session, Message(beat))
        connection.send(kept.frames)  # a gap: the damaged message was not counted
        wait_for(lambda: "gap" in reasons_of_refusals(tmp_path))
        connection.close()
        reasons.append("done")
        run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, tmp_path))

    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[silo])
    assert outcome.phase is Phase.DONE
    assert reasons == ["done"]
    refused = audit_run(tmp_path).refused["coordinator"]
    assert refused["replay"] == 1
    assert refused["tampered"] == 1
    assert refused["malformed"] == 1
    assert refused["oversized"] == 1
    assert refused["unknown_session"] == 1
    assert refused["gap"] == 1


def tapped(captured: list[bytes]) -> Transport:
    """``tapped://NAME``: memory://NAME, of which every frame sent is also appended to a list."""

    def end(opened: Any) -> Any:
        send = opened.send

        def tap(*arguments: Any, **options: Any) -> bool:
            captured.extend(bytes(frame) for frame in next(each for each in arguments if not isinstance(each, bytes)))
            return bool(send(*arguments, **options))

        opened.send = tap
        return opened

    def listen(uri: str, max_frame: int, queue: int) -> Listener:
        listener: Listener = end(memory.TRANSPORT.listen(uri.replace("tapped", "memory"), max_frame, queue))
        listener.uri = uri
        return listener

    def dial(uri: str, max_frame: int, queue: int) -> Connection:
        connection: Connection = end(memory.TRANSPORT.connect(uri.replace("tapped", "memory"), max_frame, queue))
        return connection

    return Transport("tapped://NAME", lambda *_: None, listen, dial)


def test_captured_frames_contain_no_tensor_data_and_no_field_names(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[bytes] = []
    monkeypatch.setattr(registry, "TRANSPORTS", {**registry.TRANSPORTS, "tapped": tapped(captured)})
    run(resolved(tiny, "rounds=2"), tmp_path, scheme="tapped")
    wire = b"".join(captured)
    assert len(wire) > 100_000
    released = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in released.items():
        if not bool(torch.any(tensor)):
            continue
        raw = tensor.numpy().tobytes()
        assert raw[:16] not in wire, name
    assert b"layout_digest" not in wire  # nor the names of fields and payload kinds
    assert Delta.KIND.encode() not in wire
