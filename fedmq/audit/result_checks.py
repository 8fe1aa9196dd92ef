"""What the coordinator's log records of a run, and the run's metrics and summary compared with it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fedmq.audit.events import Starts
from fedmq.audit.findings import Cause, Finding, damaged, wrong_result
from fedmq.errors import InputError
from fedmq.evaluation.metrics import objection
from fedmq.evaluation.recall import fairness_of, means, weighted_means
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.run_records import (
    BySilo,
    EvaluationLine,
    Figures,
    MergeLine,
    MetricsLine,
    OwnHeldOutLine,
    PersonalLine,
    RunSummary,
)
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.codec import digest
from fedmq.wire.fields import FieldError
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import Fact, LogRecord, MessageRecord, NoteRecord, RefusedRecord, SignatureRecord, SignedAt
from fedmq.wire.messages import EVALUATOR, Kind
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    DiscriminatorDelta,
    MaskedUpdate,
    Memory,
    Metrics,
    ModalityPrototypes,
    Model,
    PartialDelta,
    Payload,
    Representations,
    SiloMetrics,
)

#: Phase in the coordinator's last note once all rounds are done. The layer order forbids importing it.
_DONE = "done"
_UPDATES = frozenset({Delta.KIND, PartialDelta.KIND, MaskedUpdate.KIND})
#: Payload kinds that can be a silo's contribution to the model; the others are statistics about it.
_CONTRIBUTIONS = _UPDATES | {
    payload.KIND for payload in (ModalityPrototypes, ClassPrototypes, Memory, Representations, DiscriminatorDelta)
}
#: Notes after which a run continues.
_BEGINNINGS = (LogEvent.STARTED, LogEvent.RESUMED, LogEvent.EXTENDED)
#: A payload without tensors counts as one number in the summary [bytes].
_NUMBER_BYTES = 8
_Line = TypeVar("_Line", MergeLine, EvaluationLine, PersonalLine, OwnHeldOutLine)


class LoggedTraffic:
    """The summary's counts of messages and of payload bytes, recomputed from the coordinator's log.

    A resumed run continues with the counts of its checkpoint, as they were when the coordinator signed that merge. The
    summary does not count what follows the digests of the results: the messages that tell the peers to stop.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] | None = Counter()  # by what is counted, in words; None: unknown since a resume
        self._saved: dict[int, Counter[str]] = {}
        self._ended = False
        self._last_task = Counter[str]()
        self._evaluations: set[tuple[str, int | None, int]] = set()  # requested of silos: name, number, version

    def take(self, record: LogRecord) -> None:
        """Add the next record of the coordinator's log."""
        if isinstance(record, NoteRecord) and record.event in (*_BEGINNINGS, LogEvent.RESULT_DIGESTS):
            self._ended = record.event is LogEvent.RESULT_DIGESTS
            self._evaluations.clear()  # a new process has not requested any
        if self._ended:
            return
        counts = Counter[str]() if self._counts is None else self._counts
        match record:
            case NoteRecord(event=LogEvent.STARTED):
                self._counts, self._saved = Counter(), {}
            case NoteRecord(event=LogEvent.RESUMED):
                saved = self._saved.get(record.version or 0)
                self._counts = None if saved is None else saved.copy()
            case SignatureRecord(at=SignedAt.MERGE) if record.version is not None and self._counts is not None:
                self._saved[record.version] = counts.copy()
            case NoteRecord(event=LogEvent.NOT_DELIVERED):
                counts.subtract(self._last_task)
                self._last_task = Counter()
            case NoteRecord(event=LogEvent.REFUSALS_COUNTED):
                count = record.facts.get("count")
                counts["messages refused"] += count if isinstance(count, int) else 0
            case RefusedRecord():
                counts["messages refused"] += 1
            case MessageRecord():
                self._take_message(record, counts)
            case _:
                pass

    def _take_message(self, record: MessageRecord, counts: Counter[str]) -> None:
        header, way = record.header, "down" if record.action == "sent" else "up"
        asked = header.sender, header.reply_to, header.base_version
        counts[f"messages {record.action}"] += 1
        sizes = Counter[str]()
        for kind, size, decoded in record.both_sizes:
            sizes[f"bytes of {kind} {way}"] += size or _NUMBER_BYTES
            if decoded != size:
                sizes[f"bytes of {kind}, decoded {way}"] += decoded
        if record.action == "sent":
            if header.kind is Kind.EVALUATE:
                self._evaluations.add((header.receiver, header.sequence, header.base_version))
            self._last_task = sizes if header.kind in (Kind.TASK, Kind.SUM) else Counter()
            counts.update(self._last_task)
        # The summary does not count the metrics of a silo's personal model as traffic.
        elif header.kind is Kind.REPLY and header.sender != EVALUATOR and asked not in self._evaluations:
            counts.update(sizes)

    def differences(self, place: str, summary: RunSummary) -> Iterator[Finding]:
        """Find counts of the summary, whose file is ``place``, that the log does not have."""
        if self._counts is None:
            return
        told = summary.bytes
        counted = ("sent", "received", "refused")
        stated = Counter({f"messages {name}": getattr(summary.messages, name) for name in counted})
        for form, up, down in (("", told.up, told.down), (", decoded", told.decoded_up, told.decoded_down)):
            stated.update({f"bytes of {kind}{form} up": size for kind, size in up.items()})
            stated.update({f"bytes of {kind}{form} down": size for kind, size in down.items()})
        for what in sorted(self._counts.keys() | stated.keys()):
            if self._counts[what] != stated[what]:
                yield wrong_result(place, f"{stated[what]:,} {what}, but {self._counts[what]:,} according to the log")


