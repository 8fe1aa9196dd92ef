"""What happened to each process of a run by its logs: its starts, events with times, and how far clocks are apart.

A silo that is started with a wrong key or another scenario is refused, and its log keeps that. Such a start is no
finding if nothing in the log after it opened a session or holds a message: the operator corrected the mistake.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from fedmq.text import counted
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import (
    Frame,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    SignatureRecord,
    StartRecord,
    TimelineRecord,
)
from fedmq.wire.messages import COORDINATOR, Kind, Reason

#: Notes that a process may write before it has a session.
_BEFORE_A_SESSION = (LogEvent.STARTED, LogEvent.HELLO_REFUSED)
#: What was wrong, for the reasons that the coordinator gives to a process that it does not know.
_WORDS: Mapping[str, str] = {Reason.UNKNOWN_SENDER: "unknown key", Reason.WRONG_RUN: "another scenario"}


@dataclass
class Start:
    """A start of a process, and what its log says until the next one."""

    process: str
    place: str
    runs: dict[str, str] = field(default_factory=dict)  # first place of every run that its records name
    declared: StartRecord | None = None  # what the process declared, if the log has it
    declared_at: str = ""  # the place of that record
    # Whether a record after the start is of a session, of a message, or of another kind than a process writes that is
    # refused.
    joined: bool = False
    refused: list[str] = field(default_factory=list)  # reasons in the coordinator's answers to its handshakes

    def take(self, place: str, record: LogRecord) -> None:
        """Add the next record."""
        match record:
            case MessageRecord():
                self.runs.setdefault(record.header.run, place)
            case StartRecord():
                self.runs.setdefault(record.run, place)
                self.declared, self.declared_at = record, place
            case NoteRecord() | TimelineRecord():
                if isinstance(run := record.facts.get("run"), str):
                    self.runs.setdefault(run, place)
                if record.event is LogEvent.HELLO_REFUSED:
                    self.refused.append(str(record.facts.get("reason", "")))


class Starts:
    """Collects the starts of all processes while their logs are read."""

    def __init__(self) -> None:
        self.of: dict[str, list[Start]] = {}  # the starts of each process, in the order of its log

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add the next record of a process's log."""
        starts = self.of.setdefault(process, [])
        noted = isinstance(record, NoteRecord) and record.event is LogEvent.STARTED
        again = isinstance(record, StartRecord) and starts and starts[-1].declared is not None
        if noted or again or not starts:
            starts.append(Start(process, place))
        starts[-1].take(place, record)
        if not _without_session(record):
            # A session belongs to the key that was declared last, even if a note of another start stands between.
            for start in reversed(starts):
                start.joined = True
                if start.declared is not None:
                    break

    def all(self) -> list[Start]:
        """Every start."""
        return [start for starts in self.of.values() for start in starts]

    def set_aside(self, intact: Collection[str]) -> list[Start]:
        """The starts at which nothing was exchanged; in a log whose chain is not intact, all count."""
        others = set(intact) - {COORDINATOR}
        return [start for start in self.all() if start.process in others and not start.joined]


def _without_session(record: LogRecord) -> bool:
    """Whether a process that never had a session could have written this record."""
    match record:
        case NoteRecord():
            return record.event in _BEFORE_A_SESSION
        case HandshakeRecord():
            return record.kind is Kind.HELLO and record.action == "sent"
        case StartRecord() | SignatureRecord() | RefusedRecord():
            return True
    return False


def refused_starts(
    aside: Collection[Start], deviating: Collection[str], refusals: Mapping[str, int] | None
) -> Iterator[str]:
    """A sentence for each process that was refused before it joined, or was stopped before it got an answer.

    ``deviating`` are places of what is of another run, key or scenario than the rest; ``refusals`` the numbers of
    refused messages in the coordinator's log by reason, None without that log.
    """
    by_process: dict[str, list[Start]] = {}
    for start in aside:
        if start.refused or {*start.runs.values(), start.declared_at} & set(deviating):
            by_process.setdefault(start.process, []).append(start)
    for process, starts in sorted(by_process.items()):
        reasons = dict.fromkeys(reason for start in starts for reason in start.refused)
        why = (
            ", ".join(_WORDS.get(reason, reason.replace("_", " ")) for reason in reasons)
            or "no answer, and another key or scenario"
        )
        places = ", ".join(start.place for start in starts)
        line = f"{process} was not admitted at {counted(len(starts), 'start')}: {why} ({places}); nothing was exchanged"
        if reasons and refusals is not None and not all(refusals.get(reason) for reason in reasons):
            line += "; the coordinator's log has no such refusal, so it may have asked another coordinator"
        yield line


