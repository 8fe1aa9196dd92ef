"""Secure sums: whole runs with dropouts and restarts, and what a curious coordinator or colluding silos try."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from tests.threaded_run import resolved, run

SUMS = ("protocol=fedavg", "participation=1.0", "privacy.secure_aggregation=true", "evaluation.every=0")
DROPS = (
    "faults=[{kind: drop, step: mask, silos: [silo-01], rounds: [1]},"
    " {kind: drop, step: share, silos: [silo-00], rounds: [2]},"
    " {kind: drop, step: mask, silos: [silo-00, silo-03], rounds: [3]}]"
)


def merges(folder: Path) -> list[MergeLine]:
    return [line for line in read_metrics(RunFolder(folder)) if isinstance(line, MergeLine)]


def test_a_run_of_sums_is_the_plain_one_but_for_fixed_point_and_the_silos_that_drop_out(
    tiny: Path, tmp_path: Path
) -> None:
    plain = run(resolved(tiny, *SUMS, "privacy.secure_aggregation=null"), tmp_path / "plain").summary
    whole = run(resolved(tiny, *SUMS), tmp_path / "whole").summary
    again = run(resolved(tiny, *SUMS, DROPS), tmp_path / "again").summary
    other = run(resolved(tiny, *SUMS, DROPS), tmp_path / "other").summary
    assert again.model_digest == other.model_digest != whole.model_digest
    assert plain.metrics["mean_r1"] == pytest.approx(whole.metrics["mean_r1"], abs=0.02)
    sums = [each.losses for each in merges(tmp_path / "whole")]
    assert sums == [pytest.approx(each.losses, rel=1e-4) for each in merges(tmp_path / "plain")]
