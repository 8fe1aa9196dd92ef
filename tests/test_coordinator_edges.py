"""Edge cases that whole runs rarely reach: the last fold, the order of checkpoint writes, a silo that stays off."""

from __future__ import annotations

import math
import types
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from coordinator import checkpoints
from coordinator.counters import Counters
from coordinator.events import Failed, RoundsRecord, Send
from coordinator.faults import FaultInjector, ProcessCommand
from coordinator.loop import Loop
from coordinator.participation import Sampling, Trace
from coordinator.peers import InProcessPeers
from coordinator.rounds import Phase
from coordinator.timeline import EntryKind, Timeline
from coordinator.updates import TaskErrors
from fedmq.audit import policy
from fedmq.audit.log_checks import audit_run
from fedmq.clock import VirtualClock, WallClock
from fedmq.config.faults import AnyFault
from fedmq.data import partition
from fedmq.evaluation import recall
from fedmq.evaluation.gallery_ranking import Embedded
from fedmq.evaluation.metrics import fold_recalls
from fedmq.federation.faults import FaultSchedule, TaskOutcome, outcome_after
from fedmq.federation.population import build_population
from fedmq.federation.protocol import SiloFacts, State
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Delta
from silos.tasks import Silo
from tests import in_process_run
from tests.threaded_run import resolved

IID = ("partition={kind: iid}",)
FOUR = tuple(SiloFacts(f"silo-{index:02d}", index, True, True) for index in range(4))


# -------------------------------------------------------------------------------------------------- data and figures
def test_fold_recalls_include_the_last_full_fold_and_exclude_the_remainder() -> None:
    # The captions of the first two items are swapped, those of the next two are right, and one item is left over.
    image = np.eye(5, dtype=np.float32)
    items = Embedded(image, image[[1, 0, 2, 3, 4]], np.arange(5))
    assert fold_recalls(items, 2)["fold_i2t_r1"] == pytest.approx(
        np.mean([recall.recalls(*parts)["i2t_r1"] for parts in ((image[:2], image[[1, 0]], np.arange(2)),)]) / 2
        + np.mean([recall.recalls(*parts)["i2t_r1"] for parts in ((image[2:4], image[2:4], np.arange(2)),)]) / 2
    )
    assert fold_recalls(items.subset(np.arange(4)), 2) == fold_recalls(items, 2)


def test_public_items_are_not_in_the_retrieval_database(features: Path, tiny: Path, tmp_path: Path) -> None:
    with np.load(features) as given:
        arrays = dict(given)
    arrays["split"] = arrays["split"].astype("U8")
    arrays["split"][:20] = "public"
    np.savez(tmp_path / "public.npz", **arrays)
    population = build_population(
        resolved(tiny, f"data.path={tmp_path / 'public.npz'}", *IID), cache=tmp_path / "cache"
    )
    apart = {*population.prepared.rows("public").tolist(), *population.evaluated.tolist()}
    assert len(population.prepared.rows("public")) == 20
    assert not apart & {*population.database.tolist()}
    assert len(population.database) + len(apart) == 150


def test_a_balanced_partition_is_redrawn_until_every_silo_has_enough_samples() -> None:
    differ = 0
    for seed in range(20):
        sizes, generator = np.array([40, 40, 40, 40]), np.random.default_rng(seed)
        draws = [partition.class_proportions(4, 4, 0.5, generator) for _ in range(30)]
        least = [int(partition.split_counts_balanced(sizes, each).sum(axis=0).min()) for each in draws]
        place = next(place for place, each in enumerate(least) if each >= partition.LEAST_BALANCED)
        found = partition.until_balanced(sizes, draws[0], 0.5, generator_after_first_draw(seed))
        assert np.array_equal(found, draws[place])
        differ += int(partition.split_counts(sizes, found).sum(axis=0).min()) < partition.LEAST_BALANCED
    assert differ  # with split_counts instead, some draws would have been repeated


def generator_after_first_draw(seed: int) -> np.random.Generator:
    """A generator in its state after the first draw of class proportions."""
    generator = np.random.default_rng(seed)
    partition.class_proportions(4, 4, 0.5, generator)
    return generator


