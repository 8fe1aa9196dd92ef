"""fedmq compare and fedmq sweep: refused input, written files and printed output."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.config import resolve as scenarios
from fedmq.experiments import plots, process_pool, runner
from fedmq.storage.run_folder import RunFolder
from tests.command_line import completed, printed, refused
from tests.comparisons import comparison_file, finish
from tests.in_process_jobs import run_jobs_here
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE, wait_for
from tools.make_results import Kept

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent


#: Options of a comparison, and what the error has.
REFUSED = (
    ("compare --set protocol.colour=red", "colour"),
    ("compare --vary protocol=fedavg,fedsgd", "fedsgd"),
    ("compare --baseline moon", "--baseline"),
    ("compare --metric mean_r1,foo_r1", "--metric: found 'foo_r1', allowed: a metric, e.g. "),
    ("compare --target foo=0.5", "--target: found 'foo', allowed: a metric, e.g. "),
    ("compare --vary silos.count=4,0", "--vary silos.count: found 0"),
    ("compare --select training.learning_rate=1,-1", "--select training.learning_rate: found -1"),
    ("compare --select rounds=1,2 --select-rounds 1", "--select rounds: found"),
    ("compare --select-seeds 1", "--select-seeds: found"),
    (
        "compare --select training.learning_rate=1,2 --select-seeds 1,1",
        "--select-seeds: found '1,1', allowed: different",
    ),
    ("compare --extensions 1", "--extensions: found"),
    ("compare --select training.learning_rate=1,1.0", "candidates that differ"),
    ("compare --select device=cpu,auto", "it trains the same model as device"),
    ("compare --select wire.padding=true,false", "it trains the same model as"),
    ("compare --metric bytes.sideways", "--metric: found"),
    ("compare --metric fairness.wurst_r1", "fairness with one of worst_r1"),
    ("compare --target mean_r1=50", "a value from 0 to 1"),
    ("compare --target bytes.up=5", "a metric of evaluations"),
    ("compare --vary partition.clusters=5,101 --seeds 0 --quiet", "partition.clusters: found 101"),
    ("sweep", "--vary"),
)


@pytest.mark.slow
def test_bad_input_prints_one_line_and_writes_nothing(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for words, expected in REFUSED:
        command, *options = words.split()
        error = refused(command, tiny, *options, "--out", out)
        assert len(error.splitlines()) == 1, (words, error)
        assert expected in error, words
        assert not out.exists()


@pytest.mark.slow
def test_a_refused_comparison_leaves_existing_folders_in_place(tiny: Path, tmp_path: Path) -> None:
    out, runs = tmp_path / "out", tmp_path / "runs"
    out.mkdir()
    runs.mkdir()
    nowhere = ["--set", "data.path=nowhere.npz", "--seeds", "0", "--quiet"]
    assert "nowhere.npz" in refused("compare", tiny, *nowhere, "--out", out, "--runs", runs)
    assert "nowhere.npz" in refused("scenario", tiny, *nowhere[:2], "--out", out)
    assert (list(out.iterdir()), list(runs.iterdir())) == ([], [])


def test_a_comparison_does_not_write_into_the_folder_of_a_run(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(tiny.read_text())
    assert "the folder of a run" in refused("compare", tiny, "--seeds", "0", "--quiet", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.yaml"]


@pytest.fixture
def simulated_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Both commands with simulated runs: a higher learning rate scores better, and seed 9 fails."""
    return simulated(monkeypatch)


