"""Comparisons: which runs a command means, how they are done, and what is made of their results."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from fedmq.cli import compare as cli_compare
from fedmq.cli import main as cli
from fedmq.config import loader as scenarios
from fedmq.config.scenario import Evaluation, Scenario
from fedmq.errors import InputError
from fedmq.evaluation.program import Embedded, fold_recalls, measure
from fedmq.experiments import grid as planning
from fedmq.experiments import plots, process_pool, runner, spec_file, tables
from fedmq.experiments import summary as made_rows
from fedmq.experiments.grid import ComparisonPlan, Entry
from fedmq.federation.population import build_population
from fedmq.runs import results
from fedmq.runs.results import Target
from fedmq.runs.tables import as_csv
from fedmq.storage.run_folder import RunFolder
from tests.threaded_run import resolved, run, run_of

ROOT = Path(__file__).parent.parent


def resolve(file: Path, settings: list[str], seed: int | None) -> Scenario:
    return scenarios.load(file, [*settings, *([] if seed is None else [f"seed={seed}"])])


def entries(tiny: Path, vary: list[str], select: list[str] | None = None) -> tuple[Entry, ...]:
    varied = [planning.parse_variation(text, "--vary") for text in vary]
    chosen = [planning.parse_variation(text, "--select") for text in select or []]
    return planning.entries([tiny], [], varied, chosen, resolve)


def fully_resolved(file: Path, settings: list[str], seed: int | None) -> Scenario:
    """With the method's options checked."""
    return run_of(resolve(file, settings, seed)).scenario


def place(folder: Path) -> runner.Workplace:
    return runner.Workplace(folder, resolve, lambda scenario: "data", processes=True, jobs=2)


# ------------------------------------------------------------------------------------------------------ what is meant
@pytest.mark.parametrize("text", ["rounds", "rounds=", "=3", "a b=3", "rounds=[", "rounds=3,3", "x:=1"])
def test_a_variation_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--vary") as caught:
        planning.parse_variation(text, "--vary")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "allowed"), [("seed=1,2", "--seeds"), ("name=a,b", "set={name")])
def test_what_a_comparison_sets_itself_is_not_varied(text: str, allowed: str) -> None:
    for option in ("--vary", "--select"):
        with pytest.raises(InputError, match=allowed):
            planning.parse_variation(text, option)


@pytest.mark.parametrize("value", ["nan", "inf", "", "x"])
def test_a_target_is_a_number(value: str) -> None:
    with pytest.raises(InputError, match="--target"):
        planning.parse_target(f"mean_r1={value}")


def test_values_are_yaml_and_may_be_for_one_method() -> None:
    own = planning.parse_variation("rcsr:protocol.lambda_anc=0.3,1", "--select")
    assert (own.who, own.key, own.values) == ("rcsr", "protocol.lambda_anc", (0.3, 1))
    whole = planning.parse_variation("protocol=fedavg,{name: rcsr, filler: zero}", "--vary")
    assert whole.values == ("fedavg", {"name": "rcsr", "filler": "zero"})


@pytest.mark.parametrize("text", ["", "a", "0,0", "-1", "1.5", "0,,1", "9" * 5000])
def test_seeds_are_different_whole_numbers(text: str) -> None:
    with pytest.raises(InputError, match="--seeds"):
        planning.parse_seeds(text)


def test_every_combination_of_varied_values_is_a_row_named_by_what_differs(tiny: Path) -> None:
    rows = entries(tiny, ["silos.count=4,5", "protocol=fedavg,{name: rcsr, filler: zero}"])
    assert [row.name for row in rows] == [
        "fedavg, silos.count=4",
        "rcsr filler=zero, silos.count=4",
        "fedavg, silos.count=5",
        "rcsr filler=zero, silos.count=5",
    ]
    scenario = resolve(tiny, list(rows[3].settings), None)
    assert (scenario.silos.count, scenario.protocol.name, scenario.protocol.options["filler"]) == (5, "rcsr", "zero")
    assert [row.name for row in entries(tiny, ["silos.count=4,5"])] == ["silos.count=4", "silos.count=5"]


def test_keys_that_go_together_are_varied_as_a_named_set(tiny: Path) -> None:
    rows = entries(tiny, ["set={name: short, rounds: 3, training.learning_rate: 0.1},{name: long, rounds: 6}"])
    assert [row.name for row in rows] == ["short", "long"]
    scenario = resolve(tiny, list(rows[0].settings), None)
    assert (scenario.rounds, scenario.training.learning_rate) == (3, 0.1)
    assert resolve(tiny, list(rows[1].settings), None).rounds == 6
    wrong = (("--vary", "set=3,4"), ("--select", "set={rounds: 3},{rounds: 4}"), ("--vary", "set={},{rounds: 4}"))
    for option, text in (*wrong, ("--vary", "set={name: [x], rounds: 4}")):
        with pytest.raises(InputError, match=f"{option} set"):
            planning.parse_variation(text, option)


def test_a_variation_may_be_for_one_of_several_scenarios(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(tiny.read_text().replace("name: tiny", "name: other"))

    def names(*vary: str) -> list[str]:
        varied = [planning.parse_variation(text, "--vary") for text in vary]
        return [row.name for row in planning.entries([tiny, other], [], varied, [], resolve)]

    assert names() == ["tiny", "other"]
    assert names("tiny:protocol=fedavg,rcsr") == ["fedavg", "rcsr", "other"]
    assert names("protocol=fedavg", "silos.count=4,5") == [
        f"{name} fedavg, silos.count={count}" for name in ("tiny", "other") for count in (4, 5)
    ]
    with pytest.raises(InputError, match=r"--vary nobody:rounds.*tiny"):
        names("nobody:rounds=1,2")


def test_a_bad_value_is_found_before_anything_runs(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"silos\.count"):
        entries(tiny, ["silos.count=4,0"])
    with pytest.raises(InputError, match=r"training\.learning_rate"):
        entries(tiny, [], ["training.learning_rate=0.1,-1"])


def test_a_varied_method_keeps_the_options_set_beside_it_and_its_own_value_counts_first(tiny: Path) -> None:
    def taus(settings: list[str], *vary: str) -> list[tuple[str, float]]:
        varied = [planning.parse_variation(text, "--vary") for text in vary]
        rows = planning.entries([tiny], settings, varied, [], resolve)
        chosen = [resolve(row.file, list(row.settings), None).protocol for row in rows]
        return [(each.name, each.options["tau"]) for each in chosen]

    both = [("fedavg", 0.3), ("rcsr", 0.3)]
    assert taus(["protocol.tau=0.3"], "protocol=fedavg,rcsr") == both
    assert taus([], "protocol.tau=0.3", "protocol=fedavg,rcsr") == both
    assert taus(["protocol.tau=0.3"], "protocol=fedavg,{name: rcsr, tau: 1}") == [both[0], ("rcsr", 1)]
    assert taus(["protocol.tau=0.3"], "set={protocol: fedavg},{protocol: {name: rcsr, tau: 1}}")[1] == ("rcsr", 1)


def test_an_option_that_one_row_does_not_know_is_refused_with_how_to_give_it_to_others(tiny: Path) -> None:
    varied = [planning.parse_variation("protocol=fedprox,fedavg", "--vary")]
    with pytest.raises(
        InputError, match=r"protocol of fedavg: found 'mu'.*--vary 'protocol={name: \.\.\., mu: "
    ) as caught:
        planning.entries([tiny], ["protocol.mu=0.1"], varied, [], fully_resolved)
    assert "\n" not in str(caught.value)
    (row,) = planning.entries(
        [tiny], ["protocol.mu=0.1"], [replace(varied[0], values=("fedprox",))], [], fully_resolved
    )
    assert fully_resolved(row.file, list(row.settings), None).protocol.options["mu"] == 0.1


def test_rows_that_are_the_same_scenario_are_refused(tiny: Path) -> None:
    for vary in (["set={name: u, rounds: 3},{name: v, rounds: 3}"], ["protocol.name=rcsr,fedavg", "protocol=moon"]):
        with pytest.raises(InputError, match="rows that differ: its scenario is that of ") as caught:
            entries(tiny, vary)
        assert "\n" not in str(caught.value)
    equal = "set={name: u, rounds: 3},{name: v, rounds: 3}"
    assert len(entries(tiny, [equal], ["v:training.learning_rate=0.1,0.2"])) == 2


def test_seeds_are_not_set(tiny: Path) -> None:
    with pytest.raises(InputError, match="--set: found 'seed', allowed: seeds with --seeds"):
        planning.entries([tiny], ["seed=3"], [], [], resolve)
    with pytest.raises(InputError, match="--vary set: found 'seed', allowed: seeds with --seeds"):
        planning.parse_variation("set={name: u, seed: 3}", "--vary")


def test_the_same_file_twice_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="different names"):
        planning.entries([tiny, tiny], [], [], [], resolve)


