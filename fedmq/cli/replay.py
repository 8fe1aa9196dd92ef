"""``fedmq replay``: repeat a finished run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.console import DIFFERENT, bar, err, out
from fedmq.cli.options import AsJson, Quiet, Run
from fedmq.cli.scenarios import resolved
from fedmq.errors import InputError, RunError
from fedmq.launch.interrupts import FAILED
from fedmq.text import print_json, print_line

if TYPE_CHECKING:
    from fedmq.audit.replay import Difference, Record
    from fedmq.config.resolve import ResolvedRun
    from fedmq.config.site import Site
    from fedmq.storage.run_folder import RunFolder


def replay_command(
    run: Run,
    site: Annotated[
        list[Path] | None,
        typer.Option("--site", metavar="FILE", help="Site file with a silo's data; repeat it for each site."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Repeat a run, including its faults, and compare the two event by event.

    If they differ, the first difference is printed and the exit code is 3. A run of sites with their own data needs
    the data of all sites, with the digests that the sites stated.

    Example: [bold]fedmq replay runs/smoke[/bold]
    """
    from fedmq.config.resolve import read  # noqa: PLC0415 - --help does without
    from fedmq.launch import forkserver  # noqa: PLC0415
    from fedmq.storage.run_folder import open_run  # noqa: PLC0415

    folder = open_run(run)
    source = read(folder.scenario)
    if source.scenario.launcher != "inline":
        forkserver.warm_up(source.scenario.backbone.name)
    from fedmq.audit import replay  # noqa: PLC0415
    from fedmq.runs import results  # noqa: PLC0415

    resolved_run = resolved(source, adopt=False)
    replay.require_repeatable(resolved_run.scenario, folder)
    sites = _sites(resolved_run, folder, site or [], quiet=quiet)
    before = replay.read_record(folder)
    after = _repeat(resolved_run, folder.root.name, before.resumed, sites, quiet=quiet)
    if after is None:
        err.print("stopped before the end, nothing was compared; repeat the command to compare")
        sys.exit(FAILED)
    difference = replay.first_difference(before, after)
    otherwise = results.made_otherwise([before.made_with, after.made_with])
    if as_json:
        result = {
            "same": difference is None,
            "events": len(before.events),
            "difference": None if difference is None else vars(difference),
            "made_otherwise": {name: {"run": was, "replay": now} for name, (was, now) in otherwise.items()},
        }
        print_json(result)
    else:
        _show(before, difference, otherwise)
    if difference is not None:
        sys.exit(DIFFERENT)


def _sites(run: ResolvedRun, folder: RunFolder, files: list[Path], *, quiet: bool) -> dict[str, Site] | None:
    """The sites of a run whose sites have their own data; None for a simulated partition.

    Raises:
        InputError: their data are not on this machine, or site files are given for a run that has all data.
    """
    if run.scenario.data is not None:
        if files:
            raise InputError("--site", str(files[0]), f"no site file: {folder.root} has a simulated partition")
        return None
    from fedmq.audit.replay import sites_of  # noqa: PLC0415

    return sites_of(run, folder, files, None if quiet else bar())


def _repeat(
    run: ResolvedRun, name: str, resumed: int, sites: Mapping[str, Site] | None, *, quiet: bool
) -> Record | None:
    """Repeat a run in a temporary folder; None if it was stopped before its end.

    Args:
        run: the run.
        name: name of the run's folder.
        resumed: how often the run was resumed.
        sites: the sites by name, if they have their own data.
        quiet: show no progress.
    """
    from fedmq.audit import replay  # noqa: PLC0415
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.launch import preparation, supervisor  # noqa: PLC0415
    from fedmq.storage.run_folder import RunFolder, write_json, write_text  # noqa: PLC0415

    if sites is not None:
        run = replace(run, scenario=run.scenario.model_copy(update={"launcher": "local"}))
    inline = run.scenario.launcher == "inline"
    prepare = preparation.population_here if inline else preparation.prepare_population
    data = None if sites is not None else prepare(run, None if quiet else bar())
    launch = supervisor.simulate_inline if inline else partial(supervisor.simulate, sites=sites)
    with tempfile.TemporaryDirectory(prefix="fedmq-replay-") as place:
        again: RunFolder = RunFolder(Path(place) / name)
        again.root.mkdir()
        write_text(again.scenario, run.scenario.dump())
        with terminal.display(run.scenario, err, quiet=quiet) as status:
            for left in reversed(range(resumed + 1)):
                try:
                    simulated = launch(run, again, resume=left < resumed, status=status, data=data)
                    break
                except RunError:
                    # A scripted full disk stopped the run, and it was resumed.
                    if not left:
                        raise
        if (summary := simulated.outcome.summary) is None:
            return None
        write_json(again.summary, summary.plain())
        return replay.read_record(again)


def _show(before: Record, difference: Difference | None, otherwise: Mapping[str, tuple[str, ...]]) -> None:
    if difference is None:
        verdict = f"the same run: {len(before.events)} events, model {before.digest[:16]}"
        out.print(verdict, style="green", highlight=False)
        return
    print_line(f"{difference.place}\n  run:    {difference.was}\n  replay: {difference.now}")
    if otherwise:
        print_line("The environments differ, which alone can change the last bits of a model:")
        print_line("\n".join(f"  {name}: run {was}, replay {now}" for name, (was, now) in otherwise.items()))
