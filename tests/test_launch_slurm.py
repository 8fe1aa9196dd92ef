"""``launcher: slurm``: on a cluster of Slurm where one answers, else with submitit's local executor."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from fedmq.audit.log_checks import audit_run
from fedmq.config import resolve as scenarios
from fedmq.errors import InputError
from fedmq.launch.remote_peer import DIED
from fedmq.launch.slurm_cluster import LocalJobs, SlurmCluster, SlurmJobs, SlurmProcess
from fedmq.storage.run_folder import RunFolder
from tests import in_process_run
from tests.threaded_run import resolved
from tests.waiting import PATIENCE

submitit = pytest.importorskip("submitit")
#: The tests wait for what happens, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(900)
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


class Malicious:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def watch(started: subprocess.Popen[str], jobs: Path, trap: Path) -> tuple[set[str], set[str], int]:
    """Plant a result that sets off a trap when it is unpickled for each job of a run, until the run ends.

    Returns:
        Names of the jobs' key files, paths of all other files that contained a part of a private key, and the number
        of planted results.
    """
    keys: dict[str, bytes] = {}
    found: set[str] = set()
    planted: set[Path] = set()
    while started.poll() is None:
        # `os.walk` passes over a folder that is removed meanwhile; `Path.rglob` raises.
        for path in [Path(folder, name) for folder, _, names in os.walk(jobs) for name in names]:
            with contextlib.suppress(FileNotFoundError):  # a job removes its files while they are looked at
                content = path.read_bytes()
                if path.suffix == ".key" and b"PRIVATE" in content:
                    assert stat.S_IMODE(path.parents[1].stat().st_mode) == 0o700
                    assert stat.S_IMODE(path.stat().st_mode) == 0o600
                    keys[path.name] = content
                elif any(part in content for key in keys.values() for part in secret(key)):
                    found.add(str(path))
                result = path.with_name(path.name.replace("_submitted.pkl", "_0_result.pkl"))
                if result != path and result not in planted:
                    result.write_bytes(pickle.dumps(("success", Malicious(trap))))
                    planted.add(result)
        time.sleep(0.05)
    return set(keys), found, len(planted)


def secret(key: bytes) -> tuple[bytes, bytes]:
    """What gives a private key away: its line of the PEM file, and its 32 bytes."""
    private: Any = serialization.load_pem_private_key(key, None)
    return key.splitlines()[1], private.private_bytes_raw()


@pytest.mark.slow
def test_a_run_of_jobs_has_the_model_of_any_other_and_unpickles_nothing(tiny: Path, tmp_path: Path) -> None:
    settings = ("silos.hosts=1", "launcher=slurm", "silos.needs.cpus=0.5", "silos.needs.memory_gb=1")
    out = tmp_path / "run"
    options = [part for each in settings for part in ("--set", each)]
    environment = os.environ if slurm_answers() else {**os.environ, "FEDMQ_SLURM": "local"}
    started = subprocess.Popen(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--json", "--quiet", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    jobs, trap = out / "jobs", tmp_path / "unpickled"
    try:
        keys, found, planted = watch(started, jobs, trap)
        printed, said = started.communicate()
    finally:
        started.kill()
    assert started.returncode == 0, said
    assert keys == {"evaluator.key", *(f"silo-0{index}.key" for index in range(4))}
    assert not found
    assert planted == 2
    assert not trap.exists()
    expected = in_process_run.run(resolved(tiny), tmp_path / "expected")
    assert json.loads(printed)["model_digest"] == expected.summary.model_digest
    assert not audit_run(out).findings
    assert sorted(path.name for path in (out / "messages").iterdir()) == [
        *("coordinator.jsonl", "evaluator.jsonl", "silo-00.jsonl", "silo-01.jsonl", "silo-02.jsonl", "silo-03.jsonl")
    ]
    # No private key stays behind.
    assert sorted(path.name.rpartition("-")[0] for path in jobs.iterdir()) == ["evaluator", "host-0"]
    assert all(path.suffix == ".log" for path in jobs.iterdir())
    assert stat.S_IMODE(jobs.stat().st_mode) == 0o700


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SlurmProcess]:
    """A job that sleeps for a minute, as that of silo-00."""
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(timeout_min=60)
    job = executor.submit(time.sleep, 60)
    place = tmp_path / "jobs" / "silo-00-x"
    place.mkdir()
    made = SlurmProcess(LocalJobs(), job, place, "silo-00", ("silo-00",), RunFolder(tmp_path))
    while not job.paths.stdout.exists():
        time.sleep(0.02)
    yield made
    LocalJobs().cancel(job)


def test_a_job_that_is_killed_has_died_and_its_log_is_named(
    process: SlurmProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert process.is_alive()
    process.kill()
    process.kill()  # a second time, as at the end of a run
    process.join(PATIENCE)
    (log,) = (tmp_path / "jobs").glob("silo-00-*.log")
    assert process.exitcode == DIED
    assert "silo-00: job " in (said := capfd.readouterr().err)
    assert " ended as " in said
    assert str(log) in said
    assert not (tmp_path / "jobs" / "silo-00-x").exists()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: path.symlink_to("/etc/hostname"), "symbolic links"),
        (os.mkfifo, "a FIFO"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_bytes(pickle.dumps(Malicious(path.parents[2] / "unpickled"))), "Ended"),
        (lambda path: path.write_text('{"code": 0, "files": [{"path": "x", "content": ""}]}'), "found 'x'"),
        (lambda path: path.touch() or os.truncate(path, (1 << 30) + 1), "bytes"),
    ],
)
def test_a_job_whose_result_is_not_allowed_has_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], made: Callable[[Path], object], message: str
) -> None:
    place = tmp_path / "jobs" / "silo-00-x"
    place.mkdir(parents=True)
    job = SimpleNamespace(job_id="7", paths=SimpleNamespace(folder=place.parent, stdout=place.parent / "7.log"))
    made(place / "result.json")
    assert SlurmProcess(LocalJobs(), job, place, "silo-00", ("silo-00",), RunFolder(tmp_path)).exitcode == 1
    said = capfd.readouterr().err
    assert said.startswith("silo-00: ")
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs"]


def test_the_state_of_a_job_is_the_last_one_that_squeue_reported(
    commands: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs, first, second = SlurmJobs(), SimpleNamespace(job_id="17"), SimpleNamespace(job_id="18")

    def ask(text: str) -> tuple[str, str]:
        command(commands / "squeue", text)
        jobs.asked = float("-inf")
        return jobs.ended(first), jobs.ended(second)

    assert ask("exit 1") == ("", "")
    assert ask("echo '17|RUNNING|None'; echo '18|PENDING|Resources'; echo '99|PENDING|Priority'") == ("", "")
    assert ask("echo '17|NODE_FAIL|NodeDown'; echo '18|PENDING|Resources'") == ("NODE_FAIL", "")
    assert ask("echo slurm_load_jobs error >&2; exit 1") == ("NODE_FAIL", "")
    assert ask("echo '18|COMPLETED|None'") == ("FORGOTTEN", "COMPLETED")
    # One line for each reason, about the run's own jobs.
    assert capfd.readouterr().err == "slurm: jobs in the queue: 1 (Resources)\n"


def test_jobs_of_a_killed_command_are_cancelled_before_the_run_continues(
    tiny: Path, tmp_path: Path, commands: Path
) -> None:
    # Job 18 is another one of the user's.
    squeue = "echo '17|fedmq silo-00'; echo '18|train'; echo '19|fedmq silo-01'"
    for name, text in (("squeue", squeue), ("sbatch", "true"), ("srun", "true")):
        command(commands / name, text)
    command(commands / "scontrol", "echo 'SlurmctldHost[0] = localhost'")
    command(commands / "sinfo", "echo localhost")
    command(commands / "scancel", f'echo "$@" >> {tmp_path}/said')
    jobs, trap = tmp_path / "jobs", tmp_path / "unpickled"
    (jobs / "silo-00-x" / "keys").mkdir(parents=True)
    for number in ("17", "18", "--user=root"):
        (jobs / f"{number}_submitted.pkl").write_bytes(pickle.dumps(Malicious(trap)))
    (jobs / "silo-00-17.log").touch()
    with SlurmCluster.connected(scenarios.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path)) as cluster:
        assert (tmp_path / "said").read_text() == "17\n"
        assert [path.name for path in jobs.iterdir()] == ["silo-00-17.log"]
        assert not trap.exists()
        assert cluster.bind.startswith("tcp://")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("silos.needs.gpus=0.5",), "silos.needs.gpus: found 0.5, allowed: a whole number"),
        (("silos.needs.cpus=900.5",), "silos.needs: found '--cpus-per-task=901: .* not available'"),
    ],
)
def test_what_slurm_cannot_do_is_refused_before_the_run(
    tiny: Path, tmp_path: Path, commands: Path, settings: tuple[str, ...], message: str
) -> None:
    command(commands / "squeue", "true")
    refusal = "allocation failure: Requested node configuration is not available"
    command(commands / "sbatch", f"echo '{refusal}' >&2; exit 1")
    connected: Any = SlurmCluster.connected(scenarios.load(tiny, ("launcher=slurm", *settings)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=message), connected:
        pass
    assert not (tmp_path / "jobs").exists()


def test_a_folder_of_jobs_that_is_a_link_is_refused(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FEDMQ_SLURM", "local")
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "jobs").symlink_to("elsewhere")
    connected: Any = SlurmCluster.connected(scenarios.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path))
    with pytest.raises(InputError, match="jobs: found 'a link'"), connected:
        pass
    assert stat.S_IMODE((tmp_path / "elsewhere").stat().st_mode) == 0o755


def test_without_slurm_the_error_says_how_to_rehearse(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FEDMQ_SLURM", raising=False)
    connected: Any = SlurmCluster.connected(scenarios.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=r"launcher slurm: found .*No such file.*FEDMQ_SLURM=local"), connected:
        pass


def test_submitit_is_needed_only_by_its_launcher(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    connected: Any = SlurmCluster.connected(scenarios.load(tiny, ("launcher=slurm",)), RunFolder(tmp_path))
    with pytest.raises(InputError, match=r"launcher slurm: found 'package submitit missing'.*\[slurm\]"), connected:
        pass
