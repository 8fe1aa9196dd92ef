"""Run folders of an earlier version stay readable: the fixture predates typed run records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmq.audit import replay
from fedmq.audit.log_checks import audit_run
from fedmq.cli import main as cli
from fedmq.errors import InputError
from fedmq.runs import results
from fedmq.runs.release import ReleaseConfig
from fedmq.storage.json_files import read_json
from fedmq.storage.run_folder import RunFolder

OLD = Path(__file__).parent / "fixtures" / "old_run"
DIGEST = "bcaa8275fccb3cfc06d7ca2e429376cd34f778c0611b5e48e2a0c6a5ba3932d4"


@pytest.fixture
def old(tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(OLD, tmp_path / "old_run")))


def test_the_audit_of_an_old_folder_has_no_findings_and_the_same_counts(old: RunFolder) -> None:
    audit = audit_run(old.root)
    assert not audit.findings and audit.finished
    assert dict(audit.records) == {
        "coordinator": 87,
        "evaluator": 12,
        "silo-00": 19,
        "silo-01": 13,
        "silo-02": 17,
        "silo-03": 19,
    }
    done = CliRunner().invoke(cli.app, ["audit", str(old.root)])
    assert done.exit_code == 0 and "consistent" in done.output


def test_the_audit_of_an_old_folder_finds_a_changed_metric(old: RunFolder) -> None:
    told = json.loads(old.summary.read_text())
    told["personal_fairness"]["worst_r1"] = 0.99
    old.summary.write_text(json.dumps(told))
    assert [finding.what for finding in audit_run(old.root).findings] == [
        "personal_fairness does not match the metrics it is computed from"
    ]


def test_the_report_of_an_old_folder_can_be_rewritten(old: RunFolder) -> None:
    done = CliRunner().invoke(cli.app, ["report", str(old.root)])
    assert done.exit_code == 0
    page = old.report.read_text()
    assert DIGEST in page
    for title in ("Retrieval on the held-out split", "Training loss of each silo", "Loss of the router", "Time"):
        assert title in page


def test_an_old_folder_can_be_compared_and_replayed(old: RunFolder) -> None:
    finished = results.read(old)
    assert finished.value("mean_r1") == 0.975
    assert finished.value("bytes.down") == 138624
    assert [version for version, _, _ in finished.course("personal.mean_r1")] == [2, 4]
    record = replay.read_record(old)
    assert record.digest == record.files["model"] == DIGEST
    assert replay.first_difference(record, record) is None


def test_the_status_of_an_old_folder_is_refused_with_the_command_that_shows_its_results(old: RunFolder) -> None:
    with pytest.raises(InputError, match=r"has ended, and an earlier fedmq kept no status.*`fedmq report .*` shows"):
        CliRunner().invoke(cli.app, ["status", str(old.root)], catch_exceptions=False)


def test_files_of_an_old_folder_are_the_same_to_the_byte_when_rewritten(old: RunFolder) -> None:
    summary, lines = results.read_summary(old), results.read_metrics(old)
    assert json.dumps(summary.plain(), indent=2) + "\n" == old.summary.read_text()
    assert "".join(json.dumps(line.plain()) + "\n" for line in lines) == old.metrics.read_text()
    path = old.model / "config.json"
    config = read_json(path, ReleaseConfig, "the configuration of a released model")
    assert json.dumps(config.plain(), indent=2) + "\n" == path.read_text()
