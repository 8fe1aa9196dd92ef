"""The verdict of an audit in sentences, and its report: ``audit.html``, a page, and ``audit.csv``, the flows."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from fedmq.audit.heads import heads_of
from fedmq.audit.log_checks import Audit
from fedmq.errors import InputError
from fedmq.runs.run_records import RunSummary
from fedmq.runs.tables import csv_cell
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, make_folder, writing
from fedmq.text import counted, enumerated, first_few, printable
from fedmq.wire.log_records import sent_payloads
from fedmq.wire.messages import COORDINATOR

_COLUMNS = ("run", "method", "started", "ended", "process", "modalities", "direction", "kind", "payloads", "bytes")
#: Findings on the page; the JSON of the command has all.
_FINDINGS = 1000

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Audit of {{ run }}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#1c2733}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.2rem .8rem;border-bottom:1px solid #dde3ea;text-align:left;vertical-align:top;overflow-wrap:break-word}
td.n{text-align:right;white-space:nowrap}code{font-size:.85em;overflow-wrap:anywhere}
td.name{white-space:nowrap}
.ok{color:#17692f}.bad{color:#a8201a}.open{color:#8a5a00}
</style>
<h1>Audit of {{ run }}</h1>
<table>
<tr><th>method</th><td>{{ method }}</td></tr>
<tr><th>first record</th><td>{{ started }}</td></tr>
<tr><th>last record</th><td>{{ ended }}</td></tr>
<tr><th>processes</th><td>{{ logs|length }}</td></tr>
</table>
<p class="{{ 'open' if verdict.incomplete else 'bad' if verdict.fails else 'ok' }}"><b>{{ outcome }}</b></p>
{% if verdict.fails %}<p class="bad">{{ verdict.fails }}</p>{% endif %}
{% if verdict.incomplete %}<p class="open"><b>{{ verdict.incomplete }}</b></p>{% endif %}
<p class="ok">{{ verdict.holds }}</p>
<p class="open">{{ verdict.not_proven }}</p>
{% if findings %}<h2>Findings</h2>
<table><tr><th>place</th><th>what</th></tr>
{% for place, what in findings %}<tr><td>{{ place }}</td><td>{{ what }}</td></tr>
{% endfor %}</table>{% if more %}<p>and {{ more }} more</p>{% endif %}
{% for remark in remarks %}<p>{{ remark }}</p>{% endfor %}{% endif %}
{% for line in refused_starts %}<p>{{ line }}</p>{% endfor %}
<h2>What each process sent</h2>
<table><tr><th>process</th><th>modalities</th><th>sent to</th><th>payload</th><th>number</th>
<th>bytes of tensors</th></tr>
{% for flow in flows %}<tr><td>{{ flow.process }}</td><td>{{ flow.modalities }}</td>
<td>{{ 'peers' if flow.direction == 'down' else 'coordinator' }}</td>
<td>{{ flow.kind }}</td><td class="n">{{ '{:,}'.format(flow.payloads) }}</td>
<td class="n">{{ '{:,}'.format(flow.bytes) if flow.bytes else 'numbers only' }}</td></tr>
{% endfor %}</table>
<h2>Logs</h2>
<table><tr><th>process</th><th>records</th><th>signatures</th><th>records not signed</th>
<th>fingerprints of keys (SHA-256)</th><th>head</th></tr>
{% for log in logs %}<tr><td{{ ' class=name' if log.process|length < 25 else '' }}>{{ log.process }}</td>
<td class="n">{{ log.records }}</td>
<td class="n">{{ log.signatures }}</td><td class="n">{{ log.unsigned }}</td>
<td>{% for key in log.fingerprints %}<code>{{ key }}</code> {% else %}none{% endfor %}</td>
<td><code>{{ log.head }}</code></td></tr>
{% endfor %}</table>
<p>Digest of all heads: <code>{{ digest }}</code></p>
</html>
"""


@dataclass(frozen=True)
class Flow:
    """Payloads of one kind that a process sent.

    Args:
        process: the process that sent them.
        modalities: modalities of the silo according to the summary; empty if unknown or not a silo.
        direction: ``up`` to the coordinator, ``down`` from it.
        kind: kind of payload.
        payloads: their number.
        bytes: total size of their tensors [bytes].
    """

    process: str
    modalities: str
    direction: str
    kind: str
    payloads: int
    bytes: int


