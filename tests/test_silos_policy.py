"""A silo's own policy and its schedule: what they forbid is stopped before it is sealed, and both logs say so."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.round_events import Phase
from coordinator.sessions import Roster
from fedmq.audit.log_checks import audit_run
from fedmq.audit.policy import Policy, PolicyGuard, check_policy, guard_of, read_policy
from fedmq.cli import main as cli
from fedmq.clock import WallClock
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import Traits
from fedmq.wire.channel import Channel
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import MessageRecord, NoteRecord, RefusedRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import CARRIES, COORDINATOR, Header, Kind, Message, Reason, TaskInfo
from fedmq.wire.payloads import PAYLOADS, Error, Loss, Model, Payload, Refusal, tensor_bytes
from fedmq.wire.transports.registry import listen
from silos.program import AgreedSchedule, run_silo
from silos.tasks import Silo, SiloArguments
from tests import threaded_run
from tests.threaded_run import resolved, run_of
from tests.waiting import memory_uri, wait_for
from tools.make_golden_frames import golden_messages

SILO, RUN = "silo-00", "policy-0123456789ab"
#: One payload of each kind that a silo can send.
SAMPLES: dict[str, Payload] = {
    payload.KIND: payload for message in golden_messages().values() for payload in message.payloads
}
#: Message in which a silo sends each kind of payload; kinds that only the coordinator sends are left out.
SENT_IN = {
    kind: message for message in (Kind.ERROR, Kind.STATEMENT, Kind.SILO_RESULT, Kind.REPLY) for kind in CARRIES[message]
}
FORBIDDABLE = sorted(SENT_IN.keys() - {Refusal.KIND})


@contextmanager
def coordinator_of(tmp_path: Path, forbidden: PolicyGuard) -> Iterator[tuple[Channel, list[Message]]]:
    """The channel of a silo with a policy, and what its coordinator receives."""
    keys, uri, over = tmp_path / "keys", memory_uri(), threading.Event()
    init_keys(keys, (COORDINATOR, SILO))
    clock, arrived, accepted = WallClock(), list[Message](), load_accepted(keys)
    listener = listen(uri)
    with MessageLog(tmp_path / "messages" / f"{COORDINATOR}.jsonl", COORDINATOR, clock) as log:
        roster = Roster(listener, load_identity(keys, COORDINATOR), accepted, RUN, log, clock, max_body=1 << 20)

        def serve() -> None:
            while not over.is_set():
                got = listener.receive(0.05)
                taken = None if got is None else roster.take(*got)
                if isinstance(taken, Message):
                    arrived.append(taken)

        thread = threading.Thread(target=serve)
        own = MessageLog(tmp_path / "messages" / f"{SILO}.jsonl", SILO, clock)
        identity = load_identity(keys, SILO)
        link = Channel(uri, identity, accepted, RUN, own, clock, now=lambda: 0.0, forbidden=forbidden)
        thread.start()
        link.start()
        try:
            yield link, arrived
        finally:
            link.close()
            over.set()
            thread.join()
            listener.close()


def guard(**up: object) -> PolicyGuard:
    return PolicyGuard(Policy.model_validate({"up": up}), SILO)


def rules(kind: str) -> dict[str, dict[str, object]]:
    """Policies that forbid a payload kind, one of its fields, or its size."""
    allowed = [each for each in FORBIDDABLE if each != kind]
    found: dict[str, dict[str, object]] = {
        "kinds": {"kinds": allowed},
        "fields": {"fields": {kind: list(PAYLOADS[kind].FIELDS)[1:]}},
        "bytes_per_message": {"bytes_per_message_with": {kind: 40}},
    }
    if size := tensor_bytes(SAMPLES[kind]):
        found["bytes_per_payload"] = {"bytes_per_payload": {kind: size - 1}}
    return found


def planted(kind: str, rule: str) -> tuple[Payload, ...]:
    """The payloads of a message with one that a rule forbids."""
    payload = SAMPLES[kind]
    if rule == "fields" and getattr(payload, next(iter(PAYLOADS[kind].FIELDS))) is None:
        payload = replace(payload, mask=3)  # the golden payload leaves the field empty
    alone = kind == Loss.KIND or (kind != Error.KIND and SENT_IN[kind] is not Kind.REPLY)
    return (payload,) if alone or kind == Error.KIND else (Loss(0.5), payload)


def test_every_payload_can_be_forbidden_by_every_rule() -> None:
    for kind in FORBIDDABLE:
        for rule, up in rules(kind).items():
            header = replace(golden_messages()["reply-loss"].header, kind=SENT_IN[kind])
            refusal = guard(**up)(Message(header, planted(kind, rule)), 1000)
            assert refusal is not None, (kind, rule)
            whole = SENT_IN[kind] if rule == "bytes_per_message" else kind
            assert (refusal.rule, refusal.withheld) == (rule, whole), (kind, rule)


@pytest.mark.parametrize("rule", ["kinds", "fields", "bytes_per_message", "bytes_per_payload"])
def test_a_forbidden_payload_is_stopped_at_the_silo(tmp_path: Path, rule: str) -> None:
    kind = "delta"
    payloads = planted(kind, rule)
    with coordinator_of(tmp_path, guard(**rules(kind)[rule])) as (link, arrived):
        message = SENT_IN[kind]
        link.send(message, payloads, sequence=7, reply_to=7, base_version=3)
        (answer,) = wait_for(lambda: arrived)
    assert answer.header.kind is Kind.ERROR and answer.header.reply_to == 7
    (refusal,) = answer.payloads
    assert isinstance(refusal, Refusal) and refusal.rule == rule
    whole = message if rule == "bytes_per_message" else kind
    assert refusal.withheld == whole
    sent = [each for _, each in read_log(tmp_path / "messages" / f"{SILO}.jsonl") if isinstance(each, MessageRecord)]
    assert [each.payloads for each in sent if each.header.kind is not Kind.HEARTBEAT] == [[("refusal", 0)]]
    notes = [each for _, each in read_log(tmp_path / "messages" / f"{SILO}.jsonl") if isinstance(each, NoteRecord)]
    assert [(note.event, note.facts["rule"], note.facts["withheld"]) for note in notes] == [
        (LogEvent.WITHHELD, rule, whole)
    ]


def test_bytes_in_all_counts_over_restarts(tmp_path: Path) -> None:
    message = golden_messages()["reply-delta"]
    policy, log = tmp_path / "policy.yaml", tmp_path / "silo-00.jsonl"
    policy.write_text("up: {bytes_in_all: 1000}\n")
    first = guard_of(policy, SILO, log)
    assert [first(message, 400) is None for _ in range(3)] == [True, True, False]
    with MessageLog(log, SILO, WallClock()) as written:
        written.message("sent", replace(message, header=replace(message.header, session=b"s" * 16)), "0" * 32, 800)
    again = guard_of(policy, SILO, log)
    refused = again(message, 400)
    assert refused is not None and (refused.rule, refused.withheld) == ("bytes_in_all", "reply")
    assert again(message, 100) is None


def test_heartbeats_and_refusals_may_always_leave() -> None:
    nothing = guard(kinds=[], bytes_per_message=1, bytes_in_all=0)
    assert nothing(golden_messages()["heartbeat"], 300) is None
    assert nothing(golden_messages()["refusal"], 300) is None
    assert nothing(golden_messages()["reply-loss"], 300) is not None


@pytest.mark.parametrize(
    ("text", "place"),
    [("peers: [coordinator, silo-01]", "peers"), ("up: {fields: {delta: [samples]}}", "delta has no field samples")],
)
def test_a_policy_with_which_its_silo_could_not_join_is_refused(tmp_path: Path, text: str, place: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"{text}\n")
    with pytest.raises(InputError, match=place):
        guard_of(policy, SILO, tmp_path / "none.jsonl")


@pytest.mark.slow
def test_a_run_continues_without_the_replies_that_a_silo_withholds(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # silo-00 was tampered with: it adds a figure to each reply that its policy does not allow.
    planted, respond = SAMPLES["label_count"], Silo.respond

    def tampered(silo: Silo, message: Message) -> tuple[Payload, ...]:
        return (*respond(silo, message), *([planted] if silo.facts.name == SILO else []))

    monkeypatch.setattr(Silo, "respond", tampered)
    policy, out = tmp_path / "policy.yaml", tmp_path / "run"
    policy.write_text("up: {kinds: [data_statement, delta, partial_delta, modality_prototypes, geometry, loss]}\n")
    scenario = resolved(tiny, "rounds=2", "participation=1.0", "clock=wall")

    def guarded(uri: str, keys: Path) -> None:
        run_silo(SiloArguments(run_of(scenario), SILO, uri, keys, out, policy=policy))

    others = scenario.silo_names[1:]
    result = threaded_run.run(scenario, out, silos=others, others=[guarded])
    assert result.phase is Phase.DONE and result.summary is not None
    assert result.summary.per_silo[SILO].participations == 0
    assert all(result.summary.per_silo[name].participations for name in others)
    audit = audit_run(out)
    assert audit.findings == []
    assert "label_count" not in audit.payloads.number[SILO] and audit.payloads.number[SILO]["refusal"] >= 1
    reported = [each for _, each in read_log(out / "messages" / "coordinator.jsonl") if isinstance(each, NoteRecord)]
    failed = {note.facts["reason"] for note in reported if note.event is LogEvent.TASK_FAILED}
    errors = {note.facts["error"] for note in reported if note.event is LogEvent.ERROR_REPORTED}
    assert failed == {"policy"} and errors == {"its policy forbids label_count (kinds)"}
    # What left complies with the policy, by the logs of both ends.
    assert check_policy(audit, read_policy(policy), policy).findings == []
    done = CliRunner().invoke(cli.app, ["audit", str(out), "--policy", str(policy), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["policy"]["ok"]


# -------------------------------------------------------------------------------------- requests outside the schedule
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


def test_what_a_run_needs_is_answered_and_so_is_the_same_request_again_also_after_a_restart(
    silo: AgreedSchedule, tmp_path: Path
) -> None:
    schedule = [request(Kind.EVALUATE_SILO, 0), request(Kind.TASK, 0), request(Kind.TASK, 2, sequence=2)]
    for each in [*schedule, *schedule, request(Kind.EVALUATE_SILO, ROUNDS), request(Kind.TASK, 1, sequence=2)]:
        silo.check(each)
        header = replace(each.header, run=run_of(resolved(tmp_path / "own.yaml")).id, session=bytes(16))
        silo._log.message("received", replace(each, header=header), "00" * 16, 0)
    again = AgreedSchedule(run_of(resolved(tmp_path / "own.yaml")), Traits(), silo._log)
    assert silo.tasks == again.tasks == 3, "of three versions, whatever their numbers are"


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
