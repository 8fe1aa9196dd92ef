"""Terminal output of ``fedmq audit``; its tables fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedmq.audit.log_checks import Audit
from fedmq.audit.report import Verdict, outcome
from fedmq.text import printable

#: Findings that are printed; the JSON has all.
_FINDINGS_SHOWN = 50


def print_audit(audit: Audit, sentences: Verdict, console: Console) -> None:
    """Print the result of an audit, which ends with what holds and what does not."""
    console.print(_table(audit))
    for process, reasons in sorted(audit.refused.items()):
        refused = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
        console.print(printable(f"refused by {process}: {refused}"), highlight=False, markup=False)
    for line in audit.refused_starts:
        console.print(printable(line), highlight=False, markup=False)
    if audit.undelivered:
        console.print(
            f"{audit.undelivered} messages were sent but not accepted: refused, or in transit when a process ended",
            highlight=False,
        )
    if audit.written:
        console.print(
            f"{', '.join(map(printable, audit.written))}: still being written; "
            "messages sent while the logs are read may appear as differences, so audit again after the run",
            style="yellow",
            highlight=False,
            markup=False,
        )
    if not audit.finished:
        console.print(
            "no summary.json: the run has not finished, or only its logs were copied; its result was not checked",
            style="yellow",
            highlight=False,
        )
    for finding in audit.findings[:_FINDINGS_SHOWN]:
        place, what = escape(printable(finding.place)), escape(printable(finding.what))
        colour = "yellow" if finding.absent else "red"
        console.print(f"[{colour}]{place}[/{colour}]: {what}", highlight=False)
    if len(audit.findings) > _FINDINGS_SHOWN:
        console.print(f"and {len(audit.findings) - _FINDINGS_SHOWN} more; --json has all", highlight=False)
    for remark in audit.remarks:
        console.print(printable(remark), style="yellow", highlight=False, markup=False)
    style = "yellow" if audit.incomplete else "red" if audit.findings else "green"
    console.print(outcome(audit), style=style, highlight=False)
    for sentence in filter(None, (sentences.fails, sentences.incomplete)):
        console.print(sentence, style=style, highlight=False, markup=False)
    console.print(sentences.holds, style="green", highlight=False, markup=False)
    console.print(sentences.not_proven, style="yellow", highlight=False, markup=False)


def _table(audit: Audit) -> Table:
    number: dict[str, Any] = {"justify": "right", "no_wrap": True}
    table = Table(
        Column("process", overflow="fold"),
        Column("records", **number),
        Column("bytes sent", **number),
        "payloads sent: bytes of tensors",
    )
    for process in sorted(audit.records):
        # A log may contain anything.
        payloads = "\n".join(escape(printable(line)) for line in payload_lines(audit, process))
        name = escape(printable(process))
        table.add_row(name, f"{audit.records[process]:,}", f"{audit.frames[process]:,}", payloads or "-")
    return table


def payload_lines(audit: Audit, process: str) -> list[str]:
    """Number, kind and size of the payloads that a process sent; a kind without tensors holds numbers or words only."""
    sizes: Mapping[str, int] = audit.left.get(process, {})
    return [
        f"{count:,} {kind}: {f'{sizes[kind]:,}' if sizes.get(kind) else 'numbers only'}"
        for kind, count in sorted(audit.sent.get(process, {}).items())
    ]
