"""An evaluator that cannot continue tells the coordinator, which names it and ends the run; it can be resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.program import CoordinatorArguments, run_coordinator
from fedmq.errors import DiskError, InputError, RunError
from fedmq.evaluation import program
from fedmq.runs.results import read_summary
from fedmq.runs.status import FAILED, SiloPhase, read_status
from fedmq.wire.log_events import LogEvent
from fedmq.wire.log_records import NoteRecord, read_log
from fedmq.wire.messages import COORDINATOR, EVALUATOR
from tests.own_data_sites import HOSPITALS, arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.waiting import wait_for


class Failing:
    """A run of three sites whose evaluator, with a held-out set of its own, fails at first."""

    def __init__(self, root: Path) -> None:
        heldout, more = of_hospital(arrays(), HOSPITALS[0]), {"every": 1, "heldout": "shared"}
        self.run = OwnRun(root, {"rounds": 2, "evaluation": more}, data={EVALUATOR: heldout}, uri=f"ipc://{root}/wire")

    def coordinate(self, *, resume: bool) -> None:
        root, run = self.run.root, self.run
        run_coordinator(CoordinatorArguments(run.run, run.uri, root / "keys", root / "run", resume, stop_silos=True))

    def ended(self) -> str:
        """Why the coordinator ended."""
        self.run.start(*self.run.scenario.silo_names, EVALUATOR)
        with pytest.raises(RunError) as caught:
            self.coordinate(resume=False)
        log = self.run.folder.messages(COORDINATOR)
        records = [each for _, each in read_log(log) if isinstance(each, NoteRecord)]
        (reported,) = [each for each in records if each.event is LogEvent.ERROR_REPORTED]
        assert reported.facts["peer"] == EVALUATOR
        if self.run.folder.status.exists():  # the rounds had begun
            status = read_status(self.run.folder.status)
            assert (status.phase, status.error) == (FAILED, str(caught.value))
            assert not {each.phase for each in status.silos.values()} & {SiloPhase.WAITING, SiloPhase.TRAINING}
        return str(caught.value)

    def resume(self, *again: str) -> None:
        """The silos have waited; the run ends as if nothing had been."""
        self.run.start(*again)
        self.coordinate(resume=True)
        self.run.wait()
        assert read_summary(self.run.folder).metrics["mean_r1"] > 0
        status = read_status(self.run.folder.status).evaluator
        assert status is not None and status.heard and not status.error


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error", "why"),
    [
        (
            (program.EvaluatorStart, "agreed"),
            InputError("/home/eve/heldout.npz", "no such file", "the held-out set"),
            "InputError: heldout.npz: found 'no such file', allowed: the held-out set",
        ),
        ((program.Evaluator, "evaluate"), DiskError("/home/eve/cache: disk full"), "DiskError: cache: disk full"),
    ],
)
def test_an_error_that_ends_the_evaluator_ends_the_run_at_once(
    where: tuple[type, str], error: Exception, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Failing(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(*where, failing(error))
        assert run.ended() == f"evaluator: the evaluator has ended: {why}"
        wait_for(lambda: EVALUATOR in run.run.ended)
        assert run.run.ended[EVALUATOR] == str(error)
    assert "/home/eve" not in run.run.folder.messages(COORDINATOR).read_text()
    run.resume(EVALUATOR)


@pytest.mark.slow
def test_an_error_of_an_evaluation_ends_the_run_and_its_text_stays_at_the_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Failing(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(program.Evaluator, "evaluate", failing(ZeroDivisionError("patient Mallory")))
        assert run.ended() == "evaluator: ZeroDivisionError"
    printed, place = capfd.readouterr().err, run.run.folder.errors(EVALUATOR)
    line = f"evaluator: evaluation of version 0 failed: ZeroDivisionError: patient Mallory; traceback in {place}"
    assert [each for each in printed.splitlines() if "failed" in each] == [line]
    assert "Traceback (most recent call last)" in place.read_text()
    assert "Mallory" not in run.run.folder.messages(COORDINATOR).read_text()
    run.resume()  # the evaluator waits, too
