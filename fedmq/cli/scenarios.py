"""Scenarios as commands get them: resolved once, with the methods, objectives and data sets there are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from fedmq.cli.console import err

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun, Source
    from fedmq.config.scenario import Scenario


def resolved(source: Source, *, by_hand: bool = False, adopt: bool = True) -> ResolvedRun:
    """A run with every default written out, the method's options included.

    Its paths are absolute, so that a resume or a search finds them from any folder. Where the programs are started by
    hand, those of weights stay as they are written: the programs, each on its own machine, must agree on them.

    Args:
        source: from ``fedmq.config.resolve.read``.
        by_hand: the programs are started by hand.
        adopt: Python files that the scenario names may be executed; False for a run folder that is only read.
    """
    import protocols  # noqa: PLC0415 - all of them bring torch
    from fedmq.config.resolve import resolve  # noqa: PLC0415

    return resolve(source, protocols, weights=not by_hand, adopt=adopt)


def resolved_file(
    file: Path, settings: list[str] | None = None, seed: int | None = None, *, by_hand: bool = False, adopt: bool = True
) -> ResolvedRun:
    """As :func:`resolved`, of a file with settings and a seed over it."""
    from fedmq.config.resolve import read  # noqa: PLC0415

    return resolved(read(file, settings or (), seed), by_hand=by_hand, adopt=adopt)


def again(scenario: Scenario) -> ResolvedRun:
    """The run of a scenario that was resolved before, and perhaps changed."""
    from fedmq.config.resolve import Source  # noqa: PLC0415

    return resolved(Source(Path(f"{scenario.name}.yaml"), scenario), adopt=False)


def warn(runs: Iterable[ResolvedRun]) -> None:
    """Say which settings of the runs have no effect."""
    for line in dict.fromkeys(line for run in runs for line in run.warnings):
        err.print(f"[yellow]warning[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
