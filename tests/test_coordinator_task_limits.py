"""Limits of tasks in real time: a silo that sends heartbeats but never replies does not stall a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.liveness import Absences, AnswerLimit, TaskLimits
from coordinator.round_events import PendingTask
from fedmq.config.scenario import Scenario
from fedmq.evaluation.program import Evaluator
from fedmq.runs.status import SiloPhase, read_status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Loss, Metrics, Payload
from fedmq.wire.sessions import open_message, seal_message
from silos.tasks import Silo
from tests.in_process_run import notes
from tests.threaded_run import joined, resolved, run
from tests.waiting import wait_for

SAMPLES = {"silo-00": 100, "silo-01": 10}


def test_the_default_limit_follows_from_the_silos_own_longest_task() -> None:
    limits = TaskLimits(None, SAMPLES)
    limits.sent("silo-00", 1, 0.0)
    assert not limits.replied("silo-00", 1, 20.0)
    assert limits.limit("silo-00") == 200.0
    # Without an earlier task: ten times the pace of the others, for its own number of samples, at least ten minutes.
    assert limits.limit("silo-01") == 600.0
    limits.sent("silo-00", 2, 20.0)
    limits.sent("silo-01", 1, 20.0)
    assert not limits.exceed(220.0)
    assert [task.silo for task in limits.exceed(220.5)] == ["silo-00"]
    assert limits.overdue == ("silo-00",)
    assert not limits.exceed(221.0), "each task exceeds its limit once"
    assert limits.replied("silo-00", 2, 320.0), "late"
    assert (limits.overdue, limits.limit("silo-00")) == ((), 3000.0)


def test_a_task_that_waits_for_other_silos_on_its_machine_is_not_overdue() -> None:
    limits = TaskLimits(None, SAMPLES)
    for silo in SAMPLES:
        limits.sent(silo, 1, 0.0)
        limits.replied(silo, 1, 1.0)
        limits.sent(silo, 2, 1.0)
    limits.replied("silo-01", 2, 100.0)
    assert not limits.exceed(159.0)
    assert [task.silo for task in limits.exceed(161.0)] == ["silo-00"]


def test_an_evaluation_delays_the_tasks_that_wait_for_it() -> None:
    limits = TaskLimits(None, SAMPLES)
    limits.sent("silo-00", 1, 0.0)
    limits.replied("silo-00", 1, 1.0)
    limits.sent("silo-00", 2, 1.0)
    limits.evaluated(50.0)
    assert not limits.exceed(109.0)
    assert limits.exceed(111.0)


def test_a_silo_that_reconnects_again_and_again_fails_its_task_after_three_limits() -> None:
    limits = TaskLimits(10.0, SAMPLES)
    for start in (0.0, 20.0, 40.0):
        limits.sent("silo-00", 1, start)
        limits.lost("silo-00", start + 9.0)
    limits.sent("silo-00", 1, 60.0)
    assert not limits.exceed(62.0), "29 s in four sessions"
    assert [task.silo for task in limits.exceed(64.0)] == ["silo-00"]
    limits.sent("silo-00", 2, 70.0)
    assert not limits.exceed(79.0), "another task"


def test_absences_during_the_same_task_count_together() -> None:
    absences, pending = Absences(), {"silo-00": PendingTask(sequence=4, base_version=3, round=3)}
    for start in (0.0, 30.0):
        absences.begin("silo-00", start)
        absences.begin("silo-00", start + 5.0)
        assert not absences.give_up(60.0, start + 25.0, pending)
        absences.end("silo-00", start + 25.0, pending)
    absences.begin("silo-00", 60.0)
    assert not absences.give_up(60.0, 70.0, {"silo-00": PendingTask(sequence=5, base_version=4, round=4)}), (
        "another task"
    )
    assert not absences.give_up(60.0, 69.0, pending)
    assert absences.give_up(60.0, 71.0, pending) == {"silo-00": 4}
    assert not absences.give_up(60.0, 200.0, pending), "once"


def beating(scenario: Scenario) -> Callable[[str, Path], None]:
    """A silo-00 that joins, sends heartbeats, and replies only to a task that it was never given."""
    unasked = (Loss(0.5),)

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        sent = 0.0
        while True:
            if time.monotonic() - sent > 0.5:
                sent = time.monotonic()
                connection.send(seal_message(session, Message(beat)).frames)
                reply = replace(beat, kind=Kind.REPLY, reply_to=99)
                connection.send(seal_message(session, Message(reply, unasked)).frames)
            frames = connection.receive(0.1)
            if frames is not None and open_message(session, frames)[0].header.kind is Kind.STOP:
                connection.close()
                return

    return join


SETTINGS = {
    "virtual clock with a deadline": ("aggregation.deadline=60",),
    "wall clock": ("clock=wall", "aggregation.on_lost=give_up"),
    "buffered": ("aggregation.mode=buffered",),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_silo_that_sends_heartbeats_but_never_replies_does_not_stall_the_run(
    tiny: Path, tmp_path: Path, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = TaskLimits.limit

    def sooner(limits: TaskLimits, silo: str) -> float:
        assert limit(limits, silo) == 10.0
        return 0.5 if silo == "silo-00" else 10.0

    monkeypatch.setattr(TaskLimits, "limit", sooner)
    scenario = resolved(tiny, "participation=1", "aggregation.task_limit=10", *settings)
    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[beating(scenario)])
    assert outcome.summary is not None
    failed = notes(tmp_path, LogEvent.TASK_FAILED)
    assert [(note["silo"], note["reason"]) for note in failed] == [("silo-00", "overdue")], "once: not selected again"
    assert outcome.summary.per_silo["silo-00"].participations == 0
    status = read_status(RunFolder(tmp_path).status)
    assert status.silos["silo-00"].phase is SiloPhase.OVERDUE
    assert "overdue" in status.silos["silo-00"].error
    assert status.silos["silo-01"].phase is SiloPhase.DONE


@pytest.mark.slow
def test_a_silo_that_never_answers_an_evaluation_request_is_given_up(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, evaluate, limit = Silo.measure, Evaluator.evaluate, AnswerLimit.limit.fget
    answers: list[str] = []

    def hanging(silo: Silo, message: Message) -> object:
        if silo.facts.name == "silo-00":
            wait_for((tmp_path / "summary.json").exists)
        answers.append(silo.facts.name)
        return measure(silo, message)

    def evaluating(evaluator: Evaluator, payloads: Sequence[Payload]) -> Metrics:
        answers.append("evaluator")
        return evaluate(evaluator, payloads)

    def sooner(each: AnswerLimit) -> float:
        """Two seconds instead of ten once all others answer: three silos, and the evaluator twice."""
        assert limit is not None and limit(each) == 10.0
        return 2.0 if len(answers) >= 5 else 10.0

    monkeypatch.setattr(Silo, "measure", hanging)
    monkeypatch.setattr(Evaluator, "evaluate", evaluating)
    monkeypatch.setattr(AnswerLimit, "limit", property(sooner))
    settings = ("protocol=local", "rounds=1", "participation=1", "aggregation.task_limit=10")
    outcome = run(resolved(tiny, *settings), tmp_path)
    assert outcome.summary is not None
    assert outcome.summary.personal_missing == {"silo-00": "version 1: it did not answer within the limit"}
    assert set(outcome.summary.personal_per_silo) == {"silo-01", "silo-02", "silo-03"}
