"""Search for settings with Optuna: each trial is a run on the validation split, and equal budgets for all methods.

Trials are proposed in batches, each with its own random generator, so that a search that was stopped and resumed
proposes the same trials as an uninterrupted one. Optuna's journal holds the trials. What belongs together is one of its
operations, or is written so that repeating it after a crash gives the same.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, Strict

from fedmq import seeds
from fedmq.clock import Clock, WallClock
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import FedmqError, InputError
from fedmq.evaluation.metrics import higher_is_better
from fedmq.experiments import process_pool as pool
from fedmq.experiments.files import Range, TunedMethod, TunePlan, as_settings
from fedmq.experiments.runner import Run, Workplace, exclusive_use, job_of, metric_among, run_of
from fedmq.packages import package
from fedmq.runs import results
from fedmq.runs.run_records import EvaluationLine
from fedmq.storage.regular_files import AppendedLines, check_regular, read_regular
from fedmq.storage.run_folder import cut_unfinished, write_json, writing

#: Maximum size of a journal [bytes].
_MOST_BYTES = 1 << 30
_ALLOWED = "the journal of this search; delete it to begin the search again with the runs that are done"
#: A value counts as at a bound of its range if it is closer than this fraction of the range, on the range's scale.
_NEAR = 0.05


class TrialState(StrEnum):
    """The outcome of a trial; only a finished one can be the best."""

    FINISHED = "finished"
    PRUNED = "pruned"
    REFUSED = "refused"
    FAILED = "failed"


class Attributes(BaseModel):
    """What a search records of a trial beside Optuna's own facts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    state: Annotated[TrialState, Strict(False)] | None = None  # its outcome; None while it is under way
    reason: str = ""  # why it did not finish
    seeds: list[FiniteFloat] | None = None  # values of the metric by seed, of the runs that have one
    pruned_at: int | None = None  # round at which it was pruned


@dataclass(frozen=True)
class Trial:
    """A trial that is over."""

    method: str
    number: int  # from 0
    state: TrialState  # its outcome
    value: float | None  # mean of the metric over seeds; for a pruned trial, the last one
    values: Mapping[str, Any]  # values by scenario key
    reason: str = ""  # why it was refused or failed; empty otherwise


@dataclass(frozen=True)
class Tuned:
    """The result of a search."""

    trials: tuple[Trial, ...]
    best: Mapping[str, Trial]
    stopped: bool


@dataclass
class _Attempt:
    """A trial under way."""

    method: TunedMethod
    trial: Any
    runs: tuple[Run, ...]
    pruned_at: int | None  # a round
    seen: dict[int, dict[str, float]] = field(default_factory=dict)  # evaluations by round, then by name of the run


