"""A silo that cannot take part says so at its start, or the coordinator reports it with its last error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import coordinator.program
from coordinator.liveness import dismiss_all
from coordinator.peers import Peers
from fedmq.audit.log_checks import audit_run
from fedmq.audit.policy import check_policy, guard_of, kinds_needed, read_policy
from fedmq.clock import Clock
from fedmq.errors import DiskError, InputError, RunError
from fedmq.evaluation.program import EvaluatorArguments, run_evaluator
from fedmq.runs.status import SiloPhase, read_status
from fedmq.storage.logs import Logger
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.messages import COORDINATOR, Kind, Message
from fedmq.wire.payloads import Payload
from silos.program import run_silo
from silos.tasks import Silo, SiloArguments
from tests.own_data_threads import OwnRun

SHIPPED = Path(__file__).parent.parent / "docs" / "policies" / "own_sites.yaml"
NAMES = ("silo-00", "silo-01", "silo-02")


@pytest.fixture
def nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that stops does not wait a minute for processes that have died."""

    def dismissed(peers: Peers, names: Sequence[str], _: float, clock: Clock, log: Logger, *gone: Any) -> None:
        dismiss_all(peers, names, 0.0, clock, log, *gone)

    monkeypatch.setattr(coordinator.program, "dismiss_all", dismissed)


def notes(run: OwnRun) -> list[NoteRecord]:
    log = run.folder.messages(COORDINATOR)
    return [each for _, each in (read_log(log) if log.is_file() else ()) if isinstance(each, NoteRecord)]


def reported(run: OwnRun) -> dict[str, str]:
    """The errors that silos reported."""
    return {
        str(each.facts["peer"]): str(each.facts["error"])
        for each in notes(run)
        if each.event is LogEvent.ERROR_REPORTED
    }


def lost(run: OwnRun) -> set[object]:
    return {each.facts["peer"] for each in notes(run) if each.event is LogEvent.PEER_LOST}


@pytest.mark.parametrize(
    ("kinds", "missing"),
    [
        ("[data_statement, delta, loss]", "data_format, silo_modalities, silo_metrics"),
        ("[data_statement, data_format, silo_modalities, delta, loss]", "silo_metrics"),
        ("[delta]", "data_statement, data_format, silo_modalities, silo_metrics"),
    ],
)
def test_a_policy_without_a_kind_that_own_data_need_is_refused_at_the_start(
    tmp_path: Path, kinds: str, missing: str
) -> None:
    run, policy = OwnRun(tmp_path), tmp_path / "policy.yaml"
    policy.write_text(f"up: {{kinds: {kinds}}}\n")
    arguments = SiloArguments(run.run, "silo-00", run.uri, tmp_path / "keys", tmp_path / "run", policy=policy)
    with pytest.raises(
        InputError, match=f"policy.yaml: up.kinds: found 'a list without {missing}', allowed: "
    ) as caught:
        run_silo(arguments)
    assert "\n" not in str(caught.value)
    policy.write_text("up: {kinds: [delta]}\nsilos: {silo-00: {up: {kinds: []}}}\n")
    with pytest.raises(InputError, match=r"silos\.silo-00\.up\.kinds"):
        guard_of(policy, "silo-00", tmp_path / "none.jsonl", kinds_needed(run.scenario))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("bytes_per_message_with: {data_format: 10}", "its policy forbids statement (bytes_per_message)"),
        ("bytes_per_message_with: {silo_modalities: 10}", "its policy forbids statement (bytes_per_message)"),
        ("fields: {data_format: [mean]}", "its policy forbids data_format (fields)"),
    ],
)
@pytest.mark.usefixtures("nobody_is_waited_for")
def test_what_a_policy_withholds_at_the_handshake_is_reported_at_both_ends(tmp_path: Path, rule: str, why: str) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"up: {{{rule}}}\n")
    run = OwnRun(tmp_path, policies={"silo-02": policy})
    outcome = run.coordinate(
        listening=lambda: run.start(*NAMES),
        stop_wanted=lambda: run.ended.keys() == {"silo-02"} and bool(reported(run)) and all(map(run.stated, NAMES[:2])),
    )
    assert outcome.summary is None
    assert run.ended["silo-02"].startswith("policy: forbids: found '"), run.ended
    assert reported(run) == {"silo-02": why}
    assert "silo-02" in lost(run)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedavg", "rcsr"])
