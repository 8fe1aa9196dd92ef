"""The command line. Every command says in ``--help`` what it does and shows an example."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from fedmq import __version__
from fedmq.cli import audit, compare, keys, reference, replay, search
from fedmq.cli import data as data_commands
from fedmq.cli.console import bar, err, out, print_anything, starting
from fedmq.cli.options import AsJson, Connect, Device, File, Keys, Quiet, Seed, Settings
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.launch.interrupts import FAILED, say_stopping

_BEGAN = time.monotonic()
BAD_INPUT = 2

app = typer.Typer(
    name="fedmq",
    help="Federated cross-modal retrieval over sealed messages, and its own simulator.\n\n"
    "Example: [bold]fedmq scenario scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(
    help="Look at data sets.\n\nExample: [bold]fedmq data check scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(keys.keys_app, name="keys")
app.add_typer(data_app, name="data")

#: What the command line's library leaves with after Ctrl-C.
_INTERRUPTED = 130
#: What it raises for a command line that is none: of one it exports, the next above.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    print_anything()
    try:
        code = app(prog_name="fedmq", standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code or 0)
    except _UsageError as error:
        _fail_usage(error)
    except typer.Abort:
        _fail(RunError("the input ended"), FAILED)
    except InputError as error:
        _fail(error, BAD_INPUT)
    except FedmqError as error:
        _fail(error, FAILED)
    except KeyboardInterrupt:
        err.print("fedmq: interrupted")
        sys.exit(FAILED)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is not printed yet is dropped, so that the interpreter does not try again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(RunError(f"{error.filename or 'the output'}: could not be written: {error.strerror}"), FAILED)


def _fail_usage(error: Any) -> NoReturn:
    """One line, as of every other mistake; a command without its arguments shows its help."""
    path = error.ctx.command_path if error.ctx else "fedmq"
    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    given = _given(option)
    if given is not None and isinstance(error, typer.BadParameter):
        allowed = error.message.removeprefix("Input should be ").partition(", unable to parse")[0]
        _fail(InputError(option, given, allowed[:1].lower() + allowed[1:]), BAD_INPUT)
    if text := error.format_message().strip():  # without one its help has been shown already
        print(f"fedmq: {text.rstrip('.')}; see {path} --help", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _given(option: str) -> str | None:
    """What stands behind an option on the command line, the last time: that one counts."""
    found = None
    for word, following in itertools.zip_longest(sys.argv[1:], sys.argv[2:]):
        if option.startswith("-") and word == option:
            found = following
        elif option.startswith("-") and word.startswith(f"{option}="):
            found = str(word.partition("=")[2])
    return found


def _fail(error: FedmqError, code: int) -> NoReturn:
    print(f"fedmq: {error}", file=sys.stderr)
    sys.exit(code)


def _scenario_of(file: Path, settings: list[str] | None, seed: int | None, *, by_hand: bool = False) -> Any:
    """A scenario with every default written out, the method's options included.

    Its paths are absolute, so that a resume or a search finds them from any folder. Where the programs are started by
    hand, those of weights stay as they are written: the programs, each on its own machine, must agree on them.
    """
    import protocols  # noqa: PLC0415 - all of them bring torch
    from fedmq.config import loader as scenarios  # noqa: PLC0415

    extra = [*(settings or []), *([f"seed={seed}"] if seed is not None else [])]
    raw = scenarios.apply_settings(scenarios.read_yaml(file), extra)
    scenario = scenarios.parse(raw, file)
    try:
        scenario = protocols.resolved(scenario)
    except InputError as error:
        unknown = f"{error.place}.{error.found}"  # of an option that is none, its own setting is its place
        key = unknown if unknown in raw.overridden else error.place
        place = scenarios.place_of(file, key.split("."), raw.overridden)
        raise InputError(place, error.found, error.allowed) from None
    return scenarios.with_absolute_paths(scenario, weights=not by_hand)


def _warn(scenarios: Iterable[Any]) -> None:
    """Say which options of the scenarios' methods are set and have no effect."""
    import protocols  # noqa: PLC0415 - all of them bring torch

    for line in dict.fromkeys(line for scenario in scenarios for line in protocols.without_effect(scenario)):
        err.print(f"[yellow]warning[/yellow] {escape(line)}", highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------------- scenario
@app.command("scenario")
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
    from fedmq.config import loader as scenarios  # noqa: PLC0415
    from fedmq.launch import forkserver  # noqa: PLC0415

    starting(quiet=quiet)
    chosen = scenarios.load(file, settings or [])
    inline = _inline(file, chosen.launcher)
    if not inline:
        # Before torch is imported here: the forkserver then imports it at the same time.
        forkserver.warm_up(chosen.backbone.name)
    from fedmq.cli import terminal  # noqa: PLC0415
    from fedmq.federation.population import device_of  # noqa: PLC0415
    from fedmq.launch import processes, supervisor  # noqa: PLC0415
    from fedmq.storage.run_folder import write_json  # noqa: PLC0415

    scenario = _scenario_of(file, settings, seed)
    device_of(scenario.device)
    _warn([scenario])
    ours = out_dir is None or not out_dir.expanduser().exists()
    folder = _folder_for(scenario, out_dir, resume)
    prepare = processes.population_here if inline else supervisor.prepare_population
    try:
        data = prepare(scenario, None if quiet else bar())
    except BaseException:
        if resume is None and ours:
            with contextlib.suppress(OSError):
                folder.root.rmdir()  # made to see that it can be; nothing is in it yet
        raise
    if resume is None:
        _begin(folder, scenario)
    with terminal.display(scenario, err, quiet=quiet) as status:
        if inline:
            simulated = supervisor.simulate_inline(
                scenario, folder, resume=resume is not None, status=status, data=data
            )
        else:
            simulated = supervisor.simulate(
                scenario, folder, resume=resume is not None, status=status, began=_BEGAN, data=data
            )
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


def _folder_for(scenario: Any, out_dir: Path | None, resume: Path | None) -> Any:
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
        before = _scenario_of(folder.scenario, None, None)
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


def _begin(folder: Any, scenario: Any) -> None:
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
def _until_stopped(resume: str = "the same command") -> Callable[[], bool]:
    """True once SIGINT or SIGTERM came; the second one ends the program at once."""
    caught: list[int] = []

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        say_stopping(resume)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return lambda: bool(caught)


@app.command("coordinator")
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
    scenario = _scenario_of(file, settings, seed, by_hand=True)
    if resume and out_dir is None:
        raise InputError("--resume", "no --out", "the folder of the run to go on with: --out DIR --resume")
    folder = RunFolder(out_dir or Path("runs") / f"{scenario.name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}")
    if resume or folder.scenario.exists():
        # Silos and the evaluator may have begun their logs there, but no other run may have been.
        open_run(folder.root)
        before = _scenario_of(folder.scenario, None, None, by_hand=True)
        resuming.check(folder, before, scenario, f"--out {folder.root}", inline=False)
    if not resume and any(folder.checkpoints.glob("version-*")):
        raise InputError(f"--out {folder.root}", "a folder with checkpoints of a run", "a new folder, or --resume")
    _warn([scenario])
    data = build_population(scenario, bar()).prepared.folder
    stop = _until_stopped(f"--out {folder.root} --resume")
    with terminal.display(scenario, err, quiet=False) as status:
        outcome = run_coordinator(
            CoordinatorArguments(scenario, bind, keys, folder.root, resume, data),
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


@app.command("silo")
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
    scenario = _scenario_of(file, settings, seed, by_hand=True)
    arguments = SiloArguments(
        scenario, name, connect, keys, out_dir or Path("runs") / f"{scenario.name}-{name}", device
    )
    run_silo(arguments, progress=_say)


@app.command("evaluator")
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
    scenario = _scenario_of(file, settings, seed, by_hand=True)
    arguments = EvaluatorArguments(
        scenario, connect, keys, out_dir or Path("runs") / f"{scenario.name}-evaluator", device
    )
    run_evaluator(arguments, progress=_say)


_say = partial(print, file=sys.stderr, flush=True)


def _traits_of(scenario: Any) -> Any:
    import protocols  # noqa: PLC0415 - all of them bring torch

    return protocols.traits_of(scenario)


def _opened(run: Path, device: str | None, silo: str | None, progress: Callable[[str, int, int], None]) -> Any:
    import protocols  # noqa: PLC0415 - all of them bring torch
    from coordinator.final_request import asked_last  # noqa: PLC0415
    from fedmq.retrieval import select_model  # noqa: PLC0415
    from silos.personal_model import own_of  # noqa: PLC0415

    return select_model.opened(
        run, device, silo, select_model.Programs(protocols.traits_of, asked_last, own_of), progress
    )


def _fits(scenario: Any, folder: Path) -> None:
    """Refuse what a run on the prepared data of a folder would, wherever it runs."""
    from fedmq.launch import processes  # noqa: PLC0415

    processes.population_here(scenario.model_copy(update={"device": "cpu"}), None, folder)


audit.add_audit(app, bar, _traits_of)
reference.add_reference(app)
data_commands.add_data(data_app, _scenario_of, bar, BAD_INPUT, _fits)


replay.add_replay(app, _scenario_of)
replay.add_report(app)


def _prepare(quiet: bool) -> Callable[[Any], Path]:
    from fedmq.launch import supervisor  # noqa: PLC0415

    return lambda scenario: supervisor.prepare_population(scenario, None if quiet else bar())


def _share(scenario: Any, folder: Path) -> None:
    """Refuse what the data in a folder cannot be shared out by, without making clusters, which takes a second each."""
    from fedmq.federation.population import build_population  # noqa: PLC0415

    partition = scenario.partition
    clustered = partition.kind == "dir_clusters"
    alike = partition.model_copy(update={"kind": "iid"}) if clustered else partition
    samples = sum(map(len, build_population(scenario.model_copy(update={"partition": alike}), folder=folder).train))
    if clustered and partition.clusters > samples:
        raise InputError("partition.clusters", partition.clusters, f"at most {samples}, the training samples")


_ROOTS = compare.Roots(_scenario_of, _prepare, _share, _until_stopped, _warn)
compare.add_compare(app, _ROOTS)
compare.add_sweep(app, _ROOTS)
search.add_search(app, bar, _opened)
search.add_export(app, bar, _opened)
search.add_curves(app, bar, _opened)
search.add_tsne(app, bar, _opened)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"fedmq {__version__}")
        raise typer.Exit
