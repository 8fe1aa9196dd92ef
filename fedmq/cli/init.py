"""``fedmq init``: a first scenario, or a site file, for the user's own data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fedmq.cli.console import bar, err, later, out
from fedmq.cli.options import CONNECT, Quiet
from fedmq.cli.scenarios import plug_in_names, resolved
from fedmq.errors import InputError
from fedmq.text import print_line, printable

if TYPE_CHECKING:
    from fedmq.data.starter import OwnData

T = TypeVar("T")

_NewSiteFile = Annotated[
    Path | None,
    typer.Option(
        "--site", metavar="FILE", help="Write a site file instead of a scenario, for a silo with its own data."
    ),
]
_SiteName = Annotated[str | None, typer.Option("--name", help="With --site: silo-00, silo-01, ...", show_default=False)]
_SiteConnect = Annotated[
    str | None,
    typer.Option("--connect", metavar="URI", help="With --site: address of the coordinator.", show_default=False),
]


def init_command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The scenario to write; mine.yaml by default.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PATH", help="Your images and captions.", show_default=False),
    ] = None,
    silos: Annotated[int | None, typer.Option("--silos", help="Number of silos.", show_default=False)] = None,
    missing: Annotated[
        float | None,
        typer.Option("--missing", help="Fraction of silos that lack a modality, 0 to 1.", show_default=False),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", help="Federated method; see fedmq protocols.", show_default=False)
    ] = None,
    site: _NewSiteFile = None,
    name: _SiteName = None,
    connect: _SiteConnect = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a scenario, ready to run, for your own images and captions; with --site, a silo's site file.

    The command asks four questions, and repeats a question after a wrong answer; give the answers as options to
    skip them. It opens the images, and names the items that it leaves out. The data may be a folder of images
    with .txt files next to them, a list (CSV, TSV, JSON lines), an imagefolder, Parquet, Arrow or tar files, or
    features. The settings fit the number of items.

    With --site the questions are the silo's data, its name and the coordinator's address.

    Example: [bold]fedmq init mine.yaml[/bold]

    Example: [bold]fedmq init mine.yaml --data photos --silos 4 --missing 0 --method fedavg[/bold]

    Example: [bold]fedmq init --site silo.yaml --data photos --name silo-00 --connect tcp://127.0.0.1:5555[/bold]
    """
    answers = {"--silos": silos, "--missing": missing, "--method": method}
    if site is None:
        _refuse_options({"--name": name, "--connect": connect}, "no such option without --site")
        _init_scenario(file or Path("mine.yaml"), data, _Answers(silos, missing, method), force, quiet)
    else:
        _refuse_options({"FILE": file, **answers}, "no scenario with --site: the coordinator's operator sends it")
        _init_site(site, data, name, connect, force, quiet)


def _refuse_options(given: Mapping[str, object], allowed: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise InputError(option, str(value), allowed)


def _check_new(file: Path, what: str, force: bool) -> None:
    """Refuse a file that is not YAML or that exists."""
    if file.suffix.lower() not in (".yaml", ".yml"):
        raise InputError(
            "--site" if what == "site file" else "FILE", str(file), f"the path of a {what} to write (.yaml)"
        )
    if file.exists() and not force:
        raise InputError(str(file), "a file that exists", "a new one, or --force to replace it")


def _init_scenario(file: Path, data: str | None, given: _Answers, force: bool, quiet: bool) -> None:
    """Ask for what is not given, and write the scenario."""
    _check_new(file, "scenario", force)
    counted = _until_right(data, lambda: _counted(data, quiet=quiet))
    _say(_lines_about(counted), quiet=quiet)
    before = _Answers(min(4, _most(counted)), 0.0, None)

    def answer() -> None:
        nonlocal before
        before = _questions(counted, given, before)
        _write(file, before.scenario(file, counted), quiet=quiet)

    _until_right(None if None in (given.silos, given.missing, given.method) else "all given", answer)
    _say(printable(f"wrote {file}; run it with fedmq scenario {shlex.quote(str(file))}"), quiet=quiet)


def _init_site(file: Path, data: str | None, name: str | None, connect: str | None, force: bool, quiet: bool) -> None:
    """Ask for what is not given, and write the site file."""
    from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without
    from fedmq.storage.run_folder import make_folder, write_text  # noqa: PLC0415
    from fedmq.wire.keys import private_names  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    _check_new(file, "site file", force)
    counted = _until_right(data, lambda: _counted(data, quiet=quiet, images_alone=True))
    _say(_lines_about(counted), quiet=quiet)

    def silo() -> str:
        found = str(_answer("the silo's name", name, str, "silo-00"))
        if not re.fullmatch(r"silo-\d{2,4}", found):
            raise InputError("--name", found, "silo-00, silo-01, ...: as the coordinator's operator has assigned it")
        return found

    def address() -> str:
        found = str(_answer("address of the coordinator", connect, str, CONNECT))
        check_uri(found, "--connect")
        return found

    chosen, uri = _until_right(name, silo), _until_right(connect, address)
    make_folder(file.parent)
    write_text(file, starter.site_text(file, counted, chosen, uri))
    keys, path = file.parent / "keys", shlex.quote(str(file))
    new = (
        []
        if chosen in private_names(keys)
        else [f"make its key: fedmq keys new {chosen} --keys {shlex.quote(str(keys))}"]
    )
    check = f"check it, OWN.yaml being the scenario of the run: fedmq preflight OWN.yaml --site {path}"
    _say("\n".join(map(printable, (f"wrote {file}", *new, check))), quiet=quiet)


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


def _say(lines: str, *, quiet: bool) -> None:
    if not quiet:
        out.print(lines, highlight=False, markup=False, soft_wrap=True)


def _counted(data: str | None, *, quiet: bool, images_alone: bool = False) -> OwnData:
    """The user's data, counted."""
    from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without

    path = Path(_answer("images and captions (a folder or a file)", data, str, None))
    return starter.count(path, None if quiet else later(bar()), images_alone=images_alone)


def _most(counted: OwnData) -> int:
    from fedmq.data import starter  # noqa: PLC0415

    return max(1, starter.most_silos(counted))


def _lines_about(counted: OwnData) -> str:
    """Lines that report what was read."""
    first = f"{counted.items} items, {counted.captions} captions, read as data.name {counted.name}"
    return "\n".join(map(printable, (first, *counted.notes)))


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


def _write(file: Path, text: str, *, quiet: bool) -> None:
    """Check a scenario, and write it if it can run."""
    if err.is_terminal and not quiet:
        err.print("checking the scenario: loading torch, which takes seconds", highlight=False)
    from fedmq.config import yaml_files  # noqa: PLC0415
    from fedmq.config.resolve import Source, parse  # noqa: PLC0415
    from fedmq.launch import preparation  # noqa: PLC0415
    from fedmq.storage.run_folder import write_text  # noqa: PLC0415

    run = resolved(Source(file, parse(yaml_files.parse(text), file)))
    preparation.check_without_features(run, None if quiet else bar())
    write_text(file, text)
