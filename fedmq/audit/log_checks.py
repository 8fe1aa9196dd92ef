"""Check the message logs in a run folder: each log's hash chain, and the two ends of every message against each other.

A log has one JSON object per line. Every record holds the hash of the record before it and a hash of its own content,
so changed, removed and inserted lines are detected. Records hold no tensors, captions or keys, only sender, receiver,
payload kinds and sizes, and the authentication tag of the sealed frame, which both ends log.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fedmq.audit.events import SiteEvent, SiteEvents, Start, clock_differences, refused_starts
from fedmq.audit.findings import Cause, Finding
from fedmq.audit.result_checks import LoggedRun
from fedmq.audit.run_checks import RunFiles, changed_files, check_run_folder, compared_files, read_run_files
from fedmq.audit.signatures import SignatureChecks, SignedLog, ends_to_change
from fedmq.audit.sums import SumChecks
from fedmq.config.run_id import folder_of, name_of
from fedmq.errors import InputError
from fedmq.runs.run_records import RunSummary
from fedmq.storage.locks import is_locked
from fedmq.storage.regular_files import check_run_files
from fedmq.storage.run_folder import RunFolder, require_folder
from fedmq.wire.limits import UNKNOWN
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import (
    GENESIS,
    HEADER,
    Frame,
    HandshakeRecord,
    LogRecord,
    MessageRecord,
    NoteRecord,
    RefusedRecord,
    SentPayloads,
    SignatureRecord,
    StartRecord,
    TimelineRecord,
    read_log,
)
from fedmq.wire.messages import COORDINATOR, Kind, Reason

_NOT_INLINE = "says that nothing was sent; only the coordinator may, and only where no log has a message or a handshake"


# ------------------------------------------------------------------------------------------------------ the audit
@dataclass
class Audit:
    """The result of auditing a run's logs."""

    # Discrepancies; empty if the logs are consistent in themselves and with each other.
    findings: list[Finding] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)  # number of records read, by process
    # Number and tensor bytes of the payloads that each process sent, by its own log.
    payloads: SentPayloads = field(default_factory=SentPayloads)
    frames: Counter[str] = field(default_factory=Counter)  # all frames that each process sent [bytes]
    # Number of refused frames, by process and reason.
    refused: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    # Number of messages that were sent but not logged as received: they were refused, or in transit when a process
    # ended.
    undelivered: int = 0
    inline: bool = False  # the silos ran inside the coordinator and exchanged no messages, so there is nothing to check
    # Every record of a sealed message with its file and line, as each end logged it.
    messages: list[tuple[str, MessageRecord]] = field(default_factory=list)
    finished: bool = False  # the run has a summary, so that its release and its final evaluation are checked, too
    summary: RunSummary | None = None  # that summary, if it is valid
    # Processes that are writing their logs now; messages sent while the logs are read one by one may show as
    # discrepancies.
    written: tuple[str, ...] = ()
    signatures: dict[str, SignedLog] = field(default_factory=dict)  # signatures of each log, by process
    keyless: tuple[str, ...] = ()  # processes of which the auditor, who has public keys, has none
    refused_starts: tuple[str, ...] = ()  # a sentence for each process that was refused before it joined; no difference
    # The files of the run folder whose content is that of the digests in the coordinator's signed log.
    compared: tuple[str, ...] = ()
    # Number of last records of each log that could be changed without the keys of all processes.
    ends: Mapping[str, int] = field(default_factory=dict)
    events: tuple[SiteEvent, ...] = ()  # what happened to each process: joins, refusals, expulsions, data, versions
    clocks: tuple[str, ...] = ()  # a sentence for each process whose clock differs from the coordinator's
    # The kinds of payloads that went through a secure sum, by silo and version, as the silos noted.
    through_sums: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    @property
    def absent(self) -> list[str]:
        """The processes that took part and whose logs are not in the folder."""
        return sorted({finding.process for finding in self.findings if finding.cause is Cause.NO_LOG})

    @property
    def incomplete(self) -> bool:
        """Whether logs are missing and nothing else was found: nothing contradicts, but not all could be checked."""
        return bool(self.findings) and all(finding.cause is Cause.NO_LOG for finding in self.findings)

    @property
    def remarks(self) -> Iterator[str]:
        """What may explain findings."""
        for process in sorted({finding.process for finding in self.findings if finding.cause is Cause.NOT_SENT}):
            yield (
                f"{process}.jsonl lacks what others received from {process}: the file is incomplete, or another log of "
                f"{process} lies elsewhere, as after a start with another --out"
            )

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data."""
        return {
            "ok": not self.findings,
            "finished": self.finished,
            "written": list(self.written),
            "findings": [finding.to_plain() for finding in self.findings],
            "remarks": list(self.remarks),
            "refused_starts": list(self.refused_starts),
            "without_key": list(self.keyless),
            "not_anchored": dict(self.ends),
            "records": dict(sorted(self.records.items())),
            "left": _sorted(self.payloads.bytes),
            "decoded": _sorted(self.payloads.decoded),
            "sent": _sorted(self.payloads.number),
            "frames": dict(sorted(self.frames.items())),
            "refused": _sorted(self.refused),
            "undelivered": self.undelivered,
            "events": [vars(event) for event in self.events],
            "clocks": list(self.clocks),
        }


def _sorted(counts: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {name: dict(sorted(of_name.items())) for name, of_name in sorted(counts.items())}


#: Fields, in addition to the header, that both ends of a message must log identically.
_COMPARED = ("payloads", "decoded", "digests", "bytes", "tag", "head")
#: Place and record of each logged frame.
_Frames = dict[Frame, tuple[str, MessageRecord]]


@dataclass
class _Logs:
    """Facts collected from all logs."""

    sent: _Frames = field(default_factory=dict)  # frames as their senders logged them
    received: _Frames = field(default_factory=dict)  # frames as their receivers logged them
    # Count and last place, by action, kind, sender and receiver.
    handshakes: dict[tuple[str, str, str, str], tuple[int, str]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)  # processes that a record mentions, with the first place
    # Processes whose logs note that nothing was sent, with the place of that note.
    inline: list[tuple[str, str]] = field(default_factory=list)
    exchanged: bool = False  # whether any log has a message or a handshake
    course: LoggedRun = field(default_factory=LoggedRun)  # facts to compare with the rest of the run folder
    # Signatures, and what processes declared at their starts.
    signed: SignatureChecks = field(default_factory=SignatureChecks)
    events: SiteEvents = field(default_factory=SiteEvents)  # what happened to each process
    sums: SumChecks = field(default_factory=SumChecks)  # what concerns secure sums


def _log_files(folder: Path, files: RunFiles, elsewhere: Sequence[Path]) -> list[Path]:
    """The logs of a run in its folder, and those of the same run that its sites keep elsewhere."""
    found = {path.stem: path for path in sorted((folder / "messages").glob("*.jsonl"))}
    run = "*" if files.scenario is None else name_of(files.scenario)
    names = [run]
    if elsewhere and COORDINATOR in found:  # a standing silo has a folder for each coordinator's log
        names += [folder_of(run, record.hash) for _, record in islice(read_log(found[COORDINATOR]), 1) if record]
    for place in elsewhere:
        inside = (f"{above}{name}/messages/*.jsonl" for above in ("", "*/", "*/*/") for name in names)
        more = sorted({path for pattern in ("messages/*.jsonl", *inside) for path in place.glob(pattern)})
        # A folder that a user named himself does not have the run's name.
        more = more or [path for path in sorted(place.glob("*/messages/*.jsonl")) if _is_of(path, run)]
        if not more:
            allowed = "the folder of the run of a process that took part, or one above several"
            raise InputError(f"--logs {place}", f"no log of {run}", allowed)
        for path in more:
            if found.setdefault(path.stem, path).resolve() != path.resolve():
                raise InputError(
                    f"--logs {place}", f"{path}, but {found[path.stem]} is a log of {path.stem}", "one each"
                )
    if not found:
        wanted = "a run folder that fedmq scenario or fedmq coordinator wrote"
        raise InputError(str(folder), "no messages/*.jsonl", wanted)
    return sorted(found.values(), key=lambda path: path.stem)


def _is_of(path: Path, run: str) -> bool:
    """Whether the first start that a log declares is of a run."""
    return run in (record.run for _, record in read_log(path) if isinstance(record, StartRecord))


def audit_run(folder: Path, accepted: Mapping[str, Set[str]] | None = None, elsewhere: Sequence[Path] = ()) -> Audit:
    """Check every message log of a run folder: its hash chain, sent against received messages, and both against the
    other files of the folder.

    Args:
        folder: the run folder.
        accepted: the processes' public keys (hex) by name, if the auditor has them; otherwise signatures are checked
            with the keys that the logs declare.
        elsewhere: folders with logs of sites: the folder ``out`` of a site, one of its run, or one above them.

    Raises:
        InputError: the folder holds no message logs, or two of a process, or a file in it is not a regular file.
    """
    require_folder(folder)
    check_run_files(folder)
    root = RunFolder(folder)
    files = read_run_files(root)
    logs = _log_files(folder, files, elsewhere)
    written = tuple(path.stem for path in logs if is_locked(path))
    result = Audit(finished=files.finished, summary=files.summary, written=written)
    facts, records = _Logs(), _all_records(logs, result)
    for process, content in records.items():
        for place, record in content:
            facts.course.starts.take(process, place, record)
            facts.signed.take(process, place, record)
    result.signatures = facts.signed.logs
    intact = {process for process, log in result.signatures.items() if log.broken is None and not log.invalid}
    aside = facts.course.starts.set_aside(intact)
    facts.signed.settle(aside)
    for process, content in records.items():
        # What follows the signed end of a log was added by someone without the key.
        for place, record in content[: result.signatures[process].counted if content else 0]:
            _collect(process, place, record, result, facts)
    # Any process could write that note to hide its messages, so only the coordinator's counts, and only if no log
    # has a message or a handshake.
    result.inline = not facts.exchanged and any(process == COORDINATOR for process, _ in facts.inline)
    result.through_sums = facts.sums.through
    if not result.inline:
        result.findings += [Finding(Cause.SENDER, place, _NOT_INLINE) for _, place in facts.inline]
        _compare_ends(facts, records.keys(), result)
    _compare_with_folder(root, files, facts, accepted, aside, result)
    result.ends = ends_to_change(result.signatures, (record for _, record in facts.received.values()))
    result.keyless = () if accepted is None else tuple(sorted(result.signatures.keys() - accepted.keys()))
    result.events, result.clocks = facts.events.all, tuple(clock_differences(each for _, each in result.messages))
    result.compared = compared_files(root, facts.course)
    known = {finding.place for finding in result.findings}
    result.findings += changed_files(root, facts.course, known)
    if not result.inline:
        result.findings += _missing(facts, records.keys())
    return result


def _all_records(logs: Sequence[Path], result: Audit) -> dict[str, list[tuple[str, LogRecord]]]:
    """The records of all logs with their places, by the process that wrote them.

    A file of which every record is of one other process was renamed: that is the finding, and it is read as the log of
    that process.
    """
    records: dict[str, list[tuple[str, LogRecord]]] = {}
    for path in logs:
        content = list(_checked_chain(path, result))
        writers = {record.process for _, record in content}
        owner = writers.pop() if len(writers) == 1 else path.stem
        if owner != path.stem:
            what = f"is the log of {owner}: the file was renamed, or copied over that of {path.stem}"
            result.findings.append(Finding(Cause.SENDER, content[0][0], what))
        if owner in records:
            what = f"a second log of {owner}, of which only the other file is read"
            result.findings.append(Finding(Cause.SENDER, path.name, what))
            continue
        records[owner] = content
        result.records[owner] += len(content)
        _check_records(owner, content, result)
    return records


def _compare_with_folder(
    folder: RunFolder,
    files: RunFiles,
    facts: _Logs,
    accepted: Mapping[str, Set[str]] | None,
    aside: Sequence[Start],
    result: Audit,
) -> None:
    """Compare the logs with the run folder, and what processes declared with each other.

    Differences at a start that was refused before the process joined are reported as a note, not as a finding.
    """
    findings = list(check_run_folder(folder, files, facts.course, facts.named, inline=result.inline))
    released = facts.course.released
    data = None if released is None else released[1].facts.get("data_digest")
    finished = files.finished or facts.course.ended is not None
    ended = ({COORDINATOR} | facts.course.stopped) - set(result.written) if finished else set[str]()
    findings += facts.signed.compare(files, data, accepted, ended=ended, inline=result.inline)
    keys = accepted or {process: log.trusted for process, log in facts.signed.logs.items()}
    findings += facts.sums.findings(files.scenario, keys)
    without = {place for start in aside for place in (*start.runs.values(), start.declared_at)}
    result.findings += [finding for finding in findings if finding.place not in without]
    refusals = result.refused.get(COORDINATOR, Counter[str]()) if COORDINATOR in result.signatures else None
    deviating = {finding.place for finding in findings}
    result.refused_starts = tuple(refused_starts(aside, deviating, refusals))


def _compare_ends(facts: _Logs, present: Set[str], result: Audit) -> None:
    """Compare the received messages and handshakes with the sent ones."""
    for key, (place, record) in facts.received.items():
        if key in facts.sent:
            other_place, other = facts.sent[key]
            different = [name for name in HEADER if getattr(record.header, name) != getattr(other.header, name)]
            different += [name for name in _COMPARED if getattr(record, name) != getattr(other, name)]
            if different:
                what = f"differs from {other_place} in {', '.join(different)}"
                result.findings.append(Finding(Cause.ENDS, place, what))
        elif key[0] in present:
            what = f"{record.header.kind} from {key[0]} received, but never logged as sent"
            result.findings.append(Finding(Cause.NOT_SENT, place, what, key[0]))
    for (action, kind, sender, receiver), (count, place) in facts.handshakes.items():
        sent, _ = facts.handshakes.get(("sent", kind, sender, receiver), (0, ""))
        # A hello is not encrypted: anyone who recorded one can replay it, and a restarted coordinator accepts it.
        if action == "received" and kind != Kind.HELLO and sender in present and count > sent:
            what = f"{count} times a {kind} from {sender} received, but {sent} times logged as sent"
            result.findings.append(Finding(Cause.NOT_SENT, place, what, sender))
    # Without the receiver's log it is unknown whether a message arrived.
    result.undelivered = sum(key[1] in present for key in facts.sent.keys() - facts.received.keys())


def _missing(facts: _Logs, present: Set[str]) -> Iterator[Finding]:
    """A finding for every process that is mentioned but has no log."""
    unseen = Counter(sender for sender, *_ in facts.received)
    for process in sorted(facts.named.keys() - present):
        count = unseen[process]
        mentioned = f"{facts.named[process]} mentions {process}"
        why = f"{count} messages of {process} cannot be compared" if count else mentioned
        yield Finding(Cause.NO_LOG, f"{process}.jsonl", f"no such log in this folder: {why}", process)


def _check_records(owner: str, content: Sequence[tuple[str, LogRecord]], result: Audit) -> None:
    """Check the process names and message counters of a log's records."""
    counters, strangers, refusals = dict[tuple[str, str, bytes], int](), set[str](), dict[str, float]()
    rekeyed = set[str]()
    for place, record in content:
        process = record.process
        if process != owner and process not in strangers:
            strangers.add(process)
            result.findings.append(Finding(Cause.SENDER, place, f"a record of {process} in the log of {owner}"))
        match record:
            case RefusedRecord():
                # A gap stands for an unknown number of lost messages. A refusal without a size is of a message that has
                # its own record.
                lost = math.inf if record.reason is Reason.GAP else int(record.bytes > 0)
                refusals[record.peer] = refusals.get(record.peer, 0) + lost
            case MessageRecord():
                action, sender = record.action, record.header.sender
                if record.header.kind is Kind.REKEYED:
                    rekeyed.add(record.header.receiver)
                # A silo's first sealed message is its ready, which is logged as a handshake; under new keys there is
                # none.
                first = 0 if sender == COORDINATOR or sender in rekeyed else 1
                session = action, sender, record.header.session
                counter, expected = record.header.counter, counters.get(session, first)
                # A message that was refused on arrival leaves a refusal record instead of a message record.
                refused = refusals.pop(sender, 0) if action == "received" else 0
                if counter > expected + refused:
                    what = f"message {counter} of a session, expected {expected}: what was between is not in the log"
                    result.findings.append(Finding(Cause.SESSION, place, what))
                elif counter < expected and action == "received":
                    result.findings.append(
                        Finding(Cause.SESSION, place, f"message {counter} of a session after {expected - 1}")
                    )
                counters[session] = max(expected, counter + 1)
            case HandshakeRecord():
                if record.kind is Kind.READY:
                    rekeyed.discard(record.peer if record.action == "received" else record.process)
            case NoteRecord() | TimelineRecord() | StartRecord() | SignatureRecord():
                pass


