"""What the message logs of a run show: each silo's tasks over time, incidents, and traffic."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.runs.report.html import Figure
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, tell
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

#: Titles of time axes.
RUN_TIME = "the run's time [s]"
VIRTUAL_TIME = "virtual time [s]"
_VIRTUAL_NOTE = (
    " Virtual time is simulated from the scenario's cost (speed and bandwidth of the silos); it is not the real time "
    "that the run took."
)
#: Height of a silo's row in the timeline [pixels].
_ROW = 18
#: Maximum number of tasks drawn; for longer runs the first and the last ones.
_MOST_TASKS = 6000
#: Outcomes of a task, with their colours.
_OUTCOMES: Mapping[str, str] = {
    "reply arrived": "#0072B2",
    "reply discarded": "#B2762A",
    "failed": "#D55E00",
    "not answered": "#9aa7b4",
}
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
    """A task of one silo.

    Args:
        silo: its name.
        sequence: number of the task.
        start: the run's time when it was sent [s].
        end: the run's time of its outcome [s]; None if there was none.
        outcome: a key of the figure's legend.
    """

    silo: str
    sequence: int
    start: float
    end: float | None = None
    outcome: str = "not answered"


@dataclass(frozen=True)
class Incident:
    """An incident at a silo.

    Args:
        silo: its name.
        now: the run's time [s].
        kind: kind of the note.
        detail: a fault's kind, or a reason; may be empty.
    """

    silo: str
    now: float
    kind: LogEvent
    detail: str


@dataclass
class LogFacts:
    """What a coordinator's log shows.

    Args:
        tasks: tasks by silo and number.
        incidents: incidents in order.
        up: payload bytes by silo and payload kind, sent by the silos.
        down: the same, sent to them.
        messages_up: number of messages by silo.
        bytes_at: payload bytes in both directions until the first message about each version.
        bytes: payload bytes in both directions.
        end: the run's last recorded time [s].
        began: date and time of the first record (UTC); empty without records.
        resumed: whether the run was resumed or extended.
    """

    tasks: dict[tuple[str, int], TaskSpan] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    up: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    down: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    messages_up: Counter[str] = field(default_factory=Counter)
    bytes_at: dict[int, int] = field(default_factory=dict)
    bytes: int = 0
    end: float = 0.0
    began: str = ""
    resumed: bool = False


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
            _settle(facts, record)
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


def _settle(facts: LogFacts, record: TimelineRecord) -> None:
    task = facts.tasks.get((record.silo, record.sequence))
    if task is None:
        return
    if record.event == TimelineEvent.ARRIVED:
        task.end, task.outcome = float(record.now), "reply arrived"
    elif record.event == TimelineEvent.FAILED:
        task.end, task.outcome = float(record.now), "failed"


def _note(facts: LogFacts, record: NoteRecord, kind: LogEvent) -> None:
    silo = str(record.facts.get("silo") or record.facts.get("peer") or "")
    if kind is LogEvent.REPLY_DISCARDED:
        task = facts.tasks.get((silo, _sequence(record)))
        # A silo that is sent a task again may reply again; the first reply counts.
        if task is not None and record.facts.get("reason") != "duplicate":
            task.outcome = "reply discarded"
    elif kind in _INCIDENTS and silo and silo != EVALUATOR:
        detail = record.facts.get("kind") or record.facts.get("reason") or ""
        facts.incidents.append(Incident(silo, facts.end, kind, str(detail)))


def _sequence(record: NoteRecord) -> int:
    sequence = record.facts.get("sequence")
    return sequence if isinstance(sequence, int) else -1


def timeline(facts: LogFacts, silos: list[str], clock: str = RUN_TIME) -> Figure | None:
    """Every silo's tasks and incidents over the run's time; None if the log has neither.

    Args:
        facts: facts from the coordinator's log.
        silos: names, in order from the top.
        clock: title of the time axis.
    """
    tasks = list(facts.tasks.values())
    if not tasks and not facts.incidents:
        return None
    note = "A bar is a task: from the time it was sent until its reply arrived. Gaps are waiting time. Drag to zoom in."
    if len(tasks) > _MOST_TASKS:
        half = _MOST_TASKS // 2
        tasks = [*tasks[:half], *tasks[-half:]]
        note += f" Only the first and the last {half:,} tasks are drawn."
    note += _VIRTUAL_NOTE if clock == VIRTUAL_TIME else ""
    seconds = "s of virtual time" if clock == VIRTUAL_TIME else "s"
    figure = Figure("Timeline of the silos", clock, "", max(240, _ROW * len(silos) + 120), note)
    figure.y |= {"type": "category", "categoryorder": "array", "categoryarray": silos[::-1]}
    figure.layout["barmode"] = "overlay"
    for outcome, colour in _OUTCOMES.items():
        some = [task for task in tasks if task.outcome == outcome]
        if some:
            ends = [facts.end if task.end is None else task.end for task in some]
            figure.draw(
                "bar",
                orientation="h",
                name=outcome,
                y=[task.silo for task in some],
                base=[task.start for task in some],
                x=[max(0.0, end - task.start) for end, task in zip(ends, some, strict=True)],
                marker={"color": colour, "line": {"width": 0}},
                customdata=[[task.sequence, task.start] for task in some],
                hovertemplate="%{y}, task %{customdata[0]}<br>"
                f"sent at %{{customdata[1]:.1f}} s, took %{{x:.1f}} {seconds}<extra></extra>",
            )
    for kind, (name, symbol) in _INCIDENTS.items():
        found = [incident for incident in facts.incidents if incident.kind is kind]
        if found:
            figure.draw(
                "scatter",
                mode="markers",
                name=name,
                x=[incident.now for incident in found],
                y=[incident.silo for incident in found],
                text=[incident.detail for incident in found],
                marker={"symbol": symbol, "size": 9, "color": "#CC79A7", "line": {"width": 1, "color": "#1c2733"}},
                hovertemplate=f"%{{y}}, {name} %{{text}}<br>at %{{x:.1f}} {seconds}<extra></extra>",
            )
    return figure


_SHOWN_BYTES = 1 << 24  # size of the logs from which on their progress is shown
_EVERY = 5000  # records between two reports of progress


@dataclass(frozen=True)
class LoggedFacts:
    """What the message logs of a run show.

    Args:
        course: tasks, incidents and traffic, by the coordinator's log.
        sent: payloads that each process sent.
    """

    course: LogFacts
    sent: SentPayloads


def read_logs(folder: RunFolder, progress: Progress | None = None, *, damaged: bool = True) -> LoggedFacts:
    """Read the message logs of a run.

    Args:
        folder: its folder; without logs, there are no facts.
        progress: called with the megabytes that are read, for large logs; None shows nothing.
        damaged: leave out lines that are not records (``fedmq audit`` names them); otherwise refuse them.

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
