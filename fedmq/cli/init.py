"""``fedmq init``: a first scenario, or a site file, for the user's own data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from fedmq.cli.console import bar, err, later, out
from fedmq.cli.options import CONNECT, Quiet, refuse_options
from fedmq.cli.scenarios import resolved
from fedmq.errors import InputError
from fedmq.storage.run_folder import make_folder, write_text
from fedmq.text import is_float, one_of, print_line, printable

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
        str | None, typer.Option("--data", metavar="PATH", help="Your images and captions.", show_default=False)
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
        refuse_options({"--name": name, "--connect": connect}, "no such option without --site")
        _init_scenario(file or Path("mine.yaml"), data, _Answers(silos, missing, method), force, quiet)
    else:
        refuse_options({"FILE": file, **answers}, "no scenario with --site: the coordinator's operator sends it")
        _init_site(site, data, name, connect, force, quiet)


def _check_new(file: Path, what: str, force: bool) -> None:
    """Refuse a file that is not YAML or that exists."""
    if file.suffix.lower() not in (".yaml", ".yml"):
        place = "--site" if what == "site file" else "FILE"
        raise InputError(place, str(file), f"the path of a {what} to write (.yaml)")
    if file.exists() and not force:
        raise InputError(str(file), "a file that exists", "a new one, or --force to replace it")


def _init_scenario(file: Path, data: str | None, given: _Answers, force: bool, quiet: bool) -> None:
    """Ask for what is not given, and write the scenario."""
    _check_new(file, "scenario", force)
    counted = _counted(data, quiet=quiet)
    answers = _Answers(max(1, min(4, counted.most_silos)), 0.0, None)
    while True:
        answers = _questions(counted, given, answers)
        try:
            _write(file, answers.scenario(file, counted), quiet=quiet)
            break
        except InputError as error:
            if None not in (given.silos, given.missing, given.method):
                raise
            print_line(f"{error}", error=True)
    _say(printable(f"wrote {file}; run it with fedmq scenario {shlex.quote(str(file))}"), quiet=quiet)


def _init_site(file: Path, data: str | None, name: str | None, connect: str | None, force: bool, quiet: bool) -> None:
    """Ask for what is not given, and write the site file."""
    from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without
    from fedmq.wire.keys import private_names  # noqa: PLC0415
    from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

    _check_new(file, "site file", force)
    counted = _counted(data, quiet=quiet, images_alone=True)

    def silo(text: str) -> str:
        if not re.fullmatch(r"silo-\d{2,4}", text):
            raise InputError("--name", text, "silo-00, silo-01, ...: as the coordinator's operator has assigned it")
        return text

    def address(text: str) -> str:
        check_uri(text, "--connect")
        return text

    chosen = _answer("the silo's name", name, silo, "silo-00")
    uri = _answer("address of the coordinator", connect, address, CONNECT)
    make_folder(file.parent)
    write_text(file, starter.site_text(file, counted, chosen, uri))
    keys, lines = file.parent / "keys", [f"wrote {file}"]
    if chosen not in private_names(keys):
        lines.append(f"make its key: fedmq keys new {chosen} --keys {shlex.quote(str(keys))}")
    path = shlex.quote(str(file))
    lines.append(f"check it, OWN.yaml being the scenario of the run: fedmq preflight OWN.yaml --site {path}")
    _say("\n".join(map(printable, lines)), quiet=quiet)


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


def _say(lines: str, *, quiet: bool) -> None:
    if not quiet:
        print_line(lines)


def _counted(data: str | None, *, quiet: bool, images_alone: bool = False) -> OwnData:
    """The user's data, counted; says what was read."""
    from fedmq.data import starter  # noqa: PLC0415 - reads data, which --help does without

    def count(path: str) -> OwnData:
        return starter.count(Path(path), None if quiet else later(bar()), images_alone=images_alone)

    counted = _answer("images and captions (a folder or a file)", data, count, None)
    first = f"{counted.items} items, {counted.captions} captions, read as data.name {counted.name}"
    _say("\n".join(map(printable, (first, *counted.notes))), quiet=quiet)
    return counted


def _questions(counted: OwnData, given: _Answers, before: _Answers) -> _Answers:
    """Ask for what is not given, with the previous answers as defaults; the values of options are checked later."""
    from fedmq.federation.preflight import plug_in_names  # noqa: PLC0415 - --help does without

    most, names = max(1, counted.most_silos), plug_in_names("protocol.name")

    def number(text: str) -> int:
        return int(_allowed(text, text.isdecimal() and 1 <= int(text) <= most, f"1 to {most}"))

    def fraction(text: str) -> float:
        return float(_allowed(text, is_float(text) and 0 <= float(text) < 1, "0 or more and below 1"))

    def known(text: str) -> str:
        return _allowed(text, text in names or text.endswith(".py"), one_of(text, names))

    silos, missing, method = given.silos, given.missing, given.method
    if silos is None:
        silos = _answer(f"number of silos, 1 to {most}", None, number, before.silos)
    if missing is None:
        question = "fraction of silos that lack images or captions, 0 or more and below 1"
        missing = _answer(question, None, fraction, before.missing)
    if method is None:
        out.print(f"federated methods: {', '.join(names)}", soft_wrap=True)
        usual = before.method or ("rcsr" if missing else "fedavg")
        method = _answer("federated method", None, known, usual)
    return _Answers(silos, missing, method)


def _allowed(text: str, allowed: bool, what: str) -> str:
    if not allowed:
        raise InputError("the answer", text, what)
    return text


def _answer(question: str, given: str | None, check: Callable[[str], T], default: object) -> T:
    """The checked value of an option, or the answer to its question, which is repeated after a wrong one."""

    def checked(text: str) -> T:
        try:
            return check(text)
        except InputError as error:
            raise typer.BadParameter(str(error)) from None

    if given is not None:
        return check(given)
    usual = None if default is None else str(default)
    return cast(T, typer.prompt(question, default=usual, value_proc=checked))


def _write(file: Path, text: str, *, quiet: bool) -> None:
    """Check a scenario, and write it if it can run."""
    if err.is_terminal and not quiet:
        err.print("checking the scenario: loading torch, which takes seconds")
    from fedmq.config import yaml_files  # noqa: PLC0415
    from fedmq.config.resolve import Source, parse  # noqa: PLC0415
    from fedmq.launch import preparation  # noqa: PLC0415

    run = resolved(Source(file, parse(yaml_files.parse(text), file)))
    preparation.check_data(run, None if quiet else bar())
    write_text(file, text)