def test_a_methods_own_candidates_take_the_place_of_those_for_all(tiny: Path) -> None:
    fedavg, rcsr = entries(
        tiny,
        ["protocol=fedavg,rcsr"],
        ["training.learning_rate=1,2,3,4", "rcsr:training.learning_rate=1,2", "rcsr:protocol.tau=0.1,0.2"],
    )
    assert [candidate[0] for candidate in fedavg.candidates] == [
        f"training.learning_rate={rate}" for rate in (1, 2, 3, 4)
    ]
    assert len(rcsr.candidates) == 4
    assert rcsr.candidates[1] == ("training.learning_rate=1", "protocol.tau=0.2")


def test_candidates_for_nobody_are_refused_with_who_there_is(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"'moon'.*fedavg.*rcsr"):
        entries(tiny, ["protocol=fedavg,rcsr"], ["moon:protocol.mu=1,2"])


def test_the_same_rows_find_the_same_folder_whatever_is_measured(tiny: Path) -> None:
    def folder(vary: str, **more: Any) -> Path:
        return planning.default_folder(ComparisonPlan(entries(tiny, [vary]), (0,), **more), "compare", resolve)

    assert folder("silos.count=4,5") == folder("silos.count=4,5", metrics=("map",), baseline="silos.count=5")
    assert folder("silos.count=4,5") != folder("silos.count=4,6")


def test_a_run_is_named_by_what_it_computes(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    name = runner.run_of(entry, (), 0, place(tmp_path)).name
    assert runner.run_of(entry, ("launcher=none",), 0, place(tmp_path)).name == name
    assert runner.run_of(entry, ("silos.slots=1",), 0, place(tmp_path)).name == name
    others = [
        runner.run_of(entry, (), 1, place(tmp_path)),
        runner.run_of(entry, ("rounds=5",), 0, place(tmp_path)),
        runner.run_of(entry, (), 0, place(tmp_path), trial=True),
        runner.run_of(entry, (), 0, runner.Workplace(tmp_path, resolve, lambda scenario: "other", True, 1)),
    ]
    assert len({name, *(other.name for other in others)}) == 5


def test_a_run_is_named_by_what_is_in_its_trace_not_by_where_that_lies(tiny: Path, tmp_path: Path) -> None:
    def name(path: Path, trace: str) -> str:
        path.write_text(f"silo,on,off\n{trace}\n")
        (entry,) = planning.entries([tiny], [f"participation={{kind: availability, trace: {path}}}"], [], [], resolve)
        return runner.run_of(entry, (), 0, place(tmp_path)).name

    before = name(tmp_path / "trace.csv", "silo-00,0,100")
    assert name(tmp_path / "other.csv", "silo-00,0,100") == before
    assert name(tmp_path / "trace.csv", "silo-00,0,50") != before


def test_names_do_not_change_with_links_nor_with_weights_named_in_full(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.npz").symlink_to(tmp_path / "real.npz")

    def facts(pretrained: str, path: str) -> dict[str, Any]:
        settings = [f"backbone={{name: matconvnet, pretrained: {pretrained}}}", f"data.path={path}"]
        return planning.named_by(resolve(tiny, settings, None))

    named = facts("w.mat", "real.npz")
    assert (named["backbone"]["pretrained"], named["data"]["path"]) == ("w.mat", str(tmp_path / "real.npz"))
    assert facts(str(tmp_path / "w.mat"), "link.npz") == named
    assert facts("/elsewhere/w.mat", "link.npz") != named


def test_data_are_prepared_once_for_all_runs_that_share_them(tiny: Path) -> None:
    asked: list[int] = []

    def prepare(scenario: Scenario) -> Path:
        asked.append(scenario.seed)
        return Path("cache") / f"digest-{scenario.seed}"

    shared: list[tuple[int, str]] = []

    def share(scenario: Scenario, folder: Path) -> None:
        shared.append((scenario.silos.count, folder.name))

    data_digest = runner.digest_once(prepare, share)
    found = [data_digest(resolve(tiny, [f"silos.count={count}"], seed)) for count in (4, 5) for seed in (0, 1)]
    assert found == ["digest-0", "digest-1"] * 2
    assert asked == [0, 1]
    data_digest(resolve(tiny, ["silos.count=5", "rounds=9"], 0))
    assert shared == [(5, "digest-0"), (5, "digest-1")], "each other way to share them out is tried once"


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("silos.count", 4, 70),
        ("partition.clusters", 5, 500),
        ("partition", "{kind: iid}", "{kind: shards_classes, classes_per_silo: 50}"),
    ],
)
def test_every_way_to_share_the_data_out_is_checked_beforehand(
    tiny: Path, tmp_path: Path, key: str, good: object, bad: object
) -> None:
    place = runner.Workplace(
        tmp_path, resolve, runner.digest_once(lambda each: build_population(each).prepared.folder, cli._share), True, 1
    )
    rows = entries(tiny, [f"{key}={good},{bad}"])
    runner.run_of(rows[0], (), 0, place)
    with pytest.raises(InputError, match=key.partition(".")[0]):
        runner.run_of(rows[1], (), 0, place)


# ------------------------------------------------------------------------------------------------------- doing them
def job(tmp_path: Path, name: str, program: str, rounds: int = 4) -> process_pool.Job:
    return process_pool.Job(
        name, (sys.executable, "-c", program), tmp_path / f"{name}.log", tmp_path / f"{name}.jsonl", rounds
    )


def test_one_that_fails_is_told_by_its_last_word_and_the_others_go_on(tmp_path: Path) -> None:
    todo = [
        job(tmp_path, "good", "pass"),
        job(tmp_path, "bad", "import sys; print('noise', file=sys.stderr); sys.exit('fedmq: no such thing\\n')"),
        job(tmp_path, "mute", "import sys; sys.exit(7)"),
        job(tmp_path, "killed", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path, "last", f"open({str(tmp_path / 'done')!r}, 'w')"),
    ]
    told: list[process_pool.JobProgress] = []
    ended = process_pool.run_all(todo, 2, told.append, lambda: False)
    assert ended == process_pool.Ended(
        {"bad": "no such thing", "mute": "ended with exit code 7", "killed": "killed by SIGKILL"}, stopped=False
    )
    assert (tmp_path / "done").exists()
    assert (told[-1].done, told[-1].total, told[-1].running) == (5, 5, ())


@pytest.mark.slow
def test_no_more_run_at_once_than_asked_and_each_on_one_thread(tmp_path: Path) -> None:
    program = (
        f"import os, time, pathlib; here = pathlib.Path({str(tmp_path)!r}); own = here / f'{{os.getpid()}}.on';"
        "own.touch(); time.sleep(0.2);"
        "(here / f'{os.getpid()}.seen').write_text(str(len(list(here.glob('*.on')))));"
        "own.unlink(); assert os.environ['OMP_NUM_THREADS'] == '1'"
    )
    ended = process_pool.run_all(
        [job(tmp_path, str(number), program) for number in range(4)], 2, lambda how: None, lambda: False
    )
    assert not ended.errors
    assert {path.read_text() for path in tmp_path.glob("*.seen")} <= {"1", "2"}


