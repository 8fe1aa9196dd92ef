"""The starts of each process in its log, and which of them were refused before the process joined the run.

A silo that is started with a wrong key or another scenario is refused, and its log keeps that. Such a start is no
finding if nothing in the log after it opened a session or holds a message: the operator corrected the mistake.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from fedmq.text import counted
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import (
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
_WORDS = {Reason.UNKNOWN_SENDER: "unknown key", Reason.WRONG_RUN: "another scenario"}


@dataclass
class Start:
    """A start of a process, and what its log says until the next one.

    Args:
        place: its first record.
        runs: first place of every run that its records name.
        declared: what the process declared, if the log has it.
        declared_at: the place of that record.
        joined: whether a record after the start is of a session, of a message, or of another kind than a process writes
            that is refused.
        refused: reasons in the coordinator's answers to its handshakes.
    """

    place: str
    runs: dict[str, str] = field(default_factory=dict)
    declared: StartRecord | None = None
    declared_at: str = ""
    joined: bool = False
    refused: list[str] = field(default_factory=list)

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
    """Collects the starts of all processes while their logs are read.

    Attributes:
        of: the starts of each process, in the order of its log.
    """

    def __init__(self) -> None:
        self.of: dict[str, list[Start]] = {}

    def take(self, process: str, place: str, record: LogRecord) -> None:
        """Add the next record of a process's log."""
        starts = self.of.setdefault(process, [])
        noted = isinstance(record, NoteRecord) and record.event is LogEvent.STARTED
        again = isinstance(record, StartRecord) and starts and starts[-1].declared is not None
        if noted or again or not starts:
            starts.append(Start(place))
        starts[-1].take(place, record)
        if not _without_session(record):
            # A session belongs to the key that was declared last, even if a note of another start stands between.
            for start in reversed(starts):
                start.joined = True
                if start.declared is not None:
                    break

    def all(self) -> Iterator[tuple[str, Start]]:
        """Every start with its process."""
        for process, starts in self.of.items():
            for start in starts:
                yield process, start

    def set_aside(self, intact: Collection[str]) -> list[tuple[str, Start]]:
        """The starts before which, and after which, nothing was exchanged, by process.

        Args:
            intact: processes whose logs have an unbroken hash chain; the starts in other logs all count.
        """
        return [
            (process, start)
            for process, start in self.all()
            if process != COORDINATOR and process in intact and not start.joined
        ]


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
    aside: Collection[tuple[str, Start]], deviating: Collection[str], refusals: Mapping[str, int] | None
) -> Iterator[str]:
    """A sentence for each process that was refused before it joined, or was stopped before it got an answer.

    Args:
        aside: starts without a session, with their processes.
        deviating: places of what is of another run, key or scenario than the rest.
        refusals: number of messages that the coordinator's log says it refused, by reason; None without that log.
    """
    by_process: dict[str, list[Start]] = {}
    for process, start in aside:
        if start.refused or {*start.runs.values(), start.declared_at} & set(deviating):
            by_process.setdefault(process, []).append(start)
    for process, starts in sorted(by_process.items()):
        reasons = Counter(reason for start in starts for reason in dict.fromkeys(start.refused))
        why = ", ".join(_word(reason) for reason in reasons)
        places = ", ".join(start.place for start in starts)
        if not reasons:
            did, why = "was stopped before it got an answer", "it had another key or scenario"
        else:
            did = "was refused"
        times = {1: "once", 2: "twice"}.get(len(starts), counted(len(starts), "time"))
        line = f"{process} {did} {times} before it joined: {why} ({places}); nothing else was exchanged then"
        if reasons and refusals is not None:
            known = all(refusals.get(reason) for reason in reasons)
            line += (
                ", and the coordinator's log has such refusals"
                if known
                else ", but the coordinator's log has no such refusal, so it may have asked another coordinator"
            )
        yield line


def _word(reason: str) -> str:
    return _WORDS.get(Reason(reason), reason.replace("_", " ")) if reason in set(Reason) else reason
