"""Silos with data of their own in folders that share only the scenario and keys; their coordinator is restarted."""

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
from fedmq.audit.replay import sites_of
from fedmq.cli.console import BAD_INPUT
from fedmq.cli.scenarios import resolved_file
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.runs.results import read_metrics, read_summary
from fedmq.runs.run_records import EvaluationLine, OwnHeldOutLine
from fedmq.runs.status import read_status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.command_line import printed, refused
from tests.in_process_run import run as run_inline
from tests.own_data_sites import COMMON, HOSPITALS, IMAGE_ONLY, Sites, arrays, of_hospital, outputs
from tests.own_data_threads import OwnRun
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow


def simulated(root: Path, protocol: object = "rcsr") -> dict[str, Any]:
    """The same items in one file, partitioned by the column `hospital`."""
    root.mkdir()
    found = arrays()
    found["text_present"] &= found["hospital"] != HOSPITALS[1]
    np.savez(root / "all.npz", **found)
    raw = {
        "name": "column",
        **COMMON,
        "protocol": protocol,
        "data": {"name": "features", "path": str(root / "all.npz")},
        "partition": {"kind": "column", "column": "hospital"},
    }
    outcome = run_inline(Scenario.model_validate(raw), root / "run")
    assert outcome.summary is not None
    return outcome.summary.plain()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, list[str]]:
    """Three sites after a run of RCSR with real processes, and what the coordinator and the silos printed."""
    root = tmp_path_factory.mktemp("sites")
    sites = Sites(root, f"ipc://{root}/wire")
    sites.write()
    return sites, outputs([sites.coordinator(), *map(sites.silo, range(3))])


def test_processes_of_three_sites_compute_what_a_simulation_by_column_computes(
    tmp_path: Path, finished: tuple[Sites, list[str]]
) -> None:
    sites, printed = finished
    assert "the coordinator has ended the run" in printed[1], printed
    assert f"{IMAGE_ONLY} has images only" in printed[0], printed
    compare_with_simulation(sites.summary(), tmp_path, "rcsr")


@pytest.mark.parametrize("protocol", ["fedavg", {"name": "fedbridge"}], ids=str)
def test_three_sites_compute_what_a_simulation_by_column_computes(tmp_path: Path, protocol: object) -> None:
    run = OwnRun(tmp_path, {"protocol": protocol})
    summary = run.coordinate(listening=lambda: run.start(*run.scenario.silo_names)).summary
    assert set(run.ended.values()) == {""}, run.ended
    assert summary is not None
    compare_with_simulation(summary.plain(), tmp_path, protocol)


def compare_with_simulation(own: dict[str, Any], root: Path, protocol: object) -> None:
    together = simulated(root / "together", protocol)
    assert own["model_digest"] == together["model_digest"]
    for name, silo in own["per_silo"].items():
        for key in ("samples", "modalities", "participations"):
            assert silo[key] == together["per_silo"][name][key]
    found = arrays()
    for index, hospital in enumerate(HOSPITALS):
        train = (found["hospital"] == hospital) & (found["split"] == "train")
        assert own["per_silo"][f"silo-{index:02d}"]["samples"] == train.sum()


def check_replay(sites: Sites) -> None:
    """Replay a run whose logs have not been collected, with the data of all sites and of some."""
    files = [sites.root / hospital / "silo.yaml" for hospital in HOSPITALS]
    replay = printed("replay", sites.run, *(word for file in files for word in ("--site", file)), "--quiet")
    assert sites.summary()["model_digest"][:16] in replay
    folder, run = RunFolder(sites.run), resolved_file(sites.run / "scenario.yaml", manual=True)
    assert list(sites_of(run, folder, files)) == ["silo-00", "silo-01", "silo-02"]
    with pytest.raises(InputError, match="--site: found 'no data of silo-00, silo-02'"):
        sites_of(run, folder, files[1:2])
    other = sites.root / "other.yaml"
    other.write_text(files[0].read_text().replace("silo-00", "silo-02").replace("site0", "berlin/site0"))
    with pytest.raises(InputError, match=r"other.yaml: line \d+: data: found 'data with digest .*what silo-02 stated"):
        sites_of(run, folder, [other])


