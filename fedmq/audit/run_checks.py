"""Compare message logs with the other files of their run folder: scenario, metrics, summary and released model.

Logs that agree with each other can still belong to another run, or cover only a part of this one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from fedmq.audit.events import Starts
from fedmq.audit.findings import Cause, Finding, damaged, wrong_result
from fedmq.audit.result_checks import (
    BEGINNINGS,
    LoggedData,
    SentModels,
    TrafficChecks,
    check_data,
    never_sent,
    was_reported,
)
from fedmq.config.run_id import name_of
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError
from fedmq.evaluation.metrics import is_known, objection
from fedmq.evaluation.recall import fairness_of, means
from fedmq.runs.release import BESIDE, ReleaseConfig, beside, digests_by_name, digests_of, parameters
from fedmq.runs.results import read_metrics
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
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord, RefusedRecord
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind
from fedmq.wire.payloads import Metrics, Model

#: Phase in the coordinator's last note once all rounds are done. The layer order forbids importing it.
_DONE = "done"
_Record = TypeVar("_Record", bound=BaseModel)
_Line = TypeVar("_Line", MergeLine, EvaluationLine, PersonalLine)


@dataclass
class LoggedRun:
    """Facts about a run that its logs record."""

    starts: Starts = field(default_factory=Starts)  # the starts of each process, with the runs that its records name
    released: tuple[str, NoteRecord] | None = None  # the coordinator's last note of what it released, with its place
    ended: str | None = None  # place of the coordinator's last note that all rounds were done
    stopped: set[str] = field(default_factory=set)  # processes that the coordinator told to stop since it started
    # Silo, base version and task of each reply that the coordinator accepted.
    replies: set[tuple[str, int, int | None]] = field(default_factory=set)
    # The last evaluation request for each version, with its place.
    evaluated: dict[int, tuple[str, MessageRecord]] = field(default_factory=dict)
    # Digests of the evaluator's answers that the coordinator accepted, by version.
    measured: dict[int, set[str]] = field(default_factory=dict)
    # Digests of accepted evaluations of personal models, by silo and version.
    personal: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)  # silos of which the coordinator refused a readable message
    # What the silos stated about their data, and their own evaluations.
    data: LoggedData = field(default_factory=LoggedData)
    traffic: TrafficChecks = field(default_factory=TrafficChecks)  # what the coordinator sent and received
    models: SentModels = field(default_factory=SentModels)  # the models that it sent

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add a record of a process's log."""
        if process != COORDINATOR:
            return
        self.traffic.take(record)
        self.models.take(place, record)
        match record:
            case RefusedRecord() if not record.bytes:  # a frame that could not be opened has a size, and may be any
                self.refused.add(record.peer)
            case NoteRecord(event=LogEvent.RELEASED):
                self.released = place, record
            case NoteRecord(event=LogEvent.ENDED) if record.facts.get("phase") == _DONE:
                self.ended = place
            case NoteRecord(event=LogEvent.NOT_DELIVERED):
                self.stopped.discard(str(record.facts.get("peer")))
            case NoteRecord() if record.event in BEGINNINGS:
                self.ended, self.stopped = None, set()
            case MessageRecord():
                self._take_message(place, record)

    def _take_message(self, place: str, record: MessageRecord) -> None:
        """Add a message of the coordinator's log."""
        header = record.header
        self.data.take(record)
        if header.kind is Kind.STOP:
            self.stopped.add(header.receiver)
        elif header.kind is Kind.EVALUATE and header.receiver == EVALUATOR:
            self.evaluated[header.base_version] = place, record
        elif header.kind is Kind.EVALUATE_SILO:
            self.evaluated.setdefault(header.base_version, (place, record))
        elif header.kind is Kind.REPLY and record.action == "received":
            if header.sender == EVALUATOR:
                self.measured.setdefault(header.base_version, set()).update(record.digests)
            elif any(kind == Metrics.KIND for kind, _ in record.payloads):
                # An evaluation is not a reply to a task and must not count as one.
                self.personal.setdefault((header.sender, header.base_version), set()).update(record.digests)
            else:
                self.replies.add((header.sender, header.base_version, header.reply_to))


@dataclass
class RunFiles:
    """Metrics and summary of a run, read before its logs: the logs of a run in progress then cover all of them."""

    lines: list[MetricsLine] | None  # lines of ``metrics.jsonl``; None if the file is invalid
    summary: RunSummary | None  # None if there is none, or it is invalid
    finished: bool  # whether there is a summary file
    found: list[Finding]  # discrepancies found while reading the two files


def read_run_files(folder: RunFolder) -> RunFiles:
    """Read the metrics and the summary of a run folder."""
    files = RunFiles([], None, folder.summary.exists(), [])
    files.summary = _read(folder.summary, RunSummary, "a run's summary", files.found) if files.finished else None
    try:
        files.lines = read_metrics(folder)
    except InputError as error:
        files.lines = None
        files.found.append(damaged(error))
    return files


