"""``fedmq init``: a scenario for the user's own data; tests/test_docs_notebooks.py runs one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fedmq.cli import main as cli
from fedmq.config.resolve import load
from fedmq.config.site import read_site
from fedmq.data import catalogue, starter
from fedmq.data.extract import complete
from fedmq.errors import InputError
from tests import data_set_folders
from tests.command_line import printed, refused
from tests.test_data_readers_collections import FORMS

COLOURS = ("red", "green", "blue")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def photos(folder: Path, count: int) -> Path:
    """Photos with a caption each, in a text file beside them."""
    for number in range(count):
        data_set_folders.photo(folder / f"{number:02}.png", number)
        (folder / f"{number:02}.txt").write_text(f"a {COLOURS[number % 3]} wall, number {number}\n")
    return folder


def answered(*words: object, answers: Sequence[object]) -> Result:
    """``fedmq init`` with answers to its questions."""
    text = "".join(f"{answer}\n" for answer in answers)
    return CliRunner().invoke(cli.app, ["init", *map(str, words)], input=text, catch_exceptions=False)


def test_four_answers_give_a_commented_scenario(tmp_path: Path, own_cache: Path) -> None:
    folder, file = photos(tmp_path / "my photos", 41), tmp_path / "Walls 1.yaml"
    done = answered(file, answers=(folder, 3, 0.34, "rcsr"))
    assert done.exit_code == 0
    scenario = load(file)
    assert (scenario.name, scenario.silos.count, scenario.protocol.name) == ("walls-1", 3, "rcsr")
    assert scenario.partition.clusters == 8
    assert scenario.data is not None
    assert (scenario.data.queries, scenario.data.val) == (8, 0)
    assert file.read_text().startswith("# 41 items with 41 captions, 33 pairs of them to train on.")
    assert all(line.startswith("#") or yaml.safe_load(line) for line in file.read_text().splitlines())
    assert f"fedmq scenario '{file}'" in done.stdout
    assert not (own_cache / "features").exists()


def test_a_question_with_a_wrong_answer_is_repeated_and_other_answers_are_kept(tmp_path: Path, own_cache: Path) -> None:
    folder, file = photos(tmp_path / "photos", 12), tmp_path / "mine.yaml"
    # The method that needs labels passes its question, and only the check of the whole scenario refuses it.
    wrong_first = (tmp_path / "nowhere", folder, 9, 2, 1, 0, "fedawg", "fedproto")
    done = answered(file, answers=(*wrong_first, "", "", "fedavg"))
    assert done.exit_code == 0
    for question, count in (("number of silos, 1 to 4", 3), ("federated method [", 3), ("images and captions", 2)):
        assert done.output.count(question) == count
    for words in ("nowhere", "found '9', allowed: 1 to 4", "did you mean fedavg", "labels", "[fedproto]", "[2]"):
        assert words in done.output
    scenario = load(file, ["rounds=2"])
    assert (scenario.silos.count, scenario.training.warmup_rounds) == (2, 1)


def test_what_is_left_out_is_named_and_an_unreadable_image_is_refused(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos", 9)
    (folder / "03.txt").unlink()
    (folder / "04.txt").write_text("\n")
    (folder / "99.txt").write_text("a wall without a photo\n")
    assert starter.count(folder).notes == (
        'for example 00.png: captions "a red wall, number 0"',
        "items left out (2): 03.png (no caption), 04.png (no caption)",
        "ignored, text files without an image next to them (1): 99.txt",
    )
    (folder / "07.png").write_text("no picture")
    with pytest.raises(InputError, match=r"1 of 7 .*: 07\.png"):
        starter.count(folder)
    (folder / "05.txt").write_bytes(b"a wall\xff")
    with pytest.raises(InputError, match=r"05\.txt: line 1: found 'bytes that are not UTF-8', allowed: UTF-8 text"):
        starter.count(folder)


def test_a_list_with_wrong_paths_names_a_missing_file_and_swapped_columns_can_be_seen(tmp_path: Path) -> None:
    rows = "".join(f"{number}.png,thing,a thing number {number}\n" for number in range(4))
    path = data_set_folders.write(tmp_path / "list.csv", f"image,captions,labels\n{rows}")
    with pytest.raises(InputError, match=r"without: 0\.png \(no such file\), .*; e\.g\. .*0\.png does not exist"):
        starter.count(path)
    for number in range(4):
        data_set_folders.photo(tmp_path / f"{number}.png", number)
    assert starter.count(path).example == 'for example 0.png: captions "thing"; labels a thing number 0'


def test_every_form_of_data_is_recognised(tmp_path: Path) -> None:
    for form in FORMS:
        (tmp_path / form).mkdir()
        name, path = FORMS[form](tmp_path / form)
        counted = starter.count(path)
        assert (counted.name, counted.items, counted.captions) == (name, 3, 4), form


def test_lists_and_features_are_recognised(tmp_path: Path, features: Path) -> None:
    counted = starter.count(features)
    assert (counted.name, counted.items, counted.split) == ("features", 150, (100, 30))
    text = starter.scenario_text("x", counted, starter.Plan(4, 0.0, "fedavg"))
    assert "backbone: {name: features}" in text
    data_set_folders.photo(tmp_path / "a.png", 1)
    path = data_set_folders.write(tmp_path / "list.csv", "image,caption\na.png,one\nb.png,two\n,three\n,four\n,five\n")
    counted = starter.count(path)
    assert (counted.name, counted.items, counted.left_out) == ("manifest", 4, ("b.png (no such file)",))
    with pytest.raises(InputError, match=r"the list itself: .*list\.csv"):
        starter.count(tmp_path)


def test_a_scenario_that_cannot_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    given = {"--data": photos(tmp_path / "photos", 12), "--silos": 2, "--missing": 0.0, "--method": "fedavg"}
    file = tmp_path / "mine.yaml"
    for option, value, words in (
        ("--data", "nowhere", "--data: found '.*nowhere', allowed: an existing file or folder"),
        ("--silos", 9, "--silos: found 9, allowed: 1 to 4: each silo needs 2 of the 12 pairs"),
        ("--missing", 1, "--missing: found 1.0"),
        ("--method", "fedawg", "protocol.*fedawg.*fedavg"),
        ("--method", "fedproto", "a method that needs no labels"),
    ):
        options = (part for pair in {**given, option: value}.items() for part in pair)
        error = refused("init", file, *options, "--quiet")
        assert re.search(words, error) and len(error.splitlines()) == 1
        assert not file.exists()


def test_a_file_is_replaced_only_on_demand(tmp_path: Path, features: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    options = ("--data", features, "--silos", 2, "--missing", 0, "--method", "fedavg", "--quiet")
    assert "a file that exists" in refused("init", file, *options)
    assert file.read_text() == "mine"
    printed("init", file, *options, "--force")
    assert np.isclose(load(file).training.learning_rate, 1e-3)


@pytest.mark.parametrize("captions", [True, False])
def test_a_site_file_has_the_data_of_a_site_also_without_captions(captions: bool, tmp_path: Path) -> None:
    folder = photos(tmp_path / "site" / "photos", 5)
    for text in sorted(folder.glob("*.txt"))[0 if not captions else 4 :]:
        text.unlink()
    file = tmp_path / "site" / "silo.yaml"
    done = answered("--site", file, answers=(folder, "berlin", "silo-01", "host:5555", "tcp://host:5555"))
    assert done.exit_code == 0
    assert "--name: found 'berlin'" in done.output and "--connect: found 'host:5555'" in done.output
    assert f"fedmq keys new silo-01 --keys {tmp_path}/site/keys" in done.stdout
    assert f"fedmq preflight OWN.yaml --site {file}" in done.stdout
    assert 'path: "photos"' in file.read_text()
    site = read_site(file)
    assert (site.name, site.connect, site.keys) == ("silo-01", "tcp://host:5555", tmp_path / "site" / "keys")
    assert site.data is not None and (site.data.path, site.data.missing) == (folder, "keep")
    raw = complete(catalogue.find("folder").read(site.data), site.data, "sentences")
    present = raw.present("sentences")
    assert present is not None and present.sum(axis=0).tolist() == [5, 4 if captions else 0]


def test_options_of_the_other_kind_of_file_are_refused(tmp_path: Path) -> None:
    site = tmp_path / "silo.yaml"
    for options in (("--site", site, "--silos", 3), ("mine.yaml", "--site", site), ("mine.yaml", "--name", "silo-00")):
        assert "--site" in refused("init", *options)
    assert not site.exists()
