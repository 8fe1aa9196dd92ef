"""While silos join, the status shows those that have; a silo that is started twice is noticed by both sides."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.errors import InputError
from fedmq.runs.status import SiloPhase, StatusFile, status_of
from fedmq.storage.logs import LogFormat, LogOptions
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import load_accepted, load_identity
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.own_data_sites import HOSPITALS, arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow


def status(run: OwnRun) -> StatusFile:
    keys = run.root / "keys"
    return status_of(ask_status(run.uri, load_identity(keys, "silo-02"), load_accepted(keys)))


def lines(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_silo_that_is_started_twice_is_noticed_by_both_sides(tmp_path: Path) -> None:
    held = of_hospital(arrays(), HOSPITALS[0])
    held["image"][1] = 0
    run = OwnRun(tmp_path, {"rounds": 1}, data={"silo-00": held})
    log, first, second = (tmp_path / f"{name}.log" for name in ("coordinator", "first", "second"))
    files = {path: LogOptions(file=path, console=False, format=LogFormat.JSON) for path in (log, first, second)}
    ended: list[str] = []

    def silo(out: str, path: Path) -> None:
        keys, site = run.root / "keys", run.site("silo-00")
        try:
            run_silo(SiloArguments(run.run, "silo-00", run.uri, keys, tmp_path / out, site=site, logs=files[path]))
            ended.append("")
        except InputError as error:
            ended.append(str(error))

    listening = threading.Event()
    arguments = CoordinatorArguments(
        run.run, run.uri, run.root / "keys", run.root / "run", stop_silos=True, logs=files[log]
    )
    coordinator = threading.Thread(
        target=run_coordinator, args=(arguments,), kwargs={"listening": lambda _: listening.set()}
    )
    coordinator.start()
    assert listening.wait(PATIENCE)
    threads = [threading.Thread(target=silo, args=each) for each in (("one", first), ("two", second))]
    threads[0].start()
    run.start("silo-01")
    wait_for(lambda: "remark on the data" in lines(first))
    waiting = "accepted by the coordinator; waiting for the other silos"
    wait_for(lambda: waiting in lines(first) and run.stated("silo-01"))
    found = status(run).silos
    assert [each.phase for each in found.values()] == [SiloPhase.WAITING, SiloPhase.WAITING, SiloPhase.ABSENT]
    assert found["silo-00"].heard is not None and found["silo-02"].heard is None
    threads[1].start()
    wait_for(lambda: ended)
    assert "another process that takes part with this key" in ended[0]
    assert status(run).silos["silo-00"].phase is SiloPhase.WAITING, "the second one"
    run.start("silo-02")
    for thread in (*threads, coordinator):
        thread.join(PATIENCE)
    run.wait()
    assert ended[1:] == [""]
    twice = "silo-00 joined again while its earlier session was alive: is it running twice?"
    assert lines(log).count(twice) == 1
    assert "message refused" not in lines(log)
    assert "the coordinator has ended the run" in lines(second) and waiting in lines(second)
