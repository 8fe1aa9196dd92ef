"""Arguments and options that several commands share, and how a silo or the evaluator is started from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from fedmq.errors import InputError
from fedmq.storage.logs import LogFormat, LogLevel, LogOptions
from fedmq.storage.run_folder import open_run

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.config.site import Site
    from silos.tasks import SiloArguments

File = Annotated[Path, typer.Argument(metavar="FILE", help="A scenario (YAML).", show_default=False)]
#: Of the commands that start a run or resume one, whose scenario is in its folder.
NewFile = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A scenario (YAML); not needed with --resume.", show_default=False)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set missing_modality.rate=0."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Override the scenario's seed.", min=0)]
Keys = Annotated[Path, typer.Option("--keys", metavar="DIR", help="Folder created by [bold]fedmq keys init[/bold].")]
OwnKeys = Annotated[
    Path | None,
    typer.Option("--keys", metavar="DIR", help="Folder of the process's keys; or [bold]keys[/bold] in the site file."),
]
OwnConnect = Annotated[
    str | None,
    typer.Option("--connect", metavar="URI", help="Address of the coordinator; tcp://127.0.0.1:5555 by default."),
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N; by default the scenario's.")]
SiteFile = Annotated[
    Path | None,
    typer.Option("--site", metavar="FILE", help="Site file (YAML) with the site's data, keys, device and addresses."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


@dataclass(frozen=True)
class StartOptions:
    """Options that start a run or resume one."""

    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run folder; runs/<name>-<time> by default.")
    ] = None
    settings: Settings = None
    seed: Seed = None
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Resume the run in this folder, which was stopped or killed."),
    ] = None
    extend: Annotated[
        int | None,
        typer.Option(
            "--extend", metavar="ROUNDS", min=1, help="With --resume: add rounds to a finished or stopped run."
        ),
    ] = None

    def file(self, file: Path | None) -> Path:
        """The scenario of a new run, or of the run to resume; refuses options that do not fit together."""
        if self.resume is None:
            if self.extend is not None:
                raise InputError("--extend", str(self.extend), "--resume RUN --extend ROUNDS, with the folder of a run")
            if file is None:
                raise InputError("FILE", "no scenario", "a scenario (YAML), or --resume RUN")
            return file
        if self.out_dir is not None:
            raise InputError("--out", str(self.out_dir), "no --out with --resume RUN, which is the folder")
        return open_run(self.resume).scenario if file is None else file


@dataclass(frozen=True)
class LogChoice:
    """Options of what a program logs."""

    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            "--log-level",
            help="Minimum level to log; by default info for manually launched programs.",
            show_default=False,
        ),
    ] = None
    log_file: Annotated[
        Path | None, typer.Option("--log-file", metavar="FILE", help="Append the log to this file.")
    ] = None
    log_format: Annotated[LogFormat, typer.Option("--log-format", help="Human-readable lines, or JSON.")] = (
        LogFormat.CONSOLE
    )

    def options(self, usual: LogLevel = LogLevel.INFO, *, console: bool = True) -> LogOptions:
        """A manually launched program logs to standard error, and to the file if there is one."""
        logs = LogOptions(self.log_level or usual, self.log_file, self.log_format, console)
        logs.check()
        return logs


@dataclass(frozen=True)
class ProcessOptions:
    """Options of the command line with which a silo or the evaluator is started, each None if it is not given."""

    name: Annotated[
        str | None, typer.Option("--name", help="silo-00, silo-01, ...; or [bold]name[/bold] in the site file.")
    ] = None
    keys: OwnKeys = None
    connect: OwnConnect = None
    device: Device = None
    site: SiteFile = None
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for its log and personal state, of --site one per run in it; runs/<name>-<silo> by default.",
        ),
    ] = None
    policy: Annotated[
        Path | None,
        typer.Option("--policy", metavar="FILE", help="Policy (YAML); the silo does not send what it forbids."),
    ] = None
    settings: Settings = None
    seed: Seed = None


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer a command's parameters that are dataclasses as the options of their fields."""
    shown, made_of = list[Parameter](), dict[str, tuple[Any, list[str]]]()
    for parameter in signature(command, eval_str=True).parameters.values():
        if not is_dataclass(kind := parameter.annotation):
            shown.append(parameter)
            continue
        hints = get_type_hints(kind, include_extras=True)
        own = [field for field in fields(kind) if get_origin(hints[field.name]) is Annotated]
        keyword = Parameter.KEYWORD_ONLY
        shown += [Parameter(field.name, keyword, default=field.default, annotation=hints[field.name]) for field in own]
        made_of[parameter.name] = kind, [field.name for field in own]
    flat = Signature(shown)

    @wraps(command)
    def called(*given: Any, **named: Any) -> None:
        bound = flat.bind(*given, **named)
        bound.apply_defaults()
        groups = {
            name: kind(**{own: bound.arguments.pop(own) for own in names}) for name, (kind, names) in made_of.items()
        }
        command(**bound.arguments, **groups)

    called.__signature__ = flat  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


