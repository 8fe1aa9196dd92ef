"""Scenarios of commands: read, and resolved with the known methods, objectives and data sets."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmq.cli.console import BAD_INPUT, bar, err, say
from fedmq.text import print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun, Source
    from fedmq.evaluation.program import EvaluatorArguments
    from fedmq.federation.preflight import Result
    from silos.tasks import SiloArguments


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages in the block without garbage collections, which would take a fifth of the time.

    Later collections leave the imports out, too: the last one, as the process ends, would take .4 s.
    """
    known = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        gc.enable()


def resolved(source: Source, *, manual: bool = False, adopt: bool = True) -> ResolvedRun:
    """A run with all defaults filled in, including the method's options.

    Paths become absolute, so that a resume or a search finds them from any folder. With programs that are launched by
    hand (``manual``), paths of weights stay as written: they run on several machines and must agree on them. Without
    ``adopt``, as for a run folder that is only read, no Python file that the scenario names is executed.
    """
    from fedmq.config.resolve import resolve  # noqa: PLC0415

    with quick_imports():
        import protocols  # noqa: PLC0415 - imports torch

    return resolve(source, protocols, weights=not manual, adopt=adopt)


def resolved_file(
    file: Path, settings: list[str] | None = None, seed: int | None = None, *, manual: bool = False, adopt: bool = True
) -> ResolvedRun:
    """Like :func:`resolved`, for a file with settings and a seed."""
    from fedmq.config.resolve import read  # noqa: PLC0415

    source = read_here(file, settings, seed) if adopt else read(file, settings or (), seed)
    return resolved(source, manual=manual, adopt=adopt)


def read_here(file: Path, settings: list[str] | None = None, seed: int | None = None) -> Source:
    """Read a scenario whose data are on this machine, and refuse quickly whatever can be refused without torch."""
    from fedmq.config.resolve import read  # noqa: PLC0415
    from fedmq.federation.preflight import refuse_scenario  # noqa: PLC0415

    source = read(file, settings or (), seed)
    refuse_scenario(source)
    return source


def warn(runs: Iterable[ResolvedRun]) -> None:
    """Print which settings of the runs have no effect."""
    for line in dict.fromkeys(line for run in runs for line in run.warnings):
        say("warning", line)


def refuse_start(program: str, run: ResolvedRun, peer: SiloArguments | EvaluatorArguments | None = None) -> None:
    """Make the checks of a program that starts, and warn of settings without effect.

    Raises:
        FedmqError: the first problem.
    """
    from fedmq.federation.preflight import Program, refuse  # noqa: PLC0415
    from fedmq.launch.preflight import Starting, checks_of  # noqa: PLC0415

    refuse(checks_of(Program[program]), Starting(run, peer))
    if peer is None:
        warn([run])


def explain(run: ResolvedRun, *, quiet: bool, as_json: bool = False) -> None:
    """Make all checks before a run, and print what it would do and take; as JSON only the estimates."""
    from fedmq.federation.preflight import Program  # noqa: PLC0415
    from fedmq.launch import estimates, preflight  # noqa: PLC0415

    progress = None if quiet else bar()
    results = [*preflight.preflight(Program.CHECK, preflight.Starting(run, progress=progress))]
    warn([run])
    if print_results(results, err):
        sys.exit(BAD_INPUT)
    if as_json:
        print_json(estimates.estimates(run, progress))
        return
    for line in estimates.explain(run, progress):
        print_line(printable(line))


_STYLES = {"ok": "green", "differs": "yellow", "skipped": "yellow", "warning": "yellow", "failed": "red"}


def print_results(results: Iterable[Result], console: Console) -> bool:
    """Print a table of checks, their results and how to fix a problem; returns whether there is one."""
    table, made = Table(box=None, padding=(0, 2, 0, 0)), list(results)
    for head in ("check", "result", "how to fix"):
        table.add_column(head, overflow="fold")
    for result in made:
        verdict = f"[{_STYLES[result.verdict]}]{result.verdict}[/]"
        detail = f"{verdict}: {escape(printable(result.detail))}"
        table.add_row(result.name, detail, escape(result.fix) if result.verdict == "failed" else "")
    if made:
        console.print(table)
    return any(result.verdict == "failed" for result in made)
