"""``fedmq scenario``, and the programs it starts by themselves: ``fedmq coordinator``, ``silo`` and ``evaluator``."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmq.cli.console import bar, err, out, starting
from fedmq.cli.options import AsJson, Connect, Device, File, Keys, Quiet, Seed, Settings
from fedmq.cli.scenarios import resolved, resolved_file, warn
from fedmq.errors import InputError
from fedmq.launch.interrupts import FAILED, say_stopping

if TYPE_CHECKING:
    from fedmq.config.scenario import Scenario
    from fedmq.storage.run_folder import RunFolder

#: When this program began, for the start-up time it tells.
_BEGAN = time.monotonic()


def add_run(app: typer.Typer) -> None:
    """Add the four commands."""
    app.command("scenario")(scenario_command)
    app.command("coordinator")(coordinator_command)
    app.command("silo")(silo_command)
    app.command("evaluator")(evaluator_command)


# ------------------------------------------------------------------------------------------------------- scenario
def scenario_command(
    file: File,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run folder; runs/<name>-<time> by default.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with a run that was stopped or killed.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a scenario: a coordinator, an evaluator and all silos as real processes on this machine.

    docs/reference/scenario.md has every key of a scenario, docs/reference/methods.md every option of a method or loss.

    Example: [bold]fedmq scenario scenarios/rcsr_mr50.yaml --set rounds=50 --seed 1[/bold]
    """
    from fedmq.config.resolve import read  # noqa: PLC0415
    from fedmq.launch import forkserver  # noqa: PLC0415

    starting(quiet=quiet)
    source = read(file, settings or (), seed)
    inline = _inline(file, source.scenario.launcher)
    if not inline:
        # Before torch is imported here: the forkserver then imports it at the same time.
        forkserver.warm_up(source.scenario.backbone.name)
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.federation.population import device_of  # noqa: PLC0415
    from fedmq.launch import processes, supervisor  # noqa: PLC0415
    from fedmq.storage.run_folder import write_json  # noqa: PLC0415

    run = resolved(source)
    scenario = run.scenario
    device_of(scenario.device)
    warn([run])
    ours = out_dir is None or not out_dir.expanduser().exists()
    folder = _folder_for(scenario, out_dir, resume)
    prepare = processes.population_here if inline else supervisor.prepare_population
    with _removed_if_refused(folder.root if resume is None and ours else None):
        data = prepare(run, None if quiet else bar())
    if resume is None:
        _begin(folder, scenario)
    with terminal.display(scenario, err, quiet=quiet) as status:
        launch = supervisor.simulate_inline if inline else partial(supervisor.simulate, began=_BEGAN)
        simulated = launch(run, folder, resume=resume is not None, status=status, data=data)
    if simulated.outcome.summary is None:
        goes_on = f"fedmq scenario {folder.scenario} --resume {folder.root}"
        err.print(f"stopped; [bold]{escape(goes_on)}[/bold] goes on", highlight=False, soft_wrap=True)
        sys.exit(FAILED)
    summary = supervisor.finish_summary(simulated.outcome.summary, simulated)
    write_json(folder.summary, summary.plain())
    if as_json:
        print(json.dumps({"folder": str(folder.root), **summary.plain()}, indent=2))
    else:
        terminal.print_summary(summary, folder, out)


@contextlib.contextmanager
def _removed_if_refused(root: Path | None) -> Iterator[None]:
    """Remove a folder that was made to see that it can be, where nothing comes to be in it."""
    try:
        yield
    except BaseException:
        if root is not None:
            with contextlib.suppress(OSError):
                root.rmdir()
        raise


def _folder_for(scenario: Scenario, out_dir: Path | None, resume: Path | None) -> RunFolder:
    """The folder of a run: a new one, or that of the run to go on with.

    Raises:
        InputError: it holds something, or is of another scenario or a finished run.
    """
    from fedmq.runs import resume_check as resuming  # noqa: PLC0415
    from fedmq.storage.run_folder import RunFolder, make_folder, open_run  # noqa: PLC0415

    if resume is not None:
        if out_dir is not None:
            raise InputError("--out", str(out_dir), "no --out beside --resume, which names the folder itself")
        folder = open_run(resume)
        before = resolved_file(folder.scenario, adopt=False).scenario
        resuming.check(folder, before, scenario, f"--resume {resume}", inline=scenario.launcher == "inline")
        return folder
    if out_dir is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return RunFolder(_new_folder(make_folder(Path("runs")), f"{scenario.name}-{stamp}"))
    folder = RunFolder(out_dir.expanduser())
    make_folder(folder.root)
    if any(folder.root.iterdir()):
        allowed = "a new folder, or --resume DIR to go on with a run"
        raise InputError(f"--out {folder.root}", "a folder that is not empty", allowed)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """A folder of that name that was not there; with a number behind it where runs begin within one second."""
    from fedmq.storage.run_folder import writing  # noqa: PLC0415

    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with writing(path), contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _begin(folder: RunFolder, scenario: Scenario) -> None:
    """Write a run's scenario into its folder, which so is taken.

    Raises:
        InputError: another run took it while this one prepared its data.
    """
    from fedmq.storage.run_folder import writing  # noqa: PLC0415

    with writing(folder.scenario):
        try:
            with folder.scenario.open("x", encoding="utf-8") as file:
                file.write(scenario.dump())
        except FileExistsError:
            found = "a folder that another run has taken meanwhile"
            raise InputError(f"--out {folder.root}", found, "a new folder") from None


