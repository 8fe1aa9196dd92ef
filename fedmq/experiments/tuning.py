"""Search for settings with Optuna: each trial is a run on the validation split, and equal budgets for all methods.

Trials are proposed in batches, each with its own random generator, so that a search that was stopped and resumed
proposes the same trials as an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

from pydantic import ValidationError

from fedmq import seeds
from fedmq.clock import Clock, WallClock
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.evaluation.metrics import higher_is_better
from fedmq.experiments import process_pool as pool
from fedmq.experiments.recorded_trials import Attributes, TrialState, checked_storage, distribution_of
from fedmq.experiments.runner import Run, Workplace, exclusive_use, job_of, metric_among, run_of
from fedmq.experiments.search_journal import SearchJournal
from fedmq.experiments.tune_file import TunedMethod, TunePlan, as_settings
from fedmq.packages import package
from fedmq.runs import results
from fedmq.runs.run_records import AnyMetricsLine, EvaluationLine
from fedmq.storage.regular_files import AppendedLines, read_regular
from fedmq.storage.run_folder import write_json

_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Trial:
    """A trial that is over.

    Args:
        method: its name.
        number: from 0.
        state: its outcome.
        value: mean of the metric over seeds; for a pruned trial, the last one.
        values: values by scenario key.
        reason: why it was refused or failed; empty otherwise.
    """

    method: str
    number: int
    state: TrialState
    value: float | None
    values: Mapping[str, Any]
    reason: str = ""


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    Args:
        trials: the trials that are over, by method and number.
        best: the best finished trial of each method that has one.
        stopped: whether it was stopped before all trials were over.
    """

    trials: tuple[Trial, ...]
    best: Mapping[str, Trial]
    stopped: bool


@dataclass
class _Attempt:
    """A trial under way.

    Args:
        method: the method that is tuned.
        trial: Optuna's trial.
        runs: its runs, one for each seed.
        pruned_at: round at which it was pruned; None if it was not.
        seen: evaluations by round, then by name of the run.
    """

    method: TunedMethod
    trial: Any
    runs: tuple[Run, ...]
    pruned_at: int | None
    seen: dict[int, dict[str, float]] = field(default_factory=dict)


