"""Scenarios of commands: read, and resolved with the known methods, objectives and data sets."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from fedmq.cli.console import bar, err
from fedmq.text import print_json, print_line, printable

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun, Source


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages in the block without garbage collections, which would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resolved(source: Source, *, manual: bool = False, adopt: bool = True) -> ResolvedRun:
    """A run with all defaults filled in, including the method's options.

    Paths become absolute, so that a resume or a search finds them from any folder. With manually launched programs,
    paths of weights stay as written: the programs run on several machines and must agree on them.

    Args:
        source: from ``fedmq.config.resolve.read``.
        manual: the programs are launched manually.
        adopt: allow to execute Python files that the scenario names; False for a run folder that is only read.
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

    elsewhere = manual or not adopt
    source = read(file, settings or (), seed) if elsewhere else read_here(file, settings, seed)
    return resolved(source, manual=manual, adopt=adopt)


def plug_in_names() -> dict[str, tuple[str, ...]]:
    """Names of the methods and objectives, by the scenario key that selects one; loads neither them nor torch."""
    from fedmq.config.plug_ins import names_found  # noqa: PLC0415

    return {
        "protocol.name": names_found("protocols", "fedmq.protocols"),
        "objective.base": names_found("protocols.objectives", "fedmq.objectives"),
    }


def read_here(file: Path, settings: list[str] | None = None, seed: int | None = None) -> Source:
    """Read a scenario whose data are on this machine, and refuse quickly whatever can be refused without torch."""
    from fedmq.config.resolve import read  # noqa: PLC0415
    from fedmq.federation.preflight import refuse_scenario  # noqa: PLC0415

    source = read(file, settings or (), seed)
    refuse_scenario(source, plug_in_names())
    return source


def warn(runs: Iterable[ResolvedRun]) -> None:
    """Print which settings of the runs have no effect."""
    for line in dict.fromkeys(line for run in runs for line in run.warnings):
        err.print(f"[yellow]warning[/yellow] {escape(line)}", highlight=False, soft_wrap=True)


def check_here(run: ResolvedRun, *, device: bool) -> None:
    """Refuse what this machine lacks, and warn of settings without effect.

    Args:
        run: the run.
        device: also check its device.

    Raises:
        InputError: there is no such device, or a tracker's package is missing.
    """
    from fedmq.federation.population import device_of  # noqa: PLC0415
    from fedmq.runs import trackers  # noqa: PLC0415

    trackers.check(run.scenario.track)
    if device:
        device_of(run.scenario.device)
    warn([run])


def explain(run: ResolvedRun, *, quiet: bool, as_json: bool = False) -> None:
    """Print what a run would do and take; as JSON only the estimates."""
    from fedmq.launch import estimates  # noqa: PLC0415

    check_here(run, device=True)
    progress = None if quiet else bar()
    if as_json:
        print_json(estimates.estimates(run, progress))
        return
    for line in estimates.explain(run, progress):
        print_line(printable(line))
