"""Edge cases that whole runs rarely reach: the last fold, the order of checkpoint writes, a silo that stays off."""

from __future__ import annotations

import os
import threading
import types
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from coordinator import checkpoints
from coordinator.checkpoints import Checkpointing
from coordinator.faults import FaultInjector, ProcessCommand
from coordinator.loop import Loop
from coordinator.participation import Sampling, Trace
from coordinator.peers import InProcessPeers
from coordinator.round_events import Failed, Phase, Send
from coordinator.timeline import EntryKind, Timeline
from fedmq.audit import policy
from fedmq.audit.log_checks import audit_run
from fedmq.clock import VirtualClock, WallClock
from fedmq.config.faults import AnyFault
from fedmq.federation.faults import FaultSchedule
from fedmq.federation.protocol import SiloFacts
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta
from silos.tasks import Silo
from tests import in_process_run
from tests.threaded_run import resolved

IID = ("partition={kind: iid}",)
FOUR = tuple(SiloFacts(f"silo-{index:02d}", index, True, True) for index in range(4))


# --------------------------------------------------------------------------------------------------------- checkpoints
def test_a_silo_may_delete_only_states_committed_by_the_second_newest_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed_by_task, real = dict[tuple[str, int], int](), Silo.answer

    def watched(silo: Silo, message: Message) -> object:
        assert message.task is not None
        committed_by_task[silo.facts.name, message.header.sequence] = message.task.committed
        return real(silo, message)

    monkeypatch.setattr(Silo, "answer", watched)
    in_process_run.run(resolved(tiny, "protocol=fedavg", "participation=1.0", "evaluation.every=0", *IID), tmp_path)
    assert {sequence for _, sequence in committed_by_task} == {1, 2, 3, 4}
    assert all(committed == max(0, sequence - 2) for (_, sequence), committed in committed_by_task.items())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_with_rare_checkpoints_has_its_last_merge_when_it_stops_and_repeats_merges_when_it_is_killed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    settings = ("protocol={name: fedper}", "rounds=8", f"aggregation.mode={mode}", *IID)
    scenario, out = resolved(tiny, *settings), tmp_path / "run"
    whole = in_process_run.run(scenario, tmp_path / "whole").summary

    def stopped_after(merges: int, **arguments: Any) -> int:
        tasks_begun = iter(range(2))

        def enough() -> bool:
            """Silos have done tasks of the next round, but it is not merged."""
            return len(in_process_run.lines(out, "merge")) >= merges and next(tasks_begun, None) is None

        in_process_run.run(scenario, out, stop_wanted=enough, checkpoint_seconds=1e9, **arguments)
        saved = checkpoints.load(RunFolder(out).checkpoints)
        assert saved is not None
        return saved.rounds.version - len(in_process_run.lines(out, "merge"))

    assert stopped_after(3) == 0
    with monkeypatch.context() as killed:
        killed.setattr(Checkpointing, "write", lambda _: None)
        assert stopped_after(6, resume=True) < -1
    assert max(Counter(path.parent for path in out.rglob("task-*.safetensors")).values()) <= 2
    again = in_process_run.run(scenario, out, resume=True, checkpoint_seconds=1e9).summary
    assert whole is not None and again is not None and again.model_digest == whole.model_digest
    assert again.personal == whole.personal


