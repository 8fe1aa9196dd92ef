"""``fedmq tune``: search for a method's settings on the validation split."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedmq.cli.compare import command_line, display_progress, workplace
from fedmq.cli.console import err, exit_stopped, out, say, to_copy
from fedmq.cli.options import AsJson, Quiet
from fedmq.cli.scenarios import resolved_file, warn
from fedmq.launch.interrupts import FAILED, until_stopped
from fedmq.storage.run_folder import write_text
from fedmq.text import as_csv, counted, print_json, print_line

if TYPE_CHECKING:
    from fedmq.experiments.files import TunedMethod, TunePlan
    from fedmq.experiments.tuning import Trial, Tuned

#: Trials of each method that the terminal shows; trials.csv has all.
_SHOWN = 10


def tune_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tuning file (YAML).", show_default=False)],
    out_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the search; by default named after the file.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=1, help="Number of trials of each method; by default that in the file."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Runs in parallel; by default the number of cores. Does not affect the result."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search for the best settings of one or several methods with Optuna, on the validation split.

    Every method gets the same number of trials, rounds and seeds; each trial is a run. The folder holds trials.csv
    and, for each method, the best settings as a scenario. Repeat the command to continue after a stop, or with more
    trials. docs/howto/tune.md describes the file.

    Example: [bold]fedmq tune scenarios/tune/smoke.yaml --trials 8[/bold]
    """
    from fedmq.experiments import files, tuning  # noqa: PLC0415
    from fedmq.experiments.grid import digest  # noqa: PLC0415

    spec = files.read_search(file)
    if trials is not None:
        spec = spec.model_copy(update={"trials": trials})
    plan = files.plan_search(file, spec, resolved_file)
    folder = out_dir or Path("runs") / f"tune-{_slug(file.stem.lower())}-{digest(plan.facts)}"
    place = workplace(folder / "runs", jobs, processes=False, quiet=quiet)
    if not quiet:
        names = ", ".join(method.name for method in plan.methods)
        runs = f"{counted(len(spec.seeds), 'seed')} x {counted(plan.methods[0].rounds, 'round')}"
        size = f"{names}: {counted(spec.trials, 'trial')}{' each' if len(plan.methods) > 1 else ''}, {runs}"
        print_line(f"{size}; at most {place.jobs} runs in parallel, in {folder}", error=True)
    warn(tuning.first_runs(plan, place))
    with display_progress(err, quiet=quiet) as progress:
        tuned = tuning.tune(plan, folder, place, progress, until_stopped)
    if tuned.stopped:
        exit_stopped(command_line())
    written = _write(plan, tuned, folder)
    if as_json:
        print_json(_plain(tuned, folder, written), indent=None)
    else:
        out.print(*(_table(plan, tuned, method) for method in plan.methods), sep="\n")
        print_line(f"{folder}: {', '.join(['trials.csv', *(path.name for path in written.values())])}")
    _say_best(plan, tuned, written)
    if len(tuned.best) < len(plan.methods):
        sys.exit(FAILED)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-")


def _write(plan: TunePlan, tuned: Tuned, folder: Path) -> dict[str, Path]:
    """Write the table of trials and the best scenario of each method; returns the scenarios."""
    from fedmq.experiments.files import as_settings  # noqa: PLC0415

    write_text(folder / "trials.csv", as_csv([_record(trial) for trial in tuned.trials]))
    files = {}
    for method in plan.methods:
        best = tuned.best.get(method.name)
        if best is None or best.value is None:
            continue
        settings = [*method.entry.settings, *as_settings(best.values)]
        scenario = resolved_file(method.entry.file, settings).scenario
        name = "best.yaml" if len(plan.methods) == 1 else f"best-{_slug(method.name)}.yaml"
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
        name: {"trial": each.number, "value": each.value, "settings": {**each.values}, "scenario": str(files[name])}
        for name, each in tuned.best.items()
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
        measured = "-" if trial.value is None else f"{trial.value:.4f}"
        settings = ", ".join(f"{key}={_short(value)}" for key, value in trial.values.items())
        table.add_row(str(trial.number), str(trial.state), measured, escape(settings))
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _say_best(plan: TunePlan, tuned: Tuned, files: Mapping[str, Path]) -> None:
    from fedmq.experiments import tuning  # noqa: PLC0415

    for method in plan.methods:
        for trial in (t for t in tuned.trials if t.method == method.name and t.state in ("failed", "refused")):
            say("warning", f"{method.name}, trial {trial.number} {trial.state}: {trial.reason}")
        if method.name not in tuned.best:
            say("failed", f"no trial of {method.name} finished")
            continue
        for key, value in tuning.at_edge(method, tuned.best[method.name]).items():
            what = f"{method.name}: the best {key}, {_short(value)}"
            say("warning", f"{what}, is at the edge of what was searched; widen the search")
    if files:
        command = shlex.join(["fedmq", "compare", *map(str, files.values()), "--seeds", "0,1,2"])
        to_copy("the best on the test split:", command)
