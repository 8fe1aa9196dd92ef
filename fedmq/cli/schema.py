"""``fedmq schema``: JSON schemas of the files that a user writes, for editors."""

from __future__ import annotations

from typing import Annotated

import typer

from fedmq.errors import InputError
from fedmq.text import one_of, print_json

#: Kinds of files; those of ``fedmq.experiments.file_schemas.FileKind``, whose import takes too long for --help.
KINDS = ("scenario", "site", "comparison", "tuning")

_Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"{', '.join(KINDS)}.", show_default=False)]


def add_schema(app: typer.Typer) -> None:
    """Add ``fedmq schema`` to the command line."""

    @app.command("schema")
    def schema_command(kind: _Kind) -> None:
        """Print the JSON schema of scenario, site, comparison or tuning files, for checks and completion in editors.

        docs/howto/editor.md shows how to use it.

        Example: [bold]fedmq schema scenario[/bold]
        """
        from fedmq.experiments.file_schemas import FileKind, schema_of  # noqa: PLC0415

        if kind not in KINDS:
            raise InputError("KIND", kind, one_of(kind, KINDS))
        print_json(schema_of(FileKind(kind)))