def test_states_under_evaluation_are_kept_although_no_pending_task_needs_them(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, save, receive = dict[int, set[int]](), checkpoints.save, InProcessPeers.receive

    def watched(folder: Path, record: checkpoints.Checkpoint, disk: Callable[[Path], None]) -> Path:
        kept[record.rounds.version] = {*record.states}
        return save(folder, record, disk)

    def slow(peers: InProcessPeers, timeout_s: float | None = None) -> object:
        """Deliver no evaluation request before the last merge."""
        waits = [item for item in peers.queue if isinstance(item, Message) and item.header.kind is Kind.EVALUATE]
        if 4 in kept or not waits:
            return receive(peers, timeout_s)
        peers.queue = deque(item for item in peers.queue if all(item is not each for each in waits))
        taken = receive(peers, timeout_s)
        peers.queue.extend(waits)
        return taken

    monkeypatch.setattr(checkpoints, "save", watched)
    monkeypatch.setattr(InProcessPeers, "receive", slow)
    in_process_run.run(resolved(tiny, "protocol=fedavg", "participation=1.0", "evaluation.every=1", *IID), tmp_path)
    assert kept == {1: {0, 1}, 2: {0, 1, 2}, 3: {0, 1, 2, 3}, 4: {0, 1, 2, 3, 4}}
    assert [line["version"] for line in in_process_run.lines(tmp_path, "evaluation")] == [0, 1, 2, 3, 4]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_silos_of_one_process_train_at_the_same_time_with_the_result_of_one_after_the_other(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    real, together, found = Silo.answer, threading.Barrier(2, timeout=20), list[object]()

    def met(silo: Silo, message: Message) -> object:
        if message.task is not None and message.task.round == 0 and silo.facts.name in {"silo-00", "silo-01"}:
            together.wait()  # passes only once both train
        return real(silo, message)

    for slots in (1, 2):
        if slots == 2:
            monkeypatch.setattr(Silo, "answer", met)
        settings = ("protocol={name: fedper}", f"aggregation.mode={mode}", f"silos.slots={slots}", *IID)
        out = tmp_path / str(slots)
        summary = in_process_run.run(resolved(tiny, "participation=1.0", *settings), out).summary
        assert summary is not None
        found.append((summary.model_digest, summary.personal, in_process_run.lines(out, "merge")))
    assert found[0] == found[1]


# -------------------------------------------------------------------------------------------------------------- policy
def test_bytes_in_all_are_counted_separately_for_uploads_and_downloads(tmp_path: Path) -> None:
    def message(counter: int, kind: Kind, ends: tuple[str, str]) -> Message:
        facts = {"sender": ends[0], "receiver": ends[1], "session": b"s" * 16, "counter": counter}
        header = Header(run="r", kind=kind, sequence=counter, reply_to=counter, sent_at=1.5, **facts)  # type: ignore[arg-type]
        return Message(header, (Delta("0" * 64, np.zeros(5, np.float32), 3),))

    ends = ("silo-00", "coordinator")
    sent = [("up", message(1, Kind.REPLY, ends)), ("down", message(1, Kind.REPLY, ends[::-1]))]
    for process, own in (("silo-00", "up"), ("coordinator", "down")):
        with MessageLog(tmp_path / "messages" / f"{process}.jsonl", process, WallClock()) as log:
            for way, each in sent:
                log.message("sent" if way == own else "received", each, f"{len(way):032x}", 100)
    path = tmp_path / "policy.yaml"
    for most, broken in ((100, 0), (99, 2)):
        path.write_text(f"up: {{bytes_in_all: {most}}}\ndown: {{bytes_in_all: {most}}}\n")
        found = policy.check_policy(audit_run(tmp_path), policy.read_policy(path), path)
        assert found.checked == 2
        assert sorted((each.way, each.bytes) for each in found.breaches) == [("down", 100), ("up", 100)][:broken]


# ------------------------------------------------------------------------------------------------- sampling and time
@pytest.mark.parametrize("count", [1, 2])
def test_power_of_choice_draws_twice_the_cohort_as_candidates_by_default(count: int) -> None:
    free = tuple(silo.name for silo in FOUR)
    losses = dict(zip(free, (1.0, 4.0, 2.0, 3.0), strict=True))
    selected = Counter[str]()
    for version in range(200):
        selected.update(Sampling({}, candidates=0).choose(0, version, free, count, losses))
    # With a cohort of one, the silo with the higher loss of two candidates is selected: the lowest loss never wins.
    assert (selected["silo-00"] == 0) == (count == 1 or sum(selected.values()) == 400)
    assert (selected["silo-02"] > 0) == (count == 1)


@pytest.mark.parametrize("phase", [Phase.GATHERING, Phase.COLLECTING, Phase.MERGING])
def test_a_leave_fault_stops_the_process_only_while_replies_are_collected(tmp_path: Path, phase: Phase) -> None:
    orders, failed = list[ProcessCommand](), list[Failed]()
    log: Any = types.SimpleNamespace(note=lambda *_, **__: None)
    clock = VirtualClock(1.0)
    away = script({"kind": "leave", "silos": ["silo-00"], "time": [0, 99]})
    loop: Any = types.SimpleNamespace(
        sums=None,
        fault_injector=FaultInjector(away, RunFolder(tmp_path), log, clock, order=orders.append, wired=True, issued={}),
        run_context=types.SimpleNamespace(
            facts_at=lambda name, version: FOUR[0],
            cost=types.SimpleNamespace(duration=lambda *_: 1.0),
            samples=(1,),
            protocol=types.SimpleNamespace(eligible=lambda silo: True),
            trace=Trace(),
            outcome_at=lambda name, outcome: outcome.due,
        ),
        rounds=types.SimpleNamespace(phase=phase),
        clock=clock,
        _outcomes=types.SimpleNamespace(expect=lambda *_: 5.0, get=lambda *_: None),
        _fail=lambda outcome, after: failed.append(outcome),
    )
    Loop._send(loop, Send("silo-00", 1, 0, 0))
    assert [each.reason for each in failed] == ["away"], "the task fails in either case"
    assert [order.what for order in orders] == (["stop"] if phase is Phase.COLLECTING else [])


def script(*faults: dict[str, object]) -> FaultSchedule:
    return FaultSchedule(tuple(TypeAdapter(AnyFault).validate_python(each) for each in faults), 0, FOUR)


def test_at_one_instant_silos_switch_before_replies_arrive_and_replies_before_the_deadline() -> None:
    timeline = Timeline()
    timeline.deadline(5.0, 0, None)
    timeline.arrival(5.0, 3, "silo-03", 1)
    timeline.next_switch(Trace({"silo-03": ((0.0, 5.0),)}), 0.0, 3, "silo-03")
    timeline.arrival(5.0, 1, "silo-01", 1)
    found = [timeline.pop() for _ in range(4)]
    assert [(each.kind, each.silo) for each in found] == [
        (EntryKind.SWITCH, "silo-03"),
        (EntryKind.ARRIVAL, "silo-01"),
        (EntryKind.ARRIVAL, "silo-03"),
        (EntryKind.DEADLINE, ""),
    ]
