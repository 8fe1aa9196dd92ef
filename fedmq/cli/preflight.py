"""``fedmq preflight``: checks before a silo joins a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmq.cli.console import bar, out, starting
from fedmq.cli.options import AsJson, Device, File, OwnConnect, OwnKeys, Seed, Settings, SiloName, SiteFile, whereabouts
from fedmq.cli.scenarios import resolved_file
from fedmq.launch.interrupts import FAILED
from fedmq.text import print_json, printable

_STYLES = {"ok": "green", "differs": "yellow", "skipped": "yellow", "warning": "yellow", "failed": "red"}


def preflight_command(
    file: File,
    name: SiloName = None,
    keys: OwnKeys = None,
    connect: OwnConnect = None,
    device: Device = None,
    site: SiteFile = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="As for [bold]fedmq silo[/bold].")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="As for [bold]fedmq silo[/bold].")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Check that a silo can join a run; takes the options with which the silo will be started.

    It checks that the keys exist and the coordinator accepts them, that the coordinator runs this scenario with
    these versions, that the data can be read and fit those of the other sites, that the policy allows what the
    silo has to send, and that disk and memory are large enough. It times a training step and discards the result.
    Only the cache of features is written, and nothing about the data is sent. The exit code is 1 if a check
    failed; then a line says how to fix it.

    Example: [bold]fedmq preflight scenarios/smoke.yaml --name silo-00 --keys keys[/bold]

    Example: [bold]fedmq preflight own.yaml --site silo.yaml[/bold]
    """
    starting(quiet=as_json)
    from fedmq.federation.participant import Starting, check_name  # noqa: PLC0415 - --help does without
    from fedmq.federation.preflight import Verdict  # noqa: PLC0415
    from silos.preflight import preflight  # noqa: PLC0415
    from silos.tasks import SiloArguments  # noqa: PLC0415

    run = resolved_file(file, settings, seed, manual=True)
    here = whereabouts(run, site, name=name, keys=keys, connect=connect, device=device, out=out_dir)
    rules = policy or (None if here.site is None else here.site.policy)
    place = (here.name, here.connect, here.keys, here.out, here.device)
    arguments = SiloArguments(run, *place, site=here.site, policy=rules)
    check_name(Starting(here.name, here.device, run.scenario, here.site))
    found = []
    for check in preflight(arguments, None if as_json else bar()):
        found.append(check)
        if not as_json:
            verdict = f"[{_STYLES[check.verdict]}]{check.verdict:8}[/]"
            detail = escape(printable(check.detail))
            out.print(f"{verdict} {check.name}: {detail}", highlight=False, soft_wrap=True)
            if check.verdict is Verdict.FAILED:
                out.print(f"         how to fix: {escape(check.fix)}", highlight=False, soft_wrap=True)
    if as_json:
        print_json([asdict(check) for check in found])
    if any(check.verdict is Verdict.FAILED for check in found):
        sys.exit(FAILED)
