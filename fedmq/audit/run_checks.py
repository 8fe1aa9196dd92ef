"""Whether message logs are those of the run folder they lie in: its scenario, its figures and what it released.

Logs can agree with each other and still be another run's, or tell of a part of this one. What the folder says of the
run is held against them here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from fedmq.config.loader import read_yaml
from fedmq.config.run_id import name_of
from fedmq.errors import InputError
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.evaluation.metrics import is_known, objection
from fedmq.runs.model_files import BESIDE, beside, digests_by_name, digests_of, parameters
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import (
    BySilo,
    EvaluationLine,
    Figures,
    MergeLine,
    MetricsLine,
    PersonalLine,
    ReleaseConfig,
    RunSummary,
)
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import FieldError
from fedmq.wire.log_records import EventRecord, LogRecord, MessageRecord, NoteKind, NoteRecord, RefusedRecord
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Metrics, Model, digest

#: How the coordinator's last note calls a run whose rounds are all done; its module may not be imported here.
_DONE = "done"
#: A finding's place, and what it says.
Discrepancy = tuple[str, str]
_Record = TypeVar("_Record", bound=BaseModel)


@dataclass
class Course:
    """What the logs say of the course of the run.

    Args:
        runs: every run that a record of a log is of, with the first place, by log and name.
        released: the coordinator's last note of what it released, with its place.
        ended: where the coordinator last noted that all rounds were done.
        replies: silos' replies that the coordinator took: silo, base version and task.
        evaluated: the last evaluation asked for of every version, with its place.
        measured: digests of the evaluator's answers that the coordinator took, by version.
        personal: digests of the silos' measurements of their own models that it took, by silo and version.
        refused: silos of whose messages the coordinator refused one that it could read.
    """

    runs: dict[tuple[str, str], str] = field(default_factory=dict)
    released: tuple[str, NoteRecord] | None = None
    ended: str | None = None
    replies: set[tuple[str, int, int | None]] = field(default_factory=set)
    evaluated: dict[int, tuple[str, MessageRecord]] = field(default_factory=dict)
    measured: dict[int, set[str]] = field(default_factory=dict)
    personal: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Take a record of a process's log into account."""
        match record:
            case MessageRecord():
                self.runs.setdefault((process, record.header.run), place)
            case NoteRecord() | EventRecord() if isinstance(run := record.facts.get("run"), str):
                self.runs.setdefault((process, run), place)
        if process != COORDINATOR:
            return
        match record:
            case RefusedRecord():
                if not record.bytes:  # a frame that could not be opened has some, and says nothing of what was in it
                    self.refused.add(record.peer)
            case NoteRecord(text=NoteKind.RELEASED):
                self.released = place, record
            case NoteRecord(text=NoteKind.ENDED) if record.facts.get("phase") == _DONE:
                self.ended = place
            case MessageRecord():
                self._take_message(place, record)

    def _take_message(self, place: str, record: MessageRecord) -> None:
        """Take a message of the coordinator's log into account."""
        header = record.header
        if header.kind is Kind.EVALUATE and header.receiver == EVALUATOR:
            self.evaluated[header.base_version] = place, record
        elif header.kind is Kind.REPLY and record.action == "received":
            if header.sender == EVALUATOR:
                self.measured.setdefault(header.base_version, set()).update(record.digests)
            elif any(kind == Metrics.KIND for kind, _ in record.payloads):
                # No reply to a task, and not to be taken for one when merged replies are counted.
                self.personal.setdefault((header.sender, header.base_version), set()).update(record.digests)
            else:
                self.replies.add((header.sender, header.base_version, header.reply_to))


@dataclass
class Told:
    """What a folder tells of its run, read before the logs are: of a run that goes on they then tell of all of it.

    Args:
        lines: of ``metrics.jsonl``; None where it is no such file.
        summary: None while there is none, or where it is no summary.
        finished: whether there is one.
        found: what is wrong with either file.
    """

    lines: list[MetricsLine] | None
    summary: RunSummary | None
    finished: bool
    found: list[Discrepancy]


def told_by(folder: RunFolder) -> Told:
    """Read what a folder tells of its run."""
    told = Told([], None, folder.summary.exists(), [])
    told.summary = _read(folder.summary, RunSummary, "a run's summary", told.found) if told.finished else None
    try:
        told.lines = read_metrics(folder)
    except InputError as error:
        told.lines = None
        told.found.append((error.place, f"{error.found} instead of {error.allowed}"))
    return told


