"""What the message logs of a run show: each silo's tasks over time, incidents, and traffic."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.config.scenario import Scenario
from fedmq.runs.report.html import COLOURS, Figure
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, counted, first_few, tell
from fedmq.wire.log_events import LogEvent, TimelineEvent
from fedmq.wire.log_records import (
    LogRecord,
    MessageRecord,
    NoteRecord,
    SentPayloads,
    TimelineRecord,
    read_records,
    record_of,
    sent_payloads,
)
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind

_VIRTUAL_TIME = "virtual time [s]"
_VIRTUAL_NOTE = (
    " Virtual time is simulated from the scenario's cost (speed and bandwidth of the silos); it is not the real time "
    "that the run took."
)
#: Height of a silo's row in the timeline [pixels].
_ROW = 18
#: Most cells of a silo's row in the timeline, and the number of merges up to which they do not follow the merges.
_CELLS, _FEW_MERGES = 120, 12
#: Outcomes of a task.
_MERGED, _DISCARDED, _FAILED, _OPEN = "reply arrived", "reply discarded", "failed", "not answered"
#: Incidents, with the plotly symbol that marks them.
_INCIDENTS: Mapping[LogEvent, tuple[str, str]] = {
    LogEvent.PEER_LOST: ("connection lost", "x"),
    LogEvent.EXPELLED: ("excluded", "octagon"),
    LogEvent.FAULT: ("scripted fault", "triangle-down"),
    LogEvent.ERROR_REPORTED: ("error reported", "diamond"),
    LogEvent.NOT_DELIVERED: ("message not delivered", "cross"),
}


@dataclass
class TaskSpan:
    """A task of one silo."""

    silo: str
    sequence: int
    start: float  # the run's time [s], like end
    end: float | None = None
    outcome: str = _OPEN


@dataclass(frozen=True)
class Incident:
    """An incident at a silo."""

    silo: str
    now: float  # the run's time [s]
    kind: LogEvent
    detail: str  # a fault's kind, or a reason; may be empty


@dataclass
class LogFacts:
    """What a coordinator's log shows."""

    tasks: dict[tuple[str, int], TaskSpan] = field(default_factory=dict)  # tasks by silo and number
    incidents: list[Incident] = field(default_factory=list)  # incidents in order
    # Payload bytes by silo and payload kind, sent by the silos.
    up: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    down: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # the same, sent to them
    messages_up: Counter[str] = field(default_factory=Counter)  # number of messages by silo
    # Payload bytes in both directions until the first message about each version.
    bytes_at: dict[int, int] = field(default_factory=dict)
    bytes: int = 0  # payload bytes in both directions
    end: float = 0.0  # the run's last recorded time [s]
    began: str = ""  # date and time of the first record (UTC); empty without records
    resumed: bool = False  # whether the run was resumed or extended
    # What secure sums did not change, with the rounds and the reason in the first of them.
    not_summed: dict[str, tuple[list[str], str]] = field(default_factory=dict)


def add_records(facts: LogFacts, lines: Iterable[bytes]) -> None:
    """Add further lines of the log to the facts; lines that are not records are left out."""
    for line in lines:
        record = record_of(line + b"\n")
        if record is not None:
            add_record(facts, record)


def add_record(facts: LogFacts, record: LogRecord) -> None:
    """Add a further record of the log to the facts."""
    facts.began = facts.began or record.wall
    match record:
        case MessageRecord():
            if EVALUATOR not in (record.header.sender, record.header.receiver):
                _count(facts, record)
            facts.bytes += sum(size for _, size in record.payloads)
            facts.bytes_at.setdefault(record.header.base_version, facts.bytes)
        case TimelineRecord():
            facts.end = max(facts.end, float(record.now))
            task = facts.tasks.get((record.silo, record.sequence))
            outcome = {TimelineEvent.ARRIVED: _MERGED, TimelineEvent.FAILED: _FAILED}.get(record.event)
            if task is not None and outcome is not None:
                task.end, task.outcome = float(record.now), outcome
        case NoteRecord(event=LogEvent() as kind):
            facts.resumed |= kind in (LogEvent.RESUMED, LogEvent.EXTENDED)
            _note(facts, record, kind)


