"""The verdict of an audit in sentences, and its report: ``audit.html``, a page, and ``audit.csv``, the flows."""

from __future__ import annotations

import csv
import io
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from fedmq.audit.findings import by_cause
from fedmq.audit.log_checks import Audit
from fedmq.audit.signatures import heads_of
from fedmq.errors import InputError
from fedmq.packages import __version__
from fedmq.runs.report.html import TEMPLATES
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, make_folder, writing
from fedmq.text import counted, csv_cell, enumerated, first_few, printable, tensor_text
from fedmq.wire.log_records import MessageRecord
from fedmq.wire.messages import COORDINATOR, EVALUATOR, Kind
from fedmq.wire.payloads import Metrics

#: Findings on the page; the JSON of the command has all.
_FINDINGS = 1000


@dataclass(frozen=True)
class Flow:
    """Payloads of one kind that a process sent in one round."""

    process: str  # the process that sent them
    modalities: str  # modalities of the silo according to the summary; empty if unknown or not a silo
    direction: str  # ``up`` to the coordinator, ``down`` from it
    kind: str  # kind of payload
    # Number of the merge for which they were sent or that they measure; empty for what belongs to none.
    round: int | str
    first: str  # date and time of the first one, by the sender's clock
    last: str  # date and time of the last one
    payloads: int  # their number
    bytes: int  # total size of their tensors [bytes]


def flows_of(audit: Audit) -> Iterator[Flow]:
    """What each process sent, according to the sender's log, or the receiver's if the sender's is missing."""
    silos = {} if audit.summary is None else audit.summary.per_silo
    found: dict[tuple[str, str, int], list[tuple[str, int]]] = {}
    for _, record in audit.messages:
        sender = record.header.sender
        if record.action == "sent" or sender not in audit.records:
            for kind, size in record.payloads:
                found.setdefault((sender, kind, _round(record)), []).append((record.wall, size))
    for (sender, kind, number), payloads in sorted(found.items()):
        modalities = " and ".join(silos[sender].modalities) if sender in silos else ""
        direction, times = "down" if sender == COORDINATOR else "up", [wall for wall, _ in payloads]
        total, which = sum(size for _, size in payloads), "" if number < 0 else number
        yield Flow(
            printable(sender), modalities, direction, printable(kind), which, min(times), max(times), len(times), total
        )


def _round(record: MessageRecord) -> int:
    """The merge for which a message was sent, or after which it measures the model; -1 for others."""
    header = record.header
    measures = header.sender == EVALUATOR or any(kind == Metrics.KIND for kind, _ in record.payloads)
    match header.kind:
        case Kind.TASK | Kind.SUM:
            return header.base_version + 1
        case Kind.REPLY:
            return header.base_version + (not measures)
        case Kind.EVALUATE | Kind.EVALUATE_SILO | Kind.SILO_RESULT:
            return header.base_version
    return -1


def _facts(audit: Audit) -> Mapping[str, str]:
    """Run, method, first and last date."""
    starts = [start for log in audit.signatures.values() for _, start in log.joined]
    runs = sorted({start.run for start in starts} | {record.header.run for _, record in audit.messages})
    methods = sorted({start.protocol for start in starts}) or ([audit.summary.protocol] if audit.summary else [])
    times = [(log.first, log.last) for log in audit.signatures.values() if log.first]
    return {
        "run": printable(", ".join(runs)),
        "method": printable(", ".join(methods)),
        "started": min((first for first, _ in times), default=""),
        "ended": max((last for _, last in times), default=""),
    }