def against_the_run(
    folder: RunFolder, told: Told, course: Course, named: dict[str, str], *, inline: bool
) -> Iterator[Discrepancy]:
    """Hold logs against the run folder they lie in.

    Logs that were taken out of their folder owe nothing of this, and a run that is not finished no release.

    Args:
        folder: of the run.
        told: what it told before the logs were read.
        course: what the logs say.
        named: processes of which there must be a log, with what tells of them; those of the summary are added.
        inline: the run had no messages.
    """
    found, summary, finished = list[Discrepancy](), told.summary, told.finished
    yield from told.found
    yield from _same_run(folder, course)
    config = _read(folder.model / "config.json", ReleaseConfig, "the configuration of a released model", found)
    if course.ended is not None and not folder.summary.exists() and any(map(Path.exists, _told_of(folder))):
        finished = True
        yield course.ended, f"all rounds were done, but there is no {folder.summary.name}"
    if finished and course.released is None:
        yield f"{COORDINATOR}.jsonl", "no note of what was released, though the run is finished"
    if finished and course.released is not None and not (folder.model / "config.json").exists():
        yield str(folder.model / "config.json"), f"no such file, though {course.released[0]} tells of it"
    # Once that note is there, what was released lies beside it, also where the process was killed before its summary.
    if course.released is not None and (finished or config is not None):
        yield from _release(folder, course, config, summary, inline=inline)
    yield from _of_the_scenario(folder, config, summary)
    if summary is not None:
        named |= {} if COORDINATOR in named else {COORDINATOR: folder.summary.name}
        for silo, own in summary.per_silo.items():
            if own.participations:
                named.setdefault(silo, folder.summary.name)
    if told.lines is not None:
        yield from _course(folder, course, told.lines, inline=inline)
        yield from _out_of_bounds(str(folder.metrics), told.lines, summary)
        if summary is not None:
            yield from _figures(folder, course, told.lines, summary, inline=inline)
    yield from found


def _told_of(folder: RunFolder) -> tuple[Path, ...]:
    return folder.scenario, folder.metrics, folder.model


def _read(path: Path, schema: type[_Record], what: str, found: list[Discrepancy]) -> _Record | None:
    """A file of the folder; None if it is not there, or is none, which is a finding."""
    if not path.exists():
        return None
    try:
        return read_json(path, schema, what)
    except InputError as error:
        found.append((error.place, f"{error.found} instead of {error.allowed}"))
        return None


def _same_run(folder: RunFolder, course: Course) -> Iterator[Discrepancy]:
    """Every record is of one run, and that is the scenario's."""
    if folder.scenario.exists():
        try:
            own, whose = name_of(read_yaml(folder.scenario)), folder.scenario.name
        except InputError as error:
            yield error.place, f"{error.found} instead of {error.allowed}"
            return
    else:
        if folder.summary.exists():
            yield str(folder.scenario), f"no such file beside {folder.summary.name}"
        if not course.runs:
            return
        (_, own), whose = next(iter(course.runs)), "the first record"
    for (_, run), place in course.runs.items():
        if run != own:
            yield place, f"of the run {run}, but {whose} is of {own}"


def _of_the_scenario(
    folder: RunFolder, config: ReleaseConfig | None, summary: RunSummary | None
) -> Iterator[Discrepancy]:
    """What the release and the summary say of the run's scenario is what the scenario says."""
    try:
        scenario = read_yaml(folder.scenario) if folder.scenario.exists() else {}
    except InputError:
        return  # that it is none has been found already
    protocol = scenario.get("protocol")
    own = {
        **scenario,
        "scenario": scenario.get("name"),
        "protocol": protocol.get("name") if isinstance(protocol, dict) else protocol,
    }
    for path, told, names in (
        (folder.summary, summary, ("scenario", "protocol", "seed", "rounds")),
        (folder.model / "config.json", config, ("protocol", "backbone", "objective")),
    ):
        plain = {} if told is None else told.plain()
        for name in names:
            if scenario and name in plain and plain[name] != own.get(name):
                yield str(path), f"{name} is not what {folder.scenario.name} says"


