"""Runs whose silo loses its key, or that start or resume without one; tests/simulation.py removes keys at any time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coordinator import sessions
from coordinator.data_admission import OwnDataAdmission
from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.errors import InputError
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.handshake import complete, initiate
from fedmq.wire.keys import init_keys, load_accepted, load_identity, revoke
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, TimelineRecord
from fedmq.wire.messages import COORDINATOR, Kind
from tests import in_process_run, threaded_run
from tests.log_causes import records
from tests.roster_ends import RUN, header, roster_ends, sealed
from tests.test_adversary_hostile_peers import within
from tests.test_coordinator_data_admission import stated
from tests.threaded_run import resolved, run_of
from tests.waiting import memory_uri


@pytest.mark.slow
def test_a_silo_whose_key_is_removed_during_a_run_is_expelled_and_the_run_continues(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_KEYS_SECONDS", 0.05)
    scenario = resolved(tiny, "rounds=12", "participation=1.0", "evaluation.every=0")
    metrics, removed = tmp_path / "metrics.jsonl", list[str]()
    late = within()

    def remove_once_merged() -> bool:
        if not removed and metrics.exists() and "merge" in metrics.read_text():
            revoke(tmp_path / "keys", "silo-03")
            removed.append("silo-03")
        time.sleep(0.05)  # a round takes longer than the coordinator takes to look at the keys
        return late()

    outcome = threaded_run.run(scenario, tmp_path, stop_wanted=remove_once_merged)
    assert outcome.phase is Phase.DONE
    (expelled,) = in_process_run.notes(tmp_path, LogEvent.EXPELLED)
    assert expelled["peer"] == "silo-03"
    lines = [line for line in read_metrics(RunFolder(tmp_path)) if isinstance(line, MergeLine)]
    assert "silo-03" in lines[0].replies or "silo-03" in lines[1].replies
    assert not any("silo-03" in line.replies for line in lines[-5:])
    assert not audit_run(tmp_path).findings
    log = records(tmp_path)
    cut_off = next(each for each in log if isinstance(each, NoteRecord) and each.event is LogEvent.PEER_LOST)
    assert cut_off.caused_by == next(each.n for each in log if getattr(each, "event", None) is LogEvent.EXPELLED)
    for failed in (each for each in log if isinstance(each, NoteRecord) and each.event is LogEvent.TASK_FAILED):
        event = log[failed.caused_by or 0]
        assert isinstance(event, TimelineRecord) and event.caused_by == cut_off.caused_by


def test_a_run_starts_only_with_all_keys_and_resumes_only_with_those_of_a_silo_and_the_evaluator(
    tiny: Path, tmp_path: Path
) -> None:
    scenario, keys = resolved(tiny), tmp_path / "keys"
    init_keys(keys, ("coordinator", "evaluator", *scenario.silo_names))

    def started(*, resume: bool) -> None:
        run_coordinator(CoordinatorArguments(run_of(scenario), memory_uri(), keys, tmp_path / "run", resume))

    revoke(keys, "silo-03")
    with pytest.raises(InputError, match=r"no key of silo-03.*--resume"):
        started(resume=False)
    for name in ("silo-00", "silo-01", "silo-02"):
        revoke(keys, name)
    with pytest.raises(InputError, match="no key of silo-00"):
        started(resume=True)
    init_keys(tmp_path / "others", ("coordinator", "evaluator", *scenario.silo_names))
    revoke(tmp_path / "others", "evaluator")
    keys = tmp_path / "others"
    with pytest.raises(InputError, match="no key of evaluator"):
        started(resume=True)


def test_a_run_does_not_resume_without_an_eligible_silo(tiny: Path, tmp_path: Path) -> None:
    lone = "missing_modality.silos={silo-00: image, silo-01: text, silo-02: image}"
    scenario, keys = resolved(tiny, "protocol=paired_only", lone), tmp_path / "keys"
    init_keys(keys, ("coordinator", "evaluator", *scenario.silo_names))
    revoke(keys, "silo-03")
    with pytest.raises(InputError, match="no key of any silo that paired_only can select', allowed: that of silo-03"):
        run_coordinator(CoordinatorArguments(run_of(scenario), memory_uri(), keys, tmp_path / "run", resume=True))


@pytest.mark.parametrize("phase", ["welcomed", "connected", "stated", "joined"])
def test_a_removed_key_is_out_within_a_second_in_every_phase(tmp_path: Path, phase: str) -> None:
    admission = None if phase == "joined" else OwnDataAdmission(("silo-00", "silo-01"), RUN, evaluator=False)
    with roster_ends(tmp_path, admission=admission, names=("silo-00", "silo-01")) as ends:
        connection, identity = ends.connect(), load_identity(ends.keys, "silo-00")
        hello, initiated = initiate(identity, COORDINATOR, RUN, 0.0)
        welcome = ends.passes(connection, hello)
        assert welcome is not None
        frames, session = complete(initiated, load_accepted(ends.keys), welcome, 0.0)
        ready = tuple(map(bytes, frames))
        if phase != "welcomed":
            ends.passes(connection, ready)
        if phase == "stated":
            ends.passes(connection, sealed(session, header(session, Kind.STATEMENT), stated("silo-00").payloads))
        assert ends.roster.online("silo-00") == (phase == "joined")
        assert ("silo-00" in ends.roster.joining()) == (phase in ("connected", "stated"))
        revoke(ends.keys, "silo-00")
        ends.clock.at += 1.0
        ends.roster.receive(0)
        assert not ends.roster.online("silo-00") and "silo-00" not in ends.roster.joining()
        assert list(ends.roster.unaccepted) == ["silo-00"]
        assert admission is None or admission.missing == ("silo-00", "silo-01")
        ends.passes(connection, ready)  # the end of a handshake that began before
        assert not ends.roster.online("silo-00") and "silo-00" not in ends.roster.joining()
        again = ends.connect()
        assert ends.session("silo-00", again) is None
        again.close()
        assert ends.roster.refused["unknown_sender"] == 1
        connection.close()
