"""Replay: compare two run folders of the same scenario event by event, and find the first difference.

It compares the order of events with their virtual times, every merge with its replies and their staleness, the payloads
of every task and reply (kinds, sizes, digests), every evaluation, and the digests of the released files. Anything that
depends on real time is not compared: tags, sessions, dates, and how often a message was resent. Nor are the keys,
shares and masked updates of secure sums, which are random; their sum is compared, as it gives the next model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.config.site import Site, read_site
from fedmq.errors import InputError
from fedmq.federation.participant import SiteData
from fedmq.runs.data_records import AgreementRecord
from fedmq.runs.release import BESIDE, ReleaseConfig, beside, parameters
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.resume import earlier_ends
from fedmq.runs.run_records import MetricsLine, PersonalLine, RunSummary
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, printable
from fedmq.wire.codec import digest
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.log_records import MessageRecord, NoteRecord, TimelineRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind
from fedmq.wire.payloads import MaskedUpdate, Metrics, RevealedShares, SealedShares, UpdateReport

_EVENT = ("event", "silo", "sequence", "now", "version")
_CONTENT = ("sender", "receiver", "base_version", "reply_to")
_KINDS = (Kind.TASK, Kind.REPLY, Kind.ERROR)
#: What processes stated about their data and confirmed, and silos' own evaluations.
_OF_DATA = (Kind.STATEMENT, Kind.AGREEMENT, Kind.SILO_RESULT)
#: What a silo sends in the later steps of a secure sum, which depends on random keys; their sum does not.
_OF_KEYS = frozenset({SealedShares.KIND, MaskedUpdate.KIND, RevealedShares.KIND})
#: Keys of a summary that do not depend on real time. ``personal*`` are compared if the same silos were measured.
_FIGURES = ("seed", "rounds", "versions", "metrics", "own_heldout", "per_silo_mean", "fairness", "public_items")

#: Before a key of the summary, the place of its value.
_SUMMARY = "summary: "

#: Keys of a silo in a summary that it stated about its data.
_STATED = {"data_digest", "items"}

#: Kind of message, silo, and number of the task; for an evaluation :data:`_MEASUREMENT`, silo, and version.
Key = tuple[str, str, int]

#: Evaluations have their own kind: a silo's evaluation has the same number as the reply to its last merged task.
_MEASUREMENT = "measurement of version"


@dataclass(frozen=True)
class Record:
    """The part of a run that must be identical in its replay."""

    # What came out, by place: digests of the release as the summary has them and as its files give them, and values of
    # the summary.
    outcome: Mapping[str, object]
    # In order; those that a resumed coordinator discarded because they came after its checkpoint are left out.
    events: tuple[Mapping[str, Any], ...]
    # The distinct contents of each task and reply; more than one is an inconsistency.
    messages: Mapping[Key, tuple[str, ...]]
    # Of ``metrics.jsonl`` without the real date and time, by kind and version.
    lines: Mapping[tuple[str, int], MetricsLine]
    measured: frozenset[str]  # silos whose personal models were evaluated at the end of the run
    made_with: Mapping[str, str]  # versions of fedmq, torch and Python, and the kind of processor
    resumed: int  # number of times the coordinator resumed from a checkpoint
    # Versions at which the run had ended before it was extended; they were evaluated in addition.
    ends: frozenset[int] = frozenset()

    @property
    def digest(self) -> str:
        """Digest of the released model."""
        return str(self.outcome["model_digest"])


@dataclass(frozen=True)
class Difference:
    """The first difference between a run and its replay."""

    place: str  # event, message, line or key that differs
    was: str
    now: str


def require_repeatable(scenario: Scenario, folder: RunFolder) -> None:
    """Refuse a run that cannot be repeated exactly.

    Raises:
        InputError: its clock is real time, its noise is derived from keys, or it depends on when silos joined.
    """
    if scenario.clock != "virtual":
        raise InputError(f"{folder.scenario}: clock", scenario.clock, "virtual: a run on real time cannot be repeated")
    if scenario.data is None and scenario.participation.minimum is not None:
        place, allowed = f"{folder.scenario}: participation.minimum", "null: this run depends on when silos joined"
        raise InputError(place, scenario.participation.minimum, allowed)
    if scenario.privacy.noise_from == "key":
        allowed = "seed: a replay has new keys, and so different noise"
        raise InputError(f"{folder.scenario}: privacy.noise_from", "key", allowed)


def read_record(folder: RunFolder) -> Record:
    """Read a finished run.

    Raises:
        InputError: the run is not finished, its coordinator's log is missing, or its release is damaged.
    """
    summary, log = read_summary(folder), folder.messages(COORDINATOR)
    if not log.is_file():
        raise InputError(str(folder.root), f"no {log.name} in its messages", "a run folder with its coordinator's log")
    messages: dict[Key, list[str]] = {}
    events: list[Mapping[str, Any]] = []
    logs, resumed = sorted(log.parent.glob("*.jsonl")), 0
    present = {path.stem for path in logs}
    for path in logs:
        for _, record in read_log(path):
            match record:
                case MessageRecord() if (sent := _sent(record, present)) is not None:
                    known = messages.setdefault(sent[0], [])
                    if sent[1] not in known:
                        known.append(sent[1])
                case NoteRecord(event=LogEvent.STARTED | LogEvent.RESUMED) if path == log:
                    events = [event for event in events if event["version"] < (record.version or 0)]
                    resumed += record.event is LogEvent.RESUMED
                case TimelineRecord() if path == log and record.event is not TimelineEvent.DEADLINE:
                    # Deadlines that have an effect are compared through their merges.
                    events.append({name: getattr(record, name) for name in _EVENT})
                case _:
                    pass
    return Record(
        outcome={**_released(folder, summary), **_figures(summary)},
        events=tuple(events),
        messages={key: tuple(contents) for key, contents in messages.items()},
        lines={(line.kind, line.version): _without_wall(line) for line in read_metrics(folder)},
        measured=frozenset(summary.personal_per_silo),
        made_with=summary.versions_of,
        resumed=resumed,
        ends=earlier_ends(folder),
    )


def _without_wall(line: MetricsLine) -> MetricsLine:
    return type(line).model_validate(line.model_dump(exclude_unset=True, exclude={"wall"}))


def _released(folder: RunFolder, summary: RunSummary) -> dict[str, object]:
    """Digests of the release by place: those of the summary, and those computed from the files."""
    config = read_json(folder.model / "config.json", ReleaseConfig, "the configuration of a released model")
    layout, theta = parameters(folder.model / "model.safetensors", config.layout)
    digests: dict[str, object] = {"model_digest": summary.model_digest, "released_with": summary.released_with}
    digests["model/model.safetensors"] = layout.model_digest(theta)
    for kind in sorted(BESIDE.keys() & config.released_with.keys()):
        digests[f"model/{kind}.safetensors"] = digest(beside(folder.model / f"{kind}.safetensors", kind))
    return digests


def _figures(summary: RunSummary) -> dict[str, object]:
    plain = summary.plain()
    figures = {
        **{name: plain.get(name) for name in _FIGURES},
        "per_silo": {
            name: silo.model_dump(exclude_unset=True, exclude=_STATED) for name, silo in summary.per_silo.items()
        },
        "stated": {silo: entry.model_dump(include=_STATED) for silo, entry in summary.per_silo.items()},
        # Discarded tasks are left out: they include resent replies, which depend on real time.
        "tasks.merged": summary.tasks.merged,
        "tasks.failed": summary.tasks.failed,
        "seconds.virtual": summary.seconds.virtual,
        **{name: value for name, value in plain.items() if name.startswith("personal")},
    }
    return {f"{_SUMMARY}{name}": value for name, value in sorted(figures.items())}


def _sent(record: MessageRecord, present: Set[str]) -> tuple[Key, str] | None:
    """Key and content of a task or reply that its process sent, or received from one whose log is not present."""
    header = record.header
    if record.action != "sent" and header.sender in present:
        return None
    # Errors of the coordinator end sessions, e.g. as it was stopped; its agreements repeat what the sites stated.
    if header.kind not in (*_KINDS, *_OF_DATA) or (header.sender == COORDINATOR and header.kind is not Kind.TASK):
        return None
    silo = header.receiver if header.kind is Kind.TASK else header.sender
    if not _OF_KEYS.isdisjoint(kind for kind, _ in record.payloads):
        return None
    digests = [
        digest
        for (kind, _), digest in zip(record.payloads, record.digests, strict=True)
        if kind != UpdateReport.KIND  # it has the keys of its round
    ]
    held = {"payloads": record.payloads, "digests": digests}
    content = json.dumps({**{name: getattr(header, name) for name in _CONTENT}, **held}, sort_keys=True)
    if any(kind == Metrics.KIND for kind, _ in record.payloads):
        return (_MEASUREMENT, silo, header.base_version), content
    return (header.kind, silo, header.sequence), content


def first_difference(was: Record, now: Record) -> Difference | None:
    """The first difference of a run and its replay in the order of events, or None."""
    return _event_difference(was, now) or _other_difference(was, now) or _outcome_difference(was, now)


def _event_difference(was: Record, now: Record) -> Difference | None:
    """First difference in the events, or in the messages of each event's task."""
    for number, (before, after) in enumerate(zip_longest(was.events, now.events), 1):
        if before != after:
            return Difference(f"event {number}", _shown(before), _shown(after))
        if before is None:
            continue
        for kind in _KINDS:
            difference = _message_difference((kind, before["silo"], before["sequence"]), was, now)
            if difference is not None:
                return difference
    return None


