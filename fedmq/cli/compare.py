"""``fedmq compare`` and ``fedmq sweep``: two ways to define a comparison."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from fedmq.cli.console import bar, continued_by_repeating, err, exit_stopped, out, say
from fedmq.cli.options import AsJson, Quiet, with_options
from fedmq.cli.scenarios import resolved_file, warn
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.launch.interrupts import FAILED, until_stopped
from fedmq.storage.run_folder import RunFolder, provisional_folder, write_text
from fedmq.text import as_csv, counted, duration_text, print_json, print_line

if TYPE_CHECKING:
    from fedmq.config.resolve import ResolvedRun
    from fedmq.config.scenario import Scenario
    from fedmq.experiments.files import ComparisonFile
    from fedmq.experiments.grid import ComparisonPlan, Resolve
    from fedmq.experiments.process_pool import JobProgress
    from fedmq.experiments.runner import Comparison, Workplace
    from fedmq.experiments.tables import Grid

_PLAIN_SECONDS = 30.0
_SEEDS, _SELECT_SEEDS, _METRIC = "0,1,2", "0", "mean_r1,mean_r10"
_EXTENSIONS = 3
#: Options that have an effect only with ``--select``.
_SELECT_OPTIONS = ("select_rounds", "select_seeds", "extensions")

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE...", help="Scenarios, or one comparison file.", show_default=False)
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A scenario, or a comparison file.", show_default=False)]


@dataclass(frozen=True)
class Options:
    """Options of both commands, as given; None for those that were not given."""

    kind: str = "compare"
    files: Sequence[Path] = ()
    source: Path | None = None
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="[NAME:]KEY=A,B,...",
            help="Add a row per value (YAML), for all scenarios or the named one; several --vary give all "
            "combinations. E.g. silos.count=6,10,30 or 'protocol=fedavg,{name: rcsr, filler: zero}'.",
        ),
    ] = None
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="A,B,...", help=f"Seeds; each row runs with all of them. {_SEEDS} by default."),
    ] = None
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder for the results; by default named after the rows."),
    ] = None
    runs: Annotated[
        Path | None,
        typer.Option("--runs", metavar="DIR", help="Folder for the runs; comparisons that share it reuse equal runs."),
    ] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key in all scenarios.")
    ] = None
    select: Annotated[
        list[str] | None,
        typer.Option(
            "--select",
            metavar="[METHOD:]KEY=A,B,...",
            help="Choose one of these values on the validation split, for all rows or one method; only the chosen one "
            "runs on the test split. In a sweep, val chooses among all values of --vary.",
        ),
    ] = None
    select_seeds: Annotated[
        str | None,
        typer.Option(
            "--select-seeds",
            metavar="A,B,...",
            help="Seeds of the runs that --select compares; the best mean over them is chosen. Take others than in "
            f"--seeds. {_SELECT_SEEDS} by default.",
        ),
    ] = None
    select_rounds: Annotated[
        int | None,
        typer.Option(
            "--select-rounds", min=1, help="Rounds of the runs that --select compares; by default the scenario's."
        ),
    ] = None
    extensions: Annotated[
        int | None,
        typer.Option(
            "--extensions",
            min=0,
            help="How often --select extends a list of numbers if the chosen one is at its edge; all rows get the same "
            f"number of further trials; {_EXTENSIONS} by default.",
        ),
    ] = None
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="A,B,...",
            help="Columns: mean_r1, i2t_r5, map, fairness.worst_r1, personal.mean_r1, bytes.up, seconds.virtual, ... "
            f"--select chooses by the first one. {_METRIC} by default.",
        ),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="NAME",
            help="Method or row to which the others are compared; the first by default; none for no baseline.",
        ),
    ] = None
    across: Annotated[
        str | None,
        typer.Option(
            "--across",
            metavar="KEY",
            help="A varied key, e.g. objective.bits, whose values become groups of columns, as in the tables of "
            "papers.",
        ),
    ] = None
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="METRIC=VALUE", help="Add a column: virtual time until an evaluation reaches the value."
        ),
    ] = None
    zero_shot: Annotated[
        bool,
        typer.Option("--zero-shot", help="Add a row: the first row's initial models (version 0), before any training."),
    ] = False
    yardstick: Annotated[
        list[str] | None,
        typer.Option(
            "--yardstick",
            metavar="KIND",
            help="Add a row: a linear model on the frozen features of the pooled data. classes: a logistic regression "
            "per modality, ranked by class probabilities; pairs: canonical correlation analysis, without labels.",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Runs in parallel; by default the number of cores, half of it with --processes."
        ),
    ] = None
    processes: Annotated[
        bool,
        typer.Option(
            "--processes",
            help="Start silos with the scenario's launcher. By default, all silos of a run share one process without "
            "messages, which gives a bit-identical model.",
        ),
    ] = False
    as_json: AsJson = False
    quiet: Quiet = False


@with_options
def compare_command(files: Files, *, options: Options) -> None:
    """Compare scenarios or methods on equal terms: mean and spread over seeds, paired differences, plots.

    Finished runs are kept: repeat the command to continue after a stop, or to add seeds or columns. The folder
    holds table.csv, runs.csv, table.tex, table.md and plots.html. Returns 1 if a run failed or none has a result; a
    run whose training diverged by its settings is named, and does not change the exit code otherwise.

    Example: [bold]fedmq compare scenarios/fedavg_mr50.yaml scenarios/rcsr_mr50.yaml --seeds 0,1,2[/bold]

    Choose the learning rate and a method's option on the validation split: [bold]fedmq compare
    scenarios/rcsr/main.yaml --vary protocol=fedavg,rcsr --select training.learning_rate=1e-4,3e-4,1e-3
    --select rcsr:protocol.lambda_anc=0.3,1[/bold]

    A comparison file (YAML with the key [bold]compare:[/bold]) can hold all of this; options on the command line
    add to it: [bold]fedmq compare scenarios/rcsr/tables/ablation.yaml --seeds 0[/bold]
    """
    carry_out(_merged_options(replace(options, files=files)))


@with_options
def sweep_command(file: File, *, options: Options) -> None:
    """Vary keys of a scenario: every combination with every seed, and plots of each metric against the value.

    With [bold]--select val[/bold] each combination runs on the validation split, and only the best one on the test
    split. Files and resuming are as in [bold]fedmq compare[/bold].

    Example: [bold]fedmq sweep scenarios/rcsr/main.yaml --vary silos.count=6,10,30,50 --vary
    protocol=fedavg,rcsr[/bold]

    A comparison file (YAML with the key [bold]sweep:[/bold]) can hold all of this; options on the command line add
    to it: [bold]fedmq sweep scenarios/rcsr/tables/silos.yaml --seeds 0[/bold]
    """
    carry_out(_merged_options(replace(options, kind="sweep", files=[file])))


def _merged_options(options: Options) -> Options:
    """Options of the command line over those of a comparison file; ``--select val`` turns varied keys into choices."""
    from fedmq.experiments import files  # noqa: PLC0415 - brings torch, which --help does without

    read = {path: file for path in options.files if (file := files.read_comparison(path)) is not None}
    if read:
        (path, file), *_ = read.items()
        if len(options.files) > 1:
            raise InputError(str(path), "a comparison file among others", "one comparison file alone, or scenarios")
        if file.kind != options.kind:
            raise InputError(str(path), f"a comparison file with the key {file.kind}", f"fedmq {file.kind} {path}")
        options = _over(options, path, file)
    if options.kind == "compare":
        return options
    if not options.vary:
        place = "--vary" if options.source is None else f"{options.source}: vary"
        raise InputError(place, "nothing", "at least one key with its values, e.g. silos.count=6,10,30")
    if options.select and files.ON_VALIDATION in options.select:
        select = [text for text in options.select if text != files.ON_VALIDATION]
        return replace(options, select=[*select, *options.vary], vary=None)
    return options


def _over(options: Options, path: Path, file: ComparisonFile) -> Options:
    """A comparison file's options, overridden by the command line's."""
    # Only zero_shot is false if it is not given.
    single = ("seeds", "metric", "baseline", "across", "zero_shot", "runs", *_SELECT_OPTIONS)
    missing = [name for name in single if getattr(options, name) is None or getattr(options, name) is False]
    return replace(
        options,
        source=path,
        files=[path.parent / name for name in file.scenarios],
        settings=[*file.settings, *(options.settings or [])],
        vary=_in_place(file.vary, options.vary or []),
        select=_in_place(file.select, options.select or []),
        target=[*file.target, *(options.target or [])],
        yardstick=[*file.yardstick, *(options.yardstick or [])],
        **{name: getattr(file, name) for name in missing},
    )


def _in_place(own: Sequence[str], given: Sequence[str]) -> list[str]:
    """Variations of a file with those given: each replaces that of the same key, further ones follow."""
    by_key: list[dict[str, list[str]]] = [{}, {}]
    for texts, found in zip((own, given), by_key, strict=True):
        for text in texts:
            found.setdefault(text.partition("=")[0], []).append(text)
    return [text for texts in (by_key[0] | by_key[1]).values() for text in texts]


def plan_of(options: Options, resolve: Resolve = resolved_file) -> ComparisonPlan:
    """The plan of a comparison."""
    from fedmq.experiments import grid as plan  # noqa: PLC0415 - brings torch, which --help does without
    from fedmq.experiments import summary  # noqa: PLC0415 - brings torch, which --help does without

    varied = [plan.parse_variation(text, "--vary") for text in options.vary or []]
    select = [plan.parse_variation(text, "--select") for text in options.select or []]
    seeds = plan.parse_seeds(_SEEDS if options.seeds is None else options.seeds)
    metrics = summary.parse_metrics(_METRIC if options.metric is None else options.metric)
    targets = tuple(summary.parse_target(text) for text in options.target or [])
    try:
        made = plan.ComparisonPlan(
            entries=plan.entries(options.files, options.settings or [], varied, select, resolve),
            seeds=seeds,
            metrics=metrics,
            targets=targets,
            baseline=options.baseline,
            across=options.across,
            select_seeds=plan.parse_seeds(options.select_seeds or _SELECT_SEEDS, "--select-seeds"),
            select_rounds=options.select_rounds,
            zero_shot=options.zero_shot,
            extensions=_EXTENSIONS if options.extensions is None else options.extensions,
            yardstick=summary.parse_yardsticks(options.yardstick or []),
        )
        if options.select_rounds is not None and any(variation.key == "rounds" for variation in select):
            allowed = "one of them: both set the rounds of those runs"
            raise InputError("--select rounds", "together with --select-rounds", allowed)
        for option, given in ((f"--{name.replace('_', '-')}", getattr(options, name)) for name in _SELECT_OPTIONS):
            if given is not None and not select:
                raise InputError(option, given, "it has an effect only with --select")
        chosen = [entry for entry in made.entries if len(entry.candidates) > 1]
        splits = {resolve(entry.file, list(entry.settings), None).scenario.evaluation.split for entry in chosen}
        missing = [resolve(entry.file, list(entry.settings), None).scenario.missing_modality for entry in made.entries]
        same_mask = len(seeds) > 1 and any(each.rate and each.seed is not None for each in missing)
        made = replace(made, measured_on_validation="val" in splits, same_mask=same_mask)
        summary.baselines(made)
        summary.check_across(made)
        summary.check_metrics(made, resolve)
    except InputError as error:
        if options.source is None:
            raise
        raise InputError(f"{options.source}: {error.place}", error.found, error.allowed) from None
    return made


@continued_by_repeating()
def carry_out(options: Options) -> None:
    """Plan and execute a comparison, write its tables and plots, and print the result.

    Raises:
        InputError: an option is not allowed, or a folder cannot be written.
    """
    plan = plan_of(options)
    from fedmq.experiments import plots, runner, tables  # noqa: PLC0415
    from fedmq.experiments.grid import default_folder, resolved_runs, without_options  # noqa: PLC0415

    folder = options.out_dir or default_folder(plan, options.kind, resolved_file)
    warn(resolved_runs(plan, resolved_file))
    if RunFolder(folder).scenario.exists():
        raise InputError(f"--out {folder}", "the folder of a run", "another folder, which the comparison creates")
    place = workplace(options.runs or folder / "runs", options.jobs, processes=options.processes, quiet=options.quiet)
    if not options.quiet:
        trials = sum(len(entry.candidates) for entry in plan.entries if len(entry.candidates) > 1)
        size = f"{counted(len(plan.entries), 'row')} x {counted(len(plan.seeds), 'seed')}"
        if trials:
            size += f", {trials} trials x {counted(len(plan.select_seeds), 'seed')} on validation"
        for line in (*without_options(plan.entries), *tables.problems_of_choice(plan)):
            print_line(line, error=True)
        print_line(f"{size}; at most {place.jobs} runs in parallel, in {folder}", error=True)
    # The folder is created first: after hours of runs it is too late to find that the tables cannot be written.
    with provisional_folder(folder), display_progress(err, quiet=options.quiet) as progress:
        comparison = runner.carry_out(plan, place, progress, until_stopped)
    if comparison.stopped:
        exit_stopped(command_line())
    plan = comparison.plan or plan
    table = tables.grid(comparison.rows, plan)
    title = f"{options.kind}: {', '.join(map(str, [options.source] if options.source else options.files))}"
    _write_tables(comparison, plan, table, folder)
    if options.as_json:
        result = {
            "command": command_line(),
            "folder": str(folder),
            "table": asdict(table),
            "rows": tables.plain(comparison.rows),
            "runs": tables.runs(comparison.rows, plan, courses=True),
            "errors": comparison.errors,
            "diverged": comparison.diverged,
        }
        print_json(result, indent=None)
    else:
        out.print(*tables.terminal(table, title, out.width), sep="\n")
    # Last, so that the tables exist even if this fails.
    write_text(folder / "plots.html", plots.page(comparison.rows, title, command_line(), table))
    if not options.as_json:
        print_line(f"{folder}: table.csv, runs.csv, table.tex, table.md, plots.html")
    _report_problems(comparison)
    if comparison.errors or not any(row.outcomes for row in comparison.rows):
        sys.exit(FAILED)


def workplace(runs: Path, jobs: int | None, *, processes: bool, quiet: bool) -> Workplace:
    """Where and how the runs of a comparison or a search are executed, with their data prepared on this machine."""
    from fedmq.experiments import runner  # noqa: PLC0415
    from fedmq.launch import forkserver, preparation  # noqa: PLC0415

    def prepare(run: ResolvedRun) -> Path:
        return preparation.prepare_population(run, None if quiet else bar())

    jobs = jobs or max(1, (os.cpu_count() or 1) // (2 if processes else 1))
    digest_of = runner.digest_once(prepare, check_partition)
    return runner.Workplace(runs, resolved_file, digest_of, processes, jobs, forkserver.start_job)


def check_partition(scenario: Scenario, folder: Path) -> None:
    """Refuse a partition that is impossible with the data in a folder; does not cluster, which takes seconds."""
    from fedmq.federation.population import build_population  # noqa: PLC0415

    partition = scenario.partition
    clustered = partition.kind == "dir_clusters"
    checked = partition.model_copy(update={"kind": "iid"}) if clustered else partition
    samples = sum(map(len, build_population(scenario.model_copy(update={"partition": checked}), folder=folder).train))
    if clustered and partition.clusters > samples:
        raise InputError("partition.clusters", partition.clusters, f"at most {samples}, the number of training samples")


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["fedmq", *sys.argv[1:]])


def say_failed(errors: Mapping[str, str]) -> None:
    """Say which runs failed, and why."""
    for name, line in errors.items():
        say("failed", f"{name}: {line}")
    if errors:
        print_line("the other runs are done; repeat the command to retry the failed ones", error=True)


def _report_problems(comparison: Comparison) -> None:
    for line in (*comparison.warnings, *(f"{name}: {line}" for name, line in comparison.diverged.items())):
        say("warning", line)
    say_failed(comparison.errors)
    if comparison.diverged:
        which = f"{len(comparison.diverged)} of {comparison.runs} runs diverged, neither chosen nor averaged"
        print_line(f"{which}; lower training.learning_rate", error=True)


def _write_tables(comparison: Comparison, plan: ComparisonPlan, table: Grid, folder: Path) -> None:
    from fedmq.experiments import tables  # noqa: PLC0415

    results = {
        "table.csv": as_csv(tables.plain(comparison.rows)),
        "runs.csv": as_csv(tables.runs(comparison.rows, plan)),
        "table.tex": tables.latex(table, command_line()),
        "table.md": tables.markdown(table, command_line()),
    }
    for name, text in results.items():
        write_text(folder / name, text)


def _progress_line(what: str, how: JobProgress) -> str:
    """One line: ``runs: 5 of 12 done, fedavg-seed1 40 %, ETA 3.1 min``."""
    running = [f"{name} {share:.0%}" for name, share in how.running]
    eta = [] if how.left is None else [f"ETA {duration_text(how.left)}"]
    return ", ".join([f"{what}: {how.done} of {how.total} done", *running, *eta])


@contextmanager
def display_progress(console: Console, *, quiet: bool) -> Iterator[Callable[[str, JobProgress], None]]:
    """A live line of progress; without a terminal, a line at the end of each run and every half minute."""
    if quiet:
        yield lambda what, how: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live("", console=console, refresh_per_second=2, transient=True) as shown:
            yield lambda what, how: shown.update(escape(_progress_line(what, how)))
    else:
        clock, last = WallClock(), {"done": -1, "at": 0.0}

        def plain(what: str, how: JobProgress) -> None:
            if how.done != last["done"] or clock.now() - last["at"] >= _PLAIN_SECONDS:
                last.update(done=how.done, at=clock.now())
                console.print(escape(_progress_line(what, how)), soft_wrap=True)

        yield plain
