"""``fedmq preflight``: checks before a silo joins; ``status``: what a run is doing; ``prune``: free space after it;
``replay``: repeat it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedmq.cli.console import DIFFERENT, bar, err, out, starting
from fedmq.cli.options import AsJson, File, ProcessOptions, Quiet, Run, silo_arguments, with_options
from fedmq.cli.scenarios import print_results, resolved, resolved_file
from fedmq.errors import InputError, RunError
from fedmq.launch.interrupts import FAILED
from fedmq.storage.run_folder import RunFolder, open_run, write_json, write_text
from fedmq.text import counted, duration_text, print_json, print_line, printable, size_text

if TYPE_CHECKING:
    from fedmq.audit.replay import Difference, Record
    from fedmq.config.resolve import ResolvedRun
    from fedmq.config.site import Site
    from fedmq.runs.status import SiloStatus, StatusFile

#: Interval of ``--watch`` [s].
_WATCH_SECONDS = 2.0
#: Age after which a status of a run in progress is reported as old [s].
_OLD_SECONDS = 10.0


def status_command(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run folder; not needed with --connect.", show_default=False)
    ] = None,
    connect: Annotated[
        str | None,
        typer.Option("--connect", metavar="URI", help="Query the coordinator at this address.", show_default=False),
    ] = None,
    keys: Annotated[
        Path,
        typer.Option("--keys", metavar="DIR", help="With --connect: folder of a key that the coordinator accepts."),
    ] = Path("keys"),
    name: Annotated[
        str | None,
        typer.Option("--name", help="With --connect: name of that key; by default the only one in the folder."),
    ] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every 2 s until the run has ended.")] = False,
) -> None:
    """Show what a run is doing: its round, and each silo's phase, last message, traffic and last error.

    The coordinator writes the status into its run folder about every second. From another machine, query it with
    --connect and the key of a silo or of an operator; this does not disturb the silo.

    Example: [bold]fedmq status runs/manual --watch[/bold]

    Example: [bold]fedmq status --connect tcp://127.0.0.1:5555 --keys keys --name silo-00[/bold]
    """
    if run is not None and connect is not None:
        raise InputError("status", f"{run} and --connect", "one of the two")
    from fedmq.runs.status import ENDED_PHASES  # noqa: PLC0415 - imports pydantic, which --help does without

    read = _from_folder(run) if connect is None else _from_coordinator(connect, keys, name)
    while True:
        status = read()
        if as_json:
            shown = status.model_dump(mode="json", exclude={"coordinator": {"scenario", "offer"}})  # for silos
            print_json(shown, indent=None if watch else 2)
        else:
            if watch and out.is_terminal:
                out.clear()
            # The clock of the coordinator's machine may differ, so ages are counted from its time stamp.
            _show(status, datetime.now(UTC) if connect is None else datetime.fromisoformat(status.written))
        if not watch or status.phase in ENDED_PHASES:
            return
        time.sleep(_WATCH_SECONDS)


def _from_folder(run: Path | None) -> Callable[[], StatusFile]:
    """Read the status of a run folder."""
    if run is None:
        raise InputError("status", "no run", "a run folder, or --connect URI to query its coordinator")
    begun = run.is_dir() and ((run / "messages").is_dir() or not any(run.iterdir()))
    problem = "no {} in it: the run has not started yet, or it ended before its silos had joined"
    allowed = "a run that has started; --connect URI queries a coordinator before that"
    if begun and not (run / "scenario.yaml").exists():
        raise InputError(str(run), problem.format("scenario.yaml"), allowed)
    path = open_run(run).status
    if not path.exists():
        raise InputError(str(run), problem.format("status.json"), allowed)
    from fedmq.runs.status import read_status  # noqa: PLC0415 - imports pydantic, which --help does without

    return lambda: read_status(path)


def _from_coordinator(uri: str, keys: Path, name: str | None) -> Callable[[], StatusFile]:
    """Query a coordinator for the status of its run."""
    from fedmq.wire.inquiry import ask_status  # noqa: PLC0415
    from fedmq.wire.keys import load_accepted, load_identity, private_names  # noqa: PLC0415
    from fedmq.wire.messages import COORDINATOR  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    check_uri(uri, "--connect")
    if name is None:
        names = [private for private in private_names(keys) if private != COORDINATOR]
        if len(names) != 1:
            known = ", ".join(names) if names else f"no private key in {keys}"
            raise InputError("--name", known, "the name of one key that the coordinator accepts")
        name = names[0]
    identity, accepted = load_identity(keys, name), load_accepted(keys)
    from fedmq.runs.status import status_of  # noqa: PLC0415

    return lambda: status_of(ask_status(uri, identity, accepted))


def prune_command(run: Run, yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False) -> None:
    """Remove the checkpoints of a finished run, and the personal states of its silos that are no longer needed.

    The run can no longer be extended. Model, results, message logs and report stay. States that
    `fedmq search --silo` needs stay, too.

    Example: [bold]fedmq prune runs/smoke --yes[/bold]
    """
    folder = open_run(run)
    import protocols  # noqa: PLC0415 - imports torch
    from fedmq.runs.resume import plan_pruning, prune  # noqa: PLC0415

    scenario = resolved_file(folder.scenario, manual=True, adopt=False).scenario
    personalised = protocols.traits_of(scenario).personalised
    pruning = plan_pruning(folder, personalised=personalised)
    size = size_text(pruning.size)
    if not pruning.paths:
        print_line(f"nothing to remove{f': {pruning.kept}' if pruning.kept else ''}")
        return
    if not yes and not typer.confirm(f"remove {len(pruning.paths)} checkpoints and states, {size}?", err=True):
        raise InputError("prune", "no", "yes, or --yes")
    prune(folder, pruning)
    print_line(f"{size} freed{f'; {pruning.kept}' if pruning.kept else ''}")


def _ago(at: str | None, now: datetime) -> str:
    if at is None:
        return "-"
    return duration_text(max(0.0, (now - datetime.fromisoformat(at)).total_seconds()))


def _show(status: StatusFile, now: datetime) -> None:
    from fedmq.evaluation.metrics import BRIEF, metric_of  # noqa: PLC0415 - imports numpy; --help does without
    from fedmq.runs.status import ENDED_PHASES, SiloPhase  # noqa: PLC0415
    from fedmq.wire.messages import EVALUATOR  # noqa: PLC0415

    age = (now - datetime.fromisoformat(status.written)).total_seconds()
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    text = f"{printable(status.run)}: {status.phase}, round {status.round} of {status.rounds}{loss}"
    print_line(text)
    if status.error:
        out.print(f"ended by: {printable(status.error)}", style="red", markup=False, soft_wrap=True)
    if measured := ", ".join(
        f"{metric_of(name).heading} {status.metrics[name]:.4f}" for name in BRIEF if name in status.metrics
    ):
        of = "" if status.metrics_round is None else f" (of round {status.metrics_round})"
        print_line(f"metrics: {measured}{of}")
    if status.phase not in ENDED_PHASES and age > _OLD_SECONDS:
        old = f"written {_ago(status.written, now)} ago: the coordinator is busy or not running"
        err.print(old, style="yellow")
    refused = f", {counted(sum(status.refused.values()), 'message')} refused" if status.refused else ""
    if refused and status.last_refused_at is not None:
        refused += f", the last {_ago(status.last_refused_at, now)} ago: {printable(status.last_refused)}"
    total = f"traffic: {size_text(status.up)} up, {size_text(status.down)} down{refused}"
    print_line(total)
    up, down = (Column(way, justify="right", no_wrap=True) for way in ("up", "down"))
    table = Table(Column("silo", overflow="fold"), "phase", "last message", "task", up, down)
    peers = {**status.silos, **({} if status.evaluator is None else {EVALUATOR: status.evaluator})}
    for name, silo in sorted(peers.items()):
        bad = silo.phase in (SiloPhase.OVERDUE, SiloPhase.LOST, SiloPhase.GIVEN_UP)
        style = "red" if bad else None
        traffic = map(size_text, (silo.up, silo.down))
        table.add_row(escape(name), silo.phase.value, _ago(silo.heard, now), _task(silo), *traffic, style=style)
    out.print(table)
    for name, silo in sorted(peers.items()):
        if silo.error:
            print_line(f"{name}, last error: {printable(silo.error)}")


def _task(silo: SiloStatus) -> str:
    if silo.task_seconds is None:
        return "-"
    return f"{silo.task_seconds:.0f} s" + ("" if silo.limit is None else f" of {silo.limit:.0f}")


@with_options
def preflight_command(file: File, *, given: ProcessOptions, as_json: AsJson = False) -> None:
    """Check that a silo can join a run; takes the options with which the silo will be started.

    It checks that the keys exist and the coordinator accepts them, that the coordinator runs this scenario with
    these versions, that the data can be read and fit those of the other sites, that the policy allows what the
    silo has to send, and that disk and memory are large enough. It times a training step and discards the result.
    Only the cache of features is written, and nothing about the data is sent. The exit code is 1 if a check
    failed; the last column says how to fix it.

    Example: [bold]fedmq preflight scenarios/smoke.yaml --name silo-00 --keys keys[/bold]

    Example: [bold]fedmq preflight own.yaml --site silo.yaml[/bold]
    """
    starting(quiet=as_json)
    from fedmq.config.resolve import read  # noqa: PLC0415 - --help does without

    run = resolved(read(file, given.settings or (), given.seed), manual=True)
    from fedmq.federation.preflight import Program, Verdict  # noqa: PLC0415
    from fedmq.launch import preflight  # noqa: PLC0415 - imports torch

    silo = preflight.Starting(run, silo_arguments(run, given), None if as_json else bar())
    results = preflight.preflight(Program.PREFLIGHT, silo)
    if as_json:
        made = [*results]
        print_json([asdict(result) for result in made])
        failed = any(result.verdict is Verdict.FAILED for result in made)
    else:
        failed = print_results(results, out)
    if failed:
        sys.exit(FAILED)


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

    folder = open_run(run)
    source = read(folder.scenario)
    if source.scenario.launcher != "inline":
        forkserver.warm_up(source.scenario.backbone.name)
    from fedmq.audit import replay  # noqa: PLC0415
    from fedmq.runs import results  # noqa: PLC0415

    resolved_run = resolved(source, adopt=False)
    replay.require_repeatable(resolved_run.scenario, folder)
    own_data = resolved_run.scenario.data is None
    if site and not own_data:
        raise InputError("--site", str(site[0]), f"no site file: {folder.root} has a simulated partition")
    sites = replay.sites_of(resolved_run, folder, site or [], None if quiet else bar()) if own_data else None
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
        _show_difference(before, difference, otherwise)
    if difference is not None:
        sys.exit(DIFFERENT)


def _repeat(
    run: ResolvedRun, name: str, resumed: int, sites: Mapping[str, Site] | None, *, quiet: bool
) -> Record | None:
    """Repeat a run in a temporary folder; None if it was stopped before its end."""
    from fedmq.audit import replay  # noqa: PLC0415
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.launch import preparation, supervisor  # noqa: PLC0415

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


def _show_difference(before: Record, difference: Difference | None, otherwise: Mapping[str, tuple[str, ...]]) -> None:
    if difference is None:
        verdict = f"the same run: {len(before.events)} events, model {before.digest[:16]}"
        out.print(verdict, style="green")
        return
    print_line(f"{difference.place}\n  run:    {difference.was}\n  replay: {difference.now}")
    if otherwise:
        print_line("The environments differ, which alone can change the last bits of a model:")
        print_line("\n".join(f"  {name}: run {was}, replay {now}" for name, (was, now) in otherwise.items()))
