"""Whether message logs are those of the run folder they lie in: its scenario, its figures and what it released.

Logs can agree with each other and still be another run's, or tell of a part of this one. What the folder says of the
run is held against them here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from fedmq.config.loader import read_yaml
from fedmq.config.run_id import name_of
from fedmq.errors import InputError
from fedmq.evaluation.fairness import fairness_of, means
from fedmq.evaluation.metrics import is_known, objection
from fedmq.runs.model_files import BESIDE, beside, digests_of, parameters
from fedmq.runs.results import OwnMetrics, own_metrics_of
from fedmq.storage.json_files import Digest, Stored, read_json, read_lines
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.fields import FieldError
from fedmq.wire.log_records import shape
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind, Metrics, Model, digest

_OF_ANY_RECORD = {"n", "process", "wall", "previous", "hash", "action", "text", "version"}
#: Of a silo in a summary what is no figure of the evaluator's.
_OF_A_SILO = {"modalities", "samples", "participations"}
#: Figures of silos' own models, by silo.
_OF_OWN_MODELS = ("personal_whole_split", "personal_per_silo")
#: A finding's place, and what it says.
Discrepancy = tuple[str, str]


class _Silo(Stored):
    participations: int


_BySilo = Annotated[dict[str, dict[str, float]], Field(default_factory=dict)]


class _Summary(Stored):
    versions: int
    model_digest: Digest
    released_with: Annotated[dict[str, Digest], Field(default_factory=dict)]
    metrics: dict[str, float]
    per_silo: dict[str, _Silo]
    personal_whole_split: _BySilo
    personal_per_silo: _BySilo
    tasks: Annotated[dict[str, int], Field(default_factory=dict)]
    own_metrics: OwnMetrics


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
    per_silo: _BySilo
    personal_whole_split: _BySilo
    personal_per_silo: _BySilo


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
    released: tuple[str, Mapping[str, Any]] | None = None
    ended: str | None = None
    replies: set[tuple[str, int, int | None]] = field(default_factory=set)
    evaluated: dict[int, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    measured: dict[int, set[str]] = field(default_factory=dict)
    personal: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def take(self, process: str, place: str, record: Mapping[str, Any]) -> None:
        """Take a record of a process's log into account."""
        message = shape(record) == "message"
        if isinstance(run := record.get("run"), str) and (message or record["action"] == "note"):
            self.runs.setdefault((process, run), place)
        if process != COORDINATOR:
            return
        if record["action"] == "refused":
            if not record["bytes"]:  # a frame that could not be opened has some, and says nothing of what was in it
                self.refused.add(record["peer"])
        elif record["action"] == "note":
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


@dataclass
class Told:
    """What a folder tells of its run, read before the logs are: of a run that goes on they then tell of all of it.

    Args:
        lines: of ``metrics.jsonl``; None where it is no such file.
        summary: None while there is none, or where it is no summary.
        finished: whether there is one.
        found: what is wrong with either file.
    """

    lines: list[dict[str, Any]] | None
    summary: dict[str, Any] | None
    finished: bool
    found: list[Discrepancy]


def told_by(folder: RunFolder) -> Told:
    """Read what a folder tells of its run."""
    told = Told([], None, folder.summary.exists(), [])
    told.summary = _read(folder.summary, _Summary, "a run's summary", told.found) if told.finished else None
    try:
        told.lines = list(read_lines(folder.metrics, _Line, "a line of a merge or an evaluation"))
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
    config = _read(folder.model / "config.json", _Config, "the configuration of a released model", found)
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
        for silo, own in summary["per_silo"].items():
            if own["participations"]:
                named.setdefault(silo, folder.summary.name)
    if told.lines is not None:
        yield from _course(folder, course, told.lines, inline=inline)
        yield from _out_of_bounds(str(folder.metrics), told.lines, summary)
        if summary is not None:
            yield from _figures(folder, course, told.lines, summary, inline=inline)
    yield from found


def _told_of(folder: RunFolder) -> tuple[Path, ...]:
    return folder.scenario, folder.metrics, folder.model


def _read(path: Path, schema: type[BaseModel], what: str, found: list[Discrepancy]) -> dict[str, Any] | None:
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
    folder: RunFolder, config: Mapping[str, Any] | None, summary: Mapping[str, Any] | None
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
        for name in names:
            if scenario and told is not None and name in told and told[name] != own.get(name):
                yield str(path), f"{name} is not what {folder.scenario.name} says"


def _release(
    folder: RunFolder,
    course: Course,
    config: Mapping[str, Any] | None,
    summary: Mapping[str, Any] | None,
    *,
    inline: bool,
) -> Iterator[Discrepancy]:
    """What was released is what the coordinator noted, and what the evaluator was sent."""
    assert course.released is not None  # noqa: S101 - the caller has seen to it
    note = course.released[1]
    more = {key: own for key, own in note.items() if key not in {*_OF_ANY_RECORD, "model_digest", "data_digest"}}
    own = digests_of({"model_digest": "nothing", **note, "released_with": more})
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


def _other(path: Path, what: str, found: str, told: object) -> Iterator[Discrepancy]:
    # The words of fedmq.retrieval.released_model.OtherModelError: a probe finds the same.
    if found != told:
        yield str(path), f"{what} with digest {found} instead of the run's own, with digest {told}"


