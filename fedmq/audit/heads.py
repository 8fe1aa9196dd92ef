"""The heads of a run's message logs, noted in a file, and compared later."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic import Field

from fedmq.audit.findings import Cause, Finding
from fedmq.audit.log_checks import Audit
from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored, read_json
from fedmq.storage.regular_files import is_file
from fedmq.storage.run_folder import write_text

_differs = partial(Finding, Cause.NOTED)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ALLOWED = "a file of heads that `fedmq audit RUN --heads FILE` wrote, or the digest that it printed"


class Head(Stored):
    """The head of one log."""

    records: int = Field(ge=0)  # number of records
    head: str  # hash of the last one, computed from the records' content
    keys: list[Digest]  # fingerprints of the keys that the process signed with


class Heads(Stored):
    """The heads of all logs of a run."""

    run: str  # the run's name; empty if no log is signed
    heads: dict[str, Head]  # heads by process

    @property
    def text(self) -> str:
        """The content of a heads file."""
        return json.dumps(self.plain(), indent=2, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the file, a single digest for all logs."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def heads_of(audit: Audit) -> Heads:
    """The heads of the logs that were audited."""
    runs = [start.run for log in audit.signatures.values() for _, start in log.joined]
    logs = audit.signatures.items()
    heads = {
        process: Head(records=log.records, head=log.head, keys=list(log.fingerprints)) for process, log in sorted(logs)
    }
    return Heads(run=runs[0] if runs else "", heads=heads)


def write_heads(heads: Heads, path: Path) -> None:
    """Write a heads file.

    Raises:
        InputError: it cannot be written there.
        DiskError: the disk is full or broken.
    """
    write_text(path, heads.text)


def read_expected(expected: str) -> Heads | str:
    """What ``--expect`` names: a heads file, or a digest as it is.

    Raises:
        InputError: it is neither, or the file cannot be read.
    """
    if _DIGEST.fullmatch(expected):
        return expected
    if not is_file(Path(expected)):
        raise InputError("--expect", expected, _ALLOWED)
    return read_json(Path(expected), Heads, _ALLOWED)


def differences(noted: Heads | str, audit: Audit) -> Iterator[Finding]:
    """Compare logs with heads that were noted earlier. Records added since then do not count as a difference.

    Args:
        noted: all heads; their digest, which only the same logs without further records have; or the head of one log,
            which programs print at their end.
        audit: the audit of the logs.
    """
    present = heads_of(audit)
    if isinstance(noted, str):
        if present.digest != noted and not any(log.had(noted) for log in audit.signatures.values()):
            yield _differs("--expect", f"no log has this head, and the digest of all heads is {present.digest}")
        return
    for process, head in sorted(noted.heads.items()):
        log = audit.signatures.get(process)
        if log is None:
            yield _differs(f"{process}.jsonl", "no such log, although its head was noted")
        elif log.records < head.records:
            yield _differs(f"{process}.jsonl", f"has {log.records} records, but had {head.records} when noted")
        elif not log.had(head.head, head.records):
            yield _differs(f"{process}.jsonl", f"its first {head.records} records are not the noted ones")
    for process in sorted(present.heads.keys() - noted.heads.keys()):
        yield _differs(f"{process}.jsonl", "a log of which no head was noted")
