"""Check the summary's traffic and the merged replies against the messages in the coordinator's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fedmq.runs.run_records import MergeLine, MetricsLine, RunSummary
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord, RefusedRecord, SignatureRecord, SignedAt
from fedmq.wire.messages import EVALUATOR, Kind
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Memory,
    ModalityPrototypes,
    PartialDelta,
    Representations,
    SecretShare,
)

#: Payload kinds that can be a silo's contribution to the model; the others are statistics about it.
_CONTRIBUTIONS = frozenset(
    each.KIND
    for each in (
        Delta,
        PartialDelta,
        ModalityPrototypes,
        ClassPrototypes,
        Memory,
        Representations,
        DiscriminatorDelta,
        SecretShare,
    )
)
_UPDATES = frozenset({Delta.KIND, PartialDelta.KIND})
#: Notes after which a run continues.
BEGINNINGS = (LogEvent.STARTED, LogEvent.RESUMED, LogEvent.EXTENDED)
#: A payload without tensors counts as one number in the summary [bytes].
_NUMBER_BYTES = 8


@dataclass
class _Tally:
    """The summary's counts, recomputed from the log: payload bytes by kind, messages sent, received and refused."""

    up: Counter[str] = field(default_factory=Counter)
    down: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0
    refused: int = 0

    def copy(self) -> _Tally:
        return replace(self, up=self.up.copy(), down=self.down.copy())


class TrafficChecks:
    """Collects the messages of the coordinator's log, and compares them with metrics and summary.

    A resumed run continues with the counts of its checkpoint, as they were when the coordinator signed that merge. The
    summary does not count what follows the digests of the results: the messages that tell the peers to stop.
    """

    def __init__(self) -> None:
        self._tally: _Tally | None = _Tally()  # None: unknown since a resume
        self._saved: dict[int, _Tally] = {}
        self._ended = False
        self._last_task: Counter[str] = Counter()
        self._replies: dict[tuple[str, int], list[frozenset[str]]] = {}
        self._evaluations: set[tuple[str, int | None, int]] = set()  # requested of silos: name, number, version

    def take(self, record: LogRecord) -> None:
        """Add the next record of the coordinator's log."""
        if isinstance(record, NoteRecord) and record.event in (*BEGINNINGS, LogEvent.RESULT_DIGESTS):
            self._ended = record.event is LogEvent.RESULT_DIGESTS
        if not self._ended:
            self._take(record)

    def _take(self, record: LogRecord) -> None:
        tally = self._tally
        match record:
            case NoteRecord(event=LogEvent.STARTED):
                self._tally, self._saved = _Tally(), {}
            case NoteRecord(event=LogEvent.RESUMED):
                saved = self._saved.get(record.version or 0)
                self._tally = None if saved is None else saved.copy()
            case SignatureRecord(at=SignedAt.MERGE) if record.version is not None and tally is not None:
                self._saved[record.version] = tally.copy()
            case NoteRecord(event=LogEvent.NOT_DELIVERED) if tally is not None:
                tally.down -= self._last_task
                self._last_task = Counter()
            case NoteRecord(event=LogEvent.REFUSALS_COUNTED) if tally is not None:
                count = record.facts.get("count")
                tally.refused += count if isinstance(count, int) else 0
            case RefusedRecord() if tally is not None:
                tally.refused += 1
            case MessageRecord():
                self._take_message(record)
            case _:
                pass

    def _take_message(self, record: MessageRecord) -> None:
        header, tally = record.header, self._tally
        sizes = Counter[str]()
        for kind, size in record.payloads:
            sizes[kind] += size or _NUMBER_BYTES
        if record.action == "sent" and header.kind is Kind.EVALUATE:
            self._evaluations.add((header.receiver, header.sequence, header.base_version))
        from_silo = record.action == "received" and header.kind is Kind.REPLY and header.sender != EVALUATOR
        # The summary does not count the metrics of a silo's personal model as traffic.
        from_silo &= (header.sender, header.reply_to, header.base_version) not in self._evaluations
        if from_silo:
            kinds = frozenset(kind for kind, _ in record.payloads)
            self._replies.setdefault((header.sender, header.base_version), []).append(kinds)
        if tally is None:
            return
        if record.action == "sent":
            tally.sent += 1
            self._last_task = sizes if header.kind is Kind.TASK else Counter()
            tally.down += self._last_task
        else:
            tally.received += 1
            tally.up += sizes if from_silo else Counter()

    def merged_without_update(self, place: str, lines: Sequence[MetricsLine]) -> Iterator[tuple[str, str]]:
        """Find merged replies without the update that a silo must send to take part.

        Args:
            place: file of the metrics.
            lines: its lines.
        """
        sent = [kinds for replies in self._replies.values() for kinds in replies]
        needed = next((kinds for kinds in (_UPDATES, _CONTRIBUTIONS) if any(kinds & each for each in sent)), None)
        merged = Counter(
            (silo, line.version - 1 - age)
            for line in lines
            if isinstance(line, MergeLine)
            for silo, age in zip(line.replies, line.staleness, strict=False)
        )
        for (silo, base), count in sorted(merged.items()):
            replies = self._replies.get((silo, base), [])
            whole = sum(bool(kinds) if needed is None else bool(kinds & needed) for kinds in replies)
            if whole < count <= len(replies):
                what = "a payload" if needed is None else "an update"
                yield place, f"{count} replies of {silo} to version {base} merged, but {whole} of them have {what}"

    def other_traffic(self, place: str, summary: RunSummary) -> Iterator[tuple[str, str]]:
        """Find counts of the summary that the log does not have.

        Args:
            place: file of the summary.
            summary: summary of the run.
        """
        tally = self._tally
        if tally is None:
            return
        for way, logged, stated in (("up", tally.up, summary.bytes.up), ("down", tally.down, summary.bytes.down)):
            for kind in sorted(logged.keys() | stated.keys()):
                if logged[kind] != stated.get(kind, 0):
                    yield (
                        place,
                        f"{stated.get(kind, 0):,} bytes of {kind} {way}, but {logged[kind]:,} according to the log",
                    )
        for name in ("sent", "received", "refused"):
            logged_count, stated_count = getattr(tally, name), getattr(summary.messages, name)
            if name in summary.messages.model_fields_set and logged_count != stated_count:
                yield place, f"{stated_count:,} messages {name}, but {logged_count:,} according to the log"
