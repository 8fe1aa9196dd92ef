"""Trials in a journal that was written with its own digests: any that a search cannot have made is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedmq.errors import InputError
from fedmq.experiments.search_journal import SearchJournal
from tests.test_experiments_tuning import spec, tuned

_STUDY, _TRIAL, _PARAMETER, _OUTCOME, _EVALUATION, _ATTRIBUTE = 0, 4, 5, 6, 7, 8  # Optuna's codes of operations
_SOME_TIME = "2026-01-01T00:00:00+00:00"
_CHOICES = {"name": "CategoricalDistribution", "attributes": {"choices": ["16", "32"]}}


def _operation(code: int, **more: Any) -> dict[str, Any]:
    return {"op_code": code, "worker_id": "x", **more}


def _outcome(state: int, values: Any) -> dict[str, Any]:
    return _operation(_OUTCOME, trial_id=0, state=state, values=values, datetime_complete=_SOME_TIME)


def _attribute(**attribute: Any) -> dict[str, Any]:
    return _operation(_ATTRIBUTE, trial_id=0, user_attr=attribute)


def _parameter(value: Any, name: str = "training.batch_size", choices: Any = _CHOICES) -> dict[str, Any]:
    text = json.dumps(choices)
    return _operation(_PARAMETER, trial_id=0, param_name=name, param_value_internal=value, distribution=text)


def _evaluation(step: Any, value: Any) -> dict[str, Any]:
    return _operation(_EVALUATION, trial_id=0, step=step, intermediate_value=value)


_FINISHED = _attribute(state="finished")
_RATES = {"name": "FloatDistribution", "attributes": {"low": 1e-4, "high": 1e-2, "log": True, "step": None}}
_FORGED = {
    "a finished trial without values": ([_FINISHED, _outcome(1, [0.5])], "0 values for 1 seeds"),
    "another mean": ([_FINISHED, _attribute(seeds=[0.5]), _outcome(1, [0.9])], r"value \[0.9\], but \[0.5\]"),
    "a recall above 1": ([_FINISHED, _attribute(seeds=[5.0]), _outcome(1, [5.0])], "mean_r1 5, allowed: 0 to 1"),
    "no number": ([_FINISHED, _attribute(seeds=[math.nan]), _outcome(1, [math.nan])], "finite number"),
    "values that are no list": ([_FINISHED, _attribute(seeds=[0.5]), _outcome(1, "0.5")], "0.5"),
    "an unknown outcome": ([_attribute(state="best"), _outcome(1, [0.5])], "state: Input should be"),
    "an outcome without an end": ([_FINISHED], "RUNNING, but finished"),
    "an end without an outcome": ([_outcome(1, [0.5])], "COMPLETE, but under way"),
    "a state that Optuna does not know": ([_outcome(9, None)], "cannot apply"),
    "an operation that Optuna does not know": ([_operation(99)], "cannot apply"),
    "an operation without its facts": ([_operation(_TRIAL)], "cannot apply"),
    "another attribute": ([_attribute(rank=1)], "rank: Extra inputs"),
    "a study of another method": ([_operation(_STUDY, study_name="fedavg", directions=[2])], "a study of fedavg"),
    "a trial without settings": ([_operation(_TRIAL, study_id=0, datetime_start=_SOME_TIME)], "trial 2 of .*settings"),
    "a choice that is not listed": ([_parameter(7)], "cannot apply"),
    "a value out of its range": ([_parameter(3.0, "training.learning_rate", _RATES)], "training.learning_rate=3.0"),
    "a value that is no number": ([_parameter("3", "training.learning_rate", _RATES)], "training.learning_rate=3"),
    "a key that is not searched": ([_parameter(0, "training.momentum")], "other settings"),
    "an evaluation of a search without pruning": ([_evaluation(1, 0.5)], "an evaluation after round 1"),
    "an evaluation at no round": ([_evaluation("one", 0.5)], "one.*integer"),
    "a pruning without an evaluation": ([_attribute(pruned_at=2**70)], "which has no evaluation"),
}


def test_forged_trials_are_refused(tiny: Path, tmp_path: Path) -> None:
    path, out = spec(tiny, tmp_path), tmp_path / "out"
    assert tuned(path, out, lambda: True).stopped
    journal, search = out / "study.journal", json.loads((out / "search.json").read_bytes())
    proposed = journal.read_bytes()
    for what, (operations, message) in _FORGED.items():
        journal.write_bytes(proposed)
        SearchJournal(journal, search).append_logs(operations)
        with pytest.raises(InputError, match=message) as refused:
            tuned(path, out, lambda: True)
        assert "study.journal" in refused.value.place and "\n" not in str(refused.value), what
    journal.write_bytes(proposed)
    refused_trial = [_attribute(state="failed"), _attribute(reason="no room"), _outcome(3, None)]
    SearchJournal(journal, search).append_logs(refused_trial)
    assert [each.reason for each in tuned(path, out, lambda: True).trials] == ["no room"]
