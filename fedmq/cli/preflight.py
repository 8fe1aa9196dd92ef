"""``fedmq preflight``: checks before a silo joins a run."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedmq.cli.console import bar, out, starting
from fedmq.cli.options import AsJson, Connect, Device, File, Keys, Seed, Settings
from fedmq.cli.scenarios import resolved_file
from fedmq.launch.interrupts import FAILED
from fedmq.text import print_json, printable

_STYLES = {"ok": "green", "skipped": "yellow", "failed": "red"}


def add_preflight(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("preflight")
    def preflight_command(
        file: File,
        name: Annotated[str, typer.Option("--name", help="silo-00, silo-01, ...")],
        keys: Keys,
        connect: Connect = "tcp://127.0.0.1:5555",
        device: Device = None,
        out_dir: Annotated[
            Path | None, typer.Option("--out", metavar="DIR", help="As for [bold]fedmq silo[/bold].")
        ] = None,
        settings: Settings = None,
        seed: Seed = None,
        as_json: AsJson = False,
    ) -> None:
        """Check that a silo can join a run, with the options with which it is to be started.

        Are the keys there, does the coordinator accept them, can the data be read, are disk and memory large enough,
        how long does a training step take? Nothing is trained, sent or written. Exit code 1 if a check failed.

        Example: [bold]fedmq preflight scenarios/smoke.yaml --name silo-00 --keys keys[/bold]
        """
        starting(quiet=as_json)
        from fedmq.errors import InputError  # noqa: PLC0415 - --help does without
        from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415
        from silos.preflight import Verdict, preflight  # noqa: PLC0415
        from silos.program import SiloArguments  # noqa: PLC0415

        check_uri(connect, "--connect")
        run = resolved_file(file, settings, seed, manual=True)
        names = run.scenario.silo_names
        if name not in names:
            raise InputError("--name", name, f"{names[0]} to {names[-1]}")
        folder = out_dir or Path("runs") / f"{run.scenario.name}-{name}"
        found = []
        for check in preflight(SiloArguments(run, name, connect, keys, folder, device), None if as_json else bar()):
            found.append(check)
            if not as_json:
                verdict = f"[{_STYLES[check.verdict]}]{check.verdict:8}[/]"
                detail = escape(printable(check.detail))
                out.print(f"{verdict} {check.name}: {detail}", highlight=False, soft_wrap=True)
        if as_json:
            print_json([asdict(check) for check in found])
        if any(check.verdict is Verdict.FAILED for check in found):
            sys.exit(FAILED)
