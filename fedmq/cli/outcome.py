"""The end of a run's command: its result or how to continue it, and the exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

from rich.markup import escape

from fedmq.cli import terminal
from fedmq.cli.console import err, out
from fedmq.launch.interrupts import FAILED
from fedmq.runs.run_records import RunSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.text import print_json


def exit_stopped(command: str, others: str = "") -> NoReturn:
    """Print the command that continues a stopped run, and exit."""
    text = f"stopped{others}; continue with [bold]{escape(command)}[/bold]"
    err.print(text, highlight=False, soft_wrap=True)
    sys.exit(FAILED)


def _fail_if_not_evaluated(summary: RunSummary, command: str) -> None:
    """Exit if the evaluator did not answer, and print the command that has the last version evaluated."""
    if not (text := terminal.not_evaluated(summary)):
        return
    again = f"; evaluate it with [bold]{escape(command)}[/bold]" if summary.versions in summary.unevaluated else ""
    err.print(f"{escape(text)}{again}", highlight=False, soft_wrap=True)
    sys.exit(FAILED)


def print_outcome(summary: RunSummary, folder: RunFolder, command: str, *, as_json: bool = False) -> None:
    """Print the result; exit if the evaluator did not answer; ``command`` then evaluates the last version."""
    if as_json:
        print_json({"folder": str(folder.root), **summary.plain()})
        terminal.print_warnings(summary, folder, err)
    else:
        terminal.print_summary(summary, folder, out)
    _fail_if_not_evaluated(summary, command)
