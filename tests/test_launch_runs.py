"""Runs with real processes, started and killed as a user does."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedmq.audit.log_checks import audit_run
from fedmq.launch.supervisor import private_folder
from fedmq.packages import __version__
from fedmq.wire.log_records import NoteRecord, read_log
from tests.command_line import completed
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE, wait_for, wait_for_merges

pytestmark = pytest.mark.slow
FEDMQ = str(Path(sys.executable).parent / "fedmq")


def scenario(path: Path, *options: str) -> dict[str, Any]:
    """Run or resume a scenario; returns its summary, and what it said on standard error."""
    done = subprocess.run(
        [FEDMQ, "scenario", str(path), "--json", "--quiet", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)) | {"said": done.stderr}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log for operators of the reference."""
    return tmp_path_factory.mktemp("runs") / "run.log"


@pytest.fixture(scope="module")
def reference(tiny: Path, log: Path) -> dict[str, Any]:
    out = log.with_name("reference")
    logs = ("--log-file", str(log), "--log-format", "json")
    summary = scenario(tiny, "--out", str(out), "--set", "rounds=12", *logs)
    assert not audit_run(out).findings
    for path in (out / "messages").glob("*.jsonl"):  # every process begins its log with its version
        assert isinstance(first := next(read_log(path))[1], NoteRecord) and first.facts["program"] == __version__
    return summary


def test_all_processes_of_a_scenario_log_to_one_file(log: Path, reference: dict[str, Any]) -> None:
    found, silos = [json.loads(line) for line in log.read_text().splitlines()], set(reference["per_silo"])
    assert re.fullmatch("every task is one optimiser step.*\n", reference["said"]), "a remark on the result, no log"
    assert {line["process"] for line in found} == {"coordinator", "evaluator", *silos}
    assert [line["round"] for line in found if line["event"] == "merged"] == [*range(1, 13)]
    by_coordinator = [
        (line["event"], line["peer"]) for line in found if line["process"] == "coordinator" and "peer" in line
    ]
    assert {peer for event, peer in by_coordinator if event == "connected"} == {"evaluator", *silos}
    assert {peer for event, peer in by_coordinator if event == "joined"} == silos


def test_processes_and_threads_give_the_same_model(tiny: Path, tmp_path: Path, reference: dict[str, Any]) -> None:
    assert run(resolved(tiny, "rounds=12"), tmp_path).summary.model_digest == reference["model_digest"]


def started(tiny: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start a run in its own session, by which its processes are found whatever their parents."""
    return subprocess.Popen(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--quiet", *options],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def members(session: int) -> list[psutil.Process]:
    """The processes of a session that are still running."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until_gone(session: int, seconds: float) -> None:
    wait_for(lambda: not members(session), seconds, f"processes of session {session} are left")


def end_all(process: subprocess.Popen[str]) -> None:
    for member in members(process.pid):
        member.kill()
    process.wait()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory for the programs that a test starts; its path is short, as Unix sockets require."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.mark.longest
def test_no_process_outlives_a_killed_command_and_the_run_can_be_resumed(
    tiny: Path, tmp_path: Path, reference: dict[str, Any], temporary: Path
) -> None:
    # Only the command is killed, while a silo is suspended and cannot end itself.
    out = tmp_path / "run"
    process = started(tiny, out, "--set", "rounds=12", "--set", "evaluation.every=6")
    try:
        wait_for_merges(out, 2)
        next(p for p in members(process.pid) if holds(p, "silo-01.jsonl")).suspend()
        process.kill()
        _, error = process.communicate(timeout=PATIENCE)
        wait_until_gone(process.pid, PATIENCE)
    finally:
        end_all(process)
    assert "Traceback" not in error
    # A killed run leaves its keys behind, which the next run removes.
    (left,) = temporary.glob("fedmq-run-*")
    assert (left / "keys").is_dir() and not (out / "summary.json").exists()
    summary = scenario(tiny, "--resume", str(out), "--set", "rounds=12", "--set", "evaluation.every=6")
    assert summary["model_digest"] == reference["model_digest"]
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("fedmq-slots-")] == []
    assert [path.name for path in temporary.glob("fedmq-slots-*/*")] in ([], ["lock"])  # elsewhere with XDG_RUNTIME_DIR


