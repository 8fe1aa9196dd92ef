"""``fedmq protocols`` and ``fedmq losses``: what there is, and what its options mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedmq.cli.console import out
from fedmq.cli.options import AsJson
from fedmq.errors import InputError

if TYPE_CHECKING:
    from fedmq.cli.scenario_keys import Key

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Explain all options of these.", show_default=False)
]


def add_reference(app: typer.Typer) -> None:
    """Add the two commands."""

    @app.command("protocols")
    def protocols_command(names: Names = None, as_json: AsJson = False) -> None:
        """List the federated methods, or explain the options of those named.

        Example: [bold]fedmq protocols rcsr[/bold]
        """
        import protocols  # noqa: PLC0415
        from fedmq.cli import scenario_keys  # noqa: PLC0415 - brings the whole scenario, likewise

        known = {
            name: (protocols.summary(name), scenario_keys.options(protocols.load(name).Options))
            for name in protocols.names()
        }
        _explain("protocols", known, names or [], as_json=as_json)

    @app.command("losses")
    def losses_command(names: Names = None, as_json: AsJson = False) -> None:
        """List the base losses, or explain the options of those named.

        Example: [bold]fedmq losses dcmh[/bold]
        """
        import protocols  # noqa: PLC0415
        from fedmq.cli import scenario_keys  # noqa: PLC0415 - brings the whole scenario, likewise

        known: dict[str, tuple[str, tuple[Key, ...]]] = {
            name: (protocols.loss_summary(name), scenario_keys.loss(name, protocols.loss_options(name)))
            for name in protocols.losses()
        }
        _explain("losses", known, names or [], as_json=as_json)


def _facts(key: Key) -> dict[str, Any]:
    """A key for scripts: its default has its type."""
    try:
        default = json.loads(key.default)
    except ValueError:  # a word
        default = key.default
    return {"values": key.values, "default": default, "meaning": key.meaning}


def _explain(
    command: str, known: Mapping[str, tuple[str, tuple[Key, ...]]], names: Sequence[str], *, as_json: bool
) -> None:
    """Print what there is; of those named, every option.

    Raises:
        InputError: there is nothing of a name.
    """
    from fedmq.config.loader import nearest  # noqa: PLC0415

    for name in names:
        if name not in known:
            raise InputError(f"fedmq {command}", name, ", ".join(nearest(name, known)))
    chosen = {name: known[name] for name in names or known}
    if as_json:
        facts = {
            name: {"summary": summary, "options": {key.name: _facts(key) for key in keys}}
            for name, (summary, keys) in chosen.items()
        }
        print(json.dumps(facts, indent=2))
        return
    for name, (summary, keys) in chosen.items():
        out.print(f"[bold]{name}[/bold]  {escape(summary)}", highlight=False)
        if names:
            table = Table("option", "values", "default", "meaning")
            for key in keys:
                table.add_row(*(escape(cell) for cell in (key.name, key.values, key.default, key.meaning)))
            out.print(table)
        else:
            out.print("    " + ", ".join(f"{key.name}: {key.default}" for key in keys), highlight=False, style="dim")
    if not names:
        out.print(f"fedmq {command} NAME explains the options of one", highlight=False)