def page(audit: Audit, verdict: Verdict) -> str:
    """The HTML page, on which everything from the run is escaped."""
    logs = [
        (
            printable(process),
            f"{log.records:,}",
            len(log.valid),
            log.unsigned if log.starts else "all",
            " ".join(log.fingerprints) or "none",
            log.head,
        )
        for process, log in sorted(audit.signatures.items())
    ]
    causes, flows = by_cause(audit.findings), list(flows_of(audit))
    sites = [
        {
            "process": printable(process),
            "modalities": next((flow.modalities for flow in flows if flow.process == printable(process)), ""),
            "lines": payload_lines(audit, process),
            "flows": [
                (flow.round, flow.kind, flow.first[:19], flow.last[:19], f"{flow.payloads:,}", tensor_text(flow.bytes))
                for flow in sorted(flows, key=lambda flow: flow.first)
                if flow.process == printable(process)
            ],
            "events": [printable(event.line) for event in audit.events if event.process == process],
        }
        for process in sorted({*audit.records, *(event.process for event in audit.events)})
    ]
    findings = [(printable(finding.place), printable(finding.what)) for finding in audit.findings[:_FINDINGS]]
    return (
        Environment(autoescape=True, trim_blocks=True, loader=FileSystemLoader([Path(__file__).parent, TEMPLATES]))
        .get_template("audit.html.jinja")
        .render(
            **_facts(audit),
            verdict=verdict,
            outcome=outcome(audit),
            findings=findings,
            causes=[(printable(finding.place), printable(finding.what + more)) for finding, more in causes],
            clocks=list(map(printable, audit.clocks)),
            total=payload_lines(audit, *audit.records.keys() - {COORDINATOR, EVALUATOR}),
            sites=sites,
            remarks=list(map(printable, audit.remarks)),
            refused_starts=list(map(printable, audit.refused_starts)),
            more=max(0, len(audit.findings) - _FINDINGS),
            logs=logs,
            digest=heads_of(audit.signatures).digest,
        )
    )


def payload_lines(audit: Audit, *processes: str) -> list[str]:
    """Number, kind and size of the payloads that processes sent; a kind without tensors holds numbers or words only."""
    number, sizes, decoded = Counter[str](), Counter[str](), Counter[str]()
    for process in processes:
        number.update(audit.payloads.number.get(process, {}))
        sizes.update(audit.payloads.bytes.get(process, {}))
        decoded.update(audit.payloads.decoded.get(process, {}))
    whole = {kind: f" ({tensor_text(size)} decoded)" for kind, size in decoded.items() if size != sizes[kind]}
    return [
        printable(f"{count:,} {kind}: {tensor_text(sizes[kind])}{whole.get(kind, '')}")
        for kind, count in sorted(number.items())
    ]


def like_silos(audit: Audit) -> list[list[str]]:
    """The silos in groups that sent the same kinds of payloads."""
    groups: dict[frozenset[str], list[str]] = {}
    for process in sorted(audit.records.keys() - {COORDINATOR, EVALUATOR}):
        groups.setdefault(frozenset(audit.payloads.number.get(process, {})), []).append(process)
    return list(groups.values())


def table(audit: Audit) -> str:
    """The flows as CSV, with a row for each process, kind of payload and round."""
    facts = _facts(audit)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*facts, *(column.name for column in fields(Flow))])
    for flow in flows_of(audit):
        writer.writerow([csv_cell(str(value)) for value in (*facts.values(), *vars(flow).values())])
    return text.getvalue()


def write_report(audit: Audit, verdict: Verdict, to: Path) -> tuple[Path, Path]:
    """Write ``audit.html`` and ``audit.csv``, with the verdict, into a folder, which others may have made.

    Raises:
        InputError: the folder cannot be written.
        DiskError: the disk is full or broken.
    """
    make_folder(to)
    paths = to / "audit.html", to / "audit.csv"
    for path, text in zip(paths, (page(audit, verdict), table(audit)), strict=True):
        # From a folder of an unpredictable name: a link that someone put there is replaced, not followed.
        with writing(path), tempfile.TemporaryDirectory(dir=to, prefix=f".{path.name}.") as private:
            temporary = Path(private) / path.name
            temporary.write_text(text, encoding="utf-8", newline="")
            temporary.replace(path)
    return paths


#: Names that a sentence lists before it counts the rest.
_SHOWN = 4


