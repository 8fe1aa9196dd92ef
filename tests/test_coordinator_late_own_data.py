"""Sites with data of their own that join late, start twice, do not fit together, or join around a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.round_events import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.audit.replay import require_repeatable
from fedmq.config.scenario import Scenario
from fedmq.errors import InputError
from fedmq.runs.report import run_report
from fedmq.runs.results import items_each, read_summary
from fedmq.runs.status import SiloPhase, StatusFile, status_of
from fedmq.storage.logs import LogFormat, LogOptions
from fedmq.wire.inquiry import ask_status
from fedmq.wire.keys import load_accepted, load_identity
from silos.program import run_silo
from silos.tasks import SiloArguments
from tests.in_process_run import Killed
from tests.in_process_run import run as run_inline
from tests.log_causes import check_causes
from tests.own_data_sites import COMMON, HOSPITALS, IMAGE_ONLY, arrays, of_hospital
from tests.own_data_threads import OwnRun, answers_of_others
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.slow

MINIMUM: dict[str, Any] = {"participation": {"minimum": 2}, "rounds": 16}


def test_a_late_silo_joins_between_two_rounds_and_trains_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, others = OwnRun(tmp_path, MINIMUM), answers_of_others(monkeypatch, LATE)
    run.coordinate(listening=lambda: run.start("silo-00", "silo-01"), stop_wanted=run.from_version(2, LATE, others))
    assert set(run.ended.values()) == {""}, run.ended
    replies = [len(line.replies) for line in run.merges]
    assert replies == sorted(replies) and {replies[0], replies[-1]} == {2, 3} and len(replies) == 16
    summary = read_summary(run.folder)
    assert {name: silo.participations for name, silo in summary.per_silo.items()} == {
        "silo-00": 16,
        "silo-01": 16,
        "silo-02": replies.count(3),
    }
    assert summary.own_heldout is not None and set(summary.own_heldout.per_silo) == {"silo-00", "silo-02"}
    findings = audit_run(tmp_path / "run").findings
    assert not findings, findings
    with pytest.raises(InputError, match=r"participation.minimum: found 2, allowed: null: this run depends on when"):
        require_repeatable(run.scenario, run.folder)


def test_a_run_ends_with_a_summary_and_a_report_without_a_silo_that_never_joined(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, MINIMUM | {"rounds": 1})
    run.coordinate(listening=lambda: run.start("silo-00", "silo-01"))
    assert set(run.ended.values()) == {""}, run.ended
    absent = read_summary(run.folder).per_silo["silo-02"]
    assert "0 to" not in items_each(read_summary(run.folder))
    assert (absent.modalities, absent.samples, absent.participations, absent.items) == ([], 0, 0, {})
    run_report.write(run.folder, {})
    assert "silo-02" in run.folder.report.read_text()


def test_a_wrong_site_that_joins_first_is_refused_by_name_and_the_run_continues_once_it_is_corrected(
    tmp_path: Path,
) -> None:
    run = OwnRun(tmp_path, {"rounds": 1})
    oslo = of_hospital(arrays(), "oslo")
    run.data["silo-02"] = oslo | {"image": oslo["image"][:, :7]}
    began: list[str] = []

    def begin() -> bool:
        if not began and run.stated("silo-02"):
            run.start("silo-00", "silo-01")
            began.append("others")
        if run.ended.get("silo-02"):
            began.append(run.ended.pop("silo-02"))
            run.data["silo-02"] = oslo
            run.start("silo-02")
        return False

    run.coordinate(listening=lambda: run.start("silo-02"), stop_wanted=begin)
    assert set(run.ended.values()) == {""}, run.ended
    assert "silo-02 has image features of width 7, silo-0" in began[1]
    assert "Correct the data of silo-02 and start it again" in began[1]


# ----------------------------------------------------------- a coordinator that is stopped or killed around that time
ROUNDS = 12
#: A method whose model depends on which silos a merge has, not on how many could have been selected.
METHOD = {"name": "fedavg", "single_modality": "idle"}
MORE: dict[str, Any] = {"rounds": ROUNDS, "protocol": METHOD, "evaluation": {"every": 0}}
LATE = "silo-02"


@dataclass
class Interrupted:
    """A run whose coordinator is stopped or killed several times.

    Args:
        run: the run.
        others: set while the silos that are not late may answer tasks.
        joins: version at which the late silo starts.
    """

    run: OwnRun
    others: threading.Event
    joins: int = 4

    def until(self, reached: Callable[[], bool], *, kill: bool, resume: bool) -> None:
        """Run the coordinator until something has happened, then stop it as by SIGTERM or leave it as by SIGKILL."""
        # Before it has started, the silo is started by the first process that gets far enough. The run could otherwise
        # end before it has stated its data, which it does to each process.
        late = self.run.from_version(self.joins, LATE, self.others) if LATE not in self.run.started else None
        stated = self.run.stated(LATE)
        if late is None:
            self.others.clear()

        def check() -> bool:
            if late is not None:
                late()
            elif self.run.stated(LATE) > stated:
                self.others.set()
            if reached() and kill:
                raise Killed
            return reached()

        try:
            assert self.coordinate(check, resume=resume) is Phase.STOPPED
        except Killed:
            assert kill
        finally:
            self.others.set()

    def coordinate(self, stop_wanted: Callable[[], bool] = lambda: False, *, resume: bool) -> Phase:
        arguments = CoordinatorArguments(
            self.run.run, self.run.uri, self.run.root / "keys", self.run.folder.root, resume
        )
        begin = [] if resume else ["silo-00", "silo-01"]
        outcome = run_coordinator(arguments, listening=lambda _: self.run.start(*begin), stop_wanted=stop_wanted)
        check_causes(self.run.folder.root)
        return outcome.phase

    def complete(self) -> int:
        """Number of merges of all three silos."""
        return sum(len(line.replies) == 3 for line in self.run.merges)


def simulated(root: Path, on: float) -> str:
    """The digest of a simulation in which the late silo is off until a time [s]."""
    np.savez(root / "all.npz", **arrays())
    (root / "trace.csv").write_text(f"silo,on,off\n{LATE},{on},1e6\n")
    raw = {"name": "column", **COMMON, **MORE, "data": {"name": "features", "path": str(root / "all.npz")}}
    raw |= {"partition": {"kind": "column", "column": "hospital"}, "missing_modality": {"silos": {IMAGE_ONLY: "image"}}}
    raw |= {"participation": {"kind": "availability", "trace": str(root / "trace.csv")}}
    outcome = run_inline(Scenario.model_validate(raw), root / "together")
    assert outcome.summary is not None
    return outcome.summary.model_digest


@pytest.mark.parametrize("kill", [(False, False, True), (True, True, False)], ids=["stopped first", "killed first"])
def test_it_ends_with_the_model_of_a_simulation_with_the_same_silos_in_each_round(
    kill: tuple[bool, bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OwnRun(tmp_path, MORE | {"participation": {"minimum": 2}}, uri=f"ipc://{tmp_path}/wire")
    interrupted = Interrupted(run, answers_of_others(monkeypatch, LATE))
    interrupted.until(lambda: len(run.merges) >= 2, kill=kill[0], resume=False)
    interrupted.until(lambda: run.stated(LATE) > 0, kill=kill[1], resume=True)
    interrupted.until(lambda: interrupted.complete() >= 2, kill=kill[2], resume=True)
    assert interrupted.coordinate(resume=True) is Phase.DONE
    run.wait()
    assert set(run.ended.values()) == {""}, run.ended
    replies = [len(line.replies) for line in run.merges]
    joined = replies.index(3)
    assert replies == [2] * joined + [3] * (ROUNDS - joined), "no silo misses a round because of a restart"
    summary = read_summary(run.folder)
    assert {silo.participations for silo in summary.per_silo.values()} == {ROUNDS, ROUNDS - joined}
    findings = audit_run(run.folder.root).findings
    assert not findings, findings
    times = [line.now for line in run.merges]
    assert summary.model_digest == simulated(tmp_path, (times[joined - 2] + times[joined - 1]) / 2)


# --------------------------------------------------------------------------------------- a silo that is started twice
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
