"""Whether message logs are those of the run folder they lie in: its scenario, its figures and what it released.

Logs can agree with each other and still be another run's, or tell of a part of this one. What the folder says of the
run is held against them here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from fedmq.errors import InputError
from fedmq.fields import FieldError
from fedmq.messages import COORDINATOR, EVALUATOR, Kind, Metrics, Model, digest
from fedmq.naming import name_of
from fedmq.records import shape
from fedmq.released import BESIDE, beside, parameters
from fedmq.runfolder import RunFolder
from fedmq.scenario_file import read_yaml
from fedmq.stored import Digest, Stored, read_json, read_lines

_OF_ANY_RECORD = {"n", "process", "wall", "previous", "hash", "action", "text", "version"}
#: A finding's place, and what it says.
Found = tuple[str, str]


class _Silo(Stored):
    participations: int


class _Summary(Stored):
    versions: int
    model_digest: Digest
    released_with: Annotated[dict[str, Digest], Field(default_factory=dict)]
    metrics: dict[str, float]
    per_silo: dict[str, _Silo]


class _Config(Stored):
    layout: list[str]
    layout_digest: Digest
    model_digest: Digest
    released_with: dict[str, Digest]


class _Line(Stored):
    kind: str
    version: int
    replies: Annotated[list[str], Field(default_factory=list)]
    staleness: Annotated[list[int], Field(default_factory=list)]
    metrics: Annotated[dict[str, float], Field(default_factory=dict)]
    per_silo: Annotated[dict[str, dict[str, float]], Field(default_factory=dict)]
    personal_whole_split: Annotated[dict[str, dict[str, float]], Field(default_factory=dict)]
    personal_per_silo: Annotated[dict[str, dict[str, float]], Field(default_factory=dict)]


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
    """

    runs: dict[tuple[str, str], str] = field(default_factory=dict)
    released: tuple[str, Mapping[str, Any]] | None = None
    ended: str | None = None
    replies: set[tuple[str, int, int | None]] = field(default_factory=set)
    evaluated: dict[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    measured: dict[int, set[str]] = field(default_factory=dict)
    personal: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def take(self, process: str, place: str, record: Mapping[str, Any]) -> None:
        """Take a record of a process's log into account."""
        message = shape(record) == "message"
        if isinstance(run := record.get("run"), str) and (message or record["action"] == "note"):
            self.runs.setdefault((process, run), place)
        if process != COORDINATOR:
            return
        if record["action"] == "note":
            if record["text"] == "released":
                self.released = place, record
            elif record["text"] == "ended" and record.get("phase") == "done":
                self.ended = place
        elif message and record["kind"] == Kind.EVALUATE and record["receiver"] == EVALUATOR:
            self.evaluated[record["base_version"]] = place, record
        elif message and record["kind"] == Kind.REPLY and record["action"] == "received":
            if record["sender"] == EVALUATOR:
                self.measured.setdefault(record["base_version"], set()).update(record["digests"])
            elif any(kind == Metrics.KIND for kind, _ in record["payloads"]):
                # No reply to a task, and not to be taken for one when merged replies are counted.
                own = self.personal.setdefault((record["sender"], record["base_version"]), set())
                own.update(record["digests"])
            else:
                self.replies.add((record["sender"], record["base_version"], record["reply_to"]))


def against_the_run(folder: RunFolder, course: Course, named: dict[str, str], *, inline: bool) -> Iterator[Found]:
    """Hold logs against the run folder they lie in.

    Nothing is asked of a run that is not finished, or of logs that were taken out of their folder.

    Args:
        folder: of the run.
        course: what the logs say.
        named: processes of which there must be a log, with what tells of them; those of the summary are added.
        inline: the run had no messages.
    """
    found: list[Found] = []
    yield from _same_run(folder, course)
    config = _read(folder.model / "config.json", _Config, "the configuration of a released model", found)
    summary = _read(folder.summary, _Summary, "a run's summary", found)
    finished = folder.summary.exists()
    if course.ended is not None and not finished and any(map(Path.exists, _told_of(folder))):
        finished = True
        yield course.ended, f"all rounds were done, but there is no {folder.summary.name}"
    if finished and course.released is None:
        yield f"{COORDINATOR}.jsonl", "no note of what was released, though the run is finished"
    if finished and course.released is not None:
        if not (folder.model / "config.json").exists():
            yield str(folder.model / "config.json"), f"no such file, though {course.released[0]} tells of it"
        yield from _release(folder, course, config, summary, inline=inline)
    if summary is not None:
        named |= {} if COORDINATOR in named else {COORDINATOR: folder.summary.name}
        for silo, own in summary["per_silo"].items():
            if own["participations"]:
                named.setdefault(silo, folder.summary.name)
        try:
            yield from _figures(folder, course, summary, inline=inline)
        except InputError as error:
            found.append((error.place, f"{error.found} instead of {error.allowed}"))
    yield from found


def _told_of(folder: RunFolder) -> tuple[Path, ...]:
    return folder.scenario, folder.metrics, folder.model


def _read(path: Path, schema: type[BaseModel], what: str, found: list[Found]) -> dict[str, Any] | None:
    """A file of the folder; None if it is not there, or is none, which is a finding."""
    if not path.exists():
        return None
    try:
        return read_json(path, schema, what)
    except InputError as error:
        found.append((error.place, f"{error.found} instead of {error.allowed}"))
        return None


def _same_run(folder: RunFolder, course: Course) -> Iterator[Found]:
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


def _release(
    folder: RunFolder,
    course: Course,
    config: Mapping[str, Any] | None,
    summary: Mapping[str, Any] | None,
    *,
    inline: bool,
) -> Iterator[Found]:
    """What was released is what the coordinator noted, and what the evaluator was sent."""
    assert course.released is not None  # noqa: S101 - the caller has seen to it
    note = course.released[1]
    model, more = note.get("model_digest"), {key: own for key, own in note.items() if key not in _OF_ANY_RECORD}
    more.pop("model_digest", None)
    for path, told in ((folder.model / "config.json", config), (folder.summary, summary)):
        if told is not None:
            yield from _other(path, "a model", told["model_digest"], model)
            with_it = told.get("released_with", {})
            for kind in sorted(with_it.keys() | more.keys()):
                yield from _other(path, kind, with_it.get(kind, "nothing"), more.get(kind, "nothing"))
    if config is None:
        return
    digests: dict[str, str] = {}
    try:
        path = folder.model / "model.safetensors"
        layout, theta = parameters(path, config["layout"])
        yield from _other(path, "a layout", layout.digest, config["layout_digest"])
        yield from _other(path, "a model", layout.model_digest(theta), config["model_digest"])
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
    if summary["versions"] not in course.evaluated:
        yield f"{COORDINATOR}.jsonl", f"the evaluator was never sent version {summary['versions']}, which is released"
        return
    place, record = course.evaluated[summary["versions"]]
    sent = dict(zip((kind for kind, _ in record["payloads"]), record["digests"], strict=False))
    for kind in sorted(sent.keys() | digests.keys()):
        if sent.get(kind) != digests.get(kind):
            yield place, f"the evaluator was sent another {kind} than is released"


def _other(path: Path, what: str, found: str, told: object) -> Iterator[Found]:
    # The words of fedmq.release.OtherModelError: a probe finds the same.
    if found != told:
        yield str(path), f"{what} with digest {found} instead of the run's own, with digest {told}"


def _figures(folder: RunFolder, course: Course, summary: Mapping[str, Any], *, inline: bool) -> Iterator[Found]:
    """Every reply that was merged was received, and the figures are what the evaluator answered."""
    place, lines = str(folder.metrics), list(read_lines(folder.metrics, _Line, "a line of a merge or an evaluation"))
    merges, evaluations = ([line for line in lines if line["kind"] == kind] for kind in ("merge", "evaluation"))
    if [line["version"] for line in merges] != list(range(1, summary["versions"] + 1)):
        yield place, f"not one merge for each of the {summary['versions']} versions that {folder.summary.name} tells of"
    merged = Counter(silo for line in merges for silo in line.get("replies", []))
    if not inline:
        yield from _merged_unheard(place, merges, course)
        for line in evaluations:
            if not _was_told(line, course.measured.get(line["version"], set())):
                yield place, f"the figures of version {line['version']} are not what the evaluator answered"
        yield from _not_said_by_silos(place, lines, course)
    place = str(folder.summary)
    for silo in sorted(merged.keys() | summary["per_silo"].keys()):
        told = summary["per_silo"].get(silo, {}).get("participations", 0)
        if told != merged[silo]:
            yield place, f"{told} participations of {silo}, but {merged[silo]} of its replies were merged"
    last = max(evaluations, key=lambda line: int(line["version"]), default={})
    if summary["metrics"] != last.get("metrics"):
        yield place, f"metrics are not those of the last evaluation in {folder.metrics.name}"
    for silo, own in summary["per_silo"].items():
        if any(own.get(name) != value for name, value in last.get("per_silo", {}).get(silo, {}).items()):
            yield place, f"the figures of {silo} are not those of the last evaluation in {folder.metrics.name}"


def _not_said_by_silos(place: str, lines: list[dict[str, Any]], course: Course) -> Iterator[Found]:
    """Figures of silos' own models, measured during the run, that those silos did not answer."""
    for line in lines:
        version, shares = line["version"], line.get("personal_per_silo", {})
        for silo, whole in line.get("personal_whole_split", {}).items():
            said = {"metrics": whole, "per_silo": {silo: shares.get(silo, {})}}
            if not _was_told(said, course.personal.get((silo, version), set())):
                yield place, f"the figures of {silo}'s own model at version {version} are not what it answered"


def _merged_unheard(place: str, merges: list[dict[str, Any]], course: Course) -> Iterator[Found]:
    """Replies that were merged more often than the coordinator's log says that they came."""
    taken = Counter[tuple[str, int]]()
    for line in merges:
        silos, ages = line.get("replies", []), line.get("staleness", [])
        if len(silos) != len(ages):
            yield place, f"{len(ages)} ages of {len(silos)} replies in the merge of version {line['version']}"
        # A reply's age is the number of merges since the model it stands on.
        taken.update((silo, line["version"] - 1 - age) for silo, age in zip(silos, ages, strict=False))
    received = Counter((silo, base) for silo, base, _ in course.replies)
    for (silo, base), count in sorted(taken.items()):
        if count > received[silo, base]:
            yield place, f"{count} replies of {silo} to version {base} merged, but {received[silo, base]} were received"


def _was_told(line: Mapping[str, Any], answers: set[str]) -> bool:
    try:
        return digest(Metrics(line["metrics"], line["per_silo"])) in answers
    except (KeyError, FieldError):
        return False
