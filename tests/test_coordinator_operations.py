"""Operation of a run with real processes: a stop of the coordinator, a cut link; silos are never touched."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attacks import free_port
from fedmq.audit.log_checks import audit_run
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.runs.status import read_status
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.threaded_run import resolved, run_of
from tests.threaded_run import run as threaded_run
from tests.waiting import PATIENCE, wait_for_merges

pytestmark = pytest.mark.slow
FEDMQ = str(Path(sys.executable).parent / "fedmq")
ROUNDS = "rounds=10"
SILOS = tuple(f"silo-0{index}" for index in range(4))


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model digest of the undisturbed run."""
    outcome = threaded_run(resolved(tiny, ROUNDS), tmp_path_factory.mktemp("reference"))
    assert outcome.summary is not None
    return outcome.summary.model_digest


class Processes:
    """Manually launched programs of one run."""

    def __init__(self, tiny: Path, root: Path) -> None:
        self.out, self.keys, self.tiny = root / "run", root / "keys", tiny
        self.all: list[subprocess.Popen[str]] = []
        init_keys(self.keys, ("coordinator", "evaluator", *SILOS))

    def start(self, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [FEDMQ, *command, "--keys", str(self.keys)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.all.append(process)
        return process

    def coordinator(self, *command: str, bind: str = "tcp://127.0.0.1:*") -> tuple[subprocess.Popen[str], str]:
        """Start a coordinator; returns it and the URI to connect to."""
        process = self.start("coordinator", *command, "--bind", bind)
        assert process.stderr is not None
        uri = next(line.split("uri=")[1].split()[0] for line in process.stderr if "listening" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return process, uri

    def new_run(self) -> tuple[subprocess.Popen[str], str]:
        return self.coordinator(str(self.tiny), "--out", str(self.out), "--set", ROUNDS)

    def peer(self, uri: str, *command: str) -> subprocess.Popen[str]:
        common = (str(self.tiny), "--out", str(self.out), "--set", ROUNDS, "--connect", uri)
        process = self.start(*command, *common)
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return process

    def peers(self, uri: str) -> tuple[list[subprocess.Popen[str]], list[threading.Thread]]:
        """Start the evaluator and the first silo as processes, the other silos as threads of this process.

        Threads save imports; over TCP the coordinator cannot tell them from processes.
        """
        started = [self.peer(uri, "evaluator"), self.peer(uri, "silo", "--name", SILOS[0])]
        return started, self.silos_here(uri, SILOS[1:])

    def silos_here(self, uri: str, names: Sequence[str]) -> list[threading.Thread]:
        """Start silos as threads of this process."""
        run = run_of(resolved(self.tiny, ROUNDS))
        programs = [partial(run_silo, SiloArguments(run, name, uri, self.keys, self.out)) for name in names]
        threads = [threading.Thread(target=program, daemon=True) for program in programs]
        for thread in threads:
            thread.start()
        return threads

    def wait_for_round(self, round_: int) -> None:
        wait_for_merges(self.out, round_)

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "summary.json").read_text()))


def wait_for_end(processes: Sequence[subprocess.Popen[str]], threads: Sequence[threading.Thread]) -> None:
    """Wait until all have ended, processes without an error."""
    assert [process.wait(PATIENCE) for process in processes] == [0] * len(processes)
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(map(threading.Thread.is_alive, threads))


@pytest.fixture
def processes(tiny: Path, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tiny, tmp_path)
    yield made
    for process in made.all:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_a_stopped_coordinator_leaves_its_silos_waiting_and_resumes_with_the_same_model(
    processes: Processes, reference: str
) -> None:
    coordinator, uri = processes.new_run()
    peers, others = processes.peers(uri)
    processes.wait_for_round(3)
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(PATIENCE) == 1
    assert read_status(processes.out / "status.json").phase == "stopped"
    assert [peer.poll() for peer in peers] == [None, None] and all(map(threading.Thread.is_alive, others)), (
        "silos and evaluator wait"
    )
    # A silo that is killed meanwhile continues from its last state.
    peers[1].kill()
    peers[1].wait()
    peers[1] = processes.peer(uri, "silo", "--name", "silo-00")
    coordinator, _ = processes.coordinator("--resume", str(processes.out), bind=uri)
    assert coordinator.wait(PATIENCE) == 0
    wait_for_end(peers, others)  # the end of the run ends them
    assert processes.summary()["model_digest"] == reference
    assert not audit_run(processes.out).findings


class Link:
    """A TCP link to the coordinator that can be cut, and moved to another address."""

    def __init__(self, target: str) -> None:
        self.target = (target.rpartition(":")[0].removeprefix("tcp://"), int(target.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if not self.open:
                near.close()
                continue
            far = socket.create_connection(self.target)
            self.pairs.append((near, far))
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass

    def cut(self) -> None:
        self.open = False
        for pair in self.pairs:
            for each in pair:
                each.shutdown(socket.SHUT_RDWR)
                each.close()
        self.pairs.clear()


def test_a_silo_that_is_away_when_the_last_round_ends_is_ended_by_the_run_too(tiny: Path, tmp_path: Path) -> None:
    scenario = resolved(tiny, "rounds=8", "clock=wall", "aggregation.mode=async")
    uri = f"tcp://127.0.0.1:{free_port()}"
    link, ended, cut = Link(uri), list[str](), list[int]()

    def behind_the_link(_: str, keys: Path) -> None:
        run_silo(SiloArguments(run_of(scenario), SILOS[0], link.uri, keys, tmp_path))
        ended.append(SILOS[0])

    def watch() -> bool:
        """Cut the link after a merge; restore it once all rounds are done and the coordinator waits."""
        merges = sum(isinstance(line, MergeLine) for line in read_metrics(RunFolder(tmp_path)))
        if merges and not cut:
            cut.append(merges)
            link.cut()
        link.open = link.open or merges == scenario.rounds
        return False

    try:
        outcome = threaded_run(
            scenario,
            tmp_path,
            silos=SILOS[1:],
            others=[behind_the_link],
            uri=uri,
            stop_wanted=watch,
            stop_silos=False,
        )
    finally:
        link.listener.close()
    assert outcome.summary is not None and outcome.summary.versions == scenario.rounds
    assert cut[0] < scenario.rounds and ended == [SILOS[0]]
    assert not audit_run(tmp_path).findings