def _other_difference(was: Record, now: Record) -> Difference | None:
    """First difference in messages without an event, or in the lines of ``metrics.jsonl``."""
    for key in sorted(was.messages.keys() | now.messages.keys()):
        one_sided = key not in was.messages or key not in now.messages
        if one_sided and _under_way(key, was if key in was.messages else now):
            continue
        if key not in now.messages and key[0] == _MEASUREMENT and key[2] in was.ends:
            continue
        difference = _message_difference(key, was, now)
        if difference is not None:
            return difference
    for line in sorted(was.lines.keys() | now.lines.keys(), key=lambda line: (line[1], line[0] != "merge", line[0])):
        before, after = was.lines.get(line), now.lines.get(line)
        if after is None and line[0] != "merge" and line[1] in was.ends:
            continue
        if before != after and not _of_other_silos(before, after):
            return Difference("{} of version {}".format(*line), _shown_line(before), _shown_line(after))
    return None


def _of_other_silos(before: MetricsLine | None, after: MetricsLine | None) -> bool:
    """Whether two lines evaluate the personal models of different silos, as when a silo was offline."""
    if not isinstance(before, PersonalLine) or not isinstance(after, PersonalLine):
        return False
    return before.personal_per_silo.keys() != after.personal_per_silo.keys()


