"""Signed message logs of a silo and of the coordinator after a run with three replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmq.audit import policy
from fedmq.audit.log_checks import audit_run
from fedmq.clock import WallClock
from fedmq.wire.keys import Identity
from fedmq.wire.message_log import MessageLog, StartFacts
from fedmq.wire.messages import Message
from fedmq.wire.payloads import Delta
from tests.wire_examples import header

NAMES = ("coordinator", "silo-00", "silo-01", "silo-02", "silo-03")
KEYS = {name: Ed25519PrivateKey.from_private_bytes(bytes([number] * 32)) for number, name in enumerate(NAMES)}
FACTS = StartFacts("r", "0" * 64, "rcsr", {"clip_norm": None}, "d")


def message(counter: int, sender: str = "silo-00", receiver: str = "coordinator") -> Message:
    numbers = {"sequence": counter, "reply_to": counter, "counter": counter}
    sent = header(run="r", sender=sender, receiver=receiver, session=b"s" * 16, **numbers)
    return Message(sent, (Delta("0" * 64, np.zeros(5, np.float32), 3),))


@contextmanager
def log_of(run: Path, process: str) -> Iterator[MessageLog]:
    """The log of a process that starts, or starts again."""
    with MessageLog(run / "messages" / f"{process}.jsonl", process, WallClock()) as log:
        log.start(Identity(process, KEYS[process]), {name: key.public_key() for name, key in KEYS.items()}, FACTS)
        yield log


def exchange(sender: MessageLog, receiver: MessageLog | None, each: Message) -> None:
    """Log a message at both ends, or at that of its sender alone if it got lost."""
    sealed, tag = replace(each, head=sender.sent_head), f"{each.header.counter:032x}"
    sender.message("sent", sealed, tag, 100)
    if receiver is not None:
        receiver.message("received", sealed, tag, 100)


def two_logs(run: Path) -> Path:
    """A silo sends three messages after its ready; the coordinator logs receiving them.

    In each log they are lines 3 to 5, after the start and its signature.
    """
    with log_of(run, "silo-00") as silo, log_of(run, "coordinator") as coordinator:
        for counter in range(1, 4):
            exchange(silo, coordinator, message(counter))
        coordinator.refused("silo-00", "replay", "message 0", 100)
    return run


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def held(run: Path, text: str) -> policy.PolicyResult:
    path = written(run, text)
    return policy.check_policy(audit_run(run), policy.read_policy(path), path)