def _count(facts: LogFacts, record: MessageRecord) -> None:
    header = record.header
    sent = record.action == "sent"
    silo = header.receiver if sent else header.sender
    table = facts.down if sent else facts.up
    for kind, size in record.payloads:
        table[silo][kind] += size
    if not sent:
        facts.messages_up[silo] += 1
    elif header.kind is Kind.TASK:
        # A task that is sent again, to a silo that was lost, keeps its start and outcome.
        facts.tasks.setdefault((silo, header.sequence), TaskSpan(silo, header.sequence, header.sent_at))


def _note(facts: LogFacts, record: NoteRecord, kind: LogEvent) -> None:
    if what := record.not_summed:
        why = str(record.facts.get("why") or "too few silos have them, or one dropped out")
        facts.not_summed.setdefault(what, ([], why))[0].append(str((record.version or 0) + 1))
    silo = str(record.facts.get("silo") or record.facts.get("peer") or "")
    if kind is LogEvent.REPLY_DISCARDED:
        task = facts.tasks.get((silo, _sequence(record)))
        # A silo that is sent a task again may reply again; the first reply counts.
        if task is not None and record.facts.get("reason") != "duplicate":
            task.outcome = _DISCARDED
    elif kind in _INCIDENTS and silo and silo != EVALUATOR:
        detail = record.facts.get("kind") or record.facts.get("reason") or ""
        facts.incidents.append(Incident(silo, facts.end, kind, str(detail)))


def _sequence(record: NoteRecord) -> int:
    sequence = record.facts.get("sequence")
    return sequence if isinstance(sequence, int) else -1


def incidents_text(facts: LogFacts) -> str:
    """Numbers of incidents by kind, ``3 connection lost, 1 excluded``; empty without any."""
    numbers = Counter(incident.kind for incident in facts.incidents)
    return ", ".join(f"{numbers[kind]} x {name}" for kind, (name, _) in _INCIDENTS.items() if numbers[kind])


def unsummed(facts: LogFacts) -> Iterator[str]:
    """A sentence for each part of the model that a secure sum left as it was."""
    for what, (rounds, why) in facts.not_summed.items():
        yield f"Secure sums {what} in {'round' if len(rounds) == 1 else 'rounds'} {first_few(rounds)}: {why}."


def time_axis(scenario: Scenario) -> str:
    """Title of an axis of the run's time."""
    return _VIRTUAL_TIME if scenario.clock == "virtual" else "time since the run began [s]"


def tasks_of(merges: Sequence[MergeLine]) -> list[TaskSpan]:
    """The tasks of a run without logs, from its merges: from the merge that made the model of a reply to its own."""
    at = {0: 0.0, **{line.version: line.now for line in merges}}
    return [
        TaskSpan(silo, line.version, at.get(line.version - 1 - stale, 0.0), line.now, _MERGED)
        for line in merges
        for silo, stale in zip(line.replies, line.staleness, strict=True)
    ]


