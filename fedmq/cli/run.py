"""``fedmq scenario``, and its programs for manual launches: ``fedmq coordinator``, ``silo`` and ``evaluator``."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.console import bar, continued_by_repeating, continued_by_the_same_command, err, exit_stopped, starting
from fedmq.cli.options import (
    CONNECT,
    AsJson,
    Device,
    File,
    Keys,
    LogChoice,
    NewFile,
    OwnConnect,
    OwnKeys,
    ProcessOptions,
    Quiet,
    Seed,
    Settings,
    SiteFile,
    StartOptions,
    Whereabouts,
    silo_arguments,
    with_options,
)
from fedmq.cli.report import Live, LivePort, begin_profile, live_page, profile_of
from fedmq.cli.scenarios import explain, quick_imports, refuse_start, resolved, resolved_file
from fedmq.errors import DiskError, InputError
from fedmq.launch.interrupts import until_stopped
from fedmq.profiling import span
from fedmq.storage.logs import LogLevel, open_log
from fedmq.storage.run_folder import RunFolder, make_folder, open_run, write_json, writing
from fedmq.text import print_line, printable

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun, Source
    from fedmq.config.scenario import Scenario
    from fedmq.launch.supervisor import Simulated
    from fedmq.runs.run_records import RunSummary

#: Start of this program, for the reported start-up time.
_BEGAN = time.monotonic()


_CheckOnly = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Print what would run, estimates of time, memory and traffic, and warnings of settings without effect "
        "(with --json only estimates and warnings), and exit.",
    ),
]
_Profiled = Annotated[
    bool,
    typer.Option("--profile", help="Record where the time goes, by process and phase; not of silos on other machines."),
]
_StopSilos = Annotated[
    bool,
    typer.Option(
        "--stop-silos", help="On Ctrl-C or SIGTERM, end the silos and the evaluator, too; by default they wait."
    ),
]


# ------------------------------------------------------------------------------------------------------- scenario
@with_options
def scenario_command(
    file: NewFile = None,
    *,
    start: StartOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log: LogChoice,
    live: Live = False,
    live_port: LivePort = 0,
    check: _CheckOnly = False,
    profile: _Profiled = False,
) -> None:
    """Run a scenario: a coordinator, an evaluator and all silos as processes on this machine.

    docs/reference/scenario.md lists all scenario keys, docs/reference/methods.md the options of methods and losses.

    Example: [bold]fedmq scenario scenarios/rcsr_mr50.yaml --set rounds=50 --seed 1[/bold]
    """
    from fedmq.config.resolve import read  # noqa: PLC0415

    starting(quiet=quiet)
    begin_profile(_BEGAN, on=profile)
    console = log.log_file is None  # otherwise only to the file, so that the display stays readable
    logs = None if log.log_level is None and console else log.options(console=console)
    file, resume, extend = start.file(file), start.resume, start.extend
    source = read(file, start.settings or (), start.seed)
    inline = _inline(file, source.scenario)
    _prepare_start(source, forks=not (inline or check), new=resume is None)
    if check:
        explain(resolved(source), quiet=quiet, as_json=as_json)
        return
    with quick_imports():
        from fedmq.cli import terminal  # noqa: PLC0415
        from fedmq.launch import supervisor  # noqa: PLC0415

    run = resolved(source)
    refuse_start("SCENARIO", run)
    new = resume is None and (start.out_dir is None or not start.out_dir.expanduser().exists())
    folder = (
        _new_run_folder(run.scenario, start.out_dir) if resume is None else _resumable(run.scenario, resume, extend)
    )
    run = _with_rounds(run, extend)
    data = _prepared(run, folder.root if new else None, inline=inline, quiet=quiet)
    command = f"fedmq scenario --resume {shlex.quote(str(folder.root))}"
    if resume is None or extend is not None:
        _begin(folder, run.scenario, extended=extend is not None)
    with profile_of(folder, on=profile), _tracked(run, folder):
        with live_page(folder, run, live_port, live=live), terminal.display(run.scenario, err, quiet=quiet) as status:
            processes = partial(supervisor.simulate, began=_BEGAN, notice=_notice)
            launch = supervisor.simulate_inline if inline else processes
            simulated = launch(run, folder, resume=resume is not None, status=status, data=data, logs=logs)
        summary = _finished(folder, simulated, command, quiet=quiet)
    terminal.print_outcome(summary, folder, command, as_json=as_json)


def _prepare_start(source: Source, *, forks: bool, new: bool) -> None:
    """Start the forkserver of a run that ``forks``, and refuse a ``new`` one's scenario as far as torch is not needed.

    The forkserver comes first: it imports torch while this process reads on. It has usually been started with the
    command, before the scenario was known.
    """
    from fedmq.launch import forkserver  # noqa: PLC0415

    backbone = source.scenario.backbone.name
    if not forks or forkserver.needs_open_clip(backbone):
        forkserver.stop()
    if forks:
        forkserver.warm_up(backbone)
    if new:
        from fedmq.federation.preflight import refuse_scenario  # noqa: PLC0415 - imports NumPy

        refuse_scenario(source)


@span("report")
def _finished(folder: RunFolder, simulated: Simulated, command: str, *, quiet: bool) -> RunSummary:
    """Write the whole summary and the report; returns the summary. A stopped run exits with the command to resume."""
    from fedmq.api.results import write_report  # noqa: PLC0415
    from fedmq.launch.supervisor import finish_summary  # noqa: PLC0415
    from fedmq.runs.report import run_report  # noqa: PLC0415

    if simulated.outcome.summary is None:
        exit_stopped(command)
    summary = finish_summary(simulated.outcome.summary, simulated)
    write_json(folder.summary, summary.plain())
    with run_report.warned_without_packages(folder):
        write_report(folder, None if quiet else bar())
    return summary


def _tracked(run: ResolvedRun, folder: RunFolder) -> contextlib.AbstractContextManager[None]:
    """Pass the run's records on to its trackers while the block runs."""
    from fedmq.runs.trackers import tracking  # noqa: PLC0415

    return tracking(run, folder, _notice)


