"""Runs without some of their silos: what each silo was worth, and the model after one is forgotten."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Scenario
from fedmq.experiments import contribution
from fedmq.federation.population import build_population
from fedmq.runs.release import FORGOTTEN
from fedmq.runs.results import read_summary
from fedmq.runs.run_records import SiloSummary
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.keys import init_keys
from tests import in_process_run
from tests.command_line import completed, printed, refused
from tests.in_process_jobs import run_jobs_here
from tests.own_data_sites import COMMON, HOSPITALS, arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.threaded_run import resolved

GONE = "silo-01"
#: Draws of every kind: who lacks a modality, device classes, speeds, who is selected.
DRAWS = ("missing_modality={rate: 0.5}", "cost.classes={slow: {slowdown: 4, share: 0.5}}", "aggregation.mode=buffered")


def finished(tiny: Path, folder: Path, *settings: str) -> RunFolder:
    """The folder of a run in this process."""
    scenario = resolved(tiny, *settings)
    folder.mkdir(parents=True)
    RunFolder(folder).scenario.write_text(scenario.dump())
    assert in_process_run.run(scenario, folder).summary is not None
    return RunFolder(folder)


def digest(folder: Path) -> str:
    return read_summary(RunFolder(folder)).model_digest


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of four silos, which no test changes."""
    return finished(tiny, tmp_path_factory.mktemp("contribution") / "run")


@pytest.mark.parametrize("partition", ["{kind: iid}", "{kind: dir_clusters, clusters: 5}", "{kind: shards_classes}"])
def test_the_silos_that_are_left_keep_names_data_and_what_they_lack(tiny: Path, partition: str) -> None:
    settings = (f"partition={partition}", *DRAWS)
    everyone, left = (build_population(resolved(tiny, *settings, *more)) for more in ((), (f"silos.without=[{GONE}]",)))
    kept = [silo for silo in everyone.silos if silo.name != GONE]
    assert [silo.name for silo in left.silos] == [silo.name for silo in kept]
    for new, old in zip(left.silos, kept, strict=True):
        assert (new.image, new.text) == (old.image, old.text)
        for parts in ("train", "heldout", "galleries"):
            np.testing.assert_array_equal(getattr(left, parts)[new.index], getattr(everyone, parts)[old.index])
    np.testing.assert_array_equal(left.evaluated, everyone.evaluated)


def test_commands_interrupted_before_their_first_run_say_how_to_continue(
    whole: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(contribution, "require_silos", interrupted)
    for words in (("contribution", whole.root), ("forget", whole.root, "--silo", GONE)):
        assert completed(*words).returncode == 1
        assert "interrupted; repeat the command to continue" in capfd.readouterr().err


def test_forgetting_gives_the_model_of_a_run_in_which_the_silo_never_was(
    tiny: Path, whole: RunFolder, tmp_path: Path
) -> None:
    init_keys(tmp_path / "keys", ["coordinator"])
    target = tmp_path / "without"
    command = ("forget", whole.root, "--silo", GONE, "--out", target, "--keys", tmp_path / "keys", "--quiet")
    printed(*command)
    never = finished(tiny, tmp_path / "never", f"silos.without=[{GONE}]")
    before, after = read_summary(whole), read_summary(RunFolder(target))
    assert after.model_digest == digest(never.root) != before.model_digest
    assert GONE not in after.per_silo
    assert after.per_silo.keys() == before.per_silo.keys() - {GONE}
    stated = json.loads((target / "model" / FORGOTTEN).read_text())
    assert stated["silos"] == {
        GONE: {"samples": before.per_silo[GONE].samples, "merges": before.per_silo[GONE].participations}
    }
    assert [stated[which]["model_digest"] for which in ("before", "after")] == [before.model_digest, after.model_digest]
    assert "as coordinator signed them" in printed("verify", target, "--keys", tmp_path / "keys")
    (target / "model" / FORGOTTEN).write_text(json.dumps(stated | {"silos": {}}))
    assert f"{FORGOTTEN}: changed since it was signed" in printed("verify", target, code=3)
    trained = (target / "metrics.jsonl").read_bytes()
    printed(*command)
    assert (target / "metrics.jsonl").read_bytes() == trained, "the second command does not train again"
    assert "another run" in refused("forget", whole.root, "--silo", "silo-00", "--out", target)


def test_an_interrupted_forget_continues_and_nothing_of_the_silo_is_in_the_model(
    tiny: Path, features: Path, tmp_path: Path
) -> None:
    settings = ("partition={kind: iid}", *DRAWS)
    run = finished(tiny, tmp_path / "run", *settings)
    target = tmp_path / "run-without-silo-01"
    without = resolved(tiny, *settings, f"silos.without=[{GONE}]", "launcher=inline")
    target.mkdir()
    RunFolder(target).scenario.write_text(without.dump())
    metrics = RunFolder(target).metrics
    assert in_process_run.run(without, target, stop_wanted=metrics.exists).summary is None
    printed("forget", run.root, "--silo", GONE, "--quiet")
    everyone = build_population(resolved(tiny, *settings))
    arrays = dict(np.load(features))
    rows = everyone.train[everyone.facts(GONE).index]
    arrays["image"][rows], arrays["text"][rows] = -arrays["image"][rows], arrays["text"][rows][:, :, ::-1]
    np.savez(tmp_path / "others.npz", **arrays)
    other = finished(
        tiny, tmp_path / "other", *settings, f"silos.without=[{GONE}]", f"data.path={tmp_path / 'others.npz'}"
    )
    assert digest(target) == digest(other.root)


@pytest.mark.slow
def test_sites_with_their_own_data_train_the_same_model_without_one_of_them(tmp_path: Path) -> None:
    """As a simulation with the same items in one file."""
    silos = {"silos": {"count": 3, "without": [GONE]}}
    held = {name: of_hospital(arrays(), HOSPITALS[at]) for name, at in (("silo-00", 0), ("silo-02", 2))}
    run = OwnRun(tmp_path, silos, data={**held})
    run.start(*held)
    assert run.coordinate().summary is not None
    found: dict[str, Any] = {**arrays()}
    np.savez(tmp_path / "all.npz", **found)
    data = {"name": "features", "path": str(tmp_path / "all.npz")}
    raw = {"name": "column", **COMMON, **silos, "data": data, "partition": {"kind": "column", "column": "hospital"}}
    assert in_process_run.run(Scenario.model_validate(raw), tmp_path / "together").summary is not None
    assert digest(run.folder.root) == digest(tmp_path / "together")


def test_forgetting_refuses_by_name_what_cannot_be_exact(whole: RunFolder, tiny: Path, tmp_path: Path) -> None:
    said = refused("forget", whole.root, "--silo", "silo-09")
    assert "--silo: found 'silo-09', allowed: a silo of the run: silo-00, silo-01" in said
    for setting, why in (
        ("clock=wall", "clock: found 'wall'"),
        ("silos.without=[silo-00, silo-01, silo-03]", "a run with one silo"),
    ):
        folder = tmp_path / setting[:5]
        folder.mkdir()
        RunFolder(folder).scenario.write_text(resolved(tiny, setting, "participation=1.0").dump())
        assert why in refused("forget", folder, "--silo", "silo-02")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("silos.without=[silo-09]", "silos.without names silo-09, silos are silo-00 to silo-03"),
        ("silos.without=[silo-00, silo-01, silo-02, silo-03]", "silos.without names all silos"),
        ("silos={count: 4, without: [silo-00]}", None),
    ],
)
def test_silos_that_take_no_part_are_named_and_some_are_left(tiny: Path, setting: str, message: str | None) -> None:
    done = completed("scenario", tiny, "--set", setting, "--set", "participation.minimum=4", "--check")
    assert (message or "must be at most the number of silos that take part (3)") in done.stderr