# --------------------------------------------------------------------------------------------------------- checkpoints
def test_a_checkpoint_is_renamed_after_its_files_are_synced_and_before_its_parent_folder_is(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    states = {1: State(torch.zeros(3)), 2: State(torch.ones(3), {"a": torch.ones(1)})}
    rounds = RoundsRecord(version=2, gone=[], pending={}, sequences={}, losses={})

    def to_disk(path: Path) -> None:
        seen.append((path.name, any(tmp_path.glob("version-*/checkpoint.json"))))

    made = checkpoints.save(tmp_path, checkpoints.Checkpoint(rounds, states, 0.0, {}, Counters().to_record()), to_disk)
    files = sorted(path.name for path in made.iterdir())
    assert len(files) == 3
    assert sorted(name for name, _ in seen[:-1]) == files
    assert not any(there for _, there in seen[:-1])
    assert seen[-1] == (tmp_path.name, True)


def test_a_silo_may_delete_only_states_settled_by_the_second_newest_checkpoint(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed_by_task, real = dict[tuple[str, int], int](), Silo.answer

    def watched(silo: Silo, message: Message) -> object:
        assert message.task is not None
        committed_by_task[silo.facts.name, message.header.sequence] = message.task.settled
        return real(silo, message)

    monkeypatch.setattr(Silo, "answer", watched)
    in_process_run.run(resolved(tiny, "protocol=fedavg", "participation=1.0", "evaluation.every=0", *IID), tmp_path)
    assert {sequence for _, sequence in committed_by_task} == {1, 2, 3, 4}
    assert all(settled == max(0, sequence - 2) for (_, sequence), settled in committed_by_task.items())


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


def test_errors_before_a_merge_with_a_reply_are_cleared() -> None:
    errors = TaskErrors({}, {})
    errors.reported("silo-00", "no")
    errors.task_failed("silo-00")
    assert errors.first == "silo-00: no"
    errors.clear()
    errors.silo_failed("silo-01", "never")
    assert errors.first == "silo-01: never"
    assert errors.of_all(["silo-00", "silo-01"]) is None


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
def test_the_task_of_a_silo_that_stays_off_is_lost_when_it_goes_off_even_in_wait_mode() -> None:
    trace = Trace({"silo-00": ((0.0, 5.0),)})
    assert trace.outcome_at("silo-00", 1.0, 9.0, wait=True) == 5.0
    assert trace.outcome_at("silo-00", 1.0, 4.0, wait=True) == 4.0
    assert Trace({"silo-00": ((0.0, 5.0), (20.0, 30.0))}).outcome_at("silo-00", 1.0, 9.0, wait=True) == 20.0
    assert math.isfinite(trace.outcome_at("silo-00", 1.0, 9.0, wait=False))


def test_power_of_choice_with_fewer_candidates_than_the_cohort_selects_a_full_cohort() -> None:
    free = tuple(silo.name for silo in FOUR)
    assert len(Sampling({}, candidates=1).choose(0, 0, free, 3, {})) == 3
    losses = dict(zip(free, (1.0, 4.0, 2.0, 3.0), strict=True))
    assert Sampling({}, candidates=4).choose(0, 0, free, 2, losses) == ("silo-01", "silo-03")


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


def test_a_fault_share_too_small_for_one_silo_hits_one_silo() -> None:
    small = script({"kind": "split", "time": [0, 5], "silos": "all", "share": 0.01})
    struck = [silo.name for silo in FOUR if small.outcome(silo.name, 1, 0, 1.0, 1.0)[1]]
    assert len(struck) == 1


def test_a_failed_task_is_hit_by_no_further_fault() -> None:
    windows = ({"kind": "split", "time": [0, 5], "noticed": 3}, {"kind": "split", "time": [0, 50], "noticed": 30})
    task_outcome, struck = script(*windows).outcome("silo-00", 1, 0, 1.0, 1.0)
    assert (task_outcome.fails, task_outcome.due, task_outcome.sent) == ("unreachable", 4.0, False)
    assert [strike.place for strike in struck] == [0]


@pytest.mark.parametrize(("until", "due"), [(5.0, 10.0), (10.0, 10.0), (15.0, 15.0)])
def test_a_network_split_delays_a_reply_only_if_it_lasts_until_the_reply_is_due(until: float, due: float) -> None:
    (split,) = script({"kind": "split", "time": [2, until]}).faults
    assert outcome_after(split, TaskOutcome(0.0, 10.0, 10.0), 0.0).due == due  # type: ignore[union-attr,arg-type]


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