def _release(
    folder: RunFolder,
    course: Course,
    config: ReleaseConfig | None,
    summary: RunSummary | None,
    *,
    inline: bool,
) -> Iterator[Discrepancy]:
    """What was released is what the coordinator noted, and what the evaluator was sent."""
    assert course.released is not None  # noqa: S101 - the caller has seen to it
    note = course.released[1].facts
    more = {kind: str(own) for kind, own in note.items() if kind not in ("model_digest", "data_digest")}
    data = note.get("data_digest")
    own = digests_by_name(str(note.get("model_digest", "nothing")), None if data is None else str(data), more)
    for path, told in ((folder.model / "config.json", config), (folder.summary, summary)):
        said = digests_of(told) if told is not None else own
        for what in sorted(said.keys() | own.keys()):
            yield from _other(path, what, said.get(what, "nothing"), own.get(what, "nothing"))
    belong = {"model.safetensors", *(f"{kind}.safetensors" for kind in more)}
    for path in sorted(folder.model.glob("*.safetensors")):
        if path.name not in belong:
            yield str(path), f"nothing that {course.released[0]} says was released"
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
        yield error.place, f"{error.found} instead of {error.allowed}"
        return
    if summary is None or inline:
        return
    if summary.versions not in course.evaluated:
        yield f"{COORDINATOR}.jsonl", f"the evaluator was never sent version {summary.versions}, which is released"
        return
    place, record = course.evaluated[summary.versions]
    sent = dict(zip((kind for kind, _ in record.payloads), record.digests, strict=False))
    for kind in sorted(sent.keys() | digests.keys()):
        if sent.get(kind) != digests.get(kind):
            yield place, f"the evaluator was sent another {kind} than is released"


def _other(path: Path, what: str, found: str, told: object) -> Iterator[Discrepancy]:
    # The words of fedmq.retrieval.released_model.OtherModelError: a probe finds the same.
    if found != told:
        yield str(path), f"{what} with digest {found} instead of the run's own, with digest {told}"


def _course(folder: RunFolder, course: Course, lines: Sequence[MetricsLine], *, inline: bool) -> Iterator[Discrepancy]:
    """Every reply that was merged was received, and the figures are what the evaluator and the silos answered."""
    place, merges = str(folder.metrics), _merges(lines)
    if [line.version for line in merges] != list(range(1, len(merges) + 1)):
        yield place, "not one merge for each version in turn"
    for line in _personal(lines):
        own = own_means(line.personal_whole_split, line.personal_per_silo)
        yield from _made(f"{place}: version {line.version}", line, own)
    if inline:
        return
    yield from _merged_unheard(place, merges, course)
    for evaluation in _evaluations(lines):
        answers = course.measured.get(evaluation.version, set())
        if not _was_told(evaluation.metrics, evaluation.per_silo, answers):
            yield place, f"the figures of version {evaluation.version} are not what the evaluator answered"
    for line in _personal(lines):
        yield from _not_said_by_silos(place, line.version, line, course)


def _figures(
    folder: RunFolder, course: Course, lines: Sequence[MetricsLine], summary: RunSummary, *, inline: bool
) -> Iterator[Discrepancy]:
    """The summary is of those merges, and of the last of those evaluations."""
    place, metrics = str(folder.summary), folder.metrics.name
    merges, evaluations = _merges(lines), _evaluations(lines)
    if len(merges) != summary.versions:
        yield str(folder.metrics), f"{len(merges)} merges, but {folder.summary.name} tells of {summary.versions}"
    for version in sorted(course.measured.keys() - {line.version for line in evaluations}):
        yield str(folder.metrics), f"no figures of version {version}, though the evaluator answered"
    merged = Counter(silo for line in merges for silo in line.replies)
    for silo in sorted(merged.keys() | summary.per_silo.keys()):
        told = summary.per_silo[silo].participations if silo in summary.per_silo else 0
        if told != merged[silo]:
            yield place, f"{told} participations of {silo}, but {merged[silo]} of its replies were merged"
    if summary.tasks.merged not in (None, merged.total()):
        yield place, f"{summary.tasks.merged} tasks merged, but {merged.total()} by {metrics}"
    yield from _of_the_last_evaluation(place, metrics, evaluations, summary)
    yield from _made(place, summary, own_means(summary.personal_whole_split, summary.personal_per_silo))
    if not inline:
        yield from _not_said_by_silos(place, summary.versions, summary, course)
        reportable = [(line.version, line.personal_whole_split) for line in _personal(lines)]
        reportable.append((summary.versions, summary.personal_whole_split))
        yield from _not_told_of_silos(folder, reportable, course)


def _of_the_last_evaluation(
    place: str, metrics: str, evaluations: Sequence[EvaluationLine], summary: RunSummary
) -> Iterator[Discrepancy]:
    """The summary's figures of the shared model are those of the last evaluation, and the means those of the figures.

    Args:
        place: the summary's file.
        metrics: name of the file of the evaluations.
        evaluations: in the order of that file.
        summary: of the run.
    """
    last = max(evaluations, key=lambda line: line.version, default=None)
    shares = {} if last is None else last.per_silo
    if last is None or summary.metrics != last.metrics:
        yield place, f"metrics are not those of the last evaluation in {metrics}"
    for silo, own in summary.per_silo.items():
        if own.figures != shares.get(silo, {}):
            yield place, f"the figures of {silo} are not those of the last evaluation in {metrics}"
    if shares:
        yield from _made(place, summary, {"per_silo_mean": means(shares), "fairness": fairness_of(shares)})