@dataclass
class LoggedRun:
    """Facts in the logs that the run folder must agree with; all but the starts are of the coordinator's log."""

    starts: Starts = field(default_factory=Starts)  # the starts of each process, with the runs that its records name
    traffic: LoggedTraffic = field(default_factory=LoggedTraffic)
    released: tuple[str, NoteRecord] | None = None  # the last note of what was released, with its place
    # The last note of the digests of the run's files: its place, and the digests by file.
    digests: tuple[str, Mapping[str, Fact]] | None = None
    after: list[str] = field(default_factory=list)  # places of messages after that note, except the last ones to peers
    ended: str | None = None  # place of the last note that all rounds were done
    stopped: set[str] = field(default_factory=set)  # processes that were told to stop since the coordinator started
    refused: set[str] = field(default_factory=set)  # silos of which the coordinator refused a readable message
    # Payload kinds of the accepted replies to tasks: by silo and base version, then by the task's number.
    replies: defaultdict[tuple[str, int], dict[int | None, set[str]]] = field(default_factory=lambda: defaultdict(dict))
    # The last evaluation request for each version, with its place.
    evaluated: dict[int, tuple[str, MessageRecord]] = field(default_factory=dict)
    # Digests of accepted evaluations by process and version: the evaluator's, and those of silos' personal models.
    measured: defaultdict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    # Digests of the silos' evaluations on their own held-out items, by silo and version.
    own: defaultdict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    stated: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # digests of what each stated
    agreed: set[str] = field(default_factory=set)  # digests of the agreements on the data
    # Silo, place and digest of the first model sent of each version and size; a method may send a part.
    models: dict[tuple[int, int], tuple[str, str, str]] = field(default_factory=dict)
    other_models: list[Finding] = field(default_factory=list)  # findings about other models of such a version

    def take(self, place: str, record: LogRecord) -> None:
        """Add the next record of the coordinator's log."""
        self.traffic.take(record)
        match record:
            case RefusedRecord() if not record.bytes:  # a frame that could not be opened has a size, and may be any
                self.refused.add(record.peer)
            case NoteRecord(event=LogEvent.RELEASED):
                self.released = place, record
            case NoteRecord(event=LogEvent.RESULT_DIGESTS):
                self.digests = place, record.facts
            case NoteRecord(event=LogEvent.ENDED) if record.facts.get("phase") == _DONE:
                self.ended = place
            case NoteRecord(event=LogEvent.NOT_DELIVERED):
                self.stopped.discard(str(record.facts.get("peer")))
            case NoteRecord() if record.event in _BEGINNINGS:  # files may change until the run has ended again
                self.ended, self.digests, self.stopped = None, None, set()
                if record.event is LogEvent.RESUMED:
                    # On a wall clock, the merges after the checkpoint are repeated with other replies.
                    resumed = record.version or 0
                    self.models = {at: known for at, known in self.models.items() if at[0] <= resumed}
            case MessageRecord():
                self._take_message(place, record)

    def _take_message(self, place: str, record: MessageRecord) -> None:
        header, version = record.header, record.header.base_version
        if self.digests is not None and header.kind is not Kind.STOP:
            self.after.append(place)
        match header.kind, record.action:
            case Kind.STOP, _:
                self.stopped.add(header.receiver)
            case Kind.EVALUATE, _ if header.receiver == EVALUATOR:
                self.evaluated[version] = place, record
            case Kind.EVALUATE_SILO, _:
                self.evaluated.setdefault(version, (place, record))
            case Kind.TASK, "sent":
                self._take_task(place, record)
            case Kind.STATEMENT, "received":
                self.stated[header.sender].update(record.digests)
            case Kind.AGREEMENT, "sent":
                self.agreed.update(record.digests)
            case Kind.SILO_RESULT, "received":
                self.own[header.sender, version].update(record.digests)
            case Kind.REPLY, "received":
                kinds = {kind for kind, _ in record.payloads}
                if header.sender == EVALUATOR or Metrics.KIND in kinds:
                    self.measured[header.sender, version].update(record.digests)
                else:
                    self.replies[header.sender, version].setdefault(header.reply_to, set()).update(kinds)
            case _:
                pass

    def _take_task(self, place: str, record: MessageRecord) -> None:
        version, silo = record.header.base_version, record.header.receiver
        for (kind, size), content in zip(record.payloads, record.digests, strict=False):
            if kind == Model.KIND:
                known, where, expected = self.models.setdefault((version, size), (silo, place, content))
                if content != expected:
                    what = f"{silo} was sent another model of version {version} than {known} ({where})"
                    self.other_models.append(Finding(Cause.SENDER, place, what))


