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
from fedmq.errors import InputError
from fedmq.launch.private_folder import private_folder
from fedmq.launch.processes import Limits, plan_hosting
from tests.command_line import completed
from tests.waiting import PATIENCE

FEDMQ = str(Path(sys.executable).parent / "fedmq")
ENOUGH = Limits(memory=1 << 50, descriptors=1 << 20)


def planned(tiny: Path, limits: Limits, *settings: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    hosting = plan_hosting(scenarios.load(tiny, settings), limits)
    return hosting.hosts, hosting.reason


def test_silos_are_separate_processes_if_the_machine_allows_it(tiny: Path) -> None:
    assert planned(tiny, ENOUGH, "silos.count=100") == ((), "")


def test_silos_share_hosts_where_too_few_files_may_be_open(tiny: Path) -> None:
    hosts, reason = planned(tiny, Limits(1 << 50, 150), "silos.count=70", "silos.slots=2")
    assert len(hosts) == 4
    assert sorted(name for host in hosts for name in host) == [f"silo-{number:02d}" for number in range(70)]
    assert reason == (
        "70 silos share 4 host processes: a process for each needs about 204 open files, and 150 are allowed"
    )


def test_silos_share_hosts_where_memory_is_short(tiny: Path) -> None:
    hosts, reason = planned(
        tiny, Limits(4 << 30, 1 << 20), "silos.count=1000", "silos.slots=2", "missing_modality.silos={}"
    )
    assert len(hosts) == 4
    assert "GiB of memory, and 4.0 GiB are available" in reason


def test_no_host_opens_more_logs_than_it_may_open_files(tiny: Path) -> None:
    hosts, _ = planned(tiny, Limits(1 << 50, 150), "silos.count=1000", "silos.slots=2", "missing_modality.silos={}")
    assert 2 * max(map(len, hosts)) <= 150 - 64
    assert sum(map(len, hosts)) == 1000


def test_a_number_of_hosts_chosen_by_the_user_prints_no_message(tiny: Path) -> None:
    assert planned(tiny, ENOUGH, "silos.hosts=2") == ((("silo-00", "silo-02"), ("silo-01", "silo-03")), "")
    assert len(planned(tiny, ENOUGH, "silos.hosts=9")[0]) == 4


def test_a_limit_of_open_files_that_no_run_can_start_with_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="open files: found 40, allowed: at least 80"):
        planned(tiny, Limits(1 << 50, 40))


def test_the_run_id_does_not_depend_on_the_hosts(tiny: Path) -> None:
    from fedmq.federation.population import run_name

    assert run_name(scenarios.load(tiny)) == run_name(scenarios.load(tiny, ("silos.hosts=2",)))


def test_a_temporary_folder_with_a_long_path_is_not_used_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with private_folder() as private:
        assert len(f"{private}/wire") < 107


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


@pytest.fixture(scope="module")
def digest(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(finished(tiny, tmp_path_factory.mktemp("own") / "run")[0]["model_digest"])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_hosted_silos_give_the_model_of_silos_in_separate_processes(
    tiny: Path, tmp_path: Path, digest: str, hosts: int
) -> None:
    summary, said = finished(tiny, tmp_path / "run", "--set", f"silos.hosts={hosts}")
    assert summary["model_digest"] == digest
    assert not said
    logs = {path.stem for path in (tmp_path / "run" / "messages").glob("*.jsonl")}
    assert logs == {"coordinator", "evaluator", "silo-00", "silo-01", "silo-02", "silo-03"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "{kind: crash, silos: [silo-01], rounds: [1, 3]}",
        "{kind: freeze, silos: [silo-01], rounds: [1, 3], seconds: 1}",
        "{kind: leave, silos: [silo-01], rounds: [1, 3]}",
    ],
)
def test_faults_of_a_hosted_silo_are_carried_out_on_its_host(tiny: Path, tmp_path: Path, fault: str) -> None:
    options = ("--set", f"faults=[{fault}]", "--set", "participation=1.0")
    own, _ = finished(tiny, tmp_path / "own", *options)
    hosted, _ = finished(tiny, tmp_path / "hosted", *options, "--set", "silos.hosts=2")
    assert hosted["model_digest"] == own["model_digest"]
    record = (tmp_path / "hosted" / "messages" / "coordinator.jsonl").read_text()
    assert '"event":"fault"' in record.replace(" ", "")


@pytest.mark.slow
def test_thirty_silos_run_with_at_most_90_open_files(tiny: Path, tmp_path: Path) -> None:
    settings = ("silos.count=30", "silos.slots=2", "rounds=1", "partition.kind=iid")
    options = [part for each in settings for part in ("--set", each)]
    summary, said = finished(tiny, tmp_path / "run", *options, files=90)
    assert summary["processes"]["silos"] == 30
    assert "\n30 silos share 4 host processes" in f"\n{said}"
