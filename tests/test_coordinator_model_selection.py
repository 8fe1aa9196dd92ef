"""The best version by validation, and early stopping by patience; the test split never decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.release import patience_over
from coordinator.round_events import Phase
from fedmq.api.model import load
from fedmq.audit.log_checks import audit_run
from fedmq.errors import InputError
from fedmq.runs.results import chosen_by_validation, read_metrics
from fedmq.runs.resume import check
from fedmq.runs.run_records import EvaluationLine
from fedmq.storage.run_folder import RunFolder
from tests.in_process_run import run
from tests.threaded_run import resolved

#: A learning rate so high that the model soon gets worse.
SETTINGS = ("rounds=12", "evaluation.split=val", "evaluation.every=1", "training.learning_rate=0.3")


def evaluations(*values: float) -> list[EvaluationLine]:
    return [
        EvaluationLine(kind="evaluation", version=version, metrics={"mean_r1": value}, per_silo={})
        for version, value in enumerate(values)
    ]


def test_patience_counts_evaluations_without_a_higher_value() -> None:
    assert not patience_over(evaluations(0.1, 0.5, 0.5), 2)
    assert patience_over(evaluations(0.1, 0.5, 0.5, 0.4), 2)
    assert not patience_over(evaluations(0.1, 0.5, 0.4, 0.6), 2)
    assert not patience_over(evaluations(0.9, *[0.1] * 50), None)
    assert not patience_over([], 1)
    unordered = evaluations(0.1, 0.5, 0.4)
    assert patience_over([unordered[2], unordered[0], unordered[1]], 1)


@pytest.mark.slow
def test_the_best_version_is_kept_in_addition_to_the_last_one(tiny: Path, tmp_path: Path) -> None:
    outcome = run(resolved(tiny, *SETTINGS, "evaluation.keep=best"), tmp_path)
    assert outcome.summary is not None
    lines = [line for line in read_metrics(RunFolder(tmp_path)) if isinstance(line, EvaluationLine)]
    best = max(lines, key=lambda line: (line.metrics["mean_r1"], -line.version))
    kept = outcome.summary.best
    assert kept is not None
    line = f"best version by validation: {best.version}, R@1 {kept.value:.4f}, in best/model"
    assert list(chosen_by_validation(outcome.summary)) == [line]
    assert (kept.version, kept.value) == (best.version, best.metrics["mean_r1"])
    assert kept.version < 12, "the last model is not the best one"
    assert load(tmp_path / "best" / "model").config.model_digest == kept.model_digest != outcome.summary.model_digest
    assert load(tmp_path / "model").config.model_digest == outcome.summary.model_digest
    assert not audit_run(tmp_path).findings


@pytest.mark.slow
def test_a_run_ends_early_and_its_resume_does_not_continue(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, *SETTINGS, "evaluation.patience=2")
    outcome = run(scenario, tmp_path / "run")
    assert outcome.summary is not None
    assert outcome.summary.ended_by == "evaluation.patience"
    assert outcome.summary.versions < 12
    lines = [line for line in read_metrics(RunFolder(tmp_path / "run")) if isinstance(line, EvaluationLine)]
    assert patience_over(lines, 2)
    assert not patience_over(lines[:-1], 2)
    assert not audit_run(tmp_path / "run").findings
    assert next(chosen_by_validation(outcome.summary)).startswith(
        f"ended early, after {outcome.summary.versions} of 12"
    )
    with pytest.raises(InputError, match=f"evaluation.patience ended after {outcome.summary.versions} rounds"):
        check(RunFolder(tmp_path / "run"), scenario, scenario, "--resume run", inline=True, extend=True)
    digest = outcome.summary.model_digest
    # Killed after the last checkpoint, before the summary: the resumed run ends at the same version.
    (tmp_path / "run" / "summary.json").unlink()
    again = run(scenario, tmp_path / "run", resume=True)
    assert again.summary is not None
    assert (again.summary.model_digest, again.summary.versions) == (digest, outcome.summary.versions)
    # Stopped in the middle: it ends there, too.
    steps = iter(range(1000))
    assert run(scenario, tmp_path / "cut", stop_wanted=lambda: next(steps) > 6).phase is Phase.STOPPED
    resumed = run(scenario, tmp_path / "cut", resume=True)
    assert resumed.summary is not None
    assert resumed.summary.model_digest == digest