# ---------------------------------------------------------------------------------------------------------- metrics
def check_metrics(
    folder: RunFolder, course: LoggedRun, lines: Sequence[MetricsLine], *, inline: bool
) -> Iterator[Finding]:
    """Check that merged replies were received, and that values are what the evaluator and the silos reported."""
    place, merges = str(folder.metrics), _of(lines, MergeLine)
    if [line.version for line in merges] != list(range(1, len(merges) + 1)):
        yield wrong_result(place, "not one merge for each version in turn")
    for line in _of(lines, PersonalLine):
        yield from _check_means(f"{place}: version {line.version}", line, _personal_means(line))
    if inline:
        return
    yield from _merged_not_received(place, merges, course)
    for evaluation in _of(lines, EvaluationLine):
        answers = course.measured.get((EVALUATOR, evaluation.version), set())
        if not _was_reported(answers, Metrics, evaluation.metrics, evaluation.per_silo):
            what = f"the metrics of version {evaluation.version} are not what the evaluator answered"
            yield wrong_result(place, what)
    for line in _of(lines, PersonalLine):
        yield from _not_reported_by_silos(place, line.version, line, course)
    for own in _of(lines, OwnHeldOutLine):
        yield from _check_own(f"{place}: version {own.version}", own, course)


def _of(lines: Sequence[MetricsLine], kind: type[_Line]) -> list[_Line]:
    return [line for line in lines if isinstance(line, kind)]


def _merged_not_received(place: str, merges: Sequence[MergeLine], course: LoggedRun) -> Iterator[Finding]:
    """Find merged replies that were not received, or lack the update that a silo must send to take part.

    The staleness of a reply is the number of merges since the model of its task.
    """
    merged = Counter[tuple[str, int]]()
    for line in merges:
        silos, ages = line.replies, line.staleness
        if len(silos) != len(ages):
            yield wrong_result(
                place, f"{len(ages)} ages of {len(silos)} replies in the merge of version {line.version}"
            )
        merged.update((silo, line.version - 1 - age) for silo, age in zip(silos, ages, strict=False))
    sent = [kinds for replies in course.replies.values() for kinds in replies.values()]
    needed = next((kinds for kinds in (_UPDATES, _CONTRIBUTIONS) if any(kinds & each for each in sent)), None)
    for (silo, base), count in sorted(merged.items()):
        received = course.replies.get((silo, base), {}).values()
        whole = sum(bool(kinds if needed is None else kinds & needed) for kinds in received)
        problem = ""
        if count > len(received):
            problem = f"{len(received)} were received"
        elif count > whole:
            problem = f"{whole} of them have {'a payload' if needed is None else 'an update'}"
        if problem:
            yield wrong_result(place, f"{count} replies of {silo} to version {base} merged, but {problem}")


def _was_reported(answers: Collection[str], kind: Callable[..., Payload], *values: object) -> bool:
    """Whether the digest of a payload of these values is among those of the logged answers; no answer has others."""
    try:
        return digest(kind(*values)) in answers
    except FieldError:
        return False


