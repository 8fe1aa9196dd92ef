"""What the coordinator's log records of a run's results, compared with the run folder.

Four collectors take the records of the log: :class:`ResultChecks` the digests of the files, :class:`TrafficChecks`
the messages that the summary counts, :class:`LoggedData` what the silos stated and measured, :class:`SentModels` the
models that silos were sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedmq.audit.findings import Cause, Finding, damaged, wrong_result
from fedmq.config.resolve import load
from fedmq.errors import InputError
from fedmq.evaluation.recall import fairness_of, means, weighted_means
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.results import FILES, SUMMARY, result_digest
from fedmq.runs.run_records import MergeLine, MetricsLine, OwnHeldOut, OwnHeldOutLine, RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import Fact, LogRecord, MessageRecord, NoteRecord, RefusedRecord, SignatureRecord, SignedAt
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    Memory,
    ModalityPrototypes,
    Model,
    PartialDelta,
    Payload,
    Representations,
    SiloMetrics,
)


@dataclass
class ResultChecks:
    """The last digests that the coordinator noted."""

    noted: tuple[str, Mapping[str, Fact]] | None = None  # place of the note, and its digests by file; None without one
    # Places of the coordinator's messages after the note that are not its last ones to its peers.
    after: list[str] = field(default_factory=list)

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add a record of a process's log."""
        if process != COORDINATOR:
            return
        match record:
            case NoteRecord(event=LogEvent.RESULT_DIGESTS):
                self.noted = place, record.facts
            case NoteRecord() if record.event in BEGINNINGS:  # files may change until the run has ended again
                self.noted = None
            case MessageRecord() if self.noted is not None and record.header.kind is not Kind.STOP:
                self.after.append(place)

    def compared(self, folder: RunFolder) -> tuple[str, ...]:
        """The files that :meth:`differences` compares; none in a run that is not finished."""
        if self.noted is None or not folder.summary.exists():
            return ()
        return tuple(name for name in (*FILES, SUMMARY) if name in self.noted[1])

    def differences(self, folder: RunFolder, known: Collection[str]) -> Iterator[Finding]:
        """Places and texts of the files that differ from their digests, and of messages after the end.

        Args:
            folder: the run folder.
            known: places at which something is found already.
        """
        for place in self.after:
            yield Finding(Cause.FILE, place, "a message after the run had ended")
        if self.noted is None:
            return
        place, digests = self.noted
        for name in self.compared(folder):
            path = str(folder.root / name)
            if any(place_known.startswith(path) for place_known in known):
                continue
            try:
                same = result_digest(folder, name) == digests[name]
            except InputError as error:
                yield Finding(Cause.FILE, path, f"{error.found} instead of the file with the digest in {place}")
            else:
                if not same:
                    yield Finding(
                        Cause.FILE, path, f"was changed after the run had ended: its digest is not that in {place}"
                    )


