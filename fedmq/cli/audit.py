"""``fedmq audit``: checks of message logs and policy, privacy accounting, and a membership inference probe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedmq.cli.console import DIFFERENT, bar, err
from fedmq.errors import InputError
from fedmq.safe_console import SafeConsole
from fedmq.storage.regular_files import is_file
from fedmq.text import print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.audit.dp_accounting import Accounts
    from fedmq.audit.log_checks import Audit, Finding
    from fedmq.audit.membership_inference import Probe
    from fedmq.audit.policy import PolicyResult
    from fedmq.audit.report import Verdict

    _Probed = tuple[Probe, None] | tuple[None, Finding]

#: Time until a probe shows its progress [s].
_QUIET_SECONDS = 2.0

#: Options of the command.
_Keys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="Folder of the public keys that must have signed."),
]
_Heads = Annotated[
    Path | None, typer.Option("--heads", metavar="FILE", help="Write the heads of all logs to this file.")
]
_Expect = Annotated[
    str | None,
    typer.Option(
        "--expect", metavar="FILE", help="Heads recorded earlier, as a file or its digest, to compare the logs with."
    ),
]
_Stamp = Annotated[
    str | None,
    typer.Option("--stamp", metavar="URL", help="Authority (RFC 3161) to time-stamp the file of --heads."),
]
_StampCa = Annotated[
    Path | None,
    typer.Option(
        "--stamp-ca", metavar="FILE", help=("Root certificate (PEM) for the time stamp next to the file of --expect.")
    ),
]
_Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", help="Folder for audit.html and audit.csv; RUN by default."),
]


def audit_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    policy_file: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Policy file (YAML); every message is checked against it."),
    ] = None,
    with_probe: Annotated[
        bool,
        typer.Option("--probe", help="Test whether the released model reveals which items it was trained on."),
    ] = False,
    delta: Annotated[
        float | None,
        typer.Option("--delta", help="Compute each silo's differential privacy epsilon at this delta."),
    ] = None,
    keys: _Keys = None,
    heads: _Heads = None,
    expect: _Expect = None,
    stamp: _Stamp = None,
    stamp_ca: _StampCa = None,
    report: _Report = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
) -> None:
    """Check a run's message logs: hash chains, sent against received messages, payloads of each silo, the release.

    Exit code 3 if the logs are inconsistent or violate the policy. The results of --probe and --delta do not
    affect it, unless the released model is not the run's.

    Example: [bold]fedmq audit runs/smoke[/bold]

    Example: [bold]fedmq audit runs/smoke --policy docs/policies/rcsr_p.yaml[/bold]

    Example: [bold]fedmq audit runs/smoke --heads heads.json[/bold]

    Example: [bold]fedmq audit runs/smoke --probe[/bold]

    Example: [bold]fedmq audit runs/noisy --delta 1e-5[/bold]
    """
    probe = (lambda: _probed(run)) if with_probe else None
    if _audit(run, _Options(policy_file, delta, probe, keys, heads, expect, stamp, stamp_ca, report, as_json)):
        sys.exit(DIFFERENT)


@dataclass(frozen=True)
class _Options:
    """What an audit does in addition to checking the logs.

    Args:
        policy_file: the policy to check; None checks none.
        delta: delta for which to compute epsilon; None computes none.
        probe: probes the released model; None does not probe it.
        keys: folder of public keys that must have signed; None takes those that the logs declare.
        heads: file to write the heads to; None for no file.
        expect: heads that were noted before; None compares none.
        stamp: URL of an authority that time-stamps the heads; None for no stamp.
        stamp_ca: root certificate for the stamp of the expected heads; None does not verify it.
        report: folder for the report; None for the run folder, if it can be written.
        as_json: print JSON on standard output instead of text.
    """

    policy_file: Path | None
    delta: float | None
    probe: Callable[[], _Probed] | None
    keys: Path | None
    heads: Path | None
    expect: str | None
    stamp: str | None
    stamp_ca: Path | None
    report: Path | None
    as_json: bool


def _audit(run: Path, options: _Options) -> bool:
    """Audit a run, print the result, and return whether there are findings.

    Raises:
        InputError: there is nothing to audit, the policy is invalid, or, without any finding, epsilon cannot be
            computed or the model cannot be probed.
    """
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415 - --help does without
    from fedmq.audit.heads import differences, heads_of, stamp, write_heads  # noqa: PLC0415
    from fedmq.audit.log_checks import audit_run  # noqa: PLC0415
    from fedmq.audit.report import Evidence, verdict  # noqa: PLC0415
    from fedmq.audit.signatures import KnownKeys  # noqa: PLC0415

    policy_file, delta, probe = options.policy_file, options.delta, options.probe
    _check(options)
    allowed = None if policy_file is None else policy.read_policy(policy_file)
    known = None if options.keys is None else KnownKeys.load(options.keys)
    audit = audit_run(run, None if known is None else known.all)
    if known is not None:
        known.require_any(audit.signatures, options.keys)
    audit.findings += [] if options.expect is None else differences(options.expect, audit)
    stamped = _stamped(options, audit)
    if audit.inline and not audit.findings:
        wanted = "a run with messages (launcher local, or processes launched manually)"
        raise InputError(str(run), "a run of launcher inline, whose silos sent no messages", wanted)
    policy_result = None if allowed is None or policy_file is None else policy.check_policy(audit, allowed, policy_file)
    accounts, measured, other_model, deferred = None, None, None, None
    try:
        accounts = None if delta is None else dp_accounting.account(run, audit, delta)
        measured, other_model = probe() if probe else (None, None)
    except InputError as error:
        deferred = error  # raised or printed after the findings of the logs
    audit.findings += [other_model] if other_model and other_model not in audit.findings else []
    findings = [*audit.findings, *(policy_result.findings if policy_result else ())]
    former = () if known is None else known.signed_with_former(audit.signatures)
    sentences = verdict(audit, Evidence(options.keys, options.expect is not None, stamped, former))
    heads = heads_of(audit)
    if options.heads is not None:
        write_heads(heads, options.heads)
        if options.stamp is not None:
            err.print(f"stamped at {stamp(options.heads, options.stamp)}", highlight=False)
    reported = _report(run, options, audit, sentences)
    if options.as_json:
        facts = {**audit.to_plain(), "ok": not findings, "findings": [finding.to_plain() for finding in findings]}
        facts |= {**vars(sentences), "heads": heads.plain()["heads"], "heads_digest": heads.digest}
        results = {"policy": policy_result, "accounts": accounts, "probe": measured}
        facts |= {name: each.to_plain() for name, each in results.items() if each is not None}
        print_json(facts | ({"error": str(deferred)} if deferred else {}))
    else:
        _show(audit, sentences, policy_result, accounts, measured)
        print_line(f"{_heads_line(audit)}{f', in {options.heads}' if options.heads else ''}:\n{heads.digest}")
        if reported is not None:
            print_line(f"report: {reported}, and audit.csv in the same folder")
    if deferred and not findings:
        raise deferred
    if deferred:
        err.print(f"fedmq: {deferred}", markup=False, highlight=False, soft_wrap=True)
    return bool(findings)


def _heads_line(audit: Audit) -> str:
    broken = any(log.broken is not None for log in audit.signatures.values())
    return "heads of the logs" + (" as they are now, not as they were written" if broken else "")


def _check(options: _Options) -> None:
    """Refuse options that do not belong together, before anything is audited."""
    from fedmq.audit.heads import check_expected  # noqa: PLC0415 - --help does without

    if options.expect is not None:
        check_expected(options.expect)
    if options.stamp is not None and options.heads is None:
        raise InputError("--stamp", options.stamp, "--stamp URL together with --heads FILE, which is stamped")
    if options.stamp_ca is not None and (options.expect is None or not is_file(Path(options.expect))):
        allowed = "--stamp-ca FILE together with --expect FILE, whose stamp is verified"
        raise InputError("--stamp-ca", str(options.stamp_ca), allowed)


def _stamped(options: _Options, audit: Audit) -> str | None:
    """Time and authority of the verified stamp of the expected heads; an invalid stamp becomes a finding."""
    from fedmq.audit.heads import StampError, token_of, verified  # noqa: PLC0415 - --help does without
    from fedmq.audit.log_checks import Finding  # noqa: PLC0415

    if options.stamp_ca is None or options.expect is None:
        return None
    try:
        return verified(Path(options.expect), options.stamp_ca)
    except StampError as error:
        what = f"no valid time stamp of {options.expect} by the authority of {options.stamp_ca}: {error}"
        audit.findings.append(Finding(str(token_of(Path(options.expect))), what))
        return None


def _report(run: Path, options: _Options, audit: Audit, sentences: Verdict) -> Path | None:
    """Write the report; returns its page, or None if the run folder cannot be written and no other was given."""
    from fedmq.audit.report import write_report  # noqa: PLC0415 - --help does without

    try:
        return write_report(run, audit, sentences, options.report or run)[0]
    except InputError as error:
        if options.report is not None:
            raise
        err.print(f"no report: {error}; --report DIR writes it elsewhere", markup=False, highlight=False)
        return None


def _show(
    audit: Audit,
    sentences: Verdict,
    policy_result: PolicyResult | None,
    accounts: Accounts | None,
    measured: Probe | None,
) -> None:
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415 - --help does without

    out = SafeConsole()
    print_audit(audit, sentences, out)
    if policy_result is not None:
        policy.show(policy_result, out)
    if accounts is not None:
        dp_accounting.show(accounts, out)
    if measured is not None:
        from fedmq.audit import membership_inference  # noqa: PLC0415 - brings torch

        membership_inference.show(measured, out)


def _probed(run: Path) -> _Probed:
    """Probe a run's released model; a finding if the model is not the run's. A slow probe shows its progress."""
    import protocols  # noqa: PLC0415 - brings torch
    from fedmq.audit import membership_inference  # noqa: PLC0415
    from fedmq.audit.log_checks import Finding  # noqa: PLC0415
    from fedmq.retrieval.released_model import OtherModelError, open_release  # noqa: PLC0415

    began, show = time.monotonic(), bar()

    def tell(what: str, done: int, total: int) -> None:
        if time.monotonic() - began > _QUIET_SECONDS:
            show(what, done, total)

    try:
        release = open_release(run, "auto")  # the auditor's machine may lack the run's GPU
        pooled = protocols.traits_of(release.scenario).pooled
        return membership_inference.probe(release, pooled=pooled, progress=tell), None
    except OtherModelError as error:
        return None, Finding(error.place, f"{error.found} instead of {error.allowed}")


#: Findings that are printed; the JSON has all.
_FINDINGS_SHOWN = 50


def print_audit(audit: Audit, sentences: Verdict, console: Console) -> None:
    """Print the result of an audit, which ends with what holds and what does not."""
    from fedmq.audit.report import outcome  # noqa: PLC0415 - --help does without

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