def test_a_stop_is_passed_on_and_nothing_is_started_after_it(tmp_path: Path) -> None:
    catching = (
        "import signal, sys, time, pathlib; path = pathlib.Path({path!r});"
        "signal.signal(signal.SIGTERM, lambda *_: (path.write_text('stopped'), sys.exit(1)));"
        "pathlib.Path({ready!r}).touch(); time.sleep(30)"
    ).format(path=str(tmp_path / "how"), ready=str(tmp_path / "ready"))
    todo = [job(tmp_path, "first", catching), job(tmp_path, "second", f"open({str(tmp_path / 'never')!r}, 'w')")]
    began = time.monotonic()
    ended = process_pool.run_all(todo, 1, lambda how: None, (tmp_path / "ready").exists)
    assert ended == process_pool.Ended({}, stopped=True)
    assert (tmp_path / "how").read_text() == "stopped"
    assert not (tmp_path / "never").exists()
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_the_time_left_follows_from_the_merges_on_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"kind": "merge"}\n{"kind": "evaluation"}\n')
    told: list[process_pool.JobProgress] = []
    program = (
        "import time; f = open({path!r}, 'a'); f.write('{{\"kind\": \"merge\"}}\\n'); f.close(); time.sleep(1.6)"
    ).format(path=str(tmp_path / "a.jsonl"))
    process_pool.run_all([job(tmp_path, "a", program)], 1, told.append, lambda: False)
    assert told[0].running == (("a", 0.25),)
    assert told[0].left is None
    middle = next(how for how in told if how.running == (("a", 0.5),))
    assert middle.left is not None
    assert 0 < middle.left < 60


def test_a_run_with_a_scenario_on_file_is_resumed_and_another_begun(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    begun = runner.run_of(entry, (), 3, place(tmp_path))
    fresh = runner.job_of(begun).command
    assert fresh[1:4] == ("-m", "fedmq", "scenario")
    assert fresh[5:7] == ("--out", str(begun.folder.root))
    assert scenarios.load(Path(fresh[4])) == begun.scenario
    begun.folder.root.mkdir()
    (begun.folder.root / "half").write_text("x")
    assert "--out" in runner.job_of(begun).command
    assert not begun.folder.root.exists()
    begun.folder.root.mkdir()
    begun.folder.scenario.write_text(begun.scenario.dump())
    assert runner.job_of(begun).command[5:7] == ("--resume", str(begun.folder.root))


def test_two_comparisons_never_work_on_the_same_runs_at_once(tmp_path: Path) -> None:
    plan = ComparisonPlan((), (0,))
    here = place(tmp_path)
    with runner._alone(tmp_path), pytest.raises(InputError, match="one at a time"):
        runner.carry_out(plan, here, lambda what, how: None, lambda: lambda: False)


def digest_of(recall: float) -> str:
    """Of a model that nobody trained."""
    return hashlib.sha256(str(recall).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------- what they came to
def finish(folder: RunFolder, recall: float, *, scenario: str = "tiny", reached: float = 3.0) -> None:
    """Files of a finished run of two merges, evaluated before and after."""
    per_silo = {"silo-00": {"mean_r1": recall}, "silo-01": {"mean_r1": recall / 2}}
    lines: list[dict[str, Any]] = [
        {"kind": "evaluation", "version": 0, "metrics": {"mean_r1": 0.1}, "per_silo": per_silo},
        {"kind": "merge", "version": 1, "now": 1.5},
        {"kind": "merge", "version": 2, "now": reached},
        {"kind": "evaluation", "version": 2, "metrics": {"mean_r1": recall}, "per_silo": per_silo},
    ]
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.summary.write_text(
        json.dumps(
            {
                "scenario": scenario,
                "model_digest": digest_of(recall),
                "metrics": {"mean_r1": recall},
                "fairness": {"std_r1": 0.2, "worst_r1": recall / 2, "gap_r1": 0.3},
                "bytes": {"up": {"delta": 100, "loss": 8}, "down": {"model": 50}},
                "seconds": {"virtual": reached},
                "processes": {"silos": 2},
                "protocol": "fedavg",
                "seed": 0,
                "versions": 2,
                "per_silo": {
                    name: {"modalities": ["image", "text"], "samples": 9, "participations": 1, **own}
                    for name, own in per_silo.items()
                },
                "versions_of": {"fedmq": "0.1.0"},
            }
        )
    )


def test_values_are_found_by_metric_or_by_place_in_the_summary(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.value("mean_r1") == 0.5
    assert outcome.value("fairness.worst_r1") == 0.25
    assert (outcome.value("bytes.up"), outcome.value("bytes.up.delta")) == (108.0, 100.0)
    assert outcome.value("seconds.virtual") == 3.0
    assert [outcome.value(name) for name in ("personal.mean_r1", "protocol", "map", "bytes", "fairness")] == [None] * 5


def test_the_time_to_a_target_is_that_of_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.time_to(Target("mean_r1", 0.1)) == 0.0
    assert outcome.time_to(Target("mean_r1", 0.3)) == 3.0
    assert outcome.time_to(Target("mean_r1", 0.6)) is None
    evaluations = [
        dataclasses.replace(each, metrics={**each.metrics, "i2t_medr": rank})
        for each, rank in zip(outcome.evaluations, (50.0, 4.0), strict=True)
    ]
    ranked = dataclasses.replace(outcome, evaluations=tuple(evaluations))
    assert ranked.time_to(Target("i2t_medr", 5.0)) == 3.0
    assert ranked.time_to(Target("i2t_medr", 3.0)) is None
    assert outcome.time_to(Target("fairness.worst_r1", 0.25)) == 0.0
    assert outcome.time_to(Target("fairness.worst_r1", 0.3)) is None


def test_version_0_is_what_no_training_gives(tmp_path: Path) -> None:
    finish(RunFolder(tmp_path), 0.5)
    before = results.read(RunFolder(tmp_path)).untrained()
    assert before.value("mean_r1") == 0.1
    assert before.value("fairness.gap_r1") == pytest.approx(0.25)
    assert before.value("bytes.up") is None


def test_an_unfinished_run_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="finished run"):
        results.read(RunFolder(tmp_path))


def test_the_interval_is_the_paired_t_interval() -> None:
    own, base = {0: 0.50, 1: 0.61, 2: 0.55}, {0: 0.45, 1: 0.52, 2: 0.53}
    found = results.statistic(own, base)
    differences = np.array([0.05, 0.09, 0.02])
    half = stats.t.ppf(0.975, 2) * differences.std(ddof=1) / np.sqrt(3)
    assert (found.n, found.mean, found.std) == (3, pytest.approx(np.mean([0.5, 0.61, 0.55])), pytest.approx(0.0550757))
    assert found.difference == pytest.approx(differences.mean())
    assert (found.low, found.high) == (
        pytest.approx(differences.mean() - half),
        pytest.approx(differences.mean() + half),
    )


def test_differences_are_taken_over_the_seeds_that_both_have() -> None:
    found = results.statistic({0: 1.0, 2: 3.0}, {0: 0.5, 1: 9.0, 2: 2.5})
    assert (found.n, found.difference, found.low, found.high) == (2, 0.5, 0.5, 0.5)
    assert "seeds" not in tables._difference(found)
    missing = results.statistic({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.5, 2: 2.0})
    assert (missing.n, missing.pairs) == (3, 2)
    assert tables._difference(missing).endswith("(2 of 3 seeds)")
    single = results.statistic({0: 1.0}, {0: 0.25, 1: 3.0})
    assert single.difference == 0.75
    assert np.isnan([single.std, single.low, single.high]).all()
    assert np.isnan(results.statistic({}, {0: 1.0}).mean)


def test_the_best_is_the_least_where_less_is_better_and_an_incomplete_row_is_left_out() -> None:
    rows = [results.statistic(values, None) for values in ({0: 1.0, 1: 2.0}, {0: 2.0, 1: 2.0}, {0: 9.0})]
    assert results.best(rows, "mean_r1") == {1}
    assert results.best(rows, "fairness.std_r1") == {0}
    assert results.best(rows, "bytes.up") == {0}
    assert results.best(rows[:1], "mean_r1") == set()


@pytest.fixture
def study(tiny: Path, tmp_path: Path) -> tuple[ComparisonPlan, tuple[made_rows.Row, ...]]:
    """Two methods at two points, three seeds each; rcsr is .1 better and slower."""
    rows = entries(tiny, ["silos.count=4,50", "protocol=fedavg,rcsr"])
    plan = ComparisonPlan(rows, (0, 1, 2), ("mean_r1", "fairness.worst_r1"), (Target("mean_r1", 0.55),), zero_shot=True)
    finished: dict[str, dict[int, results.FinishedRun]] = {}
    for place_, row in enumerate(rows):
        for seed in plan.seeds:
            folder = RunFolder(tmp_path / f"{place_}-{seed}")
            finish(folder, 0.5 + 0.1 * (row.method == "rcsr") + 0.01 * seed, reached=3.0 + place_ + seed)
            finished.setdefault(row.name, {})[seed] = results.read(folder)
    del finished["rcsr, silos.count=50"][2]
    return plan, made_rows.rows(plan, {row.name: () for row in rows}, finished)


def test_methods_are_compared_at_the_same_point(study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]]) -> None:
    _, rows = study
    assert {row.entry.name: row.against for row in rows} == {
        "zero-shot": "fedavg, silos.count=4",
        "fedavg, silos.count=4": None,
        "rcsr, silos.count=4": "fedavg, silos.count=4",
        "fedavg, silos.count=50": None,
        "rcsr, silos.count=50": "fedavg, silos.count=50",
    }
    best = {row.entry.name for row in rows if "mean_r1" in row.best}
    assert best == {"rcsr, silos.count=4"}, "the other point has but one complete row"
    assert rows[2].columns["mean_r1"].difference == pytest.approx(0.1)


