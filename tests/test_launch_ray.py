"""``launcher: ray`` on a real cluster of two nodes on this machine; skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.config import resolve as scenarios
from fedmq.errors import InputError
from fedmq.launch.ray_cluster import RayCluster
from fedmq.storage.run_folder import RunFolder

ray = pytest.importorskip("ray")
FEDMQ = str(Path(sys.executable).parent / "fedmq")
#: Ray takes a minute to start on an idle machine of two cores; each test waits for what happens, up to this limit.
pytestmark = pytest.mark.timeout(1800)
SETTINGS = (
    "silos.count=12",
    "missing_modality.silos={}",
    "partition.kind=iid",
    "rounds=8",
    "participation=1.0",
    "launcher=ray",
    "silos.needs.cpus=0.15",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 2, "object_store_memory": 80 << 20}
    # By default Ray's processes get the least priority, and take many minutes to start on a busy machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        made = Cluster(initialize_head=True, head_node_args=store)
        yield made
        made.shutdown()


def command(tiny: Path, out: Path, *settings: str) -> list[str]:
    options = [part for each in (*SETTINGS, *settings) for part in ("--set", each)]
    return [FEDMQ, "scenario", str(tiny), "--out", str(out), "--json", "--quiet", *options]


@pytest.mark.slow
def test_a_run_survives_a_node_that_dies_with_its_silos(tiny: Path, tmp_path: Path, cluster: Any) -> None:
    expected = subprocess.run(
        command(tiny, tmp_path / "inline", "launcher=inline"), capture_output=True, text=True, check=True
    )
    temporary, before = Path(tempfile.gettempdir()), time.time()
    second = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    out = tmp_path / "run"
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    started = subprocess.Popen(
        command(tiny, out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        metrics = out / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count('"merge"') < 2:
            assert started.poll() is None, started.communicate()[1]
            time.sleep(0.05)
        cluster.remove_node(second, allow_graceful=False)
        printed, said = started.communicate()
    finally:
        started.kill()
    assert started.returncode == 0, said
    assert "NodeDiedError" in said or "WorkerCrashedError" in said, said
    assert json.loads(printed)["model_digest"] == json.loads(expected.stdout)["model_digest"]
    assert not audit_run(out).findings
    # What the dead node's processes leave contains no key.
    left = [path for path in temporary.glob("fedmq-peer-*/keys/*") if path.stat().st_mtime > before]
    assert not [path for path in left if path.name != "accepted"]
    assert len(list((out / "messages").glob("silo-*.jsonl"))) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("silos.needs.gpus=1", "silos.needs.gpus: found '13 GPU"),
        ("silos.needs.cpus=5", "silos.needs.cpus: found '65 CPU"),
        ("faults=[{kind: freeze, rounds: [1, 2], seconds: 1}]", "faults: found 'freeze'"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused_before_the_run(
    tiny: Path, tmp_path: Path, cluster: Any, setting: str, message: str
) -> None:
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        command(tiny, tmp_path / "run", setting), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_without_a_cluster_the_error_says_how_to_start_one(tiny: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    scenario = scenarios.load(tiny, SETTINGS)
    assert scenario.launcher == "ray"
    done = subprocess.run(command(tiny, tmp_path / "run"), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert "ray start --head" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ray_is_needed_only_by_its_launcher(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(InputError, match=r"launcher ray: found 'package ray missing'.*\[ray\]"),
        RayCluster.connected(scenarios.load(tiny, SETTINGS), RunFolder(tmp_path)),
    ):
        pass
