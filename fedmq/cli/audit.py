"""``fedmq audit``: checks of message logs and policy, privacy accounting, and a membership inference probe."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fedmq.audit.findings import Cause, Finding, by_cause, damaged
from fedmq.cli.console import AGAINST_POLICY, DIFFERENT, INCOMPLETE, bar, later, out
from fedmq.cli.options import AsJson, with_options
from fedmq.errors import InputError
from fedmq.storage.run_folder import RunFolder, require_folder, write_text
from fedmq.text import counted, first_few, one_of, print_json, print_line, printable, size_text, tensor_text

if TYPE_CHECKING:
    from fedmq.audit.dp_accounting import Accounts
    from fedmq.audit.log_checks import Audit
    from fedmq.audit.membership_inference import Probe
    from fedmq.audit.payload_attacks import PayloadProbe
    from fedmq.audit.policy import PolicyResult
    from fedmq.audit.report import Verdict
    from fedmq.audit.signatures import KnownKeys

    _Probed = tuple[Probe, PayloadProbe | None, None] | tuple[None, None, Finding | None]


@dataclass(frozen=True)
class _Options:
    """What an audit does in addition to checking the logs: the options of the command, None for those not given."""

    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Policy file (YAML); every message is checked against it."),
    ] = None
    with_probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Attack the released model, and payloads kept by privacy.capture: which items were trained on?",
        ),
    ] = False
    shadows: Annotated[
        int,
        typer.Option(
            "--shadows",
            metavar="N",
            min=0,
            help="With --probe: train N shadow silos for each silo, for stronger attacks on payloads; 16 are enough.",
        ),
    ] = 0
    delta: Annotated[
        float | None, typer.Option("--delta", help="Compute each silo's differential privacy epsilon at this delta.")
    ] = None
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Folder of the public keys that must have signed.")
    ] = None
    logs: Annotated[
        list[Path] | None,
        typer.Option("--logs", metavar="DIR", help="Folder with logs of sites, or one above several; may be repeated."),
    ] = None
    heads: Annotated[
        Path | None, typer.Option("--heads", metavar="FILE", help="Write the heads of all logs to this file.")
    ] = None
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="Heads recorded earlier, as a file or its digest, to compare the logs with.",
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Folder for audit.html and audit.csv; RUN by default."),
    ] = None
    silo: Annotated[
        str | None,
        typer.Option("--silo", metavar="NAME", help="Print what this process sent, by kind and round with times."),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print every difference, event and process, not one screen.")
    ] = False
    as_json: AsJson = False


@with_options
def audit_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)], *, options: _Options
) -> None:
    """Check a run's message logs: hash chains, sent against received messages, payloads of each silo, the release.

    Exit code 3 if logs or files were altered, 4 if logs are missing and nothing contradicts, 5 if a policy is
    broken and nothing was altered. The results of --probe and --delta do not affect it, unless the released model is
    not the run's.

    Example: [bold]fedmq audit runs/smoke[/bold]

    Example: [bold]fedmq audit runs/smoke --policy docs/policies/rcsr_p.yaml[/bold]

    Example: [bold]fedmq audit runs/smoke --heads heads.json[/bold]

    Example: [bold]fedmq audit runs/smoke --probe[/bold]

    Example: [bold]fedmq audit runs/noisy --delta 1e-5[/bold]
    """
    if options.shadows % 2 or (options.shadows and not options.with_probe):
        raise InputError("--shadows", options.shadows, "an even number, together with --probe")
    if options.delta is not None and not 0 < options.delta < 1:
        raise InputError("--delta", options.delta, "a number between 0 and 1, like 1e-5")
    if code := _audit(run, options):
        sys.exit(code)


def _audit(run: Path, options: _Options) -> int:
    """Audit a run, print the result, and return the exit code."""
    require_folder(run)
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415
    from fedmq.audit.log_checks import audit_run  # noqa: PLC0415
    from fedmq.audit.report import Evidence, differing_page, verdict  # noqa: PLC0415
    from fedmq.audit.signatures import KnownKeys, differences, heads_of, read_expected  # noqa: PLC0415

    noted = None if options.expect is None else read_expected(options.expect)
    policy_file, delta = options.policy, options.delta
    allowed = None if policy_file is None else policy.read_policy(policy_file)
    known = None if options.keys is None else KnownKeys.load(options.keys)
    audit = audit_run(run, None if known is None else known.all, options.logs or [])
    _require_known(options, audit, known)
    audit.findings += [] if noted is None else differences(noted, audit.signatures)
    if audit.inline and not audit.findings:
        wanted = "a run with messages (launcher local, or processes launched manually)"
        raise InputError(str(run), "a run of launcher inline, whose silos sent no messages", wanted)
    policy_result = None if allowed is None or policy_file is None else policy.check_policy(audit, allowed, policy_file)
    accounts, measured, attacked, other_model, deferred = None, None, None, None, None
    try:
        accounts = None if delta is None else dp_accounting.account(run, audit, delta)
        measured, attacked, other_model = _probed(run, options)
    except InputError as error:
        deferred = error  # raised or printed after the findings of the logs
    audit.findings += [other_model] if other_model and other_model not in audit.findings else []
    findings = [*audit.findings, *(policy_result.findings if policy_result else ())]
    former = () if known is None else known.signed_with_former(audit.signatures)
    page, profiled = differing_page(RunFolder(run), audit), RunFolder(run).profile.exists()
    sentences = verdict(audit, Evidence(options.keys, noted is not None, former, page, profiled))
    heads = heads_of(audit.signatures)
    if options.heads is not None:
        write_text(options.heads, heads.text)
    reported = _report(run, options, audit, sentences)
    if options.as_json:
        facts = {**audit.to_plain(), "ok": not findings, "findings": [finding.to_plain() for finding in findings]}
        facts |= {**vars(sentences), "heads": heads.plain()["heads"], "heads_digest": heads.digest}
        results = {"policy": policy_result, "accounts": accounts, "probe": measured, "payloads_probe": attacked}
        facts |= {name: result.to_plain() for name, result in results.items() if result is not None}
        print_json(facts | ({"error": str(deferred)} if deferred else {}))
    else:
        _show(audit, sentences, policy_result, accounts, measured, options)
        if attacked is not None:
            from fedmq.audit import payload_attacks  # noqa: PLC0415 - brings torch

            payload_attacks.show(attacked, out)
        print_line(f"{_heads_line(audit)}{f', in {options.heads}' if options.heads else ''}:\n{heads.digest}")
        if reported is not None:
            print_line(f"report: {reported}, and audit.csv in the same folder")
    if deferred and not findings:
        raise deferred
    if deferred:
        print_line(f"fedmq: {deferred}", error=True)
    return _code(audit, broken=bool(policy_result and policy_result.findings))


def _require_known(options: _Options, audit: Audit, known: KnownKeys | None) -> None:
    """Refuse a silo that no log of the run mentions, or a folder of keys that no log belongs to."""
    known_names = sorted({*audit.records, *audit.absent})
    if options.silo is not None and options.silo not in known_names:
        raise InputError("--silo", options.silo, one_of(options.silo, known_names))
    if known is not None:
        known.require_any(audit.signatures, options.keys)


def _code(audit: Audit, *, broken: bool) -> int:
    """The exit code: altered before against the policy before incomplete."""
    if audit.findings and not audit.incomplete:
        return DIFFERENT
    return AGAINST_POLICY if broken else INCOMPLETE if audit.findings else 0


def _heads_line(audit: Audit) -> str:
    broken = any(log.broken is not None for log in audit.signatures.values())
    return "digest of all logs' heads" + (" as they are now, not as they were written" if broken else "")


def _report(run: Path, options: _Options, audit: Audit, sentences: Verdict) -> Path | None:
    """Write the report; returns its page, or None if the run folder cannot be written and no other was given."""
    from fedmq.audit.report import write_report  # noqa: PLC0415 - --help does without

    try:
        return write_report(audit, sentences, options.report or run)[0]
    except InputError as error:
        if options.report is not None:
            raise
        print_line(f"no report: {error}; --report DIR writes it elsewhere", error=True)
        return None


def _show(
    audit: Audit,
    sentences: Verdict,
    policy_result: PolicyResult | None,
    accounts: Accounts | None,
    measured: Probe | None,
    options: _Options,
) -> None:
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415 - --help does without

    print_audit(audit, sentences, out, verbose=options.verbose, silo=options.silo)
    if policy_result is not None:
        policy.show(policy_result, out)
    if accounts is not None:
        dp_accounting.show(accounts, out)
    if measured is not None:
        from fedmq.audit import membership_inference  # noqa: PLC0415 - brings torch

        membership_inference.show(measured, out)


def _probed(run: Path, options: _Options) -> _Probed:
    """Probe a run's released model; a finding if the model is not the run's. A slow probe shows its progress."""
    if not options.with_probe:
        return None, None, None
    import protocols  # noqa: PLC0415 - brings torch
    from fedmq.audit import membership_inference  # noqa: PLC0415
    from fedmq.audit.payload_attacks import probe_payloads  # noqa: PLC0415
    from fedmq.retrieval.released_model import open_release  # noqa: PLC0415
    from fedmq.runs.release import OtherModelError  # noqa: PLC0415

    try:
        release = open_release(run, "auto")  # the auditor's machine may lack the run's GPU
        pooled = protocols.traits_of(release.scenario).pooled
        measured = membership_inference.probe(release, pooled=pooled, progress=later(bar()))
        captured = release.run.captured.exists()
        attacked = probe_payloads(release, later(bar()), shadows=options.shadows) if captured else None
        return measured, attacked, None
    except OtherModelError as error:
        return None, None, replace(damaged(error), cause=Cause.RELEASE)


#: Lines of causes, notable events and refusals that are printed without --verbose.
_SHOWN = 8


def print_audit(
    audit: Audit, sentences: Verdict, console: Console, *, verbose: bool = False, silo: str | None = None
) -> None:
    """Print the result of an audit: the verdict, what differs, what left, what holds and what does not."""
    from fedmq.audit.report import outcome  # noqa: PLC0415 - --help does without

    style = "yellow" if audit.incomplete else "red" if audit.findings else "green"
    console.print(outcome(audit), style=style)
    for sentence in filter(None, (sentences.fails, sentences.incomplete)):
        console.print(sentence, style=style, markup=False)
    _print_findings(audit, console, verbose=verbose, silo=silo)
    _print_warnings(audit, console)
    if silo is not None:
        console.print(_rounds_table(audit, silo))
    else:
        console.print(_kinds_table(audit, verbose=verbose))
    _print_events(audit, console, verbose=verbose, silo=silo)
    console.print(sentences.holds, style="green", markup=False)
    console.print(sentences.not_proven, style="yellow", markup=False)


def _print_findings(audit: Audit, console: Console, *, verbose: bool, silo: str | None) -> None:
    """Print every finding, or of many one line for each log or file that differs."""
    findings = audit.findings
    if silo is not None:
        findings = [each for each in findings if silo in (each.process, each.place.partition(".jsonl")[0])]
    lines = [(finding, "") for finding in findings]
    if not verbose and len(lines) > _SHOWN:
        lines = by_cause(findings)
    for finding, more in lines if verbose else lines[:_SHOWN]:
        place, what = escape(printable(finding.place)), escape(printable(finding.what + more))
        colour = "yellow" if finding.cause is Cause.NO_LOG else "red"
        console.print(f"[{colour}]{place}[/{colour}]: {what}")
    if not verbose and (len(lines) > _SHOWN or len(lines) < len(findings)):
        console.print(f"--verbose prints all {len(findings):,} differences")
    for remark in audit.remarks:
        console.print(printable(remark), style="yellow", markup=False)


def _print_warnings(audit: Audit, console: Console) -> None:
    if audit.written:
        console.print(
            f"{', '.join(map(printable, audit.written))}: still being written; "
            "messages sent while the logs are read may appear as differences, so audit again after the run",
            style="yellow",
            markup=False,
        )
    if not audit.finished:
        console.print(
            "no summary.json: the run has not finished, or only its logs were copied; its result was not checked",
            style="yellow",
        )
    for line in audit.clocks:
        console.print(printable(line), style="yellow", markup=False)


def _print_events(audit: Audit, console: Console, *, verbose: bool, silo: str | None) -> None:
    """Print what happened to the processes: the notable, or all with --verbose or of one silo."""
    shown = [each for each in audit.events if silo == each.process or (silo is None and (verbose or each.notable))]
    lines = [*([] if silo else audit.refused_starts), *(event.line for event in shown)]
    for line in lines if verbose or silo else lines[:_SHOWN]:
        console.print(printable(line), markup=False)
    if not verbose and silo is None:
        more = f"{len(lines) - _SHOWN:,} more, and " if len(lines) > _SHOWN else ""
        console.print(
            f"{more}{len(audit.events) - len(shown):,} joins, starts and other events: --verbose, or --silo NAME"
        )
    if audit.undelivered and silo is None:
        lost = counted(audit.undelivered, "message")
        console.print(f"{lost} sent but not accepted: refused, or in transit when a process ended")


_Column = dict[str, Any]
_NUMBER: _Column = {"justify": "right", "no_wrap": True}
_PAYLOADS = "payloads: size of their tensors"


def _kinds_table(audit: Audit, *, verbose: bool) -> Table:
    """What left by kind: of each process if verbose, else of all silos, of groups of like silos, and of the others."""
    from fedmq.audit.report import like_silos, payload_lines  # noqa: PLC0415 - --help does without

    table = Table(Column("what left", overflow="fold", max_width=27), Column("sent", **_NUMBER), _PAYLOADS)
    groups = [] if verbose else like_silos(audit)
    silos = [silo for group in groups for silo in group]
    rows = [("all silos", silos)] if len(groups) > 1 else []
    rows += [(first_few(group, 3), group) for group in groups]
    rows += [(name, [name]) for name in sorted(audit.records.keys() - set(silos))]
    for name, members in rows:
        # A log may contain anything.
        lines = "\n".join(map(escape, payload_lines(audit, *members)))
        title = f"{len(members)} silos: {name}" if len(members) > 1 and name != "all silos" else name
        table.add_row(escape(printable(title)), size_text(sum(audit.frames[each] for each in members)), lines or "-")
    return table


def _rounds_table(audit: Audit, silo: str) -> Table:
    """What a process sent, and when, by kind and round."""
    from fedmq.audit.report import flows_of  # noqa: PLC0415 - --help does without

    table = Table(
        Column("round", **_NUMBER),
        Column("payload", overflow="fold"),
        Column("when", no_wrap=True),
        Column("number", **_NUMBER),
        Column("tensors", **_NUMBER),
    )
    for flow in sorted(flows_of(audit), key=lambda flow: flow.first):
        if flow.process == printable(silo):
            when = flow.first[:19] + (f"\nto {flow.last[:19]}" if flow.last[:19] != flow.first[:19] else "")
            table.add_row(str(flow.round), escape(flow.kind), when, f"{flow.payloads:,}", tensor_text(flow.bytes))
    return table