def test_the_baseline_is_a_method_or_a_row_by_name(tiny: Path) -> None:
    rows = entries(tiny, ["silos.count=4,5", "protocol=fedavg,rcsr"])
    by_method = made_rows.baselines(ComparisonPlan(rows, (0,), baseline="rcsr"))
    assert by_method["fedavg, silos.count=5"] == "rcsr, silos.count=5"
    by_row = made_rows.baselines(ComparisonPlan(rows, (0,), baseline="rcsr, silos.count=4"))
    assert by_row["fedavg, silos.count=5"] == "rcsr, silos.count=4"
    with pytest.raises(InputError, match=r"--baseline.*'moon'.*fedavg, silos\.count=4.*nobody"):
        made_rows.baselines(ComparisonPlan(rows, (0,), baseline="moon"))


def test_rows_that_are_no_rivals_are_compared_with_nobody(
    study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]],
) -> None:
    plan, rows = study
    finished = {row.entry.name: row.outcomes for row in rows[1:]}
    plan = replace(plan, baseline="nobody")
    grid = tables.grid(made_rows.rows(plan, {}, finished), plan)
    assert grid.head == ("", "mean_r1", "fairness.worst_r1", "seconds to mean_r1 0.55")
    assert not any(cell.best for line in grid.body for cell in line)
    assert not any("difference" in note or "bold" in note for note in grid.notes)


def test_a_varied_keys_values_stand_side_by_side_where_asked(
    study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]],
) -> None:
    plan, rows = study
    long = {line[0].text: line for line in tables.grid(rows, plan).body}
    grid = tables.grid(rows, replace(plan, across="silos.count"))
    columns = ("mean_r1", "fairness.worst_r1", "seconds to mean_r1 0.55")
    titles = [title for column in columns for value in (4, 50) for title in (f"{column}, {value}", "difference")]
    assert grid.head == ("", *titles)
    assert [line[0].text for line in grid.body] == ["zero-shot", "fedavg", "rcsr"]
    nothing = (tables.Cell("-"), tables.Cell("-"))
    for name, line in zip(("fedavg", "rcsr"), grid.body[1:], strict=True):
        four, fifty = (long[f"{name}, silos.count={value}"] for value in (4, 50))
        assert line[1:] == tuple(cell for at in (1, 3, 5) for own in (four, fifty) for cell in own[at : at + 2])
    assert grid.body[0][1:] == tuple(cell for at in (1, 3, 5) for cell in (*long["zero-shot"][at : at + 2], *nothing))
    assert grid.notes[0] == "side by side: the values of silos.count"
    assert grid.notes[1:] == tables.grid(rows, plan).notes
    assert tables.markdown(grid, "fedmq").splitlines()[2].startswith("|  | mean_r1, 4 | difference | mean_r1, 50 |")


def test_what_was_chosen_at_each_point_stands_side_by_side_and_a_sweeps_lines_are_its_other_keys(tiny: Path) -> None:
    made = entries(tiny, ["silos.count=4,5", "rounds=3,4"], ["training.learning_rate=0.1,0.2"])
    plan = ComparisonPlan(made, (0,), ("mean_r1",), across="silos.count")
    chosen = {row.name: ("training.learning_rate=0.2",) for row in made}
    rows = made_rows.rows(plan, chosen, {row.name: {} for row in made})
    grid = tables.grid(rows, plan)
    assert [line[0].text for line in grid.body] == ["tiny, rounds=3", "tiny, rounds=4"]
    assert grid.head[-4:] == ("chosen, 4", "tried, 4", "chosen, 5", "tried, 5")
    assert [cell.text for cell in grid.body[0][-4:]] == ["learning_rate=0.2", "2"] * 2


def test_a_metric_that_no_run_has_is_a_column_of_dashes_and_a_warning_with_the_nearest(
    tiny: Path, tmp_path: Path
) -> None:
    (entry,) = entries(tiny, [])
    finish(RunFolder(tmp_path), 0.5)
    unreached, unknown = Target("fairness.worst_r1", 0.9), Target("fairness.worst", 0.5)
    plan = ComparisonPlan((entry,), (0,), ("mean_r1", "fairness.wurst_r1", "bytes.upp"), (unreached, unknown))
    rows = made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: results.read(RunFolder(tmp_path))}})
    (row,) = tables.grid(rows, plan).body
    assert [cell.text for cell in row[1:]] == ["0.5000", "-", "-", "-", "-"]
    told = made_rows.empty_columns(plan, rows)
    assert [line.split(";")[0] for line in told] == [
        "column 'fairness.wurst_r1' holds only dashes: no run has fairness.wurst_r1",
        "column 'bytes.upp' holds only dashes: no run has bytes.upp",
        "column 'seconds to fairness.worst 0.5' holds only dashes: no run has fairness.worst",
    ], "a target that is not reached is no wrong name"
    assert "nearest: fairness.worst_r1" in told[0]
    assert "nearest: bytes.up" in told[1]
    assert told[2].endswith("nearest: mean_r1")
    assert not any("\n" in line for line in told)
    (told_of_labels,) = made_rows.empty_columns(*with_metric(entry, tmp_path, "personal.map_at50"))
    assert told_of_labels.endswith("no run has personal.map_at50, which needs labels, and the data has none")


def with_metric(entry: Entry, folder: Path, metric: str) -> tuple[ComparisonPlan, Any]:
    plan = ComparisonPlan((entry,), (0,), (metric,))
    return plan, made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: results.read(RunFolder(folder))}})


def test_metrics_no_run_can_have_are_refused_and_cut_offs_are_those_of_the_rows(tiny: Path) -> None:
    rows = entries(tiny, ["evaluation.map_at=[50],[100]"])
    named = ("mean_r1", "t2i_r10", "spread_text", "map", "map_expected", "map_at50", "map_at100_i2t", "personal.any")
    planning.check_metrics(ComparisonPlan(rows, (0,), named, (Target("map_at100", 0.5),)), resolve)
    for name in ("map_at5", "map_i2i", "ndcg_at50", "mean_r2", "foo"):
        with pytest.raises(InputError, match=f"--metric: found '{name}'"):
            planning.check_metrics(ComparisonPlan(rows, (0,), ("mean_r1", name)), resolve)
    with pytest.raises(InputError, match=r"--target: found 'mean_r2', allowed: a metric, e\.g\. mean_r"):
        planning.check_metrics(ComparisonPlan(rows, (0,), targets=(Target("mean_r2", 0.5),)), resolve)


