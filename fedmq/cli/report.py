"""``fedmq report``, ``board``, ``--live`` and ``--profile``: pages of finished and current runs, and their times."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedmq.cli.console import bar, err
from fedmq.errors import InputError
from fedmq.profiling import COMMAND, PHASES, RECORDER
from fedmq.storage.run_folder import open_run, write_text, writing
from fedmq.text import counted, print_line

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.federation.protocol import ReportedValue
    from fedmq.runs.profile import Profile
    from fedmq.storage.run_folder import RunFolder

_Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="The page that compares several runs; by default side_by_side.html, next to the first run.",
    ),
]


def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.", show_default=False)],
    page: _Out = None,
) -> None:
    """Write the report.html of a finished run again; for several runs, also a page that compares them side by side.

    Example: [bold]fedmq report runs/smoke[/bold]

    Example: [bold]fedmq report runs/fedavg runs/rcsr --out both.html[/bold]
    """
    from fedmq.api.results import write_report  # noqa: PLC0415 - --help does without
    from fedmq.runs.report import run_report  # noqa: PLC0415

    if page is not None and len(runs) == 1:
        raise InputError("--out", str(page), "--out only with several runs; report.html is written into the run")
    folders = [open_run(run) for run in runs]
    for folder in folders:
        reason = write_report(folder, bar(), damaged=False)
        if reason is not None:
            line = f"{folder.root}: no examples in the report: {reason}"
            print_line(line, error=True)
        print_line(str(folder.report))
    if len(folders) > 1:
        path = page or folders[0].root.parent / "side_by_side.html"
        write_text(path, run_report.side_by_side(folders))
        print_line(str(path))


Live = Annotated[bool, typer.Option("--live", help="Serve a page with the run's charts on 127.0.0.1 during the run.")]
LivePort = Annotated[
    int, typer.Option("--live-port", metavar="PORT", min=0, max=65535, help="Port of --live; 0 chooses a free one.")
]


def board_command(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free one.")] = 0,
) -> None:
    """Serve a page of all runs in a folder and its sub-folders on 127.0.0.1.

    The page sorts and filters them, opens reports, and compares runs side by side.

    Example: [bold]fedmq board runs/[/bold]
    """
    from fedmq.runs import live_server  # noqa: PLC0415 - --help does without

    if not root.is_dir():
        raise InputError("FOLDER", str(root), "a folder of run folders, such as runs/")
    token = live_server.new_token()
    with live_server.serving(live_server.board_app(root, token, _captions_of), port, token) as address:
        print_line(f"all runs of {root}: {address} (Ctrl-C ends it)", error=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def _captions_of(method: str) -> Mapping[str, ReportedValue]:
    """How a page shows the values that a method reports of its merges."""
    import protocols  # noqa: PLC0415 - imports torch

    return protocols.reported(method)


@contextlib.contextmanager
def live_page(folder: RunFolder, run: ResolvedRun, port: int, *, live: bool) -> Iterator[None]:
    """Serve the page of a run while the block runs, and print its address."""
    if not live:
        yield
        return
    from fedmq.runs import live_server  # noqa: PLC0415 - most runs do without

    token = live_server.new_token()
    with live_server.serving(
        live_server.live_app(folder, token, _captions_of(run.scenario.protocol.name)), port, token
    ) as address:
        print_line(f"live: {address}", error=True)
        yield


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
