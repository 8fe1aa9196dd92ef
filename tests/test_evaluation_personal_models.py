"""Personal models evaluated during a run (``evaluation.personal_every``): same values everywhere, run unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.evaluation import EvaluationRequests
from coordinator.round_events import Phase
from fedmq.audit import replay
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.runs import results
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord
from tests import in_process_run, threaded_run
from tests.adversary_forged_logs import edit_metrics
from tests.log_causes import records
from tests.threaded_run import resolved

OWN = "protocol={name: rcsr, warmup: 1, personal: fixed, personal_onset: 0, personal_rate: 1.0}"
EVERY = "evaluation.personal_every=2"
MODES = {
    "sync": (),
    "stragglers": ("aggregation.deadline=0.3", "aggregation.quorum=0.3", "cost.speed_sigma=1.5"),
    "buffered": ("aggregation.mode=buffered", "aggregation.buffer=2", "cost.speed_sigma=1.0"),
    "async": ("aggregation.mode=async", "cost.speed_sigma=1.0"),
}


def scenario_of(tiny: Path, *settings: str) -> Scenario:
    return resolved(tiny, OWN, "rounds=5", *settings)


def counted(summary: dict[str, Any]) -> dict[str, Any]:
    """The parts of a summary that evaluating personal models must not change."""
    parts = {name: summary[name] for name in ("model_digest", "metrics", "bytes", "tasks", "personal")}
    # Only silos that exchange messages state what data they have.
    per_silo = summary["per_silo"].items()
    silos = {name: {key: each[key] for key in each if key not in ("data_digest", "items")} for name, each in per_silo}
    return {**parts, "per_silo": silos}


def summary_of(run: Path) -> dict[str, Any]:
    return counted(json.loads(RunFolder(run).summary.read_text()))


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    in_process_run.run(scenario_of(tiny, EVERY), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_models_traffic_and_final_metrics_equal_those_of_a_run_that_evaluates_only_at_its_end(
    tiny: Path, tmp_path: Path, mode: str
) -> None:
    plain = in_process_run.run(scenario_of(tiny, *MODES[mode]), tmp_path / "plain").summary.plain()
    often = in_process_run.run(scenario_of(tiny, *MODES[mode], EVERY), tmp_path / "often").summary.plain()
    assert counted(dict(often)) == counted(dict(plain))
    assert in_process_run.lines(tmp_path / "plain", "personal") == []
    assert in_process_run.lines(tmp_path / "often", "merge") == in_process_run.lines(tmp_path / "plain", "merge")
    lines = in_process_run.lines(tmp_path / "often", "personal")
    assert [line["version"] for line in lines] == [2, 4, 5]
    names = [name for name in often if name.startswith("personal")]
    assert {name: lines[-1][name] for name in names} == {name: often[name] for name in names}
    assert lines[0]["personal_whole_split"] != lines[-1]["personal_whole_split"]


@pytest.mark.slow
def test_a_line_equals_the_final_metrics_of_a_run_that_ends_at_its_version(tiny: Path, tmp_path: Path) -> None:
    # More rounds do not change the personal models of round 2; a learning rate schedule would.
    still = ("training.schedule=constant", EVERY)
    in_process_run.run(scenario_of(tiny, *still), tmp_path / "long")
    short = in_process_run.run(scenario_of(tiny, *still, "rounds=2"), tmp_path / "short").summary.plain()
    (line, *_) = in_process_run.lines(tmp_path / "long", "personal")
    assert line["version"] == 2
    assert line["personal_whole_split"] == short["personal_whole_split"]


def test_a_measurement_that_fails_on_every_silo_writes_no_line_and_the_run_continues(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from silos.tasks import Silo

    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Silo, "measure", fail)
    outcome = in_process_run.run(scenario_of(tiny, EVERY), tmp_path)
    assert outcome.phase is Phase.DONE
    assert "personal" not in outcome.summary.plain()
    assert in_process_run.lines(tmp_path, "personal") == []


@pytest.mark.slow
def test_a_measurement_that_arrives_before_the_first_evaluation_waits_for_it(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    measured, evaluated, held, waited = EvaluationRequests.measured, EvaluationRequests.evaluated, [], []

    def slower(self: EvaluationRequests, message: Any) -> bool:
        was = measured(self, message)
        if was and not self.requested:  # all silos are done
            waited.append(len(self._early))
            while held:
                evaluated(self, *held.pop(0))
        return was

    monkeypatch.setattr(EvaluationRequests, "measured", slower)
    monkeypatch.setattr(EvaluationRequests, "evaluated", lambda self, *call: held.append(call))
    in_process_run.run(scenario_of(tiny, EVERY), tmp_path / "slow", stop_wanted=lambda: len(waited) == 2)
    assert waited[0] == 4
    assert in_process_run.lines(tmp_path / "slow", "personal")[0] == in_process_run.lines(whole, "personal")[0]


# ------------------------------------------------------------------------------------------------- killed and resumed
@pytest.mark.slow
def test_a_coordinator_killed_at_any_merge_writes_every_line_once(tiny: Path, tmp_path: Path, whole: Path) -> None:
    for after in (1, 2, 4):
        crash = f"faults=[{{kind: coordinator_crash, after_round: {after}}}]"
        out = tmp_path / str(after)
        summary = in_process_run.run_restarted(scenario_of(tiny, EVERY, crash), out).summary.plain()
        assert counted(dict(summary)) == summary_of(whole)
        for kind in ("personal", "merge"):
            assert in_process_run.lines(out, kind) == in_process_run.lines(whole, kind)


@pytest.mark.slow
@pytest.mark.parametrize("number", [5, 11])
def test_a_run_stopped_or_killed_while_silos_evaluate_writes_the_same_lines(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, whole: Path
) -> None:
    scenario = scenario_of(tiny, EVERY)
    taken, measured = [0], EvaluationRequests.measured

    def counting(self: EvaluationRequests, message: Any) -> bool:
        was = measured(self, message)
        taken[0] += was
        if taken[0] == number and kill[0]:
            kill[0] = False
            raise in_process_run.Killed
        return was

    monkeypatch.setattr(EvaluationRequests, "measured", counting)
    kill = [True]
    with pytest.raises(in_process_run.Killed):
        in_process_run.run(scenario, tmp_path / "killed")
    again = in_process_run.run(scenario, tmp_path / "killed", resume=True).summary.plain()
    assert counted(again) == summary_of(whole)

    taken[0] = 0
    monkeypatch.setattr("coordinator.peers.MESSAGES_AT_ONCE", 1)  # so that a stop can come between two answers
    stopped = in_process_run.run(scenario, tmp_path / "stopped", stop_wanted=lambda: taken[0] == number)
    assert stopped.phase is Phase.STOPPED
    notes = {each.event: each for each in records(tmp_path / "stopped") if isinstance(each, NoteRecord)}
    stop = LogEvent.EVALUATION_ABORTED if number == 11 else LogEvent.STOP_REQUESTED  # the last evaluation, or earlier
    assert notes[LogEvent.ENDED].caused_by == notes[stop].n
    taken[0] = number + 1
    again = in_process_run.run(scenario, tmp_path / "stopped", resume=True).summary.plain()
    assert counted(again) == summary_of(whole)
    for name in ("killed", "stopped"):
        for kind in ("personal", "merge"):
            assert in_process_run.lines(tmp_path / name, kind) == in_process_run.lines(whole, kind)


@pytest.mark.slow
def test_a_coordinator_killed_between_the_last_line_and_the_summary_writes_the_line_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator import program

    def die(*_: object) -> None:
        raise in_process_run.Killed

    with monkeypatch.context() as patched, pytest.raises(in_process_run.Killed):
        patched.setattr(program, "finish", die)
        in_process_run.run(scenario_of(tiny, EVERY), tmp_path)
    assert [line["version"] for line in in_process_run.lines(tmp_path, "personal")] == [2, 4, 5]
    summary = in_process_run.run(scenario_of(tiny, EVERY), tmp_path, resume=True).summary.plain()
    lines = in_process_run.lines(tmp_path, "personal")
    assert [line["version"] for line in lines] == [2, 4, 5]
    assert lines[-1]["personal"] == summary["personal"]


# --------------------------------------------------------------------------------------------- messages and their logs
@pytest.fixture(scope="module")
def sealed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over sealed messages."""
    out = tmp_path_factory.mktemp("sealed")
    assert threaded_run.run(scenario_of(tiny, EVERY), out).phase is Phase.DONE
    return out