def _not_reported_by_silos(
    place: str, version: int, record: RunSummary | PersonalLine, course: LoggedRun
) -> Iterator[Finding]:
    """Find metrics of personal models that their silos did not report."""
    for silo, whole in record.personal_whole_split.items():
        local = {silo: record.personal_per_silo.get(silo, {})}
        if not _was_reported(course.measured.get((silo, version), set()), Metrics, whole, local):
            yield wrong_result(
                place, f"the metrics of {silo}'s personal model at version {version} are not what it answered"
            )


def _check_own(place: str, record: OwnHeldOutLine, course: LoggedRun) -> Iterator[Finding]:
    """Check an evaluation by the silos: that they reported its metrics, and its means."""
    figures = {silo: silo_figures.figures for silo, silo_figures in record.per_silo.items()}
    items = {silo: silo_figures.items for silo, silo_figures in record.per_silo.items()}
    for silo, values in figures.items():
        answers = course.own.get((silo, record.version), set())
        if not _was_reported(answers, SiloMetrics, items[silo], values):
            yield wrong_result(place, f"the metrics on {silo}'s own held-out items are not what it answered")
    if record.items != sum(items.values()):
        yield wrong_result(place, "items does not match the metrics it is computed from")
    expected = {"metrics": weighted_means(figures, items), **_means("per_silo_mean", "fairness", figures)}
    yield from _check_means(place, record, expected)


def _means(mean: str, fairness: str, per_silo: BySilo) -> dict[str, Figures]:
    """Mean and fairness over silos, by their keys in a record; empty without values."""
    return {mean: means(per_silo), fairness: fairness_of(per_silo)} if per_silo else {mean: {}, fairness: {}}


def _personal_means(record: RunSummary | PersonalLine) -> dict[str, Figures]:
    """Means and fairness of personal models over silos, by their keys in the summary."""
    whole, local = record.personal_whole_split, record.personal_per_silo
    personal = means(whole) if whole else {}
    return {"personal": personal, **_means("personal_per_silo_mean", "personal_fairness", local)}


def _check_means(
    place: str, record: RunSummary | PersonalLine | OwnHeldOutLine, expected: Mapping[str, Figures]
) -> Iterator[Finding]:
    """Check means and fairness over silos against values recomputed from the same record."""
    for name, values in expected.items():
        recorded: Figures = getattr(record, name)
        # Rounding differs between processors.
        if recorded.keys() != values.keys() or not all(
            math.isclose(recorded[each], values[each], rel_tol=1e-9, abs_tol=1e-12) for each in values
        ):
            yield wrong_result(place, f"{name} does not match the metrics it is computed from")


def _out_of_bounds(place: str, lines: Sequence[MetricsLine], summary: RunSummary) -> Iterator[Finding]:
    """Find values of metrics that the run does not measure, and values out of the bounds of the user's own metrics."""
    custom_metrics = tuple(summary.custom_metrics.values())
    for line in lines:
        for values in _measured(line):
            if (wrong := objection(values, custom_metrics)) is not None:
                yield wrong_result(place, f"an impossible metric of version {line.version}: {wrong}")


def _measured(line: MetricsLine) -> list[Figures]:
    """The values in a line that the evaluator or a silo measured."""
    match line:
        case EvaluationLine():
            return [line.metrics, *line.per_silo.values()]
        case PersonalLine():
            return [*line.personal_whole_split.values(), *line.personal_per_silo.values()]
        case OwnHeldOutLine():
            return [line.metrics, *(silo.figures for silo in line.per_silo.values())]
        case MergeLine():
            return []


