"""``fedmq init``: a scenario for the user's own data; tests/test_docs_notebooks.py runs one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedmq.cli import main as cli
from fedmq.config.loader import load
from fedmq.errors import InputError
from tests import data_set_folders
from tests.test_data_readers_photo_collections import FORMS

COLOURS = ("red", "green", "blue")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fedmq(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedmq", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def photos(folder: Path, count: int) -> Path:
    """Photos with a caption each, in a text file beside them."""
    for number in range(count):
        data_set_folders.photo(folder / f"{number:02}.png", number)
        (folder / f"{number:02}.txt").write_text(f"a {COLOURS[number % 3]} wall, number {number}\n")
    return folder


def test_four_answers_give_a_commented_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    folder = photos(tmp_path / "my photos", 41)
    answers = iter([str(folder), "3", "0.34", "rcsr"])
    asked = []

    def answer(question: str, **_: object) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr("typer.prompt", lambda question, **about: about["type"](answer(question)))
    file = tmp_path / "Walls 1.yaml"
    assert fedmq(monkeypatch, "init", file) == 0
    assert len(asked) == 4
    scenario = load(file)
    assert (scenario.name, scenario.silos.count, scenario.protocol.name) == ("walls-1", 3, "rcsr")
    assert scenario.partition.clusters == 8
    assert scenario.data is not None
    assert (scenario.data.queries, scenario.data.val) == (8, 0)
    assert file.read_text().startswith("# 41 items with 41 captions, 33 pairs of them to train on.")
    assert all(line.startswith("#") or yaml.safe_load(line) for line in file.read_text().splitlines())
    assert f"fedmq scenario '{file}'" in capfd.readouterr().out
    assert not (own_cache / "features").exists()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_is_recognised(form: str, tmp_path: Path) -> None:
    from fedmq.data import starter

    folder = tmp_path / "set"
    folder.mkdir()
    name, path = FORMS[form](folder)
    counted = starter.count(path)
    assert (counted.name, counted.items, counted.captions) == (name, 3, 4)


def test_lists_and_features_are_recognised(tmp_path: Path, features: Path) -> None:
    from fedmq.data import starter

    counted = starter.count(features)
    assert (counted.name, counted.items, counted.split) == ("features", 150, (100, 30))
    text = starter.scenario_text("x", counted, starter.Plan(4, 0.0, "fedavg"))
    assert "backbone: {name: features}" in text
    data_set_folders.photo(tmp_path / "a.png", 1)
    path = data_set_folders.write(tmp_path / "list.csv", "image,caption\na.png,one\nb.png,two\n,three\n,four\n,five\n")
    counted = starter.count(path)
    assert (counted.name, counted.items, counted.incomplete) == ("manifest", 4, 1)
    with pytest.raises(InputError, match=r"the list itself: .*list\.csv"):
        starter.count(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "nowhere"), "--data: found '.*nowhere', allowed: an existing file or folder"),
        (("--silos", 9), "--silos: found 9, allowed: 1 to 4: each silo needs 2 of the 12 pairs"),
        (("--missing", 1), "--missing: found 1.0"),
        (("--method", "fedawg"), "protocol.*fedawg.*fedavg"),
        (("--method", "fedproto"), "a method that needs no labels"),
    ],
)
def test_what_cannot_run_is_refused_and_nothing_is_written(
    options: tuple[object, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import re

    given = {"--data": photos(tmp_path / "photos", 12), "--silos": 2, "--missing": 0.0, "--method": "fedavg"}
    given |= dict([options])  # type: ignore[list-item]
    file = tmp_path / "mine.yaml"
    assert fedmq(monkeypatch, "init", file, *(part for pair in given.items() for part in pair), "--quiet") == 2
    error = capfd.readouterr().err
    assert re.search(words, error)
    assert len(error.splitlines()) == 1
    assert not file.exists()


def test_a_file_is_replaced_only_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], features: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    options = ("--data", features, "--silos", 2, "--missing", 0, "--method", "fedavg", "--quiet")
    assert fedmq(monkeypatch, "init", file, *options) == 2
    assert "a file that exists" in capfd.readouterr().err
    assert file.read_text() == "mine"
    assert fedmq(monkeypatch, "init", file, *options, "--force") == 0
    assert np.isclose(load(file).training.learning_rate, 1e-3)
