"""``--resume RUN`` without a scenario file, and ``--extend ROUNDS``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.config.yaml_files import read_yaml
from tests.command_line import fedmq
from tests.in_process_run import run
from tests.threaded_run import resolved

INLINE = ("--set", "launcher=inline")


def digest(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["model_digest"])


@pytest.mark.slow
def test_a_run_is_resumed_from_its_folder_alone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert fedmq(monkeypatch, "scenario", tiny, *INLINE, "--out", whole, "--quiet") == 0
    scenario = resolved(tiny, "launcher=inline")
    merged = iter(range(1000))
    stopped = run(scenario, out, stop_wanted=lambda: next(merged) > 12)
    assert stopped.summary is None
    assert fedmq(monkeypatch, "scenario", "--resume", out, "--quiet") == 0
    assert digest(out) == digest(whole)


@pytest.mark.slow
def test_an_extended_run_gives_the_model_of_a_run_with_all_rounds(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "run"
    schedule = ("--set", "rounds=6", "--set", "training.schedule_rounds=4")
    assert fedmq(monkeypatch, "scenario", tiny, *INLINE, *schedule, "--out", whole, "--quiet") == 0
    assert fedmq(monkeypatch, "scenario", tiny, *INLINE, "--out", out, "--quiet") == 0
    first = digest(out)
    assert fedmq(monkeypatch, "scenario", "--resume", out, "--extend", 2, "--quiet") == 0
    assert digest(out) == digest(whole) != first
    assert json.loads((out / "summary-4.json").read_text())["model_digest"] == first
    written = read_yaml(out / "scenario.yaml")
    assert (written["rounds"], written["training"]["schedule_rounds"]) == (6, 4)
    assert not audit_run(out).findings
    # The evaluation at the former end is not a difference.
    assert fedmq(monkeypatch, "replay", out, "--quiet") == 0
    # A second extension keeps the first schedule.
    assert fedmq(monkeypatch, "scenario", "--resume", out, "--extend", 1, "--quiet") == 0
    assert read_yaml(out / "scenario.yaml")["training"]["schedule_rounds"] == 4


@pytest.mark.slow
def test_a_finished_run_is_extended_only_if_it_has_its_checkpoints(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert fedmq(monkeypatch, "scenario", tiny, *INLINE, "--out", out, "--quiet") == 0
    assert fedmq(monkeypatch, "scenario", "--resume", out, "--quiet") == 2
    assert "a finished run" in capfd.readouterr().err
    for path in sorted((out / "checkpoints").glob("version-*")):
        path.rename(tmp_path / path.name)
    assert fedmq(monkeypatch, "scenario", "--resume", out, "--extend", 2, "--quiet") == 2
    assert "a run without a checkpoint" in capfd.readouterr().err
    assert (out / "summary.json").exists()