def _edges(merges: Sequence[MergeLine], end: float) -> tuple[list[float], str]:
    """Edges of the timeline's cells [s], and what a cell is: some merges, or with few merges a share of the time."""
    if len(merges) <= _FEW_MERGES:
        return [end * place / _CELLS for place in range(_CELLS + 1)], ""
    step = -(-len(merges) // _CELLS)
    edges = [0.0, *(line.now for line in merges[step - 1 : -1 : step]), end]
    return sorted({*edges}), f"Each cell is {counted(step, 'merge')}. "


def timeline(facts: LogFacts, merges: Sequence[MergeLine], silos: list[str], clock: str) -> Figure | None:
    """How busy every silo was over the run's time, and what happened; None without tasks and incidents."""
    tasks, incidents = list(facts.tasks.values()) or tasks_of(merges), facts.incidents
    if not tasks and not incidents:
        return None
    end = max([1e-9, facts.end, *(line.now for line in merges)])
    edges, cell = _edges(merges, end)
    span = "was sent until its reply arrived" if facts.tasks else "could begin, a merge, until its reply was merged"
    note = f"{cell}Full colour: the silo had a task all the time, from when it {span}; pale: a part of the time."
    note += _VIRTUAL_NOTE if clock == _VIRTUAL_TIME else ""
    figure = Figure("Timeline of the silos", clock, "", max(200, _ROW * len(silos) + 130), note)
    figure.y |= {"type": "category", "categoryorder": "array", "categoryarray": silos[::-1], "dtick": 1}
    busy = {silo: [0.0] * (len(edges) - 1) for silo in silos}
    for task in tasks:
        stop = end if task.end is None else task.end
        for place in range(bisect(edges, task.start) - 1, len(edges) - 1) if task.silo in busy else ():
            low, high = edges[place], edges[place + 1]
            if low >= stop:
                break
            share = (min(stop, high) - max(task.start, low)) / (high - low)
            busy[task.silo][place] = min(1.0, busy[task.silo][place] + share)
    figure.draw(
        "heatmap",
        x=edges,
        y=silos,
        z=list(busy.values()),
        zmin=0,
        zmax=1,
        ygap=2,
        colorscale=[[0, "rgba(0,114,178,0)"], [1, "rgba(0,114,178,0.85)"]],
        showscale=False,
        hovertemplate="%{y} at %{x:.1f} s: busy %{z:.0%}<extra></extra>",
    )
    failed = [(task.silo, end if task.end is None else task.end, "") for task in tasks if task.outcome == _FAILED]
    marks = [(_FAILED, "circle-open", failed)]
    for kind, (name, symbol) in _INCIDENTS.items():
        some = [(each.silo, each.now, each.detail) for each in incidents if each.kind is kind]
        marks.append((name, symbol, some))
    for place, (name, symbol, found) in enumerate(marks):
        if found:
            figure.draw(
                "scatter",
                mode="markers",
                name=name,
                x=[now for _, now, _ in found],
                y=[silo for silo, _, _ in found],
                text=[detail for _, _, detail in found],
                marker={"symbol": symbol, "size": 8, "color": COLOURS[1 + place], "line": {"width": 1}},
                hovertemplate=f"%{{y}}, {name} %{{text}}<br>at %{{x:.1f}} s<extra></extra>",
            )
    return figure


_SHOWN_BYTES = 1 << 24  # size of the logs from which on their progress is shown
_EVERY = 5000  # records between two reports of progress


@dataclass(frozen=True)
class LoggedFacts:
    """What the message logs of a run show."""

    course: LogFacts
    sent: SentPayloads


def read_logs(folder: RunFolder, progress: Progress | None = None, *, damaged: bool = True) -> LoggedFacts:
    """Read the message logs of a run; without logs, there are no facts.

    The progress of large logs is in megabytes. Lines that are not records, which ``fedmq audit`` names, are left out if
    ``damaged``.

    Raises:
        InputError: a log cannot be read, or is damaged where that is refused.
    """
    course = LogFacts()
    logs = sorted((folder.root / "messages").glob("*.jsonl"))
    messages = _messages(logs, folder.messages(COORDINATOR), course, progress, damaged)
    return LoggedFacts(course, sent_payloads(messages, {log.stem for log in logs}))


def _messages(
    logs: list[Path], coordinator: Path, course: LogFacts, progress: Progress | None, damaged: bool
) -> Iterator[MessageRecord]:
    """All messages; adds the records of the coordinator to the course of the run."""
    sizes = [log.stat().st_size if log.is_file() else 0 for log in logs]
    before, total = 0, sum(sizes)
    report = tell(progress if total >= _SHOWN_BYTES else None, "reading message logs, MB", total >> 20)
    for log, size in zip(logs, sizes, strict=True):
        for record, at in read_records(log, damaged=damaged):
            if log == coordinator:
                add_record(course, record)
            if isinstance(record, MessageRecord):
                yield record
            if record.n % _EVERY == 0:
                report((before + at) >> 20)
        before += size
    report(total >> 20)
