"""Compare message logs with the other files of their run folder: scenario, metrics, summary and released model.

Logs that agree with each other can still belong to another run, or cover only a part of this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from fedmq.audit.findings import Cause, Finding, damaged, wrong_result
from fedmq.audit.result_checks import LoggedRun, check_agreement, check_metrics, check_summary
from fedmq.config.resolve import load
from fedmq.config.run_id import name_of
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError
from fedmq.runs.release import BESIDE, ReleaseConfig, beside, digests_by_name, digests_of, parameters
from fedmq.runs.results import FILES, SUMMARY, read_metrics, result_digest
from fedmq.runs.run_records import MetricsLine, RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.codec import digest
from fedmq.wire.log_records import NoteRecord
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.payloads import Model

_Record = TypeVar("_Record", bound=BaseModel)


@dataclass
class RunFiles:
    """The files of a run folder, read before its logs: the logs of a run in progress then cover all of them."""

    finished: bool  # whether there is a summary file
    scenario: Mapping[str, Any] | None = (
        None  # as plain data; None, as the two below, if there is none or it is invalid
    )
    summary: RunSummary | None = None
    config: ReleaseConfig | None = None  # the configuration of the released model
    lines: list[MetricsLine] | None = None  # lines of ``metrics.jsonl``; None if the file is invalid
    found: list[Finding] = field(default_factory=list)  # discrepancies found while reading

    @property
    def protocol(self) -> object:
        """Name of the method in the scenario."""
        protocol = None if self.scenario is None else self.scenario.get("protocol")
        return protocol.get("name") if isinstance(protocol, dict) else protocol


def read_run_files(folder: RunFolder) -> RunFiles:
    """Read scenario, metrics, summary and the configuration of the release of a run folder."""
    files = RunFiles(folder.summary.exists())
    try:
        files.scenario = read_yaml(folder.scenario) if folder.scenario.exists() else None
    except InputError as error:
        files.found.append(damaged(error))
    files.summary = _read(folder.summary, RunSummary, "a run's summary", files.found)
    config = folder.model / "config.json"
    files.config = _read(config, ReleaseConfig, "the configuration of a released model", files.found)
    try:
        files.lines = read_metrics(folder)
    except InputError as error:
        files.found.append(damaged(error))
    return files


def _read(path: Path, schema: type[_Record], what: str, found: list[Finding]) -> _Record | None:
    """Read a file of the folder; None if it does not exist, or is invalid, which is a finding."""
    try:
        return read_json(path, schema, what) if path.exists() else None
    except InputError as error:
        found.append(damaged(error))
        return None


def check_run_folder(
    folder: RunFolder, files: RunFiles, course: LoggedRun, named: dict[str, str], *, inline: bool
) -> Iterator[Finding]:
    """Compare logs with the run folder they are in.

    Only files that exist are compared, so that logs can be audited without their folder; a run that is not finished
    needs no release.

    To ``named``, the processes that must have a log with the place that mentions each, those of the summary are added.
    """
    summary, finished, released = files.summary, files.finished, course.released
    yield from files.found
    yield from _same_run(folder, files, course)
    if course.other_models and not _has_model_per_silo(folder):
        yield from course.other_models
    others = (folder.scenario, folder.metrics, folder.model)
    if course.ended is not None and not folder.summary.exists() and any(map(Path.exists, others)):
        finished = True
        yield Finding(Cause.RELEASE, course.ended, f"all rounds were done, but there is no {folder.summary.name}")
    yield from _of_the_scenario(folder, files)
    if COORDINATOR not in course.starts.of:
        # Its log is missing, which is the finding: nothing below can be compared without it.
        named |= {} if summary is None else {COORDINATOR: folder.summary.name}
        return
    if finished and released is None:
        yield Finding(Cause.RELEASE, f"{COORDINATOR}.jsonl", "no note of what was released, though the run is finished")
    if finished and released is not None and not (path := folder.model / "config.json").exists():
        yield Finding(Cause.RELEASE, str(path), f"no such file, though {released[0]} mentions it")
    # The note is written after the release, so the release exists even if the process was killed before its summary.
    if released is not None and (finished or files.config is not None):
        yield from _release(folder, files, *released, course, inline=inline)
    if summary is not None:
        for silo, entry in summary.per_silo.items():
            if entry.participations:
                named.setdefault(silo, folder.summary.name)
    if files.lines is not None:
        yield from check_metrics(folder, course, files.lines, inline=inline)
        if not inline:
            yield from check_agreement(folder, course, summary)
        if summary is not None:
            yield from check_summary(folder, course, files.lines, summary, inline=inline)


def _same_run(folder: RunFolder, files: RunFiles, course: LoggedRun) -> Iterator[Finding]:
    """Check that every record belongs to one run, the scenario's."""
    if files.scenario is not None:
        expected, source = name_of(files.scenario), folder.scenario.name
    elif folder.scenario.exists():
        return  # invalid
    else:
        if files.finished:
            yield Finding(Cause.DECLARED, str(folder.scenario), f"no such file next to {folder.summary.name}")
        named = [run for start in course.starts.all() for run in start.runs]
        if not named:
            return
        expected, source = named[0], "the first record"
    reported = set[tuple[str, str, bool]]()
    for start in course.starts.all():
        for run, place in start.runs.items():
            if run != expected and (start.process, run, start.joined) not in reported:
                reported.add((start.process, run, start.joined))
                yield Finding(Cause.DECLARED, place, f"of the run {run}, but {source} is of {expected}")