def test_what_an_evaluation_measures_is_known_before(tmp_path: Path) -> None:
    asked = Evaluation(map_at=(2,), ndcg_at=(3,), gallery="database", within=True)
    generator = np.random.default_rng(0)
    image, text = generator.normal(size=(2, 6, 4)).astype(np.float32)
    items = Embedded(image, text, np.arange(6), np.eye(2, dtype=np.uint8)[np.arange(6) % 2], binary=True)
    assert set(measure(items, asked, items)) == set(planning.known_metrics(asked))
    with_folds = set(planning.known_metrics(asked.model_copy(update={"fold_size": 2})))
    assert with_folds == set(planning.known_metrics(asked)) | set(fold_recalls(items, 2))


def test_runs_that_were_not_made_alike_are_named_under_the_table(
    study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]],
) -> None:
    plan, rows = study
    assert not any("alike" in note for note in tables.grid(rows, plan).notes)
    summary = rows[1].outcomes[0].summary
    assert isinstance(summary, dict)
    summary["versions_of"] = {**summary["versions_of"], "processor": "x86_64 AVX2"}
    assert tables.grid(rows, plan).notes[-1].endswith("processor not said and x86_64 AVX2")


def test_the_tables_say_the_same_in_every_form(study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]]) -> None:
    plan, rows = study
    grid = tables.grid(rows, plan)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(*tables.terminal(grid, "title", 160))
    text, latex, markdown = console.export_text(), tables.latex(grid, "fedmq x_y"), tables.markdown(grid, "fedmq x_y")
    for form in (text, markdown):
        assert "0.6100 ± 0.0100" in form
        assert "0.6050 ± 0.0071 (2 of 3 seeds)" in form
        assert "+0.1000 [+0.1000, +0.1000]" in form
        assert "to fedavg at the same point" in re.sub(r"\s+", " ", form)
    assert "**0.6100 ± 0.0100**" in markdown
    assert "\\textbf{0.6100 $\\pm$ 0.0100}" in latex
    assert "rcsr, silos.count=4 & " in latex
    assert "mean\\_r1 & difference & fairness.worst\\_r1" in latex
    assert latex.splitlines()[0] == "% fedmq x_y"
    broken = "fedmq compare --vary 'protocol=a,\n  b'"
    assert tables.latex(grid, broken).splitlines()[:2] == ["% fedmq compare --vary 'protocol=a,", "%   b'"]
    assert tables.markdown(grid, broken).startswith("    fedmq compare --vary 'protocol=a,\n      b'\n\n")
    assert tables._cell("a | b\nc") == "a \\| b c"
    assert [latex.count(rule) for rule in ("\\toprule", "\\midrule", "\\bottomrule")] == [1, 1, 1]
    assert all(line.count(" & ") == len(grid.head) - 1 for line in latex.splitlines() if line.endswith("\\\\"))
    records = list(csv.DictReader(io.StringIO(as_csv(tables.plain(rows)))))
    assert float(records[2]["mean_r1.mean"]) == pytest.approx(0.61)
    assert records[2]["silos.count"] == "4"
    assert records[1]["mean_r1.low"] == ""
    runs = list(csv.DictReader(io.StringIO(as_csv(tables.runs(rows, plan)))))
    assert len(runs) == 14
    assert runs[3]["model_digest"] == digest_of(0.5)
    assert [run["seconds to mean_r1 0.55"] for run in runs[6:9]] == ["4.0", "5.0", "6.0"]


def test_a_terminal_too_narrow_for_all_columns_shows_them_in_several_tables() -> None:
    names = [f"metric_{number}" for number in range(9)]
    head = ("", *(title for name in names for title in (name, "difference")))
    cells = [tables.Cell(text) for number in range(9) for text in (f"0.{number}446 ± 0.0031", "+0.1 [+0.0, +0.2]")]
    grid = tables.Grid(head, ((tables.Cell("a name of a row that is folded"), *cells),), ("a note",))
    for width, count in ((80, 3), (400, 1)):
        console = Console(width=width, record=True, file=io.StringIO())
        views = tables.terminal(grid, "title", width)
        console.print(*views, sep="\n")
        text = console.export_text()
        assert len(views) == 1 + count + 1
        assert views[0].plain == "title"
        assert all(name in text and f"0.{number}446 ± 0.0031" in text for number, name in enumerate(names))
        assert (text.count("title"), text.count("a note")) == (1, 1)


def test_a_target_that_not_all_seeds_reach_is_counted(study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]]) -> None:
    _, rows = study
    column = "seconds to mean_r1 0.55"
    assert [row.columns[column].n for row in rows] == [0, 0, 3, 0, 2]
    assert rows[2].columns[column].mean == pytest.approx(5.0)


def test_the_page_of_plots_draws_every_column_in_every_way(
    study: tuple[ComparisonPlan, tuple[made_rows.Row, ...]],
) -> None:
    _, rows = study
    page = plots.page(rows, "title & more", ["note"])
    assert "title &amp; more" in page
    for column in ("mean_r1", "fairness.worst_r1"):
        for title in (f"{column} against silos.count", f"{column} over merges", f"{column} over virtual time"):
            assert title in page
    assert page.count("Plotly.newPlot(") == 2 + 2 + 2 + 4  # against and bars of three columns, two curves of two


