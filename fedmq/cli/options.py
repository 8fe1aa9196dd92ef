"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

#: Makes a progress line, which is told (what, done, total).
Bar = Callable[[], Callable[[str, int, int], None]]

File = Annotated[Path, typer.Argument(metavar="FILE", help="A scenario (YAML).", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set missing_modality.rate=0."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Override the scenario's seed.", min=0)]
Keys = Annotated[Path, typer.Option("--keys", metavar="DIR", help="Folder made by [bold]fedmq keys init[/bold].")]
Connect = Annotated[str, typer.Option("--connect", metavar="URI", help="Where the coordinator listens.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; the scenario's by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)]
