"""A silo's own policy: what it forbids is stopped before it is sealed, both logs say so, and the run continues."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.rounds import Phase
from coordinator.sessions import Roster
from fedmq.audit.log_checks import audit_run
from fedmq.audit.policy import Policy, PolicyGuard, check_policy, guard_of, read_policy
from fedmq.cli import main as cli
from fedmq.clock import WallClock
from fedmq.errors import InputError
from fedmq.wire.channel import Channel
from fedmq.wire.keys import init_keys, load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import MessageRecord, NoteRecord, read_log
from fedmq.wire.message_log import MessageLog
from fedmq.wire.messages import CARRIES, COORDINATOR, Kind, Message
from fedmq.wire.payloads import PAYLOADS, Error, Loss, Payload, Refusal, tensor_bytes
from fedmq.wire.transports.registry import listen
from silos.program import run_silo
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
    [
        ("peers: [coordinator, silo-01]", "peers"),
        ("up: {fields: {delta: [samples]}}", "delta has no field samples"),
    ],
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
    assert "label_count" not in audit.sent[SILO] and audit.sent[SILO]["refusal"] >= 1
    reported = [each for _, each in read_log(out / "messages" / "coordinator.jsonl") if isinstance(each, NoteRecord)]
    failed = {note.facts["reason"] for note in reported if note.event is LogEvent.TASK_FAILED}
    errors = {note.facts["error"] for note in reported if note.event is LogEvent.ERROR_REPORTED}
    assert failed == {"policy"} and errors == {"its policy forbids label_count (kinds)"}
    # What left complies with the policy, by the logs of both ends.
    assert check_policy(audit, read_policy(policy), policy).findings == []
    done = CliRunner().invoke(cli.app, ["audit", str(out), "--policy", str(policy), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["policy"]["ok"]