def flows_of(audit: Audit, summary: RunSummary | None) -> Iterator[Flow]:
    """What each process sent, according to the sender's log, or the receiver's if the sender's is missing."""
    sent = sent_payloads((record for _, record in audit.messages), audit.records)
    number = {(sender, kind): count for sender, kinds in sent.number.items() for kind, count in kinds.items()}
    silos = {} if summary is None else summary.per_silo
    for (sender, kind), count in sorted(number.items()):
        modalities = " and ".join(silos[sender].modalities) if sender in silos else ""
        direction = "down" if sender == COORDINATOR else "up"
        yield Flow(printable(sender), modalities, direction, printable(kind), count, sent.bytes[sender][kind])


def _facts(folder: Path, audit: Audit) -> tuple[RunSummary | None, Mapping[str, str]]:
    """The summary, if it can be read, and run, method, first and last date."""
    path, summary = RunFolder(folder).summary, None
    with suppress(InputError):  # a finding of the audit
        summary = read_json(path, RunSummary, "a run's summary") if path.exists() else None
    starts = [start for log in audit.signatures.values() for _, start in log.joined]
    runs = sorted({start.run for start in starts} | {record.header.run for _, record in audit.messages})
    methods = sorted({start.protocol for start in starts}) or ([] if summary is None else [summary.protocol])
    times = [(log.first, log.last) for log in audit.signatures.values() if log.first]
    return summary, {
        "run": printable(", ".join(runs)),
        "method": printable(", ".join(methods)),
        "started": min((first for first, _ in times), default=""),
        "ended": max((last for _, last in times), default=""),
    }


def page(folder: Path, audit: Audit, verdict: Verdict) -> str:
    """The HTML page, on which everything from the run is escaped."""
    summary, facts = _facts(folder, audit)
    logs = [
        {
            "process": printable(process),
            "records": log.records,
            "signatures": log.signatures,
            "unsigned": log.unsigned if log.starts else "all",
            "fingerprints": log.fingerprints,
            "head": log.head,
        }
        for process, log in sorted(audit.signatures.items())
    ]
    findings = [(printable(finding.place), printable(finding.what)) for finding in audit.findings[:_FINDINGS]]
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            **facts,
            verdict=verdict,
            outcome=outcome(audit),
            findings=findings,
            remarks=list(map(printable, audit.remarks)),
            refused_starts=list(map(printable, audit.refused_starts)),
            more=max(0, len(audit.findings) - _FINDINGS),
            flows=list(flows_of(audit, summary)),
            logs=logs,
            digest=heads_of(audit).digest,
        )
    )


def table(folder: Path, audit: Audit) -> str:
    """The flows as CSV, with a row for each process and kind of payload."""
    summary, facts = _facts(folder, audit)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for flow in flows_of(audit, summary):
        writer.writerow([csv_cell(str(value)) for value in (*facts.values(), *vars(flow).values())])
    return text.getvalue()


def write_report(folder: Path, audit: Audit, verdict: Verdict, to: Path) -> tuple[Path, Path]:
    """Write ``audit.html`` and ``audit.csv``.

    Args:
        folder: the run folder.
        audit: the audit of the run.
        verdict: its last sentences.
        to: folder of the files; may be the run folder, which others may have made.

    Raises:
        InputError: the folder cannot be written.
        DiskError: the disk is full or broken.
    """
    make_folder(to)
    paths = to / "audit.html", to / "audit.csv"
    for path, text in zip(paths, (page(folder, audit, verdict), table(folder, audit)), strict=True):
        with writing(path):
            # A new file of an unpredictable name: a link that someone put there is replaced, not followed.
            descriptor, name = tempfile.mkstemp(dir=to, prefix=f".{path.name}.")
            temporary = Path(name)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                    file.write(text)
                temporary.chmod(0o644)
                temporary.replace(path)
            except BaseException:
                temporary.unlink()
                raise
    return paths


#: Names that a sentence lists before it counts the rest.
_SHOWN = 4


