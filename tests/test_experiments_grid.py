"""Comparisons: the runs that a command expands to, and their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedmq.cli import compare as cli_compare
from fedmq.config.resolve import ResolvedRun, apply_settings
from fedmq.config.scenario import Scenario
from fedmq.config.yaml_files import read_yaml
from fedmq.errors import InputError
from fedmq.experiments import grid as planning
from fedmq.experiments import runner
from fedmq.experiments.grid import ComparisonPlan
from fedmq.experiments.summary import parse_target
from fedmq.federation.population import build_population
from tests.comparisons import entries, place, resolve

#: Texts of options that are refused, by the function that reads them.
REFUSED: dict[Callable[[str], object], tuple[str, ...]] = {
    partial(planning.parse_variation, option="--vary"): (
        *("best", "rounds=", "a b=3", "rounds=[", "rounds=3,3", "seed=1,2", "name=a,b"),
        *("set=3,4", "set={},{rounds: 4}", "set={name: [x], rounds: 4}"),
    ),
    partial(planning.parse_variation, option="--select"): ("evaluation.split=val,test", "set={rounds: 3},{rounds: 4}"),
    parse_target: ("mean_r1=nan", "mean_r1=x", "mean_r1"),
    planning.parse_seeds: ("", "a", "0,0", "-1", "9" * 5000),
}


def test_options_of_another_form_are_refused_in_one_line() -> None:
    for parse, texts in REFUSED.items():
        for text in texts:
            with pytest.raises(InputError, match=r"^--") as caught:
                parse(text)
            assert "\n" not in str(caught.value), text


def test_rows_and_candidates_that_cannot_be_are_refused(tiny: Path) -> None:
    for words, build in (
        (r"--set: found 'seed'", lambda: planning.entries([tiny], ["seed=3"], [], [], resolve)),
        ("different names", lambda: planning.entries([tiny, tiny], [], [], [], resolve)),
        (r"'moon'.*fedavg.*rcsr", lambda: entries(tiny, ["protocol=fedavg,rcsr"], ["moon:protocol.mu=1,2"])),
    ):
        with pytest.raises(InputError, match=words):
            build()


def test_values_are_yaml_and_may_apply_to_one_method() -> None:
    own = planning.parse_variation("rcsr:protocol.lambda_anc=0.3,1", "--select")
    assert (own.who, own.key, own.values) == ("rcsr", "protocol.lambda_anc", (0.3, 1))
    whole = planning.parse_variation("protocol=fedavg,{name: rcsr, filler: zero}", "--vary")
    assert whole.values == ("fedavg", {"name": "rcsr", "filler": "zero"})


def test_every_combination_of_varied_values_is_a_row_named_by_its_differences(tiny: Path) -> None:
    rows = entries(tiny, ["silos.count=4,5", "protocol=fedavg,{name: rcsr, filler: zero}"])
    assert [row.name for row in rows] == [
        "fedavg, silos.count=4",
        "rcsr filler=zero, silos.count=4",
        "fedavg, silos.count=5",
        "rcsr filler=zero, silos.count=5",
    ]
    scenario = resolve(tiny, list(rows[3].settings), None).scenario
    assert (scenario.silos.count, scenario.protocol.name, scenario.protocol.options["filler"]) == (5, "rcsr", "zero")
    assert [row.name for row in entries(tiny, ["silos.count=4,5"])] == ["silos.count=4", "silos.count=5"]


def test_keys_are_varied_together_as_a_named_set(tiny: Path) -> None:
    rows = entries(tiny, ["set={name: short, rounds: 3, training.learning_rate: 0.1},{name: long, rounds: 6}"])
    assert [row.name for row in rows] == ["short", "long"]
    scenario = resolve(tiny, list(rows[0].settings), None).scenario
    assert (scenario.rounds, scenario.training.learning_rate) == (3, 0.1)
    assert resolve(tiny, list(rows[1].settings), None).scenario.rounds == 6


def test_a_variation_may_apply_to_one_of_several_scenarios(tiny: Path, tmp_path: Path) -> None:
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


def test_a_varied_method_keeps_options_set_separately_and_its_own_value_takes_precedence(tiny: Path) -> None:
    def taus(settings: list[str], *vary: str) -> list[tuple[str, float]]:
        varied = [planning.parse_variation(text, "--vary") for text in vary]
        rows = planning.entries([tiny], settings, varied, [], resolve)
        chosen = [resolve(row.file, list(row.settings), None).scenario.protocol for row in rows]
        return [(each.name, each.options["tau"]) for each in chosen]

    both = [("fedavg", 0.3), ("rcsr", 0.3)]
    assert taus(["protocol.tau=0.3"], "protocol=fedavg,rcsr") == both
    assert taus([], "protocol.tau=0.3", "protocol=fedavg,rcsr") == both
    assert taus(["protocol.tau=0.3"], "protocol=fedavg,{name: rcsr, tau: 1}") == [both[0], ("rcsr", 1)]
    assert taus(["protocol.tau=0.3"], "set={protocol: fedavg},{protocol: {name: rcsr, tau: 1}}")[1] == ("rcsr", 1)


def test_rows_with_the_same_scenario_are_refused(tiny: Path) -> None:
    for vary in (["set={name: u, rounds: 3},{name: v, rounds: 3}"], ["protocol.name=rcsr,fedavg", "protocol=moon"]):
        with pytest.raises(InputError, match="rows that differ: its scenario is that of ") as caught:
            entries(tiny, vary)
        assert "\n" not in str(caught.value)
    equal = "set={name: u, rounds: 3},{name: v, rounds: 3}"
    assert len(entries(tiny, [equal], ["v:training.learning_rate=0.1,0.2"])) == 2


def test_a_methods_own_candidates_replace_those_for_all_methods(tiny: Path) -> None:
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


def test_the_comparison_folder_depends_on_the_rows_and_not_on_metrics(tiny: Path) -> None:
    def folder(vary: str, **more: Any) -> Path:
        return planning.default_folder(ComparisonPlan(entries(tiny, [vary]), (0,), **more), "compare", resolve)

    assert folder("silos.count=4,5") == folder("silos.count=4,5", metrics=("map",), baseline="silos.count=5")
    assert folder("silos.count=4,5") != folder("silos.count=4,6")


def test_a_run_name_depends_only_on_what_the_run_computes(tiny: Path, tmp_path: Path) -> None:
    (entry,) = entries(tiny, [])
    name = runner.run_of(entry, (), 0, place(tmp_path)).name
    assert runner.run_of(entry, ("launcher=none",), 0, place(tmp_path)).name == name
    assert runner.run_of(entry, ("silos.slots=1",), 0, place(tmp_path)).name == name
    others = [
        runner.run_of(entry, (), 1, place(tmp_path)),
        runner.run_of(entry, ("rounds=5",), 0, place(tmp_path)),
        runner.run_of(entry, (), 0, place(tmp_path), trial=True),
        runner.run_of(entry, (), 0, place(tmp_path, lambda run: "other")),
    ]
    assert len({name, *(other.name for other in others)}) == 5


def test_a_run_name_depends_on_the_content_of_its_trace_not_its_path(tiny: Path, tmp_path: Path) -> None:
    def name(path: Path, trace: str) -> str:
        path.write_text(f"silo,on,off\n{trace}\n")
        (entry,) = planning.entries([tiny], [f"participation={{kind: availability, trace: {path}}}"], [], [], resolve)
        return runner.run_of(entry, (), 0, place(tmp_path)).name

    before = name(tmp_path / "trace.csv", "silo-00,0,100")
    assert name(tmp_path / "other.csv", "silo-00,0,100") == before
    assert name(tmp_path / "trace.csv", "silo-00,0,50") != before


def test_run_names_do_not_change_with_symlinks_or_absolute_weight_paths(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.npz").symlink_to(tmp_path / "real.npz")

    def facts(pretrained: str, path: str) -> dict[str, Any]:
        settings = [f"backbone={{name: matconvnet, pretrained: {pretrained}}}", f"data.path={path}"]
        return planning.named_by(resolve(tiny, settings, None).scenario)

    named = facts("w.mat", "real.npz")
    assert (named["backbone"]["pretrained"], named["data"]["path"]) == ("w.mat", str(tmp_path / "real.npz"))
    assert facts(str(tmp_path / "w.mat"), "link.npz") == named
    assert facts("/elsewhere/w.mat", "link.npz") != named


def test_data_is_prepared_once_for_all_runs_that_share_it(tiny: Path) -> None:
    asked: list[int] = []

    def prepare(run: ResolvedRun) -> Path:
        scenario = run.scenario
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
    [("silos.count", 4, 70), ("partition", "{kind: iid}", "{kind: shards_classes, classes_per_silo: 50}")],
)
def test_every_partition_is_checked_before_the_runs_start(
    tiny: Path, tmp_path: Path, key: str, good: object, bad: object
) -> None:
    prepare = lambda run: build_population(run.scenario).prepared.folder  # noqa: E731
    here = place(tmp_path, runner.digest_once(prepare, cli_compare.check_partition))
    rows = entries(tiny, [f"{key}={good},{bad}"])
    runner.run_of(rows[0], (), 0, here)
    with pytest.raises(InputError, match=key.partition(".")[0]):
        runner.run_of(rows[1], (), 0, here)


def test_the_scenarios_own_method_keeps_its_options_and_rows_of_others_are_named(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    raw = apply_settings(read_yaml(tiny), ["protocol={name: rcsr, warmup: 1, filler: zero}"])
    file.write_text(json.dumps(raw))
    rows = entries(file, ["protocol=fedavg,rcsr,{name: rcsr, filler: ema}"])
    of_row = {each.name: dict(resolve(file, list(each.settings), None).scenario.protocol.options) for each in rows}
    assert of_row == {
        "fedavg": {},
        "rcsr": {"warmup": 1, "filler": "zero"},
        "rcsr filler=ema": {"warmup": 1, "filler": "ema"},
    }
    (line,) = planning.without_options(rows)
    assert line == f"{file}: the rows fedavg are without the options of rcsr (warmup: 1, filler: zero)"
    together = entries(file, ["set={name: plain, protocol: {name: rcsr}},{name: own}"])
    assert [dict(resolve(file, list(each.settings), None).scenario.protocol.options) for each in together] == [
        {},
        {"warmup": 1, "filler": "zero"},
    ]
    assert not list(planning.without_options(together))


# ---------------------------------------------------------------------------------------------------- values at an edge
def selecting(tiny: Path, *select: str, vary: str = "protocol=fedavg,rcsr") -> ComparisonPlan:
    return ComparisonPlan(entries(tiny, [vary], list(select)), (0,), extensions=3)


def added(plan: ComparisonPlan | None) -> dict[str, list[tuple[str, ...]]]:
    return {} if plan is None else {entry.name: list(entry.added) for entry in plan.entries}


def test_a_grid_grows_past_a_chosen_edge_and_other_rows_try_as_many_values_between(tiny: Path) -> None:
    plan = selecting(tiny, "training.learning_rate=0.001,0.003,0.009")
    chosen = {"fedavg": ("training.learning_rate=0.009",), "rcsr": ("training.learning_rate=0.003",)}
    larger = planning.grown(plan, chosen, resolve)
    assert added(larger) == {
        "fedavg": [("training.learning_rate=0.027",)],
        "rcsr": [("training.learning_rate=0.0052",)],
    }
    assert larger is not None and [len(entry.candidates) for entry in larger.entries] == [4, 4]
    chosen["fedavg"] = ("training.learning_rate=0.027",)
    again = planning.grown(larger, chosen, resolve)
    assert added(again)["fedavg"][1:] == [("training.learning_rate=0.081",)]
    assert added(again)["rcsr"][1:] == [("training.learning_rate=0.00395",)]


def test_a_grid_does_not_grow_if_every_chosen_value_is_within_it(tiny: Path) -> None:
    plan = selecting(tiny, "training.learning_rate=0.001,0.003,0.009")
    within = dict.fromkeys(("fedavg", "rcsr"), ("training.learning_rate=0.003",))
    assert planning.grown(plan, within, resolve) is None
    assert planning.grown(plan, dict.fromkeys(within), resolve) is None, "no candidate could be chosen"


def test_a_grid_grows_at_each_edge_but_not_past_what_is_allowed(tiny: Path) -> None:
    plan = selecting(tiny, "training.local_epochs=1,2,4", "training.momentum=0,0.5", vary="protocol=fedavg")
    (name,) = (entry.name for entry in plan.entries)
    low = {name: ("training.local_epochs=1", "training.momentum=0")}
    assert planning.grown(plan, low, resolve) is None, "neither 0 epochs nor a negative momentum"
    high = {name: ("training.local_epochs=4", "training.momentum=0")}
    assert added(planning.grown(plan, high, resolve)) == {name: [("training.local_epochs=8", "training.momentum=0")]}
    assert planning.at_edge(plan.entries[0], high[name]) == {"training.local_epochs": 4, "training.momentum": 0}


def test_lists_of_words_and_flags_have_no_edge(tiny: Path) -> None:
    plan = selecting(tiny, "training.optimizer=adam,sgd", "aggregation.robust.rule=none,median")
    chosen = {entry.name: entry.candidates[-1] for entry in plan.entries}
    assert planning.grown(plan, chosen, resolve) is None
