"""Forgeries of message logs by someone who knows their format, made on the JSON as record types refuse some of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedmq.storage.run_folder import write_json
from fedmq.wire.log_records import GENESIS, MessageRecord, RefusedRecord, canonical, chain, sealed, signed_statement
from fedmq.wire.messages import Kind, Reason
from tests.wire_examples import header


def lines(run: Path, process: str) -> list[str]:
    return (run / "messages" / f"{process}.jsonl").read_text().splitlines()


def rewrite(run: Path, process: str, content: Iterable[str]) -> None:
    (run / "messages" / f"{process}.jsonl").write_text("".join(line + "\n" for line in content))


def reseal(content: Iterable[str]) -> list[str]:
    """A new chain over the edited records; their causes keep naming the same records."""
    head, result, moved = GENESIS, [], dict[int | None, int]()
    for number, line in enumerate(content):
        record = {**json.loads(line), "previous": head}
        moved.setdefault(record["n"], number)
        if "caused_by" in record:
            record["caused_by"] = moved.get(record["caused_by"])
        del record["hash"]
        record["n"] = number
        record["hash"] = head = chain(head, record)
        result.append(canonical(record).decode())
    return result


def forge(run: Path, process: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change the records of a log, drop those that become None, and recompute the chain."""
    changed = (change(json.loads(line)) for line in lines(run, process))
    rewrite(run, process, reseal(json.dumps(record) for record in changed if record is not None))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    write_json(path, content)


def edit_metrics(run: Path, kind: str, change: Callable[[dict[str, Any]], object] | None, *versions: int) -> None:
    """Change the lines of a kind in ``metrics.jsonl``, of these versions or of all; without a change they go."""
    content = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in [line for line in content if line["kind"] == kind and (not versions or line["version"] in versions)]:
        if change is None:
            content.remove(line)
        else:
            change(line)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))


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
    receiver = "silo-00" if sender == "coordinator" else "coordinator"
    ends = {"run": "run-0", "kind": kind, "sender": sender, "receiver": receiver}
    return sealed(
        MessageRecord,
        **{**_FIRST, "process": sender},
        action="sent",
        header=header(**ends, sequence=1, reply_to=1, session=b"s" * 16, counter=counter),
        payloads=[(name, size) for name, size, _ in payloads],
        digests=[hashlib.sha256(content.encode()).hexdigest() for _, _, content in payloads],
        bytes=frames,
        tag="0" * 32,
    )


def rebuild(run: Path, keys: Mapping[str, Ed25519PrivateKey | None]) -> None:
    """Rewrite the logs of some processes, with the chains, heads and signatures that their keys allow.

    A received message gets its sender's new head if the sender's log is rewritten as well, so that a forger with all
    keys leaves no trace.

    Args:
        run: the run folder, whose logs were changed.
        keys: private keys by process; they also replace the keys in the records of starts. None leaves the key and the
            signatures of a process as they are.
    """
    todo = {process: [json.loads(line) for line in lines(run, process)] for process in keys}
    done: dict[str, list[str]] = {process: [] for process in keys}
    heads, names, sent = dict.fromkeys(keys, GENESIS), dict[str, str](), dict[tuple[str, str, int], str]()
    moved = dict[str, str]()  # hashes of records before and after
    publics = {process: key.public_key().public_bytes_raw().hex() for process, key in keys.items() if key}
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        for process, records in todo.items():
            while records:
                record = records[0]
                frame = (str(record.get("sender")), str(record.get("session")), int(record.get("counter", 0)))
                if record["action"] == "received" and record.get("sender") in keys and "head" in record:
                    if frame not in sent:
                        break  # its sender's log has to be rewritten up to there first
                    record["head"] = sent[frame]
                if record["action"] == "sent" and "head" in record:
                    # Another thread may have logged something between the sealing of the message and its record.
                    record["head"] = sent[frame] = moved.get(record["head"], heads[process])
                if record["action"] == "start":
                    names[process], record["key"] = record["run"], publics.get(process, record["key"])
                    record["peers"] = {name: publics.get(name, key) for name, key in record["peers"].items()}
                record |= {"n": len(done[process]), "previous": heads[process]}
                if record["action"] == "signed" and (key := keys[process]) is not None:
                    statement = signed_statement(names[process], record)
                    record["signature"] = key.sign(statement).hex()
                was = record.pop("hash")
                record["hash"] = heads[process] = moved[was] = chain(heads[process], record)
                done[process].append(canonical(record).decode())
                records.pop(0)
        assert sum(map(len, todo.values())) < before, "a message was received before it was sent"
    for process, content in done.items():
        rewrite(run, process, content)
