"""Forgeries of message logs by someone who knows their format, made on the JSON as record types refuse some of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedmq.wire.log_records import GENESIS, MessageRecord, RefusedRecord, canonical, chain, sealed
from fedmq.wire.messages import Header, Kind, Reason


def lines(run: Path, process: str) -> list[str]:
    return (run / "messages" / f"{process}.jsonl").read_text().splitlines()


def rewrite(run: Path, process: str, content: Iterable[str]) -> None:
    (run / "messages" / f"{process}.jsonl").write_text("".join(line + "\n" for line in content))


def reseal(content: Iterable[str]) -> list[str]:
    """A new chain over the edited records."""
    head, result = GENESIS, []
    for number, line in enumerate(content):
        record = {**json.loads(line), "n": number, "previous": head}
        del record["hash"]
        record["hash"] = head = chain(head, record)
        result.append(canonical(record).decode())
    return result


def forge(run: Path, process: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the records of a log, drop those that become None, and recompute the chain."""
    changed = (change(json.loads(line)) for line in lines(run, process))
    rewrite(run, process, reseal(json.dumps(record) for record in changed if record is not None))


#: The fields that every record has, with the values of a log's first record.
_FIRST = {"n": 0, "process": "coordinator", "wall": "2026-01-01T00:00:00.000+00:00", "previous": GENESIS}


def refused_record(peer: str, reason: Reason, *, frames: int) -> RefusedRecord:
    """The coordinator's record of a refusal of frames with these sizes [bytes]."""
    return sealed(RefusedRecord, **_FIRST, action="refused", peer=peer, reason=reason, detail="forged", bytes=frames)


def message_record(
    sender: str, *payloads: tuple[str, int, str], kind: Kind = Kind.REPLY, counter: int = 1, frames: int = 100
) -> MessageRecord:
    """The record of a message that a process sent.

    Args:
        sender: sender of the message; the receiver is the coordinator, or silo-00 if the coordinator sends.
        payloads: kind, bytes of tensors, and a stand-in for the content of each.
        kind: of message.
        counter: of the frame in its session.
        frames: bytes of all its frames.
    """
    header = Header(
        run="run-0",
        kind=kind,
        sender=sender,
        receiver="silo-00" if sender == "coordinator" else "coordinator",
        sequence=1,
        sent_at=0.0,
        reply_to=1,
        session=b"s" * 16,
        counter=counter,
    )
    return sealed(
        MessageRecord,
        **{**_FIRST, "process": sender},
        action="sent",
        header=header,
        payloads=[(name, size) for name, size, _ in payloads],
        digests=[hashlib.sha256(content.encode()).hexdigest() for _, _, content in payloads],
        bytes=frames,
        tag="0" * 32,
    )
