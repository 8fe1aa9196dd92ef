"""A silo answers what its scenario schedules; the rest is refused, and both logs say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.sessions import Roster
from fedmq.audit.log_checks import audit_run
from fedmq.clock import WallClock
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Traits
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import COORDINATOR, Header, Kind, Message, Reason, TaskInfo
from fedmq.wire.payloads import Model
from silos.schedule import AgreedSchedule
from tests import threaded_run
from tests.threaded_run import resolved, run_of

ROUNDS = 3
SCENARIO = f"""
name: own
rounds: {ROUNDS}
protocol: fedavg
backbone: {{name: features}}
silos: {{count: 3}}
partition: {{kind: own}}
training: {{learning_rate: 0.1, warmup_rounds: 0, schedule: step, step_rounds: 1, step_factor: 0.5}}
evaluation: {{every: 0}}
"""


def request(kind: Kind, version: int, *, model: float = 0.0, sequence: int = 1, **task: float) -> Message:
    facts = {"round": version, "rounds": ROUNDS, "committed": 0, "learning_rate": 0.1 * 0.5 ** min(version, 9), **task}
    header = Header(
        run="any", kind=kind, sender=COORDINATOR, receiver="silo-00", sequence=sequence, sent_at=0, base_version=version
    )
    payloads = (Model("0" * 64, np.full(3, model + version, np.float32)),)
    return Message(header, payloads, TaskInfo(**facts) if kind is Kind.TASK else None)  # type: ignore[arg-type]


TASK = request(Kind.TASK, 0)
#: What a silo is asked, the last of which it refuses; and why.
REFUSED = {
    "a round after the last": ([request(Kind.TASK, 3)], "the scenario has 3 rounds"),
    "a round far away": ([request(Kind.TASK, 10**9)], "the scenario has 3 rounds"),
    "another round than the version's": ([request(Kind.TASK, 1, round=0)], "each with the version of its number"),
    "more rounds": ([request(Kind.TASK, 0, rounds=9)], "the scenario has 3 rounds"),
    "a higher rate": ([request(Kind.TASK, 0, learning_rate=0.2)], "in round 0 it is 0.1"),
    "a rate that underflows": ([request(Kind.TASK, 0, learning_rate=1e-300)], "in round 0 it is 0.1"),
    "the same task with another model": ([TASK, request(Kind.TASK, 0, model=9)], "the silo answers one"),
    "a second task of a round": ([TASK, replace(TASK, header=replace(TASK.header, sequence=2))], "at most one task"),
    "an earlier round again": ([request(Kind.TASK, 2, sequence=s) for s in (1, 2)], "the silo answers one"),
    "a personal evaluation": ([request(Kind.EVALUATE, 0)], "fedavg has none of"),
    "an evaluation at another time": ([request(Kind.EVALUATE_SILO, 1)], "does not schedule"),
    "an evaluation of another model": ([TASK, request(Kind.EVALUATE_SILO, 0, model=9)], "was sent to train"),
    "many models": ([request(Kind.EVALUATE_SILO, 0, model=m) for m in range(10)], "than before"),
}


@pytest.fixture
def silo(tmp_path: Path) -> AgreedSchedule:
    path = tmp_path / "own.yaml"
    path.write_text(SCENARIO)
    log = MessageLog(tmp_path / "silo-00.jsonl", "silo-00", WallClock())
    return AgreedSchedule(run_of(resolved(path)), Traits(), log)


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_outside_the_schedule_is_refused_and_logged(silo: AgreedSchedule, tmp_path: Path, what: str) -> None:
    (*agreed, asked), why = REFUSED[what]
    for each in agreed:
        silo.check(each)
    with pytest.raises(RemoteWireError, match=why) as refused:
        silo.check(asked)
    assert refused.value.reason == Reason.UNSCHEDULED
    (record,) = (each for _, each in read_log(tmp_path / "silo-00.jsonl"))
    assert isinstance(record, RefusedRecord) and record.reason == Reason.UNSCHEDULED


def test_what_a_run_needs_is_answered_and_so_is_the_same_request_again(silo: AgreedSchedule) -> None:
    schedule = [request(Kind.EVALUATE_SILO, 0), request(Kind.TASK, 0), request(Kind.TASK, 2, sequence=2)]
    for each in [*schedule, *schedule, request(Kind.EVALUATE_SILO, ROUNDS), request(Kind.TASK, 1, sequence=2)]:
        silo.check(each)


def test_a_coordinator_with_another_rate_and_another_model_for_one_silo_is_found_by_the_silo_and_the_audit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = resolved(tiny, "protocol=fedavg", "missing_modality={}", "participation=1.0", "rounds=2")
    send = Roster.send

    def lying(roster: Roster, name: str, message: Message | Header) -> int:
        task = message.task if isinstance(message, Message) else None
        if isinstance(message, Message) and task is not None and name == "silo-01" and task.round == 0:
            message = replace(message, task=replace(task, learning_rate=1e-300))
        if isinstance(message, Message) and task is not None and name == "silo-02" and task.round == 0:
            zeros = (replace(p, buffer=np.zeros_like(p.buffer)) for p in message.payloads if isinstance(p, Model))
            message = replace(message, payloads=(*zeros, *(p for p in message.payloads if not isinstance(p, Model))))
        return send(roster, name, message)

    monkeypatch.setattr(Roster, "send", lying)
    summary = threaded_run.run(scenario, tmp_path).summary
    assert summary is not None
    assert [summary.per_silo[name].participations for name in ("silo-00", "silo-01", "silo-02")] == [2, 1, 2]
    refused = [each for _, each in read_log(tmp_path / "messages" / "silo-01.jsonl") if isinstance(each, RefusedRecord)]
    assert [(each.reason, each.peer) for each in refused] == [(Reason.UNSCHEDULED, COORDINATOR)]
    notes = [each for _, each in read_log(tmp_path / "messages" / "coordinator.jsonl") if isinstance(each, NoteRecord)]
    told = [str(each.facts["error"]) for each in notes if each.event is LogEvent.ERROR_REPORTED]
    assert len(told) == 1 and "unscheduled" in told[0] and "learning rate 1e-300" in told[0]
    found = [str(each.what) for each in audit_run(tmp_path).findings]
    assert len(found) == 1 and "silo-02 was sent another model of version 0 than silo-0" in found[0]
