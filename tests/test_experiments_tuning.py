"""``fedmq tune``: equal budgets, pruning, refused updates, and the same search after a stop."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from fedmq.clock import WallClock
from fedmq.config import resolve as scenarios
from fedmq.config.resolve import ResolvedRun
from fedmq.errors import InputError
from fedmq.experiments import files, tuning
from fedmq.experiments import process_pool as pool
from fedmq.experiments.grid import Entry
from fedmq.experiments.runner import Workplace
from fedmq.experiments.tuning import TrialState, Tuned
from fedmq.launch import forkserver
from tests.command_line import completed, printed, refused
from tests.in_process_jobs import InThisProcess, run_jobs_here
from tests.threaded_run import resolved, run_of

SPACE = {"training.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}, "training.batch_size": [16, 32]}
#: Learning rate of the runs of which a reply counts as refused.
REFUSED_RATE = 2e-6


class Impatient(WallClock):
    """A clock that does not pause: the runs are over when they have started."""

    def pause(self, seconds: float) -> None: ...


class WithRefusals(InThisProcess):
    """A run in this process, in which a reply counts as refused at one learning rate."""

    def __init__(self, job: pool.Job) -> None:
        super().__init__(job)
        folder = Path(job.words[job.words.index("--quiet") - 1])
        if scenarios.load(folder / "scenario.yaml").training.learning_rate == REFUSED_RATE:
            summary = json.loads((folder / "summary.json").read_text())
            refused = {"silo-01": {"refused": 1, "scripted": 0, "errors": 0, "last": "too long"}}
            (folder / "summary.json").write_text(json.dumps({**summary, "unusable_replies": refused}))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run jobs in this process; returns the names of the jobs that were started."""
    return run_jobs_here(monkeypatch, WithRefusals)


def spec(tiny: Path, tmp_path: Path, **keys: Any) -> Path:
    path = tmp_path / "search.yaml"
    facts = {"tune": str(tiny), "search": SPACE, "trials": 4, "rounds": 2, "batch": 2, "startup": 2}
    path.write_text(yaml.safe_dump({**facts, **keys}))
    return path


def tuned(path: Path, folder: Path, stop: Callable[[], bool] = lambda: False) -> Tuned:
    plan = files.plan_search(path, files.read_search(path), resolve_fully)
    place = Workplace(folder / "runs", resolve_fully, lambda _: "", False, 2, forkserver.start_job)
    return tuning.tune(plan, folder, place, lambda *_: None, lambda: stop, Impatient())


def resolve_fully(file: Path, settings: list[str], seed: int | None) -> ResolvedRun:
    return run_of(resolved(file, *settings, *([] if seed is None else [f"seed={seed}"])))


