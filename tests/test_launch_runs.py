"""Runs with real processes, started and killed as a user does."""

from __future__ import annotations

import json
import os
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
from tests.command_line import completed
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE, wait_for, wait_for_merges

pytestmark = pytest.mark.slow
FEDMQ = str(Path(sys.executable).parent / "fedmq")


def scenario(path: Path, *options: str) -> dict[str, Any]:
    """Run or resume a scenario; returns its summary."""
    done = subprocess.run(
        [FEDMQ, "scenario", str(path), "--json", "--quiet", *options],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("runs") / "reference"
    summary = scenario(tiny, "--out", str(out), "--set", "rounds=12")
    assert not audit_run(out).findings
    return summary


def test_processes_and_threads_give_the_same_model(tiny: Path, tmp_path: Path, reference: dict[str, Any]) -> None:
    assert run(resolved(tiny, "rounds=12"), tmp_path).summary.model_digest == reference["model_digest"]


def test_a_run_leaves_no_process_behind(tiny: Path, tmp_path: Path) -> None:
    process = started(tiny, tmp_path / "run")
    most = 0
    while process.poll() is None:
        most = max(most, len(members(process.pid)))
        time.sleep(0.05)
    assert process.returncode == 0
    assert most > 6, "the command, the coordinator, the evaluator and four silos"
    wait_until_gone(process.pid, PATIENCE)


@pytest.mark.parametrize("merges", [1, 4, 9])
def test_a_run_killed_at_any_point_and_resumed_gives_the_same_model(
    tiny: Path, tmp_path: Path, reference: dict[str, Any], merges: int
) -> None:
    out = tmp_path / "run"
    options = ("--set", "rounds=12")
    process = subprocess.Popen(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--quiet", *options],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_merges(out, merges)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (out / "summary.json").exists()
    done = completed("scenario", tiny, "--resume", out, "--json", "--quiet", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_digest"] == reference["model_digest"]


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


def test_no_process_outlives_a_killed_command_and_the_run_can_be_resumed(
    tiny: Path, tmp_path: Path, reference: dict[str, Any], temporary: Path
) -> None:
    # Only the command is killed; in the first run a silo is suspended meanwhile and cannot end itself.
    for merges, frozen in ((1, True), (1, False), (3, False)):
        out = tmp_path / f"run-{merges}-{frozen}"
        process = started(tiny, out, "--set", "rounds=12", "--set", "evaluation.every=6")
        try:
            wait_for_merges(out, merges)
            if frozen:
                next(p for p in members(process.pid) if holds(p, "silo-01.jsonl")).suspend()
            process.kill()
            _, error = process.communicate(timeout=PATIENCE)
            wait_until_gone(process.pid, PATIENCE)
        finally:
            end_all(process)
        assert "Traceback" not in error
        # A killed run leaves its keys behind; the next run removes those of the one killed before it.
        (left,) = temporary.glob("fedmq-run-*")
        assert (left / "keys").is_dir()
    summary = resumed(tiny, out, "rounds=12", "evaluation.every=6")
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


def resumed(tiny: Path, out: Path, *settings: str) -> dict[str, Any]:
    return scenario(tiny, "--resume", str(out), *(part for setting in settings for part in ("--set", setting)))


def test_a_slow_stop_is_reported(tiny: Path, tmp_path: Path, reference: dict[str, Any]) -> None:
    assert reference
    process = started(tiny, tmp_path / "run", "--set", "rounds=200")
    try:
        wait_for_merges(tmp_path / "run", 1)
        silo = next(p for p in members(process.pid) if holds(p, "silo-01.jsonl"))
        silo.suspend()
        os.kill(process.pid, signal.SIGINT)
        assert process.stderr is not None
        expected = f"stopping; press Ctrl-C again to abort; continue with --resume {tmp_path / 'run'}\n"
        assert process.stderr.readline() == expected
        assert process.stderr.readline().startswith("stopping: waiting")
        silo.resume()
        _, error = process.communicate(timeout=PATIENCE)
    finally:
        end_all(process)
    assert process.returncode == 1
    assert "--resume" in error


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_silos_start_ends_them_immediately(tiny: Path, tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "run"
    process = started(tiny, out)
    try:
        # The coordinator listens as soon as the silos are started, before they open their logs.
        wait_for((out / "messages" / "coordinator.jsonl").exists, PATIENCE)
        os.killpg(process.pid, how)
        _, error = process.communicate(timeout=PATIENCE)
        wait_until_gone(process.pid, PATIENCE)
    finally:
        end_all(process)
    assert process.returncode == 1
    assert "--resume" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_ctrl_c_during_imports_prints_no_traceback(tiny: Path, tmp_path: Path, seconds: float) -> None:
    process = started(tiny, tmp_path / "run")
    try:
        time.sleep(seconds)
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


def test_a_killed_silo_is_restarted_and_the_model_is_the_same(
    tiny: Path, tmp_path: Path, reference: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--quiet", "--json", "--set", "rounds=12"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    wait_for_merges(out, 2)
    holders = [p for p in psutil.Process(process.pid).children(recursive=True) if holds(p, "silo-00.jsonl")]
    assert len(holders) == 1
    holders[0].kill()
    output, _ = process.communicate(timeout=PATIENCE)
    assert json.loads(output)["model_digest"] == reference["model_digest"]
    started = [json.loads(line) for line in (out / "messages" / "silo-00.jsonl").read_text().splitlines()]
    assert sum(record.get("event") == "started" for record in started) == 2
    assert not audit_run(out).findings


def holds(process: psutil.Process, name: str) -> bool:
    try:
        return any(file.path.endswith(name) for file in process.open_files())
    except psutil.Error:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_the_run_can_be_resumed(
    tiny: Path, tmp_path: Path, reference: dict[str, Any], how: signal.Signals
) -> None:
    """So does a signal that a scheduler sends to all processes of a run."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [FEDMQ, "scenario", str(tiny), "--out", str(out), "--set", "rounds=12"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_merges(out, 2)
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("stopped; ")]
    command = line.removeprefix("stopped; continue with fedmq ").split()
    assert command[-2:] == ["--resume", str(out)]
    done = completed(*command, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_digest"] == reference["model_digest"]
    assert not audit_run(out).findings


def test_manually_launched_programs_give_the_same_model(tiny: Path, tmp_path: Path, reference: dict[str, Any]) -> None:
    keys, out = tmp_path / "keys", tmp_path / "run"
    assert completed("keys", "init", keys, "--silos", "4").returncode == 0
    common = [str(tiny), "--keys", str(keys), "--out", str(out), "--set", "rounds=12"]
    coordinator = subprocess.Popen(
        [FEDMQ, "coordinator", *common, "--bind", "tcp://127.0.0.1:*"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert coordinator.stderr is not None
    uri = next(line.split("uri=")[1].split()[0] for line in coordinator.stderr if "listening" in line)
    peers = [
        subprocess.Popen([FEDMQ, *command, *common, "--connect", uri, "--device", "cpu"], stderr=subprocess.DEVNULL)
        for command in (["evaluator"], *(["silo", "--name", f"silo-0{index}"] for index in range(4)))
    ]
    try:
        coordinator.communicate(timeout=PATIENCE)
        assert coordinator.returncode == 0
        for peer in peers:
            assert peer.wait(PATIENCE) == 0
    finally:
        for process in (coordinator, *peers):
            if process.poll() is None:
                process.kill()
    assert json.loads((out / "summary.json").read_text())["model_digest"] == reference["model_digest"]
    assert not audit_run(out).findings


def test_the_wheel_contains_exactly_the_four_packages(tmp_path: Path) -> None:
    import zipfile

    root = Path(__file__).parent.parent
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert names == {"fedmq", "protocols", "silos", "coordinator"}
    metadata = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    assert b"Private :: Do Not Upload" in zipfile.ZipFile(wheel).read(metadata)