def check_run_folder(
    folder: RunFolder, files: RunFiles, course: LoggedRun, named: dict[str, str], *, inline: bool
) -> Iterator[Finding]:
    """Compare logs with the run folder they are in.

    Only files that exist are compared, so that logs can be audited without their folder; a run that is not finished
    needs no release.

    Args:
        folder: the run folder.
        files: its metrics and summary, read before the logs.
        course: what the logs record.
        named: processes that must have a log, with the place that mentions each; those of the summary are added.
        inline: the run exchanged no messages.
    """
    problems, summary, finished = list[Finding](), files.summary, files.finished
    yield from files.found
    yield from _same_run(folder, course)
    yield from course.models.findings(folder)
    config = _read(folder.model / "config.json", ReleaseConfig, "the configuration of a released model", problems)
    others = (folder.scenario, folder.metrics, folder.model)
    if course.ended is not None and not folder.summary.exists() and any(map(Path.exists, others)):
        finished = True
        yield Finding(Cause.RELEASE, course.ended, f"all rounds were done, but there is no {folder.summary.name}")
    if COORDINATOR not in course.starts.of:
        # Its log is missing, which is the finding: nothing below can be compared without it.
        named |= {} if summary is None else {COORDINATOR: folder.summary.name}
        yield from (*_of_the_scenario(folder, config, summary), *problems)
        return
    if finished and course.released is None:
        yield Finding(Cause.RELEASE, f"{COORDINATOR}.jsonl", "no note of what was released, though the run is finished")
    if finished and course.released is not None and not (path := folder.model / "config.json").exists():
        yield Finding(Cause.RELEASE, str(path), f"no such file, though {course.released[0]} mentions it")
    # The note is written after the release, so the release exists even if the process was killed before its summary.
    if course.released is not None and (finished or config is not None):
        yield from _release(folder, course, config, summary, inline=inline)
    yield from _of_the_scenario(folder, config, summary)
    if summary is not None:
        for silo, entry in summary.per_silo.items():
            if entry.participations:
                named.setdefault(silo, folder.summary.name)
    if files.lines is not None:
        yield from _check_metrics(folder, course, files.lines, inline=inline)
        if not inline:
            yield from check_data(folder, course.data, files.lines, summary)
        yield from _out_of_bounds(str(folder.metrics), files.lines, summary)
        if summary is not None:
            yield from _check_summary(folder, course, files.lines, summary, inline=inline)
    yield from problems


def _read(path: Path, schema: type[_Record], what: str, problems: list[Finding]) -> _Record | None:
    """Read a file of the folder; None if it does not exist, or is invalid, which is a finding."""
    if not path.exists():
        return None
    try:
        return read_json(path, schema, what)
    except InputError as error:
        problems.append(damaged(error))
        return None


def _same_run(folder: RunFolder, course: LoggedRun) -> Iterator[Finding]:
    """Check that every record belongs to one run, the scenario's."""
    if folder.scenario.exists():
        try:
            expected, source = name_of(read_yaml(folder.scenario)), folder.scenario.name
        except InputError as error:
            yield damaged(error)
            return
    else:
        if folder.summary.exists():
            yield Finding(Cause.DECLARED, str(folder.scenario), f"no such file next to {folder.summary.name}")
        named = [run for _, start in course.starts.all() for run in start.runs]
        if not named:
            return
        expected, source = named[0], "the first record"
    reported = set[tuple[str, str, bool]]()
    for process, start in course.starts.all():
        for run, place in start.runs.items():
            if run != expected and (process, run, start.joined) not in reported:
                reported.add((process, run, start.joined))
                yield Finding(Cause.DECLARED, place, f"of the run {run}, but {source} is of {expected}")


def _of_the_scenario(folder: RunFolder, config: ReleaseConfig | None, summary: RunSummary | None) -> Iterator[Finding]:
    """Check that the release and the summary agree with the scenario."""
    try:
        scenario = read_yaml(folder.scenario) if folder.scenario.exists() else {}
    except InputError:
        return  # _same_run reports it
    protocol = scenario.get("protocol")
    expected = {
        **scenario,
        "scenario": scenario.get("name"),
        "protocol": protocol.get("name") if isinstance(protocol, dict) else protocol,
    }
    for path, record, names in (
        (folder.summary, summary, ("scenario", "protocol", "seed", "rounds")),
        (folder.model / "config.json", config, ("protocol", "backbone", "objective")),
    ):
        plain = {} if record is None else record.plain()
        for name in names:
            if scenario and name in plain and plain[name] != expected.get(name):
                yield Finding(Cause.DECLARED, str(path), f"{name} is not what {folder.scenario.name} says")


