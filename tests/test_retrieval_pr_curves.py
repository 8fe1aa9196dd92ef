"""Precision and recall of released models: the output files of ``fedmq curves``."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedmq.errors import InputError
from fedmq.evaluation import label_metrics
from fedmq.retrieval import plots
from fedmq.retrieval.released_model import open_release
from tests import threaded_run
from tests.command_line import fedmq
from tests.in_process_jobs import run_jobs_here

HASHING = (
    "protocol=fedavg",
    "objective={base: dcmh, bits: 12, hidden: 16}",
    "evaluation.gallery=database",
    "evaluation.within=true",
)


@pytest.fixture
def hashing(tiny: Path, tmp_path: Path) -> Path:
    """A finished run of a hash network."""
    threaded_run.run(threaded_run.resolved(tiny, *HASHING), tmp_path / "run")
    return tmp_path / "run"


def test_a_models_curves_agree_with_the_metrics_of_its_run(hashing: Path) -> None:
    found = plots.measured(open_release(hashing), (1, 5, 10**6))
    summary = json.loads((hashing / "summary.json").read_text())["metrics"]
    assert set(found) == {"i2t", "t2i", "i2i", "t2t"}
    for way, each in found.items():
        assert each.map == pytest.approx(summary[f"map_{way}"], abs=1e-12)
        assert set(each.top_n) == {1, 5}  # the ranked list is shorter
        assert each.pr_rank is not None and each.pr_radius is not None
        assert (each.pr_rank.precision[4], each.pr_rank.recall[4]) == pytest.approx(each.top_n[5])
        assert each.pr_rank.recall[-1] == pytest.approx(1)
        assert len(each.pr_radius.recall) == 13
        assert np.all(np.diff(each.pr_radius.recall) >= 0)


@pytest.mark.slow
def test_the_command_writes_one_table_and_one_page_for_all_runs(
    hashing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(hashing, tmp_path / "there" / "run")
    assert fedmq(monkeypatch, "curves", hashing, other, "--top", "1,5", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert set(said["runs"]) == {f"run ({hashing})", f"run ({other})"}
    rows = list(csv.DictReader((hashing / "curves" / "curves.csv").open()))
    assert {row["curve"] for row in rows} == {"rank", "radius", "top"}
    assert {row["run"] for row in rows} == set(said["runs"])
    assert all(0 <= float(row["recall"]) <= 1 for row in rows)
    page = (hashing / "curves" / "curves.html").read_text()
    assert "precision against recall, by Hamming radius" in page
    assert "<script src" not in page  # the page loads nothing from the network


def test_items_without_labels_have_no_relevant_items(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    np.savez(
        tmp_path / "plain.npz", **{name: generator.normal(size=(60, 8)).astype("f4") for name in ("image", "text")}
    )
    path = tmp_path / "plain.yaml"
    path.write_text(
        f"{{name: plain, rounds: 1, protocol: fedavg, data: {{name: features, path: {tmp_path}/plain.npz}}, "
        "backbone: {name: features, bottleneck: 4}, silos: {count: 2}, partition: {kind: iid}, "
        "training: {warmup_rounds: 0}}"
    )
    threaded_run.run(threaded_run.resolved(path), tmp_path / "run")
    with pytest.raises(InputError, match="labels"):
        plots.measured(open_release(tmp_path / "run"), (1,))


def test_invalid_cutoffs_are_refused() -> None:
    for text in ("0", "1,x", "", "-3", "9" * 5000):
        with pytest.raises(InputError, match="--top"):
            plots.parse_cutoffs(text)


def comparison(folder: Path, *runs: tuple[str, Path]) -> Path:
    """A comparison's folder with the files from which its runs are read."""
    folder.mkdir()
    lines = [f"{name},{seed},0123,{path}" for seed, (name, path) in enumerate(runs)]
    (folder / "runs.csv").write_text("\n".join(["name,seed,model_digest,folder", *lines, ""]))
    return folder


