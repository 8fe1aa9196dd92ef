"""`fedmq data check` and `fedmq data features` on data sets on disk."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from fedmq.cli import data as cli_data
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Backbone, Data
from fedmq.data import extract
from fedmq.data.catalogue import SETS
from fedmq.federation.population import build_population
from fedmq.federation.preflight.data import DataFacts
from fedmq.text import Progress
from tests import data_set_folders
from tests.command_line import fedmq
from tests.test_data_extract import tiny_clip

pytest.importorskip("PIL")


def scenario(folder: Path, data: dict[str, Any], objective: str = "djsrh") -> Path:
    """A scenario of two silos; unlike InfoNCE, DJSRH trains on the single item that a tiny set leaves each of them."""
    backbone = tiny_clip(folder)
    content = {
        "name": "disk", "rounds": 2, "protocol": "fedavg", "data": data, "backbone": {"name": backbone.name},
        "silos": {"count": 2}, "partition": {"kind": "iid"}, "training": {"warmup_rounds": 0},
        "objective": objective,
    }  # fmt: skip
    return data_set_folders.write(folder / "disk.yaml", yaml.safe_dump(content))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_a_data_set_is_counted_and_after_extraction_partitioned(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data_set_folders.coco(tmp_path / "set")
    path = scenario(tmp_path, {"name": "coco", "path": str(tmp_path / "set")})
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["splits"] == {"train": 2, "val": 1, "test": 2, "public": 0, "database": 0}
    assert facts["labels"] == {"dog": 2, "person": 2}
    assert facts["without_labels"] == 2
    assert "silos" not in facts
    assert not (tmp_path / "cache" / "features").exists()
    assert fedmq(monkeypatch, "data", "features", path, "--json") == 0
    made = json.loads(capfd.readouterr().out)
    assert (made["n"], made["image_shape"]) == (5, [16])
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert [own["samples"] for own in facts["silos"].values()] == [1, 1]
    held = [tuple(own["labels"].values()) for own in facts["silos"].values()]
    assert sorted(held) == [(1, 0), (1, 1)], "one is a dog, one a dog and a person"
    assert fedmq(monkeypatch, "data", "check", path) == 0
    shown = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["│", "person", "│", str(held[0][1]), "│", str(held[1][1]), "│"] in shown
    assert fedmq(monkeypatch, "data", "check", path, "--set", "silos.count=1") == 0
    assert "training items of each label" in capfd.readouterr().out
    monkeypatch.setattr(cli_data, "FEW_LABELS", 1)
    assert fedmq(monkeypatch, "data", "check", path) == 0
    assert "training items of each label" not in capfd.readouterr().out
    assert fedmq(monkeypatch, "data", "features", path) == 0
    assert made["folder"] in capfd.readouterr().out


def test_all_missing_and_unreadable_files_are_named_and_the_exit_code_is_2(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = data_set_folders.flickr(tmp_path / "set", splits=["train"] * 30 + ["test"] * 2)
    for row in range(25):
        (folder / "images" / f"{row}.jpg").unlink()
    data_set_folders.truncate(folder / "images" / "26.jpg")
    (folder / "images" / "27.jpg").write_bytes(b"")
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 2
    facts = json.loads(capfd.readouterr().out)
    assert len(facts["missing"]) == 25
    assert [Path(name.split(": ")[0]).name for name in facts["unreadable"]] == ["26.jpg", "27.jpg"]
    assert facts["usable"] is False
    assert fedmq(monkeypatch, "data", "check", path) == 2
    shown = capfd.readouterr().out
    assert "25 missing (the first 20; --json has all)" in shown
    assert "26.jpg: " in shown
    assert sum(line.startswith("  ") for line in shown.splitlines()) == 22
    assert fedmq(monkeypatch, "data", "check", path, "--set", "data.missing=skip") == 2
    for row in (26, 27):
        (folder / "images" / f"{row}.jpg").unlink()
    capfd.readouterr()
    assert fedmq(monkeypatch, "data", "check", path, "--set", "data.missing=skip", "--json") == 0
    assert json.loads(capfd.readouterr().out)["items"] == 5


@pytest.mark.slow
def test_flickr8ks_release_is_counted_without_unlisted_photos(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = data_set_folders.flickr8k_release(tmp_path / "set")
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["items"], facts["captions"], facts["missing"], facts["problems"]) == (6, 30, [], [])
    assert facts["splits"] == {"train": 3, "val": 1, "test": 2, "public": 0, "database": 0}
    assert fedmq(monkeypatch, "data", "features", path, "--json") == 0
    assert json.loads(capfd.readouterr().out)["n"] == 6
    # A listed photo that does not exist, and a photo without a caption.
    (folder / "Flicker8k_Dataset" / "101_00000001.jpg").unlink()
    with (folder / "Flickr8k_text" / "Flickr_8k.trainImages.txt").open("a") as file:
        file.write("106_00000006.jpg\n107.jpg\n")
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 2
    facts = json.loads(capfd.readouterr().out)
    assert [Path(name).name for name in facts["missing"]] == ["101_00000001.jpg", "107.jpg"]
    assert facts["without_captions"] == ["107.jpg"]


def test_labels_are_counted_over_the_remaining_items(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data_set_folders.coco(tmp_path / "set")
    (tmp_path / "set" / "val2014" / "COCO_1.jpg").unlink()
    path = scenario(tmp_path, {"name": "coco", "path": str(tmp_path / "set"), "missing": "skip"})
    assert fedmq(monkeypatch, "data", "check", path, "--set", "silos.count=1", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["items"], facts["labels"], facts["without_labels"]) == (4, {"dog": 1, "person": 1}, 2)


def test_item_counts_that_differ_from_the_papers_are_reported_but_not_an_error(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data_set_folders.coco(tmp_path / "set")
    path = scenario(tmp_path, {"name": "coco", "path": str(tmp_path / "set")})
    line = "papers on this data set use 123,287 items and 80 labels: some of its files may be missing"
    assert fedmq(monkeypatch, "data", "check", path) == 0
    assert line in capfd.readouterr().out.splitlines()
    assert fedmq(monkeypatch, "data", "check", path, "--set", "data.labelled=true", "--set", "silos.count=1") == 0
    assert "papers" not in capfd.readouterr().out
    for items, labels, told in ((5, 2, {}), (5, 3, {"items": 5, "labels": 3}), (0, 0, {}), (6, 0, {"items": 6})):
        monkeypatch.setitem(SETS, "coco", replace(SETS["coco"], items=items, labels=labels))
        assert fedmq(monkeypatch, "data", "check", path, "--json") == 0
        assert json.loads(capfd.readouterr().out)["published"] == told


def test_file_names_too_long_or_not_encodable_are_reported_without_a_traceback(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = data_set_folders.flickr(tmp_path / "set")
    listed = folder / "dataset_flickr8k.json"
    whole = listed.read_text()
    listed.write_text(whole.replace("0.jpg", "a" * 300 + ".jpg"))
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    assert fedmq(monkeypatch, "data", "check", path, "--json") == 2
    assert json.loads(capfd.readouterr().out)["missing"] == ["images/" + "a" * 300 + ".jpg"]
    listed.write_text(whole.replace("0.jpg", "\\ud83d.jpg"))
    assert fedmq(monkeypatch, "data", "check", path) == 2
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "whole characters of Unicode" in error[0]


def test_a_folder_whose_name_is_not_utf_8_is_checked_and_extracted(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    data_set_folders.msrvtt(tmp_path / "set", frames=2)
    strange = tmp_path / "set" / os.fsdecode(b"vid\xe9os")
    (tmp_path / "set" / "frames").rename(strange)
    path = scenario(tmp_path, {"name": "msrvtt", "path": str(tmp_path / "set"), "frames": 2})
    for arguments in (["check", path], ["features", path], ["check", path, "--json"]):
        assert fedmq(monkeypatch, "data", *arguments, "--set", "silos.count=1") == 0
    (strange / "video1" / "000.jpg").write_bytes(b"")
    capfd.readouterr()
    assert fedmq(monkeypatch, "data", "check", path) == 2
    assert "\n  vid\\udce9os/video1/000.jpg: " in capfd.readouterr().out


def test_a_missing_wikipedia_text_is_listed_and_may_be_skipped(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (data_set_folders.wikipedia(tmp_path / "set") / "texts" / "txt3-7.xml").unlink()
    path = scenario(tmp_path, {"name": "wikipedia", "path": str(tmp_path / "set")})
    for setting, code, items in (("refuse", 2, 5), ("skip", 0, 4)):
        assert (
            fedmq(
                monkeypatch,
                "data",
                "check",
                path,
                "--set",
                f"data.missing={setting}",
                "--set",
                "silos.count=1",
                "--json",
            )
            == code
        )
        facts = json.loads(capfd.readouterr().out)
        assert (facts["items"], facts["without_captions"]) == (items, ["txt3-7/img3"])


def test_the_device_example_in_the_documentation_is_a_valid_scenario(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fedmq(monkeypatch, "data", "features", "--help") == 0
    named = re.search(r"scenarios/[\w/]+\.yaml(?=\s+--device cuda)", capfd.readouterr().out)
    assert named is not None
    chosen = scenarios.load(Path(__file__).parent.parent / named[0]).backbone
    assert chosen.name not in ("lite", "features")
    assert chosen.adapter_site == "feature"


@pytest.mark.slow
def test_a_run_extracts_features_on_its_device_where_available(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set_folders.flickr(tmp_path / "set")
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(tmp_path / "set")})
    seen, plan = [], extract.plan

    def note(
        data: Data, backbone: Backbone, cache: Path, seed: int, device: str = "cpu", progress: Progress | None = None
    ) -> extract.ExtractionPlan:
        del progress
        seen.append(device)
        return plan(data, backbone, cache, seed)

    monkeypatch.setattr(extract, "plan", note)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("fedmq.federation.population.repeatable", lambda: None)
    for device in ("cpu", "auto", "cuda:1", "cuda:2"):
        build_population(scenarios.load(path, [f"device={device}"]))
    assert seen == ["cpu", "cuda:0", "cuda:1", "cpu"]


def test_a_data_set_too_small_for_its_papers_split_names_the_sizes_to_set(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = scenario(tmp_path, {"name": "mirflickr", "path": str(data_set_folders.mirflickr(tmp_path / "set"))})
    assert fedmq(monkeypatch, "data", "check", path) == 2
    assert "data.queries, data.val, data.train: found 'queries 2000" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("extracted", [False, True])
def test_mismatched_feature_widths_are_reported_before_and_after_extraction(
    own_cache: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    extracted: bool,
) -> None:
    """The width of a bag of words is the size of its vocabulary."""
    data = {"name": "mirflickr", "path": str(data_set_folders.mirflickr(tmp_path / "set")), "queries": 2, "train": 4}
    path = scenario(tmp_path, data, objective="info_nce")
    if extracted:
        assert fedmq(monkeypatch, "data", "features", path) == 0
    capfd.readouterr()
    assert fedmq(monkeypatch, "data", "check", path) == 2
    assert "backbone.head: found 'residual with image dimension 16 and text dimension 3'" in capfd.readouterr().out
    assert fedmq(monkeypatch, "data", "check", path, "--set", "backbone.head=mlp") == 0
    as_captions = ("--set", "data.text=sentences", "--set", "backbone.dim=16")
    assert fedmq(monkeypatch, "data", "check", path, *as_captions) == 0


@pytest.mark.slow
@pytest.mark.parametrize("extracted", [False, True])
def test_settings_that_the_method_refuses_are_reported_before_and_after_extraction(
    own_cache: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    extracted: bool,
) -> None:
    data_set_folders.coco(tmp_path / "labelled")
    data_set_folders.flickr(tmp_path / "bare", splits=["train"] * 4 + ["test"] * 2)
    for name, folder, code in (("coco", "labelled", 0), ("flickr8k", "bare", 2)):
        path = scenario(tmp_path, {"name": name, "path": str(tmp_path / folder)})
        if extracted:
            assert fedmq(monkeypatch, "data", "features", path) == 0
        capfd.readouterr()
        assert fedmq(monkeypatch, "data", "check", path, "--set", "protocol=fedproto") == code
        shown = capfd.readouterr()
        assert ("protocol.name: found 'fedproto', allowed: a method that needs no labels" in shown.out) == bool(code)
        assert "items" in shown.out
        assert not shown.err.count("fedmq:")
        assert fedmq(monkeypatch, "data", "check", path, "--set", "partition={kind: dir_class}", "--json") == code
        shown = capfd.readouterr()
        assert "partition.kind" in shown.out + shown.err if code else json.loads(shown.out)["usable"]
        assert (tmp_path / "cache" / "features").exists() is extracted


def test_text_clusters_and_devices_are_not_checked_before_the_run(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set_folders.coco(tmp_path / "set")
    path = scenario(tmp_path, {"name": "coco", "path": str(tmp_path / "set")})
    clusters = "partition={kind: dir_clusters, clusters: 2}"
    assert fedmq(monkeypatch, "data", "check", path, "--set", clusters, "--set", "device=cuda:7") == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("partition={kind: dir_clusters, clusters: 50}", "allowed: at most 3, the training samples with captions"),
        ("silos.count=9", "allowed: at most 3"),
        ("protocol=fedproto", "a method that needs no labels"),
    ],
)
def test_a_run_that_its_data_cannot_serve_is_refused_before_features_are_extracted(
    own_cache: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    setting: str,
    words: str,
) -> None:
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(data_set_folders.flickr(tmp_path / "set"))})
    for command in (("scenario", path, "--quiet", "--out", tmp_path / "run"), ("data", "check", path)):
        assert fedmq(monkeypatch, *command, "--set", setting, "--set", "launcher=inline") == 2
        shown = capfd.readouterr()
        assert words in shown.out + shown.err
    assert not (tmp_path / "cache" / "features").exists()
    assert not (tmp_path / "run").exists()


def test_a_feature_file_that_the_method_refuses_is_reported_next_to_its_counts(
    own_cache: None, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fedmq(monkeypatch, "data", "check", tiny, "--json") == 0
    assert json.loads(capfd.readouterr().out)["problems"] == []
    assert fedmq(monkeypatch, "data", "check", tiny, "--set", "protocol=creamfl_public", "--json") == 2
    facts = json.loads(capfd.readouterr().out)
    assert facts["items"]
    assert facts["silos"]
    assert facts["problems"] == [
        "protocol.name: found 'creamfl_public', allowed: creamfl, as the data set marks no public items"
    ]


def test_duplicates_of_training_items_and_a_label_on_every_item_are_reported(
    own_cache: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with np.load(yaml.safe_load(tiny.read_text())["data"]["path"]) as stored:
        arrays = dict(stored)
    arrays["labels"] = np.stack([arrays["labels"] == label for label in range(5)] + [np.ones(150, bool)], 1)
    for row in (
        125,
        140,
        141,
    ):  # of the test split: one with only a training item's image, two that duplicate the whole item
        arrays["image"][row] = arrays["image"][7]
        if row > 125:
            arrays["text"][row] = arrays["text"][7]
    arrays["keys"] = np.array([f"{row:06d}" for row in range(150)])  # or rows with one image would be one item
    np.savez(tmp_path / "duplicates.npz", **arrays)
    changed = f"data.path={tmp_path / 'duplicates.npz'}"
    assert fedmq(monkeypatch, "data", "check", tiny, "--set", changed, "--json") == 0
    assert json.loads(capfd.readouterr().out)["duplicates_of_training_items"] == ["000140", "000141"]
    assert fedmq(monkeypatch, "data", "check", tiny, "--set", changed) == 0
    said = capfd.readouterr().out
    assert "2 duplicates of training items:\n  000140\n  000141\n" in said
    assert "3 items with the image of a training item:\n  000125\n  000140\n  000141\n" in said
    assert "3 image vectors equal that of an earlier item" in said
    assert "every item has the label label-005, so each item is relevant" in said
    assert fedmq(monkeypatch, "data", "check", tiny) == 0
    said = capfd.readouterr().out
    assert "duplicates" not in said and "every item" not in said


def test_a_coarse_label_on_every_item_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"coarse:clothes": 4, "fine:shirt": 3, "fine:shoe": 1}
    facts = DataFacts("features", items=4, captions=4, splits={}, labels=labels, without_labels=0)
    cli_data.show_data(facts, Console())
    assert "every item" not in capsys.readouterr().out


def test_a_broken_annotation_file_is_bad_input(
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = data_set_folders.flickr(tmp_path / "set")
    (folder / "dataset_flickr8k.json").write_text("{")
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    for command in ("check", "features"):
        assert fedmq(monkeypatch, "data", command, path) == 2
        error = capfd.readouterr().err.strip()
        assert error.startswith("fedmq: ")
        assert len(error.splitlines()) == 1


def test_every_data_set_is_listed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert fedmq(monkeypatch, "data", "list") == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in ("openmoji", "features", "coco", "nuswide", "manifest"))