@pytest.mark.slow
def test_methods_get_equal_budgets_and_the_best_settings_become_scenarios(
    tiny: Path, tmp_path: Path, here: list[str]
) -> None:
    path = spec(tiny, tmp_path, methods={"fedavg": {}, "rcsr": {"protocol.lambda_anc": [0.3, 1.0]}}, trials=2)
    out = tmp_path / "out"
    printed("tune", path, "--out", out, "--json", "--quiet")
    assert len(here) == 4
    rows = list(csv.DictReader((out / "trials.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["fedavg", "fedavg", "rcsr", "rcsr"]
    for method in ("fedavg", "rcsr"):
        best = max((row for row in rows if row["method"] == method), key=lambda row: float(row["value"]))
        scenario = scenarios.load(out / f"best-{method}.yaml")
        assert scenario.protocol.label == method
        assert scenario.training.learning_rate == float(best["training.learning_rate"])
        assert scenario.rounds == 4 and scenario.evaluation.split == "test"
    folders = sorted((out / "runs").glob("*/summary.json"))
    trials = [scenarios.load(each.with_name("scenario.yaml")) for each in folders]
    assert {(each.rounds, each.evaluation.split) for each in trials} == {(2, "val")}
    again = printed("tune", path, "--out", out, "--quiet")
    assert len(here) == 4  # nothing is left to run
    assert "trials.csv, best-fedavg.yaml, best-rcsr.yaml" in again
    *table, folder = again.splitlines()
    assert max(map(len, table)) <= 80 and folder.startswith(str(out))
    spec(tiny, tmp_path, metric="mean_r10")
    assert "another tuning file" in refused("tune", path, "--out", out)


@pytest.mark.parametrize(
    ("space", "inside", "at_edge"),
    [
        (files.Range(low=1e-4, high=1e-2, log=True), (2e-4, 5e-3), (1e-4, 1.2e-4, 9e-3)),
        (files.Range(low=0.0, high=1.0), (0.06, 0.9), (0.0, 0.04, 0.97)),
        (files.Range(low=1, high=4), (2, 3), (1, 4)),
        ((0.1, 0.3, 1.0), (0.3,), (0.1, 1.0)),
        (("adam", "sgd"), ("adam", "sgd"), ()),
    ],
)
def test_a_best_value_at_an_end_of_a_list_or_near_a_bound_is_at_the_edge(
    tiny: Path, space: Any, inside: tuple[Any, ...], at_edge: tuple[Any, ...]
) -> None:
    entry = Entry("fedavg", "fedavg", (), tiny, ())
    method = files.TunedMethod("fedavg", entry, {"key": space}, {}, 2, 0)
    for value in (*inside, *at_edge):
        best = tuning.Trial("fedavg", 0, TrialState.FINISHED, 0.5, {"key": value})
        assert tuning.at_edge(method, best) == ({"key": value} if value in at_edge else {})


@pytest.mark.slow
def test_a_best_value_at_the_edge_is_reported(tiny: Path, tmp_path: Path, here: list[str]) -> None:
    for name, values, warns in (("end", [0.001, 0.003], True), ("word", ["adam", "adamw"], False)):
        key = "training.learning_rate" if warns else "training.optimizer"
        path = spec(tiny, tmp_path, search={key: values}, trials=1, batch=1)
        done = completed("tune", path, "--out", tmp_path / name, "--quiet")
        assert done.returncode == 0, done.stderr
        assert (f"warning rcsr: the best {key}, 0.00" in done.stderr) is warns
        assert ("is at the edge of what was searched" in done.stderr) is warns


@pytest.mark.slow
def test_a_stopped_search_continues_with_the_trials_of_one_that_was_not_stopped(
    tiny: Path, tmp_path: Path, here: list[str]
) -> None:
    path = spec(tiny, tmp_path, trials=4)
    whole = tuned(path, tmp_path / "whole")
    assert [each.state for each in whole.trials] == [TrialState.FINISHED] * 4 and not whole.stopped
    begun = len(here)
    stopped = tuned(path, tmp_path / "parts", lambda: len(here) >= begun + 1)
    assert stopped.stopped and len(stopped.trials) < 4
    resumed = tuned(path, tmp_path / "parts")
    assert [(each.values, each.value) for each in resumed.trials] == [
        (each.values, each.value) for each in whole.trials
    ]
    best = max(whole.trials, key=lambda each: each.value or 0.0)
    assert whole.best["rcsr"].value == best.value


@pytest.mark.slow
def test_a_search_killed_within_a_line_of_its_journal_ends_with_the_same_trials(
    tiny: Path, tmp_path: Path, here: list[str]
) -> None:
    rates = [1e30, 1e-6, 3e-2]
    keys = {"pruning": "median", "evaluate_every": 1, "startup": 1, "batch": 2, "trials": 4}
    path = spec(tiny, tmp_path, search={"training.learning_rate": rates}, sampler="random", seed=7, **keys)
    whole, journal = tuned(path, tmp_path / "out"), tmp_path / "out" / "study.journal"
    assert {each.state for each in whole.trials} == {TrialState.FINISHED, TrialState.PRUNED, TrialState.FAILED}
    lines, begun = journal.read_bytes().splitlines(keepends=True), len(here)
    assert tuned(path, tmp_path / "out") == whole
    assert journal.read_bytes() == b"".join(lines)
    for end in {*range(0, len(lines), 4), len(lines) - 1}:
        journal.write_bytes(b"".join(lines[:end]) + lines[end][:20])
        assert tuned(path, tmp_path / "out") == whole, end
    assert set(here[begun:]) <= set(here[:begun])
    readable = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    assert len(optuna.load_study(study_name="rcsr", storage=readable).trials) == 4


def test_a_search_whose_scenario_changed_is_another_search(tiny: Path, tmp_path: Path, here: list[str]) -> None:
    path, scenario = spec(tiny, tmp_path, tune="scenario.yaml"), yaml.safe_load(tiny.read_text())
    for epochs, matching in ((4, None), (4, None), (5, "another tuning file, scenario or data")):
        (tmp_path / "scenario.yaml").write_text(yaml.safe_dump({**scenario, "training": {"local_epochs": epochs}}))
        if matching is None:
            assert tuned(path, tmp_path / "out", lambda: True).stopped and not here
        else:
            with pytest.raises(InputError, match=matching):
                tuned(path, tmp_path / "out", lambda: True)


@pytest.mark.slow
def test_a_pruned_and_a_refused_trial_count_but_never_win(tiny: Path, tmp_path: Path, here: list[str]) -> None:
    rates = {
        1e30: TrialState.FAILED,
        REFUSED_RATE: TrialState.REFUSED,
        1e-6: TrialState.FINISHED,
        3e-2: TrialState.PRUNED,
    }
    keys = {"pruning": "median", "evaluate_every": 1, "startup": 1, "batch": 1, "trials": 12, "sampler": "random"}
    path = spec(tiny, tmp_path, search={"training.learning_rate": list(rates)}, seed=2, **keys)
    found = tuned(path, tmp_path / "out")
    states = [each.state for each in found.trials]
    assert len(states) == 12 and len(here) <= 12 and set(states) == set(rates.values()), states
    began = states.index(TrialState.FINISHED) + 1  # pruning needs a finished trial
    for each in found.trials[began:]:
        assert each.state is rates[each.values["training.learning_rate"]]
        assert (each.reason == "") == (each.state is TrialState.FINISHED)
    assert "too long" in found.trials[states.index(TrialState.REFUSED)].reason
    assert found.trials[states.index(TrialState.PRUNED)].reason == "below the median at round 1"
    assert found.best["rcsr"].values == {"training.learning_rate": 1e-6}


#: Keys of a tuning file, the place that the error names, and the value; None for any.
REFUSED: tuple[tuple[dict[str, Any], str, object], ...] = (
    ({"search": {"training.learning_rate": {"low": 1, "high": 0}}}, "line 4: search.training.learning_rate", None),
    ({"search": {"training.momentum": {"low": 0.1, "high": 1, "step": 5}}}, "line 4: search.training.momentum", None),
    ({"search": {"training.batch_size": [16]}}, "line 4: search.training.batch_size", [16]),
    ({"search": {"seed": [1, 2]}}, "line 3: search", None),
    ({"search": {"evaluation.every": [1, 2]}}, "line 3: search", None),
    ({"search": {"training.speed": [1, 2]}}, "search space of rcsr: training.speed", "speed"),
    ({"search": {"training.learning_rate": [0.1, -1]}}, "search space of rcsr: training.learning_rate", -1),
    ({"search": {"training.learning_rate": [1, 1.0]}}, "search space of rcsr: training.learning_rate", 1.0),
    ({"methods": {"fedavgg": {}}}, "methods.fedavgg", "fedavgg"),
    ({"metric": "mean_r11"}, "metric", "mean_r11"),
    ({"metric": "fairness.nonsense"}, "metric", "fairness.nonsense"),
    ({"pruning": "median", "evaluate_every": 2}, "evaluate_every", 2),
    ({"trails": 3}, "line 12: trails", "trails"),
    ({"search": {}}, "", None),
    ({"seeds": [1, 1]}, "", None),
    ({"pruning": "median", "metric": "fairness.worst_r1"}, "", None),
)


def test_a_wrong_tuning_file_is_refused_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    for keys, place, value in REFUSED:
        path = spec(tiny, tmp_path, **keys)
        with pytest.raises(InputError) as refused:
            tuned(path, tmp_path / "out")
        assert refused.value.place.removeprefix(str(path)).startswith(f": {place}" if place else ""), keys
        assert value is None or refused.value.found == value, keys
        assert not (tmp_path / "out").exists()


def test_lists_and_mappings_are_values_too(tiny: Path, tmp_path: Path) -> None:
    values = [[0.9, 0.999], [0.8, 0.99]]
    path = spec(tiny, tmp_path, search={"training.betas": values})
    plan = files.plan_search(path, files.read_search(path), resolve_fully)
    assert json.loads(json.dumps(plan.facts))["search"] == {"training.betas": values}


def test_a_damaged_journal_is_refused_in_one_line(tiny: Path, tmp_path: Path) -> None:
    path, out = spec(tiny, tmp_path), tmp_path / "out"
    assert tuned(path, out, lambda: True).stopped
    journal = out / "study.journal"
    first, *others = journal.read_text().splitlines()
    for damage in ("[]", "{", '{"op_code": 99, "worker_id": "x"}', '{"op_code": 4, "worker_id": "x"}'):
        for lines in ([first, damage, *others], [first, *others, damage]):
            journal.write_text("\n".join([*lines, ""]))
            with pytest.raises(InputError, match="delete it") as refused:
                tuned(path, out)
            assert refused.value.place == str(journal) and "\n" not in str(refused.value)
    for name in ("search.json", "study.journal"):
        (out / name).unlink()
        (out / name).symlink_to(name)
        with pytest.raises(InputError, match=name):
            tuned(path, out)
        (out / name).unlink()