def tune(
    plan: TunePlan,
    folder: Path,
    place: Workplace,
    report: Callable[[str, pool.JobProgress], None],
    until_stopped: Callable[[], Callable[[], bool]],
    clock: Clock | None = None,
) -> Tuned:
    """Search, or continue a search in a folder.

    Raises:
        InputError: the folder belongs to another search, its data are invalid, or a run has no such metric.
        DiskError: the disk is full or broken.
    """
    optuna = package("optuna", "tune", "fedmq tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with exclusive_use(folder):
        _claim(plan, folder, place)
        journal = folder / "study.journal"
        studies = _studies(optuna, plan, journal)
        search = _Search(optuna, plan, place, journal, studies, report, until_stopped(), clock or WallClock())
        stopped = False
        while not stopped and (batch := search.next_batch()):
            stopped = search.execute(batch)
            if not stopped:
                for attempt in batch:
                    search.tell(attempt)
    trials = tuple(
        _trial_of(name, trial) for name, study in studies.items() for trial in study.trials if trial.state.is_finished()
    )
    return Tuned(trials, _best(trials, maximise=_maximise(plan)), stopped)


def _best(trials: Sequence[Trial], *, maximise: bool) -> dict[str, Trial]:
    """The best finished trial of each method, of equal ones the first."""
    finished = [trial for trial in trials if trial.state is TrialState.FINISHED and trial.value is not None]
    sign = 1 if maximise else -1
    return {
        method: max((each for each in finished if each.method == method), key=lambda each: sign * (each.value or 0.0))
        for method in dict.fromkeys(trial.method for trial in finished)
    }


def at_edge(method: TunedMethod, best: Trial) -> dict[str, float]:
    """The values of a trial at the edge of what was searched, by key.

    These are the smallest and largest of a list of numbers, and values near a bound of a range.
    """
    found = dict[str, float]()
    for key, space in method.space.items():
        value = best.values[key]
        if not isinstance(space, Range):
            numbers = [each for each in space if isinstance(each, int | float) and not isinstance(each, bool)]
            at_end = len(numbers) == len(space) and value in (min(numbers), max(numbers))
        else:
            low, high, here = (math.log(each) if space.log else each for each in (space.low, space.high, value))
            at_end = min(here - low, high - here) <= _NEAR * (high - low)
        if at_end:
            found[key] = value
    return found


def first_runs(plan: TunePlan, place: Workplace) -> list[ResolvedRun]:
    """The run of each method's first trial."""
    return [_runs_of(plan, method, as_settings(method.first), place)[0].resolved for method in plan.methods]


def _claim(plan: TunePlan, folder: Path, place: Workplace) -> None:
    """Write what identifies the search into its folder, or refuse the folder of another search."""
    names = [_runs_of(plan, method, as_settings(method.first), place)[0].name for method in plan.methods]
    path, facts = folder / "search.json", json.loads(json.dumps({**plan.facts, "first_runs": names}))
    if not os.path.lexists(path):
        write_json(path, facts)
        return
    raw = read_regular(path, "what identifies a search, which `fedmq tune` wrote")
    try:
        same = json.loads(raw) == facts
    except (ValueError, RecursionError):
        same = False
    if not same:
        problem = "another search, or one of another tuning file, scenario or data"
        raise InputError(f"--out {folder}", problem, "a new folder, or the files as they were")


def _runs_of(plan: TunePlan, method: TunedMethod, settings: tuple[str, ...], place: Workplace) -> tuple[Run, ...]:
    """The runs of a trial, one for each seed."""
    rounds, every = method.rounds, method.evaluate_every
    return tuple(
        run_of(method.entry, settings, seed, place, trial=True, rounds=rounds, evaluate_every=every)
        for seed in plan.spec.seeds
    )


def _studies(optuna: Any, plan: TunePlan, journal: Path) -> dict[str, Any]:
    """Optuna's studies by method, those in the journal or new ones."""
    if os.path.lexists(journal):
        check_regular(journal, _ALLOWED, _MOST_BYTES)
    cut_unfinished(journal)
    backends = optuna.storages.journal
    lock = backends.JournalFileSymlinkLock(str(journal))
    Path(f"{journal}.lock").unlink(missing_ok=True)  # of a killed search: no other one runs in this folder
    direction = "maximize" if _maximise(plan) else "minimize"
    pruner = optuna.pruners.MedianPruner(n_startup_trials=plan.spec.startup)
    studies = {}
    try:
        with writing(journal):
            if journal.exists() and (content := journal.read_bytes()):
                json.loads(content.splitlines()[-1])  # Optuna refuses a damaged last line only once others follow it
            storage = optuna.storages.JournalStorage(backends.JournalFileBackend(str(journal), lock_obj=lock))
            known = {study.study_name for study in storage.get_all_studies()}
            for method in plan.methods:
                if method.name not in known:
                    optuna.create_study(study_name=method.name, storage=storage, direction=direction)
                study = optuna.load_study(study_name=method.name, storage=storage, pruner=pruner)
                studies[method.name], space = study, _space(optuna, method)
                for trial in study.trials:
                    Attributes.model_validate(trial.user_attrs)
                    if trial.distributions != space:
                        raise InputError(
                            f"{journal}: trial {trial.number} of {method.name}", "other settings", _ALLOWED
                        )
    except FedmqError:
        raise
    except Exception as error:  # Optuna raises many types for an operation that it cannot apply
        problem = f"an operation that Optuna cannot apply ({type(error).__name__})"
        raise InputError(str(journal), problem, _ALLOWED) from None
    return studies


def _space(optuna: Any, method: TunedMethod) -> dict[str, Any]:
    """Optuna's distributions of a method's search space."""
    return {key: _distribution(optuna.distributions, values) for key, values in method.space.items()}


def _distribution(kinds: Any, values: Range | tuple[Any, ...]) -> Any:
    """The distribution of a range or of a list of values, which are stored as JSON."""
    if not isinstance(values, Range):
        return kinds.CategoricalDistribution([json.dumps(value, sort_keys=True) for value in values])
    if values.whole:
        return kinds.IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log, step=values.step)


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


