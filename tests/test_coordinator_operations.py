"""A silo whose link to the coordinator is cut; test_federation_own_data_resume.py stops and kills coordinators."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from benchmarks.attacks import free_port
from fedmq.audit.log_checks import audit_run
from fedmq.runs.results import read_metrics
from fedmq.runs.run_records import MergeLine
from fedmq.storage.run_folder import RunFolder
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.threaded_run import resolved, run_of
from tests.threaded_run import run as threaded_run

pytestmark = pytest.mark.slow
SILOS = tuple(f"silo-0{index}" for index in range(4))


class Link:
    """A TCP link to the coordinator that can be cut."""

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
