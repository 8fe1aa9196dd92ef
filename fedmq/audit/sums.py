"""Check that only masked updates left the silos of a run with secure sums, and the signed keys and lists of each sum.

Each silo notes the keys that it signed for a round, and the silos of the list that it was sent. From these notes the
list itself follows, whose digest the records of messages have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from fedmq.audit.findings import Cause, Finding
from fedmq.config.run_id import name_of
from fedmq.config.sections import silo_names
from fedmq.errors import RemoteWireError
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.keys import public_key_of
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind
from fedmq.wire.payloads import U8, MaskedUpdate, SumKeys, SumWeights, Survivors
from fedmq.wire.secure_sum import IN_CLEAR, check_signature, digest_of_roster

#: Payloads of which all silos of a sum are sent the same.
_AGREED = frozenset({SumKeys.KIND, SumWeights.KIND, Survivors.KIND})
#: A silo and the version of the model that a round began with.
_Round = tuple[str, int]


class SumChecks:
    """Collects what concerns secure sums while logs are read, and compares it at the end."""

    def __init__(self) -> None:
        self._clear: dict[tuple[str, int, str], str] = {}  # place of a clear payload, by silo, version and kind
        self._signed: dict[_Round, tuple[str, NoteRecord]] = {}  # the keys that a silo signed
        self._lists: dict[_Round, tuple[str, tuple[str, ...]]] = {}  # the silos of the list that a silo was sent
        # Place and digest of the first payload of a kind that a silo received in a round: later others are refused.
        self._received: dict[tuple[int, str], dict[str, tuple[str, str]]] = defaultdict(dict)
        self._masked: dict[_Round, dict[str, str]] = defaultdict(dict)  # places of masked updates by digest
        self._resumed: set[int] = set()  # versions whose round was repeated, on a wall clock with other silos

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add the next record of a process's log."""
        match record:
            case MessageRecord():
                self._take_message(process, place, record)
            case NoteRecord(event=LogEvent.SUM_KEYS) if isinstance(record.version, int):
                self._signed[process, record.version] = place, record
            case NoteRecord(event=LogEvent.SUM_SILOS) if isinstance(record.version, int):
                self._lists[process, record.version] = place, tuple(str(record.facts.get("silos")).split(", "))
            case NoteRecord(event=LogEvent.RESUMED) if isinstance(record.version, int):
                self._resumed.add(record.version)
            case _:
                pass

    @property
    def through(self) -> dict[_Round, tuple[str, ...]]:
        """The kinds of payloads that went through each sum, as its silos noted."""
        facts = {each: record.facts.get("through") for each, (_, record) in self._signed.items()}
        return {each: tuple(kinds.split(", ")) for each, kinds in facts.items() if isinstance(kinds, str)}

    def _take_message(self, process: str, place: str, record: MessageRecord) -> None:
        header, contents = record.header, zip(record.payloads, record.digests, strict=False)
        version, silo = header.base_version, header.sender
        for (kind, _), content in contents:
            if header.kind is Kind.SUM and kind in _AGREED and process != COORDINATOR and record.action == "received":
                self._received[version, kind].setdefault(process, (place, content))
            if silo in (COORDINATOR, EVALUATOR):
                continue
            if kind in IN_CLEAR:
                self._clear.setdefault((silo, version, kind), place)
            if kind == MaskedUpdate.KIND:
                self._masked[silo, version].setdefault(content, place)

    def findings(self, scenario: Mapping[str, object] | None, keys: Mapping[str, Set[str]]) -> Iterator[Finding]:
        """Compare all of it.

        Args:
            scenario: the content of the run's scenario.yaml; None without one.
            keys: public keys (hex) of the processes, by name: those that the auditor has, or that sign the logs.
        """
        privacy = (scenario or {}).get("privacy")
        if scenario is None or not isinstance(privacy, Mapping) or privacy.get("secure_aggregation") is None:
            return
        for (silo, version, kind), place in sorted(self._clear.items()):
            what = f"{silo} sent a {kind} of version {version}, though only masked updates are to leave a silo"
            yield Finding(Cause.SENDER, place, what)
        for (silo, version), places in sorted(self._masked.items()):
            if len(places) > 1:
                what = f"{silo} sent {len(places)} masked updates of version {version}, allowed: one"
                yield Finding(Cause.SENDER, list(places.values())[-1], what)
        for (version, kind), received in sorted(self._received.items()):
            if version not in self._resumed:
                yield from _differing(version, kind, received)
        run = name_of(scenario)
        for (silo, version), (place, record) in sorted(self._signed.items()):
            if not _is_signed(run, silo, version, record, keys.get(silo, frozenset())):
                what = f"keys of the secure sum of version {version} that {silo} did not sign with its key"
                yield Finding(Cause.SIGNATURE, place, what)
        yield from self._rosters(_silos(scenario), keys)
        yield from self._other_lists()

    def _rosters(self, names: Sequence[str], keys: Mapping[str, Set[str]]) -> Iterator[Finding]:
        """Find silos that signed for another list of silos and public keys than the run's, or than another silo."""
        expected = next((record.facts.get("roster") for _, record in self._signed.values()), None)
        if all(len(keys.get(name, ())) == 1 for name in names):
            expected = digest_of_roster({name: bytes.fromhex(next(iter(keys[name]))) for name in names})
        for (silo, version), (place, record) in sorted(self._signed.items()):
            if record.facts.get("roster") != expected:
                what = f"{silo} signed keys of version {version} for other silos and public keys than the run's"
                yield Finding(Cause.KEY, place, what)

    def _other_lists(self) -> Iterator[Finding]:
        """Find lists of keys that are not those that their silos signed, if the logs of all of them are there."""
        for (silo, version), (place, names) in sorted(self._lists.items()):
            received = self._received.get((version, SumKeys.KIND), {}).get(silo)
            if received is None or not all((name, version) in self._signed for name in names):
                continue
            notes = [self._signed[name, version][1] for name in names]
            try:
                facts = ("keys", "commitment", "signature")
                pairs, committed, signatures = (np.stack([_raw(note, fact) for note in notes]) for fact in facts)
                listed = SumKeys(names, pairs.reshape(-1, 2, 32), committed, signatures)
            except (FieldError, ValueError):
                continue  # such a note is not signed, which is a finding
            if received[1] != digest(listed):
                what = f"{silo} was sent keys of version {version} that are not those that their silos signed"
                yield Finding(Cause.SIGNATURE, place, what)