def simulated(
    monkeypatch: pytest.MonkeyPatch, diverging: Collection[float] = (), failing: Collection[float] = ()
) -> list[str]:
    """The names of the runs as they are started; training diverges, or fails, at some learning rates."""
    started: list[str] = []

    def simulate(todo: list[process_pool.Job], *_: object) -> process_pool.Ended:
        errors = {}
        for each in todo:
            started.append(each.name)
            folder, scenario = RunFolder(each.metrics.parent), scenarios.load(Path(each.words[1]))
            rate = scenario.training.learning_rate
            if scenario.seed != 9 and rate not in (*diverging, *failing):
                finish(folder, rate)
                continue
            errors[each.name] = "no luck"
            if rate in diverging:
                folder.root.mkdir(parents=True)
                now = {"round": 3, "rounds": 4, "phase": "collecting", "written": "2026-01-02T03:04:05+00:00"}
                counts = {"up": 0, "down": 0, "now": 0.0, "elapsed": 0.0, "refused": {}, "last_refused": ""}
                facts = {"run": "r", "loss": None, "metrics": {}, "silos": {}, "diverged": True, **now, **counts}
                folder.status.write_text(json.dumps(facts))
        return process_pool.Ended(errors, stopped=False)

    monkeypatch.setattr(process_pool, "run_all", simulate)
    monkeypatch.setattr(runner, "digest_once", lambda *_: lambda _: "data")
    return started