@dataclass(frozen=True)
class Evidence:
    """Evidence that an auditor has in addition to the run folder."""

    keys: Path | None = None  # folder of the processes' public keys; None without one
    heads: bool = False  # heads noted before, with which the logs agree
    former: tuple[str, ...] = ()  # processes that signed with keys which have since been replaced or removed
    page: str | None = None  # what differing_page says of the run's report
    profiled: bool = False


@dataclass(frozen=True)
class Verdict:
    """What an audit shows, in one sentence or in a list of lines each."""

    holds: str  # what holds
    not_proven: str  # what is not proven
    fails: str = ""  # what does not hold; empty without contradictions
    incomplete: str = ""  # which logs are missing and where they are; empty if they are all there, or others contradict


def verdict(audit: Audit, evidence: Evidence) -> Verdict:
    """The sentences about an audit."""
    if audit.incomplete:
        return _of_missing_logs(audit)
    if audit.findings:
        return _of_findings(audit)
    holds = [f"{_agreement(audit)} with {_files(audit)}"]
    if len(audit.records) == 1:
        holds.append("the log is signed by its process")
    else:
        but = ", except for the last records of each log" if audit.ends else ""
        holds.append("each log is signed by its process and anchored in the logs of its peers")
        holds.append(f"so a change takes the keys of all {len(audit.records)} processes{but}")
    if audit.through_sums and audit.compared:
        holds.append("updates left the silos masked only, and each silo signed its keys of each secure sum")
    if evidence.heads:
        holds.append("the heads are the noted ones: nothing was changed since the heads were noted")
    return Verdict(_lines("What holds", holds), _lines("Not proven", [*_doubts(audit, evidence)]))


def _lines(title: str, facts: Sequence[str]) -> str:
    return "\n- ".join([f"{title}:", *facts])


def outcome(audit: Audit) -> str:
    """What an audit found, in a few words."""
    if audit.incomplete:
        return f"{counted(len(audit.absent), 'missing log')}, no contradiction"
    if audit.findings:
        return counted(len(audit.findings), "difference")
    return "the logs are consistent" if len(audit.records) > 1 else "the log is consistent"


def _agreement(audit: Audit) -> str:
    one = len(audit.records) == 1
    return "the log agrees" if one else f"the {len(audit.records)} logs agree with each other and"


def _of_missing_logs(audit: Audit) -> Verdict:
    """The sentences about an audit that found nothing but that logs are missing."""
    names = _listed(audit.absent)
    logs = "its log is" if len(audit.absent) == 1 else "their logs are"
    holds = f"{_agreement(audit)} with {_files(audit)}"
    if COORDINATOR in audit.absent:  # nothing can be compared with its log
        which = "log" if len(audit.records) == 1 else f"{len(audit.records)} logs"
        holds = f"the hashes and signatures of the {which} are valid"
    return Verdict(
        f"What holds: {holds}.",
        f"Not proven: what {names} sent and received, as {logs} not in this folder.",
        incomplete=(
            f"Incomplete: nothing contradicts, but {counted(len(audit.absent), 'log')} could not be checked: copy the "
            f"folders of the run of {names} into one folder, and name it: --logs DIR."
        ),
    )


def _of_findings(audit: Audit) -> Verdict:
    """The sentences about an audit with findings."""
    places = [finding.place.split("/")[-1] for finding in audit.findings]
    mentioned = {name for name in audit.records if any(f"{name}.jsonl" in place for place in places)}
    mentioned |= {finding.process for finding in audit.findings}
    clean = sorted(audit.records.keys() - mentioned)
    if not clean:
        holds = "none of the logs is free of differences"
    elif len(clean) == len(audit.records):
        holds = f"no difference was found inside the logs of {_listed(clean)}; only other files differ from them"
    else:
        holds = f"no difference was found in the logs of {_listed(clean)}"
    return Verdict(
        f"What holds: {holds}.",
        "Not proven: what was sent and what was computed wherever they differ.",
        f"What does not hold: the logs and files contradict each other ({counted(len(audit.findings), 'difference')}).",
    )


