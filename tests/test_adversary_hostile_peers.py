"""Misbehaving peers with a valid key: the run continues, or ends with one line that says why it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.loop import Loop
from coordinator.round_events import Phase
from coordinator.updates import LARGEST, check_reply
from fedmq.config.scenario import Objective, Scenario
from fedmq.errors import RemoteWireError, RunError
from fedmq.federation.population import run_name
from fedmq.federation.protocol import MergeResult, Update
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import DiscriminatorDelta, Error, Loss, Metrics, Model
from fedmq.wire.sessions import Session, open_message, seal_message
from fedmq.wire.transports.base import Connection
from fedmq.wire.transports.registry import connect
from silos.tasks import Silo
from tests import in_process_run, threaded_run
from tests.small_federation import SmallFederation, population
from tests.threaded_run import resolved
from tests.waiting import PATIENCE, wait_for

HEADER = Header(
    run="run-0", kind=Kind.REPLY, sender="silo-00", receiver="coordinator", sequence=1, reply_to=1, sent_at=0.0
)


# ------------------------------------------------------------------------------------------------------ a silo's reply
def with_discriminator(reply: Update, **facts: Any) -> Update:
    payloads = tuple(replace(p, **facts) if isinstance(p, DiscriminatorDelta) else p for p in reply.payloads)
    return replace(reply, payloads=payloads)


def check(run: SmallFederation, reply: Update) -> None:
    uploads = run.protocol.uploads(reply.silo)
    check_reply(Message(HEADER, reply.payloads), uploads, run.context, reply.silo, samples=20)


def test_a_discriminator_update_is_checked_like_a_model_update() -> None:
    run = population("fedhap", objective=Objective(base="dcmh", bits=8, hidden=16))
    run.round()
    reply = run.replies()[0]
    check(run, reply)
    (change,) = [p for p in reply.payloads if isinstance(p, DiscriminatorDelta)]
    huge = np.full(change.buffer.size, 10 * LARGEST, np.float32)
    for facts, reason in (
        ({"n_samples": 0}, "malformed"),
        ({"n_samples": 2**62}, "malformed"),
        ({"buffer": huge}, "not_finite"),
    ):
        with pytest.raises(RemoteWireError) as refused:
            check(run, with_discriminator(reply, **facts))
        assert refused.value.reason == reason, facts


def test_a_non_finite_merged_model_ends_the_run_and_the_error_names_the_round(tiny: Path, tmp_path: Path) -> None:
    class Spoiling:
        def __init__(self, protocol: Any) -> None:
            self.protocol = protocol

        def merge(self, *arguments: Any) -> MergeResult:
            merged = self.protocol.merge(*arguments)
            tensors = {**merged.state.tensors, "spoiled": torch.tensor([0.0, torch.inf])}
            return MergeResult(replace(merged.state, tensors=tensors), merged.log)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.protocol, name)

    old = Loop.__post_init__

    def with_spoiling_protocol(loop: Loop) -> None:
        loop.run_context = replace(loop.run_context, protocol=Spoiling(loop.run_context.protocol))  # type: ignore[arg-type]
        old(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "__post_init__", with_spoiling_protocol)
        with pytest.raises(RunError, match="round 0: the merged model is no longer finite"):
            in_process_run.run(resolved(tiny), tmp_path)


def fail_every_task(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Make the named silos answer every task with an error whose text contains a terminal escape sequence."""
    respond = Silo.respond

    def answer(silo: Silo, message: Message) -> tuple[Any, ...]:
        if silo.facts.name in names:
            raise RemoteWireError("unexpected", "no, \x1b[2Jnever")
        return respond(silo, message)

    monkeypatch.setattr(Silo, "respond", answer)