def test_a_run_does_not_remove_the_keys_of_a_concurrent_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stranger = tmp_path / "fedmq-run-elsewhere"
    stranger.symlink_to(tmp_path)
    with private_folder() as first, private_folder() as second:
        assert first != second
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        assert first.is_dir()
        assert second.is_dir()
    assert list(tmp_path.iterdir()) == [stranger]


def test_a_signal_while_silos_start_ends_them_immediately(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = started(tiny, out)
    try:
        # The coordinator listens as soon as the silos are started, before they open their logs.
        wait_for((out / "messages" / "coordinator.jsonl").exists, PATIENCE)
        os.killpg(process.pid, signal.SIGTERM)
        _, error = process.communicate(timeout=PATIENCE)
        wait_until_gone(process.pid, PATIENCE)
    finally:
        end_all(process)
    assert process.returncode == 1
    assert "--resume" in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("own_interpreters")
def test_ctrl_c_during_imports_prints_no_traceback(tiny: Path, tmp_path: Path) -> None:
    process = started(tiny, tmp_path / "run")
    try:
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=PATIENCE)
        wait_until_gone(process.pid, PATIENCE)
    finally:
        end_all(process)
    assert process.returncode != 0
    assert "preload" not in error


@pytest.mark.parametrize(("where", "said"), [("os.kill", "KeyboardInterrupt"), ("import interrupting", "fedmq: inter")])
def test_ctrl_c_is_never_lost(tmp_path: Path, where: str, said: str) -> None:
    """Neither in callbacks during imports nor where a script started the command in the background."""
    (tmp_path / "interrupting.py").write_text(
        "import os, signal, weakref\n"
        "class Gone: pass\n"
        "gone = Gone()\n"
        "there = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "del gone\n"
    )
    code = (
        "import os, signal; from fedmq.launch.interrupts import answer_interrupts\n"
        "answer_interrupts()\n" + where.replace("os.kill", "os.kill(os.getpid(), signal.SIGINT)") + "\nprint('went on')"
    )
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    found = subprocess.run(
        [*ignoring, sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert found.returncode == (-signal.SIGINT if said == "KeyboardInterrupt" else 1)
    assert said in found.stderr
    assert not found.stdout


def test_the_processes_of_a_run_do_not_import_the_command_line() -> None:
    """Each process runs the script that started the command once more, under another name."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__mp_main__'); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, FEDMQ], capture_output=True, text=True, check=True).stdout
    assert "fedmq.__main__" in found.split()
    assert not {"fedmq.cli.main", "typer", "rich"} & set(found.split())


def test_a_killed_silo_is_restarted_the_model_is_the_same_and_no_process_is_left(
    tiny: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    process = started(tiny, out, "--set", "rounds=12")
    wait_for_merges(out, 2)
    assert len(members(process.pid)) > 6, "the command, the coordinator, the evaluator and four silos"
    (silo,) = [member for member in members(process.pid) if holds(member, "silo-00.jsonl")]
    silo.kill()
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    assert json.loads((out / "summary.json").read_text())["model_digest"] == reference["model_digest"]
    records = [json.loads(line) for line in (out / "messages" / "silo-00.jsonl").read_text().splitlines()]
    assert sum(record.get("event") == "started" for record in records) == 2
    assert not audit_run(out).findings
    wait_until_gone(process.pid, PATIENCE)


def holds(process: psutil.Process, name: str) -> bool:
    try:
        return any(file.path.endswith(name) for file in process.open_files())
    except psutil.Error:
        return False


def test_ctrl_c_stops_cleanly_a_slow_stop_is_reported_and_the_run_can_be_resumed(
    tiny: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    process = started(tiny, out, "--set", "rounds=12")
    try:
        wait_for_merges(out, 2)
        silo = next(p for p in members(process.pid) if holds(p, "silo-01.jsonl"))
        silo.suspend()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stderr is not None
        expected = f"stopping; press Ctrl-C again to abort; continue with --resume {out}\n"
        assert process.stderr.readline() == expected
        assert process.stderr.readline().startswith("stopping: waiting")
        silo.resume()
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        end_all(process)
    assert process.returncode == 1 and "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("stopped; ")]
    command = line.removeprefix("stopped; continue with fedmq ").split()
    assert command[-2:] == ["--resume", str(out)]
    done = completed(*command, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_digest"] == reference["model_digest"]
    assert not audit_run(out).findings