def test_a_comparison_with_a_failed_run_writes_the_other_results_and_exits_with_1(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    started = simulated_runs
    arguments = ["compare", tiny, "--vary", "training.learning_rate=0.1,0.2", "--metric", "mean_r1", "--json"]
    done = completed(*arguments, "--quiet", "--seeds", "0,9", "--out", tmp_path)
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["errors"] == {f"training.learning_rate={rate}, seed 9": "no luck" for rate in (0.1, 0.2)}
    assert [(row["mean_r1.n"], row["mean_r1.mean"], row["mean_r1.std"]) for row in result["rows"]] == [
        (1, 0.1, None),
        (1, 0.2, None),
    ]
    kept = Kept.model_validate(result)  # what docs/results/data keeps
    assert kept.command.startswith("fedmq compare ") and "--json" not in kept.command
    assert [run["seed"] for run in result["runs"]] == [0, 0] and len(kept.table.body) == 2
    assert "failed training.learning_rate=0.1, seed 9: no luck" in done.stderr
    for name in ("table.csv", "runs.csv", "table.tex", "table.md", "plots.html"):
        assert (tmp_path / name).stat().st_size > 0
    printed(*arguments, "--quiet", "--seeds", "0,1", "--out", tmp_path)
    assert started[4:] == ["training.learning_rate=0.1, seed 1", "training.learning_rate=0.2, seed 1"]


@pytest.mark.parametrize(
    ("arguments", "diverging", "failing", "code"),
    [
        (["--select", "training.learning_rate=0.1,0.2,0.3"], {0.3, 0.2}, set(), 0),
        (["--vary", "training.learning_rate=0.1,0.2"], {0.2}, set(), 0),
        (["--vary", "training.learning_rate=0.1,0.2,0.3"], {0.2}, {0.3}, 1),
        (["--select", "training.learning_rate=0.1,0.2"], {0.1, 0.2}, set(), 1),
        (["--vary", "training.learning_rate=0.1,0.2"], {0.1, 0.2}, set(), 1),
    ],
)
def test_diverged_runs_are_reported_and_a_comparison_fails_only_by_other_errors_or_without_any_result(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    diverging: set[float],
    failing: set[float],
    code: int,
) -> None:
    started = simulated(monkeypatch, diverging, failing)
    command = ["compare", tiny, *arguments, "--metric", "mean_r1", "--seeds", "0", "--quiet"]
    done = completed(*command, "--json", "--out", tmp_path)
    assert done.returncode == code, done.stderr
    result, trials = json.loads(done.stdout), len(started)
    assert len(result["diverged"]) == len(diverging) and set(result["diverged"].values()) == {"diverged after round 3"}
    assert len(result["errors"]) == len(failing)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{len(diverging)} of {trials} runs diverged, neither chosen nor averaged")
    assert "diverged, neither chosen nor averaged: " in (tmp_path / "table.md").read_text()
    averaged = [row["mean_r1.mean"] for row in result["rows"] if row["mean_r1.n"]]
    assert averaged == ([0.1] if diverging != {0.1, 0.2} else [])
    del started[:]
    printed(*command, "--out", tmp_path, code=code)
    assert len(started) == len(failing)  # a run that diverged would diverge again


def test_a_column_that_no_run_has_gives_a_warning_and_the_table_is_written(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    arguments = ["compare", tiny, "--metric", "mean_r1,personal.mean_r1", "--seeds", "0", "--quiet"]
    done = completed(*arguments, "--out", tmp_path)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert re.match(r"warning column 'personal\.mean_r1' holds only dashes", line)
    assert "| tiny | 0.0030 | - |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "plots.html").stat().st_size > 0


def test_the_tables_are_written_and_printed_before_the_plots_are_drawn(
    simulated_runs: list[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise KeyError("plots")

    monkeypatch.setattr(plots, "page", fail)
    arguments = ["compare", tiny, "--metric", "mean_r1", "--seeds", "0", "--quiet", "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert isinstance(done.exception, KeyError)
    assert "mean_r1" in done.stdout
    assert "| tiny | 0.0030 |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(("option", "kind"), [("--out", "file"), ("--runs", "proc")])
def test_a_folder_that_cannot_be_written_is_refused_before_any_run_starts(
    simulated_runs: list[str], tiny: Path, tmp_path: Path, option: str, kind: str
) -> None:
    started = simulated_runs
    file = tmp_path / "file"
    file.write_text("somebody's own")
    folder = {"file": file, "proc": Path("/proc/x")}[kind]
    folders = {"--out": tmp_path / "out", option: folder}
    told = refused("compare", tiny, "--quiet", *(each for pair in folders.items() for each in pair))
    assert re.fullmatch(f"fedmq: {folder}: .*a folder that can be written\n", told)
    assert started == []


def test_a_sweep_can_select_among_the_varied_values_and_runs_only_the_best(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    started = simulated_runs
    arguments = ["sweep", tiny, "--vary", "training.learning_rate=0.1,0.3,0.2", "--select", "val"]
    options = ["--select-seeds", "4,5", "--select-rounds", "3", "--seeds", "0,1", "--metric", "mean_r1", "--out"]
    shown = printed(*arguments, "--extensions", "0", *options, tmp_path)
    assert started == [
        *(f"tiny, seed {seed} (training.learning_rate={rate})" for rate in (0.1, 0.3, 0.2) for seed in (4, 5)),
        "tiny, seed 0",
        "tiny, seed 1",
    ]
    assert "learning_rate=0.3" in shown
    assert "mean over seeds 4, 5, 3 rounds" in (tmp_path / "table.md").read_text()
    lengths = [scenarios.load(path).rounds for path in sorted(tmp_path.glob("runs/*seed[045]-*.yaml"))]
    assert sorted(lengths) == [*6 * [3], 4]
    assert "tiny,tiny,training.learning_rate=0.3,3," in (tmp_path / "table.csv").read_text()


def test_a_chosen_edge_extends_the_grid_as_often_as_allowed_and_the_table_says_so(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    """The simulated runs are better the larger the rate is."""
    command = ["compare", tiny, "--select", "training.learning_rate=0.1,0.2", "--metric", "mean_r1", "--seeds", "0"]
    tables = {}
    for times, rates in (("2", (0.1, 0.2, 0.4, 0.8)), ("0", (0.1, 0.2))):
        del simulated_runs[:]
        printed(*command, "--extensions", times, "--out", tmp_path / times)
        trials = [f"tiny, seed 0 (training.learning_rate={rate})" for rate in rates]
        assert simulated_runs == [*trials, "tiny, seed 0"]
        tables[times] = (tmp_path / times / "table.md").read_text()
        assert f"chosen at the edge of the values tried: tiny learning\\_rate={rates[-1]}" in tables[times].replace(
            "learning_rate", "learning\\_rate"
        )
    added = "trials added beyond or between the given values: tiny learning_rate=0.4; tiny learning_rate=0.8"
    assert added in tables["2"] and "trials added" not in tables["0"]
    assert ",4,2," in (tmp_path / "2" / "table.csv").read_text()


def test_a_choice_on_the_evaluated_split_or_seeds_is_reported_before_and_with_the_results(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    options = ["--select", "training.learning_rate=0.1,0.3", "--extensions", "0", "--metric", "mean_r1"]
    for number, (more, warning) in enumerate((
        ("--set evaluation.split=val --seeds 0 --select-seeds 1", "evaluation.split is val, on which --select chooses"),
        ("--seeds 0,1,2 --select-seeds 1,2,3", "in --seeds and in --select-seeds: 1, 2;"),
        ("--seeds 0,1 --select-seeds 2", None),
    )):  # fmt: skip
        out = tmp_path / str(number)
        done = completed("compare", tiny, *options, *more.split(), "--out", out)
        assert done.returncode == 0, done.stderr
        for text in (done.stderr, (out / "table.md").read_text(), (out / "table.tex").read_text()):
            assert warning in text if warning else "evaluation.split" not in text and "select-seeds:" not in text


def test_silos_that_lack_the_same_modality_with_every_seed_are_reported(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    note, mask = "the same silos lack a modality with every seed", "missing_modality={rate: 0.5, seed: 42}"
    for name, seeds, seed, noted in (("a", "0,1", "42", True), ("b", "0,1", "null", False), ("c", "0", "42", False)):
        options = ["--set", mask.replace("42", seed), "--seeds", seeds, "--metric", "mean_r1"]
        printed("compare", tiny, *options, "--out", tmp_path / name)
        assert (note in (tmp_path / name / "table.md").read_text()) is noted


def test_the_results_of_a_comparison_file_record_its_command(
    simulated_runs: list[str], tiny: Path, tmp_path: Path
) -> None:
    file, out = comparison_file(tiny.parent, "compare: ../tiny.yaml\nseeds: 0\nmetric: mean_r1\n"), tmp_path / "out"
    shown = printed("compare", file, "--quiet", "--out", out)
    assert simulated_runs == ["tiny, seed 0"]
    assert (out / "table.tex").read_text().splitlines()[0] == f"% fedmq compare {file} --quiet --out {out}"
    assert "tables/table.yaml" in "".join(shown.split())


def test_every_scenario_of_the_paper_is_in_its_readme() -> None:
    folder = ROOT / "scenarios" / "rcsr"
    named = set(re.findall(r"\| `(\w+\.yaml)`", (folder / "README.md").read_text()))
    assert named == {path.name for path in folder.glob("*.yaml")}


@pytest.mark.slow
def test_a_stopped_sweep_continues_and_gives_the_models_of_single_runs(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = tmp_path / "short.yaml"
    short.write_text(yaml.safe_dump({**yaml.safe_load(tiny.read_text()), "name": "short", "rounds": 12}))
    out = tmp_path / "out"
    options = ["--vary", "protocol=fedavg,rcsr", "--seeds", "0", "--jobs", "1", "--out"]
    command = ["sweep", str(short), *options, str(out)]
    process = subprocess.Popen([sys.executable, "-m", "fedmq", *command], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(out.glob("runs/*/metrics.jsonl")), PATIENCE)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "stopped; continue with fedmq sweep" in error
    assert not (out / "table.csv").exists()
    run_jobs_here(monkeypatch)
    result = json.loads(printed(*command, "--json"))
    assert [row["name"] for row in result["rows"]] == ["fedavg", "rcsr"]
    assert not result["errors"]
    runs = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    alone = run(resolved(short, "protocol=fedavg"), tmp_path / "one")
    assert alone.summary.model_digest == runs[0]["model_digest"]
    assert {path.name for path in out.iterdir()} == {
        "runs", "runs.csv", "table.csv", "table.md", "table.tex", "plots.html",
    }  # fmt: skip