def _checked_chain(path: Path, result: Audit) -> Iterator[tuple[str, LogRecord]]:
    """The records of a log with their places, after checking the hash chain."""
    head, count, wall = GENESIS, 0, ""
    for number, record in read_log(path):
        place = f"{path.name}:{number}"
        if record is None:
            result.findings.append(Finding(Cause.CHAIN, place, "no complete record of a message log"))
            continue
        if record.previous != head or record.n != count:
            what = "does not follow the record before it: lines were removed, inserted or moved"
            result.findings.append(Finding(Cause.CHAIN, place, what))
        elif not record.intact:
            result.findings.append(Finding(Cause.CHAIN, place, "was changed after it was written"))
        if record.wall < wall:
            what = f"its time, {record.wall}, is before that of the record before it"
            result.findings.append(Finding(Cause.CHAIN, place, what))
        wall = record.wall
        head, count = record.hash, record.n + 1
        yield place, record


def _collect(process: str, place: str, record: LogRecord, result: Audit, facts: _Logs) -> None:
    """Add a record of a process's log to the collected facts."""
    if process == COORDINATOR:
        facts.course.take(place, record)
    facts.events.take(process, place, record)
    facts.sums.take(process, place, record)
    match record:
        case RefusedRecord():
            result.refused[process][record.reason] += 1
            if record.peer != UNKNOWN:  # an unknown peer needs no log
                facts.named.setdefault(record.peer, place)
        case NoteRecord():
            if record.event is LogEvent.INLINE:
                facts.inline.append((process, place))
        case HandshakeRecord():
            facts.exchanged = True
            facts.named.setdefault(record.peer, place)
            if record.action == "sent":
                result.frames[process] += record.bytes
            ends = (process, record.peer) if record.action == "sent" else (record.peer, process)
            count, _ = facts.handshakes.get((record.action, record.kind, *ends), (0, ""))
            facts.handshakes[record.action, record.kind, *ends] = count + 1, place
        case MessageRecord():
            facts.exchanged = True
            if record.action == "sent":
                result.frames[process] += record.bytes
            _collect_message(process, place, record, result, facts)
        case TimelineRecord() | StartRecord() | SignatureRecord():
            pass