@dataclass
class _Search:
    """Proposes, executes and judges trials."""

    optuna: Any
    plan: TunePlan
    place: Workplace
    journal: Path
    studies: Mapping[str, Any]
    report: Callable[[str, pool.JobProgress], None]
    stop_wanted: Callable[[], bool]
    clock: Clock
    errors: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.done_before = self._over * len(self.plan.spec.seeds)

    @property
    def _over(self) -> int:
        return sum(trial.state.is_finished() for study in self.studies.values() for trial in study.trials)

    # ---------------------------------------------------------------------------------------------------- proposals
    def next_batch(self) -> list[_Attempt]:
        """The unfinished trials of a stopped search, and new ones until the batch of each method is full."""
        batch, size = [], self.plan.spec.batch
        for method in self.plan.methods:
            study = self.studies[method.name]
            trials = study.trials
            left = [self._attempt(method, trial.number) for trial in trials if not trial.state.is_finished()]
            begun = len(trials)
            full = begun + -begun % size
            if not left and full == begun:
                full += size
            for number in range(begun, min(full, self.plan.spec.trials)):
                self._propose(method, number)
                left.append(self._attempt(method, number))
            batch += left
        return batch

    def _propose(self, method: TunedMethod, number: int) -> None:
        """Add the next trial of a method to its study, with all its settings in one operation of the journal."""
        study, space = self.studies[method.name], _space(self.optuna, method)
        beside = self.optuna.create_study(sampler=self._sampler(method, number), direction=study.direction)
        beside.add_trials(study.trials)
        proposed = beside.ask(space).params
        state = self.optuna.trial.TrialState.RUNNING
        with writing(self.journal):
            study.add_trial(self.optuna.trial.create_trial(state=state, params=proposed, distributions=space))

    def _sampler(self, method: TunedMethod, number: int) -> Any:
        spec, samplers = self.plan.spec, self.optuna.samplers
        seed = seeds.derive(spec.seed, "tune", method.name, number) % 2**32
        if spec.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        return samplers.TPESampler(seed=seed, n_startup_trials=spec.startup)

    def _attempt(self, method: TunedMethod, number: int) -> _Attempt:
        study = self.studies[method.name]
        frozen = study.trials[number]
        settings = as_settings({key: _value(value) for key, value in frozen.params.items()})
        runs = _runs_of(self.plan, method, settings, self.place)
        trial = self.optuna.trial.Trial(study, frozen._trial_id)
        return _Attempt(method, trial, runs, frozen.user_attrs.get("pruned_at"))

    # ---------------------------------------------------------------------------------------------------- execution
    def execute(self, batch: list[_Attempt]) -> bool:
        """Execute the missing runs of a batch, identical ones once; returns whether the search was stopped."""
        followed = {run.name: AppendedLines(run.folder.metrics) for attempt in batch for run in attempt.runs}
        jobs = {
            run.name: replace(
                job_of(run), name=f"{attempt.method.name} trial {attempt.trial.number}, seed {run.scenario.seed}"
            )
            for attempt in reversed(batch)
            for run in attempt.runs
            if not run.done
        }

        def useless() -> set[str]:
            self._follow(batch, followed)
            needed = {run.name for attempt in batch if attempt.pruned_at is None for run in attempt.runs}
            return {job.name for name, job in jobs.items() if name not in needed}

        def report(progress: pool.JobProgress) -> None:
            """The progress in runs of the whole search; those of trials that are over count as done."""
            seeds_of_trial = len(self.plan.spec.seeds)
            total = self.plan.spec.trials * len(self.studies) * seeds_of_trial
            done = self._over * seeds_of_trial + sum(run.done for attempt in batch for run in attempt.runs)
            here = done - self.done_before
            left = self.clock.now() * (total - done) / here if here > 0 and done < total else None
            self.report("runs", replace(progress, done=done, total=total, left=left))

        ordered = [jobs[name] for name in followed if name in jobs]
        place, stop, clock = self.place, self.stop_wanted, self.clock
        ended = pool.run_all(ordered, place.jobs, report, stop, place.start, useless=useless, clock=clock)
        self._follow(batch, followed)
        self.errors = {name: ended.errors[job.name] for name, job in jobs.items() if job.name in ended.errors}
        return ended.stopped

    def _follow(self, batch: list[_Attempt], followed: Mapping[str, AppendedLines]) -> None:
        """Report new evaluations to the pruner, in order of rounds, once all seeds of a trial have them."""
        fresh = {name: results.new_metrics(lines)[0] for name, lines in followed.items()}
        for attempt in batch:
            if not attempt.method.evaluate_every:
                continue
            for run in attempt.runs:
                for line in fresh[run.name]:
                    value = line.metrics.get(self.plan.spec.metric) if isinstance(line, EvaluationLine) else None
                    if value is not None:
                        attempt.seen.setdefault(line.version, {})[run.name] = value
            self._judge(attempt)

    def _judge(self, attempt: _Attempt) -> None:
        study, number = attempt.trial.study, attempt.trial.number
        recorded = study.trials[number].intermediate_values
        names = {run.name for run in attempt.runs}
        for version in sorted(attempt.seen):
            values = attempt.seen[version]
            over = version >= attempt.method.rounds or (attempt.pruned_at is not None and version > attempt.pruned_at)
            if version == 0 or version in recorded or values.keys() != names or over:
                continue
            mean = sum(values.values()) / len(values)
            # The decision is recorded before the value: after a crash in between, only the value is added.
            if attempt.pruned_at is None:
                trial = study.trials[number]
                trial.intermediate_values[version] = mean
                if study.pruner.prune(study, trial):
                    attempt.pruned_at = version
                    with writing(self.journal):
                        attempt.trial.set_user_attr("pruned_at", version)
            with writing(self.journal):
                attempt.trial.report(mean, version)

    # ------------------------------------------------------------------------------------------------------ results
    def tell(self, attempt: _Attempt) -> None:
        """Record the outcome of a trial."""
        state, values, reason = self._judged(attempt)
        states = self.optuna.trial.TrialState
        study, number = self.studies[attempt.method.name], attempt.trial.number
        with writing(self.journal):
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
                return TrialState.FAILED, [], self.errors.get(run.name, "its run did not finish")
        for run in attempt.runs:
            if (why := run.unaccepted) is not None:
                return TrialState.REFUSED, [], why
        done = [results.read(run.folder) for run in attempt.runs]
        metric = metric_among(done, self.plan.spec.metric)
        values = [run.value(metric) for run in done]
        numbers = [value for value in values if value is not None and math.isfinite(value)]
        if all(value is None for value in values):
            raise results.unknown_metric(metric, done[0])
        if len(numbers) < len(values):
            return TrialState.FAILED, numbers, f"{metric} is not a number"
        return TrialState.FINISHED, numbers, ""