#: What the coordinator's notes say about a peer.
_NOTED = {
    LogEvent.JOINED: "joined",
    LogEvent.RETURNED: "joined again, in a new session",
    LogEvent.PEER_LOST: "lost: no heartbeat, or a broken connection",
    LogEvent.KEY_ACCEPTED: "another key accepted",
    LogEvent.EXPELLED: "expelled: its key was removed or replaced",
    LogEvent.OTHER_SCENARIO: "started with another scenario",
}
#: Digits of a digest in a text.
_DIGITS = 12
#: Times have milliseconds, and clocks that are kept by a time server differ by some more [s].
_TOLERANCE = 0.05


@dataclass(frozen=True)
class SiteEvent:
    """Something that happened to a process."""

    process: str
    at: str  # date and time, of the first if there are several
    place: str  # log and line
    what: str  # one line
    notable: bool = False  # whether it is more than the usual: a refusal, an expulsion, a change of data
    times: int = 1  # number of times
    last: str = ""  # date and time of the last one

    @property
    def line(self) -> str:
        """The event in one line."""
        often = f" ({self.times:,} times until {self.last[:19]})" if self.times > 1 else ""
        return f"{self.at[:19]} {self.process}: {self.what}{often} ({self.place})"


class SiteEvents:
    """Collects the events of all processes while their logs are read."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str], SiteEvent] = {}
        self._data: dict[tuple[str, str], str] = {}

    @property
    def all(self) -> tuple[SiteEvent, ...]:
        """The events in the order of their times."""
        return tuple(sorted(self._events.values(), key=lambda event: event.at))

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add a record of a process's log."""
        match record:
            case NoteRecord() if process == COORDINATOR and record.event in _NOTED:
                notable = record.event in (LogEvent.EXPELLED, LogEvent.OTHER_SCENARIO)
                self._add(str(record.facts.get("peer")), place, record, _NOTED[record.event], notable=notable)
            case NoteRecord(event=LogEvent.STARTED | LogEvent.RESUMED):
                with_version = f" with fedmq {version}" if (version := record.facts.get("program")) else ""
                self._add(process, place, record, f"{record.event}{with_version}")
            case NoteRecord() if process == COORDINATOR and (what := record.not_summed):
                self._add(process, place, record, f"a secure sum {what}", notable=True, merged=True)
            case NoteRecord(event=LogEvent.HELLO_REFUSED):
                what = f"was not admitted: {str(record.facts.get('reason')).replace('_', ' ')}"
                self._add(process, place, record, what, notable=True, merged=True)
            case RefusedRecord() if process == COORDINATOR:
                what = f"a message of it was refused: {record.reason.replace('_', ' ')}"
                self._add(record.peer, place, record, what, notable=True, merged=True)
            case StartRecord():
                self._take_data("declared", process, place, record, record.data)
            case MessageRecord() if process == COORDINATOR and record.header.kind is Kind.STATEMENT:
                if record.action == "received":
                    self._take_data("stated", record.header.sender, place, record, " ".join(record.digests))

    def _take_data(self, how: str, process: str, place: str, record: LogRecord, digest: str) -> None:
        before = self._data.get((how, process))
        self._data[how, process] = digest
        if before is None:
            self._add(process, place, record, f"data {how}: {digest[:_DIGITS]}")
        elif before != digest:
            what = f"other data {how} than before: {digest[:_DIGITS]}, not {before[:_DIGITS]}"
            self._add(process, place, record, what, notable=True)

    def _add(
        self, process: str, place: str, record: LogRecord, what: str, *, notable: bool = False, merged: bool = False
    ) -> None:
        key = process, what if merged else f"{place}: {what}"
        if known := self._events.get(key):
            self._events[key] = replace(known, times=known.times + 1, last=record.wall)
        else:
            self._events[key] = SiteEvent(process, record.wall, place, what, notable)


def clock_differences(messages: Iterable[MessageRecord]) -> Iterator[str]:
    """A sentence for each process whose clock differs from the coordinator's by more than the round trip allows.

    A message arrives after it was sent. If by the two clocks it arrives before, they differ; the shortest delays of
    both directions bound by how much.
    """
    sent: dict[Frame, str] = {}
    received: list[MessageRecord] = []
    for record in messages:
        if record.action == "sent":
            sent[record.frame] = record.wall
        else:
            received.append(record)
    shortest: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for record in received:
        if record.frame in sent:
            ends = record.header.sender, record.header.receiver
            delay = datetime.fromisoformat(record.wall) - datetime.fromisoformat(sent[record.frame])
            shortest[ends] = min(shortest[ends], delay.total_seconds())
    for process in sorted({sender for sender, _ in shortest} - {COORDINATOR}):
        up, down = shortest[process, COORDINATOR], shortest[COORDINATOR, process]
        if min(up, down) < -_TOLERANCE and max(up, down) < float("inf"):
            ahead, error = (down - up) / 2, abs(up + down) / 2
            word = "ahead of" if ahead > 0 else "behind"
            yield (
                f"the clock of {process} is {abs(ahead):,.3f} s (± {error:,.3f} s, half the shortest round trip) "
                f"{word} the coordinator's: compare their times with that in mind"
            )