def _has_model_per_silo(folder: RunFolder) -> bool:
    """Whether the run's method has a model for each silo; also if the scenario is invalid, which is another finding."""
    import protocols  # noqa: PLC0415 - loads torch, which an audit without such models does not need

    try:
        return folder.scenario.exists() and protocols.traits_of(load(folder.scenario)).model_per_silo
    except InputError:
        return True


def _of_the_scenario(folder: RunFolder, files: RunFiles) -> Iterator[Finding]:
    """Check that the release and the summary agree with the scenario."""
    if not files.scenario:
        return
    expected = {**files.scenario, "scenario": files.scenario.get("name"), "protocol": files.protocol}
    for path, record, names in (
        (folder.summary, files.summary, ("scenario", "protocol", "seed", "rounds")),
        (folder.model / "config.json", files.config, ("protocol", "backbone", "objective")),
    ):
        plain = {} if record is None else record.plain()
        for name in names:
            if name in plain and plain[name] != expected.get(name):
                yield Finding(Cause.DECLARED, str(path), f"{name} is not what {folder.scenario.name} says")


def _release(
    folder: RunFolder, files: RunFiles, noted_at: str, released: NoteRecord, course: LoggedRun, *, inline: bool
) -> Iterator[Finding]:
    """Check that the released files are what the coordinator noted and sent to the evaluator."""
    note, config, summary = released.facts, files.config, files.summary
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
            yield Finding(Cause.RELEASE, str(path), f"nothing that {noted_at} says was released")
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
        # Unless no silo had items to evaluate it on.
        if summary.own_heldout is None or summary.own_heldout.items or summary.own_heldout.missing:
            what = f"no silo was sent version {summary.versions} to evaluate it"
            yield wrong_result(f"{COORDINATOR}.jsonl", what)
        return
    place, request = course.evaluated[summary.versions]
    sent = dict(zip((kind for kind, _ in request.payloads), request.digests, strict=False))
    for kind in sorted(sent.keys() | digests.keys()):
        if sent.get(kind) != digests.get(kind):
            yield Finding(Cause.RELEASE, place, f"{request.header.receiver} was sent another {kind} than is released")


def _other(path: Path, what: str, actual: str, expected: object) -> Iterator[Finding]:
    # Same wording as fedmq.runs.release.OtherModelError, which a probe reports for the same discrepancy.
    if actual != expected:
        yield Finding(
            Cause.RELEASE, str(path), f"{what} with digest {actual} instead of the run's own, with digest {expected}"
        )


def compared_files(folder: RunFolder, course: LoggedRun) -> tuple[str, ...]:
    """The files that :func:`changed_files` compares; none in a run that is not finished."""
    if course.digests is None or not folder.summary.exists():
        return ()
    return tuple(name for name in (*FILES, SUMMARY) if name in course.digests[1])


def changed_files(folder: RunFolder, course: LoggedRun, known: Collection[str]) -> Iterator[Finding]:
    """Find files that differ from their digests in the log, except at known places, and messages after the end."""
    for place in course.after:
        yield Finding(Cause.FILE, place, "a message after the run had ended")
    if course.digests is None:
        return
    place, digests = course.digests
    for name in compared_files(folder, course):
        path = str(folder.root / name)
        if any(place_known.startswith(path) for place_known in known):
            continue
        try:
            if result_digest(folder, name) != digests[name]:
                what = f"was changed after the run had ended: its digest is not that in {place}"
                yield Finding(Cause.FILE, path, what)
        except InputError as error:
            yield Finding(Cause.FILE, path, f"{error.found} instead of the file with the digest in {place}")