@pytest.mark.slow
def test_each_row_of_a_comparison_is_the_mean_over_its_seeds(tiny: Path, hashing: Path, tmp_path: Path) -> None:
    threaded_run.run(threaded_run.resolved(tiny, *HASHING, "seed=1"), tmp_path / "other")
    own = [plots.measured(open_release(path), (1, 5)) for path in (hashing, tmp_path / "other")]
    assert own[0]["i2t"].map != own[1]["i2t"].map
    found = plots.mean("both", own)
    for way, each in found.ways.items():
        first, second = own[0][way], own[1][way]
        assert each.map == pytest.approx((first.map + second.map) / 2)
        assert each.top_n[5] == pytest.approx(np.mean([first.top_n[5], second.top_n[5]], axis=0))
        assert each.pr_rank is not None and first.pr_rank is not None and second.pr_rank is not None
        np.testing.assert_allclose(each.pr_rank.recall, (first.pr_rank.recall + second.pr_rank.recall) / 2)
        assert each.pr_radius is not None and first.pr_radius is not None and second.pr_radius is not None
        pairs = np.stack([first.pr_radius.precision, second.pr_radius.precision])
        there = ~np.isnan(pairs)  # a run that retrieves nothing within a radius has no precision at it
        expected = np.where(there, pairs, 0).sum(0) / np.maximum(there.sum(0), 1)
        np.testing.assert_allclose(each.pr_radius.precision, np.where(there.any(0), expected, np.nan))
    folder = comparison(tmp_path / "compared", ("both", hashing), ("both", tmp_path / "other"), ("run", hashing))
    assert plots.named([folder, hashing, folder]) == [
        plots.Runs("both", (hashing, tmp_path / "other"), folder),
        plots.Runs(f"run ({folder})", (hashing,), folder),
        plots.Runs(f"run ({hashing})", (hashing,)),
    ]
    (tmp_path / "latest").symlink_to(hashing)
    assert [each.name for each in plots.named([tmp_path / "latest"], "silo-01")] == ["latest silo-01"]


@pytest.mark.slow
def test_the_command_reads_the_folder_of_a_comparison(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said_by(*words: str) -> str:
        assert fedmq(monkeypatch, *words) == 0
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)
    settings = [word for setting in HASHING[1:] for word in ("--set", setting)]
    rows = "set={name: a row, protocol: fedavg},{name: alone, protocol: local}"
    said_by("compare", str(tiny), *settings, "--vary", rows, "--zero-shot", "--seeds", "0,1", "--out", "compared")
    listed = list(csv.DictReader(Path("compared/runs.csv").read_text().splitlines()))
    assert {row["name"] for row in listed} == {"a row", "alone", "zero-shot"}
    said = json.loads(said_by("curves", "compared", "--json"))["runs"]
    # Neither methods without a trained shared model nor the untrained row: its folder holds the trained model.
    assert said.keys() == {"a row"}
    folders = [Path(row["folder"]) for row in listed if row["name"] == "a row"]
    own = [plots.measured(open_release(folder), (1,)) for folder in folders]
    assert said["a row"]["map_i2t"] == pytest.approx(np.mean([each["i2t"].map for each in own]))
    assert {row["run"] for row in csv.DictReader(Path("compared/curves/curves.csv").read_text().splitlines())} == {
        "a row"
    }
    assert json.loads(said_by("tsne", "compared", "--json"))["points"].keys() == {"a row"}
    said = json.loads(said_by("curves", "compared", "--silo", "silo-00", "--json"))["runs"]
    assert said.keys() == {"alone silo-00"}
    assert fedmq(monkeypatch, "curves", "compared", "--silo", "silo-99") == 2
    assert "fedmq: --silo: found 'silo-99'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mean_over_galleries_of_different_sizes_is_refused(tiny: Path, hashing: Path, tmp_path: Path) -> None:
    threaded_run.run(threaded_run.resolved(tiny, *HASHING, "objective.bits=8"), tmp_path / "short")
    own = [plots.measured(open_release(path), (1,)) for path in (hashing, tmp_path / "short")]
    with pytest.raises(InputError, match=r"runs of both: .*different lengths"):
        plots.mean("both", own)
    shorter = {
        way: replace(
            each, pr_rank=None if each.pr_rank is None else label_metrics.Curve(*(part[:-1] for part in each.pr_rank))
        )
        for way, each in own[0].items()
    }
    with pytest.raises(InputError, match=r"runs of both: .*different lengths"):
        plots.mean("both", [own[0], shorter])


def test_an_unreadable_comparison_is_refused_by_name(tmp_path: Path) -> None:
    for text, said in (
        ("name,seed,model_digest,folder\n", "no run"),
        ("name,model_digest,folder\nzero-shot,,here\n", "no run"),
        ("seed,model_digest,folder\n0,0123,here\n", "without name"),
        ("name,folder\nrow,here\n", "without name"),
        ("name,model_digest,folder\nrow,0123,\n", "without name"),
        ("name,model_digest,folder\nrow,0123,not/there\n", "not/there"),
        (f"name,model_digest,folder\nrow,0123,{'x' * 5000}\n", "xxx"),
        ("\udcff", "decode"),
    ):
        (tmp_path / "runs.csv").write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match=said) as refused:
            plots.named([tmp_path])
        assert str(refused.value).startswith(str(tmp_path / "runs.csv"))