@pytest.mark.slow
def test_sealed_messages_and_in_process_calls_give_the_same_lines_and_the_audit_agrees(
    tiny: Path, sealed: Path, whole: Path
) -> None:
    assert summary_of(sealed) == summary_of(whole)
    assert in_process_run.lines(sealed, "personal") == in_process_run.lines(whole, "personal")
    audit = audit_run(sealed)
    assert not audit.findings
    # Three measurements of each silo are the only messages that belong to no task.
    records = [record for _, record in audit.messages if record.header.sender in scenario_of(tiny).silo_names]
    measured = [record for record in records if any(kind == "metrics" for kind, _ in record.payloads)]
    assert len({(record.header.sender, record.header.base_version) for record in measured}) == 3 * 4


@pytest.mark.slow
def test_a_replay_matches_and_names_a_line_that_differs(tiny: Path, tmp_path: Path, sealed: Path) -> None:
    threaded_run.run(scenario_of(tiny, EVERY), tmp_path)
    was, now = (replay.read_record(RunFolder(each)) for each in (sealed, tmp_path))
    assert replay.first_difference(was, now) is None
    edit_metrics(tmp_path, "personal", lambda line: line["personal"].update(mean_r1=0.99), 2)
    difference = replay.first_difference(was, replay.read_record(RunFolder(tmp_path)))
    assert difference is not None
    assert difference.place == "personal of version 2"


