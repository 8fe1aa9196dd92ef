"""No set of trials makes a comparison select one whose updates were refused or whose silos could not train."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.scenario import Scenario
from fedmq.experiments import runner
from fedmq.experiments.grid import Entry
from fedmq.storage.run_folder import RunFolder
from tests.comparisons import entries, finish, resolve


@dataclass(frozen=True)
class Trial:
    """What happened in a run on the validation split.

    Args:
        recall: its recall, of ten values so that candidates tie.
        done: whether it finished.
        refused: refused replies of the first and of the second silo.
        errors: errors that they reported.
        scripted: refused replies of scripted attacks.
    """

    recall: int
    done: bool
    refused: tuple[int, int]
    errors: tuple[int, int]
    scripted: int

    @property
    def accepted(self) -> bool:
        """Whether it finished and each silo trained whenever it was selected."""
        return self.done and not sum(self.refused) and not sum(self.errors)

    def write(self, folder: RunFolder) -> None:
        if not self.done:
            return
        finish(folder, self.recall / 10)
        unusable = {
            f"silo-0{silo}": {
                "refused": refused,
                "errors": errors,
                "scripted": self.scripted,
                "last": "its reply was refused: malformed: a delta of length 2e4, here at most 1e4",
            }
            for silo, (refused, errors) in enumerate(zip(self.refused, self.errors, strict=True))
            if refused or errors or self.scripted
        }
        told = {"unusable_replies": unusable}
        folder.summary.write_text(json.dumps({**json.loads(folder.summary.read_text()), **told}))


number = st.sampled_from([0, 0, 0, 1, 7])
trials = st.builds(
    Trial,
    recall=st.integers(0, 9),
    done=st.sampled_from([True, True, True, False]),
    refused=st.tuples(number, number),
    errors=st.tuples(number, number),
    scripted=number,
)


@pytest.fixture(scope="module")
def entry(tiny: Path) -> Entry:
    """A row with four candidates."""
    (made,) = entries(tiny, [], ["training.learning_rate=0.1,0.2,0.3,0.4"])
    return made


@pytest.fixture(scope="module")
def scenario(tiny: Path) -> Scenario:
    return resolve(tiny, [], None).scenario


@given(st.lists(trials, min_size=2, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_best_trial_with_all_updates_accepted_is_selected_and_no_other(
    entry: Entry, scenario: Scenario, drawn: list[Trial]
) -> None:
    few_candidates = replace(entry, candidates=entry.candidates[: len(drawn)])
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, (candidate, trial) in enumerate(zip(few_candidates.candidates, drawn, strict=True)):
            run = runner.Run(f"run-{number}", f"run {number}", RunFolder(Path(folder) / f"run-{number}"), scenario)
            trial.write(run.folder)
            runs[entry.name, candidate] = run
            if trial.done:
                assert (run.unaccepted is None) == trial.accepted
        selected = runner.choose(few_candidates, runs, "mean_r1")
    accepted = [trial.recall for trial in drawn if trial.accepted]
    if not accepted:
        assert selected is None
    else:
        first_best = next(
            number for number, trial in enumerate(drawn) if trial.accepted and trial.recall == max(accepted)
        )
        assert selected == entry.candidates[first_best]
