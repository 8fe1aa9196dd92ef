"""Check the signatures in message logs, what each process declared at its start, and an auditor's keys and noted heads.

A process signs the head of its log with its Ed25519 key (:mod:`fedmq.wire.message_log`). The records before a signature
cannot be changed without that key. Each message also carries its sender's head to the receiver, so that a sender
cannot change its own log later without the receiver's key. Both ends of a message are compared in
:mod:`fedmq.audit.log_checks`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from pydantic import Field

from fedmq.audit.events import Start
from fedmq.audit.findings import Cause, Finding
from fedmq.audit.run_checks import RunFiles
from fedmq.config.run_id import digest_of
from fedmq.errors import InputError
from fedmq.storage.json_files import Digest, Stored, read_json
from fedmq.storage.regular_files import is_file
from fedmq.text import counted
from fedmq.wire.key_requests import known_keys
from fedmq.wire.keys import former_keys, public_key_of
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import (
    GENESIS,
    LogRecord,
    MessageRecord,
    NoteRecord,
    SignatureRecord,
    SignedAt,
    StartRecord,
    signed_statement,
)
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.sessions import REKEY_KINDS

#: Partition in which every silo has its own data.
_OWN_DATA = "own"


@dataclass
class SignedLog:
    """The signatures of one log."""

    # What the process declared at its starts, with places.
    starts: list[tuple[str, StartRecord]] = field(default_factory=list)
    records: int = 0  # number of records
    head: str = ""  # hash of the last record, computed from the content of all records
    first: str = ""  # date and time of the first record
    last: str = ""  # date and time of the last record
    # Valid signatures: number of records up to and including it, its key (hex) and its occasion.
    valid: list[tuple[int, str, SignedAt]] = field(default_factory=list)
    # The keys (hex) of the run that sign this log; the others are of refused starts, or a forger's.
    trusted: frozenset[str] = frozenset()
    invalid: list[str] = field(default_factory=list)  # places of invalid signatures
    # Places of messages without their sender's head, since the first start.
    headless: list[str] = field(default_factory=list)
    # Position, peer and public key (hex) of what the process accepted after a start.
    accepted_later: list[tuple[int, str, str]] = field(default_factory=list)
    # Hashes of all records so far, as the log states them, with their positions.
    hashes: dict[str, int] = field(default_factory=dict)
    aside: frozenset[str] = frozenset()  # places of declared starts that were refused before the process joined
    # Number of records before the first one that does not follow or was changed; None in an intact log.
    broken: int | None = None
    # Number of last records that only note a start, as of a process that ended before it declared anything.
    idle: int = 0

    def add(self, record: LogRecord) -> None:
        """Add the hash of the next record."""
        self.hashes.setdefault(record.hash, self.records)
        # From a changed record on, the stated hashes are not those of the content.
        self.head = record.hash_after(self.head or GENESIS)
        if self.broken is None and self.head != record.hash:
            self.broken = self.records
        self.records += 1
        begins = isinstance(record, NoteRecord) and record.event in (LogEvent.STARTED, LogEvent.RESUMED)
        self.idle = self.idle + 1 if begins else 0
        self.first, self.last = self.first or record.wall, record.wall

    def had(self, head: str, records: int | None = None) -> bool:
        """Whether this was the log's head, after that number of records if it is given, and all of them are intact."""
        place = self.hashes.get(head)
        if place is None or (self.broken is not None and place >= self.broken):
            return False
        return records in (None, place + 1)

    @property
    def joined(self) -> list[tuple[str, StartRecord]]:
        """The starts that were not refused."""
        return [(place, start) for place, start in self.starts if place not in self.aside]

    @property
    def keys(self) -> tuple[str, ...]:
        """The public keys (hex) that the process declared, in order, each once."""
        return tuple(dict.fromkeys(start.key for _, start in self.starts))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of :attr:`keys`, as ``fedmq keys show`` prints them."""
        return tuple(hashlib.sha256(bytes.fromhex(key)).hexdigest() for key in self.keys)

    @property
    def _last(self) -> tuple[int, SignedAt | None]:
        """Number of records up to and including the last valid signature with a key of the run, and its occasion."""
        valid = ((count, at) for count, key, at in reversed(self.valid) if key in self.trusted)
        return next(valid, (0, None))

    @property
    def signed(self) -> int:
        """Number of records up to and including the last valid signature with a key of the run."""
        return self._last[0]

    @property
    def ended(self) -> bool:
        """Whether the process signed the end of its log and, with a key of the run, nothing after it."""
        return self._last[1] is SignedAt.END

    @property
    def counted(self) -> int:
        """Number of records that count: up to the signed end, or all of a log without one."""
        return self.signed if self.ended else self.records

    @property
    def unsigned(self) -> int:
        """Number of records after the last valid signature."""
        return self.records - self.signed


class SignatureChecks:
    """Collects signatures and declarations while logs are read, and compares them at the end."""

    def __init__(self) -> None:
        self.logs: dict[str, SignedLog] = {}  # signatures by process
        self.found: list[Finding] = []  # discrepancies so far

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add the next record of a process's log."""
        log = self.logs.setdefault(process, SignedLog())
        match record:
            case StartRecord():
                log.starts.append((place, record))
            case SignatureRecord():
                self._verify(process, place, record, log)
            case NoteRecord(event=LogEvent.KEY_ACCEPTED):
                log.accepted_later.append((log.records, str(record.facts.get("peer")), str(record.facts.get("key"))))
            case MessageRecord() if log.starts:
                if record.header.kind in REKEY_KINDS:
                    pass  # they hold keys alone
                elif record.head is None:
                    log.headless.append(place)
                elif record.action == "sent" and record.head not in log.hashes:
                    what = f"carries a head that {process}'s log did not have when the message was sent"
                    self.found.append(Finding(Cause.SIGNATURE, place, what))
        log.add(record)

    def settle(self, aside: Collection[Start]) -> None:
        """Find which keys are the run's, once all logs have been read.

        A peer's word decides, if there is one: the coordinator accepts the keys of all, and they accept the
        coordinator's. ``aside`` are the starts that were refused before the process joined.
        """
        for process, log in self.logs.items():
            log.aside = frozenset(start.declared_at for start in aside if start.process == process)
            log.trusted = frozenset(start.key for _, start in log.joined) or frozenset(log.keys)
        for process, log in sorted(self.logs.items(), key=lambda item: item[0] != COORDINATOR):
            accepted = self._accepted()
            others = (COORDINATOR,) if process != COORDINATOR else tuple(self.logs.keys() - {COORDINATOR})
            log.trusted = log.trusted & {key for name in others for key in accepted[name, process]} or log.trusted

    def _verify(self, process: str, place: str, record: SignatureRecord, log: SignedLog) -> None:
        if not log.starts:
            what = f"a signature of {process}, which did not declare a key before"
            self.found.append(Finding(Cause.SIGNATURE, place, what))
            log.invalid.append(place)
            return
        start = log.starts[-1][1]
        try:
            key = public_key_of(bytes.fromhex(start.key))
            key.verify(bytes.fromhex(record.signature), signed_statement(start.run, record.plain()))
        except (InvalidSignature, ValueError):
            log.invalid.append(place)
        else:
            log.valid.append((log.records + 1, start.key, record.at))

    def compare(
        self,
        files: RunFiles,
        released: object,
        accepted: Mapping[str, Set[str]] | None,
        *,
        ended: Collection[str],
        inline: bool,
    ) -> Iterator[Finding]:
        """Compare all logs; call once after :meth:`settle`.

        Args:
            files: the files of the run folder.
            released: data digest in the coordinator's note of what it released, if any.
            accepted: the processes' public keys (hex) by name, if the auditor knows them.
            ended: processes that must have signed the end of their logs.
            inline: the run exchanged no messages, and its processes had no keys.
        """
        yield from self.found
        if accepted is not None:
            yield from self._other_keys(accepted)
        if inline:
            return
        for process, log in self.logs.items():
            if not log.starts:
                yield Finding(Cause.SIGNATURE, f"{process}.jsonl", "is not signed")
            if log.invalid:
                more = f"; {len(log.invalid) - 1} later signatures do not match either" if len(log.invalid) > 1 else ""
                yield Finding(Cause.SIGNATURE, log.invalid[0], f"the log up to here is not what {process} signed{more}")
            if log.headless:
                count = f", and {len(log.headless) - 1} more such messages" if len(log.headless) > 1 else ""
                yield Finding(
                    Cause.SIGNATURE, log.headless[0], f"a message without the head of its sender's log{count}"
                )
            yield from self._end(process, log, required=process in ended)
        yield from self._keys()
        yield from self._declarations(files, released)

    def _end(self, process: str, log: SignedLog, *, required: bool) -> Iterator[Finding]:
        """Find records after the signed end of a log, a log that lacks it, and another key after the run's last one."""
        place, more = f"{process}.jsonl", counted(log.unsigned, "record")
        if log.ended and log.unsigned > log.idle:
            yield Finding(Cause.SIGNATURE, place, f"{more} after its signed end: they were added, and do not count")
        elif log.joined and any(start.n >= log.signed and start.key not in log.trusted for _, start in log.starts):
            yield Finding(Cause.KEY, place, f"the last {more} follow a start with a key that is not of the run")
        if required and log.starts and not log.ended:
            what = "lacks its signed end, though the run is finished: records were cut off, or the process was killed"
            yield Finding(Cause.SIGNATURE, place, what)

    def _other_keys(self, accepted: Mapping[str, Set[str]]) -> Iterator[Finding]:
        """Compare the declared keys with those that the auditor knows."""
        for process, log in self.logs.items():
            expected = accepted.get(process)
            if not expected:
                continue  # not a difference: the verdict names these logs
            for place, start in log.starts:
                if start.key not in expected:
                    what = f"signed with another key than that of {process} that was given"
                    yield Finding(Cause.KEY, place, what)

    def _accepted(self) -> dict[tuple[str, str], set[str]]:
        """The public keys (hex) that each process accepts of each peer, at its starts and later."""
        known: dict[tuple[str, str], set[str]] = defaultdict(set)
        for process, log in self.logs.items():
            starts = [start for _, start in log.joined if start.key in log.trusted]
            declared = [pair for start in starts for pair in start.peers.items()]
            later = [(peer, key) for n, peer, key in log.accepted_later if n < log.counted]
            for peer, key in (*declared, *later):
                known[process, peer].add(key)
        return known

    def _keys(self) -> Iterator[Finding]:
        """Compare the keys that processes declare with those that their peers accept."""
        holders: dict[str, str] = {}
        for process, log in self.logs.items():
            for place, start in log.joined:
                if holders.setdefault(start.key, process) != process:
                    yield Finding(Cause.KEY, place, f"{process} signs with the key of {holders[start.key]}")
        known = self._accepted()
        for process, log in self.logs.items():
            for place, start in log.starts:
                # Silos have keys of the coordinator, the coordinator has keys of all.
                others = (COORDINATOR,) if process != COORDINATOR else ()
                if process == COORDINATOR and start.key not in log.trusted:
                    yield Finding(Cause.KEY, place, f"no process accepted the key that {process} signs with")
                for other in others:
                    if self._starts(other) and start.key not in known[other, process]:
                        yield Finding(Cause.KEY, place, f"{other} did not accept the key that {process} signs with")
                if process != COORDINATOR and self._starts(COORDINATOR):
                    missing = known[process, COORDINATOR] - set(self.logs[COORDINATOR].keys)
                    if missing or not known[process, COORDINATOR]:
                        yield Finding(
                            Cause.KEY, place, f"{process} accepted another key of {COORDINATOR} than it signs with"
                        )

    def _starts(self, process: str) -> bool:
        return process in self.logs and bool(self.logs[process].starts)

    def _declarations(self, files: RunFiles, released: object) -> Iterator[Finding]:
        """Compare what processes declared at their starts with each other and with the run folder."""
        expected, partition = dict[str, object](), None
        if (plain := files.scenario) is not None:
            expected = {"scenario": digest_of(plain), "protocol": files.protocol, "privacy": plain.get("privacy")}
            partition = plain.get("partition")
        own_data = isinstance(partition, dict) and partition.get("kind") == _OWN_DATA
        data = None if own_data else released
        for log in self.logs.values():
            for place, start in log.starts:
                for name, value in expected.items():
                    if getattr(start, name) != value:
                        yield Finding(
                            Cause.DECLARED, place, f"declares and signs another {name} than scenario.yaml has"
                        )
                if not own_data:
                    data = start.data if data is None else data
                    if start.data != data:
                        yield Finding(Cause.DECLARED, place, "declares and signs other data than the run's")


