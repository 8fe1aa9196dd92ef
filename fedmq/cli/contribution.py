"""``fedmq contribution`` and ``fedmq forget``: a finished run once more, without some of its silos."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.compare import command_line, display_progress, say_failed, workplace
from fedmq.cli.console import bar, continued_by_repeating, err, exit_stopped, out, say
from fedmq.cli.options import AsJson, Quiet, Run
from fedmq.cli.run import scenario_command
from fedmq.cli.scenarios import resolved_file
from fedmq.errors import InputError
from fedmq.launch.interrupts import FAILED, until_stopped
from fedmq.storage.run_folder import RunFolder, open_run, provisional_folder, write_text
from fedmq.text import as_csv, counted, print_json, print_line

if TYPE_CHECKING:
    from fedmq.experiments.contribution import Contributions, Silos
    from fedmq.experiments.runner import Run as PlannedRun

_Processes = Annotated[
    bool,
    typer.Option(
        "--processes",
        help="Start silos as processes that exchange messages. By default, all silos of a run share one process, which "
        "gives a bit-identical model.",
    ),
]


@continued_by_repeating()
def contribution_command(
    run: Run,
    shapley: Annotated[
        int,
        typer.Option(
            "--shapley", metavar="N", min=0, help="Also estimate Shapley values, from N random orders of the silos."
        ),
    ] = 0,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Metric of a contribution: mean_r1 by default, or map, personal.mean_r1, ..."),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the results; RUN-contribution by default.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Runs in parallel; by default the number of cores.")
    ] = None,
    processes: _Processes = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure what each silo of a finished run was worth: repeat the run with the same seed, without that silo.

    --shapley also gives each silo's mean contribution over N random orders in which the silos could have joined, with
    an interval; this needs up to N runs per silo. Finished runs are kept: repeat the command to continue after a stop,
    or with more orders. The folder of the results holds table.csv, table.md and plots.html. Returns 1 if a run failed.

    Example: [bold]fedmq contribution runs/smoke --shapley 20 --metric mean_r10[/bold]
    """
    folder = open_run(run)
    whole = resolved_file(folder.scenario, adopt=False)
    from fedmq.experiments import contribution, runner  # noqa: PLC0415
    from fedmq.launch.preparation import check_data, prepare_population  # noqa: PLC0415
    from fedmq.runs import results  # noqa: PLC0415

    contribution.require_silos(whole.scenario, folder, ())
    finished = results.read(folder)
    metric = contribution.metric_of_run(finished, metric)
    target = out_dir or folder.root.with_name(f"{folder.root.name}-contribution")
    place = workplace(target / "runs", jobs, processes=processes, quiet=quiet)
    place = replace(place, resolve=partial(resolved_file, adopt=False))
    orders = contribution.orders_of(whole.scenario, shapley)
    groups = contribution.groups_of(whole.scenario.silo_names, orders)
    if not quiet:
        print_line(f"{counted(len(groups), 'run')}, at most {place.jobs} in parallel, in {target}", error=True)
    check = partial(check_data, progress=None, known=prepare_population(whole, None if quiet else bar()))
    runs, untrained = contribution.planned(groups, whole, folder.scenario, place, check)
    with provisional_folder(target), runner.exclusive_use(place.runs), display_progress(err, quiet=quiet) as progress:
        ended = runner.execute(runs.values(), place, partial(progress, "runs"), until_stopped())
    if ended.stopped:
        exit_stopped(command_line())
    made = contribution.contributions(finished, whole.scenario, orders, runs, untrained, metric)
    _show(made, f"contribution: {folder.root}", target, ended.errors, as_json=as_json)
    _warn(made.versions_of, runs, untrained, ended.errors)
    if ended.errors:
        sys.exit(FAILED)


