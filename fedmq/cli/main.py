"""The command line: its commands, and its errors as one line and an exit code."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedmq.cli import (
    audit,
    compare,
    init,
    keys,
    live,
    operate,
    preflight,
    reference,
    replay,
    report,
    run,
    schema,
    search,
    signing,
    tune,
)
from fedmq.cli import data as data_commands
from fedmq.cli.console import bar, print_anything
from fedmq.cli.help_text import group_commands, join_lines
from fedmq.cli.scenarios import again, resolved_file, warn
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.launch.interrupts import FAILED, say_interrupted
from fedmq.packages import __version__
from fedmq.text import print_line, print_traceback

if TYPE_CHECKING:
    from fedmq.config.scenario import Scenario
    from fedmq.federation.protocol import Traits

BAD_INPUT = 2

app = typer.Typer(
    name="fedmq",
    help="Federated cross-modal retrieval over encrypted messages, with a simulator.\n\n"
    "Example: [bold]fedmq scenario scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
data_app = typer.Typer(
    help="List, check and prepare data sets.\n\nExample: [bold]fedmq data check scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(keys.keys_app, name="keys")
app.add_typer(data_app, name="data")

#: Maximum length of a too long path as shown [characters].
_SHOWN_NAME = 60
#: Exit code that typer returns after Ctrl-C.
_INTERRUPTED = 130
#: Base of typer's usage errors, which typer does not export.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    print_anything()
    sys.excepthook = print_traceback
    try:
        code = app(prog_name="fedmq", standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        sys.exit(code or 0)
    except _UsageError as error:
        _fail_usage(error)
    except typer.Abort:
        _fail(RunError("standard input ended before the answer"), FAILED)
    except InputError as error:
        _fail(error, BAD_INPUT)
    except FedmqError as error:
        _fail(error, FAILED)
    except KeyboardInterrupt:
        say_interrupted()
        sys.exit(FAILED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = str(error.filename)
            found = f"{name[:_SHOWN_NAME]}... ({len(name):,} characters)"
            _fail(InputError("a path", found, "a shorter one, which the file system accepts"), BAD_INPUT)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            found = f"{error.strerror} at {error.filename or 'a connection'}"
            _fail(RunError(f"{found}: raise `ulimit -n`, or LimitNOFILE= of systemd; what is on disk stays"), FAILED)
        if error.errno != errno.ENOSPC:
            raise
        # Drop unprinted output, so that the interpreter does not try to write it again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(RunError(f"{error.filename or 'the output'}: could not be written: {error.strerror}"), FAILED)


def _fail_usage(error: Any) -> NoReturn:
    """Print a usage error as one line; a command without its arguments has shown its help."""
    path = error.ctx.command_path if error.ctx else "fedmq"
    option = next(iter(getattr(getattr(error, "param", None), "opts", ())), "")
    given = _given(option)
    if given is not None and isinstance(error, typer.BadParameter):
        allowed = error.message.removeprefix("Input should be ").partition(", unable to parse")[0]
        _fail(InputError(option, given, allowed[:1].lower() + allowed[1:]), BAD_INPUT)
    if (near := getattr(error, "possibilities", None)) and option_name(error):
        error.possibilities = get_close_matches(option_name(error), near, cutoff=0.75)
    if text := error.format_message().strip():  # empty if the help has been shown
        print_line(f"fedmq: {text.rstrip('.')}; see {path} --help", error=True)
    sys.exit(BAD_INPUT)


def option_name(error: Any) -> str:
    """The unknown option of a usage error; empty if it is another error."""
    return str(getattr(error, "option_name", ""))


def _given(option: str) -> str | None:
    """The last value given for an option, which is the one that counts."""
    found = None
    for word, following in itertools.zip_longest(sys.argv[1:], sys.argv[2:]):
        if option.startswith("-") and word == option:
            found = following
        elif option.startswith("-") and word.startswith(f"{option}="):
            found = str(word.partition("=")[2])
    return found


def _fail(error: FedmqError, code: int) -> NoReturn:
    print_line(f"fedmq: {error}", error=True)
    sys.exit(code)


def _traits_of(scenario: Scenario) -> Traits:
    import protocols  # noqa: PLC0415 - imports torch

    return protocols.traits_of(scenario)


def _open_model(
    run: Path,
    device: str | None,
    silo: str | None,
    progress: Callable[[str, int, int], None],
    site: Path | None = None,
) -> Any:
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415 - imports torch

    return open_run_model(run, device, silo, progress, site)


def _fits(scenario: Scenario, folder: Path) -> None:
    """Refuse a scenario that cannot run on the prepared data in a folder."""
    from fedmq.launch import preparation  # noqa: PLC0415

    preparation.population_here(again(scenario.model_copy(update={"device": "cpu"})), None, folder)


operate.add_status(app)
preflight.add_preflight(app)
operate.add_prune(app, _traits_of)
audit.add_audit(app, bar, _traits_of)
reference.add_reference(app)
data_commands.add_data(data_app, bar, BAD_INPUT, _fits)


def _refuse(scenario: Scenario, progress: Callable[[str, int, int], None] | None) -> None:
    """Refuse a scenario that cannot run, without extracting features."""
    from fedmq.launch import preparation  # noqa: PLC0415

    preparation.check_without_features(again(scenario), progress)


init.add_init(app, _refuse)


run.add_run(app)
replay.add_replay(app)
report.add_report(app)
live.add_board(app)
schema.add_schema(app)


def _prepare(quiet: bool) -> Callable[[Scenario], Path]:
    from fedmq.launch import preparation  # noqa: PLC0415

    return lambda scenario: preparation.prepare_population(again(scenario), None if quiet else bar())


def _check_partition(scenario: Scenario, folder: Path) -> None:
    """Refuse a partition that is impossible with the data in a folder; does not cluster, which takes seconds."""
    from fedmq.federation.population import build_population  # noqa: PLC0415

    partition = scenario.partition
    clustered = partition.kind == "dir_clusters"
    checked = partition.model_copy(update={"kind": "iid"}) if clustered else partition
    samples = sum(map(len, build_population(scenario.model_copy(update={"partition": checked}), folder=folder).train))
    if clustered and partition.clusters > samples:
        raise InputError("partition.clusters", partition.clusters, f"at most {samples}, the number of training samples")


def _scenario_of(file: Path, settings: list[str], seed: int | None) -> Scenario:
    return resolved_file(file, settings, seed).scenario


def _warn(scenarios: Iterable[Scenario]) -> None:
    warn(map(again, scenarios))


_ROOTS = compare.Roots(_scenario_of, _prepare, _check_partition, run.until_stopped, _warn)
compare.add_compare(app, _ROOTS)
compare.add_sweep(app, _ROOTS)
tune.add_tune(app, _ROOTS, lambda scenario: again(scenario).personal_only)
search.add_search(app, bar, _open_model)
search.add_export(app, bar, _open_model)
search.add_curves(app, bar, _open_model)
search.add_tsne(app, bar, _open_model)
signing.add_signing(app)
group_commands(app)
join_lines(app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print_line(f"fedmq {__version__}")
        raise typer.Exit