#: Payload kinds that can be a silo's contribution to the model; the others are statistics about it.
_CONTRIBUTIONS = frozenset(
    payload.KIND
    for payload in (
        Delta,
        PartialDelta,
        ModalityPrototypes,
        ClassPrototypes,
        Memory,
        Representations,
        DiscriminatorDelta,
    )
)
_UPDATES = frozenset({Delta.KIND, PartialDelta.KIND})
#: Notes after which a run continues.
BEGINNINGS = (LogEvent.STARTED, LogEvent.RESUMED, LogEvent.EXTENDED)
#: A payload without tensors counts as one number in the summary [bytes].
_NUMBER_BYTES = 8
#: Marks the decoded size of a kind of payload beside its size as sent.
_DECODED = ", decoded"


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
            self._evaluations.clear()  # a new process has not requested any
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
        for kind, size, decoded in record.both_sizes:
            sizes[kind] += size or _NUMBER_BYTES
            if decoded != size:
                sizes[f"{kind}{_DECODED}"] += decoded
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

    def merged_without_update(self, place: str, lines: Sequence[MetricsLine]) -> Iterator[Finding]:
        """Find merged replies without the update that a silo must send to take part.

        Args:
            place: file of the metrics.
            lines: its lines.
        """
        sent = [kinds for replies in self._replies.values() for kinds in replies]
        needed = next(
            (kinds for kinds in (_UPDATES, _CONTRIBUTIONS) if any(kinds & sent_kinds for sent_kinds in sent)), None
        )
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
                yield wrong_result(
                    place,
                    f"{count} replies of {silo} to version {base} merged, but {whole} of them have {what}",
                )

    def other_traffic(self, place: str, summary: RunSummary) -> Iterator[Finding]:
        """Find counts of the summary that the log does not have.

        Args:
            place: file of the summary.
            summary: summary of the run.
        """
        tally = self._tally
        if tally is None:
            return
        told = summary.bytes
        up = {**told.up, **{f"{kind}{_DECODED}": size for kind, size in told.decoded_up.items()}}
        down = {**told.down, **{f"{kind}{_DECODED}": size for kind, size in told.decoded_down.items()}}
        for way, logged, stated in (("up", tally.up, up), ("down", tally.down, down)):
            for kind in sorted(logged.keys() | stated.keys()):
                if logged[kind] != stated.get(kind, 0):
                    yield wrong_result(
                        place,
                        f"{stated.get(kind, 0):,} bytes of {kind} {way}, but {logged[kind]:,} according to the log",
                    )
        for name in ("sent", "received", "refused"):
            logged_count, stated_count = getattr(tally, name), getattr(summary.messages, name)
            if logged_count != stated_count:
                yield wrong_result(
                    place, f"{stated_count:,} messages {name}, but {logged_count:,} according to the log"
                )


@dataclass
class LoggedData:
    """Facts about the silos' data that the coordinator's log records."""

    # Digests of the payloads of each process's statements, by process.
    stated: dict[str, set[str]] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)  # digests of the payloads of the agreements that the coordinator sent
    # Digests of the silos' evaluations on their own held-out items, by silo and version.
    own: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def take(self, record: MessageRecord) -> None:
        """Add a message of the coordinator's log."""
        header = record.header
        match header.kind, record.action:
            case Kind.STATEMENT, "received":
                self.stated.setdefault(header.sender, set()).update(record.digests)
            case Kind.AGREEMENT, "sent":
                self.agreed.update(record.digests)
            case Kind.SILO_RESULT, "received":
                self.own.setdefault((header.sender, header.base_version), set()).update(record.digests)
            case _:
                pass


def check_data(
    folder: RunFolder, logged: LoggedData, lines: Sequence[MetricsLine], summary: RunSummary | None
) -> Iterator[Finding]:
    """Check the agreement on the data and the silos' own evaluations against the coordinator's log.

    Args:
        folder: the run folder.
        logged: what the coordinator's log records.
        lines: lines of ``metrics.jsonl``.
        summary: None if the run is not finished.
    """
    try:
        yield from _check_agreement(folder.agreement, logged, summary)
    except InputError as error:
        yield damaged(error)
    own = [line for line in lines if isinstance(line, OwnHeldOutLine)]
    for line in own:
        yield from _check_own(f"{folder.metrics}: version {line.version}", line, line.version, logged)
    last = max(own, key=lambda line: line.version, default=None)
    if summary is None:
        return
    if (summary.own_heldout is None) is not (last is None):
        yield wrong_result(str(folder.summary), "own_heldout is not that of the last evaluation by the silos")
    elif summary.own_heldout is not None and last is not None:
        plain = {name: value for name, value in last.plain().items() if name not in ("kind", "version", "wall")}
        if summary.own_heldout.plain() != plain:
            yield wrong_result(str(folder.summary), "own_heldout is not that of the last evaluation by the silos")


