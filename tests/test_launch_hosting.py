"""Hosts: processes that answer for several silos in turn, because the user or the machine's limits ask for it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.config import resolve as scenarios
from fedmq.launch.processes import Limits, plan_hosting
from fedmq.packages import __version__
from fedmq.wire.log_records import NoteRecord, read_log
from tests import in_process_run
from tests.command_line import completed
from tests.threaded_run import resolved
from tests.waiting import PATIENCE

FEDMQ = str(Path(sys.executable).parent / "fedmq")
ENOUGH = Limits(memory=1 << 50, descriptors=1 << 20)


@pytest.mark.parametrize(
    ("limits", "settings", "hosts", "reason"),
    [
        (ENOUGH, ("silos.count=100",), 0, ""),
        (ENOUGH, ("silos.hosts=2",), 2, ""),
        (ENOUGH, ("silos.hosts=9",), 4, ""),
        (Limits(1 << 50, 150), ("silos.count=70",), 4, "about 204 open files, and 150 are allowed"),
        (Limits(4 << 30, 1 << 20), ("silos.count=1000",), 4, "GB of memory, and 4.3 GB are available"),
    ],
)
def test_silos_share_hosts_if_the_user_or_the_machine_asks_for_it(
    tiny: Path, limits: Limits, settings: tuple[str, ...], hosts: int, reason: str
) -> None:
    scenario = scenarios.load(tiny, (*settings, "silos.slots=2", "missing_modality.silos={}"))
    plan = plan_hosting(scenario, limits)
    assert len(plan.hosts) == hosts and plan.reason.endswith(reason) and bool(plan.reason) == bool(reason)


def test_the_run_id_does_not_depend_on_the_hosts(tiny: Path) -> None:
    from fedmq.federation.population import run_name

    assert run_name(scenarios.load(tiny)) == run_name(scenarios.load(tiny, ("silos.hosts=2",)))


def finished(tiny: Path, out: Path, *options: str, files: int | None = None) -> Any:
    """Run a scenario with hosts; returns its summary and what it printed on standard error.

    Args:
        tiny: the scenario.
        out: the run folder.
        options: options of the command.
        files: run it as a process of its own, with at most this number of open files in each of its processes.
    """

    def limited() -> None:
        assert files is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    words = ["scenario", str(tiny), "--out", str(out), "--json", "--quiet", *options]
    if files is None:
        done = completed(*words)
    else:
        done = subprocess.run(
            [FEDMQ, *words], capture_output=True, text=True, timeout=PATIENCE, check=False, preexec_fn=limited
        )
    assert done.returncode == 0, done.stderr
    assert not audit_run(out).findings
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_hosted_silos_give_the_model_of_a_run_in_one_process_under_faults_too(tiny: Path, tmp_path: Path) -> None:
    faults = (
        "{kind: crash, silos: [silo-00], rounds: [1, 1]}",
        "{kind: freeze, silos: [silo-01], rounds: [2, 2], seconds: 1}",
        "{kind: leave, silos: [silo-01], rounds: [3, 3]}",
    )
    # Batches that give a task several steps: a run of single steps ends with a warning.
    steps = ("--set", "participation=1.0", "--set", "training.batch_size=8")
    options = ("--set", f"faults=[{', '.join(faults)}]", *steps)
    hosted, said = finished(tiny, tmp_path / "hosted", *options, "--set", "silos.hosts=2")
    called = in_process_run.run(resolved(tiny, *options[1::2]), tmp_path / "called").summary
    assert hosted["model_digest"] == called.model_digest and not said
    record = (tmp_path / "hosted" / "messages" / "coordinator.jsonl").read_text()
    assert record.replace(" ", "").count('"event":"fault"') >= 3
    logs = {path.stem: read_log(path) for path in (tmp_path / "hosted" / "messages").glob("*.jsonl")}
    assert logs.keys() == {"coordinator", "evaluator", "silo-00", "silo-01", "silo-02", "silo-03"}
    for log in logs.values():  # every process begins its log with its version
        assert isinstance(first := next(log)[1], NoteRecord) and first.facts["program"] == __version__


@pytest.mark.slow
def test_fourteen_silos_run_with_at_most_90_open_files(tiny: Path, tmp_path: Path) -> None:
    settings = ("silos.count=14", "silos.slots=2", "rounds=1", "partition.kind=iid")
    options = [part for each in settings for part in ("--set", each)]
    summary, said = finished(tiny, tmp_path / "run", *options, files=90)
    assert summary["processes"]["silos"] == 14
    assert "\n14 silos share 4 host processes" in f"\n{said}"
