"""Search, export and loading of models of runs whose data only the sites have (``partition.kind own``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedmq as interface
from fedmq.config.scenario import Data
from fedmq.errors import InputError
from tests.command_line import fedmq
from tests.data_set_folders import photo, write
from tests.own_data_threads import OwnRun

pytestmark = pytest.mark.slow

COLOURS = ("red", "green", "blue", "yellow", "grey", "black")
CITIES = ("berlin", "lyon", "oslo")


def photos(root: Path) -> list[Data]:
    """A folder of photos with captions for each of three cities."""
    for place, city in enumerate(CITIES):
        for number, colour in enumerate(COLOURS):
            photo(root / city / "photos" / f"{colour}.png", 10 * place + number)
            write(root / city / "photos" / f"{colour}.txt", f"a {colour} circle\nsomething {colour} in {city}\n")
    return [Data(name="folder", path=root / city / "photos") for city in CITIES]


def finished(root: Path, sets: list[Data], **more: Any) -> Path:
    """The folder of a run of three silos with these data sets, released by its scenario file."""
    own = OwnRun(root, {"rounds": 1, "protocol": "fedavg", **more}, sets=sets)
    own.start(*own.scenario.silo_names)
    own.coordinate()
    assert set(own.ended.values()) == {""}, own.ended
    return own.folder.root


class Command:
    """The command line, with what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def found(self, *words: object) -> dict[str, Any]:
        """What a command that succeeds prints with ``--json``."""
        code = fedmq(self._monkeypatch, *words, "--json")
        printed = self._capsys.readouterr()
        assert code == 0, printed.err
        return dict(json.loads(printed.out))

    def refused(self, *words: object) -> str:
        """The error of a command."""
        code = fedmq(self._monkeypatch, *words)
        printed = self._capsys.readouterr()
        assert code == 2, printed.out
        return printed.err

    def printed(self, *words: object) -> str:
        """What a command that succeeds prints."""
        assert fedmq(self._monkeypatch, *words) == 0
        return "".join(self._capsys.readouterr())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_a_model_of_sites_photos_is_searched_exported_and_loaded(tmp_path: Path, command: Command) -> None:
    run = finished(tmp_path, photos(tmp_path), backbone={"name": "lite", "bottleneck": 8})
    berlin = tmp_path / "berlin"
    site = {"name": "silo-00", "data": {"name": "folder", "path": "photos"}}
    write(berlin / "silo.yaml", yaml.safe_dump(site))
    shutil.copytree(run / "model", tmp_path / "copy")
    results = [
        command.found("search", place, "a red circle", "--gallery", berlin / "photos")["results"]
        for place in (run, run / "model", tmp_path / "copy")
    ]
    assert len(results[0]) == len(COLOURS)
    assert results[0] == results[1] == results[2]
    own = command.found("search", run, "a red circle", "--gallery", berlin / "silo.yaml")["results"]
    assert [(hit["item"], pytest.approx(hit["score"], abs=1e-5)) for hit in own] == [
        (hit["item"], hit["score"]) for hit in results[0]
    ]
    captions = command.found("search", run, "--image", berlin / "photos/red.png", "--gallery", berlin / "silo.yaml")
    assert captions["among"] == "captions"
    assert command.found("export", run, "--gallery", berlin / "silo.yaml")["captions"] == 2 * len(COLOURS)
    model = interface.load(run)
    assert (
        model.search("a red circle", model.gallery(berlin / "photos"))[0].item
        == berlin / "photos" / results[0][0]["item"]
    )

    needed = "--gallery: found 'nothing', allowed: a folder of images"
    assert needed in command.refused("search", run, "a red circle")
    assert needed in command.refused("export", run)
    assert "no --silo" in command.refused("export", run, "--silo", "silo-00", "--gallery", berlin / "photos")
    for words in (("curves", run), ("tsne", run)):
        assert "a run whose data only the sites have" in command.refused(*words)
    printed = command.printed("report", run)
    assert "no examples in the report: only the sites have data" in printed
    assert "found" not in printed

    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    config["frozen"]["text"] = "0" * 64
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"frozen\.text: found 'lite with its own weights"):
        interface.load(tmp_path / "copy").embed_texts(["a red circle"])
