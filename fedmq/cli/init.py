"""``fedmq init``: a first scenario for the user's own data."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedmq.cli.console import bar, out, starting
from fedmq.cli.options import Quiet
from fedmq.errors import InputError
from fedmq.text import printable

if TYPE_CHECKING:
    from fedmq.config.scenario import Scenario

#: Refuses a scenario that cannot run, before features are extracted.
Refuse = Callable[["Scenario", Callable[[str, int, int], None] | None], None]


def add_init(app: typer.Typer, refuse: Refuse) -> None:
    """Add the command.

    Args:
        app: the command line.
        refuse: raises InputError if the scenario cannot run.
    """

    @app.command("init")
    def init_command(
        file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The scenario to write.")] = Path("mine.yaml"),
        data: Annotated[
            str | None,
            typer.Option("--data", metavar="PATH", help="Your pictures and captions.", show_default=False),
        ] = None,
        silos: Annotated[int | None, typer.Option("--silos", help="Number of silos.", show_default=False)] = None,
        missing: Annotated[
            float | None,
            typer.Option("--missing", help="Fraction of silos that lack a modality, 0 to 1.", show_default=False),
        ] = None,
        method: Annotated[
            str | None, typer.Option("--method", help="Federated method; see fedmq protocols.", show_default=False)
        ] = None,
        force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
        quiet: Quiet = False,
    ) -> None:
        """Write a scenario, ready to run, for your own pictures and captions.

        The command asks four questions; give the answers as options to skip them. The data may be a folder of pictures
        with .txt files beside them, a list (CSV, TSV, JSON lines), an imagefolder, Parquet, Arrow or tar files, or
        features. The settings fit the number of items.

        Example: [bold]fedmq init mine.yaml[/bold]

        Example: [bold]fedmq init mine.yaml --data photos --silos 4 --missing 0 --method fedavg[/bold]
        """
        if file.suffix.lower() not in (".yaml", ".yml"):
            raise InputError("FILE", str(file), "the path of a scenario to write, e.g. mine.yaml")
        if file.exists() and not force:
            raise InputError(str(file), "a file that exists", "a new one, or --force to replace it")
        path = Path(_answer("pictures and captions (a folder or a file)", data, str, None))
        starting(quiet=quiet)
        from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without

        counted = starter.count(path)
        if not quiet:
            kind = f"read as data.name {counted.name}"
            out.print(f"{counted.items} items, {counted.captions} captions, {kind}", highlight=False, soft_wrap=True)
        few = max(1, min(4, starter.most_silos(counted)))
        number = _answer("number of silos", silos, int, few)
        lacking = _answer("fraction of silos that lack images or captions, 0 to 1", missing, float, 0.0)
        named = _answer("federated method", method, str, "rcsr" if lacking else "fedavg")
        plan = starter.Plan(number, lacking, named)
        _write(file, starter.scenario_text(file.stem, counted, plan), refuse, quiet=quiet)
        if not quiet:
            line = printable(f"wrote {file}; run it with fedmq scenario {shlex.quote(str(file))}")
            out.print(line, highlight=False, markup=False, soft_wrap=True)


def _answer(question: str, given: Any, kind: type, default: Any) -> Any:
    """The value of an option, or the answer to its question."""
    return typer.prompt(question, default=default, type=kind) if given is None else given


def _write(file: Path, text: str, refuse: Refuse, *, quiet: bool) -> None:
    """Check a scenario, and write it if it can run."""
    from fedmq.cli.scenarios import resolved  # noqa: PLC0415
    from fedmq.config import loader, yaml_files  # noqa: PLC0415
    from fedmq.config.resolve import Source  # noqa: PLC0415
    from fedmq.storage.run_folder import write_atomically  # noqa: PLC0415

    scenario = loader.parse(yaml_files.parse(text), file)
    refuse(resolved(Source(file, scenario)).scenario, None if quiet else bar())

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(file, write)
