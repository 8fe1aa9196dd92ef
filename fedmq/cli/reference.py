"""``fedmq protocols``, ``losses`` and ``schema``: what a scenario and the other files of a user may say."""

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
    """
    from fedmq.config import plug_ins  # noqa: PLC0415 - --help does without

    references = {name: name for name in names or known}
    for name in references:
        if plug_ins.is_path(name):
            references[name] = plug_ins.adopt(Path(name).expanduser())
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
        out.print(f"[bold]{name}[/bold]  {escape(summary)}")
        if named:
            table = Table("option", "values", "default", "meaning")
            for key in keys:
                table.add_row(*(escape(cell) for cell in (key.name, key.values, key.default, key.meaning)))
            out.print(table)
        else:
            out.print("    " + ", ".join(f"{key.name}: {key.default}" for key in keys), style="dim")
    if not named:
        out.print(f"see fedmq {command} NAME for the meaning of its options")


#: Kinds of files; those of ``fedmq.experiments.files.SCHEMAS``, whose import takes too long for --help.
KINDS = ("scenario", "site", "comparison", "tuning")

_Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.", show_default=False)]


def schema_command(kind: _Kind) -> None:
    """Print the JSON schema of scenario, site, comparison or tuning files, for checks and completion in editors.

    docs/howto/editor.md shows how to use it.

    Example: [bold]fedmq schema scenario[/bold]
    """
    from fedmq.experiments.files import schema_of  # noqa: PLC0415

    if kind not in KINDS:
        raise InputError("KIND", kind, one_of(kind, KINDS))
    print_json(schema_of(kind))
