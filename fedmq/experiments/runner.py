"""Carry out a comparison: do the runs that are not done, choose on the validation split, read off the rows.

Runs are named by what they compute, so that the same run is never done twice in one folder, whichever row asks for it.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import higher_is_better
from fedmq.experiments import process_pool as jobs
from fedmq.experiments.grid import ComparisonPlan, Entry, Resolve, digest, named_by
from fedmq.experiments.summary import Row, empty_columns, rows
from fedmq.runs import results
from fedmq.runs.results import FinishedRun
from fedmq.storage.cache import file_digest
from fedmq.storage.locks import try_lock
from fedmq.storage.run_folder import RunFolder, provisional_folder, write_text, writing

Settings = tuple[str, ...]
"""As ``--set`` takes them."""
Prepare = Callable[[Scenario], Path]
"""Makes a scenario's data in the cache and shares them out; gives the folder, named by the digest of what is in it."""

CheckPartition = Callable[[Scenario, Path], object]
"""Finds out whether the data in such a folder can be shared out as a scenario asks for; raises InputError if not."""
#: What a scenario's data are shared out by, beside their own digest.
_SHARED: Mapping[str, bool | set[str]] = {
    "silos": {"count"},
    "partition": True,
    "missing_modality": True,
    "evaluation": {"split", "fold_size"},
}
#: What does not change what comes out: how the silos are started, and where the same data lie.
_HERE: Mapping[str, bool | set[str]] = {
    "launcher": True,
    "silos": {"slots"},
    "data": {"path", "annotations", "images"},
}


