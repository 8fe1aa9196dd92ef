"""``launcher: slurm``: on a cluster of Slurm where one answers, else with submitit's local executor."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.config import loader
from fedmq.errors import InputError
from fedmq.launch.remote_peer import DIED
from fedmq.launch.slurm_cluster import LocalJobs, SlurmCluster, SlurmJobs, SlurmProcess
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.threaded_run import resolved

submitit = pytest.importorskip("submitit")
FEDMQ = str(Path(sys.executable).parent / "fedmq")


def slurm_answers() -> bool:
    try:
        return subprocess.run(["squeue", "--me"], capture_output=True, check=False, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def command(path: Path, text: str) -> None:
    """A command of Slurm that does what a line of shell says."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for commands of Slurm that the programs find before any others."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.mark.slow
def test_a_run_of_jobs_has_the_model_of_any_other_and_leaves_their_logs(tiny: Path, tmp_path: Path) -> None:
    settings = ("silos.hosts=1", "launcher=slurm", "silos.needs.cpus=0.5", "silos.needs.memory_gb=1")
    out = tmp_path / "run"
    options = [part for each in settings for part in ("--set", each)]
    environment = os.environ if slurm_answers() else {**os.environ, "FEDMQ_SLURM": "local"}
    done = subprocess.run(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--json", "--quiet", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    expected = in_process_run.run(resolved(tiny), tmp_path / "expected")
    assert json.loads(done.stdout)["model_digest"] == expected.summary.model_digest
    assert not audit_run(out).findings
    assert sorted(path.name for path in (out / "messages").iterdir()) == [
        *("coordinator.jsonl", "evaluator.jsonl", "silo-00.jsonl", "silo-01.jsonl", "silo-02.jsonl", "silo-03.jsonl")
    ]
    # No private key stays behind.
    jobs = out / "jobs"
    assert sorted(path.name.rpartition("-")[0] for path in jobs.iterdir()) == ["evaluator", "host-0"]
    assert all(path.suffix == ".log" for path in jobs.iterdir())
    assert stat.S_IMODE(jobs.stat().st_mode) == 0o700


def test_a_job_that_is_killed_has_died_and_its_log_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=60)
    job = executor.submit(time.sleep, 60)
    process = SlurmProcess(submitit, LocalJobs(), job, "silo-00", RunFolder(tmp_path))
    assert process.is_alive()
    until = time.monotonic() + 30
    while not job.paths.stdout.exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.kill()
    process.kill()  # a second time, as at the end of a run
    process.join(30)
    log = tmp_path / "jobs" / f"silo-00-{job.job_id}.log"
    assert process.exitcode == DIED
    assert f"silo-00: job {job.job_id} ended as " in (said := capfd.readouterr().err)
    assert str(log) in said
    assert log.exists()


def test_the_state_of_a_job_is_what_squeue_says_or_said(commands: Path, capfd: pytest.CaptureFixture[str]) -> None:
    jobs, first, second = SlurmJobs(), SimpleNamespace(job_id="17"), SimpleNamespace(job_id="18")

    def ask(text: str) -> tuple[str, str]:
        command(commands / "squeue", text)
        jobs.asked = float("-inf")
        return jobs.ended(first), jobs.ended(second)

    assert jobs.ended(first) == jobs.ended(second) == ""
    assert ask("echo '17|RUNNING|None'; echo '18|PENDING|Resources'; echo '99|PENDING|Priority'") == ("", "")
    assert ask("echo '17|NODE_FAIL|NodeDown'; echo '18|PENDING|Resources'") == ("NODE_FAIL", "")
    assert ask("echo slurm_load_jobs error >&2; exit 1") == ("NODE_FAIL", "")
    assert ask("echo '18|COMPLETED|None'") == ("FORGOTTEN", "COMPLETED")
    # One line for each reason, about the run's own jobs.
    assert capfd.readouterr().err == "slurm: jobs in the queue: 1 (Resources)\n"


def test_a_job_that_waits_is_cancelled_and_one_that_runs_may_end_by_itself(commands: Path, tmp_path: Path) -> None:
    command(commands / "scancel", f'echo "$@" >> {tmp_path}/said')
    SlurmJobs().terminate(SimpleNamespace(job_id="17"))
    assert (tmp_path / "said").read_text() == "--state=PENDING 17\n--full --signal=TERM 17\n"


def test_jobs_of_a_command_that_was_killed_are_cancelled_before_the_run_goes_on(
    tiny: Path, tmp_path: Path, commands: Path
) -> None:
    for name, text in (("squeue", "true"), ("sbatch", "true"), ("srun", "true")):
        command(commands / name, text)
    command(commands / "scontrol", "echo 'SlurmctldHost[0] = localhost'")
    command(commands / "sinfo", "echo localhost")
    command(commands / "scancel", f'echo "$@" >> {tmp_path}/said')
    left = tmp_path / "jobs" / "17_submitted.pkl"
    left.parent.mkdir()
    left.write_bytes(b"")
    with SlurmCluster.connected(loader.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path)) as cluster:
        assert (tmp_path / "said").read_text() == "--full --signal=USR1 17\n17\n"
        assert not left.exists()
        assert cluster.bind.startswith("tcp://")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("silos.needs.gpus=0.5",), "silos.needs.gpus: found 0.5, allowed: a whole number"),
        (("faults=[{kind: freeze, rounds: [1, 2], seconds: 1}]",), "faults: found 'freeze'"),
        (("silos.needs.cpus=900.5",), "silos.needs: found '--cpus-per-task=901: .* not available'"),
    ],
)
def test_what_slurm_cannot_do_is_refused_before_the_run(
    tiny: Path, tmp_path: Path, commands: Path, settings: tuple[str, ...], message: str
) -> None:
    command(commands / "squeue", "true")
    refusal = "allocation failure: Requested node configuration is not available"
    command(commands / "sbatch", f"echo '{refusal}' >&2; exit 1")
    connected: Any = SlurmCluster.connected(loader.load(tiny, ("launcher=slurm", *settings)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=message), connected:
        pass
    assert not (tmp_path / "jobs").exists()


def test_without_slurm_the_error_says_how_to_rehearse(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FEDMQ_SLURM", raising=False)
    connected: Any = SlurmCluster.connected(loader.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=r"launcher slurm: found .*No such file.*FEDMQ_SLURM=local"), connected:
        pass


def test_submitit_is_needed_only_by_its_launcher(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    connected: Any = SlurmCluster.connected(loader.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=r"launcher slurm: found 'package submitit missing'.*\[slurm\]"), connected:
        pass
