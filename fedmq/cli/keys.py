"""``fedmq keys``: the keys with which the processes of a run authenticate each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmq.cli.console import out

keys_app = typer.Typer(
    help="Create, show and revoke the keys with which the processes of a run authenticate each other.\n\n"
    "Example: [bold]fedmq keys init keys --silos 4[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@keys_app.command("init")
def keys_init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    silos: Annotated[int, typer.Option("--silos", min=1, max=1024, help="Number of silos.")],
) -> None:
    """Create keys for the coordinator, the evaluator and every silo, all of them accepted.

    For a deployment, copy only its NAME.key and the accepted/ folder to each machine.

    Example: [bold]fedmq keys init keys --silos 4[/bold]
    """
    from fedmq.wire.keys import init_keys  # noqa: PLC0415
    from fedmq.wire.messages import COORDINATOR, EVALUATOR  # noqa: PLC0415

    width = max(2, len(str(silos - 1)))
    names = [COORDINATOR, EVALUATOR, *(f"silo-{index:0{width}d}" for index in range(silos))]
    init_keys(directory, names)
    out.print(f"{len(names)} keys in {directory}", highlight=False, markup=False, soft_wrap=True)


@keys_app.command("show")
def keys_show(directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)]) -> None:
    """List the accepted keys by name and fingerprint.

    Example: [bold]fedmq keys show keys[/bold]
    """
    from fedmq.wire.keys import fingerprint, load_accepted  # noqa: PLC0415

    accepted = load_accepted(directory)
    width = max(map(len, accepted), default=0)
    for name, key in accepted.items():  # no table, so that each key is one line for pipes and diffs
        out.print(f"{name:{width}}  {fingerprint(key)}", highlight=False, soft_wrap=True)


@keys_app.command("revoke")
def keys_revoke(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
) -> None:
    """Revoke a key; takes effect when the processes that use this folder are next started.

    Example: [bold]fedmq keys revoke keys silo-03[/bold]
    """
    from fedmq.wire.keys import revoke  # noqa: PLC0415

    revoke(directory, name)
    out.print(f"{name} is no longer accepted", highlight=False)
