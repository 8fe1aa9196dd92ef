"""``--live`` and ``fedmq board``: pages on 127.0.0.1 that show a run in progress, or all runs in a folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmq.cli.console import err
from fedmq.errors import InputError

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.federation.protocol import ReportedValue
    from fedmq.storage.run_folder import RunFolder

Live = Annotated[bool, typer.Option("--live", help="Serve a page with the run's charts on 127.0.0.1 during the run.")]
LivePort = Annotated[
    int, typer.Option("--live-port", metavar="PORT", min=0, max=65535, help="Port of --live; 0 chooses a free one.")
]


def add_board(app: typer.Typer) -> None:
    """Add ``fedmq board`` to the command line."""

    @app.command("board")
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
