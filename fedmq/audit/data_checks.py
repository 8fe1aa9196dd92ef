"""Compare what a run folder says about the silos' data, and about their own evaluations, with the message logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.errors import InputError
from fedmq.evaluation.fairness import fairness_of, means, weighted_means
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.run_records import Figures, MetricsLine, OwnHeldOut, OwnHeldOutLine, RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import FieldError
from fedmq.wire.log_records import MessageRecord
from fedmq.wire.messages import COORDINATOR, Kind
from fedmq.wire.payload_digest import digest
from fedmq.wire.payloads import SiloMetrics

#: Place and text of a finding.
Discrepancy = tuple[str, str]


@dataclass
class LoggedData:
    """Facts about the silos' data that the coordinator's log records.

    Args:
        stated: digests of the payloads of each process's statements, by process.
        agreed: digests of the payloads of the agreements that the coordinator sent.
        own: digests of the silos' evaluations on their own held-out items, by silo and version.
    """

    stated: dict[str, set[str]] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)
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
) -> Iterator[Discrepancy]:
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
        yield error.place, f"{error.found} instead of {error.allowed}"
    own = [line for line in lines if isinstance(line, OwnHeldOutLine)]
    for line in own:
        yield from _check_own(f"{folder.metrics}: version {line.version}", line, line.version, logged)
    last = max(own, key=lambda line: line.version, default=None)
    if summary is None:
        return
    if (summary.own_heldout is None) is not (last is None):
        yield str(folder.summary), "own_heldout is not that of the last evaluation by the silos"
    elif summary.own_heldout is not None and last is not None:
        plain = {name: value for name, value in last.plain().items() if name not in ("kind", "version", "wall")}
        if summary.own_heldout.plain() != plain:
            yield str(folder.summary), "own_heldout is not that of the last evaluation by the silos"


def _check_agreement(path: Path, logged: LoggedData, summary: RunSummary | None) -> Iterator[Discrepancy]:
    """Check what processes stated about their data.

    Raises:
        InputError: the file is damaged.
    """
    if not path.exists():
        if summary is not None and logged.stated:
            yield str(path), "no such file, though processes stated their data"
        return
    record = read_json(path, AgreementRecord, "what the processes of the run stated about their data")
    for name, stated in record.stated.items():
        try:
            payloads = [stated.payload(), *([] if stated.format is None else [stated.format.payload()])]
        except FieldError as error:
            raise InputError(f"{path}: {name}", str(error), "a statement") from None
        if not {digest(payload) for payload in payloads} <= logged.stated.get(name, set()):
            yield f"{path}: {name}", "not what it stated about its data"
    if record.agreed is not None and digest(record.agreed.payload()) not in logged.agreed:
        yield str(path), "the agreed labels and inputs are not what the coordinator sent"
    for name, entry in ({} if summary is None else summary.per_silo).items():
        said = record.stated.get(name)
        if said is not None and (entry.data_digest, entry.items) != (said.data_digest, dict(said.items)):
            yield f"{path.parent / 'summary.json'}: {name}", f"items and data digest are not those of {path.name}"


def _check_own(place: str, record: OwnHeldOut, version: int, logged: LoggedData) -> Iterator[Discrepancy]:
    """Check an evaluation by the silos: that they reported its metrics, and its means."""
    figures = {silo: each.figures for silo, each in record.per_silo.items()}
    items = {silo: each.items for silo, each in record.per_silo.items()}
    for silo, values in figures.items():
        if not _was_reported(items[silo], values, logged.own.get((silo, version), set())):
            yield place, f"the metrics on {silo}'s own held-out items are not what it answered"
    recomputed: Mapping[str, object] = {
        "items": sum(items.values()),
        "metrics": weighted_means(figures, items),
        "per_silo_mean": means(figures) if figures else {},
        "fairness": fairness_of(figures) if figures else {},
    }
    for name, value in recomputed.items():
        if getattr(record, name) != value:
            yield place, f"{name} does not match the metrics it is computed from"


def _was_reported(items: int, values: Figures, answers: set[str]) -> bool:
    try:
        return digest(SiloMetrics(items, values)) in answers
    except FieldError:
        return False


def never_sent(summary: RunSummary) -> Iterator[Discrepancy]:
    """The finding that no silo was sent the released version, unless no silo had items to evaluate it on."""
    if summary.own_heldout is None or summary.own_heldout.items or summary.own_heldout.missing:
        yield f"{COORDINATOR}.jsonl", f"no silo was sent version {summary.versions} to evaluate it"