# ---------------------------------------------------------------------------------------------------------- summary
def check_summary(
    folder: RunFolder, course: LoggedRun, lines: Sequence[MetricsLine], summary: RunSummary, *, inline: bool
) -> Iterator[Finding]:
    """Check the summary against the merges and the last evaluations in ``metrics.jsonl``, and against the log."""
    place, metrics = str(folder.summary), folder.metrics.name
    merges, evaluations = _of(lines, MergeLine), _of(lines, EvaluationLine)
    if len(merges) != summary.versions:
        yield wrong_result(
            str(folder.metrics), f"{len(merges)} merges, but {folder.summary.name} has {summary.versions}"
        )
    answered = {version for process, version in course.measured if process == EVALUATOR}
    for version in sorted(answered - {line.version for line in evaluations}):
        yield wrong_result(str(folder.metrics), f"no metrics of version {version}, though the evaluator answered")
    merged = Counter(silo for line in merges for silo in line.replies)
    for silo in sorted(merged.keys() | summary.per_silo.keys()):
        count = summary.per_silo[silo].participations if silo in summary.per_silo else 0
        if count != merged[silo]:
            yield wrong_result(
                place, f"{count} participations of {silo}, but {merged[silo]} of its replies were merged"
            )
    if summary.tasks.merged != merged.total():
        yield wrong_result(place, f"{summary.tasks.merged} tasks merged, but {merged.total()} by {metrics}")
    yield from _out_of_bounds(str(folder.metrics), lines, summary)
    yield from _of_the_last_evaluation(place, metrics, evaluations, summary)
    yield from _check_means(place, summary, _personal_means(summary))
    if not inline:
        yield from course.traffic.differences(place, summary)
        yield from _not_reported_by_silos(place, summary.versions, summary, course)
        recorded = {(silo, line.version) for line in _of(lines, PersonalLine) for silo in line.personal_whole_split}
        recorded |= {(silo, summary.versions) for silo in summary.personal_whole_split}
        yield from _reported_not_recorded(str(folder.metrics), recorded, course)
        yield from _of_the_last_own_evaluation(place, _of(lines, OwnHeldOutLine), summary)


def _of_the_last_evaluation(
    place: str, metrics: str, evaluations: Sequence[EvaluationLine], summary: RunSummary
) -> Iterator[Finding]:
    """Check the summary's values of the shared model against the last evaluation, and its means against the values."""
    last = max(evaluations, key=lambda line: line.version, default=None)
    per_silo = {} if last is None else last.per_silo
    if summary.metrics != ({} if last is None else last.metrics) or (
        last is None and summary.own_heldout is None and not summary.unevaluated
    ):
        yield wrong_result(place, f"metrics are not those of the last evaluation in {metrics}")
    for silo, entry in summary.per_silo.items():
        if entry.figures != per_silo.get(silo, {}):
            yield wrong_result(place, f"the metrics of {silo} are not those of the last evaluation in {metrics}")
    if per_silo:
        yield from _check_means(place, summary, _means("per_silo_mean", "fairness", per_silo))


def _of_the_last_own_evaluation(
    place: str, evaluations: Sequence[OwnHeldOutLine], summary: RunSummary
) -> Iterator[Finding]:
    """Check the summary's values of the silos' own evaluations against the last one."""
    last = max(evaluations, key=lambda line: line.version, default=None)
    expected = None if last is None else last.model_dump(exclude_unset=True, exclude={"kind", "version", "wall"})
    recorded = None if summary.own_heldout is None else summary.own_heldout.model_dump(exclude_unset=True)
    if recorded != expected:
        yield wrong_result(place, "own_heldout is not that of the last evaluation by the silos")


def _reported_not_recorded(place: str, recorded: Collection[tuple[str, int]], course: LoggedRun) -> Iterator[Finding]:
    """Find silos that evaluated their personal model without a record of it, unless the coordinator refused them."""
    for silo, version in sorted(course.measured.keys() - recorded):
        if silo != EVALUATOR and silo not in course.refused:
            yield wrong_result(place, f"no metrics of {silo}'s personal model at version {version}, though it answered")


def check_agreement(folder: RunFolder, course: LoggedRun, summary: RunSummary | None) -> Iterator[Finding]:
    """Check what processes stated about their data, and what they agreed on, against the coordinator's log."""
    path = folder.agreement
    if not path.exists():
        if summary is not None and course.stated:
            yield wrong_result(str(path), "no such file, though processes stated their data")
        return
    try:
        record = read_json(path, AgreementRecord, "what the processes of the run stated about their data")
    except InputError as error:
        yield damaged(error)
        return
    for name, stated in record.stated.items():
        try:
            payloads = [stated.payload(), *([] if stated.format is None else [stated.format.payload()])]
        except FieldError as error:
            yield Finding(Cause.FILE, f"{path}: {name}", f"{error} instead of a statement")
            return
        if not {digest(payload) for payload in payloads} <= course.stated.get(name, set()):
            yield wrong_result(f"{path}: {name}", "not what it stated about its data")
    if record.agreed is not None and digest(record.agreed.payload()) not in course.agreed:
        yield wrong_result(str(path), "the agreed labels and inputs are not what the coordinator sent")
    for name, entry in ({} if summary is None else summary.per_silo).items():
        said = record.stated.get(name)
        if said is not None and (entry.data_digest, entry.items) != (said.data_digest, dict(said.items)):
            what = f"items and data digest are not those of {path.name}"
            yield wrong_result(f"{folder.summary}: {name}", what)
