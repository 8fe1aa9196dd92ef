"""``fedmq audit``: what the message logs of a run show, what its policy says of them, what its model gives away."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedmq.cli.console import DIFFERENT, err
from fedmq.errors import InputError

if TYPE_CHECKING:
    from fedmq.audit.dp_accounting import Accounts
    from fedmq.audit.log_checks import Audit, Finding
    from fedmq.audit.membership_inference import Probe
    from fedmq.audit.policy import Held
    from fedmq.config.scenario import Scenario
    from fedmq.federation.protocol import Traits

    _Probed = tuple[Probe, None] | tuple[None, Finding]

_QUIET_SECONDS = 2.0  # of a probe without progress
Bar = Callable[[], Callable[[str, int, int], None]]


def add_audit(app: typer.Typer, bar: Bar, traits_of: Callable[[Scenario], Traits]) -> None:
    """Add ``fedmq audit`` to the command line.

    Args:
        app: the command line.
        bar: makes a progress line.
        traits_of: what a scenario's method is as far as its options tell.
    """

    @app.command("audit")
    def audit_command(
        run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
        policy_file: Annotated[
            Path | None,
            typer.Option("--policy", metavar="FILE", help="What may pass (YAML): every message is held against it."),
        ] = None,
        with_probe: Annotated[
            bool,
            typer.Option("--probe", help="Test whether the released model tells training items from held-out ones."),
        ] = False,
        delta: Annotated[
            float | None,
            typer.Option("--delta", help="Say what the run's noise guarantees every silo: epsilon, at this delta."),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")] = False,
    ) -> None:
        """Check the message logs of a run: hash chains, sent against received, what left each silo, what was released.

        Exit code 3 if anything does not add up or breaks the policy; a probe and an epsilon are no findings, unless
        what is probed is another model than the run's.

        Example: [bold]fedmq audit runs/smoke-20260101-120000[/bold]

        Example: [bold]fedmq audit runs/smoke-20260101-120000 --policy docs/policies/rcsr_p.yaml[/bold]

        Example: [bold]fedmq audit runs/smoke-20260101-120000 --probe[/bold]

        Example: [bold]fedmq audit runs/noisy-20260101-120000 --delta 1e-5[/bold]
        """
        if _audit(run, policy_file, delta, (lambda: _probed(run, bar, traits_of)) if with_probe else None, as_json):
            sys.exit(DIFFERENT)


def _audit(
    run: Path, policy_file: Path | None, delta: float | None, probe: Callable[[], _Probed] | None, as_json: bool
) -> bool:
    """Audit a run and print what shows; says whether anything was found.

    Args:
        run: the run folder.
        policy_file: what may pass, if a policy is asked about.
        delta: of the epsilon, if one is asked for.
        probe: probes the released model, if that is asked for.
        as_json: print JSON on standard output, else text.

    Raises:
        InputError: there is nothing to audit, the policy is not allowed, or nothing was found and an epsilon or a probe
            cannot be had.
    """
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415 - --help does without
    from fedmq.audit.log_checks import audit_run  # noqa: PLC0415

    allowed = None if policy_file is None else policy.read_policy(policy_file)
    audit = audit_run(run)
    if audit.inline and not audit.findings:
        wanted = "a run with messages (launcher local, or processes started by hand)"
        raise InputError(str(run), "a run whose silos were calls inside the coordinator: nothing was sent", wanted)
    held = None if allowed is None or policy_file is None else policy.hold(audit, allowed, policy_file)
    accounts, measured, swapped, untold = None, None, None, None
    try:
        accounts = None if delta is None else dp_accounting.account(run, audit, delta)
        measured, swapped = probe() if probe else (None, None)
    except InputError as error:  # What the logs show is told all the same.
        untold = error
    # Beside the logs' findings, and printed with them.
    audit.findings += [swapped] if swapped and swapped not in audit.findings else []
    findings = [*audit.findings, *(held.findings if held else ())]
    if as_json:
        facts = {**audit.to_plain(), "ok": not findings, "findings": [vars(finding) for finding in findings]}
        told = {"policy": held, "accounts": accounts, "probe": measured}
        facts |= {name: each.to_plain() for name, each in told.items() if each is not None}
        print(json.dumps(facts | ({"error": str(untold)} if untold else {}), indent=2))
    else:
        _show(audit, held, accounts, measured)
    if untold and not findings:
        raise untold
    if untold:
        err.print(f"fedmq: {untold}", markup=False, highlight=False, soft_wrap=True)
    return bool(findings)


def _show(audit: Audit, held: Held | None, accounts: Accounts | None, measured: Probe | None) -> None:
    from fedmq.audit import dp_accounting, policy  # noqa: PLC0415 - --help does without
    from fedmq.cli import terminal  # noqa: PLC0415

    out = Console()
    terminal.print_audit(audit, out)
    if held is not None:
        policy.show(held, out)
    if accounts is not None:
        dp_accounting.show(accounts, out)
    if measured is not None:
        from fedmq.audit import membership_inference  # noqa: PLC0415 - brings torch

        membership_inference.show(measured, out)


def _probed(run: Path, bar: Bar, traits_of: Callable[[Scenario], Traits]) -> _Probed:
    """Probe a run's released model, or find that it is another; what takes longer says how far it is."""
    from fedmq.audit import membership_inference  # noqa: PLC0415 - brings torch
    from fedmq.audit.log_checks import Finding  # noqa: PLC0415
    from fedmq.retrieval.released_model import OtherModelError, open_release  # noqa: PLC0415

    began, show = time.monotonic(), bar()

    def tell(what: str, done: int, total: int) -> None:
        if time.monotonic() - began > _QUIET_SECONDS:
            show(what, done, total)

    try:
        release = open_release(run, "auto")  # The auditor's machine need not have the run's GPU.
        pooled = traits_of(release.scenario).pooled
        return membership_inference.probe(release, pooled=pooled, progress=tell), None
    except OtherModelError as error:
        return None, Finding(error.place, f"{error.found} instead of {error.allowed}")