def ends_to_change(logs: Mapping[str, SignedLog], received: Iterable[MessageRecord]) -> dict[str, int]:
    """Number of last records that could be changed without the keys of all processes, of each log that has some.

    A record of the coordinator is anchored in the logs of all peers that received a later head; a record of another
    process in the coordinator's log, and through it in the logs of all other peers.
    """
    if COORDINATOR not in logs:
        return {name: log.records for name, log in sorted(logs.items())}
    known = dict.fromkeys(logs.keys() - {COORDINATOR}, 0)  # records of the coordinator before a head
    heads: dict[str, list[tuple[int, int]]] = {name: [] for name in known}
    for record in received:
        sender, receiver = record.header.sender, record.header.receiver
        place = logs[sender].hashes.get(record.head or "") if sender in logs else None
        if place is None or receiver not in logs or record.n >= logs[receiver].signed:
            continue
        if sender == COORDINATOR:
            known[receiver] = max(known[receiver], place + 1)
        elif receiver == COORDINATOR:
            heads[sender].append((place + 1, record.n))
    anchored = {COORDINATOR: min(known.values(), default=0)}
    for name, held in heads.items():
        others = min((count for other, count in known.items() if other != name), default=logs[COORDINATOR].records)
        anchored[name] = max((count for count, n in held if n < others), default=0)
    ends = {name: log.records - anchored[name] for name, log in sorted(logs.items())}
    return {name: count for name, count in ends.items() if count}


