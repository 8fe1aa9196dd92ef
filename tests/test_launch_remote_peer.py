"""Processes on other machines, whatever engine places them: what is sent to them, and what they return."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import protocols
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config import resolve as scenarios
from fedmq.config.resolve import ResolvedRun, Source, resolve
from fedmq.errors import InputError
from fedmq.evaluation.program import EvaluatorArguments
from fedmq.launch import forkserver, remote_peer
from fedmq.launch.remote_peer import (
    Ended,
    PeerArguments,
    PeerFile,
    PeerFiles,
    PeerTask,
    RemoteProcess,
    decode,
    earlier_files,
    encode,
    key_files,
    refuse_local_only,
    run_peer,
    take_keys,
    write_private,
)
from fedmq.storage.logs import LogOptions
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys, load_identity
from silos.host import HostArguments
from silos.tasks import SiloArguments
from tests import in_process_run, threaded_run


class Collector(RemoteProcess):
    """A process that has ended; its result is given by the test."""

    def poll(self) -> int | None:
        return 0

    def kill(self) -> None: ...


@pytest.fixture
def run(tiny: Path) -> ResolvedRun:
    return resolve(Source(tiny, scenarios.load(tiny)), protocols)


def file(path: str) -> dict[str, str]:
    return {"path": path, "content": "aGVsbG8="}


def test_processes_on_other_machines_cannot_share_memory(tiny: Path) -> None:
    shared = scenarios.load(tiny, ["wire.transport=shm", "launcher=ray"])
    refuse_local_only(scenarios.load(tiny, ["launcher=ray"]))  # the default is of launcher local only
    with pytest.raises(InputError, match=r"wire.transport: found 'shm', allowed: ipc with launcher ray"):
        refuse_local_only(shared)


def test_the_arguments_of_every_program_arrive_as_they_were_sent(run: ResolvedRun, tmp_path: Path) -> None:
    # The scenario before its names were looked up stays with the command.
    run, logs = replace(run, source=Source(run.source.file, run.scenario)), LogOptions(file=tmp_path / "log")
    silo = SiloArguments(run, "silo-01", "tcp://host:1", tmp_path, tmp_path, "cpu", tmp_path, logs=logs)
    host = HostArguments(("silo-01", "silo-03"), silo, 2, 1)
    evaluator = EvaluatorArguments(run, "tcp://host:1", tmp_path, tmp_path, "cpu")
    for arguments in (silo, host, evaluator):
        task = decode(PeerTask, encode(PeerTask.of(arguments, gpu=False)), "a task")
        assert task.arguments(tmp_path, tmp_path) == arguments
    assert PeerTask.of(silo, gpu=True).device == "cuda:0"


def test_a_scenario_of_each_kind_arrives_with_the_id_of_its_run(tmp_path: Path) -> None:
    for name in ("smoke", "rcsr_mr50", "fedcafe/openmoji"):
        path = Path("scenarios").resolve() / f"{name}.yaml"
        run = resolve(Source(path, scenarios.load(path)), protocols, weights=False)
        task = PeerTask.of(SiloArguments(run, "silo-00", "tcp://host:1", tmp_path, tmp_path), gpu=False)
        assert decode(PeerTask, encode(task), "a task") == task


def test_a_task_with_another_scenario_is_refused(run: ResolvedRun, tmp_path: Path) -> None:
    task = json.loads(encode(PeerTask.of(SiloArguments(run, "silo-01", "tcp://x:1", tmp_path, tmp_path), gpu=False)))
    task["scenario"]["rounds"] += 1
    ended = run_peer(json.dumps(task).encode(), tmp_path, {})
    assert ended.code == 2
    assert "task of this process" in ended.error
    assert "the scenario is not that of the run" in ended.error


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (b"\x80\x04\x95", "Ended"),
        ({"code": "0"}, "code: found '0'"),
        ({"code": 0, "run": "rm"}, "run: found 'rm'"),
        ({"code": 0, "error": "a" * 5000}, "error: found 'aaa"),
        ({"code": 0, "files": [file("messages/../../x")]}, "files.0.path: found 'messages/../../x'"),
        ({"code": 0, "files": [file("messages/silo-01.jsonl")]}, "the log or the personal state of silo-00"),
        ({"code": 0, "files": [file("messages/silo-00.jsonl"), file("model/x.json")]}, "files: found 'model/x.json'"),
        ({"code": 0, "files": [file("checkpoints/silos/silo-00/a.safetensors")]}, "without links out of the run"),
        ("text", "found 'str', allowed: bytes"),
    ],
)
def test_a_result_that_is_not_allowed_is_a_failure_in_one_line_and_writes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], result: object, message: str
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (root / "checkpoints").mkdir(parents=True)
    (root / "checkpoints" / "silos").symlink_to(outside)
    before = sorted(tmp_path.rglob("*"))
    fetched = json.dumps(result).encode() if isinstance(result, dict) else result
    assert Collector("silo-00", ("silo-00",), RunFolder(root)).collect(lambda: fetched) == 1
    said = capfd.readouterr().err
    assert said.startswith("silo-00: result of silo-00")
    assert said.count("\n") == 1
    assert message in said
    assert sorted(tmp_path.rglob("*")) == before


def test_a_result_that_is_too_large_is_not_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_peer, "MOST_BYTES", 10)
    result = encode(Ended(code=0))
    assert Collector("silo-00", ("silo-00",), RunFolder(tmp_path)).collect(lambda: result) == 1
    assert f"found '{len(result)} bytes', allowed: at most 10 bytes" in capfd.readouterr().err


def test_a_process_may_write_its_log_and_its_personal_state(tmp_path: Path) -> None:
    paths = ("messages/silo-00.jsonl", "checkpoints/silos/silo-00/task-000000001.safetensors")
    link = tmp_path / "messages" / "silo-00.jsonl"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "elsewhere")  # replaced, not followed
    ended = Ended(code=0, files=tuple(PeerFile(path=path, content=b"\x00\xff") for path in paths))
    assert Collector("host-0", ("silo-07", "silo-00"), RunFolder(tmp_path)).collect(lambda: encode(ended)) == 0
    assert all((tmp_path / path).read_bytes() == b"\x00\xff" for path in paths)
    assert not (tmp_path / "elsewhere").exists()


def placed(arguments: PeerArguments, place: Path) -> bytes:
    """What an engine does: the files of a process in a separate folder; returns its task."""
    place.mkdir()
    write_private(place, (*key_files(arguments), *earlier_files(arguments)))
    return encode(PeerTask.of(arguments, gpu=False))


def test_a_process_on_a_machine_without_the_run_folder_returns_its_error(run: ResolvedRun, tmp_path: Path) -> None:
    keys, place = tmp_path / "keys", tmp_path / "place"
    init_keys(keys, ("coordinator", "evaluator", "silo-00", "silo-01"))
    task = placed(SiloArguments(run, "silo-00", "tcp://127.0.0.1:1", keys, tmp_path / "elsewhere"), place)
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*.*")) == [
        *("keys/accepted/coordinator.pub", "keys/accepted/silo-00.pub", "keys/silo-00.key")
    ]
    assert load_identity(place / "keys", "silo-00").name == "silo-00"  # its mode is 0600
    # A process that is killed leaves no key: it removes the file before it runs.
    assert take_keys(place / "keys") == {"silo-00": (keys / "silo-00.key").read_bytes()}
    assert not list(place.rglob("*.key"))
    # Without its key it ends before it connects.
    ended = run_peer(task, place, {})
    assert ended.code == 2
    assert "silo-00.key" in ended.error
    assert not (tmp_path / "elsewhere").exists()


#: Runs a silo as Ray does: standard input has its task and its files, one a line.
PLACED = "import sys; from fedmq.launch.ray_cluster import run_there; run_there(*sys.stdin.buffer.read().splitlines())"


@pytest.mark.slow
def test_a_process_whose_machine_dies_leaves_no_private_key_and_its_folder_is_removed_later(
    run: ResolvedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, machine = tmp_path / "keys", tmp_path / "machine"
    machine.mkdir()
    init_keys(keys, ("coordinator", "silo-00"))
    monkeypatch.setattr(forkserver, "socket_folder", lambda: machine)
    # No coordinator listens: the silo waits for one.
    arguments = SiloArguments(run, "silo-00", "tcp://127.0.0.1:1", keys, tmp_path / "elsewhere")
    sent = (encode(PeerTask.of(arguments, gpu=False)), encode(PeerFiles(files=key_files(arguments))))
    program = f"import pathlib; from fedmq.launch import forkserver as p; p.socket_folder = pathlib.Path; {PLACED}"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=machine)
    try:
        assert process.stdin is not None
        process.stdin.write(b"\n".join(sent))
        process.stdin.close()
        while not list(machine.glob("fedmq-peer-*/run/messages/silo-00.jsonl")):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    left = [path.read_bytes() for path in machine.rglob("*") if path.is_file()]
    assert len(left) >= 3
    assert not any(b"PRIVATE" in content for content in left)
    with forkserver.private_folder() as place:
        assert list(machine.iterdir()) == [place]


@pytest.mark.slow
def test_a_silo_without_the_run_folder_is_stopped_and_resumed_without_a_difference(tiny: Path, tmp_path: Path) -> None:
    scenario, out = threaded_run.resolved(tiny, "protocol=fedper", "participation=1.0"), tmp_path / "run"
    name, process = "silo-01", Collector("silo-01", ("silo-01",), RunFolder(out))
    others = [each for each in scenario.silo_names if each != name]
    results: list[Ended] = []

    def remote(uri: str, keys: Path) -> None:
        here = SiloArguments(threaded_run.run_of(scenario), name, uri, keys, out)
        place = tmp_path / f"place-{len(results)}"
        placed(here, place)
        there = PeerTask.of(replace(here, out=tmp_path / "absent"), gpu=False)
        results.append(run_peer(encode(there), place, take_keys(place / "keys")))

    def merged_twice() -> bool:
        metrics = RunFolder(out).metrics
        return metrics.exists() and metrics.read_text().count('"merge"') >= 2

    stopped = threaded_run.run(scenario, out, silos=others, others=[remote], stop_wanted=merged_twice)
    assert stopped.phase is Phase.STOPPED
    assert not RunFolder(out).messages(name).exists()
    assert process.collect(lambda: encode(results[0])) == 0
    assert list(RunFolder(out).silo_state(name).glob("task-*.safetensors"))
    outcome = threaded_run.run(scenario, out, silos=others, others=[remote], resume=True)
    assert process.collect(lambda: encode(results[1])) == 0
    expected = in_process_run.run(scenario, tmp_path / "expected")
    assert outcome.summary and expected.summary
    assert outcome.summary.model_digest == expected.summary.model_digest
    assert not audit_run(out).findings
    assert not (tmp_path / "absent").exists()
