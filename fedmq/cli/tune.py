"""``fedmq tune``: search for a method's settings on the validation split."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmq.cli.compare import PANEL, Roots, display_progress
from fedmq.cli.options import AsJson, Quiet
from fedmq.launch.interrupts import FAILED
from fedmq.text import counted, print_json

if TYPE_CHECKING:
    from fedmq.experiments.tune_file import TunedMethod, TunePlan
    from fedmq.experiments.tuning import Trial, Tuned

#: Trials of each method that the terminal shows; trials.csv has all.
_SHOWN = 10

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A tuning file (YAML).", show_default=False)]
_Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder of the search; by default named after the file.")
]
_Trials = Annotated[
    int | None, typer.Option("--trials", min=1, help="Number of trials of each method; by default that in the file.")
]
_Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, help="Runs in parallel; by default the number of cores. Does not affect the result."),
]


def add_tune(app: typer.Typer, roots: Roots) -> None:
    """Add ``fedmq tune`` to the command line.

    Args:
        app: the command line.
        roots: functions that the command line supplies.
    """

    @app.command("tune", rich_help_panel=PANEL)
    def tune_command(
        file: _File,
        out_dir: _Out = None,
        trials: _Trials = None,
        jobs: _Jobs = None,
        as_json: AsJson = False,
        quiet: Quiet = False,
    ) -> None:
        """Search for the best settings of one or several methods with Optuna, on the validation split.

        Every method gets the same number of trials, rounds and seeds; each trial is a run. The folder holds trials.csv
        and, for each method, the best settings as a scenario. Repeat the command to continue after a stop, or with more
        trials. docs/howto/tune.md describes the file.

        Example: [bold]fedmq tune scenarios/tune/smoke.yaml --trials 8[/bold]
        """
        _carry_out(file, out_dir, trials, jobs, roots, as_json=as_json, quiet=quiet)


def _carry_out(
    file: Path,
    out_dir: Path | None,
    trials: int | None,
    jobs: int | None,
    roots: Roots,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from fedmq.experiments import runner, tune_file, tuning  # noqa: PLC0415
    from fedmq.experiments.grid import digest  # noqa: PLC0415

    spec = tune_file.read(file)
    if trials is not None:
        spec = spec.model_copy(update={"trials": trials})
    plan = tune_file.plan_of(file, spec, roots.resolve)
    slug = re.sub(r"[^a-z0-9_.]+", "-", file.stem.lower()).strip("-")
    folder = out_dir or Path("runs") / f"tune-{slug}-{digest(plan.facts)}"
    out, err = Console(), Console(stderr=True)
    jobs = jobs or os.cpu_count() or 1
    data_digest = runner.digest_once(roots.prepare(quiet), roots.check_partition)
    place = runner.Workplace(folder / "runs", roots.resolve, data_digest, processes=False, jobs=jobs)
    if not quiet:
        names = ", ".join(method.name for method in plan.methods)
        each = f"{counted(len(spec.seeds), 'seed')} x {counted(plan.methods[0].rounds, 'round')}"
        size = f"{names}: {counted(spec.trials, 'trial')}{' each' if len(plan.methods) > 1 else ''}, {each}"
        err.print(
            f"{size}; at most {jobs} runs in parallel, in {folder}", highlight=False, soft_wrap=True, markup=False
        )
    roots.warn(tuning.first_runs(plan, place))
    with display_progress(err, quiet=quiet) as progress:
        tuned = tuning.tune(plan, folder, place, progress, roots.until_stopped)
    if tuned.stopped:
        command = shlex.join(["fedmq", *sys.argv[1:]])
        err.print(f"stopped; continue with [bold]{escape(command)}[/bold]", highlight=False, soft_wrap=True)
        sys.exit(FAILED)
    files = _write(plan, tuned, folder, roots)
    if as_json:
        print_json(_plain(tuned, folder, files), indent=None)
    else:
        for method in plan.methods:
            out.print(_table(plan, tuned, method))
        written = ", ".join(["trials.csv", *(path.name for path in files.values())])
        out.print(f"{folder}: {written}", highlight=False, soft_wrap=True, markup=False)
    _say_best(plan, tuned, files, err)
    if len(tuned.best) < len(plan.methods):
        sys.exit(FAILED)


def _write(plan: TunePlan, tuned: Tuned, folder: Path, roots: Roots) -> dict[str, Path]:
    """Write the table of trials and the best scenario of each method; returns the scenarios."""
    from fedmq.experiments.tune_file import as_settings  # noqa: PLC0415
    from fedmq.runs.tables import as_csv  # noqa: PLC0415
    from fedmq.storage.run_folder import write_text  # noqa: PLC0415

    write_text(folder / "trials.csv", as_csv([_record(trial) for trial in tuned.trials]))
    files = {}
    for method in plan.methods:
        best = tuned.best.get(method.name)
        if best is None or best.value is None:
            continue
        settings = [*method.entry.settings, *as_settings(best.values)]
        scenario = roots.resolve(method.entry.file, settings, None).scenario
        name = "best.yaml" if len(plan.methods) == 1 else f"best-{re.sub(r'[^a-z0-9_.-]+', '-', method.name)}.yaml"
        head = (
            f"# Best of {plan.spec.trials} trials by {plan.spec.metric} on the validation split: {best.value:.4f}, "
            f"trial {best.number}.\n"
        )
        write_text(folder / name, head + scenario.dump())
        files[method.name] = folder / name
    return files


def _record(trial: Trial) -> dict[str, object]:
    return {
        "method": trial.method,
        "trial": trial.number,
        "state": str(trial.state),
        "value": "" if trial.value is None else trial.value,
        **{
            key: value if isinstance(value, int | float | str) else json.dumps(value)
            for key, value in trial.values.items()
        },
        "reason": trial.reason,
    }


def _plain(tuned: Tuned, folder: Path, files: Mapping[str, Path]) -> dict[str, object]:
    best = {
        name: {
            "trial": trial.number,
            "value": trial.value,
            "settings": dict(trial.values),
            "scenario": str(files[name]),
        }
        for name, trial in tuned.best.items()
    }
    return {"folder": str(folder), "best": best, "trials": [_record(trial) for trial in tuned.trials]}


def _table(plan: TunePlan, tuned: Tuned, method: TunedMethod) -> Table:
    """The best trials of a method, as many as are shown; keys and values in one column that wraps."""
    from fedmq.evaluation.metrics import higher_is_better  # noqa: PLC0415

    sign = -1 if higher_is_better(plan.spec.metric) else 1
    own = [trial for trial in tuned.trials if trial.method == method.name]
    finished = [trial for trial in own if trial.state == "finished"]
    ordered = sorted(finished, key=lambda trial: (sign * (trial.value or 0.0), trial.number))
    ordered += [trial for trial in own if trial.state != "finished"]
    counts = ", ".join(f"{sum(t.state == state for t in own)} {state}" for state in dict.fromkeys(t.state for t in own))
    table = Table(title=f"{method.name}: {counts}", title_justify="left")
    for head in ("trial", "state", plan.spec.metric):
        table.add_column(head, justify="left" if head == "state" else "right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for trial in ordered[:_SHOWN]:
        value = "-" if trial.value is None else f"{trial.value:.4f}"
        settings = ", ".join(f"{key}={_short(each)}" for key, each in trial.values.items())
        table.add_row(str(trial.number), str(trial.state), value, escape(settings))
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _say_best(plan: TunePlan, tuned: Tuned, files: Mapping[str, Path], err: Console) -> None:
    for method in plan.methods:
        failed = [t for t in tuned.trials if t.method == method.name and t.state in ("failed", "refused")]
        for trial in failed:
            line = f"{method.name}, trial {trial.number} {trial.state}: {trial.reason}"
            err.print(f"[yellow]warning[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
        if method.name not in tuned.best:
            err.print(f"[red]failed[/red] no trial of {escape(method.name)} finished", highlight=False, soft_wrap=True)
    if files:
        command = shlex.join(["fedmq", "compare", *map(str, files.values()), "--seeds", "0,1,2"])
        err.print(f"the best on the test split: [bold]{escape(command)}[/bold]", highlight=False, soft_wrap=True)
