"""`fedmq data check` and `fedmq data features` on data sets on disk, and on the data of one site."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedmq.cli import data as cli_data
from fedmq.cli.scenarios import resolved_file
from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Backbone, Data
from fedmq.config.site import read_site
from fedmq.data import extract
from fedmq.data.prepare import prepare
from fedmq.errors import DataItemError
from fedmq.federation.agreement import difference, format_of
from fedmq.federation.participant import SiteData
from fedmq.federation.population import build_population
from fedmq.text import Progress
from fedmq.wire.payloads import DataFormat
from tests import data_set_folders
from tests.command_line import completed, printed, refused
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
    own_cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set_folders.coco(tmp_path / "set")
    path = scenario(tmp_path, {"name": "coco", "path": str(tmp_path / "set")})
    facts = json.loads(printed("data", "check", path, "--json"))
    assert facts["splits"] == {"train": 2, "val": 1, "test": 2, "public": 0, "database": 0}
    assert facts["labels"] == {"dog": 2, "person": 2}
    assert facts["without_labels"] == 2
    assert "silos" not in facts
    assert not (tmp_path / "cache" / "features").exists()
    made = json.loads(printed("data", "features", path, "--json"))
    assert (made["n"], made["image_shape"]) == (5, [16])
    facts = json.loads(printed("data", "check", path, "--json"))
    assert [own["samples"] for own in facts["silos"].values()] == [1, 1]
    held = [tuple(own["labels"].values()) for own in facts["silos"].values()]
    assert sorted(held) == [(1, 0), (1, 1)], "one is a dog, one a dog and a person"
    shown = [line.split() for line in printed("data", "check", path).splitlines()]
    assert ["│", "person", "│", str(held[0][1]), "│", str(held[1][1]), "│"] in shown
    assert "training items of each label" in printed("data", "check", path, "--set", "silos.count=1")
    monkeypatch.setattr(cli_data, "FEW_LABELS", 1)
    assert "training items of each label" not in printed("data", "check", path)
    assert made["folder"] in printed("data", "features", path)


def test_steps_sizes_and_divergence_of_the_silos_are_shown(tiny: Path) -> None:
    few = json.loads(printed("data", "check", tiny, "--json", "--set", "training.batch_size=4"))["silos"].values()
    assert [(own["samples"], own["steps"]) for own in few] == [(25, 6)] * 4, "the last batch joins the one before it"
    assert all(0 < own["label_divergence"] < 1 for own in few)
    shown = printed("data", "check", tiny, "--set", "training.batch_size=4")
    apart = [own["label_divergence"] for own in few]
    assert "training items of a silo: 25; optimiser steps of a task: 6;" in shown
    assert f"divergence of labels: {min(apart):.3f} to {max(apart):.3f}, median {np.median(apart):.3f}" in shown
    assert "every task is one optimiser step" not in shown
    assert "every task is one optimiser step" in printed("data", "check", tiny, "--set", "training.batch_size=500")


def test_all_missing_and_unreadable_files_are_named_and_the_exit_code_is_2(own_cache: None, tmp_path: Path) -> None:
    folder = data_set_folders.flickr(tmp_path / "set", splits=["train"] * 30 + ["test"] * 2)
    for row in range(25):
        (folder / "images" / f"{row}.jpg").unlink()
    data_set_folders.truncate(folder / "images" / "26.jpg")
    (folder / "images" / "27.jpg").write_bytes(b"")
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    facts = json.loads(printed("data", "check", path, "--json", code=2))
    assert len(facts["missing"]) == 25
    assert [Path(name.split(": ")[0]).name for name in facts["unreadable"]] == ["26.jpg", "27.jpg"]
    assert facts["usable"] is False
    shown = printed("data", "check", path, code=2)
    assert "25 missing (the first 20; --json has all)" in shown
    assert "26.jpg: " in shown
    assert sum(line.startswith("  ") for line in shown.splitlines()) == 22
    printed("data", "check", path, "--set", "data.missing=skip", code=2)
    for row in (26, 27):
        (folder / "images" / f"{row}.jpg").unlink()
    assert json.loads(printed("data", "check", path, "--set", "data.missing=skip", "--json"))["items"] == 5


def test_file_names_too_long_or_not_encodable_are_reported_without_a_traceback(own_cache: None, tmp_path: Path) -> None:
    folder = data_set_folders.flickr(tmp_path / "set")
    listed = folder / "dataset_flickr8k.json"
    whole = listed.read_text()
    listed.write_text(whole.replace("0.jpg", "a" * 300 + ".jpg"))
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(folder)})
    found = printed("data", "check", path, "--json", code=2)
    assert json.loads(found)["missing"] == ["images/" + "a" * 300 + ".jpg"]
    listed.write_text(whole.replace("0.jpg", "\\ud83d.jpg"))
    error = refused("data", "check", path).splitlines()
    assert len(error) == 1
    assert "dataset_flickr8k.json" in error[0]


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
    monkeypatch.setattr("fedmq.federation.population.make_gpu_repeatable", lambda: None)
    for device in ("cpu", "auto", "cuda:1", "cuda:2"):
        build_population(scenarios.load(path, [f"device={device}"]))
    assert seen == ["cpu", "cuda:0", "cuda:1", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("extracted", [False, True])
def test_settings_that_the_method_refuses_are_reported_before_and_after_extraction(
    own_cache: None, tmp_path: Path, extracted: bool
) -> None:
    data_set_folders.coco(tmp_path / "labelled")
    data_set_folders.flickr(tmp_path / "bare", splits=["train"] * 4 + ["test"] * 2)
    for name, folder, code in (("coco", "labelled", 0), ("flickr8k", "bare", 2)):
        path = scenario(tmp_path, {"name": name, "path": str(tmp_path / folder)})
        if extracted:
            printed("data", "features", path)
        shown = completed("data", "check", path, "--set", "protocol=fedproto")
        assert shown.returncode == code
        told = "protocol.name: found 'fedproto', allowed: a method that needs no labels" in shown.stdout
        assert told == bool(code)
        assert "items" in shown.stdout
        assert not shown.stderr.count("fedmq:")
        shown = completed("data", "check", path, "--set", "partition={kind: dir_class}", "--json")
        assert shown.returncode == code
        assert "partition.kind" in shown.stdout + shown.stderr if code else json.loads(shown.stdout)["usable"]
        assert (tmp_path / "cache" / "features").exists() is extracted


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("partition={kind: dir_clusters, clusters: 50}", "allowed: at most 3, the training samples with captions"),
        ("silos.count=9", "allowed: at most 3"),
        ("protocol=fedproto", "a method that needs no labels"),
    ],
)
def test_a_run_that_its_data_cannot_serve_is_refused_before_features_are_extracted(
    own_cache: None, tmp_path: Path, setting: str, words: str
) -> None:
    path = scenario(tmp_path, {"name": "flickr8k", "path": str(data_set_folders.flickr(tmp_path / "set"))})
    for command in (("scenario", path, "--quiet", "--out", tmp_path / "run"), ("data", "check", path)):
        shown = completed(*command, "--set", setting, "--set", "launcher=inline")
        assert shown.returncode == 2
        assert words in shown.stdout + shown.stderr
    assert not (tmp_path / "cache" / "features").exists()
    assert not (tmp_path / "run").exists()


def test_a_feature_file_that_the_method_refuses_is_reported_next_to_its_counts(own_cache: None, tiny: Path) -> None:
    assert json.loads(printed("data", "check", tiny, "--json"))["problems"] == []
    facts = json.loads(printed("data", "check", tiny, "--set", "protocol=creamfl_public", "--json", code=2))
    assert facts["items"]
    assert facts["silos"]
    assert facts["problems"] == [
        f"{tiny}: --set protocol: protocol.name: found 'creamfl_public', allowed: creamfl, as the data set marks no "
        "public items"
    ]


def test_duplicates_of_training_items_and_a_label_on_every_item_are_reported(
    own_cache: None, tiny: Path, tmp_path: Path
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
    facts = json.loads(printed("data", "check", tiny, "--set", changed, "--json"))
    assert facts["duplicates_of_training_items"] == ["000140", "000141"]
    said = printed("data", "check", tiny, "--set", changed)
    assert "2 duplicates of training items:\n  000140\n  000141\n" in said
    assert "3 items with the image of a training item:\n  000125\n  000140\n  000141\n" in said
    assert "3 images equal that of an earlier item" in said
    assert "every item has the label label-005, so each item is relevant" in said
    said = printed("data", "check", tiny)
    assert "duplicates" not in said and "every item" not in said


def test_vectors_of_crops_are_named_where_they_are_wide_enough_to_tell(
    own_cache: None, tiny: Path, tmp_path: Path
) -> None:
    with np.load(yaml.safe_load(tiny.read_text())["data"]["path"]) as stored:
        arrays = dict(stored)
    drawn = np.random.default_rng(0).normal(size=(150, 256)).astype(np.float32)
    drawn[125], drawn[140], drawn[141] = drawn[7] + drawn[125] / 2, drawn[7] + 2 * drawn[140], drawn[7]
    arrays["keys"] = np.array([f"{row:06d}" for row in range(150)])
    for width, found in ((255, None), (256, ["000125"])):
        np.savez(tmp_path / "crops.npz", **(arrays | {"image": drawn[:, :width]}))
        changed = [f"data.path={tmp_path / 'crops.npz'}", "backbone.head=mlp"]
        command = ["data", "check", tiny, *(word for each in changed for word in ("--set", each)), "--json"]
        facts = json.loads(printed(*command))
        assert (facts.get("crops"), facts["duplicates_by_image"]) == (found, ["000141"])


# ----------------------------------------------------------------------------------------------------------- one site
OWN = "name: own\nrounds: 3\nprotocol: fedavg\nbackbone: {name: lite}\nsilos: {count: 3}\npartition: {kind: own}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a scenario, a site file and twelve photos, of which one is broken and one has no caption."""
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    photos, draw = tmp_path / "photos", np.random.default_rng(0)
    photos.mkdir()
    for n in range(12):
        Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(photos / f"{n}.jpg")
        (photos / f"{n}.txt").write_text(f"photo number {n}\n")
    (photos / "3.jpg").write_bytes(b"no picture")
    (photos / "5.txt").unlink()
    (tmp_path / "own.yaml").write_text(OWN)
    (tmp_path / "silo.yaml").write_text("name: silo-00\ndata: {name: folder, path: photos}\nkeys: keys\nout: run\n")
    return tmp_path


