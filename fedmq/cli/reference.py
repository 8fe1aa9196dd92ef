"""``fedmq protocols`` and ``fedmq losses``: the methods and base losses with their options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedmq.cli.console import out
from fedmq.cli.options import AsJson
from fedmq.errors import InputError
from fedmq.text import one_of, print_json

if TYPE_CHECKING:
    from fedmq.cli.key_reference import Key

_Methods = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Methods to explain; all are listed without one.", show_default=False),
]
_Losses = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="Losses to explain; all are listed without one.", show_default=False),
]


def add_reference(app: typer.Typer) -> None:
    """Add the two commands."""

    @app.command("protocols")
    def protocols_command(names: _Methods = None, as_json: AsJson = False) -> None:
        """List the federated methods, or explain the options of the named ones, which may be your own Python files.

        Example: [bold]fedmq protocols rcsr[/bold]

        Example: [bold]fedmq protocols ./mine.py[/bold]
        """
        import protocols  # noqa: PLC0415
        from fedmq.cli import key_reference  # noqa: PLC0415 - imports pydantic

        known = {
            label: (protocols.summary(name), key_reference.options(protocols.load(name).Options))
            for label, name in _references("protocols", names, protocols.names()).items()
        }
        _explain("protocols", known, named=bool(names), as_json=as_json)

    @app.command("losses")
    def losses_command(names: _Losses = None, as_json: AsJson = False) -> None:
        """List the base losses, or explain the options of the named ones, which may be your own Python files.

        Example: [bold]fedmq losses dcmh[/bold]
        """
        import protocols  # noqa: PLC0415
        from fedmq.cli import key_reference  # noqa: PLC0415 - imports pydantic

        known = {
            label: (protocols.loss_summary(name), key_reference.loss(protocols.loss(name)))
            for label, name in _references("losses", names, protocols.losses()).items()
        }
        _explain("losses", known, named=bool(names), as_json=as_json)


def _references(command: str, names: Sequence[str] | None, known: Sequence[str]) -> dict[str, str]:
    """The given names, or all known ones, each with its name in the registry.

    A Python file that the user names here may be executed from now on.

    Raises:
        InputError: a name is unknown, or a file cannot be used.
    """
    from fedmq.config import user_files  # noqa: PLC0415 - --help does without

    references = {name: name for name in names or known}
    for name in references:
        if user_files.is_path(name):
            references[name] = user_files.adopt(Path(name).expanduser())
        elif name not in known:
            raise InputError(f"fedmq {command}", name, one_of(name, known))
    return references


def _facts(key: Key) -> dict[str, object]:
    """A key as JSON; its default keeps its type."""
    try:
        default = json.loads(key.default)
    except ValueError:  # a word
        default = key.default
    return {"values": key.values, "default": default, "meaning": key.meaning}


def _explain(command: str, chosen: Mapping[str, tuple[str, tuple[Key, ...]]], *, named: bool, as_json: bool) -> None:
    """Print the methods or losses; if they were named, with a table of their options."""
    if as_json:
        facts = {
            name: {"summary": summary, "options": {key.name: _facts(key) for key in keys}}
            for name, (summary, keys) in chosen.items()
        }
        print_json(facts)
        return
    for name, (summary, keys) in chosen.items():
        out.print(f"[bold]{name}[/bold]  {escape(summary)}", highlight=False)
        if named:
            table = Table("option", "values", "default", "meaning")
            for key in keys:
                table.add_row(*(escape(cell) for cell in (key.name, key.values, key.default, key.meaning)))
            out.print(table)
        else:
            out.print("    " + ", ".join(f"{key.name}: {key.default}" for key in keys), highlight=False, style="dim")
    if not named:
        out.print(f"see fedmq {command} NAME for the meaning of its options", highlight=False)
