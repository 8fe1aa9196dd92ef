"""The command line: its commands, and its errors as one line and an exit code."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NoReturn

import typer

from fedmq.cli import audit, compare, contribution, init, operate, reference, report, run, search, tune
from fedmq.cli.console import BAD_INPUT, print_anything
from fedmq.cli.data import data_app
from fedmq.cli.keys import keys_app, sign_command, verify_command
from fedmq.errors import FedmqError, InputError, RunError
from fedmq.launch.interrupts import FAILED, say_interrupted
from fedmq.packages import __version__
from fedmq.text import print_line, print_traceback

app = typer.Typer(
    name="fedmq",
    help="Federated cross-modal retrieval over encrypted messages, with a simulator.\n\n"
    "Example: [bold]fedmq scenario scenarios/smoke.yaml[/bold]",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

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
            name = f"{str(error.filename)[:_SHOWN_NAME]}..., which is too long"
            _fail(InputError("a path", name, "a shorter one, which the file system accepts"), BAD_INPUT)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            what = f"{error.strerror} at {error.filename or 'a connection'}"
            _fail(RunError(f"{what}: raise `ulimit -n`, or LimitNOFILE= of systemd; what is on disk stays"), FAILED)
        if error.errno != errno.ENOSPC:
            raise
        # Drop unprinted output, so that the interpreter does not try to write it again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(RunError(f"{error.filename or 'the output'}: could not be written: {error.strerror}"), FAILED)


def _fail_usage(error: Any) -> NoReturn:
    """Print a usage error in typer's words, as one line; a command without its arguments has shown its help."""
    path = error.ctx.command_path if error.ctx else "fedmq"
    if text := error.format_message().strip():  # empty if the help has been shown
        print_line(f"fedmq: {' '.join(text.split()).rstrip('.')}; see {path} --help", error=True)
    sys.exit(BAD_INPUT)


def _fail(error: FedmqError, code: int) -> NoReturn:
    print_line(f"fedmq: {error}", error=True)
    sys.exit(code)


#: The groups of ``fedmq --help`` with their commands, both in order.
_COMMANDS: Mapping[str, Mapping[str, Callable[..., None]]] = {
    "Start here": {
        "init": init.init_command,
        "scenario": run.scenario_command,
        "report": report.report_command,
        "board": report.board_command,
        "search": search.search_command,
        "schema": reference.schema_command,
        "protocols": reference.protocols_command,
        "losses": reference.losses_command,
    },
    "Operate": {
        "preflight": operate.preflight_command,
        "coordinator": run.coordinator_command,
        "silo": run.silo_command,
        "evaluator": run.evaluator_command,
        "status": operate.status_command,
        "prune": operate.prune_command,
    },
    "Audit and look": {
        "audit": audit.audit_command,
        "replay": operate.replay_command,
        "forget": contribution.forget_command,
        "sign": sign_command,
        "verify": verify_command,
        "curves": search.curves_command,
        "cross": search.cross_command,
        "tsne": search.tsne_command,
        "export": search.export_command,
    },
    "Experiments": {
        "compare": compare.compare_command,
        "sweep": compare.sweep_command,
        "tune": tune.tune_command,
        "contribution": contribution.contribution_command,
    },
}


def _join_lines(group: typer.Typer) -> None:
    """Make every paragraph of the help of all commands one line, which the terminal breaks to its width.

    Typer keeps the line ends of docstrings, which would break lines twice.
    """
    for command in group.registered_commands:
        text = command.help or inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _join_lines(inner.typer_instance)


for _group, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_group)(_command)
app.add_typer(keys_app, name="keys", rich_help_panel="Operate")
app.add_typer(data_app, name="data", rich_help_panel="Start here")
_join_lines(app)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print_line(f"fedmq {__version__}")
        raise typer.Exit
