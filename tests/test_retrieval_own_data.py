"""Search, export and loading of models of runs whose data only the sites have (``partition.kind own``)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedmq as interface
from fedmq.config.scenario import Data
from fedmq.config.site import read_site
from fedmq.data.prepare import prepare
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.evaluation.heldout import HeldOut
from fedmq.federation.participant import SiteData
from fedmq.launch.released_runs import open_run_model
from fedmq.retrieval.released_model import open_release
from fedmq.runs.results import read_summary
from tests.command_line import fedmq
from tests.data_set_folders import matconvnet, mirflickr, photo, write
from tests.own_data_sites import HOSPITALS, arrays, of_hospital
from tests.own_data_threads import OwnRun
from tests.test_data_extract import tiny_clip

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


def backbone_of(kind: str, folder: Path) -> dict[str, Any]:
    """A backbone with random or tiny weights."""
    if kind == "timm":
        pytest.importorskip("timm")
        return {"name": "timm:resnet10t", "head": "mlp"}
    if kind == "matconvnet":
        return {"name": "matconvnet", "pretrained": str(matconvnet(folder / "f.mat")), "head": "mlp"}
    return tiny_clip(folder, **({"adapter_site": "blocks"} if kind == "blocks" else {}), bottleneck=4).model_dump()


@pytest.mark.parametrize("kind", ["blocks", "matconvnet", "timm"])
def test_a_model_of_sites_photos_accepts_its_own_encoders_only(kind: str, tmp_path: Path, command: Command) -> None:
    run = finished(tmp_path, photos(tmp_path), backbone=backbone_of(kind, tmp_path))
    images = tmp_path / "berlin" / "photos"
    found = command.found("search", run, "a red circle", "--gallery", images)["results"]
    assert found == command.found("search", run / "model", "a red circle", "--gallery", images)["results"]
    path = run / "model" / "config.json"
    config = json.loads(path.read_text())
    assert set(config["frozen"]) == {"image", "text", *(["blocks"] if kind == "blocks" else [])}
    for key in config["frozen"]:
        path.write_text(json.dumps({**config, "frozen": {**config["frozen"], key: "0" * 64}}))
        with pytest.raises(InputError, match=rf"frozen\.{key}: found"):
            model = interface.load(run)
            _ = model.embed_images([images / "red.png"]) if key == "image" else model.embed_texts(["a circle"])


def test_a_gallery_of_bags_of_words_is_read_in_the_agreed_order(tmp_path: Path, command: Command) -> None:
    sets = []
    for index, city in enumerate(CITIES):
        folder = mirflickr(tmp_path / city)
        write(folder / "mirflickr/doc/common_tags.txt", ("sky 8\ndog 6\nsea 3\n", "dog 6\nsky 3\n", "sea 1\n")[index])
        sets.append(Data(name="mirflickr", path=folder, queries=2, train=2 if index == 2 else 3))
    backbone = {"name": "matconvnet", "pretrained": str(matconvnet(tmp_path / "f.mat")), "end_to_end": True}
    objective = {"base": "dcmh", "bits": 256, "hidden": 16}
    run = finished(tmp_path, sets, backbone=backbone, objective=objective)
    site = write(tmp_path / "lyon.yaml", yaml.safe_dump({"data": {**sets[1].model_dump(mode="json"), "path": "lyon"}}))
    made = command.found("export", run, "--gallery", site)
    release = open_release(run)
    prepared = prepare(sets[1], release.scenario.backbone)
    assert prepared.vocabulary == ("dog", "sky")
    rows = np.array(prepared.text)
    agreed = np.stack([rows[:, 0], 0 * rows[:, 0], rows[:, 1]], axis=1)  # dog, sea, sky
    outputs = release.files.alone().encoders.caption(torch.from_numpy(agreed))
    codes = np.load(Path(made["folder"]) / "text.npy")
    assert (codes == hamming.pack(outputs)).all()
    assert len(np.unique(codes)) > 1
    key = prepared.keys[0]
    assert command.found("search", run, "--item", key, "--side", "text", "--gallery", site)["among"] == "images"
    assert "--item KEY" in command.refused("search", run, "dog", "--gallery", site)
    write(tmp_path / "lyon/mirflickr/doc/common_tags.txt", "dog 6\nrare 3\n")
    assert "the gallery has the word of the vocabulary 'rare'" in command.refused("export", run, "--gallery", site)


def test_a_run_on_features_is_searched_in_a_features_file(tmp_path: Path, command: Command) -> None:
    own = OwnRun(tmp_path, {"rounds": 1, "protocol": "fedavg"})
    own.start(*own.scenario.silo_names)
    own.coordinate()
    run, held = own.folder.root, of_hospital(arrays(), HOSPITALS[0])
    path = tmp_path / "gallery.npz"
    np.savez(path, **held)
    site = write(tmp_path / "silo.yaml", "data: {name: features, path: gallery.npz}\n")
    raw = {"name": "g", "protocol": "fedavg", "backbone": {"name": "features"}}
    scenario = write(tmp_path / "g.yaml", yaml.safe_dump({**raw, "data": {"name": "features", "path": str(path)}}))
    found = [
        command.found("search", run, "--item", str(held["keys"][0]), "--gallery", file)["results"]
        for file in (path, site, scenario)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 10
    np.savez(tmp_path / "images.npz", image=held["image"])
    assert command.found("export", run, "--gallery", tmp_path / "images.npz")["captions"] == 0
    np.savez(tmp_path / "wide.npz", image=np.pad(held["image"], ((0, 0), (0, 1))))
    assert "the gallery has image features of width 13, the run has 12" in command.refused(
        "export", run, "--gallery", tmp_path / "wide.npz"
    )
    assert "--item KEY" in command.refused("search", run, "a red circle", "--gallery", path)
    assert "allowed: a features file (.npz" in command.refused("export", run, "--gallery", tmp_path)


PERSONAL = {
    "fedper": {"name": "fedper"},
    "rcsr": {"name": "rcsr", "personal": "router", "personal_onset": 0, "personal_rate": 1.0, "warmup": 1},
}


@pytest.mark.parametrize("method", PERSONAL)
def test_a_personal_model_is_searched_and_exported_at_its_site(method: str, tmp_path: Path, command: Command) -> None:
    own = OwnRun(tmp_path, {"rounds": 2, "protocol": PERSONAL[method]})
    own.start(*own.scenario.silo_names)
    own.coordinate()
    assert set(own.ended.values()) == {""}, own.ended
    run = own.folder.root
    # The coordinator's folder without any silo's state, and a site with its own.
    shutil.move(run / "checkpoints" / "silos", tmp_path / "kept")
    data = own.site("silo-00").data
    assert data is not None
    site = {"name": "silo-00", "data": {"name": "features", "path": str(data.path)}, "out": "here"}
    write(tmp_path / "silo.yaml", yaml.safe_dump(site))
    refused = command.refused("search", run, "--item", "item-0", "--site", tmp_path / "silo.yaml")
    state = Path("here", own.run.id, "checkpoints", "silos", "silo-00")
    assert str(state) in refused and "no such file" in refused
    shutil.copytree(tmp_path / "kept" / "silo-00", tmp_path / state)

    keys = [key for key, city in zip(arrays()["keys"], arrays()["hospital"], strict=True) if city == HOSPITALS[0]]
    words = ("search", run, "--item", keys[0], "--site", tmp_path / "silo.yaml")
    found = command.found(*words)["results"]
    assert {hit["item"] for hit in found} <= set(keys)
    meta = command.found("export", run, "--site", tmp_path / "silo.yaml")
    assert meta["silo"] == "silo-00" and meta["items"] == len(keys)
    if method == "rcsr":  # which also has a useful shared model
        shared = command.found(*words[:-2], "--gallery", tmp_path / "silo.yaml")["results"]
        assert [hit["score"] for hit in shared] != [hit["score"] for hit in found]

    release = open_run_model(run, None, None, site=tmp_path / "silo.yaml")
    assert release.own is not None
    model, here = release.own.retriever, read_site(tmp_path / "silo.yaml")
    population = SiteData.load(release.scenario, here, own.run.id).alone("silo-00")
    measured = HeldOut.load(release.scenario, population).measured(model.encoders, binary=False, names=("silo-00",))
    reported = read_summary(release.run).personal_per_silo["silo-00"]
    assert dict(measured.per_silo["silo-00"]) == pytest.approx(dict(reported))

    plotted = command.found("curves", run, "--site", tmp_path / "silo.yaml", "--out", tmp_path / "curves")["runs"]
    assert plotted[f"{run.name} silo-00"]["map_i2t"] == pytest.approx(reported["map_i2t"])
    points = command.found("tsne", run, "--site", tmp_path / "silo.yaml", "--out", tmp_path / "tsne")["points"]
    assert points == {f"{run.name} silo-00": 2 * len(population.evaluated)}
    opened = interface.load(run, site=tmp_path / "silo.yaml")
    assert opened.silo == "silo-00" and "personal model of silo-00" in repr(opened)
    with pytest.raises(InputError, match="precomputed features"):
        opened.embed_texts(["a red circle"])

    # Another site's data, another silo's name, and the commands that need the data of all sites.
    lyon = own.site("silo-01").data
    assert lyon is not None
    write(tmp_path / "other.yaml", yaml.safe_dump(site | {"data": {"name": "features", "path": str(lyon.path)}}))
    assert "the data as they were in the run: silo-00 stated" in command.refused(*words[:-1], tmp_path / "other.yaml")
    assert "the name of the site's silo" in command.refused(*words, "--silo", "silo-02")
    assert "at the site, which has its data and state" in command.refused("curves", run, "--silo", "silo-00")
    assert "one RUN" in command.refused("tsne", run, run / "other", "--site", tmp_path / "silo.yaml")
    assert "no --site" in command.refused("search", run / "model", "--item", "x", "--site", tmp_path / "silo.yaml")
