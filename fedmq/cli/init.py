"""``fedmq init``: a first scenario for the user's own data."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fedmq.cli.console import bar, err, later, out
from fedmq.cli.options import Quiet
from fedmq.cli.scenarios import plug_in_names, resolved
from fedmq.errors import InputError
from fedmq.text import print_line, printable

if TYPE_CHECKING:
    from fedmq.config.scenario import Scenario
    from fedmq.data.starter import OwnData

T = TypeVar("T")

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

        The command asks four questions, and repeats a question after a wrong answer; give the answers as options to
        skip them. It opens the pictures, and names the items that it leaves out. The data may be a folder of pictures
        with .txt files next to them, a list (CSV, TSV, JSON lines), an imagefolder, Parquet, Arrow or tar files, or
        features. The settings fit the number of items.

        Example: [bold]fedmq init mine.yaml[/bold]

        Example: [bold]fedmq init mine.yaml --data photos --silos 4 --missing 0 --method fedavg[/bold]
        """
        if file.suffix.lower() not in (".yaml", ".yml"):
            raise InputError("FILE", str(file), "the path of a scenario to write, e.g. mine.yaml")
        if file.exists() and not force:
            raise InputError(str(file), "a file that exists", "a new one, or --force to replace it")
        counted = _until_right(data, lambda: _counted(data, quiet=quiet))
        if not quiet:
            out.print(_lines_about(counted), highlight=False, markup=False, soft_wrap=True)
        asked = None in (silos, missing, method)
        before = _Answers(min(4, _most(counted)), 0.0, None)

        def answer() -> None:
            nonlocal before
            before = _questions(counted, _Answers(silos, missing, method), before)
            _write(file, before.scenario(file, counted), refuse, quiet=quiet)

        _until_right(None if asked else "all given", answer)
        if not quiet:
            line = printable(f"wrote {file}; run it with fedmq scenario {shlex.quote(str(file))}")
            out.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Answers:
    """Answers to the questions about the scenario; None for one that is not given."""

    silos: int | None
    missing: float | None
    method: str | None

    def scenario(self, file: Path, counted: OwnData) -> str:
        """The scenario, all answers being given."""
        from fedmq.data import starter  # noqa: PLC0415

        plan = starter.Plan(int(self.silos or 0), float(self.missing or 0), str(self.method))
        return starter.scenario_text(file.stem, counted, plan)


def _until_right(given: object, step: Callable[[], T]) -> T:
    """Run a step; print the error after a wrong answer and run it again. An option's error ends the command.

    Args:
        given: the value of the option that answers the step's question; None if the step asks.
        step: asks, and raises InputError for a wrong answer.
    """
    while True:
        try:
            return step()
        except InputError as error:
            if given is not None:
                raise
            print_line(f"{error}", error=True)


def _counted(data: str | None, *, quiet: bool) -> OwnData:
    """The user's data, counted."""
    from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without

    path = Path(_answer("pictures and captions (a folder or a file)", data, str, None))
    return starter.count(path, None if quiet else later(bar()))


def _most(counted: OwnData) -> int:
    from fedmq.data import starter  # noqa: PLC0415

    return max(1, starter.most_silos(counted))


def _lines_about(counted: OwnData) -> str:
    """Lines that report what was read."""
    first = f"{counted.items} items, {counted.captions} captions, read as data.name {counted.name}"
    return "\n".join(map(printable, (first, *counted.remarks)))


def _questions(counted: OwnData, given: _Answers, before: _Answers) -> _Answers:
    """Ask for what is not given, with the previous answers as defaults."""
    most = _most(counted)
    silos = _in_range(f"number of silos, 1 to {most}", given.silos, int, before.silos, lambda found: 1 <= found <= most)
    missing = _in_range(
        "fraction of silos that lack images or captions, 0 or more and below 1",
        given.missing,
        float,
        before.missing,
        lambda found: 0 <= found < 1,
    )
    method = given.method
    if method is None:
        names = plug_in_names()["protocol.name"]
        out.print(f"federated methods: {', '.join(names)}", highlight=False, soft_wrap=True)
        method = _in_range(
            "federated method",
            None,
            str,
            before.method or ("rcsr" if missing else "fedavg"),
            lambda found: found in names or found.endswith(".py"),
        )
    return _Answers(silos, missing, method)


def _in_range(question: str, given: Any, kind: type, default: Any, allowed: Callable[[Any], bool]) -> Any:
    """The value of an option, which is checked later, or an allowed answer to its question."""
    while True:
        found = _answer(question, given, kind, default)
        if given is not None or allowed(found):
            return found
        print_line(printable(f"{found} is not allowed"), error=True)


def _answer(question: str, given: Any, kind: type, default: Any) -> Any:
    """The value of an option, or the answer to its question."""
    return typer.prompt(question, default=default, type=kind) if given is None else given


def _write(file: Path, text: str, refuse: Refuse, *, quiet: bool) -> None:
    """Check a scenario, and write it if it can run."""
    if err.is_terminal and not quiet:
        err.print("checking the scenario: loading torch, which takes seconds", highlight=False)
    from fedmq.config import loader, yaml_files  # noqa: PLC0415
    from fedmq.config.resolve import Source  # noqa: PLC0415
    from fedmq.storage.run_folder import write_text  # noqa: PLC0415

    scenario = loader.parse(yaml_files.parse(text), file)
    refuse(resolved(Source(file, scenario)).scenario, None if quiet else bar())
    write_text(file, text)