def test_the_audit_of_the_collected_logs_is_clean_and_the_summary_has_counts_and_own_figures(
    finished: tuple[Sites, list[str]],
) -> None:
    sites, _ = finished
    check_replay(sites)
    sites.collect_logs()
    printed("audit", sites.run)
    summary, found = sites.summary(), arrays()
    assert summary["metrics"] == {}
    own = summary["own_heldout"]
    # The image-only site has no item on which images and captions could find each other.
    assert own["per_silo"].keys() == {"silo-00", "silo-02"}
    pairs = found["image_present"] & found["text_present"] & (found["split"] == "test")
    assert own["items"] == (pairs & (found["hospital"] != HOSPITALS[1])).sum()
    alone = ~(found["image_present"] & found["text_present"]) | (found["hospital"] == HOSPITALS[1])
    assert summary["heldout_without_pair"] == (alone & (found["split"] == "test")).sum() > 0
    for name, each in own["per_silo"].items():
        assert each["items"] == summary["per_silo"][name]["items"]["test"]["paired"]
    oslo = of_hospital(found, "oslo")
    train = oslo["split"] == "train"
    assert summary["per_silo"]["silo-02"]["items"]["train"] == {
        "paired": int((train & oslo["image_present"] & oslo["text_present"]).sum()),
        "image_only": int((train & ~oslo["text_present"]).sum()),
        "text_only": int((train & ~oslo["image_present"]).sum()),
    }
    figures = {name: each["mean_r1"] * each["items"] for name, each in own["per_silo"].items()}
    assert own["metrics"]["mean_r1"] == pytest.approx(sum(figures.values()) / own["items"])
    agreement = json.loads((sites.run / "agreement.json").read_text())
    assert agreement["agreed"]["label_names"] == ["ct", "mri", "us", "xray"]


def test_a_site_whose_features_have_another_width_is_refused_by_name_on_both_sides(tmp_path: Path) -> None:
    sites = Sites(tmp_path, f"ipc://{tmp_path}/wire")
    sites.write()
    narrow = of_hospital(arrays(), "oslo")
    np.savez(tmp_path / "oslo" / "site2.npz", **(narrow | {"image": narrow["image"][:, :7]}))
    coordinator = sites.coordinator()
    try:
        others = [sites.silo_here(0), sites.silo_here(1)]
        sites.wait_for_statements("silo-00", "silo-01")  # the first to state its data is not the one refused
        started = sites.silo(2)
        refused = outputs([started])[0]
        assert started.returncode == BAD_INPUT
        assert "silo-02: found 'data that the coordinator refused: " in refused
        assert "image features of width" in refused and "7" in refused and "12" in refused
        np.savez(tmp_path / "oslo" / "site2.npz", **narrow)
        printed = outputs([coordinator, sites.silo(2)])[0]
        for each in others:
            each.join(PATIENCE)
            assert not each.is_alive()
    finally:
        coordinator.kill()
    assert "refused: 1 data" in printed
    assert sites.summary()["versions"] == COMMON["rounds"]


def test_a_silo_that_lacks_its_gpu_says_so_before_it_connects(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    sites = Sites(tmp_path, "tcp://127.0.0.1:1")
    sites.write()
    run = resolved_file(sites.scenario, manual=True)
    arguments = SiloArguments(run, "silo-00", sites.uri, tmp_path / "berlin" / "keys", tmp_path / "out", "cuda:0")
    with pytest.raises(InputError, match="device: found 'cuda:0', allowed: auto, cpu, as PyTorch finds no GPU"):
        run_silo(arguments)


def test_a_silo_of_a_simulated_partition_with_another_file_is_refused_by_name(tmp_path: Path) -> None:
    sites = Sites(tmp_path, f"ipc://{tmp_path}/wire")
    sites.write()
    found = arrays()
    raw = {"name": "column", **COMMON, "partition": {"kind": "column", "column": "hospital"}}
    raw["data"] = {"name": "features", "path": "all.npz"}
    sites.scenario.write_text(yaml.safe_dump(raw))
    for folder in ("coordinator", *HOSPITALS):
        np.savez(tmp_path / folder / "all.npz", **found)
    np.savez(tmp_path / "oslo" / "all.npz", **(found | {"image": found["image"] + 1}))
    coordinator = sites.coordinator()
    try:
        where = ("--keys", "keys", "--connect", sites.uri)
        silo = sites.start("silo", str(sites.scenario), "--name", "silo-02", *where, folder="oslo")
        refused = outputs([silo])[0]
    finally:
        coordinator.kill()
        coordinator.communicate()
    assert "silo-02 has other data (digest " in refused
    assert "give every process the same data set" in refused


# ------------------------------------------------------------------------------------ stopped and killed coordinators
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
    same = printed("replay", run.folder.root, *named, "--json", "--quiet")
    assert json.loads(same)["events"] == 3 * ROUNDS
    assert "--site: found 'no data of evaluator'" in refused("replay", run.folder.root, *named[:-2], "--quiet")


def _simulated(root: Path) -> str:
    np.savez(root / "all.npz", **arrays())
    raw = {"name": "column", **COMMON, **MORE, "data": {"name": "features", "path": str(root / "all.npz")}}
    raw |= {"partition": {"kind": "column", "column": "hospital"}, "missing_modality": {"silos": {IMAGE_ONLY: "image"}}}
    raw |= {"evaluation": {"every": 4}}
    outcome = run_inline(Scenario.model_validate(raw), root / "together")
    assert outcome.summary is not None
    return outcome.summary.model_digest