@span("data")
def _prepared(run: ResolvedRun, created: Path | None, *, inline: bool, quiet: bool) -> Path:
    """Prepare a run's data, print warnings on them, and return their folder; refused data remove the folder created."""
    from fedmq.data.prepared_arrays import open_prepared  # noqa: PLC0415
    from fedmq.launch import preparation  # noqa: PLC0415

    prepare = preparation.population_here if inline else preparation.prepare_population
    with continued_by_repeating():
        try:
            data = prepare(run, None if quiet else bar())
        except BaseException:
            if created is not None:
                with contextlib.suppress(OSError):
                    created.rmdir()
            raise
    prepared = open_prepared(data)
    for line in (*(() if quiet else prepared.notes), *prepared.warnings):
        print_line(f"data: {printable(line)}", error=True)
    return data


def _notice(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _resumable(scenario: Scenario, resume: Path, extend: int | None, *, manual: bool = False) -> RunFolder:
    """The folder of the run to resume."""
    from fedmq.runs import resume as resuming  # noqa: PLC0415

    folder = open_run(resume)
    before = resolved_file(folder.scenario, manual=manual, adopt=False).scenario
    inline = not manual and scenario.launcher == "inline"
    resuming.check(folder, before, scenario, f"--resume {resume}", inline=inline, extend=extend is not None)
    return folder


def _with_rounds(run: ResolvedRun, extend: int | None) -> ResolvedRun:
    """The run with ``extend`` further rounds; the run as it is if ``extend`` is None."""
    from fedmq.runs.resume import extended  # noqa: PLC0415

    return run if extend is None else run.changed(extended(run.scenario, extend, run.source.file))


def _new_run_folder(scenario: Scenario, out_dir: Path | None) -> RunFolder:
    """The folder of a new run."""
    if out_dir is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return RunFolder(_new_folder(make_folder(Path("runs")), f"{scenario.name}-{stamp}"))
    folder = RunFolder(out_dir.expanduser())
    make_folder(folder.root)
    if any(folder.root.iterdir()):
        allowed = "a new folder, or --resume RUN to resume a run"
        raise InputError(f"--out {folder.root}", "a folder that is not empty", allowed)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """Create a folder of this name, with a number appended if another run has started in the same second."""
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with writing(path), contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _begin(folder: RunFolder, scenario: Scenario, *, extended: bool = False) -> None:
    """Write the scenario of a new or an extended run into its folder; a new run claims the folder."""
    from fedmq.runs.resume import begin_extension  # noqa: PLC0415

    if extended:
        begin_extension(folder, scenario)
        return
    with writing(folder.scenario):
        try:
            with folder.scenario.open("x", encoding="utf-8") as file:
                file.write(scenario.dump())
        except FileExistsError:
            taken = "a folder that another run has taken in the meantime"
            raise InputError(f"--out {folder.root}", taken, "a new folder") from None


def _inline(file: Path, scenario: Scenario) -> bool:
    """Whether the silos run in this process; refuses a scenario whose silos are launched manually."""
    launcher = scenario.launcher
    if scenario.data is None:
        allowed = "another partition; launch this run with `fedmq coordinator` and `fedmq silo --site`"
        raise InputError(f"{file}: partition.kind", "own", allowed)
    if launcher == "none":
        allowed = "local or inline; launch this run with `fedmq coordinator`, `fedmq evaluator` and `fedmq silo`"
        raise InputError(f"{file}: launcher", launcher, allowed)
    return launcher == "inline"


# ---------------------------------------------------------------------------------------- manually launched programs
@with_options
def coordinator_command(
    keys: Keys,
    file: NewFile = None,
    *,
    bind: Annotated[
        str, typer.Option("--bind", metavar="URI", help="tcp://HOST:PORT, ipc://PATH or shm://PATH.")
    ] = CONNECT,
    start: StartOptions,
    stop_silos: _StopSilos = False,
    log: LogChoice,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", metavar="PORT", min=1, max=65535, help="Serve metrics for Prometheus on 127.0.0.1."
        ),
    ] = None,
) -> None:
    """Run a coordinator, which waits for manually launched silos and an evaluator.

    Ctrl-C or SIGTERM stops it cleanly; silos and evaluator wait until it is started again with --resume.

    Example: [bold]fedmq coordinator scenarios/smoke.yaml --keys keys --out runs/manual[/bold]
    """
    starting()
    run = resolved_file(start.file(file), start.settings, start.seed, manual=True)
    resume, extend = start.resume, start.extend
    from coordinator.program import CoordinatorArguments, run_coordinator  # noqa: PLC0415 - imports torch
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.launch.preparation import population_here  # noqa: PLC0415
    from fedmq.runs.resume import begin_extension  # noqa: PLC0415
    from fedmq.wire.messages import COORDINATOR  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    check_uri(bind, "--bind", listening=True)
    if resume is None:
        folder = _manual_run_folder(run.scenario, start.out_dir)
    else:
        folder = _resumable(run.scenario, resume, extend, manual=True)
    run = _with_rounds(run, extend)
    scenario = run.scenario
    refuse_start("COORDINATOR", run)
    data = None if scenario.data is None else population_here(run, bar())
    if extend is not None:
        begin_extension(folder, scenario)
    command = shlex.join(["fedmq", "coordinator", "--resume", str(folder.root), "--keys", str(keys), "--bind", bind])
    # On a terminal the live display shows what happens: only warnings are printed above it.
    logs = log.options(LogLevel.WARNING if terminal.is_live(err) else LogLevel.INFO)
    arguments = CoordinatorArguments(
        run, bind, keys, folder.root, resume is not None, data, 1, stop_silos, logs, metrics_port, report=True
    )
    stop = until_stopped(partial(_continuing, folder, command))
    with _tracked(run, folder), _on_full_disk(folder, command):
        with terminal.display(scenario, err, quiet=False, line=open_log(logs, COORDINATOR).info) as status:
            outcome = run_coordinator(arguments, status=status, stop_wanted=stop)
        if outcome.summary is None:
            exit_stopped(_continuing(folder, command), "" if stop_silos else " (silos and evaluator wait)")
    terminal.print_outcome(outcome.summary, folder, command)