def _collect_message(process: str, place: str, record: MessageRecord, result: Audit, facts: _Logs) -> None:
    """Add a message of a process's log to the collected facts."""
    header = record.header
    result.messages.append((place, record))
    for name in (header.sender, header.receiver):
        facts.named.setdefault(name, place)
    if len(record.digests) != len(record.payloads):
        what = f"{len(record.digests)} digests of {len(record.payloads)} payloads"
        result.findings.append(Finding(Cause.ENDS, place, what))
    if COORDINATOR not in (header.sender, header.receiver):
        what = f"a message from {header.sender} to {header.receiver}: silos exchange messages only with the coordinator"
        result.findings.append(Finding(Cause.SENDER, place, what))
    key = record.frame
    seen = facts.sent if record.action == "sent" else facts.received
    if key in seen:
        what = f"the same frame as {seen[key][0]} is logged as {record.action} again"
        result.findings.append(Finding(Cause.SESSION, place, what))
    seen[key] = (place, record)
    if record.action == "sent":
        result.payloads.add(process, record)
        if process != header.sender:
            what = f"{process} logged sending in the name of {header.sender}"
            result.findings.append(Finding(Cause.SENDER, place, what))
    elif process != header.receiver:
        what = f"{process} logged receiving what was for {header.receiver}"
        result.findings.append(Finding(Cause.SENDER, place, what))