#: Address of the coordinator if neither an option nor the site file has one.
CONNECT = "tcp://127.0.0.1:5555"


@dataclass(frozen=True)
class Whereabouts:
    """How a silo or the evaluator is started."""

    site: Site | None
    name: str
    keys: Path
    connect: str
    device: str | None
    out: Path

    @classmethod
    def of(cls, run: ResolvedRun, given: ProcessOptions) -> Whereabouts:
        """Options of the command line, else the keys of the site file, else defaults.

        Raises:
            InputError: the site file is invalid or does not fit the scenario, or a name or the keys are missing.
        """
        from fedmq.config.site import Site, read_site  # noqa: PLC0415 - --help does without
        from fedmq.storage.cache import use_cache  # noqa: PLC0415
        from fedmq.wire.transports.registry import check_uri  # noqa: PLC0415

        site = Site() if given.site is None else read_site(given.site)
        if given.site is not None:
            check_fit(run, site)
            use_cache(site.cache)
        name, keys = given.name or site.name, given.keys or site.keys
        if name is None:
            raise InputError("--name", "nothing", "silo-00, silo-01, ..., here or as name in the site file")
        if keys is None:
            raise InputError("--keys", "nothing", "a folder of keys, here or as keys in the site file")
        connect = given.connect or site.connect or CONNECT
        check_uri(connect, site.place("connect") if connect == site.connect else "--connect")
        out = given.out or site.out or Path("runs") / f"{run.scenario.name}-{name}"
        if given.site is None:
            return cls(None, name, keys, connect, given.device, out)
        # A site takes part in one run after the other with the same site file.
        return cls(site, name, keys, connect, given.device or site.device, out / run.id)


def silo_arguments(run: ResolvedRun, given: ProcessOptions, logs: LogOptions | None = None) -> SiloArguments:
    """What a silo is started with, by its command or by the checks before it."""
    here = Whereabouts.of(run, given)
    from silos.tasks import SiloArguments  # noqa: PLC0415 - imports torch

    rules = given.policy or (None if here.site is None else here.site.policy)
    place = (here.name, here.connect, here.keys, here.out, here.device)
    return SiloArguments(run, *place, site=here.site, policy=rules, logs=logs)


def refuse_options(given: Mapping[str, object], allowed: str) -> None:
    """Refuse options that another one rules out; those that are None were not given."""
    for option, value in given.items():
        if value is not None:
            raise InputError(option, str(value), allowed)


def check_fit(run: ResolvedRun, site: Site) -> None:
    """Refuse a site file with data or modalities that the scenario does not use, or without data that it needs."""
    from fedmq.data import catalogue  # noqa: PLC0415 - --help does without

    if run.scenario.data is None:
        if site.data is None:
            raise InputError(site.place("data"), "nothing", "the site's data, as partition.kind is own")
        try:
            catalogue.check(site.data)
        except InputError as error:
            raise InputError(site.place(error.place), error.found, error.allowed) from None
        return
    for key in ("data", "modalities"):
        if getattr(site, key) is not None:
            given = f"{key} with partition.kind {run.scenario.partition.kind}"
            allowed = f"no {key}: only with partition.kind own, as the scenario has the data of all silos"
            raise InputError(site.place(key), given, allowed)
