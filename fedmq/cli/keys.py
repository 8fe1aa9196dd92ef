"""``fedmq keys``: the keys that the processes of a run know each other by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmq.cli.console import out

keys_app = typer.Typer(
    help="Make, show and revoke the keys that the processes of a run know each other by.\n\n"
    "Example: [bold]fedmq keys init keys --silos 4[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@keys_app.command("init")
def keys_init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    silos: Annotated[int, typer.Option("--silos", min=1, max=1024, help="How many silos get a key.")],
) -> None:
    """Make a key for the coordinator, the evaluator and every silo, and accept them all.

    For a real deployment copy to each machine its own NAME.key and the accepted/ folder, nothing else.

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
    """Show whose keys are accepted, by fingerprint.

    Example: [bold]fedmq keys show keys[/bold]
    """
    from fedmq.wire.keys import fingerprint, load_accepted  # noqa: PLC0415

    accepted = load_accepted(directory)
    width = max(map(len, accepted), default=0)
    for name, key in accepted.items():  # no table: what is compared or piped must stay on one line
        out.print(f"{name:{width}}  {fingerprint(key)}", highlight=False, soft_wrap=True)


@keys_app.command("revoke")
def keys_revoke(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
) -> None:
    """Accept somebody's key no longer; takes effect at the next start of whoever uses this folder.

    Example: [bold]fedmq keys revoke keys silo-03[/bold]
    """
    from fedmq.wire.keys import revoke  # noqa: PLC0415

    revoke(directory, name)
    out.print(f"{name} is accepted no longer", highlight=False)