def _course(folder: RunFolder, course: Course, lines: list[dict[str, Any]], *, inline: bool) -> Iterator[Discrepancy]:
    """Every reply that was merged was received, and the figures are what the evaluator and the silos answered."""
    place = str(folder.metrics)
    merges, evaluations = _of_kind(lines, "merge"), _of_kind(lines, "evaluation")
    if [line["version"] for line in merges] != list(range(1, len(merges) + 1)):
        yield place, "not one merge for each version in turn"
    for line in _of_kind(lines, "personal"):
        yield from _made(f"{place}: version {line['version']}", line, own_means(line))
    if inline:
        return
    yield from _merged_unheard(place, merges, course)
    for line in evaluations:
        if not _was_told(line, course.measured.get(line["version"], set())):
            yield place, f"the figures of version {line['version']} are not what the evaluator answered"
    yield from _not_said_by_silos(place, lines, course)


def _figures(
    folder: RunFolder, course: Course, lines: list[dict[str, Any]], summary: Mapping[str, Any], *, inline: bool
) -> Iterator[Discrepancy]:
    """The summary is of those merges, and of the last of those evaluations."""
    place, metrics = str(folder.summary), folder.metrics.name
    merges, evaluations = _of_kind(lines, "merge"), _of_kind(lines, "evaluation")
    if len(merges) != summary["versions"]:
        yield str(folder.metrics), f"{len(merges)} merges, but {folder.summary.name} tells of {summary['versions']}"
    for version in sorted(course.measured.keys() - {line["version"] for line in evaluations}):
        yield str(folder.metrics), f"no figures of version {version}, though the evaluator answered"
    merged = Counter(silo for line in merges for silo in line.get("replies", []))
    for silo in sorted(merged.keys() | summary["per_silo"].keys()):
        told = summary["per_silo"].get(silo, {}).get("participations", 0)
        if told != merged[silo]:
            yield place, f"{told} participations of {silo}, but {merged[silo]} of its replies were merged"
    if summary.get("tasks", {}).get("merged", merged.total()) != merged.total():
        yield place, f"{summary['tasks']['merged']} tasks merged, but {merged.total()} by {metrics}"
    last = max(evaluations, key=lambda line: int(line["version"]), default={})
    if summary["metrics"] != last.get("metrics"):
        yield place, f"metrics are not those of the last evaluation in {metrics}"
    for silo, own in summary["per_silo"].items():
        if {name: own[name] for name in own.keys() - _OF_A_SILO} != last.get("per_silo", {}).get(silo, {}):
            yield place, f"the figures of {silo} are not those of the last evaluation in {metrics}"
    shares = last.get("per_silo", {})
    yield from _made(
        place, summary, {"per_silo_mean": means(shares), "fairness": fairness_of(shares)} if shares else {}
    )
    yield from _made(place, summary, own_means(summary))
    if not inline:
        lines = [*_of_kind(lines, "personal"), {**summary, "version": summary["versions"]}]
        yield from _not_said_by_silos(place, lines[-1:], course)
        yield from _not_told_of_silos(folder, lines, course)


def _out_of_bounds(place: str, lines: list[dict[str, Any]], summary: Mapping[str, Any] | None) -> Iterator[Discrepancy]:
    """Values that their metrics cannot have; a summary describes the user's own metrics, which others do not know."""
    own = () if summary is None else own_metrics_of(summary)
    for line in lines:
        measured = [line.get("metrics", {}), *line.get("per_silo", {}).values()]
        measured += [each for key in _OF_OWN_MODELS for each in line.get(key, {}).values()]
        for values in measured:
            told = values if summary else {name: value for name, value in values.items() if is_known(name)}
            if (wrong := objection(told, own)) is not None:
                yield place, f"a figure of version {line['version']} that cannot be: {wrong}"


def own_means(line: Mapping[str, Any]) -> dict[str, dict[str, float] | None]:
    """The means and the spread of silos' own models, from the figures beside them; None where there are none."""
    whole, shares = line.get("personal_whole_split"), line.get("personal_per_silo")
    return {
        "personal": means(whole) if whole else None,
        "personal_per_silo_mean": means(shares) if shares else None,
        "personal_fairness": fairness_of(shares) if shares else None,
    }


def _made(place: str, told: Mapping[str, Any], made: Mapping[str, dict[str, float] | None]) -> Iterator[Discrepancy]:
    """Means and spreads that are not those of the figures beside them."""
    for name, value in made.items():
        if not (name not in told if value is None else _close(told.get(name), value)):
            yield place, f"{name} is not that of the figures it is made of"


def _not_told_of_silos(folder: RunFolder, lines: list[dict[str, Any]], course: Course) -> Iterator[Discrepancy]:
    """Silos that answered how their own models do, and are in no figures; their answers may have been refused."""
    told = {(silo, line["version"]) for line in lines for silo in line.get("personal_whole_split", {})}
    for silo, version in sorted(course.personal.keys() - told):
        if silo not in course.refused:
            yield str(folder.metrics), f"no figures of {silo}'s own model at version {version}, though it answered"


def _of_kind(lines: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def _close(told: object, made: Mapping[str, float]) -> bool:
    """Whether figures are those made here: sums round differently on other processors."""
    if not isinstance(told, dict) or told.keys() != made.keys():
        return False
    return all(
        isinstance(told[name], int | float) and math.isclose(told[name], made[name], rel_tol=1e-9, abs_tol=1e-12)
        for name in made
    )


def _not_said_by_silos(place: str, lines: list[dict[str, Any]], course: Course) -> Iterator[Discrepancy]:
    """Figures of silos' own models, measured during the run, that those silos did not answer."""
    for line in lines:
        version, shares = line["version"], line.get("personal_per_silo", {})
        for silo, whole in line.get("personal_whole_split", {}).items():
            said = {"metrics": whole, "per_silo": {silo: shares.get(silo, {})}}
            if not _was_told(said, course.personal.get((silo, version), set())):
                yield place, f"the figures of {silo}'s own model at version {version} are not what it answered"


def _merged_unheard(place: str, merges: list[dict[str, Any]], course: Course) -> Iterator[Discrepancy]:
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