def _out_of_bounds(place: str, lines: Sequence[MetricsLine], summary: RunSummary | None) -> Iterator[Discrepancy]:
    """Values that their metrics cannot have; a summary describes the user's own metrics, which others do not know."""
    own = () if summary is None else tuple(summary.own_metrics.values())
    for line in lines:
        for values in _measured(line):
            told = values if summary else {name: value for name, value in values.items() if is_known(name)}
            if (wrong := objection(told, own)) is not None:
                yield place, f"a figure of version {line.version} that cannot be: {wrong}"


def _measured(line: MetricsLine) -> list[Figures]:
    """The figures of a line that an evaluator or a silo measured."""
    match line:
        case EvaluationLine():
            return [line.metrics, *line.per_silo.values()]
        case PersonalLine():
            return [*line.personal_whole_split.values(), *line.personal_per_silo.values()]
        case MergeLine():
            return []


def own_means(whole: BySilo, shares: BySilo) -> dict[str, Figures]:
    """The means and the spread of silos' own models, by the names of the summary; empty where there are no figures.

    Args:
        whole: figures by silo on the whole split.
        shares: figures by silo on its own share.
    """
    return {
        "personal": means(whole) if whole else {},
        "personal_per_silo_mean": means(shares) if shares else {},
        "personal_fairness": fairness_of(shares) if shares else {},
    }


def _made(place: str, told: RunSummary | PersonalLine, made: Mapping[str, Figures]) -> Iterator[Discrepancy]:
    """Means and spreads that are not those of the figures beside them."""
    for name, value in made.items():
        if not _close(getattr(told, name), value):
            yield place, f"{name} is not that of the figures it is made of"


def _not_told_of_silos(folder: RunFolder, told: Sequence[tuple[int, BySilo]], course: Course) -> Iterator[Discrepancy]:
    """Silos that answered how their own models do, and are in no figures; their answers may have been refused.

    Args:
        folder: of the run.
        told: figures of own models by silo, with the version they are of.
        course: what the logs say.
    """
    known = {(silo, version) for version, whole in told for silo in whole}
    for silo, version in sorted(course.personal.keys() - known):
        if silo not in course.refused:
            yield str(folder.metrics), f"no figures of {silo}'s own model at version {version}, though it answered"


def _merges(lines: Sequence[MetricsLine]) -> list[MergeLine]:
    return [line for line in lines if isinstance(line, MergeLine)]


def _evaluations(lines: Sequence[MetricsLine]) -> list[EvaluationLine]:
    return [line for line in lines if isinstance(line, EvaluationLine)]


def _personal(lines: Sequence[MetricsLine]) -> list[PersonalLine]:
    return [line for line in lines if isinstance(line, PersonalLine)]


def _close(told: Figures, made: Figures) -> bool:
    """Whether figures are those made here: sums round differently on other processors."""
    return told.keys() == made.keys() and all(
        math.isclose(told[name], made[name], rel_tol=1e-9, abs_tol=1e-12) for name in made
    )


def _not_said_by_silos(
    place: str, version: int, told: RunSummary | PersonalLine, course: Course
) -> Iterator[Discrepancy]:
    """Figures of silos' own models that those silos did not answer."""
    for silo, whole in told.personal_whole_split.items():
        share = {silo: told.personal_per_silo.get(silo, {})}
        if not _was_told(whole, share, course.personal.get((silo, version), set())):
            yield place, f"the figures of {silo}'s own model at version {version} are not what it answered"


def _merged_unheard(place: str, merges: Sequence[MergeLine], course: Course) -> Iterator[Discrepancy]:
    """Replies that were merged more often than the coordinator's log says that they came."""
    taken = Counter[tuple[str, int]]()
    for line in merges:
        silos, ages = line.replies, line.staleness
        if len(silos) != len(ages):
            yield place, f"{len(ages)} ages of {len(silos)} replies in the merge of version {line.version}"
        # A reply's age is the number of merges since the model it stands on.
        taken.update((silo, line.version - 1 - age) for silo, age in zip(silos, ages, strict=False))
    received = Counter((silo, base) for silo, base, _ in course.replies)
    for (silo, base), count in sorted(taken.items()):
        if count > received[silo, base]:
            yield place, f"{count} replies of {silo} to version {base} merged, but {received[silo, base]} were received"


def _was_told(metrics: Figures, per_silo: BySilo, answers: set[str]) -> bool:
    try:
        return digest(Metrics(metrics, per_silo)) in answers
    except FieldError:
        return False