@dataclass(frozen=True)
class Evidence:
    """Evidence that an auditor has in addition to the run folder.

    Args:
        keys: folder of the processes' public keys; None without one.
        former: processes that signed with keys which have since been replaced or removed.
        heads: heads noted before, with which the logs agree.
        stamped: time and authority of a verified time stamp of these heads; None without one.
    """

    keys: Path | None = None
    heads: bool = False
    stamped: str | None = None
    former: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What an audit shows, in one sentence each.

    Args:
        holds: what holds.
        not_proven: what is not proven.
        fails: what does not hold; empty without contradictions.
        incomplete: which logs are missing and where they are; empty if they are all there, or others contradict.
    """

    holds: str
    not_proven: str
    fails: str = ""
    incomplete: str = ""


def verdict(audit: Audit, evidence: Evidence) -> Verdict:
    """The sentences about an audit."""
    if audit.incomplete:
        return _of_missing_logs(audit)
    if audit.findings:
        return _of_findings(audit)
    agree = f"What holds: {_agreement(audit)} with {_files(audit)}"
    if not any(log.starts for log in audit.signatures.values()):
        noted = ", and with the heads noted before" if evidence.heads else ""
        changed = "that no holder of all these logs changed them" + (
            " before the heads were noted" if evidence.heads else ""
        )
        why = "as they are not signed"
        return Verdict(f"{agree}{noted}.", f"Not proven: {changed}, {why}; {_uncovered(audit)}.")
    stamp = f", which was before {evidence.stamped}" if evidence.stamped else ""
    since = f" The heads are the noted ones: nothing was changed since the heads were noted{stamp}."
    but = ", except for the last records of each log" if audit.ends else ""
    signed = "Each log is signed by its process and anchored in the logs of its peers, so that a change takes the "
    signed += f"keys of all {len(audit.records)} processes{but}"
    if len(audit.records) == 1:
        signed = "The log is signed by its process"
    holds = f"{agree}. {signed}.{since if evidence.heads else ''}"
    return Verdict(holds, f"Not proven: {'; '.join(_doubts(audit, evidence))}.")


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


def _inside(audit: Audit) -> str:
    """What holds of logs that nothing of the coordinator can be compared with."""
    signed = any(log.starts for log in audit.signatures.values())
    which = "log" if len(audit.records) == 1 else f"{len(audit.records)} logs"
    return f"the hashes{' and signatures' if signed else ''} of the {which} are valid"


def _of_missing_logs(audit: Audit) -> Verdict:
    """The sentences about an audit that found nothing but that logs are missing."""
    names = _listed(audit.absent)
    logs = "its log is" if len(audit.absent) == 1 else "their logs are"
    alone = COORDINATOR in audit.absent
    return Verdict(
        f"What holds: {_inside(audit) if alone else f'{_agreement(audit)} with {_files(audit)}'}.",
        f"Not proven: what {names} sent and received, as {logs} not in this folder.",
        incomplete=(
            f"Incomplete: nothing contradicts, but {counted(len(audit.absent), 'log')} could not be checked. Copy "
            f"messages/NAME.jsonl of {names} from the run folders on their machines into messages/ of this one, "
            "and audit again."
        ),
    )


def _of_findings(audit: Audit) -> Verdict:
    """The sentences about an audit with findings."""
    places = [finding.place.split("/")[-1] for finding in audit.findings]
    mentioned = {name for name in audit.records if any(f"{name}.jsonl" in place for place in places)}
    mentioned |= {finding.lost for finding in audit.findings}
    clean = sorted(audit.records.keys() - mentioned)
    if not clean:
        holds = "none of the logs is free of differences"
    elif len(clean) == len(audit.records):
        holds = (
            f"no difference was found inside the log of {_listed(clean)}; only other files differ from it"
            if len(clean) == 1
            else f"the {len(clean)} logs agree with each other; only other files differ from them"
        )
    else:
        holds = f"no difference was found in the {'log' if len(clean) == 1 else 'logs'} of {_listed(clean)}"
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
        return f"{', '.join(audit.compared)}"
    return "the figures of the run folder that they record: model digest, metrics, traffic and merges"


def _uncovered(audit: Audit) -> str:
    """What no log records."""
    if not audit.compared:
        return "real times, memory and losses"
    return "real times and memory in summary.json, and report.html, status.json and checkpoints/"


def _doubts(audit: Audit, evidence: Evidence) -> Iterator[str]:
    """What signed logs without findings do not prove."""
    before = " before the heads were noted" if evidence.heads else ""
    yield f"that the holders of all keys did not collude to write false logs{before}"
    if audit.ends:
        named = _listed([f"{count} of {name}" for name, count in audit.ends.items()])
        yield f"that no signer changed the last records of its log ({named}), for which fewer keys are enough"
    if evidence.keys is None:
        yield "whose keys these are (compare fingerprints, or give --keys DIR)"
    elif audit.keyless:
        yield _keyless(audit, evidence.keys)
    if evidence.former:
        yield f"that no one else held the keys of {_listed(list(evidence.former))} that were replaced or removed"
    yield f"the {_uncovered(audit)}, which no signature covers"
    if evidence.stamped is None:
        yield "when it happened, without an external time stamp"
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