def test_shapley_values_are_those_of_the_glove_game_and_sum_to_the_gain_of_all() -> None:
    """Two left gloves, a and b, and a right one, c: over all orders the values are 1/6, 1/6 and 2/3."""
    silo = SiloSummary(modalities=["image"], samples=1, participations=1, tasks=1, heldout=0)
    orders = list(itertools.permutations("abc"))
    groups = contribution.groups_of("abc", orders)
    assert set(groups) == {frozenset(group) for group in ("a", "b", "c", "ab", "ac", "bc")}
    values = {group: float("c" in group and len(group) > 1) for group in (*groups, frozenset(), frozenset("abc"))}
    found = contribution.worths(dict.fromkeys("abc", silo), orders, values)
    assert [each.contribution for each in found] == [0, 0, 1], "a left glove alone is not missed"
    assert [each.shapley.mean for each in found if each.shapley] == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    half = 2.5706 * np.std([0, 0, 0, 1, 0, 0], ddof=1) / np.sqrt(6)  # the t-quantile of five degrees of freedom
    assert found[0].shapley is not None
    assert (found[0].shapley.low, found[0].shapley.high) == pytest.approx((1 / 6 - half, 1 / 6 + half), rel=1e-4)


@pytest.mark.slow
def test_each_silo_is_left_out_once_and_shared_groups_are_run_once(
    tiny: Path, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = run_jobs_here(monkeypatch)
    command = ("contribution", whole.root, "--out", tmp_path / "out", "--json", "--jobs", "1", "--quiet")
    found = json.loads(printed(*command))
    assert len(started) == 4
    never = finished(tiny, tmp_path / "never", f"silos.without=[{GONE}]")
    row = next(each for each in found["silos"] if each["silo"] == GONE)
    assert row["without"] == read_summary(never).metrics["mean_r1"]
    assert row["contribution"] == found["all"] - row["without"]
    more = json.loads(printed(*command, "--shapley", "2"))
    orders = contribution.orders_of(resolved(tiny), 2)
    needed = contribution.groups_of(resolved(tiny).silo_names, orders)
    assert len(started) <= len(needed), "the runs of the first command are not repeated"
    gained = sum(each["shapley"] for each in more["silos"])
    assert gained == pytest.approx(more["all"] - more["untrained"], abs=1e-9)
    with (tmp_path / "out" / "table.csv").open() as file:
        assert [line["silo"] for line in csv.DictReader(file)] == list(resolved(tiny).silo_names)
    assert "Shapley value of each silo" in (tmp_path / "out" / "plots.html").read_text()
    assert f"contribution: {more['all']:.4f} minus that" in (tmp_path / "out" / "table.md").read_text()