def _check_agreement(path: Path, logged: LoggedData, summary: RunSummary | None) -> Iterator[Finding]:
    """Check what processes stated about their data."""
    if not path.exists():
        if summary is not None and logged.stated:
            yield wrong_result(str(path), "no such file, though processes stated their data")
        return
    record = read_json(path, AgreementRecord, "what the processes of the run stated about their data")
    for name, stated in record.stated.items():
        try:
            payloads = [stated.payload(), *([] if stated.format is None else [stated.format.payload()])]
        except FieldError as error:
            raise InputError(f"{path}: {name}", str(error), "a statement") from None
        if not {digest(payload) for payload in payloads} <= logged.stated.get(name, set()):
            yield wrong_result(f"{path}: {name}", "not what it stated about its data")
    if record.agreed is not None and digest(record.agreed.payload()) not in logged.agreed:
        yield wrong_result(str(path), "the agreed labels and inputs are not what the coordinator sent")
    for name, entry in ({} if summary is None else summary.per_silo).items():
        said = record.stated.get(name)
        if said is not None and (entry.data_digest, entry.items) != (said.data_digest, dict(said.items)):
            yield wrong_result(
                f"{path.parent / 'summary.json'}: {name}",
                f"items and data digest are not those of {path.name}",
            )


def _check_own(place: str, record: OwnHeldOut, version: int, logged: LoggedData) -> Iterator[Finding]:
    """Check an evaluation by the silos: that they reported its metrics, and its means."""
    figures = {silo: silo_figures.figures for silo, silo_figures in record.per_silo.items()}
    items = {silo: silo_figures.items for silo, silo_figures in record.per_silo.items()}
    for silo, values in figures.items():
        if not was_reported(logged.own.get((silo, version), set()), SiloMetrics, items[silo], values):
            yield wrong_result(place, f"the metrics on {silo}'s own held-out items are not what it answered")
    recomputed: Mapping[str, object] = {
        "items": sum(items.values()),
        "metrics": weighted_means(figures, items),
        "per_silo_mean": means(figures) if figures else {},
        "fairness": fairness_of(figures) if figures else {},
    }
    for name, value in recomputed.items():
        if getattr(record, name) != value:
            yield wrong_result(place, f"{name} does not match the metrics it is computed from")


def was_reported(answers: Collection[str], kind: Callable[..., Payload], *values: object) -> bool:
    """Whether the digest of a payload of these values is among those of the logged answers; no answer has others."""
    try:
        return digest(kind(*values)) in answers
    except FieldError:
        return False


def never_sent(summary: RunSummary) -> Iterator[Finding]:
    """The finding that no silo was sent the released version, unless no silo had items to evaluate it on."""
    if summary.own_heldout is None or summary.own_heldout.items or summary.own_heldout.missing:
        yield wrong_result(f"{COORDINATOR}.jsonl", f"no silo was sent version {summary.versions} to evaluate it")


@dataclass
class SentModels:
    """The models of the tasks in the coordinator's log."""

    # Silo, place and digest of the first model of each version and size; a method may send a part.
    first: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)
    others: list[Finding] = field(default_factory=list)  # findings about other models of such a version

    def take(self, place: str, record: LogRecord) -> None:
        """Add a record of the coordinator's log."""
        match record:
            case NoteRecord(event=LogEvent.RESUMED):
                # On a wall clock, the merges after the checkpoint are repeated with other replies.
                resumed = int(record.facts.get("version") or 0)
                self.first = {at: known for at, known in self.first.items() if at[0] <= resumed}
            case MessageRecord(action="sent") if record.header.kind is Kind.TASK:
                self._take_task(place, record)

    def _take_task(self, place: str, record: MessageRecord) -> None:
        version, silo = record.header.base_version, record.header.receiver
        for (kind, size), content in zip(record.payloads, record.digests, strict=False):
            if kind != Model.KIND:
                continue
            known, where, expected = self.first.setdefault((version, size), (silo, place, content))
            if content != expected:
                what = f"{silo} was sent another model of version {version} than {known} ({where})"
                self.others.append(Finding(Cause.SENDER, place, what))

    def findings(self, folder: RunFolder) -> Iterator[Finding]:
        """The other models, unless the method has one for each silo."""
        if not self.others:
            return
        import protocols  # noqa: PLC0415 - loads torch, which an audit without such models does not need

        try:
            own = folder.scenario.exists() and protocols.traits_of(load(folder.scenario)).model_per_silo
        except InputError:
            return  # another check reports it
        if not own:
            yield from self.others
