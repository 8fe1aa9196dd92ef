"""``fedmq scenario --check`` says what would run and what it would take, and starts and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.errors import InputError
from fedmq.runs.results import read_summary
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.threaded_run import resolved


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


def test_a_bad_scenario_is_refused_by_the_check_too(tiny: Path) -> None:
    done = CliRunner().invoke(cli.app, ["scenario", str(tiny), "--check", "--set", "rounds=0"])
    assert isinstance(done.exception, InputError) and "rounds" in str(done.exception)