def _release(
    folder: RunFolder, course: LoggedRun, config: ReleaseConfig | None, summary: RunSummary | None, *, inline: bool
) -> Iterator[Finding]:
    """Check that the released files are what the coordinator noted and sent to the evaluator."""
    assert course.released is not None  # noqa: S101 - the caller has checked it
    note = course.released[1].facts
    more = {kind: str(value) for kind, value in note.items() if kind not in ("model_digest", "data_digest")}
    data = note.get("data_digest")
    noted = digests_by_name(str(note.get("model_digest", "nothing")), None if data is None else str(data), more)
    for path, record in ((folder.model / "config.json", config), (folder.summary, summary)):
        recorded = digests_of(record) if record is not None else noted
        for what in sorted(recorded.keys() | noted.keys()):
            yield from _other(path, what, recorded.get(what, "nothing"), noted.get(what, "nothing"))
    belong = {"model.safetensors", *(f"{kind}.safetensors" for kind in more)}
    for path in sorted(folder.model.glob("*.safetensors")):
        if path.name not in belong:
            yield Finding(Cause.RELEASE, str(path), f"nothing that {course.released[0]} says was released")
    if config is None:
        return
    digests: dict[str, str] = {}
    try:
        path = folder.model / "model.safetensors"
        layout, theta = parameters(path, config.layout)
        yield from _other(path, "a layout", layout.digest, config.layout_digest)
        yield from _other(path, "a model", layout.model_digest(theta), config.model_digest)
        digests[Model.KIND] = digest(Model(layout.digest, theta))
        for kind in sorted(more.keys() & BESIDE.keys()):
            path = folder.model / f"{kind}.safetensors"
            digests[kind] = digest(beside(path, kind))
            yield from _other(path, BESIDE[kind][0], digests[kind], more[kind])
    except InputError as error:
        yield damaged(error)
        return
    if summary is None or inline:
        return
    if summary.versions not in course.evaluated:
        yield from never_sent(summary)
        return
    place, request = course.evaluated[summary.versions]
    sent = dict(zip((kind for kind, _ in request.payloads), request.digests, strict=False))
    for kind in sorted(sent.keys() | digests.keys()):
        if sent.get(kind) != digests.get(kind):
            yield Finding(Cause.RELEASE, place, f"{request.header.receiver} was sent another {kind} than is released")


def _other(path: Path, what: str, actual: str, expected: object) -> Iterator[Finding]:
    # Same wording as fedmq.retrieval.released_model.OtherModelError, which a probe reports for the same discrepancy.
    if actual != expected:
        yield Finding(
            Cause.RELEASE, str(path), f"{what} with digest {actual} instead of the run's own, with digest {expected}"
        )


def _check_metrics(
    folder: RunFolder, course: LoggedRun, lines: Sequence[MetricsLine], *, inline: bool
) -> Iterator[Finding]:
    """Check that merged replies were received, and that values are what the evaluator and the silos reported."""
    place, merges = str(folder.metrics), _of(lines, MergeLine)
    if [line.version for line in merges] != list(range(1, len(merges) + 1)):
        yield wrong_result(place, "not one merge for each version in turn")
    for line in _of(lines, PersonalLine):
        expected = personal_means(line.personal_whole_split, line.personal_per_silo)
        yield from _check_means(f"{place}: version {line.version}", line, expected)
    if inline:
        return
    yield from _merged_not_received(place, merges, course)
    yield from course.traffic.merged_without_update(place, lines)
    for evaluation in _of(lines, EvaluationLine):
        answers = course.measured.get(evaluation.version, set())
        if not was_reported(answers, Metrics, evaluation.metrics, evaluation.per_silo):
            what = f"the metrics of version {evaluation.version} are not what the evaluator answered"
            yield wrong_result(place, what)
    for line in _of(lines, PersonalLine):
        yield from _not_reported_by_silos(place, line.version, line, course)


def _check_summary(
    folder: RunFolder, course: LoggedRun, lines: Sequence[MetricsLine], summary: RunSummary, *, inline: bool
) -> Iterator[Finding]:
    """Check the summary against the merges and the last evaluation in ``metrics.jsonl``."""
    place, metrics = str(folder.summary), folder.metrics.name
    merges, evaluations = _of(lines, MergeLine), _of(lines, EvaluationLine)
    if len(merges) != summary.versions:
        yield wrong_result(
            str(folder.metrics), f"{len(merges)} merges, but {folder.summary.name} has {summary.versions}"
        )
    for version in sorted(course.measured.keys() - {line.version for line in evaluations}):
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
    yield from _of_the_last_evaluation(place, metrics, evaluations, summary)
    yield from _check_means(place, summary, personal_means(summary.personal_whole_split, summary.personal_per_silo))
    if not inline:
        yield from course.traffic.other_traffic(place, summary)
        yield from _not_reported_by_silos(place, summary.versions, summary, course)
        recorded = [(line.version, line.personal_whole_split) for line in _of(lines, PersonalLine)]
        recorded.append((summary.versions, summary.personal_whole_split))
        yield from _reported_not_recorded(folder, recorded, course)