@dataclass(frozen=True)
class KnownKeys:
    """Public keys by the name of their process, each as 64 hexadecimal digits."""

    all: Mapping[str, frozenset[str]]  # accepted and former keys, and those of the folder's own processes
    former: Mapping[str, frozenset[str]]  # keys that were accepted before they were replaced or removed

    @classmethod
    def load(cls, directory: Path) -> KnownKeys:
        """Read a folder of keys; a process that made its own key there, as the coordinator does, is known by it.

        Raises:
            InputError: the folder has no keys, or a file is damaged.
        """
        known = {name: frozenset({key.public_bytes_raw().hex()}) for name, key in known_keys(directory).items()}
        former = {
            name: frozenset(key.public_bytes_raw().hex() for key in keys) - known.get(name, frozenset())
            for name, keys in former_keys(directory).items()
        }
        return cls(
            {name: known.get(name, frozenset()) | former.get(name, frozenset()) for name in known | former}, former
        )

    def require_any(self, logs: Collection[str], directory: object) -> None:
        """Refuse a folder that has no key of any of the processes.

        Raises:
            InputError: see above.
        """
        if not self.all.keys() & set(logs):
            wanted = "a folder with public keys of the run's processes"
            raise InputError(str(directory), f"no key of any of {', '.join(sorted(logs))}", wanted)

    def signed_with_former(self, logs: Mapping[str, SignedLog]) -> tuple[str, ...]:
        """Processes whose logs are signed, at least in part, with a key that is no longer accepted, sorted."""
        return tuple(sorted(name for name, log in logs.items() if self.former.get(name, frozenset()) & {*log.keys}))


