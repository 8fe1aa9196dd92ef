"""Message logs of a silo and of the coordinator after a run with one reply."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmq.audit import policy
from fedmq.audit.log_checks import audit_run
from fedmq.clock import WallClock
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta


def message(counter: int, sender: str = "silo-00", receiver: str = "coordinator") -> Message:
    header = Header(
        run="r",
        kind=Kind.REPLY,
        sender=sender,
        receiver=receiver,
        sequence=counter,
        reply_to=counter,
        sent_at=1.5,
        session=b"s" * 16,
        counter=counter,
    )
    return Message(header, (Delta("0" * 64, np.zeros(5, np.float32), 3),))


def two_logs(tmp_path: Path) -> Path:
    """A silo sends three messages after its ready; the coordinator logs receiving them."""
    with MessageLog(tmp_path / "messages" / "silo-00.jsonl", "silo-00", WallClock()) as log:
        for counter in range(1, 4):
            log.message("sent", message(counter), f"{counter:032x}", 100)
    with MessageLog(tmp_path / "messages" / "coordinator.jsonl", "coordinator", WallClock()) as log:
        for counter in range(1, 4):
            log.message("received", message(counter), f"{counter:032x}", 100)
        log.refused("silo-00", "replay", "message 0", 100)
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def held(run: Path, text: str) -> policy.PolicyResult:
    path = written(run, text)
    return policy.check_policy(audit_run(run), policy.read_policy(path), path)