def test_errors_of_a_silo_fail_its_tasks_but_not_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One silo per round: a round that selects silo-01 has no reply at all.
    scenario = resolved(tiny, "participation=0.25", "rounds=6")
    fail_every_task(monkeypatch, ["silo-01"])
    outcome = in_process_run.run(scenario, tmp_path)
    assert outcome.phase is Phase.DONE
    assert outcome.summary.per_silo["silo-01"].participations == 0
    assert outcome.summary.tasks.failed > 0


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        ((0, 1, 2, 3), ("participation=0.5", "rounds=1")),
        ((0, 1, 2), ("participation=1", "rounds=3", "faults=[{kind: leave, silos: [silo-03], rounds: 0-9}]")),
    ],
)
def test_a_run_of_any_length_without_a_merged_reply_ends_with_an_error(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Sequence[int], settings: Sequence[str]
) -> None:
    fail_every_task(monkeypatch, [f"silo-0{number}" for number in names])
    with pytest.raises(RunError, match=r"no silo could train in any round; .* silo-0\d: task \d+: .*never"):
        in_process_run.run(resolved(tiny, "evaluation.every=0", *settings), tmp_path)
    with pytest.raises(RunError, match=r"no silo could train in any round; .* silo-0\d: task \d+: .*never"):
        in_process_run.run(resolved(tiny, "evaluation.every=0", *settings), tmp_path, resume=True)
    assert not (tmp_path / "summary.json").exists()


# ------------------------------------------------------------------------------------------------- evaluation
#: A payload that the codec rejects, because its numbers are not finite.
UNREADABLE = Model("0" * 64, np.full(3, np.nan, np.float32))


def within(seconds: float = PATIENCE) -> Callable[[], bool]:
    """A stop condition that holds after ``seconds``, so that a run which hangs is stopped."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


@pytest.mark.parametrize("answer", [Metrics({}, {}), Loss(1.0), UNREADABLE])
def test_a_silo_with_an_invalid_measurement_is_left_out_of_the_personal_metrics(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    measure = Silo.measure
    monkeypatch.setattr(Silo, "measure", lambda self, m: answer if self.facts.name == "silo-00" else measure(self, m))
    scenario = resolved(tiny, "protocol={name: fedper}", "rounds=2")
    outcome = in_process_run.run(scenario, tmp_path, stop_wanted=within())
    assert outcome.phase is Phase.DONE
    assert "silo-00" not in outcome.summary.personal_whole_split
    assert outcome.summary.messages.refused == 1


# ----------------------------------------------------------------------------------------------------- whole runs
def joined(uri: str, keys: Path, name: str, scenario: Scenario) -> tuple[Connection, Session]:
    connection = connect(uri)
    frames, initiated = initiate(load_identity(keys, name), "coordinator", run_name(scenario), 0.0)
    connection.send(frames)
    welcome = connection.receive(PATIENCE)
    assert welcome is not None
    ready, session = complete(initiated, load_accepted(keys), welcome, 0.0)
    connection.send(ready)
    threaded_run.state_data(connection, session, scenario, name)
    return connection, session


def fatally_failing(scenario: Scenario) -> Callable[[str, Path], None]:
    """A silo that joins, waits for its first task and reports a fatal error."""

    def silo(uri: str, keys: Path) -> None:
        connection, session = joined(uri, keys, "silo-03", scenario)
        header = Header(
            run=session.run, kind=Kind.ERROR, sender="silo-03", receiver="coordinator", sequence=0, sent_at=0.0
        )
        while (frames := connection.receive(PATIENCE)) is not None:
            if open_message(session, frames)[0].header.kind is Kind.TASK:
                break
        connection.send(seal_message(session, Message(header, (Error("bye", "my disk is gone"),))).frames)
        wait_for(lambda: in_process_run.notes(keys.parent, LogEvent.ERROR_REPORTED))
        connection.close()

    return silo


@pytest.mark.slow
def test_a_fatal_error_of_one_silo_does_not_end_the_run_of_the_others(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(
        tiny, "clock=wall", "aggregation.lost_after=1", "rounds=3", "participation=1.0", "evaluation.every=0"
    )
    outcome = threaded_run.run(scenario, tmp_path, silos=scenario.silo_names[:3], others=[fatally_failing(scenario)])
    assert outcome.phase is Phase.DONE
    text = (tmp_path / "messages" / "coordinator.jsonl").read_text()
    assert "my disk is gone" in text
    assert outcome.summary.versions == 3