@dataclass(frozen=True)
class Comparison:
    """A comparison that was carried out.

    Args:
        rows: in order.
        errors: one line for each run that failed, by its title.
        stopped: whether it was stopped before all runs were done; there are no rows then.
        warnings: one line for each column that no run has a value for.
    """

    rows: tuple[Row, ...]
    errors: Mapping[str, str]
    stopped: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One run of an entry.

    Args:
        name: what it computes: scenario, method, seed and a digest of the rest.
        title: for people: which row asks for it.
        folder: of the run.
        scenario: as resolved.
    """

    name: str
    title: str
    folder: RunFolder
    scenario: Scenario

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.folder.summary.exists()


@dataclass(frozen=True)
class Workplace:
    """Where and how a comparison's runs are done.

    Args:
        runs: folder of the runs; several comparisons may share it, one after the other.
        resolve: reads and checks a scenario.
        data_digest: makes a scenario's data in the cache; gives the digest of what is in them.
        processes: keep the scenarios' launcher; otherwise all silos of a run share one process, which gives the same
            model at half the cost.
        jobs: runs at once.
    """

    runs: Path
    resolve: Resolve
    data_digest: Callable[[Scenario], str]
    processes: bool
    jobs: int


def digest_once(prepare: Prepare, share: CheckPartition) -> Callable[[Scenario], str]:
    """A digest of a scenario's data that prepares each data set once: finding it again takes half a second.

    Whether it can be shared out in each of the ways asked for is found out, too.
    """
    known: dict[str, Path] = {}
    shared: set[str] = set()

    def data_digest(scenario: Scenario) -> str:
        parts = scenario.model_dump(mode="json", include={"data", "backbone", "objective", "seed"})
        key = json.dumps(parts, sort_keys=True)
        how = scenario.model_dump(mode="json", include=_SHARED)
        way = json.dumps([key, how], sort_keys=True)
        if key not in known:
            known[key] = prepare(scenario)
        elif way not in shared:
            share(scenario, known[key])
        shared.add(way)
        return known[key].name

    return data_digest


def run_of(
    entry: Entry, chosen: Settings, seed: int, place: Workplace, *, trial: bool = False, rounds: int | None = None
) -> Run:
    """A run of an entry with the chosen settings; its data are in the cache afterwards.

    Args:
        entry: the row.
        chosen: candidate.
        seed: of the run.
        place: where and how.
        trial: evaluate on the validation split, once at the end.
        rounds: in place of the scenario's.

    Raises:
        InputError: the data or the trace cannot be read, or the data cannot be shared out as asked.
    """
    split = ["evaluation.split=val", "evaluation.every=0", "evaluation.personal_every=0"] if trial else []
    length = [] if rounds is None else [f"rounds={rounds}"]
    launcher = [] if place.processes else ["launcher=inline"]
    scenario = place.resolve(entry.file, [*entry.settings, *chosen, *split, *length, *launcher], seed)
    facts = named_by(scenario, _HERE)
    if (trace := scenario.participation.trace) is not None:
        facts["participation"]["trace"] = file_digest(trace)  # what is in it, not where it lies
    name = f"{scenario.name}-{scenario.protocol.label}-seed{seed}-{digest([facts, place.data_digest(scenario)])}"
    title = f"{entry.name}, seed {seed}" + f" ({' '.join(chosen)})" * trial
    return Run(name, title, RunFolder(place.runs / name), scenario)


def job_of(run: Run) -> jobs.Job:
    """What starts a run, or goes on with it from its last checkpoint.

    The scenario is written out in full before: a file edited while others run does not change those still to come.
    """
    root = run.folder.root
    scenario = root.with_name(f"{root.name}.yaml")
    write_text(scenario, run.scenario.dump())
    begun = run.folder.scenario.is_file()
    if not begun and root.exists():
        shutil.rmtree(root)  # killed between making the folder and writing the first file into it
    command = (sys.executable, "-m", "fedmq", "scenario", str(scenario))
    how = ("--resume" if begun else "--out", str(root), "--quiet")
    log = root.with_name(f"{root.name}.log")
    return jobs.Job(run.title, (*command, *how), log, run.folder.metrics, run.scenario.rounds)


@contextmanager
def exclusive_use(folder: Path) -> Iterator[None]:
    """Hold a folder of runs; the kernel lets go of it when the process dies.

    Raises:
        InputError: it cannot be made or written, or another process holds it.
    """
    lock = folder / ".lock"
    with provisional_folder(folder), _opened(lock) as file:
        with writing(lock):
            free = try_lock(file)
        if not free:
            raise InputError(
                str(folder), "another comparison at work in it", "one at a time; wait for it, or take another --runs"
            )
        try:
            yield
        except BaseException:
            if list(folder.iterdir()) == [lock]:
                lock.unlink()  # refused before there was a run: nothing is left of it
            raise


def _opened(lock: Path) -> IO[bytes]:
    with writing(lock):
        return lock.open("ab")


# --------------------------------------------------------------------------------------------------- carrying it out
def carry_out(
    plan: ComparisonPlan,
    place: Workplace,
    told: Callable[[str, jobs.JobProgress], None],
    until_stopped: Callable[[], Callable[[], bool]],
) -> Comparison:
    """Choose on the validation split, do what is not done, and read off the rows.

    Args:
        plan: what to compare.
        place: where and how.
        told: what is being done, and how it stands.
        until_stopped: called before the first run is started; gives what tells whether to stop the runs.

    Raises:
        InputError: the folder of the runs cannot be written, a run's data are not allowed, or no run on the validation
            split has the metric to choose by.
    """
    with exclusive_use(place.runs):
        trials = trials_of(plan, place)
        for entry, seed in itertools.product(plan.entries, plan.seeds):
            run_of(entry, entry.candidates[0], seed, place)  # bad data are found now, not after hours of trials
        stop_wanted = until_stopped()
        first = _do(trials.values(), place.jobs, lambda how: told("choosing on validation", how), stop_wanted)
        if first.stopped:
            return Comparison((), first.errors, True)
        chosen = {entry.name: choose(entry, trials, plan.metrics[0]) for entry in plan.entries}
        runs = {
            (entry.name, seed): run_of(entry, choice, seed, place)
            for entry in plan.entries
            if (choice := chosen[entry.name]) is not None
            for seed in plan.seeds
        }
        second = _do(runs.values(), place.jobs, lambda how: told("runs", how), stop_wanted)
        errors = {**first.errors, **second.errors}
        if second.stopped:
            return Comparison((), errors, True)
        finished: dict[str, dict[int, FinishedRun]] = {entry.name: {} for entry in plan.entries}
        for (name, seed), run in runs.items():
            if run.done:
                finished[name][seed] = results.read(run.folder)
    made = rows(plan, chosen, finished)
    return Comparison(made, errors, False, empty_columns(plan, made))


def trials_of(plan: ComparisonPlan, place: Workplace) -> dict[tuple[str, Settings], Run]:
    """The runs on the validation split, by row and candidate; rows with one candidate need none."""
    return {
        (entry.name, candidate): run_of(
            entry, candidate, plan.select_seed, place, trial=True, rounds=plan.select_rounds
        )
        for entry in plan.entries
        if len(entry.candidates) > 1
        for candidate in entry.candidates
    }


def _do(
    runs: Iterable[Run],
    at_once: int,
    told: Callable[[jobs.JobProgress], None],
    stop_wanted: Callable[[], bool],
) -> jobs.Ended:
    """Do the runs that are not done; equal ones once."""
    left: dict[str, Run] = {}
    for run in runs:
        if not run.done:
            left.setdefault(run.name, run)
    return jobs.run_all([job_of(run) for run in left.values()], at_once, told, stop_wanted)


def choose(entry: Entry, trials: Mapping[tuple[str, Settings], Run], metric: str) -> Settings | None:
    """The candidate whose run on the validation split is best by a metric; the first of equal ones.

    Where no shared model is trained as a whole, as with ``local`` or ``fedper``, it is the silos' own models that are
    compared.

    Returns:
        Its settings; None if no candidate's run is done.

    Raises:
        InputError: no candidate's run has the metric.
    """
    if len(entry.candidates) == 1:
        return entry.candidates[0]
    runs = {candidate: trials[entry.name, candidate] for candidate in entry.candidates}
    done = {candidate: results.read(run.folder) for candidate, run in runs.items() if run.done}
    alone = any(own.summary is not None and own.summary.own_only for own in done.values())
    if alone and all(own.value(f"personal.{metric}") is not None for own in done.values()):
        metric = f"personal.{metric}"
    values = {candidate: value for candidate, own in done.items() if (value := own.value(metric)) is not None}
    if done and not values:
        raise results.unknown_metric(metric, next(iter(done.values())))
    own_metrics = next((own.own_metrics for own in done.values()), ())
    sign = 1 if higher_is_better(metric, own_metrics) else -1
    return max(values, key=lambda candidate: sign * values[candidate], default=None)
