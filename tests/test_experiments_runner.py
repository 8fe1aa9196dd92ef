"""Comparisons: how runs are executed, and how a row's candidate is chosen."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fedmq.config import resolve as scenarios
from fedmq.errors import InputError
from fedmq.experiments import process_pool, runner, tables
from fedmq.experiments.grid import ComparisonPlan
from fedmq.launch import forkserver
from fedmq.storage.run_folder import RunFolder
from tests.comparisons import entries, finish, place
from tests.waiting import PATIENCE, wait_for


def job(tmp_path: Path, name: str, program: str, rounds: int = 4) -> process_pool.Job:
    path, log = tmp_path / f"{name}.py", tmp_path / f"{name}.log"
    path.write_text(program)
    return process_pool.Job(name, (str(path),), log, tmp_path / f"{name}.jsonl", rounds)


def start(job: process_pool.Job) -> BaseProcess:
    """Start a job whose word is a program's file, as :func:`fedmq.launch.forkserver.start_job` starts a run."""
    return forkserver.start(runpy.run_path, job.words[0], log=job.log)


@pytest.mark.slow
def test_a_failed_run_is_reported_with_its_last_error_line_and_the_others_continue(tmp_path: Path) -> None:
    todo = [
        job(tmp_path, "good", "pass"),
        job(tmp_path, "bad", "import sys; print('noise', file=sys.stderr); sys.exit('fedmq: no such thing\\n')"),
        job(tmp_path, "mute", "import sys; sys.exit(7)"),
        job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path, "last", f"open({str(tmp_path / 'done')!r}, 'w')"),
    ]
    told: list[process_pool.JobProgress] = []
    ended = process_pool.run_all(todo, 2, told.append, lambda: False, start)
    assert ended == process_pool.Ended(
        {"bad": "no such thing", "mute": "ended with exit code 7", "killed": "killed by SIGKILL"}, stopped=False
    )
    assert (tmp_path / "done").exists()
    assert (told[-1].done, told[-1].total, told[-1].running) == (5, 5, ())


@pytest.mark.slow
def test_at_most_the_requested_number_of_runs_is_active_and_each_uses_one_thread(tmp_path: Path) -> None:
    program = (
        f"import os, time, pathlib; here = pathlib.Path({str(tmp_path)!r}); own = here / f'{{os.getpid()}}.on';"
        "own.touch(); time.sleep(0.2);"
        "(here / f'{os.getpid()}.seen').write_text(str(len(list(here.glob('*.on')))));"
        "own.unlink(); assert os.environ['OMP_NUM_THREADS'] == '1'"
    )
    ended = process_pool.run_all(
        [job(tmp_path, str(number), program) for number in range(4)], 2, lambda how: None, lambda: False, start
    )
    assert not ended.errors
    assert {path.read_text() for path in tmp_path.glob("*.seen")} <= {"1", "2"}


def test_a_stop_is_passed_on_to_the_runs_and_no_run_starts_after_it(tmp_path: Path) -> None:
    catching = (
        "import signal, sys, time, pathlib; path = pathlib.Path({path!r});"
        "signal.signal(signal.SIGTERM, lambda *_: (path.write_text('stopped'), sys.exit(1)));"
        "pathlib.Path({ready!r}).touch(); time.sleep(1000)"
    ).format(path=str(tmp_path / "how"), ready=str(tmp_path / "ready"))
    todo = [job(tmp_path, "first", catching), job(tmp_path, "second", f"open({str(tmp_path / 'never')!r}, 'w')")]
    ended = process_pool.run_all(todo, 1, lambda how: None, (tmp_path / "ready").exists, start)
    assert ended == process_pool.Ended({}, stopped=True)
    assert (tmp_path / "how").read_text() == "stopped"
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_a_run_is_told_to_stop_when_its_comparison_is_killed(tmp_path: Path) -> None:
    told, ready, program = tmp_path / "told", tmp_path / "ready", tmp_path / "program.py"
    program.write_text(
        "import pathlib, signal, sys, time;"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).touch(), sys.exit(1)));"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(1000)"
    )
    comparison = (
        "import pathlib, runpy, time; from fedmq.launch import forkserver;"
        f"forkserver.start(runpy.run_path, {str(program)!r}, log=pathlib.Path({str(tmp_path / 'log')!r}));"
        "time.sleep(1000)"
    )
    process = subprocess.Popen([sys.executable, "-c", comparison])
    wait_for(ready.exists, PATIENCE)
    process.kill()
    process.wait()
    wait_for(told.exists, PATIENCE)