def _show(made: Contributions, title: str, folder: Path, errors: Mapping[str, str], *, as_json: bool) -> None:
    """Write the tables and the plots, and print the result."""
    from fedmq.experiments import contribution, tables  # noqa: PLC0415

    silos = contribution.plain(made.silos)
    write_text(folder / "table.csv", as_csv(silos))
    write_text(folder / "table.md", tables.markdown(made.table, command_line()))
    write_text(folder / "plots.html", contribution.page(made, title, command_line()))
    if as_json:
        facts = {"metric": made.metric, "all": made.whole, "untrained": made.start, "errors": errors}
        print_json({"folder": str(folder), **facts, "silos": silos})
    else:
        out.print(*tables.terminal(made.table, title, out.width), sep="\n")
        print_line(f"{folder}: table.csv, table.md, plots.html")


def _warn(
    before: Mapping[str, str],
    runs: Mapping[Silos, PlannedRun],
    untrained: Mapping[Silos, str],
    errors: Mapping[str, str],
) -> None:
    """Say which runs failed, which groups could not train, and whether runs were made with other versions."""
    from fedmq.runs.results import made_otherwise, read_summary  # noqa: PLC0415

    for group, why in untrained.items():
        say("warning", f"{', '.join(sorted(group))}: {why}")
    made = made_otherwise([before, *(read_summary(run.folder).versions_of for run in runs.values() if run.done)])
    for name, versions in made.items():
        say("warning", f"made with different {name}: {', '.join(sorted(set(versions)))}; contributions are not exact")
    say_failed(errors)


@continued_by_repeating()
def forget_command(
    run: Run,
    silo: Annotated[list[str], typer.Option("--silo", metavar="NAME", help="The silo to forget; may be repeated.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The new run folder; RUN-without-NAME by default.")
    ] = None,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="DIR", help="Sign the new model with a private key of this folder.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the private key.")] = "coordinator",
    processes: _Processes = False,
    quiet: Quiet = False,
) -> None:
    """Forget a silo exactly: train the model of a finished run again, as if the silo had never taken part.

    The new run folder is that of a run whose scenario has silos.without. Its model folder holds forgotten.json, which
    says what was left out and has the digests of both models; --keys signs it together with the model, and
    [bold]fedmq verify[/bold] checks it. Repeat the command to continue after a stop. The old run is not changed.

    Example: [bold]fedmq forget runs/smoke --silo silo-01 --keys keys[/bold]
    """
    folder = open_run(run)
    before = resolved_file(folder.scenario, adopt=False)
    from fedmq.experiments.contribution import require_silos, settings_without  # noqa: PLC0415
    from fedmq.runs.release import FORGOTTEN, forget, sign_model  # noqa: PLC0415
    from fedmq.runs.results import read_summary  # noqa: PLC0415
    from fedmq.wire.keys import load_identity, words  # noqa: PLC0415

    require_silos(before.scenario, folder, silo)
    read_summary(folder)
    identity = None if keys is None else load_identity(keys, name)
    settings = list(settings_without(before.scenario, silo, processes=processes))
    after = resolved_file(folder.scenario, settings, adopt=False)
    target = RunFolder(out_dir or folder.root.with_name(f"{folder.root.name}-without-{'-'.join(sorted(set(silo)))}"))
    begun = target.scenario.is_file()
    if begun and resolved_file(target.scenario, adopt=False).id != after.id:
        raise InputError(f"--out {target.root}", "another run", "a new folder, or that of the same command")
    if not begun:
        scenario_command(folder.scenario, out_dir=target.root, settings=settings, quiet=quiet)
    elif not target.summary.is_file():
        scenario_command(resume=target.root, quiet=quiet)
    made = forget(folder, target, (before.id, after.id), silo)
    print_line(f"forgotten    {', '.join(f'{each} ({facts.samples:,} items)' for each, facts in made.silos.items())}")
    print_line(f"model before {made.before.model_digest}")
    print_line(f"model now    {made.after.model_digest}")
    print_line(f"statement    {target.model / FORGOTTEN}")
    if identity is not None:
        sign_model(target.model, identity)
        print_line(f"signed       as {identity.name}; words of the key: {words(identity)}")
    print_line(f"{folder.root} is unchanged: remove it, and copies of its model, to forget the silo there, too")