def test_the_bad_files_of_a_site_are_all_listed(site: Path) -> None:
    facts = json.loads(printed("data", "check", "own.yaml", "--site", "silo.yaml", "--json", code=2))
    assert [name.split(":")[0] for name in facts["unreadable"]] == ["3.jpg"]
    assert facts["without_captions"] == ["5.jpg"]
    (site / "photos" / "3.jpg").unlink()
    (site / "photos" / "3.txt").unlink()
    (site / "photos" / "5.txt").write_text("photo number 5\n")
    assert "11 items, 11 captions" in printed("data", "check", "own.yaml", "--site", "silo.yaml")


def test_the_error_of_a_silo_names_the_command_with_both_files(site: Path) -> None:
    run = resolved_file(Path("own.yaml"), manual=True)
    with pytest.raises(
        DataItemError, match=r"5\.jpg.*`fedmq data check own\.yaml --site .*silo\.yaml` lists all problems"
    ):
        SiteData.load(run.scenario, read_site(Path("silo.yaml")), run.id, file=run.source.file)


def test_a_features_file_of_a_site_is_counted(site: Path) -> None:
    draw = np.random.default_rng(0)
    np.savez("site0.npz", image=draw.normal(size=(40, 8)), text=draw.normal(size=(40, 8)))
    (site / "own.yaml").write_text(OWN.replace("lite", "features"))
    (site / "silo.yaml").write_text("name: silo-01\ndata: {name: features, path: site0.npz}\n")
    facts = json.loads(printed("data", "check", "own.yaml", "--site", "silo.yaml", "--json"))
    assert facts["items"] == 40 and list(facts["silos"]) == ["silo-01"]
    assert facts["silos"]["silo-01"]["samples"] == facts["splits"]["train"] > 0