def _silos(scenario: Mapping[str, object]) -> Sequence[str]:
    """Names of the run's silos."""
    silos = scenario.get("silos")
    if not isinstance(silos, Mapping) or not isinstance(count := silos.get("count"), int):
        return ()
    without = silos.get("without", ())
    return [name for name in silo_names(count) if not isinstance(without, list | tuple) or name not in without]


def _differing(version: int, kind: str, received: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
    """Find silos that were sent another list of keys, weights or survivors than the first one."""
    first, expected = next((silo, content) for silo, (_, content) in sorted(received.items()))
    for silo, (place, content) in sorted(received.items()):
        if content != expected:
            what = f"{silo} was sent other {kind} of version {version} than {first}"
            yield Finding(Cause.SENDER, place, what)


def _raw(note: NoteRecord, fact: str) -> U8:
    return np.frombuffer(bytes.fromhex(str(note.facts.get(fact))), np.uint8).copy()


def _is_signed(run: str, silo: str, version: int, record: NoteRecord, keys: Set[str]) -> bool:
    """Whether the keys in a silo's note are signed with one of its public keys (hex)."""
    roster = str(record.facts.get("roster"))
    for key in keys:
        try:
            parts = _raw(record, "keys"), _raw(record, "commitment"), _raw(record, "signature")
            check_signature(public_key_of(bytes.fromhex(key)), run, version, silo, roster, *parts)
        except (RemoteWireError, ValueError):
            continue
        return True
    return False
