"""Execute a comparison: select candidates on the validation split, execute missing runs, and collect the rows.

The name of a run identifies what it computes, so that rows share equal runs, and no run is executed twice in a folder.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import IO

from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import higher_is_better
from fedmq.experiments import process_pool as jobs
from fedmq.experiments import yardstick
from fedmq.experiments.grid import ComparisonPlan, Entry, Resolve, digest, grown, named_by
from fedmq.experiments.process_pool import Start
from fedmq.experiments.summary import Row, empty_columns, rows
from fedmq.runs import results
from fedmq.runs.results import FinishedRun
from fedmq.runs.status import read_status
from fedmq.storage.cache import file_digest
from fedmq.storage.locks import try_lock
from fedmq.storage.run_folder import RunFolder, provisional_folder, write_text, writing

Settings = tuple[str, ...]
"""In the form of ``--set``."""
Prepare = Callable[[ResolvedRun], Path]
"""Prepares a run's data in the cache and partitions it; returns its folder, named by the digest of the content."""

CheckPartition = Callable[[Scenario, Path], object]
"""Raises InputError if the data in such a folder cannot be partitioned as a scenario requires."""
#: Keys of a scenario that determine the partition, together with the data.
_SHARED: Mapping[str, bool | set[str]] = {
    "silos": {"count"},
    "partition": True,
    "missing_modality": True,
    "evaluation": {"split", "fold_size"},
}
#: Keys without effect on the result: how silos are started, and where the data are.
_HERE: Mapping[str, bool | set[str]] = {
    "launcher": True,
    "track": True,
    "silos": {"slots"},
    "data": {"path", "annotations", "images"},
}


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison."""

    rows: tuple[Row, ...]  # rows in order
    errors: Mapping[str, str]  # one line for each failed run, by its title
    stopped: bool  # whether it was stopped before all runs were done; there are no rows then
    runs: int = 0  # number of different runs, those on the validation split included
    # One line for each run whose training diverged in all silos, by its title; such a run is not repeated.
    diverged: Mapping[str, str] = field(default_factory=dict)
    plan: ComparisonPlan | None = None  # the plan with its extended grids; None if the comparison was stopped
    # One line for each trial that could not be chosen, and for each column without values.
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of an entry."""

    name: str  # scenario, method, seed and a digest of the rest
    title: str  # title for display: row and seed
    folder: RunFolder
    resolved: ResolvedRun  # the run as its processes see it

    @property
    def scenario(self) -> Scenario:
        """The resolved scenario."""
        return self.resolved.scenario

    @property
    def done(self) -> bool:
        """Whether the run is finished."""
        return self.folder.summary.exists()

    @property
    def diverged(self) -> int | None:
        """Number of merges after which training diverged in all silos; None if it did not, or is not known to have."""
        if self.done or not self.folder.status.exists():
            return None
        try:
            status = read_status(self.folder.status)
        except InputError:
            return None
        return status.round if status.diverged else None

    @property
    def unaccepted(self) -> str | None:
        """Why the finished run says nothing about its settings; None if all silos trained and were accepted.

        A silo whose training diverges may report that itself, as an error, before the coordinator could refuse its
        update. Refused updates that the scenario scripts as attacks do not count.
        """
        summary = results.read_summary(self.folder)
        if summary.versions in summary.unevaluated:
            return "the evaluator did not answer within the limit, so the last version is not evaluated"
        for silo, replies in summary.unusable_replies.items():
            if replies.refused or replies.errors:
                return (
                    f"tasks of {silo}: {replies.refused} refused, {replies.errors} errors; the last one: {replies.last}"
                )
        return None