# -------------------------------------------------------------------------------------------------- numbers as labels
numbers = st.lists(st.integers(0, 5), min_size=2, max_size=8)


def stated(folder: Path, name: str, labels: np.ndarray) -> tuple[DataFormat, list[list[str]]]:
    """The format that a site states, and the labels of its items by name."""
    vectors = np.random.default_rng(0).normal(size=(len(labels), 4))
    np.savez(folder / f"{name}.npz", image=vectors, text=vectors + 1, labels=labels)
    data = Data(name="features", path=folder / f"{name}.npz")
    made = prepare(data, Backbone(name="features"), folder / "cache")
    assert made.labels is not None
    held = [[made.label_names[column] for column in np.flatnonzero(row)] for row in made.labels]
    return format_of(made, image=True, text=True), held


@given(numbers, numbers)
@settings(max_examples=40, deadline=None)
def test_sites_with_unnamed_labels_agree_only_if_equal_names_are_equal_numbers(
    one: list[int], other: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, held_first = stated(Path(folder), "one", np.array(one))
        second, held_second = stated(Path(folder), "other", np.array(other))
        text = difference("silo-00", first, "silo-01", second)
        if text is None:
            named = {*zip(one, (label for (label,) in held_first), strict=True)}
            named |= {*zip(other, (label for (label,) in held_second), strict=True)}
            assert len({number for number, _ in named}) == len({label for _, label in named}) == len(named)
        else:
            assert (min(one), max(one)) != (min(other), max(other))
            assert "label columns without names" in text and "give every file label_names" in text