def changed(sealed: Path, tmp_path: Path, kind: str, change: Callable[[dict[str, Any]], object], at: int) -> list[str]:
    """Audit findings on a copy of the run with a changed line of the metrics."""
    out = Path(shutil.copytree(sealed, tmp_path / "copy"))
    edit_metrics(out, kind, change, at)
    return [finding.what for finding in audit_run(out).findings]


def test_the_audit_finds_metrics_that_a_silo_never_reported(tmp_path: Path, sealed: Path) -> None:
    found = changed(
        sealed, tmp_path, "personal", lambda line: line["personal_whole_split"]["silo-01"].update(mean_r1=0.99), 4
    )
    assert found == [
        "personal does not match the metrics it is computed from",
        "the metrics of silo-01's personal model at version 4 are not what it answered",
    ]


def test_the_audit_finds_a_merge_of_a_silo_that_only_sent_a_measurement(tmp_path: Path, sealed: Path) -> None:
    asked = {record["version"]: record["replies"] for record in in_process_run.lines(sealed, "merge")}
    (away,) = {"silo-00", "silo-01", "silo-02", "silo-03"} - set(asked[3])

    def forge(line: dict[str, Any]) -> None:
        # The silo evaluated its personal model at version 2, but ran no task there.
        line["replies"].append(away)
        line["staleness"].append(0)

    found = changed(sealed, tmp_path, "merge", forge, 3)
    assert f"1 replies of {away} to version 2 merged, but 0 were received" in found


# ---------------------------------------------------------------------------------------------------- names and curves
def test_personal_models_have_curves_over_merges_and_time_and_a_figure_in_the_report(whole: Path) -> None:
    outcome = results.read(RunFolder(whole))
    for metric in ("personal.mean_r1", "personal_fairness.std_r1", "personal_per_silo_mean.i2t_r5"):
        course = outcome.course(metric)
        assert [version for version, _, _ in course] == [2, 4, 5]
        assert course[-1][1] == pytest.approx(outcome.summary.seconds.virtual, abs=1e-6)
        assert course[-1][2] == outcome.value(metric)
        assert 0 < course[0][1] < course[1][1]
    report = RunFolder(whole).report.read_text()
    assert "Retrieval of the personal models" in report
    assert report.count("<h3>R@1 of the silos, personal models</h3>") == 1
