"""A coordinator stopped or killed around the time at which a silo with data of its own joins late, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from coordinator.rounds import Phase
from fedmq.audit.log_checks import audit_run
from fedmq.config.scenario import Scenario
from fedmq.runs.results import read_summary
from tests.in_process_run import Killed
from tests.in_process_run import run as run_inline
from tests.log_causes import check_causes
from tests.own_data_sites import COMMON, IMAGE_ONLY, arrays
from tests.own_data_threads import OwnRun

pytestmark = pytest.mark.slow
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
        joins: version at which the late silo starts.
    """

    run: OwnRun
    joins: int = 4

    def until(self, reached: Callable[[], bool], *, kill: bool, resume: bool) -> None:
        """Run the coordinator until something has happened, then stop it as by SIGTERM or leave it as by SIGKILL."""
        # Before it has started, the silo is started by the first process that gets far enough.
        late = self.run.from_version(self.joins, LATE) if LATE not in self.run.started else lambda: False

        def check() -> bool:
            late()
            if reached() and kill:
                raise Killed
            return reached()

        try:
            assert self.coordinate(check, resume=resume) is Phase.STOPPED
        except Killed:
            assert kill

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
    kill: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    run = OwnRun(tmp_path, MORE | {"participation": {"minimum": 2}}, uri=f"ipc://{tmp_path}/wire")
    interrupted = Interrupted(run)
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
