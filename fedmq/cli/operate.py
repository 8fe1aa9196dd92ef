"""``fedmq status``: what a run is doing; ``fedmq prune``: remove what a finished run no longer needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from fedmq.cli.console import err, out
from fedmq.cli.options import AsJson, Run
from fedmq.cli.scenarios import resolved_file
from fedmq.errors import InputError
from fedmq.text import counted, print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.runs.status import SiloStatus, StatusFile

#: Interval of ``--watch`` [s].
_WATCH_SECONDS = 2.0
#: Age after which a status of a run in progress is reported as old [s].
_OLD_SECONDS = 10.0


def status_command(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run folder; not needed with --connect.", show_default=False),
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
            shown = status.model_dump(mode="json", exclude={"coordinator": {"scenario"}})  # only to compare with
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
    """Read the status of a run folder.

    Raises:
        InputError: there is no such run, or none is named.
    """
    from fedmq.storage.run_folder import open_run  # noqa: PLC0415 - --help does without

    if run is None:
        raise InputError("status", "no run", "a run folder, or --connect URI to query its coordinator")
    begun = run.is_dir() and ((run / "messages").is_dir() or not any(run.iterdir()))
    if begun and not (run / "scenario.yaml").exists():
        found = "no scenario.yaml in it: the run has not started yet"
        raise InputError(str(run), found, "a run folder whose coordinator has been started")
    path = open_run(run).status
    if not path.exists():
        found = "no status.json in it: the run has not started yet, or it ended before its silos had joined"
        raise InputError(str(run), found, "a run that has started; --connect URI queries a coordinator before that")
    from fedmq.runs.status import read_status  # noqa: PLC0415 - imports pydantic, which --help does without

    return lambda: read_status(path)


def _from_coordinator(uri: str, keys: Path, name: str | None) -> Callable[[], StatusFile]:
    """Query a coordinator for the status of its run.

    Raises:
        InputError: the address or a key is not usable.
    """
    from fedmq.wire.inquiry import ask_status  # noqa: PLC0415
    from fedmq.wire.keys import load_accepted, load_identity, private_names  # noqa: PLC0415
    from fedmq.wire.messages import COORDINATOR  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    check_uri(uri, "--connect")
    if name is None:
        names = [each for each in private_names(keys) if each != COORDINATOR]
        if len(names) != 1:
            found = ", ".join(names) if names else f"no private key in {keys}"
            raise InputError("--name", found, "the name of one key that the coordinator accepts")
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
    from fedmq.runs.resume import plan_pruning, prune  # noqa: PLC0415
    from fedmq.storage.run_folder import open_run  # noqa: PLC0415

    folder = open_run(run)
    import protocols  # noqa: PLC0415 - imports torch

    scenario = resolved_file(folder.scenario, manual=True, adopt=False).scenario
    personalised = protocols.traits_of(scenario).personalised
    pruning = plan_pruning(folder, personalised=personalised)
    size = f"{pruning.size / 1e6:.1f} MB"
    if not pruning.paths:
        print_line(f"nothing to remove{f': {pruning.kept}' if pruning.kept else ''}")
        return
    if not yes and not typer.confirm(f"remove {len(pruning.paths)} checkpoints and states, {size}?", err=True):
        raise InputError("prune", "no", "yes, or --yes")
    prune(folder, pruning)
    print_line(f"{size} freed ({pruning.size} bytes){f'; {pruning.kept}' if pruning.kept else ''}")


def _ago(at: str | None, now: datetime) -> str:
    if at is None:
        return "-"
    seconds = max(0.0, (now - datetime.fromisoformat(at)).total_seconds())
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _show(status: StatusFile, now: datetime) -> None:
    from fedmq.evaluation.metrics import BRIEF, metric_of  # noqa: PLC0415 - imports numpy; --help does without
    from fedmq.runs.status import ENDED_PHASES, SiloPhase  # noqa: PLC0415
    from fedmq.wire.messages import EVALUATOR  # noqa: PLC0415

    age = (now - datetime.fromisoformat(status.written)).total_seconds()
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    text = f"{printable(status.run)}: {status.phase}, round {status.round} of {status.rounds}{loss}"
    out.print(text, highlight=False, markup=False)
    if status.error:
        out.print(f"ended by: {printable(status.error)}", style="red", highlight=False, markup=False, soft_wrap=True)
    if measured := ", ".join(
        f"{metric_of(name).heading} {status.metrics[name]:.4f}" for name in BRIEF if name in status.metrics
    ):
        of = "" if status.metrics_round is None else f" (of round {status.metrics_round})"
        out.print(f"metrics: {measured}{of}", highlight=False, markup=False)
    if status.phase not in ENDED_PHASES and age > _OLD_SECONDS:
        old = f"written {_ago(status.written, now)} ago: the coordinator is busy or not running"
        err.print(old, style="yellow", highlight=False)
    refused = f", {_refused(status, now)}" if status.refused else ""
    total = f"traffic: {status.up / 1e6:.1f} MB up, {status.down / 1e6:.1f} MB down{refused}"
    out.print(total, highlight=False, markup=False, soft_wrap=True)
    up, down = (Column(f"MB {way}", justify="right", no_wrap=True) for way in ("up", "down"))
    table = Table(Column("silo", overflow="fold"), "phase", "last message", "task", up, down)
    peers = {**status.silos, **({} if status.evaluator is None else {EVALUATOR: status.evaluator})}
    for name, silo in sorted(peers.items()):
        bad = silo.phase in (SiloPhase.OVERDUE, SiloPhase.LOST, SiloPhase.GIVEN_UP)
        style = "red" if bad else None
        traffic = (f"{silo.up / 1e6:.1f}", f"{silo.down / 1e6:.1f}")
        table.add_row(escape(name), silo.phase.value, _ago(silo.heard, now), _task(silo), *traffic, style=style)
    out.print(table)
    for name, silo in sorted(peers.items()):
        if silo.error:
            out.print(f"{name}, last error: {printable(silo.error)}", highlight=False, markup=False, soft_wrap=True)


def _refused(status: StatusFile, now: datetime) -> str:
    total = sum(status.refused.values())
    count = f"{counted(total, 'message')} refused"
    if status.last_refused_at is None:
        return count
    return f"{count}, the last {_ago(status.last_refused_at, now)} ago: {printable(status.last_refused)}"


def _task(silo: SiloStatus) -> str:
    if silo.task_seconds is None:
        return "-"
    return f"{silo.task_seconds:.0f} s" + ("" if silo.limit is None else f" of {silo.limit:.0f}")
