"""A whole run in one process by direct calls: no messages, the same rounds, faults and model; takes under a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.faults import ProcessCommand
from coordinator.program import CoordinatorArguments, CoordinatorResult, run_coordinator
from fedmq.config.scenario import Scenario
from fedmq.launch.supervisor import inline_peers
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import Fact, NoteRecord, read_log
from tests.log_causes import check_causes
from tests.threaded_run import run_of


class Killed(Exception):
    """Stands for SIGKILL where a coordinator runs in the test's own process."""


def run(
    scenario: Scenario,
    out: Path,
    *,
    resume: bool = False,
    stop_wanted: Callable[[], bool] = lambda: False,
    order: Callable[[ProcessCommand], None] | None = None,
    checkpoint_seconds: float = 0.0,
) -> CoordinatorResult:
    """Run a scenario to its end, or until something raises."""
    made = run_of(scenario)
    outcome = run_coordinator(
        CoordinatorArguments(made, "inline", out, out, resume, report=True, checkpoint_seconds=checkpoint_seconds),
        stop_wanted=stop_wanted,
        peers=partial(inline_peers, made, RunFolder(out), None),
        order=order,
    )
    check_causes(out)
    return outcome


def die(order: ProcessCommand) -> None:
    """Carry out only the faults that a process can inject into itself."""
    if order.what == "die":
        raise Killed


def run_restarted(scenario: Scenario, out: Path) -> CoordinatorResult:
    """Run a scenario, restarting the coordinator whenever a fault kills it or its disk stays full."""
    from fedmq.errors import RunError

    resume = False
    for _ in range(20):
        try:
            return run(scenario, out, resume=resume, order=die)
        except Killed:
            resume = True
        except RunError as error:
            if "checkpoint" not in str(error):
                raise
            resume = True
    raise AssertionError("the coordinator was started again twenty times")


def notes(out: Path, kind: LogEvent, process: str = "coordinator") -> list[Mapping[str, Fact]]:
    """The facts of a process's log notes of one kind."""
    records = (record for _, record in read_log(RunFolder(out).messages(process)))
    return [record.facts for record in records if isinstance(record, NoteRecord) and record.event is kind]


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a kind, without the real time, in which equal runs differ."""
    path = RunFolder(out).metrics
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "wall"} for line in found if line["kind"] == kind]
