"""Silos that go silent: noticed within two beats, waited for or given up, and back as if nothing had been."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from coordinator import loop
from coordinator.rounds import Phase
from fedmq.audit.log_checks import read_log
from fedmq.config.scenario import Scenario
from fedmq.storage.run_folder import RunFolder
from fedmq.wire import channel
from fedmq.wire.messages import Error, Kind, Message
from fedmq.wire.sessions import open_message, seal_message
from silos.program import SiloArguments, run_silo
from tests.threaded_run import joined, resolved, run, run_of

pytestmark = pytest.mark.slow
BEAT = 0.4


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(channel, "_TURN_MILLISECONDS", 50)


def silent(scenario: Scenario, out: Path, *, returns: bool) -> Callable[[str, Path], None]:
    """A silo-00 that joins, takes its task and is never heard again; or whose machine comes back after a while."""

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        connection.send(seal_message(session, Message(beat)).frames)
        time.sleep(4 * BEAT)
        if returns:
            connection.close()
            run_silo(SiloArguments(run_of(scenario), "silo-00", uri, keys, out))

    return join


def records(out: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_log(RunFolder(out).messages("coordinator")) if record is not None]


def at(record: dict[str, Any]) -> float:
    return datetime.fromisoformat(record["wall"]).timestamp()


def test_a_lost_silo_is_noticed_within_two_beats_waited_for_and_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "rounds=3", "participation=1")
    whole = run(scenario, tmp_path / "whole").summary
    out = tmp_path / "lost"
    outcome = run(scenario, out, silos=scenario.silo_names[1:], others=[silent(scenario, out, returns=True)])
    log = records(out)
    (lost, *_) = [
        index for index, each in enumerate(log) if each.get("text") == "peer lost" and each["peer"] == "silo-00"
    ]
    heard = [each for each in log[:lost] if each["action"] == "received" and each.get("sender") == "silo-00"]
    silence = at(log[lost]) - at(heard[-1])
    assert 2 * BEAT <= silence < 2 * BEAT + 2.0  # and the time until the loop looks around on a busy machine
    assert not any(each.get("text") == "task failed" for each in log)
    assert outcome.summary["model_digest"] == whole["model_digest"]


@pytest.mark.parametrize("mode", ["sync", "buffered", "async"])
def test_in_real_time_a_silo_that_stays_away_is_given_up_and_the_others_go_on(
    tiny: Path, tmp_path: Path, mode: str
) -> None:
    settings = ("clock=wall", "rounds=3", "participation=1", "aggregation.lost_after=2", f"aggregation.mode={mode}")
    scenario = resolved(tiny, *settings, "aggregation.buffer=4")
    outcome = run(scenario, tmp_path, silos=scenario.silo_names[1:], others=[silent(scenario, tmp_path, returns=False)])
    assert outcome.phase is Phase.DONE
    assert outcome.summary["per_silo"]["silo-00"]["participations"] == 0
    failed = {(each["silo"], each["reason"]) for each in records(tmp_path) if each.get("text") == "task failed"}
    # Without rounds to wait for it, the run may be over before the silo is.
    assert ("silo-00", "stayed away") in failed or mode == "async"


def dying(scenario: Scenario) -> Callable[[str, Path], None]:
    """A silo-00 whose machine dies just after its first answer, long before anybody can call it silent."""

    def join(uri: str, keys: Path) -> None:
        connection, session, beat = joined(scenario, uri, keys)
        while True:
            connection.send(seal_message(session, Message(beat)).frames)
            frames = connection.receive(BEAT)
            if frames is None:
                continue
            message, _ = open_message(session, frames)
            if message.header.kind is Kind.TASK:
                break
        failed = replace(beat, kind=Kind.ERROR, sequence=1, reply_to=message.header.sequence)
        connection.send(seal_message(session, Message(failed, (Error.saying("training_failed", "x"),))).frames)
        time.sleep(BEAT / 4)
        connection.close()

    return join


def test_a_silo_to_whom_a_message_cannot_be_delivered_is_lost_as_any_other(tiny: Path, tmp_path: Path) -> None:
    settings = ("clock=wall", "rounds=3", "participation=1", "aggregation.lost_after=2", "evaluation.every=0")
    scenario, until = resolved(tiny, *settings), time.monotonic() + 60
    outcome = run(
        scenario,
        tmp_path,
        silos=scenario.silo_names[1:],
        others=[dying(scenario)],
        stop_wanted=lambda: time.monotonic() > until,
    )
    assert outcome.phase is Phase.DONE
    said = [each.get("text") for each in records(tmp_path)]
    assert "peer lost" in said