# ------------------------------------------------------------------------------------------------------- noted heads
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


def heads_of(logs: Mapping[str, SignedLog]) -> Heads:
    """The heads of logs, by process."""
    runs = [start.run for log in logs.values() for _, start in log.joined]
    heads = {
        process: Head(records=log.records, head=log.head, keys=list(log.fingerprints))
        for process, log in sorted(logs.items())
    }
    return Heads(run=runs[0] if runs else "", heads=heads)


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


def differences(noted: Heads | str, logs: Mapping[str, SignedLog]) -> Iterator[Finding]:
    """Compare logs with heads that were noted earlier. Records added since then do not count as a difference.

    Args:
        noted: all heads; their digest, which only the same logs without further records have; or the head of one log,
            which programs print at their end.
        logs: the signatures of each log.
    """
    present = heads_of(logs)
    if isinstance(noted, str):
        if present.digest != noted and not any(log.had(noted) for log in logs.values()):
            yield Finding(
                Cause.NOTED, "--expect", f"no log has this head, and the digest of all heads is {present.digest}"
            )
        return
    for process, head in sorted(noted.heads.items()):
        log = logs.get(process)
        if log is None:
            yield _differs(f"{process}.jsonl", "no such log, although its head was noted")
        elif log.records < head.records:
            yield Finding(
                Cause.NOTED, f"{process}.jsonl", f"has {log.records} records, but had {head.records} when noted"
            )
        elif not log.had(head.head, head.records):
            yield _differs(f"{process}.jsonl", f"its first {head.records} records are not the noted ones")
    for process in sorted(present.heads.keys() - noted.heads.keys()):
        yield _differs(f"{process}.jsonl", "a log of which no head was noted")
