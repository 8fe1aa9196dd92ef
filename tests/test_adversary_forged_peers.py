"""Peers with a valid key that forge replies or handshakes, and private keys with unsafe file permissions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.round_events import PendingTask
from coordinator.run_context import CostModel, RunContext
from coordinator.updates import validated
from fedmq.config.sections import Cost
from fedmq.errors import RemoteWireError
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import handshake
from fedmq.wire.codec import decode_header, unpack
from fedmq.wire.handshake import WELCOME_LABEL, complete, initiate, respond
from fedmq.wire.keys import Identity
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved

TASK = PendingTask(sequence=4, base_version=3, round=3)
Change = Callable[[Message], Message]


def header(**facts: object) -> Change:
    return lambda message: replace(message, header=replace(message.header, **facts))  # type: ignore[arg-type]


def update(**facts: object) -> Change:
    def changed(message: Message) -> Message:
        payloads = (replace(p, **facts) if isinstance(p, Delta) else p for p in message.payloads)  # type: ignore[arg-type]
        return replace(message, payloads=tuple(payloads))

    return changed


@pytest.fixture(scope="module")
def run() -> SmallFederation:
    return population("fedavg", kinds=((True, True),) * 2)


def validate_changed(tiny: Path, run: SmallFederation, change: Change, pending_task: PendingTask | None = TASK) -> None:
    (reply,) = run.replies(run.eligible[:1])
    cost = CostModel(Cost(), 0, ("silo-00", "silo-01"), 1, 1, 1)
    scenario = resolved(tiny, "protocol=fedavg")
    run_context = RunContext(scenario, run.protocol, run.context, (11, 9), cost, RunFolder(tiny.parent))
    facts = {"run": "run-0", "kind": Kind.REPLY, "sender": "silo-00", "receiver": "coordinator", "sent_at": 0.0}
    honest = Header(**facts, sequence=4, reply_to=4, base_version=3)  # type: ignore[arg-type]
    validated(change(Message(honest, reply.payloads)), run_context, reply.silo, pending_task)


FORGED = {
    "fresher than it is": (header(base_version=4), "unexpected", "base version 4, the task had 3"),
    "staler than it is": (header(base_version=0), "unexpected", "base version 0, the task had 3"),
    "an update of no samples": (update(n_samples=0), "malformed", "of no samples"),
    "more samples than it has": (update(n_samples=12), "malformed", "12 samples, the silo has 11"),
    "another layout": (update(layout_digest="0" * 64), "layout", "another layout"),
    "too few numbers": (update(buffer=np.ones(3, np.float32)), "layout", "of 3 numbers"),
}


@pytest.mark.parametrize(("change", "reason", "detail"), FORGED.values(), ids=FORGED.keys())
def test_a_forged_reply_is_refused(tiny: Path, run: SmallFederation, change: Change, reason: str, detail: str) -> None:
    validate_changed(tiny, run, header())
    validate_changed(tiny, run, update(n_samples=1))
    validate_changed(tiny, run, update(n_samples=11))
    with pytest.raises(RemoteWireError, match=detail) as refused:
        validate_changed(tiny, run, change)
    assert refused.value.reason == reason


@pytest.mark.parametrize("pending_task", [None, replace(TASK, sequence=5)])
def test_the_base_version_of_a_reply_to_a_finished_task_is_not_checked(
    tiny: Path, run: SmallFederation, pending_task: PendingTask | None
) -> None:
    validate_changed(tiny, run, header(base_version=9), pending_task)  # the rounds machine discards it as a duplicate


# ---------------------------------------------------------------------------------------------------------- handshake
@pytest.mark.parametrize("answers", [None, 1])
def test_a_signed_welcome_that_answers_another_hello_is_refused(answers: int | None) -> None:
    silo, coordinator = (Identity(name, Ed25519PrivateKey.generate()) for name in ("silo-00", "coordinator"))
    keys = {each.name: each.key.public_key() for each in (silo, coordinator)}
    hello, initiated = initiate(silo, "coordinator", "run-0", 0.0)
    welcome, _ = respond(coordinator, keys, "run-0", hello, 0.0)
    complete(initiated, keys, welcome, 0.0)
    digest = handshake.transcript_digest(*hello)
    body = bytes(handshake._verified(keys["coordinator"], WELCOME_LABEL, digest, welcome))
    fields = unpack(body, handshake.MAX_HANDSHAKE_BODY)
    assert isinstance(fields, dict)
    forged = replace(decode_header(welcome[0]), reply_to=answers)
    frames = handshake._signed(coordinator, WELCOME_LABEL, digest, forged, fields)
    with pytest.raises(RemoteWireError, match="another hello") as refused:
        complete(initiated, keys, frames, 0.0)
    assert refused.value.reason == "unexpected"
