"""Runs of sites with data of their own that start with a minimum of them; and sites whose data do not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.audit.replay import require_repeatable
from fedmq.errors import InputError
from fedmq.runs.report import run_report
from fedmq.runs.result_limits import items_each
from fedmq.runs.results import read_summary
from tests.own_data_sites import arrays, of_hospital
from tests.own_data_threads import OwnRun

pytestmark = pytest.mark.slow

MINIMUM: dict[str, Any] = {"participation": {"minimum": 2}, "rounds": 16}


def test_a_late_silo_joins_between_two_rounds_and_trains_from_then_on(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, MINIMUM)
    run.coordinate(listening=lambda: run.start("silo-00", "silo-01"), stop_wanted=run.from_version(2, "silo-02"))
    assert set(run.ended.values()) == {""}, run.ended
    replies = [len(line.replies) for line in run.merges]
    assert replies == sorted(replies) and {replies[0], replies[-1]} == {2, 3} and len(replies) == 16
    summary = read_summary(run.folder)
    assert {name: silo.participations for name, silo in summary.per_silo.items()} == {
        "silo-00": 16,
        "silo-01": 16,
        "silo-02": replies.count(3),
    }
    assert summary.own_heldout is not None and set(summary.own_heldout.per_silo) == {"silo-00", "silo-02"}
    findings = audit_run(tmp_path / "run").findings
    assert not findings, findings
    with pytest.raises(InputError, match=r"participation.minimum: found 2, allowed: null: this run depends on when"):
        require_repeatable(run.scenario, run.folder)


def test_a_run_ends_with_a_summary_and_a_report_without_a_silo_that_never_joined(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, MINIMUM | {"rounds": 1})
    run.coordinate(listening=lambda: run.start("silo-00", "silo-01"))
    assert set(run.ended.values()) == {""}, run.ended
    absent = read_summary(run.folder).per_silo["silo-02"]
    assert "0 to" not in items_each(read_summary(run.folder))
    assert (absent.modalities, absent.samples, absent.participations, absent.items) == ([], 0, 0, {})
    run_report.write(run.folder, {})
    assert "silo-02" in run.folder.report.read_text()


def test_a_wrong_site_that_joins_first_is_refused_by_name_and_the_run_continues_once_it_is_corrected(
    tmp_path: Path,
) -> None:
    run = OwnRun(tmp_path, {"rounds": 1})
    oslo = of_hospital(arrays(), "oslo")
    run.data["silo-02"] = oslo | {"image": oslo["image"][:, :7]}
    began: list[str] = []

    def begin() -> bool:
        if not began and run.stated("silo-02"):
            run.start("silo-00", "silo-01")
            began.append("others")
        if run.ended.get("silo-02"):
            began.append(run.ended.pop("silo-02"))
            run.data["silo-02"] = oslo
            run.start("silo-02")
        return False

    run.coordinate(listening=lambda: run.start("silo-02"), stop_wanted=begin)
    assert set(run.ended.values()) == {""}, run.ended
    assert "silo-02 has image features of width 7, silo-0" in began[1]
    assert "Correct the data of silo-02 and start it again" in began[1]
