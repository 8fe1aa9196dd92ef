"""Lost silos: noticed within two heartbeats, waited for or given up; one that returns does not change the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator import loop
from coordinator.faults import Inbox
from coordinator.rounds import Phase
from fedmq.config.scenario import Scenario
from fedmq.federation.population import run_name
from fedmq.wire import channel
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import load_accepted, load_identity
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, MessageRecord, NoteRecord
from fedmq.wire.messages import Kind, Message
from fedmq.wire.payloads import Error
from fedmq.wire.sessions import open_message, seal_message
from fedmq.wire.transports.registry import connect
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.log_causes import records
from tests.test_adversary_hostile_peers import within
from tests.threaded_run import joined, resolved, run, run_of, state_data
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow
BEAT = 0.4


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "STEP_SECONDS", 0.05)


def silent(scenario: Scenario, out: Path, *, returns: bool) -> Callable[[str, Path], None]:
    """A silo-00 that joins and falls silent; with ``returns``, it rejoins once it is reported as lost."""

    def lost() -> bool:
        return any(note.facts["peer"] == "silo-00" for note in notes(records(out), LogEvent.PEER_LOST))

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        connection.send(seal_message(session, Message(beat)).frames)
        wait_for(lambda: lost() or (out / "summary.json").exists())
        if returns:
            connection.close()
            run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, out))

    return join


def at(record: LogRecord) -> float:
    return datetime.fromisoformat(record.wall).timestamp()


def notes(found: list[LogRecord], kind: LogEvent) -> list[NoteRecord]:
    return [record for record in found if isinstance(record, NoteRecord) and record.event is kind]


def test_a_lost_silo_is_noticed_within_two_heartbeats_and_its_return_changes_nothing(
    tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny, "rounds=3", "participation=1")
    uninterrupted = run(scenario, tmp_path / "whole").summary.plain()
    out = tmp_path / "lost"
    outcome = run(scenario, out, silos=scenario.silo_names[1:], others=[silent(scenario, out, returns=True)])
    log = records(out)
    (lost, *_) = [note for note in notes(log, LogEvent.PEER_LOST) if note.facts["peer"] == "silo-00"]
    messages = [each for each in log[: lost.n] if isinstance(each, MessageRecord)]
    heard = [each for each in messages if each.action == "received" and each.header.sender == "silo-00"]
    silence = at(lost) - at(heard[-1])
    assert silence >= 2 * BEAT
    assert not notes(log, LogEvent.TASK_FAILED)
    assert outcome.summary.model_digest == uninterrupted["model_digest"]
    joins = [note for note in notes(log, LogEvent.JOINED) if note.facts["peer"] == "silo-00"]
    assert len(joins) >= 2 and joins[1].n > lost.n  # on a busy machine it may be lost again
    stated = [log[note.caused_by] for note in joins if note.caused_by is not None]
    assert [each.header.sender for each in stated[:2] if isinstance(each, MessageRecord)] == ["silo-00", "silo-00"]


def test_a_coordinator_that_stood_still_reads_its_queue_before_it_judges_silence() -> None:
    """Its peers' heartbeats may be unread; it used to take all of them for lost."""
    at, still = [0.0], [75.0]

    def receive(_wait: float) -> None:
        at[0] += still[0]

    clock, roster = SimpleNamespace(stopwatch=lambda: at[0]), SimpleNamespace(receive=receive)
    inbox = Inbox(cast(Any, roster), cast(Any, None), cast(Any, clock), cast(Any, None))
    assert list(inbox.receive(0.2)) == [] and inbox.caught_up == 0.0
    still[0] = 0.2
    assert list(inbox.receive(0.2)) == [] and inbox.caught_up == at[0]


@pytest.mark.parametrize("mode", ["sync", "buffered", "async"])
def test_on_the_wall_clock_a_silo_that_stays_away_is_given_up_and_the_others_continue(
    tiny: Path, tmp_path: Path, mode: str
) -> None:
    settings = ("clock=wall", "rounds=3", "participation=1", "aggregation.lost_after=2", f"aggregation.mode={mode}")
    scenario = resolved(tiny, *settings, "aggregation.buffer=4")
    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[silent(scenario, tmp_path, returns=False)])
    assert outcome.phase is Phase.DONE
    assert outcome.summary.per_silo["silo-00"].participations == 0
    failed = {(each.facts["silo"], each.facts["reason"]) for each in notes(records(tmp_path), LogEvent.TASK_FAILED)}
    # In async mode nothing waits for the silo, so the run may end before it is given up.
    assert ("silo-00", "stayed_away") in failed or mode == "async"


def dying(scenario: Scenario) -> Callable[[str, Path], None]:
    """A silo-00 whose machine dies just after its first answer, long before it can be noticed as silent."""

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        while True:
            frames = connection.receive(BEAT)
            if frames is None:  # the coordinator answers each heartbeat: one for each answer would be a flood
                connection.send(seal_message(session, Message(beat)).frames)
                continue
            message, _ = open_message(session, frames)
            if message.header.kind is Kind.TASK:
                break
        failed = replace(beat, kind=Kind.ERROR, sequence=1, reply_to=message.header.sequence)
        connection.send(seal_message(session, Message(failed, (Error.saying("training_failed", "x"),))).frames)
        time.sleep(BEAT / 4)
        connection.close()

    return join


def test_a_silo_is_reported_lost_when_a_message_to_it_cannot_be_delivered(tiny: Path, tmp_path: Path) -> None:
    settings = ("clock=wall", "rounds=3", "participation=1", "aggregation.lost_after=2", "evaluation.every=0")
    scenario = resolved(tiny, *settings)
    outcome = run(
        scenario,
        tmp_path,
        silos=scenario.silo_names[1:],
        others=[dying(scenario)],
        stop_wanted=within(),
    )
    assert outcome.phase is Phase.DONE
    assert notes(records(tmp_path), LogEvent.PEER_LOST)


def test_a_silo_that_repeats_its_handshake_on_the_same_connection_before_it_states_its_data_joins(
    tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny, "rounds=1")
    heard: list[Kind] = []

    def hasty(uri: str, keys: Path) -> None:
        connection, name = connect(uri), run_name(scenario)
        for _ in range(2):
            hello, initiated = initiate(load_identity(keys, "silo-00"), "coordinator", name, 0.0)
            connection.send(hello)
            ready, session = complete(initiated, load_accepted(keys), connection.receive(PATIENCE) or [], 0.0)
            connection.send(ready)
        state_data(connection, session, scenario, "silo-00")
        frames = connection.receive(PATIENCE)
        heard.extend([] if frames is None else [open_message(session, frames)[0].header.kind])
        connection.close()
        run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, tmp_path))

    run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[hasty])
    assert heard == [Kind.LAYOUT]