def _outcome_difference(was: Record, now: Record) -> Difference | None:
    """First difference in the released files, or in the values of the summary."""
    for place in (*was.outcome, *sorted(now.outcome.keys() - was.outcome.keys())):
        before, after = was.outcome.get(place), now.outcome.get(place)
        unstated = place == f"{_SUMMARY}stated" and not (_has_statements(was) and _has_statements(now))
        others_measured = place.startswith(f"{_SUMMARY}personal") and was.measured != now.measured
        if before != after and not unstated and not others_measured:
            return Difference(place, _shown(before), _shown(after))
    return None


def _has_statements(record: Record) -> bool:
    """Whether the silos of a run stated their data; those of inline runs do not."""
    return any(kind == Kind.STATEMENT for kind, _, _ in record.messages)


def _under_way(key: Key, record: Record) -> bool:
    """Whether a message that only this run has was in transit at its end, so that real time decided on its record."""
    kind, silo, number = key
    if kind in _OF_DATA:
        return True
    if kind == _MEASUREMENT:  # of a personal model: the run does not wait for an offline silo
        return silo != EVALUATOR and (
            number == record.outcome[f"{_SUMMARY}versions"] or ("personal", number) in record.lines
        )
    over = max((event["sequence"] for event in record.events if event["silo"] == silo), default=-1)
    tasks = [
        sequence for sort, name, sequence in record.messages if (sort, name) == (Kind.TASK, silo) and sequence > over
    ]
    return tasks != [] and number == min(tasks)


def _message_difference(key: Key, was: Record, now: Record) -> Difference | None:
    before, after = was.messages.get(key, ()), now.messages.get(key, ())
    if before == after and len(before) <= 1:
        return None
    kind, silo, number = key
    return Difference(
        printable(f"{kind} {number} of {silo}"), " and ".join(before) or "nothing", " and ".join(after) or "nothing"
    )


def _shown_line(line: MetricsLine | None) -> str:
    return _shown(None if line is None else line.plain())


def _shown(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or "nothing"
    return json.dumps(value, sort_keys=True)


_DIGITS = 12  # of a digest in a message


def sites_of(
    run: ResolvedRun, folder: RunFolder, files: Sequence[Path], progress: Progress | None = None
) -> dict[str, Site]:
    """The sites of all processes of a run, by name, after checking that their data are those of the run.

    ``files`` has a site file of each silo, and of the evaluator if the run has one.

    Raises:
        InputError: a file's data are not what a process stated, or those of a process are missing.
    """
    record = read_json(folder.agreement, AgreementRecord, "what the sites of a run stated about their data")
    scenario, sites = run.scenario, dict[str, Site]()
    needed = [*scenario.silo_names, *([EVALUATOR] if scenario.evaluator else [])]
    stated = {name: record.stated[name].data_digest for name in needed if name in record.stated}
    for file in files:
        site = read_site(file)
        content = SiteData.load(scenario, site, run.id, progress).content
        names = [name for name, digest in stated.items() if digest == content and name not in sites]
        if site.name is not None:
            names = [name for name in names if name == site.name]
        if not names:
            wanted = stated.get(site.name or "")
            what = "what a site of the run stated" if wanted is None else f"what {site.name} stated: {wanted[:_DIGITS]}"
            allowed = f"the data as they were in the run, each site once; {what}"
            raise InputError(site.place("data"), f"data with digest {content[:_DIGITS]}", allowed)
        sites[names[0]] = site
    missing = [name for name in stated if name not in sites]
    if missing:
        allowed = "a site file with the data of each; fedmq data digest finds out whose data a file has"
        raise InputError("--site", f"no data of {', '.join(missing)}", allowed)
    return sites
