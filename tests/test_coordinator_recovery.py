"""Lost silos: noticed within two heartbeats, and given up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator import loop
from coordinator.peers import Inbox
from coordinator.round_events import Phase
from fedmq.config.scenario import Scenario
from fedmq.wire import channel
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import LogRecord, NoteRecord
from fedmq.wire.messages import Message
from fedmq.wire.sessions import seal_message
from tests.log_causes import records
from tests.threaded_run import joined, resolved, run
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
BEAT = 0.4


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "STEP_SECONDS", 0.05)


def silent(scenario: Scenario, out: Path) -> Callable[[str, Path], None]:
    """A silo-00 that joins and falls silent."""

    def lost() -> bool:
        return any(note.facts["peer"] == "silo-00" for note in notes(records(out), LogEvent.PEER_LOST))

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        connection.send(seal_message(session, Message(beat)).frames)
        wait_for(lambda: lost() or (out / "summary.json").exists())

    return join


def notes(found: list[LogRecord], kind: LogEvent) -> list[NoteRecord]:
    return [record for record in found if isinstance(record, NoteRecord) and record.event is kind]


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


def test_on_the_wall_clock_a_silo_that_stays_away_is_given_up_and_the_others_continue(
    tiny: Path, tmp_path: Path
) -> None:
    scenario = resolved(tiny, "clock=wall", "rounds=3", "participation=1", "aggregation.lost_after=2")
    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[silent(scenario, tmp_path)])
    assert outcome.phase is Phase.DONE
    assert outcome.summary.per_silo["silo-00"].participations == 0
    assert ("silo-00", "stayed_away") in {
        (each.facts["silo"], each.facts["reason"]) for each in notes(records(tmp_path), LogEvent.TASK_FAILED)
    }
