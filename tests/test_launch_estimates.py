"""``fedmq scenario --check`` says what would run and what it would take, and starts and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.errors import InputError
from fedmq.federation.population import build_population
from fedmq.launch import estimates, rehearsal
from fedmq.runs.results import read_summary
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.threaded_run import resolved, run_of


@pytest.mark.slow
def test_the_estimates_of_traffic_hold_for_the_run(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["scenario", str(tiny), "--check", "--quiet", "--set", "participation=1"])
    assert done.exit_code == 0, done.output
    assert "tiny: rcsr, seed 0, 4 rounds" in done.stdout
    assert "silos with images only: 1," in done.stdout and "faults: none" in done.stdout
    assert not list(tmp_path.iterdir())
    plain = CliRunner().invoke(cli.app, ["scenario", str(tiny), "--check", "--json", "--quiet"])
    estimated = json.loads(plain.stdout)
    in_process_run.run(resolved(tiny), tmp_path / "run")
    summary = read_summary(RunFolder(tmp_path / "run"))
    assert estimated["tasks"] == summary.tasks.merged
    assert estimated["down"] == pytest.approx(sum(summary.bytes.down.values()), rel=0.05)
    assert estimated["up"] == pytest.approx(sum(summary.bytes.up.values()), rel=0.05)
    assert estimated["memory"] > 500e6 and estimated["startup"] > 0 and estimated["rounds"] > 0


def test_large_data_are_rehearsed_in_part_with_the_same_traffic(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(resolved(tiny, "training.batch_size=4", "evaluation.fold_size=10"))
    population = build_population(run.scenario)
    whole = estimates.estimate(run, population)
    monkeypatch.setattr(estimates, "_ROUND_SECONDS", 0.0)
    monkeypatch.setattr(rehearsal, "_EVALUATED", 5)
    seen = list[tuple[int, ...]]()
    real = rehearsal.inline_peers
    monkeypatch.setattr(
        rehearsal,
        "inline_peers",
        lambda run, folder, data, part: (
            seen.append(tuple(map(len, (*part.train, part.evaluated)))) or real(run, folder, data, part)
        ),
    )
    part = estimates.estimate(run, population)
    assert whole.on_all_items and not part.on_all_items and part.rehearsed
    assert [min(8, len(rows)) for rows in population.train] == list(seen[0][:-1])
    assert 10 <= seen[0][-1] < len(population.evaluated)
    assert (part.down, part.up, part.tasks) == (whole.down, whole.up, whole.tasks)


def test_a_part_of_the_data_has_items_of_every_silo(tiny: Path) -> None:
    scenario = resolved(tiny, "evaluation.gallery=database")
    population = build_population(scenario)
    part = rehearsal.part_of(population, scenario, 3, 1000)
    for kept, held in ((part.train, population.train), (part.heldout, population.heldout)):
        assert all(
            set(some) <= set(all_) and bool(len(some)) == bool(len(all_)) for some, all_ in zip(kept, held, strict=True)
        )
    assert max(map(len, part.train)) == 3
    assert set(np.concatenate(part.heldout)) <= set(part.evaluated) <= set(population.evaluated)
    assert set(np.concatenate(part.galleries)) <= set(part.database) <= set(population.database)


def test_a_bad_scenario_is_refused_by_the_check_too(tiny: Path) -> None:
    done = CliRunner().invoke(cli.app, ["scenario", str(tiny), "--check", "--set", "rounds=0"])
    assert isinstance(done.exception, InputError) and "rounds" in str(done.exception)


def test_a_run_with_secure_sums_and_adaptive_clipping_is_estimated_without_them(tiny: Path) -> None:
    private = "privacy={secure_aggregation: true, clip_norm: 1, adaptive_clip: {noise_multiplier: 0}}"
    options = ["--check", "--quiet", "--set", "protocol=fedavg", "--set", private]
    done = CliRunner().invoke(cli.app, ["scenario", str(tiny), *options])
    assert done.exit_code == 0, done.output
    assert "faults and secure sums are not considered" in done.stdout
    assert "\noptions: the defaults\n" in done.stdout, "of dozens of options, only those that are set"
