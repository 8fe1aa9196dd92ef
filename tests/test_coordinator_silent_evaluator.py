"""An evaluator that is connected but never answers: the run ends without it, says so, and can be evaluated later."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.evaluation import UNDER_WAY
from coordinator.liveness import AnswerLimit
from coordinator.round_events import Phase
from coordinator.summary import summary_of
from fedmq.audit.log_checks import audit_run
from fedmq.evaluation.program import Evaluator
from fedmq.runs.resume import lacks_evaluation
from fedmq.runs.run_records import RunSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.payloads import Metrics, Payload
from tests import in_process_run
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE


class Silent:
    """An evaluator that answers this many requests and then none until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
        self.released, self.left = threading.Event(), answers
        answer = Evaluator.evaluate

        def answering(evaluator: Evaluator, payloads: Sequence[Payload]) -> Metrics:
            self.left -= 1
            if self.left < 0:
                assert self.released.wait(PATIENCE)
            return answer(evaluator, payloads)

        def summary_then_released(*arguments: Any) -> RunSummary:
            made = summary_of(*arguments)
            self.released.set()  # so that the evaluator's thread ends
            return made

        monkeypatch.setattr(Evaluator, "evaluate", answering)
        monkeypatch.setattr("coordinator.summary.summary_of", summary_then_released)
        monkeypatch.setattr(AnswerLimit, "limit", 0.5)


def evaluated(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["version"] for line in lines if line["kind"] == "evaluation"]


@pytest.mark.slow
def test_a_run_ends_without_an_evaluator_that_never_answers_and_a_resumed_run_is_evaluated(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = resolved(tiny)
    with monkeypatch.context() as patched:
        Silent(patched, answers=1)
        ended = run(scenario, tmp_path)
    assert ended.phase is Phase.DONE and ended.summary is not None
    assert evaluated(tmp_path) == [0]
    assert ended.summary.unevaluated == (2, 4)
    assert ended.summary.metrics, "the metrics of version 0"
    assert in_process_run.notes(tmp_path, LogEvent.EVALUATOR_ABSENT)
    assert "so the result is not evaluated" in (tmp_path / "report.html").read_text()
    assert not audit_run(tmp_path).findings

    assert lacks_evaluation(RunFolder(tmp_path))  # so the command and fedmq.resume take it, though it is finished
    again = run(scenario, tmp_path, resume=True)
    assert not lacks_evaluation(RunFolder(tmp_path))
    assert again.summary is not None and again.summary.model_digest == ended.summary.model_digest
    assert evaluated(tmp_path) == [0, 2, 4]
    assert again.summary.unevaluated == ()
    assert again.summary.metrics != ended.summary.metrics
    assert not audit_run(tmp_path).findings


@pytest.mark.slow
def test_rounds_continue_without_an_evaluator_that_stops_answering_and_it_is_sent_the_last_version(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = UNDER_WAY + 4
    scenario = resolved(tiny, f"rounds={rounds}", "protocol=fedavg", "evaluation.every=1")
    Silent(monkeypatch, answers=0)
    ended = run(scenario, tmp_path)
    assert ended.phase is Phase.DONE and ended.summary is not None
    assert ended.summary.unevaluated == tuple(range(rounds + 1))
    assert ended.summary.versions == rounds and not ended.summary.metrics
    assert not audit_run(tmp_path).findings


def test_the_limit_counts_from_the_last_answer_or_connection_and_follows_the_longest_evaluation() -> None:
    limit = AnswerLimit(None)
    assert not limit.exceed(10_000.0), "nothing is requested"
    limit.requested(0.0)
    limit.requested(50.0)
    assert limit.seconds(90.0) == 90.0 and limit.is_slow(90.0) and not limit.is_slow(20.0)
    limit.answered(100.0, more=True)
    assert limit.limit == 1000.0 and limit.seconds(130.0) == 30.0
    limit.disconnected(900.0)
    limit.connected(1000.0)
    assert not limit.exceed(1999.0) and limit.exceed(2001.0) and limit.exceeded
    limit.answered(2002.0, more=False)
    assert not limit.exceeded and limit.seconds(9000.0) == 0.0
    given = AnswerLimit(5.0)
    given.requested(0.0)
    assert given.limit == 5.0 and given.exceed(6.0)
