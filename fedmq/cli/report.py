"""``fedmq report``: pages of finished runs; ``fedmq board`` and ``--live``: pages served on 127.0.0.1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.console import bar, err, out
from fedmq.errors import InputError

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.federation.protocol import ReportedValue
    from fedmq.storage.run_folder import RunFolder
    from fedmq.text import Progress

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
    from fedmq.runs.report import side_by_side  # noqa: PLC0415 - --help does without
    from fedmq.storage.run_folder import open_run  # noqa: PLC0415

    if page is not None and len(runs) == 1:
        raise InputError("--out", str(page), "--out only with several runs; report.html is written into the run")
    folders = [open_run(run) for run in runs]
    for folder in folders:
        reason = complete_report(folder, bar(), damaged=False)
        if reason is not None:
            line = f"{folder.root}: no examples in the report: {reason}"
            err.print(line, highlight=False, markup=False, soft_wrap=True)
        out.print(str(folder.report), highlight=False, markup=False, soft_wrap=True)
    if len(folders) > 1:
        path = page or folders[0].root.parent / "side_by_side.html"
        side_by_side.write(folders, path)
        out.print(str(path), highlight=False, markup=False, soft_wrap=True)


def complete_report(folder: RunFolder, progress: Progress | None, *, damaged: bool = True) -> str | None:
    """Write a run's report with examples, the shared space and the silos' holdings if the data are available.

    Args:
        folder: folder of a finished run.
        progress: called during long steps; None shows nothing.
        damaged: leave out lines of message logs that are not records; otherwise refuse them.

    Returns:
        Why they are missing from the report; None if it has them.

    Raises:
        InputError: the run is not finished, its files are invalid, or a log is damaged where that is refused.
    """
    import protocols  # noqa: PLC0415 - registers the objectives
    from fedmq.config.resolve import load  # noqa: PLC0415
    from fedmq.retrieval import report_data  # noqa: PLC0415 - imports torch
    from fedmq.retrieval.released_model import open_release  # noqa: PLC0415
    from fedmq.runs import results  # noqa: PLC0415
    from fedmq.runs.report import logs, run_report  # noqa: PLC0415

    results.read_summary(folder)  # before the logs, which may be long
    logged, reason = logs.read_logs(folder, progress, damaged=damaged), None
    try:
        release = open_release(folder.root, "auto")
        if release.scenario.data is None:
            reason = "only the sites have data; fedmq search RUN --gallery shows what the model finds"
        else:
            report_data.write(release, progress)
    except InputError as error:
        reason = str(error)
    run_report.write(folder, protocols.reported(load(folder.scenario).protocol.name), logged)
    return reason


Live = Annotated[bool, typer.Option("--live", help="Serve a page with the run's charts on 127.0.0.1 during the run.")]
LivePort = Annotated[
    int, typer.Option("--live-port", metavar="PORT", min=0, max=65535, help="Port of --live; 0 chooses a free one.")
]


def board_command(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with run folders.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free one.")] = 0,
) -> None:
    """Serve a page of all runs in a folder on 127.0.0.1: sort, filter, open reports, compare runs side by side.

    Example: [bold]fedmq board runs/[/bold]
    """
    from fedmq.runs import live_server  # noqa: PLC0415 - --help does without

    if not root.is_dir():
        raise InputError("FOLDER", str(root), "a folder of run folders, such as runs/")
    token = live_server.new_token()
    with live_server.serving(live_server.board_app(root, token, _captions_of), port, token) as address:
        err.print(f"all runs of {root}: {address} (Ctrl-C ends it)", highlight=False, markup=False, soft_wrap=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)


def _captions_of(method: str) -> Mapping[str, ReportedValue]:
    """How a page shows the values that a method reports of its merges."""
    import protocols  # noqa: PLC0415 - imports torch

    return protocols.reported(method)


@contextlib.contextmanager
def live_page(folder: RunFolder, run: ResolvedRun, port: int, *, live: bool) -> Iterator[None]:
    """Serve the page of a run while the block runs, and print its address.

    Args:
        folder: the run folder.
        run: the run.
        port: port on 127.0.0.1; 0 chooses a free one.
        live: whether to serve it at all.

    Raises:
        InputError: the port is in use, or a package is missing.
    """
    if not live:
        yield
        return
    from fedmq.runs import live_server  # noqa: PLC0415 - most runs do without

    token = live_server.new_token()
    with live_server.serving(
        live_server.live_app(folder, token, _captions_of(run.scenario.protocol.name)), port, token
    ) as address:
        err.print(f"live: {address}", highlight=False, markup=False, soft_wrap=True)
        yield