def _continuing(folder: RunFolder, command: str) -> str:
    """What continues a stopped run; one that has not begun has no folder yet."""
    return command if folder.scenario.is_file() else "the same command"


@contextlib.contextmanager
def _on_full_disk(folder: RunFolder, resume: str) -> Iterator[None]:
    """Add the command that continues an unfinished run to the error of a full disk, not to that of a deleted log."""
    try:
        yield
    except DiskError as error:
        if error.__cause__ is None or folder.summary.is_file():
            raise
        raise DiskError(f"{error}; free space, then: {resume}") from error


def _manual_run_folder(scenario: Scenario, out_dir: Path | None) -> RunFolder:
    """The folder of a new run, in which silos and the evaluator may already have started their logs."""
    from fedmq.runs import resume as resuming  # noqa: PLC0415

    folder = RunFolder(out_dir or Path("runs") / f"{scenario.name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}")
    if folder.scenario.exists():
        before = resolved_file(folder.scenario, manual=True, adopt=False).scenario
        resuming.check(folder, before, scenario, f"--out {folder.root}", inline=False)
    if any(folder.checkpoints.glob("version-*")):
        raise InputError(f"--out {folder.root}", "a folder with checkpoints of a run", "a new folder, or --resume RUN")
    return folder


@with_options
def silo_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A scenario (YAML); none with --stay.", show_default=False)
    ] = None,
    *,
    given: ProcessOptions,
    log: LogChoice,
    standing: Annotated[
        bool, typer.Option("--stay", help="With --site: take part in one run after the other, each with its scenario.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept", metavar="SHA256", help="With --stay: accept this scenario, or with 'policy' all that it allows."
        ),
    ] = None,
) -> None:
    """Run one silo; it waits for the coordinator and reconnects when the coordinator restarts.

    With --stay it takes part in one run after the other. A scenario that the site has not accepted yet is shown, and
    accepted on the terminal or with --accept.

    Example: [bold]fedmq silo scenarios/smoke.yaml --name silo-00 --keys keys --device cuda:1[/bold]

    Example: [bold]fedmq silo --site silo.yaml --stay[/bold]
    """
    starting()
    logs = log.options()
    if standing:
        if given.site is None or file is not None or given.settings or given.seed is not None:
            raise InputError("--stay", "a scenario, or no site file", "--site FILE alone: each run brings its scenario")
        from fedmq.cli.stay import stay  # noqa: PLC0415 - imports torch
        from fedmq.config.site import read_site  # noqa: PLC0415

        with continued_by_the_same_command():
            stay(read_site(given.site), given, accept or (), logs)
    if accept:
        raise InputError("--accept", accept[0], "with --stay only")
    if file is None:
        raise InputError("FILE", "no scenario", "a scenario (YAML), or --site FILE --stay")
    run = resolved_file(file, given.settings, given.seed, manual=True)
    silo = silo_arguments(run, given, logs)
    refuse_start("SILO", run, silo)
    from silos.program import run_silo  # noqa: PLC0415 - imports torch

    with continued_by_the_same_command():
        run_silo(silo)


@with_options
def evaluator_command(
    file: File,
    *,
    keys: OwnKeys = None,
    connect: OwnConnect = None,
    device: Device = None,
    site: SiteFile = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for its log; runs/<name>-evaluator by default.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    log: LogChoice,
) -> None:
    """Run the evaluator; it waits for the coordinator.

    Example: [bold]fedmq evaluator scenarios/smoke.yaml --keys keys --connect tcp://127.0.0.1:5555[/bold]
    """
    starting()
    run = resolved_file(file, settings, seed, manual=True)
    from fedmq.evaluation.program import EvaluatorArguments, run_evaluator  # noqa: PLC0415 - imports torch
    from fedmq.wire.messages import EVALUATOR  # noqa: PLC0415

    here = Whereabouts.of(run, ProcessOptions(EVALUATOR, keys, connect, device, site, out_dir))
    place = (here.connect, here.keys, here.out, here.device)
    evaluator = EvaluatorArguments(run, *place, site=here.site, logs=log.options())
    refuse_start("EVALUATOR", run, evaluator)
    with continued_by_the_same_command():
        run_evaluator(evaluator)