def _of_the_last_evaluation(
    place: str, metrics: str, evaluations: Sequence[EvaluationLine], summary: RunSummary
) -> Iterator[Finding]:
    """Check the summary's values of the shared model against the last evaluation, and its means against the values.

    Args:
        place: file of the summary.
        metrics: name of the file of the evaluations.
        evaluations: evaluations in the order of that file.
        summary: summary of the run.
    """
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
        expected = {"per_silo_mean": means(per_silo), "fairness": fairness_of(per_silo)}
        yield from _check_means(place, summary, expected)


def _out_of_bounds(place: str, lines: Sequence[MetricsLine], summary: RunSummary | None) -> Iterator[Finding]:
    """Find values out of their metric's bounds; only the summary describes the user's own metrics."""
    custom_metrics = () if summary is None else tuple(summary.custom_metrics.values())
    for line in lines:
        for values in _measured(line):
            known = values if summary else {name: value for name, value in values.items() if is_known(name)}
            if (wrong := objection(known, custom_metrics)) is not None:
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


def personal_means(whole: BySilo, local: BySilo) -> dict[str, Figures]:
    """Means and fairness of personal models over silos, by their keys in the summary; empty without values.

    Args:
        whole: metrics of each silo's personal model on the whole split.
        local: metrics of each silo's personal model on the silo's part of the split.
    """
    return {
        "personal": means(whole) if whole else {},
        "personal_per_silo_mean": means(local) if local else {},
        "personal_fairness": fairness_of(local) if local else {},
    }


def _check_means(place: str, record: RunSummary | PersonalLine, expected: Mapping[str, Figures]) -> Iterator[Finding]:
    """Check means and fairness over silos against values recomputed from the same record."""
    for name, value in expected.items():
        if not _close(getattr(record, name), value):
            yield wrong_result(place, f"{name} does not match the metrics it is computed from")


def _reported_not_recorded(
    folder: RunFolder, recorded: Sequence[tuple[int, BySilo]], course: LoggedRun
) -> Iterator[Finding]:
    """Find silos that evaluated their personal model without a record of it, unless the coordinator refused them.

    Args:
        folder: the run folder.
        recorded: version and metrics of personal models by silo.
        course: what the logs record.
    """
    known = {(silo, version) for version, whole in recorded for silo in whole}
    for silo, version in sorted(course.personal.keys() - known):
        if silo not in course.refused:
            yield wrong_result(
                str(folder.metrics), f"no metrics of {silo}'s personal model at version {version}, though it answered"
            )


def _of(lines: Sequence[MetricsLine], kind: type[_Line]) -> list[_Line]:
    return [line for line in lines if isinstance(line, kind)]


def _close(recorded: Figures, expected: Figures) -> bool:
    """Whether values are equal but for rounding, which differs between processors."""
    return recorded.keys() == expected.keys() and all(
        math.isclose(recorded[name], expected[name], rel_tol=1e-9, abs_tol=1e-12) for name in expected
    )


def _not_reported_by_silos(
    place: str, version: int, record: RunSummary | PersonalLine, course: LoggedRun
) -> Iterator[Finding]:
    """Find metrics of personal models that their silos did not report."""
    for silo, whole in record.personal_whole_split.items():
        local = {silo: record.personal_per_silo.get(silo, {})}
        if not was_reported(course.personal.get((silo, version), set()), Metrics, whole, local):
            yield wrong_result(
                place, f"the metrics of {silo}'s personal model at version {version} are not what it answered"
            )


def _merged_not_received(place: str, merges: Sequence[MergeLine], course: LoggedRun) -> Iterator[Finding]:
    """Find replies merged more often than received; staleness is the number of merges since the model of the task."""
    taken = Counter[tuple[str, int]]()
    for line in merges:
        silos, ages = line.replies, line.staleness
        if len(silos) != len(ages):
            yield wrong_result(
                place, f"{len(ages)} ages of {len(silos)} replies in the merge of version {line.version}"
            )
        taken.update((silo, line.version - 1 - age) for silo, age in zip(silos, ages, strict=False))
    received = Counter((silo, base) for silo, base, _ in course.replies)
    for (silo, base), count in sorted(taken.items()):
        if count > received[silo, base]:
            yield wrong_result(
                place,
                f"{count} replies of {silo} to version {base} merged, but {received[silo, base]} were received",
            )
