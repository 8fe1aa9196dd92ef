"""Comparisons: summary values of a row's runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedmq.errors import InputError
from fedmq.experiments import summary, tables
from fedmq.runs import results
from fedmq.runs.results import Target
from fedmq.storage.run_folder import RunFolder
from tests.comparisons import finish


def test_values_are_found_by_metric_name_or_by_path_in_the_summary(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.value("mean_r1") == 0.5
    assert outcome.value("fairness.worst_r1") == 0.25
    assert (outcome.value("bytes.up"), outcome.value("bytes.up.delta")) == (108.0, 100.0)
    assert outcome.value("seconds.virtual") == 3.0
    assert [outcome.value(name) for name in ("personal.mean_r1", "protocol", "map", "bytes", "fairness")] == [None] * 5


def test_the_time_to_target_is_that_of_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.time_to(Target("mean_r1", 0.1)) == 0.0
    assert outcome.time_to(Target("mean_r1", 0.3)) == 3.0
    assert outcome.time_to(Target("mean_r1", 0.6)) is None
    evaluations = [
        dataclasses.replace(each, metrics={**each.metrics, "i2t_medr": rank})
        for each, rank in zip(outcome.evaluations, (50.0, 4.0), strict=True)
    ]
    ranked = dataclasses.replace(outcome, evaluations=tuple(evaluations))
    assert ranked.time_to(Target("i2t_medr", 5.0)) == 3.0
    assert ranked.time_to(Target("i2t_medr", 3.0)) is None
    assert outcome.time_to(Target("fairness.worst_r1", 0.25)) == 0.0
    assert outcome.time_to(Target("fairness.worst_r1", 0.3)) is None


def test_version_0_yields_the_untrained_values(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    before = results.read(RunFolder(tmp_path)).untrained()
    assert before.value("mean_r1") == 0.1
    assert before.value("fairness.gap_r1") == pytest.approx(0.25)
    assert before.value("bytes.up") is None


def test_an_unfinished_run_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finished run"):
        results.read(RunFolder(tmp_path))


def test_the_confidence_interval_is_the_paired_t_interval() -> None:
    own, base = {0: 0.50, 1: 0.61, 2: 0.55}, {0: 0.45, 1: 0.52, 2: 0.53}
    found = summary.statistic(own, base)
    differences = np.array([0.05, 0.09, 0.02])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert (found.n, found.mean, found.std) == (3, pytest.approx(np.mean([0.5, 0.61, 0.55])), pytest.approx(0.0550757))
    assert found.difference == pytest.approx(differences.mean())
    assert (found.low, found.high) == (
        pytest.approx(differences.mean() - half),
        pytest.approx(differences.mean() + half),
    )


def test_differences_use_the_seeds_that_both_rows_have() -> None:
    found = summary.statistic({0: 1.0, 2: 3.0}, {0: 0.5, 1: 9.0, 2: 2.5})
    assert (found.n, found.difference, found.low, found.high) == (2, 0.5, 0.5, 0.5)
    assert "seeds" not in tables.difference_text(found)
    missing = summary.statistic({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 2: 2.0})
    assert (missing.n, missing.pairs) == (3, 2)
    assert tables.difference_text(missing).endswith("(2 of 3 seeds)")
    single = summary.statistic({0: 1.0}, {0: 0.25, 1: 3.0})
    assert single.difference == 0.75
    assert np.isnan([single.std, single.low, single.high]).all()
    assert np.isnan(summary.statistic({}, {0: 1.0}).mean)


def test_the_best_row_is_better_than_every_complete_row_by_a_paired_interval() -> None:
    low, high, noisy = {0: 0.10, 1: 0.20, 2: 0.30}, {0: 0.15, 1: 0.26, 2: 0.36}, {0: 0.9, 1: 0.0, 2: 0.0}
    incomplete = {0: 9.0}
    assert summary.best([low, high, incomplete], "mean_r1") == {1}
    assert summary.best([low, high, incomplete], "fairness.std_r1") == {0}
    assert summary.best([low, high, incomplete], "bytes.up") == {0}
    assert summary.best([low, high, noisy], "mean_r1") == set(), "no row is better than the noisy one beyond chance"
    assert summary.best([low, low], "mean_r1") == summary.best([low], "mean_r1") == set()
    assert summary.best([{0: 0.1}, {0: 0.9}], "mean_r1") == set(), "one seed has no interval"
