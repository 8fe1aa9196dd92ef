"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from fedmq.storage.logs import LogFormat, LogLevel

#: Makes a progress line, a function of (what, done, total).
Bar = Callable[[], Callable[[str, int, int], None]]

File = Annotated[Path, typer.Argument(metavar="FILE", help="A scenario (YAML).", show_default=False)]
#: Of the commands that start a run or resume one, whose scenario is in its folder.
NewFile = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="A scenario (YAML); not needed with --resume.", show_default=False),
]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="RUN", help="Resume the run in this folder, which was stopped or killed."),
]
Extend = Annotated[
    int | None,
    typer.Option("--extend", metavar="ROUNDS", min=1, help="With --resume: add rounds to a finished or stopped run."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. --set missing_modality.rate=0."),
]
RunOut = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="The run folder; runs/<name>-<time> by default.")
]
SiloName = Annotated[
    str | None, typer.Option("--name", help="silo-00, silo-01, ...; or [bold]name[/bold] in the site file.")
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
LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level", help="Minimum level to log; by default info for manually launched programs.", show_default=False
    ),
]
LogFile = Annotated[Path | None, typer.Option("--log-file", metavar="FILE", help="Append the log to this file.")]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="Human-readable lines, or JSON.")]
StopSilos = Annotated[
    bool,
    typer.Option(
        "--stop-silos", help="On Ctrl-C or SIGTERM, end the silos and the evaluator, too; by default they wait."
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option("--metrics-port", metavar="PORT", min=1, max=65535, help="Serve metrics for Prometheus on 127.0.0.1."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
CheckOnly = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Print what would run, with estimates of time, memory and traffic (with --json only these), and exit.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)]
