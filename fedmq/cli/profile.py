"""``fedmq scenario --profile``: records where the time goes, and prints it by phase."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from fedmq.cli.console import err
from fedmq.profiling import COMMAND, PHASES, RECORDER
from fedmq.text import counted

if TYPE_CHECKING:
    from fedmq.runs.profile import Profile
    from fedmq.storage.run_folder import RunFolder


def begin_profile(began: float, *, on: bool) -> None:
    """Record this process from its start on, at a time of the monotonic clock [s], if profiling is on."""
    RECORDER.end()
    if on:
        RECORDER.begin(COMMAND, began)


@contextlib.contextmanager
def profile_of(folder: RunFolder, *, on: bool) -> Iterator[None]:
    """Have the processes of a run recorded while the block runs, if profiling is on, and then print the profile."""
    if not on:
        yield
        return
    from fedmq.runs import profile  # noqa: PLC0415 - imports torch
    from fedmq.storage.run_folder import writing  # noqa: PLC0415

    with writing(folder.profile):
        shutil.rmtree(folder.profile, ignore_errors=True)  # of an earlier part of a resumed run
        RECORDER.write_to(folder.profile)
    try:
        yield
    finally:
        RECORDER.end()
        print_profile(profile.write(folder), folder)


def print_profile(profile: Profile, folder: RunFolder) -> None:
    """Print a profile: a row for each phase, and columns for the command, its programs and all silos together."""
    from fedmq.runs.profile import OTHER, share  # noqa: PLC0415 - imports torch
    from fedmq.wire.messages import COORDINATOR, EVALUATOR  # noqa: PLC0415

    columns = {name: profile.of_all([name]) for name in (COMMAND, COORDINATOR, EVALUATOR)}
    columns[counted(len(profile.silos), "silo")] = profile.of_all(profile.silos)
    table = Table("seconds", box=None, padding=(0, 2, 0, 0))
    for title in (*columns, "per merge"):
        table.add_column(title, justify="right")
    for phase in (*PHASES, OTHER):
        parts = [(each[phase], share(each, phase)) for each in columns.values()]
        if any(seconds for seconds, _ in parts):
            cells = [f"{seconds:.2f} {part:>4.0%}" if seconds else "-" for seconds, part in parts]
            silos = parts[-1][0]
            table.add_row(phase, *cells, f"{silos / max(1, profile.merges):.3f}" if silos else "-")
    err.print(table)
    err.print(profile.bound(), markup=False)
    err.print(f"profile      {folder.speedscope}", markup=False, soft_wrap=True)
