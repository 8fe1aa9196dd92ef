"""Messages for tests of keys, handshake and sessions, and a check that a session still works."""

from __future__ import annotations

from typing import Any

import pytest

from fedmq.errors import RemoteWireError
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Loss
from fedmq.wire.sessions import Session, open_message, seal_message

RUN = "run-1"
NAMES = ("coordinator", "evaluator", "silo-00", "silo-01")


def message(sequence: int = 1, **changes: Any) -> Message:
    values: dict[str, Any] = {
        "run": RUN,
        "kind": Kind.REPLY,
        "sender": "silo-00",
        "receiver": "coordinator",
        "sequence": sequence,
        "reply_to": 1,
        "sent_at": 2.0,
    }
    return Message(Header(**{**values, **changes}), (Loss(0.5),))


def reason(work: Any) -> str:
    with pytest.raises(RemoteWireError) as caught:
        work()
    return caught.value.reason


def flipped(raw: Any, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def assert_works(silo: Session, coordinator: Session) -> None:
    """Assert that both directions carry a message."""
    sealed = seal_message(silo, message(77))
    assert open_message(coordinator, sealed.frames)[0].header.sequence == 77
    back = seal_message(coordinator, message(78, sender="coordinator", receiver="silo-00"))
    assert open_message(silo, back.frames)[0].header.sequence == 78