@pytest.mark.slow
def test_the_remaining_time_is_estimated_from_the_merges_on_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "merge"}\n{"kind": "evaluation"}\n')
    told: list[process_pool.JobProgress] = []
    program = (
        "import os, time\n"
        "while not os.path.exists({first!r}): time.sleep(0.05)\n"
        "f = open({path!r}, 'a'); f.write('{{\"kind\": \"merge\"}}\\n'); f.close()\n"
        "while not os.path.exists({seen!r}): time.sleep(0.05)"
    ).format(path=str(tmp_path / "a.jsonl"), first=str(tmp_path / "first"), seen=str(tmp_path / "seen"))

    def report(how: process_pool.JobProgress) -> None:
        told.append(how)
        (tmp_path / "first").touch()
        if how.running == (("a", 0.5),):
            (tmp_path / "seen").touch()

    process_pool.run_all([job(tmp_path, "a", program)], 1, report, lambda: False, start)
    assert told[0].running == (("a", 0.25),)
    assert told[0].left is None
    middle = next(how for how in told if how.running == (("a", 0.5),))
    assert middle.left is not None
    assert middle.left > 0


def test_a_run_with_a_scenario_on_file_is_resumed_and_any_other_is_started(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    begun = runner.run_of(entry, (), 3, place(tmp_path))
    fresh = runner.job_of(begun).words
    assert fresh[0] == "scenario"
    assert fresh[2:4] == ("--out", str(begun.folder.root))
    assert scenarios.load(Path(fresh[1])) == begun.scenario
    begun.folder.root.mkdir()
    (begun.folder.root / "half").write_text("x")
    assert "--out" in runner.job_of(begun).words
    assert not begun.folder.root.exists()
    begun.folder.root.mkdir()
    begun.folder.scenario.write_text(begun.scenario.dump())
    assert runner.job_of(begun).words[2:4] == ("--resume", str(begun.folder.root))


def test_two_comparisons_cannot_work_on_the_same_runs_concurrently(tmp_path: Path) -> None:
    plan = ComparisonPlan((), (0,))
    here = place(tmp_path)
    with runner.exclusive_use(tmp_path), pytest.raises(InputError, match="one at a time"):
        runner.carry_out(plan, here, lambda what, how: None, lambda: lambda: False)


def test_the_candidate_that_is_best_on_validation_is_chosen(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [], ["training.learning_rate=0.1,0.2,0.3,0.4"])
    plan = ComparisonPlan((entry,), (0, 1), select_seeds=(7, 8))
    trials = runner.trials_of(plan, place(tmp_path))
    assert {(run.scenario.evaluation.split, run.scenario.seed) for runs in trials.values() for run in runs} == {
        ("val", 7),
        ("val", 8),
    }
    # Means .35, .4, .4 and an unfinished run; by one seed alone the first, the third or the fourth would be best.
    for runs, recalls in zip(trials.values(), ((0.6, 0.1), (0.4, 0.4), (0.2, 0.6), (0.9,)), strict=True):
        for run, recall in zip(runs, recalls, strict=False):
            finish(run.folder, recall)
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.2",)
    assert runner.choose(entry, trials, "fairness.std_r1") == ("training.learning_rate=0.1",)
    with pytest.raises(InputError, match="--metric"):
        runner.choose(entry, trials, "mean_r2")
    # Neither a refused update of a scripted attack nor a run that is not finished matters.
    best = list(trials.values())[1][1]
    attacked = {"silo-01": {"refused": 0, "scripted": 4, "errors": 0, "last": "x"}}
    told = {**json.loads(best.folder.summary.read_text()), "unusable_replies": attacked}
    best.folder.summary.write_text(json.dumps(told))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.2",)
    told["unusable_replies"] = {"silo-01": {**attacked["silo-01"], "refused": 4, "scripted": 0}}
    best.folder.summary.write_text(json.dumps(told))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.3",)
    elsewhere = runner.trials_of(plan, place(tmp_path / "unfinished"))
    assert runner.choose(entry, elsewhere, "mean_r1") is None


def test_personal_models_decide_the_choice_where_the_shared_model_is_not_trained(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [], ["training.learning_rate=0.1,0.2,0.3"])
    trials = runner.trials_of(ComparisonPlan((entry,), (0,)), place(tmp_path))
    for (trial,), own in zip(trials.values(), (0.3, 0.5, 0.4), strict=True):
        finish(trial.folder, 0.25)
        summary = json.loads(trial.folder.summary.read_text())
        told = {"personal": {"mean_r1": own}, "personal_only": True}
        trial.folder.summary.write_text(json.dumps({**summary, **told}))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.2",)
    # Where the shared model is trained too, the requested metric of the shared model decides.
    for (trial,) in trials.values():
        summary = json.loads(trial.folder.summary.read_text())
        trial.folder.summary.write_text(json.dumps({**summary, "personal_only": False}))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.1",)


def pretend(
    monkeypatch: pytest.MonkeyPatch, plan: ComparisonPlan, runs: Path, refused: str | None = None
) -> tuple[runner.Comparison, list[str]]:
    """A comparison whose runs are pretended, the better the higher the learning rate; and the runs started.

    Updates are refused in the runs whose name has the text ``refused``.
    """
    started: list[str] = []
    facts = {"unusable_replies": {"silo-01": {"refused": 1, "scripted": 0, "errors": 0, "last": "too long"}}}

    def run_all(todo: list[process_pool.Job], *_: object) -> process_pool.Ended:
        for each in todo:
            started.append(each.name)
            folder = RunFolder(each.metrics.parent)
            finish(folder, 0.5 + 0.1 * ("0.2" in each.name))
            if refused is not None and refused in each.name:
                summary = json.loads(folder.summary.read_text())
                folder.summary.write_text(json.dumps({**summary, **facts}))
        return process_pool.Ended({}, stopped=False)

    monkeypatch.setattr(process_pool, "run_all", run_all)
    return runner.carry_out(plan, place(runs), lambda what, how: None, lambda: lambda: False), started


def test_a_trial_whose_updates_were_refused_is_never_chosen(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ComparisonPlan(entries(tiny, [], ["training.learning_rate=0.1,0.2"]), (0,))
    made, _ = pretend(monkeypatch, plan, tmp_path / "one", "rate=0.2")
    assert made.rows[0].chosen == ("training.learning_rate=0.1",) and not made.errors
    assert "(training.learning_rate=0.2) cannot be chosen: " in made.warnings[0]
    made, _ = pretend(monkeypatch, plan, tmp_path / "both", "")
    assert not made.rows[0].outcomes
    assert len(made.errors) == 2


def test_finished_runs_are_read_and_not_repeated(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = entries(tiny, ["protocol=fedavg,rcsr"], ["rcsr:training.learning_rate=0.1,0.2"])
    plan = ComparisonPlan(rows, (0, 1), ("mean_r1",))
    first, started = pretend(monkeypatch, plan, tmp_path)
    assert started == [
        "rcsr, seed 0 (training.learning_rate=0.1)",
        "rcsr, seed 0 (training.learning_rate=0.2)",
        "fedavg, seed 0",
        "fedavg, seed 1",
        "rcsr, seed 0",
        "rcsr, seed 1",
    ]
    assert first.rows[1].chosen == ("training.learning_rate=0.2",)
    assert "budgets differ" in "; ".join(tables.grid(first.rows, plan).notes)
    again, started = pretend(monkeypatch, ComparisonPlan(rows, (0, 1, 2), ("mean_r1",)), tmp_path)
    assert started == ["fedavg, seed 2", "rcsr, seed 2"]
    assert [len(row.outcomes) for row in again.rows] == [3, 3]