def test_a_run_of_sites_with_their_own_data_holds_the_shipped_policy(tmp_path: Path, protocol: str) -> None:
    run = OwnRun(tmp_path, more={"protocol": protocol}, policies=dict.fromkeys(NAMES, SHIPPED))
    outcome = run.coordinate(listening=lambda: run.start(*NAMES))
    assert outcome.summary is not None and outcome.summary.own_heldout is not None
    assert outcome.summary.own_heldout.metrics
    found = check_policy(audit_run(run.root / "run"), read_policy(SHIPPED), SHIPPED)
    assert (found.findings, found.free) == ([], 0) and found.checked > 20


@pytest.mark.slow
@pytest.mark.usefixtures("nobody_is_waited_for")
def test_a_silo_that_ends_with_an_error_after_it_joined_is_lost_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond = Silo.respond

    def full(silo: Silo, message: Message) -> tuple[Payload, ...]:
        if silo.facts.name == "silo-02" and message.header.kind is Kind.TASK:
            raise DiskError("/home/mia/run/state: the disk is full")
        return respond(silo, message)

    monkeypatch.setattr(Silo, "respond", full)
    run = OwnRun(tmp_path, more={"participation": 1.0, "clock": "wall"})
    run.coordinate(listening=lambda: run.start(*NAMES), stop_wanted=lambda: bool(lost(run)))
    assert reported(run)["silo-02"] == "the silo has ended: DiskError: state: the disk is full"
    assert "silo-02" in lost(run)
    status = read_status(run.folder.status)
    assert status.silos["silo-02"].error == "the silo has ended: DiskError: state: the disk is full"
    # Of a run that has stopped: no silo trains any more.
    assert status.phase == "stopped"
    assert [status.silos[name].phase for name in NAMES] == [SiloPhase.STOPPED, SiloPhase.STOPPED, SiloPhase.LOST]
    assert {each.task_seconds for each in status.silos.values()} == {None}
    shown = [each for each in run.statuses if each.lost]
    assert shown and all(each.lost + max(each.online, each.training) <= len(NAMES) for each in shown)


@pytest.mark.slow
def test_an_error_of_a_silo_is_shown_until_it_replies_to_a_later_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond, failed = Silo.respond, list[str]()

    def once(silo: Silo, message: Message) -> tuple[Payload, ...]:
        if message.header.kind is Kind.TASK and message.header.sequence == 1 and silo.facts.name != "silo-01":
            failed.append(silo.facts.name)
            raise RunError("the first task fails")
        return respond(silo, message)

    monkeypatch.setattr(Silo, "respond", once)
    run = OwnRun(tmp_path, more={"participation": 1.0})
    outcome = run.coordinate(listening=lambda: run.start(*NAMES))
    assert outcome.summary is not None and sorted(failed) == ["silo-00", "silo-02"] == sorted(reported(run))
    assert {each.error for each in read_status(run.folder.status).silos.values()} == {""}


def test_a_device_that_does_not_exist_is_refused_before_anything_is_written_or_sent(tmp_path: Path) -> None:
    run = OwnRun(tmp_path)
    where = (run.uri, tmp_path / "keys", tmp_path / "run", "cuda:99")
    with pytest.raises(InputError, match="device: found 'cuda:99', allowed: auto, cpu"):
        run_silo(SiloArguments(run.run, "silo-00", *where, site=run.site("silo-00")))
    with pytest.raises(InputError, match="device: found 'cuda:99', allowed: auto, cpu"):
        run_evaluator(EvaluatorArguments(run.run, *where))
    assert not (tmp_path / "run").exists()