def test_the_spread_over_silos_has_a_course_and_what_is_measured_once_has_no_curve(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    finish(RunFolder(tmp_path), 0.5)
    with RunFolder(tmp_path).metrics.open("a") as file:
        own = {"silo-00": {"mean_r1": 0.7}}
        line = {"kind": "personal", "version": 2, "personal": {"mean_r1": 0.7}, "personal_whole_split": own}
        spread = {"std_r1": 0.0, "worst_r1": 0.7, "gap_r1": 0.0}
        more = {"personal_per_silo": own, "personal_per_silo_mean": {"mean_r1": 0.7}, "personal_fairness": spread}
        file.write(json.dumps({**line, **more}) + "\n")
    outcome = results.read(RunFolder(tmp_path))
    assert outcome.course("fairness.std_r1") == ((0, 0.0, pytest.approx(0.125)), (2, 3.0, pytest.approx(0.125)))
    assert outcome.course("personal.mean_r1") == ((2, 3.0, 0.7),)
    assert outcome.course("per_silo_mean.mean_r1") == ((0, 0.0, 0.375), (2, 3.0, 0.375))
    assert outcome.untrained().value("per_silo_mean.mean_r1") == 0.375
    assert outcome.course("fairness.none") == outcome.course("seconds to mean_r1 0.5") == ()
    plan = ComparisonPlan((entry,), (0,), ("fairness.std_r1", "personal.mean_r1", "bytes.up"))
    page = plots.page(made_rows.rows(plan, {entry.name: ()}, {entry.name: {0: outcome}}), "title", [])
    assert set(re.findall(r"([\w.]+) over (?:merges|virtual time)", page)) == {"fairness.std_r1"}


@pytest.mark.parametrize(
    ("vary", "against"),
    [
        (["tiny:rounds=3,4", "other:silos.count=4,5"], None),
        (["rounds=3,4", "other:silos.count=4,5"], "rounds"),
        (["tiny:rounds=3,4"], "rounds"),
    ],
)
def test_plots_are_drawn_against_a_key_that_all_methods_vary(
    tiny: Path, tmp_path: Path, vary: list[str], against: str | None
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(tiny.read_text().replace("name: tiny", "name: other"))
    varied = [planning.parse_variation(text, "--vary") for text in vary]
    plan = ComparisonPlan(planning.entries([tiny, other], [], varied, [], resolve), (0,), ("mean_r1",))
    finished: dict[str, dict[int, results.FinishedRun]] = {}
    for number, row in enumerate(plan.entries):
        finish(RunFolder(tmp_path / str(number)), 0.5)
        finished[row.name] = {0: results.read(RunFolder(tmp_path / str(number)))}
    page = plots.page(made_rows.rows(plan, {}, finished), "title", [])
    assert set(re.findall(r"mean_r1 against ([\w.]+)", page)) == ({against} if against else set())
    assert "mean_r1 over merges" in page


def test_curves_of_different_lengths_are_averaged_where_all_have_values() -> None:
    x, values = plots.on_common_grid(
        [(np.array([0.0, 2.0, 4.0]), np.array([0.0, 2.0, 4.0])), (np.array([0.0, 3.0]), np.array([1.0, 4.0]))]
    )
    assert x.tolist() == [0.0, 2.0, 3.0]
    assert values.tolist() == [[0.0, 2.0, 3.0], [1.0, 3.0, 4.0]]


def test_no_curve_is_drawn_out_to_the_left_of_its_first_value() -> None:
    late, early = (np.array([2.0, 3.0]), np.array([5.0, 7.0])), (np.array([1.0, 4.0]), np.array([0.0, 3.0]))
    x, values = plots.on_common_grid([late, early])
    assert x.tolist() == [2.0, 3.0]
    assert values.tolist() == [[5.0, 7.0], [1.0, 2.0]]
    x, values = plots.on_common_grid([late, (np.array([0.0, 1.0]), np.array([0.0, 1.0]))])
    assert (x.shape, values.shape) == ((0,), (2, 0))


# ------------------------------------------------------------------------------------------------------ choosing
def test_the_candidate_that_is_best_on_validation_is_chosen(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [], ["training.learning_rate=0.1,0.2,0.3,0.4"])
    trials = runner.trials_of(ComparisonPlan((entry,), (0, 1)), place(tmp_path))
    assert {trial.scenario.evaluation.split for trial in trials.values()} == {"val"}
    for trial, recall in zip(trials.values(), (0.3, 0.5, 0.5), strict=False):
        finish(trial.folder, recall)
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.2",)
    assert runner.choose(entry, trials, "fairness.std_r1") == ("training.learning_rate=0.1",)
    with pytest.raises(InputError, match="--metric"):
        runner.choose(entry, trials, "mean_r2")


def test_where_nobody_trains_the_shared_model_silos_own_ones_are_chosen_by(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [], ["training.learning_rate=0.1,0.2,0.3"])
    trials = runner.trials_of(ComparisonPlan((entry,), (0,)), place(tmp_path))
    for trial, own in zip(trials.values(), (0.3, 0.5, 0.4), strict=True):
        finish(trial.folder, 0.25)
        summary = json.loads(trial.folder.summary.read_text())
        told = {"personal": {"mean_r1": own}, "own_only": True}
        trial.folder.summary.write_text(json.dumps({**summary, **told}))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.2",)
    # One that is trained, too, is what was asked for.
    for trial in trials.values():
        summary = json.loads(trial.folder.summary.read_text())
        trial.folder.summary.write_text(json.dumps({**summary, "own_only": False}))
    assert runner.choose(entry, trials, "mean_r1") == ("training.learning_rate=0.1",)


def test_without_a_finished_trial_nothing_is_chosen(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [], ["training.learning_rate=0.1,0.2"])
    assert runner.choose(entry, runner.trials_of(ComparisonPlan((entry,), (0,)), place(tmp_path)), "mean_r1") is None


def test_finished_runs_are_read_and_not_done_again(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = entries(tiny, ["protocol=fedavg,rcsr"], ["rcsr:training.learning_rate=0.1,0.2"])
    here, plan = place(tmp_path), ComparisonPlan(rows, (0, 1), ("mean_r1",))
    started: list[str] = []

    def pretend(todo: list[process_pool.Job], *_: object) -> process_pool.Ended:
        for each in todo:
            started.append(each.name)
            finish(RunFolder(each.metrics.parent), 0.5 + 0.1 * ("0.2" in each.name))
        return process_pool.Ended({}, stopped=False)

    monkeypatch.setattr(process_pool, "run_all", pretend)
    first = runner.carry_out(plan, here, lambda what, how: None, lambda: lambda: False)
    assert started == [
        "rcsr, seed 0 (training.learning_rate=0.1)",
        "rcsr, seed 0 (training.learning_rate=0.2)",
        "fedavg, seed 0",
        "fedavg, seed 1",
        "rcsr, seed 0",
        "rcsr, seed 1",
    ]
    assert first.rows[1].chosen == ("training.learning_rate=0.2",)
    assert "not the same budget for all" in "; ".join(tables.grid(first.rows, plan).notes)
    again = runner.carry_out(
        ComparisonPlan(rows, (0, 1, 2), ("mean_r1",)), here, lambda what, how: None, lambda: lambda: False
    )
    assert started[6:] == ["fedavg, seed 2", "rcsr, seed 2"]
    assert [len(row.outcomes) for row in again.rows] == [3, 3]


# ----------------------------------------------------------------------------------------------- the command line
def fedmq(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmq", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_help_shows_an_example_and_one_with_a_comparison_file(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fedmq(monkeypatch, command, "--help") == 0
    text = " ".join(capfd.readouterr().out.split())
    assert f"Example: fedmq {command} " in text
    (named,) = re.findall(rf"fedmq {command} (scenarios/rcsr/tables/\w+\.yaml) --seeds 0", text)
    assert (ROOT / named).is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["compare", "nowhere.yaml"], "nowhere.yaml"),
        (["compare", "TINY", "--seeds", "x"], "--seeds"),
        (["compare", "TINY", "--set", "protocol.colour=red"], "colour"),
        (["compare", "TINY", "--vary", "protocol=fedavg,fedsgd"], "fedsgd"),
        (["compare", "TINY", "--baseline", "moon"], "--baseline"),
        (["compare", "TINY", "--target", "mean_r1"], "--target"),
        (["compare", "TINY", "--metric", "a b"], "--metric"),
        (["compare", "TINY", "--metric", "mean_r1,foo_r1"], "--metric: found 'foo_r1', allowed: a metric, e.g. "),
        (["compare", "TINY", "--target", "foo=0.5"], "--target: found 'foo', allowed: a metric, e.g. "),
        (["compare", "TINY", "--vary", "silos.count=4,0"], "--vary silos.count: found 0"),
        (["compare", "TINY", "--select", "training.learning_rate=1,-1"], "--select training.learning_rate: found -1"),
        (["compare", "TINY", "--select", "evaluation.split=val,test"], "--select: found 'evaluation.split'"),
        (["compare", "TINY", "--select", "rounds=1,2", "--select-rounds", "1"], "--select rounds: found"),
        (["compare", "TINY", "--vary", f"rounds={'[' * 20000}"], "--vary"),
        (
            ["compare", "TINY", "--vary", "partition.clusters=5,101", "--seeds", "0", "--quiet"],
            "partition.clusters: found 101",
        ),
        (["sweep", "TINY"], "--vary"),
        (["sweep", "TINY", "--vary", "silos"], "--vary"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    out = tmp_path / "out"
    code = fedmq(monkeypatch, *(str(tiny) if each == "TINY" else each for each in arguments), "--out", out)
    error = capfd.readouterr().err.strip()
    assert (code, len(error.splitlines())) == (2, 1), error
    assert expected in error
    assert not out.exists()


def test_folders_that_were_there_stay_where_a_comparison_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    out.mkdir()
    runs.mkdir()
    nowhere = ["--set", "data.path=nowhere.npz", "--seeds", "0", "--quiet"]
    assert fedmq(monkeypatch, "compare", tiny, *nowhere, "--out", out, "--runs", runs) == 2
    assert fedmq(monkeypatch, "scenario", tiny, *nowhere[:2], "--out", out) == 2
    assert capfd.readouterr().err.count("nowhere.npz") == 2
    assert (list(out.iterdir()), list(runs.iterdir())) == ([], [])


def test_a_comparison_does_not_write_into_the_folder_of_a_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.yaml").write_text(tiny.read_text())
    assert fedmq(monkeypatch, "compare", tiny, "--seeds", "0", "--quiet", "--out", tmp_path) == 2
    assert "the folder of a run" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.yaml"]


ROOTS = cli_compare.Roots(
    resolve, lambda quiet: lambda scenario: Path("data"), lambda scenario, folder: None, lambda: lambda: False, list
)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> tuple[typer.Typer, list[str]]:
    """Both commands, whose runs are over at once: the higher the learning rate the better, and seed 9 fails."""
    started: list[str] = []

    def pretend(todo: list[process_pool.Job], *_: object) -> process_pool.Ended:
        started.extend(each.name for each in todo)
        for each in todo:
            scenario = scenarios.load(Path(each.command[4]))
            if scenario.seed != 9:
                finish(RunFolder(each.metrics.parent), scenario.training.learning_rate)
        return process_pool.Ended({each.name: "no luck" for each in todo if "seed 9" in each.name}, stopped=False)

    monkeypatch.setattr(process_pool, "run_all", pretend)
    app = typer.Typer()
    cli_compare.add_compare(app, ROOTS)
    cli_compare.add_sweep(app, ROOTS)
    return app, started


def test_a_comparison_with_a_failed_run_writes_what_there_is_and_exits_with_1(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path
) -> None:
    app, started = pretended
    arguments = ["compare", str(tiny), "--vary", "training.learning_rate=0.1,0.2", "--metric", "mean_r1", "--json"]
    done = CliRunner().invoke(app, [*arguments, "--quiet", "--seeds", "0,9", "--out", str(tmp_path)])
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert result["errors"] == {f"training.learning_rate={rate}, seed 9": "no luck" for rate in (0.1, 0.2)}
    assert [(row["mean_r1.n"], row["mean_r1.mean"], row["mean_r1.std"]) for row in result["rows"]] == [
        (1, 0.1, None),
        (1, 0.2, None),
    ]
    assert "failed training.learning_rate=0.1, seed 9: no luck" in done.stderr
    for name in ("table.csv", "runs.csv", "table.tex", "table.md", "plots.html"):
        assert (tmp_path / name).stat().st_size > 0
    again = CliRunner().invoke(app, [*arguments, "--quiet", "--seeds", "0,1", "--out", str(tmp_path)])
    assert again.exit_code == 0
    assert started[4:] == ["training.learning_rate=0.1, seed 1", "training.learning_rate=0.2, seed 1"]


def test_a_column_no_run_has_is_warned_of_and_the_table_is_written(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path
) -> None:
    arguments = ["compare", str(tiny), "--metric", "mean_r1,fairness.wurst_r1", "--seeds", "0", "--quiet"]
    done = CliRunner().invoke(pretended[0], [*arguments, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    (line,) = done.stderr.splitlines()
    assert re.match(r"warning column 'fairness\.wurst_r1' .*nearest: fairness\.worst_r1", line)
    assert "| tiny | 0.0030 | - |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plots.html").stat().st_size > 0


def test_the_tables_are_written_and_printed_before_the_plots_are_made(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise KeyError("plots")

    monkeypatch.setattr(plots, "page", fail)
    arguments = ["compare", str(tiny), "--metric", "mean_r1", "--seeds", "0", "--quiet", "--out", str(tmp_path)]
    done = CliRunner().invoke(pretended[0], arguments)
    assert isinstance(done.exception, KeyError)
    assert "mean_r1" in done.stdout
    assert "| tiny | 0.0030 |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("option", ["--out", "--runs"])
@pytest.mark.parametrize("kind", ["file", "proc"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path, option: str, kind: str
) -> None:
    app, started = pretended
    file = tmp_path / "file"
    file.write_text("somebody's own")
    folder = {"file": file, "proc": Path("/proc/x")}[kind]
    folders = {"--out": tmp_path / "out", option: folder}
    arguments = ["compare", str(tiny), "--quiet", *(str(each) for pair in folders.items() for each in pair)]
    with pytest.raises(InputError, match=f"^{folder}: .*a folder that can be written$"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert started == []


def test_a_sweep_can_choose_among_the_varied_values_and_runs_only_the_best(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path
) -> None:
    app, started = pretended
    arguments = ["sweep", str(tiny), "--vary", "training.learning_rate=0.1,0.3,0.2", "--select", "val"]
    done = CliRunner().invoke(
        app,
        [
            *arguments,
            "--select-seed",
            "4",
            "--select-rounds",
            "3",
            "--seeds",
            "0,1",
            "--metric",
            "mean_r1",
            "--out",
            str(tmp_path),
        ],
    )
    assert done.exit_code == 0, done.stderr
    assert started == [
        *(f"tiny, seed 4 (training.learning_rate={rate})" for rate in (0.1, 0.3, 0.2)),
        "tiny, seed 0",
        "tiny, seed 1",
    ]
    assert "learning_rate=0.3" in done.stdout
    assert "seed 4, 3 rounds" in (tmp_path / "table.md").read_text()
    lengths = [scenarios.load(path).rounds for path in sorted(tmp_path.glob("runs/*seed[04]-*.yaml"))]
    assert sorted(lengths) == [3, 3, 3, 4]
    assert "tiny,tiny,training.learning_rate=0.3,3," in (tmp_path / "table.csv").read_text()


# ------------------------------------------------------------------------------------------------- comparison files
@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., cli_compare.Options]:
    """What a command comes to, before anything is planned."""

    def options(*arguments: object) -> cli_compare.Options:
        found: list[cli_compare.Options] = []
        monkeypatch.setattr(cli_compare, "_carry_out", lambda options, roots: found.append(options))
        app = typer.Typer()
        cli_compare.add_compare(app, ROOTS)
        cli_compare.add_sweep(app, ROOTS)
        CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)
        return found[0]

    return options


def comparison_file(folder: Path, text: str) -> Path:
    path = folder / "tables" / "table.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


WHOLE = """\
compare: ../tiny.yaml
set: [rounds=4, training.batch_size=16]
vary:
  - silos.count=4,5
  - >-
    protocol=
    fedavg,
    {name: rcsr, filler: zero}
select: training.learning_rate=0.1,0.2
select_seed: 3
select_rounds: 2
seeds: [4, 5]
metric:
  - mean_r1,mean_r5
  - bytes.up
baseline: fedavg
across: silos.count
target: mean_r1=0.5
zero_shot: true
runs: shared
"""
SAME = [
    "--set", "rounds=4", "--set", "training.batch_size=16", "--vary", "silos.count=4,5",
    "--vary", "protocol=fedavg,{name: rcsr, filler: zero}", "--select", "training.learning_rate=0.1,0.2",
    "--select-seed", "3", "--select-rounds", "2", "--seeds", "4,5", "--metric", "mean_r1,mean_r5,bytes.up",
    "--baseline", "fedavg", "--across", "silos.count", "--target", "mean_r1=0.5", "--zero-shot", "--runs", "shared",
]  # fmt: skip


def test_a_comparison_file_is_the_command_line_that_says_the_same(
    tiny: Path, asked: Callable[..., cli_compare.Options]
) -> None:
    by_file = asked("compare", comparison_file(tiny.parent, WHOLE), "--jobs", 3)
    by_hand = asked("compare", tiny, *SAME, "--jobs", 3)
    plans = [cli_compare._plan(options, resolve) for options in (by_file, by_hand)]
    assert by_file.files[0].samefile(tiny)
    assert (by_file.runs_dir, by_file.jobs) == (by_hand.runs_dir, 3)
    assert [replace(entry, file=tiny) for entry in plans[0].entries] == list(plans[1].entries)
    assert replace(plans[0], entries=()) == replace(plans[1], entries=())
    folders = {planning.default_folder(plan, "compare", resolve) for plan in plans}
    assert len(folders) == 1


def test_options_beside_a_comparison_file_go_on_top(tiny: Path, asked: Callable[..., cli_compare.Options]) -> None:
    file = comparison_file(tiny.parent, WHOLE)
    options = asked(
        "compare", file, "--set", "rounds=7", "--vary", "silos.count=6", "--vary", "protocol.tau=0.1,0.2",
        "--select", "rcsr:training.learning_rate=1", "--seeds", "9", "--metric", "map", "--select-seed", "0",
        "--baseline", "rcsr", "--target", "map=0.1", "--select-rounds", "1", "--runs", "mine", "--out", "out",
        "--across", "protocol.tau",
    )  # fmt: skip
    assert options.settings == ["rounds=4", "training.batch_size=16", "rounds=7"]
    assert [text.partition("=")[0] for text in options.vary or []] == ["silos.count", "protocol", "protocol.tau"]
    assert (options.vary or [])[0] == "silos.count=6"
    assert options.select == ["training.learning_rate=0.1,0.2", "rcsr:training.learning_rate=1"]
    assert (options.seeds, options.metric, options.baseline) == ("9", "map", "rcsr")
    assert (options.select_seed, options.select_rounds, options.across) == (0, 1, "protocol.tau")
    assert options.target == ["mean_r1=0.5", "map=0.1"]
    assert options.zero_shot
    assert (options.runs_dir, options.out_dir) == (Path("mine"), Path("out"))
    (first, *_) = cli_compare._plan(replace(options, baseline=None), resolve).entries
    with pytest.raises(InputError, match=r"--across.*'rounds', allowed: silos\.count or protocol\.tau"):
        cli_compare._plan(replace(options, baseline=None, across="rounds"), resolve)
    assert resolve(first.file, list(first.settings), None).rounds == 7


def test_two_sets_of_a_file_stay_two_unless_another_takes_their_place(
    tiny: Path, asked: Callable[..., cli_compare.Options]
) -> None:
    text = "compare: ../tiny.yaml\nvary:\n  - 'set={rounds: 3},{rounds: 4}'\n  - 'set={device: cpu},{device: auto}'\n"
    file = comparison_file(tiny.parent, text)
    assert len(asked("compare", file).vary or []) == 2
    assert asked("compare", file, "--vary", "set={rounds: 5},{rounds: 6}").vary == ["set={rounds: 5},{rounds: 6}"]


def test_a_comparison_file_of_a_sweep_can_choose_among_its_varied_values(
    tiny: Path, asked: Callable[..., cli_compare.Options]
) -> None:
    file = comparison_file(tiny.parent, "sweep: ../tiny.yaml\nvary: training.learning_rate=0.1,0.2\nselect: val\n")
    options = asked("sweep", file)
    assert (options.vary, options.select) == (None, ["training.learning_rate=0.1,0.2"])
    assert asked("sweep", file, "--select", "protocol.tau=0.1,0.2").select == [
        "protocol.tau=0.1,0.2",
        "training.learning_rate=0.1,0.2",
    ]


def test_results_of_a_comparison_file_keep_its_command(
    pretended: tuple[typer.Typer, list[str]], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = comparison_file(tiny.parent, "compare: ../tiny.yaml\nseeds: 0\nmetric: mean_r1\n")
    monkeypatch.setattr(sys, "argv", ["fedmq", "compare", str(file)])
    app, started = pretended
    done = CliRunner().invoke(app, ["compare", str(file), "--quiet", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    assert started == ["tiny, seed 0"]
    assert (tmp_path / "out" / "table.tex").read_text().splitlines()[0] == f"% fedmq compare {file}"
    assert "tables/table.yaml" in "".join(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "text", "place", "found"),
    [
        ("compare", "vary: [silos.count]", r"line 2: vary\.0", "silos.count"),
        ("compare", "vary: [{silos.count: [4, 5]}]", r"line 2: vary\.0", "silos.count"),
        ("compare", "vary: ['nobody:rounds=1,2']", "vary", "nobody"),
        ("compare", "set: [rounds]", r"line 2: set\.0", "rounds"),
        ("compare", "set: [silos.count=0]", r"silos\.count", "0"),
        ("compare", "select: [val]", "select", "val"),
        ("compare", "seeds: [1, 1]", "line 2: seeds", "1,1"),
        ("compare", "seeds: true", "line 2: seeds", "True"),
        ("compare", "metric: a b", "line 2: metric", "a b"),
        ("compare", "target: mean_r1", r"line 2: target\.0", "mean_r1"),
        ("compare", "baseline: moon", "baseline", "moon"),
        ("compare", "select_rounds: 0", "line 2: select_rounds", "0"),
        ("compare", "zero_shot: maybe", "line 2: zero_shot", "maybe"),
        ("compare", "jobs: 4", "jobs", "4"),
        ("compare", "sweep: ../tiny.yaml", "", "both compare and sweep"),
        ("sweep", "vary: rounds=3,4", "", "key compare"),
    ],
)
def test_a_bad_comparison_file_is_one_line_that_names_file_and_key(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    text: str,
    place: str,
    found: str,
) -> None:
    file, out = comparison_file(tiny.parent, f"compare: ../tiny.yaml\n{text}\n"), tmp_path / "out"
    code = fedmq(monkeypatch, command, file, "--out", out)
    error = capfd.readouterr().err.strip()
    assert (code, len(error.splitlines())) == (2, 1), error
    assert re.search(rf"fedmq: {re.escape(str(file))}.*{place}.*found .*{re.escape(found)}.*, allowed: \S", error)
    assert not out.exists()


def test_a_comparison_file_stands_alone_and_names_scenarios(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        assert fedmq(monkeypatch, *arguments) == 2
        return capfd.readouterr().err

    file = comparison_file(tiny.parent, "compare: ../tiny.yaml\n")
    assert "one comparison file alone" in refused("compare", tiny, file)
    assert "a comparison file itself" in refused("compare", comparison_file(tiny.parent, "compare: [table.yaml]\n"))
    assert "'nowhere.yaml'" in refused("compare", comparison_file(tiny.parent, "compare: [nowhere.yaml]\n"))
    assert "at least 1" in refused("compare", comparison_file(tiny.parent, "compare: []\n"))
    nothing_varied = comparison_file(tiny.parent, "sweep: ../tiny.yaml\n")
    assert f"{nothing_varied}: vary: found 'nothing'" in refused("sweep", nothing_varied)


def test_every_scenario_of_the_paper_is_in_its_readme() -> None:
    folder = ROOT / "scenarios" / "rcsr"
    named = set(re.findall(r"\| `(\w+\.yaml)`", (folder / "README.md").read_text()))
    assert named == {path.name for path in folder.glob("*.yaml")}


@pytest.mark.slow
def test_a_sweep_runs_goes_on_after_a_stop_and_gives_what_single_runs_give(tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.yaml"
    short.write_text(yaml.safe_dump({**yaml.safe_load(tiny.read_text()), "name": "short", "rounds": 12}))
    out, base = tmp_path / "out", [sys.executable, "-m", "fedmq"]
    command = [
        *base,
        "sweep",
        str(short),
        "--vary",
        "protocol=fedavg,rcsr",
        "--seeds",
        "0",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(out.glob("runs/*/metrics.jsonl")):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the same command goes on" in error
    assert not (out / "table.csv").exists()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=250, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["name"] for row in result["rows"]] == ["fedavg", "rcsr"]
    assert not result["errors"]
    runs = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    alone = run(resolved(short, "protocol=fedavg"), tmp_path / "one")
    assert alone.summary["model_digest"] == runs[0]["model_digest"]
    assert {path.name for path in out.iterdir()} == {
        "runs", "runs.csv", "table.csv", "table.md", "table.tex", "plots.html",
    }  # fmt: skip


def test_an_unknown_key_of_a_comparison_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("compare: x.yaml\nmetrik: mean_r1\nvary: protocol=fedavg\n")
    with pytest.raises(InputError, match=r"table\.yaml: line 2: metrik: found 'mean_r1', allowed: one of comp"):
        spec_file.read(path)
