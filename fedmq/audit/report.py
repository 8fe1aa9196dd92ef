"""The report of an audit: ``audit.html``, a page that needs nothing else, and ``audit.csv``, the flows as a table."""

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

from fedmq.audit.log_checks import Audit
from fedmq.audit.log_heads import heads_of
from fedmq.audit.verdict import Verdict, outcome
from fedmq.errors import InputError
from fedmq.runs.run_records import RunSummary
from fedmq.runs.tables import csv_cell
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder, make_folder, writing
from fedmq.text import printable
from fedmq.wire.messages import COORDINATOR
from fedmq.wire.sent_payloads import sent_payloads

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
    findings = [(printable(each.place), printable(each.what)) for each in audit.findings[:_FINDINGS]]
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