def _listed(names: list[str]) -> str:
    shown = [*map(printable, names)]
    return first_few(shown, _SHOWN) if len(shown) > _SHOWN else enumerated(shown)


def _files(audit: Audit) -> str:
    """The files of the run folder that were checked against the logs."""
    if audit.compared:
        return ", ".join(audit.compared)
    return "the figures of the run folder that they record: model digest, metrics, traffic and merges"


def _uncovered(audit: Audit, evidence: Evidence) -> Iterator[str]:
    """What no log records."""
    if not audit.compared:
        yield "the real times, memory and losses, which no signature covers"
        return
    beside = ["report_data.json", "status.json", "checkpoints/", *(["profile/"] if evidence.profiled else [])]
    yield "the real times and memory in summary.json, which no signature covers"
    yield f"{enumerated(beside)}, which no signature covers"


def differing_page(folder: RunFolder, audit: Audit) -> str | None:
    """Draw a run's report anew, and compare it with ``report.html``.

    Returns:
        What is not proven of it: that it shows the records, or why it cannot be drawn anew; None if it is the same, or
        if the run has none.
    """
    if audit.summary is None or not folder.report.is_file():
        return None
    import protocols  # noqa: PLC0415 - loads torch, which an audit without a report does not need
    from fedmq.runs.report import run_report  # noqa: PLC0415

    shows, method = "that report.html shows these records", audit.summary.method
    if (version := audit.summary.versions_of.get("fedmq")) != __version__:
        return f"{shows} (not compared, as it is drawn by fedmq {version})"
    if method not in protocols.METHODS.names():
        return f"{shows} (not compared, as it is of a user's own method)"
    try:
        page = read_regular(folder.report, "the report of a run").decode("utf-8", "replace")
        if page == run_report.page_of(folder, protocols.reported(method)):
            return None
    except InputError as error:
        return f"{shows} (not compared: {error})"
    return f"{shows}, which give another page (`fedmq report {folder.root}` writes it)"


def _doubts(audit: Audit, evidence: Evidence) -> Iterator[str]:
    """What signed logs without findings do not prove."""
    before = " before the heads were noted" if evidence.heads else ""
    yield f"that the holders of all keys did not collude to write false logs{before}"
    if audit.ends:
        named = _listed([f"{count} of {name}" for name, count in audit.ends.items()])
        yield f"that no signer changed the last records of its log, for which fewer keys are enough: {named}"
    if evidence.keys is None:
        yield "whose keys these are (compare fingerprints, or give --keys DIR)"
    elif audit.keyless:
        yield _keyless(audit, evidence.keys)
    if evidence.former:
        yield f"that no one else held the keys of {_listed(list(evidence.former))} that were replaced or removed"
    yield from _uncovered(audit, evidence)
    if evidence.page is not None:
        yield printable(evidence.page)
    yield "when it happened, unless an external time stamp of the heads shows it"
    if not audit.finished:
        yield "that the run did not continue, as it has no summary"
    unsigned = {process: log.unsigned for process, log in audit.signatures.items() if log.unsigned}
    if unsigned:
        total, names = sum(unsigned.values()), sorted(unsigned)
        yield f"the last {counted(total, 'record')} of {_listed(names)}, which are not signed"


def _keyless(audit: Audit, keys: Path) -> str:
    """Whose keys the auditor lacks, and the command that adds the first of them."""
    first = audit.keyless[0]
    request = keys / f"{first}.request"
    file = request if request.is_file() else f"{first}.request"
    log, of = ("log", first) if len(audit.keyless) == 1 else ("logs", "them")
    signed = f"who signed the {log} of {_listed(list(audit.keyless))}"
    return printable(f"{signed}: no public key of {of} is in {keys} (`fedmq keys accept {keys} {file}` adds it)")