@dataclass(frozen=True)
class Workplace:
    """Where and how the runs of a comparison are executed."""

    runs: Path  # folder of the runs; several comparisons may use it, one after the other
    resolve: Resolve  # reads and checks a scenario
    # Prepares a run's data in the cache and returns the digest of its content.
    data_digest: Callable[[ResolvedRun], str]
    # Keep the scenarios' launcher; otherwise all silos of a run share one process, which gives the same model at half
    # the cost.
    processes: bool
    jobs: int  # number of parallel runs
    start: Start  # starts a run

    @property
    def cores_of_a_run(self) -> int:
        """Number of cores for each of the runs in parallel."""
        return max(1, (os.cpu_count() or 1) // self.jobs)


def digest_once(prepare: Prepare, share: CheckPartition) -> Callable[[ResolvedRun], str]:
    """A function that returns the digest of a run's data, and prepares and checks each data set only once.

    Looking up prepared data takes half a second; each partition of them is checked once, too.
    """
    known: dict[str, Path] = {}
    shared: set[str] = set()

    def data_digest(run: ResolvedRun) -> str:
        scenario = run.scenario
        parts = scenario.model_dump(mode="json", include={"data", "backbone", "objective", "seed"})
        key = json.dumps(parts, sort_keys=True)
        how = scenario.model_dump(mode="json", include=_SHARED)
        way = json.dumps([key, how], sort_keys=True)
        if key not in known:
            known[key] = prepare(run)
        elif way not in shared:
            share(scenario, known[key])
        shared.add(way)
        return known[key].name

    return data_digest


def run_of(
    entry: Entry,
    chosen: Settings,
    seed: int,
    place: Workplace,
    *,
    trial: bool = False,
    rounds: int | None = None,
    evaluate_every: int = 0,
) -> Run:
    """The run of a row with the chosen settings; prepares its data in the cache."""
    every = f"evaluation.every={evaluate_every}"
    split = ["evaluation.split=val", every, "evaluation.personal_every=0"] if trial else []
    length = [] if rounds is None else [f"rounds={rounds}"]
    launcher = [] if place.processes else ["launcher=inline"]
    run = place.resolve(entry.file, [*entry.settings, *chosen, *split, *length, *launcher], seed)
    if not (place.processes or run.scenario.silos.slots):
        silos = run.scenario.silos.model_copy(update={"slots": place.cores_of_a_run})
        run = replace(run, scenario=run.scenario.model_copy(update={"silos": silos}))
    scenario = run.scenario
    facts = named_by(scenario, _HERE)
    if (trace := scenario.participation.trace) is not None:
        facts["participation"]["trace"] = file_digest(trace)  # its content, not its path
    name = f"{scenario.name}-{scenario.protocol.label}-seed{seed}-{digest([facts, place.data_digest(run)])}"
    title = f"{entry.name}, seed {seed}" + f" ({' '.join(chosen)})" * trial
    return Run(name, title, RunFolder(place.runs / name), run)


def job_of(run: Run) -> jobs.Job:
    """The job that starts a run, or resumes it from its last checkpoint.

    It uses a copy of the resolved scenario, so that editing the scenario file does not affect pending runs.
    """
    root = run.folder.root
    scenario = root.with_name(f"{root.name}.yaml")
    write_text(scenario, run.scenario.dump())
    begun = run.folder.scenario.is_file()
    if not begun and root.exists():
        shutil.rmtree(root)  # killed between creating the folder and writing its first file
    words = ("scenario", str(scenario), "--resume" if begun else "--out", str(root), "--quiet")
    log = root.with_name(f"{root.name}.log")
    return jobs.Job(run.title, words, log, run.folder.metrics, run.scenario.rounds)


@contextmanager
def exclusive_use(folder: Path) -> Iterator[None]:
    """Lock a folder of runs; the kernel releases the lock when the process dies."""
    lock = folder / ".lock"
    with provisional_folder(folder), _opened(lock) as file:
        with writing(lock):
            free = try_lock(file)
        if not free:
            raise InputError(
                str(folder), "another comparison running in it", "one at a time; wait for it, or choose another --runs"
            )
        try:
            yield
        except BaseException:
            if list(folder.iterdir()) == [lock]:
                lock.unlink()  # nothing was run: leave no trace
            raise


def _opened(lock: Path) -> IO[bytes]:
    with writing(lock):
        return lock.open("ab")


# -------------------------------------------------------------------------------------------------------- execution
def carry_out(
    plan: ComparisonPlan,
    place: Workplace,
    report: Callable[[str, jobs.JobProgress], None],
    until_stopped: Callable[[], Callable[[], bool]],
) -> Comparison:
    """Select candidates on the validation split, execute the missing runs, and collect the rows.

    Raises:
        InputError: the folder of the runs cannot be written, a run's data are invalid, or no run on the validation
            split has the metric by which candidates are selected.
    """
    with exclusive_use(place.runs):
        for entry, seed in itertools.product(plan.entries, plan.seeds):
            run_of(entry, entry.candidates[0], seed, place)  # reports bad data now, not after hours of trials
        first = plan.entries[0]
        by_seed = {seed: run_of(first, first.candidates[0], seed, place).resolved for seed in plan.seeds}
        yardsticks = {kind: yardstick.figures(kind, by_seed) for kind in plan.yardstick}
        stop_wanted = until_stopped()
        choice = _choose_all(plan, place, lambda progress: report("choosing on validation", progress), stop_wanted)
        plan = choice.plan
        if choice.stopped:
            return Comparison((), choice.errors, True)
        runs = {
            (entry.name, seed): run_of(entry, settings, seed, place)
            for entry in plan.entries
            if (settings := choice.chosen[entry.name]) is not None
            for seed in plan.seeds
        }
        second = execute(runs.values(), place, lambda progress: report("runs", progress), stop_wanted)
        choice = replace(choice, errors={**choice.errors, **second.errors})
        return Comparison((), choice.errors, True) if second.stopped else _collected(choice, runs, yardsticks)


@dataclass(frozen=True)
class _Choice:
    """The candidates selected on the validation split."""

    plan: ComparisonPlan  # with its extended grids
    trials: Mapping[tuple[str, Settings], tuple[Run, ...]]  # by row and candidate, one for each selection seed
    chosen: Mapping[str, Settings | None]  # by row
    errors: Mapping[str, str]
    stopped: bool = False


def _choose_all(
    plan: ComparisonPlan, place: Workplace, report: Callable[[jobs.JobProgress], None], stop_wanted: Callable[[], bool]
) -> _Choice:
    """Select a candidate for each row; extend the grids, as often as allowed, while a chosen value is at an edge."""
    trials, errors, left = dict[tuple[str, Settings], tuple[Run, ...]](), dict[str, str](), plan.extensions
    while True:
        new = {which: own for which, own in trials_of(plan, place).items() if which not in trials}
        trials |= new
        ended = execute(itertools.chain.from_iterable(new.values()), place, report, stop_wanted)
        errors |= ended.errors
        if ended.stopped:
            return _Choice(plan, trials, {}, errors, stopped=True)
        chosen = {entry.name: choose(entry, trials, plan.metrics[0]) for entry in plan.entries}
        larger = grown(plan, chosen, place.resolve) if left else None
        if larger is None:
            return _Choice(plan, trials, chosen, errors)
        plan, left = larger, left - 1


def _collected(
    choice: _Choice, runs: Mapping[tuple[str, int], Run], yardsticks: Mapping[str, Mapping[int, Mapping[str, object]]]
) -> Comparison:
    """The result of runs that are over."""
    plan, trials, chosen = choice.plan, choice.trials, choice.chosen
    tried = [(name, run) for (name, _), own in trials.items() for run in own]
    everything = [*tried, *((name, run) for (name, _), run in runs.items())]
    merges = {run.name: after for _, run in everything if (after := run.diverged) is not None}
    diverged = {run.title: f"diverged after round {merges[run.name]}" for _, run in everything if run.name in merges}
    refused = {(name, run.title): why for name, run in tried if run.done and (why := run.unaccepted) is not None}
    # An error only where no candidate is left to choose.
    none_left = {title: why for (name, title), why in refused.items() if chosen[name] is None}
    failed = {**{title: why for title, why in choice.errors.items() if title not in diverged}, **none_left}
    finished: dict[str, dict[int, FinishedRun]] = {entry.name: {} for entry in plan.entries}
    for (name, seed), run in runs.items():
        if run.done:
            finished[name][seed] = results.read(run.folder)
    made = tuple(
        replace(
            row,
            diverged=tuple(
                f"{run.title.removeprefix(f'{name}, ')} after round {merges[run.name]}"
                for name, run in everything
                if name == row.entry.name and run.name in merges
            ),
        )
        for row in rows(plan, chosen, finished, yardsticks)
    )
    left_out = [f"{title} cannot be chosen: {why}" for (_, title), why in refused.items() if title not in failed]
    warnings = (*left_out, *empty_columns(plan, made))
    return Comparison(made, failed, False, len({run.name for _, run in everything}), diverged, plan, warnings)


def trials_of(plan: ComparisonPlan, place: Workplace) -> dict[tuple[str, Settings], tuple[Run, ...]]:
    """The runs on the validation split, by row and candidate, in order of seeds; rows with one candidate need none."""
    return {
        (entry.name, candidate): tuple(
            run_of(entry, candidate, seed, place, trial=True, rounds=plan.select_rounds) for seed in plan.select_seeds
        )
        for entry in plan.entries
        if len(entry.candidates) > 1
        for candidate in entry.candidates
    }


def execute(
    runs: Iterable[Run], place: Workplace, report: Callable[[jobs.JobProgress], None], stop_wanted: Callable[[], bool]
) -> jobs.Ended:
    """Execute the runs that are neither finished nor have diverged, which they would again; equal ones once."""
    left: dict[str, Run] = {}
    for run in runs:
        if not run.done and run.diverged is None:
            left.setdefault(run.name, run)
    return jobs.run_all([job_of(run) for run in left.values()], place.jobs, report, stop_wanted, place.start)


def metric_among(done: Collection[FinishedRun], metric: str) -> str:
    """The metric by which runs are compared: that of the personal models if the shared model is not trained whole."""
    personal_only = any(run.summary is not None and run.summary.personal_only for run in done)
    personal = personal_only and all(run.value(f"personal.{metric}") is not None for run in done)
    return f"personal.{metric}" if personal else metric


def choose(entry: Entry, trials: Mapping[tuple[str, Settings], Sequence[Run]], metric: str) -> Settings | None:
    """The candidate whose runs on the validation split have the best mean of a metric; the first one in case of ties.

    If the method does not train the shared model as a whole, as ``local`` or ``fedper``, personal models are compared.
    A candidate is never chosen if a run with any seed is not finished, or has refused updates or errors of silos: that
    run measures a model that part of the silos did not train, and means over fewer seeds are not comparable.

    Returns:
        Its settings; None if no candidate's runs are all finished with all updates accepted.

    Raises:
        InputError: no candidate's runs have the metric.
    """
    if len(entry.candidates) == 1:
        return entry.candidates[0]
    done = {
        candidate: [results.read(run.folder) for run in runs]
        for candidate, runs in ((candidate, trials[entry.name, candidate]) for candidate in entry.candidates)
        if all(run.done and run.unaccepted is None for run in runs)
    }
    finished = list(itertools.chain.from_iterable(done.values()))
    metric = metric_among(finished, metric)
    values = {candidate: [run.value(metric) for run in runs] for candidate, runs in done.items()}
    means = {
        candidate: fmean(numbers)
        for candidate, own in values.items()
        if len(numbers := [value for value in own if value is not None]) == len(own)
    }
    if done and not means:
        raise results.unknown_metric(metric, finished[0])
    sign = 1 if finished and higher_is_better(metric, finished[0].custom_metrics) else -1
    return max(means, key=lambda candidate: sign * means[candidate], default=None)
