"""Trials in the journal of a search, which must be ones that this search can have made.

The journal's digests find damage. They do not find a file that was written with other values and its own digests, so
the values are compared with the tuning file before the search continues from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, Strict, TypeAdapter, ValidationError

from fedmq.errors import InputError
from fedmq.evaluation.metrics import higher_is_better, is_known, metric_of
from fedmq.experiments.search_journal import SearchJournal
from fedmq.experiments.tune_file import Range, TunedMethod, TuneFile, TunePlan

_ALLOWED = "a trial of this search; delete the file to begin the search again with the runs that are done"
_MOST_SHOWN = 200  # characters of a problem
_ROUNDING = 1e-8  # of a number of steps
#: Evaluations by round; a diverged model's are not numbers.
_EVALUATIONS = TypeAdapter(Annotated[dict[Annotated[int, Field(ge=1)], float], Strict()])


class TrialState(StrEnum):
    """The outcome of a trial; only a finished one can be the best."""

    FINISHED = "finished"
    PRUNED = "pruned"
    REFUSED = "refused"
    FAILED = "failed"


#: Optuna's state of a trial by its outcome.
_OPTUNA_STATES = {
    None: "RUNNING",
    TrialState.FINISHED: "COMPLETE",
    TrialState.PRUNED: "PRUNED",
    TrialState.REFUSED: "FAIL",
    TrialState.FAILED: "FAIL",
}


class Attributes(BaseModel):
    """What a search records of a trial beside Optuna's own facts.

    Args:
        state: its outcome; None while it is under way.
        reason: why it did not finish.
        seeds: values of the metric by seed, of the runs that have one.
        pruned_at: round at which it was pruned.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    state: Annotated[TrialState, Strict(False)] | None = None
    reason: str = ""
    seeds: list[FiniteFloat] | None = None
    pruned_at: int | None = None


def distribution_of(optuna: Any, values: Range | tuple[Any, ...]) -> Any:
    """Optuna's distribution of a range or of a list of values, which are stored as JSON.

    Args:
        optuna: the package.
        values: of one key of the search space.
    """
    kinds = optuna.distributions
    if not isinstance(values, Range):
        return kinds.CategoricalDistribution([json.dumps(value, sort_keys=True) for value in values])
    if values.whole:
        return kinds.IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log, step=values.step)


def checked_storage(optuna: Any, journal: SearchJournal, plan: TunePlan) -> Any:
    """Optuna's storage of a journal, after checking all trials in it.

    Args:
        optuna: the package.
        journal: of the search.
        plan: plan of the search.

    Raises:
        InputError: a study or trial is none of this search; names the first one.
    """
    try:
        storage = optuna.storages.JournalStorage(journal)
    except Exception as error:  # Optuna raises many types for an operation that it cannot apply
        found = f"an operation that Optuna cannot apply ({type(error).__name__})"
        raise InputError(str(journal.path), found, _ALLOWED) from None
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if higher_is_better(plan.spec.metric) else directions.MINIMIZE
    for study in storage.get_all_studies():
        method = next((each for each in plan.methods if each.name == study.study_name), None)
        if method is None or study.directions != [direction]:
            raise InputError(str(journal.path), f"a study of {study.study_name}"[:_MOST_SHOWN], _ALLOWED)
        space = {key: distribution_of(optuna, values) for key, values in method.space.items()}
        for trial in storage.get_all_trials(study._study_id, deepcopy=False):
            if (problem := _problem(trial, method, plan.spec, space)) is not None:
                place = f"{journal.path}: trial {trial.number} of {method.name}"
                raise InputError(place, problem[:_MOST_SHOWN], _ALLOWED)
    return storage


def _problem(trial: Any, method: TunedMethod, spec: TuneFile, space: Mapping[str, Any]) -> str | None:
    """What a trial of this search cannot have; None if there is nothing."""
    if trial.distributions != space or trial.params.keys() != space.keys():
        return "other settings than are searched"
    for key, value in trial.params.items():
        if not _holds(space[key], value):
            return f"{key}={value}"
    try:
        recorded = Attributes.model_validate(trial.user_attrs)
        evaluations = _EVALUATIONS.validate_python(trial.intermediate_values)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if evaluations and (not method.evaluate_every or max(evaluations) >= method.rounds):
        return f"an evaluation after round {max(evaluations)}"
    if recorded.pruned_at is not None and recorded.pruned_at not in evaluations:
        return f"pruned at round {recorded.pruned_at}, which has no evaluation"
    return _contradiction(trial, recorded, evaluations, spec)


def _holds(distribution: Any, value: Any) -> bool:
    """Whether a value is one of a distribution."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        return value in choices
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not distribution.low <= value <= distribution.high:
        return False
    steps = (value - distribution.low) / (distribution.step or 1)
    return distribution.step is None or abs(steps - round(steps)) < _ROUNDING


def _contradiction(trial: Any, recorded: Attributes, evaluations: Mapping[int, float], spec: TuneFile) -> str | None:
    """A contradiction between the outcome of a trial and its values; None if there is none."""
    if trial.state.name != _OPTUNA_STATES[recorded.state]:
        return f"{trial.state.name}, but {recorded.state or 'under way'}"
    values: list[float] | None = None
    match recorded.state:
        case TrialState.FINISHED:
            seeds = recorded.seeds or []
            if len(seeds) != len(spec.seeds):
                return f"{len(seeds)} values for {len(spec.seeds)} seeds"
            metric = metric_of(spec.metric) if is_known(spec.metric) else None
            objections = [metric.objection(value) for value in seeds] if metric is not None else []
            if any(objections):
                return next(filter(None, objections))
            values = [sum(seeds) / len(seeds)]
        case TrialState.PRUNED:
            if recorded.pruned_at is None:
                return "pruned, but at no round"
            last = evaluations[max(evaluations)]
            values = None if math.isnan(last) else [last]
    return None if trial.values == values else f"value {trial.values}, but {values}"