def _inline(file: Path, launcher: str) -> bool:
    """Whether the silos run in this process; a scenario that leaves starting them to its user is refused."""
    if launcher == "none":
        allowed = "local or inline; `fedmq coordinator`, `fedmq silo` and `fedmq evaluator` start a run by hand"
        raise InputError(f"{file}: launcher", launcher, allowed)
    return launcher == "inline"


# ---------------------------------------------------------------------------------------------- programs by hand
def until_stopped(resume: str = "the same command") -> Callable[[], bool]:
    """A function that is true once SIGINT or SIGTERM came; a second signal aborts the program.

    Args:
        resume: the options that continue the run, for the message.
    """
    caught: list[int] = []

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        say_stopping(resume)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return lambda: bool(caught)


def coordinator_command(
    file: File,
    keys: Keys,
    bind: Annotated[
        str, typer.Option("--bind", metavar="URI", help="tcp://HOST:PORT or ipc://PATH.")
    ] = "tcp://127.0.0.1:5555",
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run folder; runs/<name>-<time> by default.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run folder's last checkpoint.")] = False,
) -> None:
    """Run a coordinator by hand and wait for its silos.

    Example: [bold]fedmq coordinator scenarios/smoke.yaml --keys keys --bind tcp://127.0.0.1:5555 --out runs/hand[/bold]
    """
    starting()
    from coordinator.program import CoordinatorArguments, run_coordinator  # noqa: PLC0415
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.federation.population import build_population  # noqa: PLC0415
    from fedmq.runs import resume_check as resuming  # noqa: PLC0415
    from fedmq.storage.run_folder import RunFolder, open_run  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    check_uri(bind, "--bind", listening=True)
    run = resolved_file(file, settings, seed, by_hand=True)
    scenario = run.scenario
    if resume and out_dir is None:
        raise InputError("--resume", "no --out", "the folder of the run to go on with: --out DIR --resume")
    folder = RunFolder(out_dir or Path("runs") / f"{scenario.name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}")
    if resume or folder.scenario.exists():
        # Silos and the evaluator may have begun their logs there, but no other run may have been.
        open_run(folder.root)
        before = resolved_file(folder.scenario, by_hand=True, adopt=False).scenario
        resuming.check(folder, before, scenario, f"--out {folder.root}", inline=False)
    if not resume and any(folder.checkpoints.glob("version-*")):
        raise InputError(f"--out {folder.root}", "a folder with checkpoints of a run", "a new folder, or --resume")
    warn([run])
    data = build_population(scenario, bar()).prepared.folder
    stop = until_stopped(f"--out {folder.root} --resume")
    with terminal.display(scenario, err, quiet=False) as status:
        outcome = run_coordinator(
            CoordinatorArguments(run, bind, keys, folder.root, resume, data),
            listening=lambda uri: err.print(
                f"listening on {uri} for {scenario.silos.count} silos and the evaluator", highlight=False
            ),
            status=status,
            stop_wanted=stop,
        )
    if outcome.summary is None:
        goes_on = f"--out {folder.root} --resume"
        err.print(f"stopped; the same command with [bold]{goes_on}[/bold] goes on", highlight=False, soft_wrap=True)
        sys.exit(FAILED)
    terminal.print_summary(outcome.summary, folder, out)


def silo_command(
    file: File,
    name: Annotated[str, typer.Option("--name", help="silo-00, silo-01, ...")],
    keys: Keys,
    connect: Connect = "tcp://127.0.0.1:5555",
    device: Device = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="For its log and personal state; runs/<name>-<silo> by default."),
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
) -> None:
    """Run one silo by hand; it waits for the coordinator and outlives its restarts.

    Example: [bold]fedmq silo scenarios/smoke.yaml --name silo-00 --keys keys --device cuda:1[/bold]
    """
    starting()
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415
    from silos.program import SiloArguments, run_silo  # noqa: PLC0415

    check_uri(connect, "--connect")
    run = resolved_file(file, settings, seed, by_hand=True)
    out_dir = out_dir or Path("runs") / f"{run.scenario.name}-{name}"
    arguments = SiloArguments(run, name, connect, keys, out_dir, device)
    run_silo(arguments, progress=_say)


def evaluator_command(
    file: File,
    keys: Keys,
    connect: Connect = "tcp://127.0.0.1:5555",
    device: Device = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="For its log; runs/<name>-evaluator by default.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
) -> None:
    """Run the evaluator by hand.

    Example: [bold]fedmq evaluator scenarios/smoke.yaml --keys keys --connect tcp://127.0.0.1:5555[/bold]
    """
    starting()
    from fedmq.evaluation.program import EvaluatorArguments, run_evaluator  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    check_uri(connect, "--connect")
    run = resolved_file(file, settings, seed, by_hand=True)
    out_dir = out_dir or Path("runs") / f"{run.scenario.name}-evaluator"
    arguments = EvaluatorArguments(run, connect, keys, out_dir, device)
    run_evaluator(arguments, progress=_say)


_say = partial(print, file=sys.stderr, flush=True)