def tune(
    plan: TunePlan,
    folder: Path,
    place: Workplace,
    report: Callable[[str, pool.JobProgress], None],
    until_stopped: Callable[[], Callable[[], bool]],
    clock: Clock | None = None,
) -> Tuned:
    """Search, or continue a search in a folder.

    Args:
        plan: plan of the search.
        folder: folder of the search; its ``study.journal`` holds the trials.
        place: where and how runs are executed.
        report: called with the current step and its progress.
        until_stopped: called before the first run is started; returns a function that says whether to stop.
        clock: measures the time and pauses between looks at the running runs; None for the wall clock.

    Raises:
        InputError: the folder belongs to another search, its data are invalid, or a run has no such metric.
    """
    optuna = package("optuna", "tune", "fedmq tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with exclusive_use(folder):
        journal = SearchJournal(folder / "study.journal", _claimed(plan, folder, place))
        studies = _studies(optuna, plan, journal)
        search = _Search(optuna, plan, place, journal, studies, report, until_stopped(), clock or WallClock())
        stopped = False
        while not stopped and (batch := search.next_batch()):
            stopped = search.execute(batch)
            if not stopped:
                for attempt in batch:
                    search.tell(attempt)
    trials = tuple(
        _trial_of(name, each) for name, study in studies.items() for each in study.trials if each.state.is_finished()
    )
    sign = 1 if search.maximise else -1
    best: dict[str, Trial] = {}
    for each in trials:
        if each.state is TrialState.FINISHED and each.value is not None:
            before = best.get(each.method)
            if before is None or before.value is None or sign * each.value > sign * before.value:
                best[each.method] = each
    return Tuned(trials, best, stopped)


def first_scenarios(plan: TunePlan, place: Workplace) -> list[Scenario]:
    """The scenario of each method's first trial."""
    return [_runs_of(plan, method, as_settings(method.first), place)[0].scenario for method in plan.methods]


def _claimed(plan: TunePlan, folder: Path, place: Workplace) -> object:
    """Write what identifies the search into its folder, and return it; or refuse the folder of another search.

    Raises:
        InputError: the folder belongs to another search.
    """
    names = [_runs_of(plan, method, as_settings(method.first), place)[0].name for method in plan.methods]
    path, facts = folder / "search.json", json.loads(json.dumps({**plan.facts, "first_runs": names}))
    if os.path.lexists(path):
        raw = read_regular(path, "what identifies a search, which `fedmq tune` wrote")
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if found != facts:
            raise InputError(
                f"--out {folder}",
                "another search, or one of another tuning file, scenario or data",
                "a new folder, or the files as they were",
            )
    else:
        write_json(path, facts)
    return facts


def _runs_of(plan: TunePlan, method: TunedMethod, settings: tuple[str, ...], place: Workplace) -> tuple[Run, ...]:
    """The runs of a trial, one for each seed."""
    rounds, every = method.rounds, method.evaluate_every
    return tuple(
        run_of(method.entry, settings, seed, place, trial=True, rounds=rounds, evaluate_every=every)
        for seed in plan.spec.seeds
    )


def _studies(optuna: Any, plan: TunePlan, journal: SearchJournal) -> dict[str, Any]:
    """Optuna's studies by method, those in the journal or new ones."""
    storage = checked_storage(optuna, journal, plan)
    known = {study.study_name for study in storage.get_all_studies()}
    direction = "maximize" if _maximise(plan) else "minimize"
    studies = {}
    for method in plan.methods:
        pruner = optuna.pruners.MedianPruner(n_startup_trials=plan.spec.startup)
        if method.name in known:
            study = optuna.load_study(study_name=method.name, storage=storage, pruner=pruner)
        else:
            study = optuna.create_study(study_name=method.name, storage=storage, pruner=pruner, direction=direction)
        studies[method.name] = study
    return studies


def _maximise(plan: TunePlan) -> bool:
    return higher_is_better(plan.spec.metric)


def _trial_of(method: str, frozen: Any) -> Trial:
    """An Optuna trial that is over."""
    values = {key: _value(value) for key, value in frozen.params.items()}
    state, reason = TrialState(frozen.user_attrs["state"]), frozen.user_attrs.get("reason", "")
    return Trial(method, frozen.number, state, frozen.value, values, reason)


def _value(stored: Any) -> Any:
    """A parameter's value; values of a list are stored as JSON, as Optuna takes no lists and mappings."""
    return json.loads(stored) if isinstance(stored, str) else stored


class _Search:
    """Proposes, executes and judges trials.

    Args:
        optuna: the package.
        plan: plan of the search.
        place: where and how runs are executed.
        journal: records the trials.
        studies: studies by method.
        report: called with the progress.
        stop_wanted: whether to stop.
        clock: measures the time and pauses.
    """

    def __init__(
        self,
        optuna: Any,
        plan: TunePlan,
        place: Workplace,
        journal: SearchJournal,
        studies: Mapping[str, Any],
        report: Callable[[str, pool.JobProgress], None],
        stop_wanted: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._optuna, self._plan, self._place, self._studies = optuna, plan, place, studies
        self._journal = journal
        self._report, self._stop_wanted = report, stop_wanted
        self._errors: dict[str, str] = {}
        self._clock, self._done_before = clock, self._over * len(plan.spec.seeds)
        self.maximise = _maximise(plan)

    @property
    def _over(self) -> int:
        return sum(each.state.is_finished() for study in self._studies.values() for each in study.trials)

    # ---------------------------------------------------------------------------------------------------- proposals
    def next_batch(self) -> list[_Attempt]:
        """The unfinished trials of a stopped search, and new ones until the batch of each method is full."""
        batch, size = [], self._plan.spec.batch
        for method in self._plan.methods:
            study = self._studies[method.name]
            trials = study.trials
            left = [self._attempt(method, each.number) for each in trials if not each.state.is_finished()]
            begun = len(trials)
            full = begun + -begun % size
            if not left and full == begun:
                full += size
            for number in range(begun, min(full, self._plan.spec.trials)):
                study.sampler = self._sampler(method, number)
                with self._journal.step():
                    study.ask({key: distribution_of(self._optuna, values) for key, values in method.space.items()})
                left.append(self._attempt(method, number))
            batch += left
        return batch

    def _sampler(self, method: TunedMethod, number: int) -> Any:
        spec, samplers = self._plan.spec, self._optuna.samplers
        seed = seeds.derive(spec.seed, "tune", method.name, number) % 2**32
        if spec.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=spec.startup)

    def _attempt(self, method: TunedMethod, number: int) -> _Attempt:
        study = self._studies[method.name]
        frozen = study.trials[number]
        settings = as_settings({key: _value(value) for key, value in frozen.params.items()})
        runs = _runs_of(self._plan, method, settings, self._place)
        trial = self._optuna.trial.Trial(study, frozen._trial_id)
        return _Attempt(method, trial, runs, frozen.user_attrs.get("pruned_at"))

    # ---------------------------------------------------------------------------------------------------- execution
    def execute(self, batch: list[_Attempt]) -> bool:
        """Execute the missing runs of a batch, identical ones once; returns whether the search was stopped."""
        followed = {run.name: AppendedLines(run.folder.metrics) for each in batch for run in each.runs}
        waiting = deque({run.name: run for each in batch for run in each.runs if not run.done}.values())
        titles = {
            run.name: f"{each.method.name} trial {each.trial.number}, seed {run.scenario.seed}"
            for each in reversed(batch)
            for run in each.runs
        }
        running: dict[str, tuple[pool.Job, Popen[bytes]]] = {}
        self._errors, stopping, reported = {}, set[str](), -math.inf
        try:
            while waiting or running:
                if self._stop_wanted():
                    pool.end([process for _, process in running.values()])
                    return True
                wanted = {run.name for each in batch if each.pruned_at is None for run in each.runs}
                while waiting and len(running) < self._place.jobs:
                    run = waiting.popleft()
                    if run.name in wanted:
                        job = replace(job_of(run), name=titles[run.name])
                        running[run.name] = job, pool.start(job)
                self._follow(batch, followed)
                for name in running.keys() - wanted - stopping:
                    stopping.add(name)
                    running[name][1].terminate()  # a second signal would abort it
                for name in [name for name, (_, process) in running.items() if process.poll() is not None]:
                    job, process = running.pop(name)
                    if process.returncode and name not in stopping:
                        self._errors[name] = pool.error_line(job.log, process.returncode)
                if self._clock.now() - reported >= 1.0:
                    reported = self._clock.now()
                    self._report("runs", self._progress(batch, running))
                self._clock.pause(_POLL_SECONDS)
        finally:
            for _, process in running.values():
                process.kill()
                process.wait()
        self._follow(batch, followed)
        return False

    def _progress(
        self, batch: list[_Attempt], running: Mapping[str, tuple[pool.Job, Popen[bytes]]]
    ) -> pool.JobProgress:
        """Progress in runs; those of trials that are over count as done."""
        each_trial = len(self._plan.spec.seeds)
        total = self._plan.spec.trials * len(self._studies) * each_trial
        done = self._over * each_trial + sum(run.done for each in batch for run in each.runs)
        here = done - self._done_before
        left = self._clock.now() * (total - done) / here if here > 0 and done < total else None
        shares = tuple((job.name, pool.fraction(job)) for job, _ in running.values())
        return pool.JobProgress(done, total, shares, left)

    def _follow(self, batch: list[_Attempt], followed: Mapping[str, AppendedLines]) -> None:
        """Report new evaluations to the pruner, in order of rounds, once all seeds of a trial have them."""
        fresh = {name: list(_evaluations(lines)) for name, lines in followed.items()}
        for attempt in batch:
            if not attempt.method.evaluate_every:
                continue
            for run in attempt.runs:
                for line in fresh[run.name]:
                    if (value := line.metrics.get(self._plan.spec.metric)) is not None:
                        attempt.seen.setdefault(line.version, {})[run.name] = value
            self._judge(attempt)

    def _judge(self, attempt: _Attempt) -> None:
        known = attempt.trial.study.trials[attempt.trial.number].intermediate_values
        names = {run.name for run in attempt.runs}
        for version in sorted(attempt.seen):
            found = attempt.seen[version]
            last = version >= attempt.method.rounds
            if version == 0 or version in known or found.keys() != names or last or attempt.pruned_at is not None:
                continue
            with self._journal.step():
                attempt.trial.report(sum(found.values()) / len(found), version)
                if attempt.trial.should_prune():
                    attempt.pruned_at = version
                    attempt.trial.set_user_attr("pruned_at", version)

    # ------------------------------------------------------------------------------------------------------ results
    def tell(self, attempt: _Attempt) -> None:
        """Record the outcome of a trial.

        Raises:
            InputError: its runs have no such metric.
        """
        state, values, reason = self._judged(attempt)
        states = self._optuna.trial.TrialState
        study, number = self._studies[attempt.method.name], attempt.trial.number
        with self._journal.step():
            recorded = Attributes(state=state, reason=reason, seeds=values)
            for name, value in recorded.model_dump(mode="json", exclude_defaults=True).items():
                attempt.trial.set_user_attr(name, value)
            if state is TrialState.FINISHED:
                study.tell(number, sum(values) / len(values))
            else:
                study.tell(number, state=states.PRUNED if state is TrialState.PRUNED else states.FAIL)

    def _judged(self, attempt: _Attempt) -> tuple[TrialState, list[float], str]:
        if attempt.pruned_at is not None:
            return TrialState.PRUNED, [], f"below the median at round {attempt.pruned_at}"
        for run in attempt.runs:
            if not run.done:
                return TrialState.FAILED, [], self._errors.get(run.name, "its run did not finish")
        for run in attempt.runs:
            if (why := run.unaccepted) is not None:
                return TrialState.REFUSED, [], why
        done = [results.read(run.folder) for run in attempt.runs]
        metric = metric_among(done, self._plan.spec.metric)
        values = [each.value(metric) for each in done]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if all(value is None for value in values):
            raise results.unknown_metric(metric, done[0])
        if len(numbers) < len(values):
            return TrialState.FAILED, numbers, f"{metric} is not a number"
        return TrialState.FINISHED, numbers, ""


def _evaluations(lines: AppendedLines) -> Iterator[EvaluationLine]:
    for text in lines.new()[0]:
        try:
            line = AnyMetricsLine.model_validate_json(text).root
        except ValidationError:
            continue
        if isinstance(line, EvaluationLine):
            yield line
