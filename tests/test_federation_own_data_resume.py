"""A run of sites with data of their own whose coordinator is killed, and later stopped, while the sites run on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.run_records import EvaluationLine, OwnHeldOutLine
from fedmq.runs.status import read_status
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from tests.command_line import completed
from tests.in_process_run import run as run_inline
from tests.own_data_sites import COMMON, IMAGE_ONLY, arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow
ROUNDS = 16
#: A method that trains on labels: the model depends on how columns of different label lists are matched.
MORE: dict[str, Any] = {
    "rounds": ROUNDS,
    "protocol": "plfedcmh",
    "objective": {"base": "dcmh"},
    "evaluation": {"every": 4, "heldout": "both"},
}


def with_other_labels(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same items with the names of their labels in another order, and with one label that no item has."""
    return found | {"label_names": np.array(["xray", "us", "mri", "ct"]), "labels": 3 - found["labels"]}


def begin(run: OwnRun, *options: str) -> subprocess.Popen[str]:
    where = ("--keys", str(run.root / "keys"), "--bind", run.uri)
    command = [sys.executable, "-m", "fedmq", "coordinator", *options, *where]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_version(run: OwnRun, process: subprocess.Popen[str], version: int) -> None:
    def reached() -> bool:
        assert process.poll() is None, process.stdout and process.stdout.read()
        return len(run.merges) >= version

    wait_for(reached, PATIENCE)


@pytest.mark.longest
def test_a_killed_and_a_stopped_coordinator_resume_with_the_model_of_a_simulation_by_column(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, MORE, uri=f"ipc://{tmp_path}/wire")
    run.data["silo-00"] = with_other_labels(of_hospital(arrays(), "berlin"))
    run.data[EVALUATOR] = of_hospital(arrays(seed=1), "oslo")
    scenario = tmp_path / "own.yaml"
    scenario.write_text(yaml.safe_dump({"name": "own", **COMMON, "partition": {"kind": "own"}, **MORE}))
    process = begin(run, str(scenario), "--out", str(tmp_path / "run"))
    try:
        run.start(*run.scenario.silo_names, EVALUATOR)
        wait_for_version(run, process, 3)
        process.kill()
        process.wait()
        process = begin(run, "--resume", str(tmp_path / "run"))
        wait_for_version(run, process, 8)
        process.send_signal(signal.SIGTERM)
        stopped = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 1 and "--resume" in stopped and "silos and evaluator wait" in stopped
        assert read_status(run.folder.status).phase == "stopped" and not run.ended
        process = begin(run, "--resume", str(tmp_path / "run"))
        printed = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == 0, printed
        run.wait()
    finally:
        process.kill()
        process.communicate()
    assert set(run.ended.values()) == {""}, run.ended
    summary = read_summary(run.folder)
    assert {silo.participations for silo in summary.per_silo.values()} == {ROUNDS}
    assert not audit_run(tmp_path / "run").findings
    notes = [record.event for _, record in read_log(run.folder.messages(COORDINATOR)) if isinstance(record, NoteRecord)]
    assert (notes.count(LogEvent.RESUMED), notes.count(LogEvent.AGREED)) == (2, 3)
    # Both kinds of figures, named apart: of the evaluator's items, and of the silos' own.
    assert summary.metrics["mean_r1"] > 0
    assert summary.own_heldout is not None and set(summary.own_heldout.per_silo) == {"silo-00", "silo-02"}
    for kind in (OwnHeldOutLine, EvaluationLine):
        assert [line.version for line in read_metrics(run.folder) if isinstance(line, kind)] == [0, 4, 8, 12, 16]
    assert summary.model_digest == _simulated(tmp_path)
    _check_replay(run)


def _check_replay(run: OwnRun) -> None:
    """Replay the run with the data of all sites, the evaluator's among them; without those it is refused."""
    files = []
    for name in (*run.scenario.silo_names, EVALUATOR):
        site = run.site(name)
        assert site.data is not None and site.data.path is not None
        plain = {"data": {"name": "features", "path": site.data.path.name}}
        files.append(run.root / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(plain | ({} if site.modalities is None else {"modalities": ["image"]})))
    named = [word for file in files for word in ("--site", str(file))]
    same = completed("replay", run.folder.root, *named, "--json", "--quiet")
    assert same.returncode == 0, same.stdout + same.stderr
    assert json.loads(same.stdout)["events"] == 3 * ROUNDS
    without = completed("replay", run.folder.root, *named[:-2], "--quiet")
    assert (without.returncode, without.stdout) == (2, "")
    assert "--site: found 'no data of evaluator'" in without.stderr


def _simulated(root: Path) -> str:
    np.savez(root / "all.npz", **arrays())
    raw = {"name": "column", **COMMON, **MORE, "data": {"name": "features", "path": str(root / "all.npz")}}
    raw |= {"partition": {"kind": "column", "column": "hospital"}, "missing_modality": {"silos": {IMAGE_ONLY: "image"}}}
    raw |= {"evaluation": {"every": 4}}
    outcome = run_inline(Scenario.model_validate(raw), root / "together")
    assert outcome.summary is not None
    return outcome.summary.model_digest
