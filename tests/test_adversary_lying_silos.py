"""Silos with a valid key that report false metrics, reconnect too often or have errors that name local paths."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.evaluation import EvaluationRequests
from coordinator.liveness import ReconnectThrottle
from coordinator.sessions import Roster
from fedmq.cli.terminal import print_summary
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError, RemoteWireError, RunError
from fedmq.federation.participant import reportable
from fedmq.federation.protocol import State
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.channel import BEAT_SECONDS
from fedmq.wire.messages import Header, Kind, Message
from fedmq.wire.payloads import Metrics
from silos.program import run_silo
from silos.tasks import Silo, SiloArguments
from tests import in_process_run, threaded_run
from tests.test_adversary_hostile_peers import joined, within
from tests.threaded_run import resolved, run_of
from tests.waiting import wait_for

# --------------------------------------------------------------------------------------------------- personal metrics
LIES: dict[str, Callable[[Metrics], Metrics]] = {
    "one figure more": lambda m: replace(m, values={**m.values, "mine": 1.0}),
    "its own rate of 1.01": lambda m: replace(m, per_silo={"silo-00": {**m.per_silo["silo-00"], "mean_r1": 1.01}}),
    "a rank of 1.7e308": lambda m: replace(m, values={**m.values, "i2t_medr": 1.7e308}),
    "another's share": lambda m: replace(m, per_silo={**m.per_silo, "silo-01": m.per_silo["silo-00"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "late"), [*((lie, False) for lie in list(LIES)[:3]), ("its own rate of 1.01", True)])
def test_false_metrics_of_one_silo_do_not_affect_those_of_the_others(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str, *, late: bool
) -> None:
    """With ``late``, the evaluator's first evaluation arrives after the measurements of all silos."""
    measure, measured, evaluated = Silo.measure, EvaluationRequests.measured, EvaluationRequests.evaluated

    def answer(silo: Silo, message: Message) -> Metrics:
        found = measure(silo, message)
        return LIES[lie](found) if silo.facts.name == "silo-00" else found

    held, ended = list[tuple[Message, Mapping[int, State]]](), set[str]()

    def hold(measuring: EvaluationRequests, message: Message, states: Mapping[int, State]) -> None:
        held.append((message, states))

    def release_once_all_measured(measuring: EvaluationRequests, message: Message) -> bool:
        taken = measured(measuring, message)
        if taken:
            ended.add(message.header.sender)
        if len(ended) == 4:
            while held:
                evaluated(measuring, *held.pop(0))
        return taken

    monkeypatch.setattr(Silo, "measure", answer)
    if late:
        monkeypatch.setattr(EvaluationRequests, "evaluated", hold)
        monkeypatch.setattr(EvaluationRequests, "measured", release_once_all_measured)
    scenario = resolved(tiny, "protocol={name: fedper}", "rounds=2", "participation=1")
    summary = in_process_run.run(scenario, tmp_path, stop_wanted=within()).summary
    assert sorted(summary.personal_whole_split) == ["silo-01", "silo-02", "silo-03"]
    assert summary.personal.keys() == summary.metrics.keys()
    assert summary.messages.refused == 1
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    print_summary(summary, RunFolder(tmp_path), Console(quiet=True))


# ------------------------------------------------------------------------------------------------------- reconnects
def reconnecting(scenario: Scenario, sent: list[float], done: list[int]) -> Callable[[str, Path], None]:
    """A silo-03 that reconnects again and again once it has a task, then runs as an honest silo."""

    def silo(uri: str, keys: Path) -> None:
        kept = [joined(uri, keys, "silo-03", scenario)[0]]
        wait_for(lambda: sent)  # tasks go out only once all other silos have joined
        for _ in range(29):
            kept.append(joined(uri, keys, "silo-03", scenario)[0])
        done.append(len(kept))
        for connection in kept:
            connection.close()
        run_silo(SiloArguments(run_of(scenario), "silo-03", uri, keys, keys.parent))

    return silo


@pytest.mark.slow
def test_a_silo_that_keeps_reconnecting_gets_its_pending_task_at_most_once_per_heartbeat(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario, done = resolved(tiny, "rounds=2", "participation=1.0", "evaluation.every=0"), list[int]()
    expected_digest = in_process_run.run(scenario, tmp_path / "whole").summary.model_digest
    sent, send, began = list[float](), Roster.send, time.monotonic()

    def counted(roster: Roster, name: str, message: Message | Header) -> int:
        if name == "silo-03" and isinstance(message, Message) and message.header.kind is Kind.TASK and not done:
            sent.append(time.monotonic() - began)
        return send(roster, name, message)

    monkeypatch.setattr(Roster, "send", counted)
    out = tmp_path / "storm"
    outcome = threaded_run.run(
        scenario, out, silos=scenario.silo_names[:3], others=[reconnecting(scenario, sent, done)]
    )
    assert done == [30]
    # The first send, the resend at the first reconnect, and one per heartbeat while the reconnects last.
    assert len(sent) <= 3 + (sent[-1] - sent[0]) / BEAT_SECONDS
    assert outcome.summary.model_digest == expected_digest


def test_a_second_reconnect_within_a_heartbeat_waits_for_the_next_one() -> None:
    throttle = ReconnectThrottle()
    assert not throttle.must_wait("silo-00", 10.0, 2.0)
    assert not throttle.must_wait("silo-00", 10.1, 2.0)
    assert throttle.must_wait("silo-00", 10.2, 2.0)
    assert not throttle.must_wait("silo-01", 10.2, 2.0)
    assert (throttle.waiting, throttle.expired(12.0, 2.0), throttle.expired(12.2, 2.0)) == (
        {"silo-00"},
        [],
        ["silo-00"],
    )
    assert not throttle.must_wait("silo-00", 12.2, 2.0)
    assert not throttle.waiting
    assert throttle.must_wait("silo-00", 14.0, 2.0)


# ---------------------------------------------------------------------------------------------------- reported errors
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no such thing in /home/jane/data"), "ValueError"),
        (FileNotFoundError(2, "No such file or directory", "/home/jane/x.npz"), "FileNotFoundError"),
        (RunError("training diverged at silo-00: loss nan"), "RunError: training diverged at silo-00: loss nan"),
        (RunError("/home/Jane Doe/x y.npz: gone, see /srv/jane/log"), "RunError: log"),
        (RemoteWireError("layout", "no layout 00 was agreed"), "RemoteWireError: layout: no layout 00 was agreed"),
        (
            InputError("/home/Jane Doe/task-1.safetensors", "damaged (~/own/x: EOF)", "a whole file, as in /srv/a"),
            "InputError: task-1.safetensors: found 'damaged (x: EOF)', allowed: a whole file, as in a",
        ),
        (InputError("--lr", 3, "1 or 2"), "InputError: --lr: found 3, allowed: 1 or 2"),
        (InputError("x", Path("/home/jane/x"), "y"), "InputError: x: found PosixPath('x'), allowed: y"),
    ],
)
def test_an_error_reported_to_the_coordinator_names_no_folder_of_the_silo(error: Exception, expected: str) -> None:
    assert reportable(error) == expected
