"""``fedmq.load``: released models embed new photos and texts without their training data."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import fedmq
from fedmq.errors import InputError
from fedmq.launch.released_runs import open_run_model
from fedmq.retrieval import gallery as galleries
from fedmq.retrieval import search as search_module
from fedmq.retrieval.released_model import open_model, open_release
from tests.command_line import printed, refused
from tests.threaded_run import resolved, run

RNG = np.random.default_rng(3)
PHOTOS = 24
COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (20, 40, 200)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photos with a manifest: coloured noise."""
    folder = tmp_path_factory.mktemp("photos")
    lines = []
    for index in range(PHOTOS):
        colour = list(COLOURS)[index % 3]
        pixels = np.clip(np.array(COLOURS[colour]) + RNG.normal(0, 30, (40, 48, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02}.png")
        split = "test" if index % 4 == 3 else "train"
        captions = [f"a {colour} wall number {index}"]
        lines.append(json.dumps({"image": f"{index:02}.png", "captions": captions, "split": split}))
    (folder / "items.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run over the photos."""
    root = tmp_path_factory.mktemp("run")
    scenario = {
        "name": "walls",
        "rounds": 1,
        "protocol": "fedavg",
        "data": {"name": "manifest", "path": str(photos / "items.jsonl")},
        "silos": {"count": 2},
        "partition": {"kind": "iid"},
        "backbone": {"name": "lite", "bottleneck": 8},
    }
    (root / "walls.yaml").write_text(yaml.safe_dump(scenario))
    run(resolved(root / "walls.yaml"), root / "run")
    return root / "run"


@pytest.fixture(scope="module")
def alone(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model's folder, without its run."""
    return Path(shutil.copytree(finished / "model", tmp_path_factory.mktemp("alone") / "model"))


@pytest.mark.slow
def test_a_model_without_its_run_embeds_as_the_run_itself(finished: Path, alone: Path, photos: Path) -> None:
    exported = galleries.export(open_release(finished), None)
    model = fedmq.load(alone)
    names = [f"{index:02}.png" for index in range(PHOTOS)]
    found = model.embed_images([photos / name for name in names])
    expected = dict(zip(exported.items.keys, exported.array("image"), strict=True))
    assert np.abs(found - np.stack([expected[name] for name in names])).max() < 1e-6
    captions = [exported.items[row].captions[0] for row in range(PHOTOS)]
    assert np.abs(model.embed_texts(captions) - exported.array("text")).max() < 1e-6


@pytest.mark.slow
def test_a_personal_model_embeds_as_its_own_gallery(finished: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "scenario.yaml", tmp_path / "walls.yaml")
    folder = tmp_path / "run"
    run(resolved(tmp_path / "walls.yaml", "protocol=fedper"), folder)
    exported = galleries.export(open_run_model(folder, None, "silo-01"))
    expected = dict(zip(exported.items.keys, exported.array("image"), strict=True))
    model = fedmq.open_run(folder).model(silo="silo-01")
    assert model.silo == "silo-01"
    found = model.embed_images([photos / f"{index:02}.png" for index in range(PHOTOS)])
    assert np.abs(found - np.stack([expected[f"{index:02}.png"] for index in range(PHOTOS)])).max() < 1e-6
    other = fedmq.load(folder, silo="silo-00").embed_images([photos / "00.png"])
    assert np.abs(other - found[:1]).max() > 1e-4
    for arguments, words in (
        ({}, "which trains the shared model in part or not at all"),
        ({"silo": "silo-07"}, "silo-00, silo-01"),
        ({"silo": "silo-00", "weights": "w.pt"}, "no weights"),
    ):
        with pytest.raises(InputError, match=words):
            fedmq.load(folder, **arguments)
    with pytest.raises(InputError, match="a run folder as path"):
        fedmq.load(folder / "model", silo="silo-00")


@pytest.mark.slow
def test_a_model_without_data_and_cache_embeds_photos_and_finds_them(
    alone: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))
    model = fedmq.load(alone)
    gallery = model.gallery(photos)
    found = [model.search(item, gallery, top=1)[0].item.name for item in gallery.items[:3]]
    assert (found, gallery.vectors.shape) == (["00.png", "01.png", "02.png"], (PHOTOS, 512))


@pytest.mark.slow
def test_paths_pillow_images_arrays_and_tensors_give_the_same_embeddings(alone: Path, photos: Path) -> None:
    model = fedmq.load(alone)
    path = photos / "00.png"
    with Image.open(path) as opened:
        image = opened.copy()
    array = np.asarray(image)
    tensor = torch.tensor(array).permute(2, 0, 1)
    forms = [path, str(path), image, array, array / 255, tensor, tensor.float() / 255]
    found = model.embed_images(forms, batch_size=len(forms))
    one_by_one = np.concatenate([model.embed_images([each], batch_size=1) for each in forms])
    assert np.abs(found - found[0]).max() < 1e-6
    assert np.abs(one_by_one - found).max() < 1e-6
    assert np.allclose(np.linalg.norm(found, axis=1), 1)


def test_every_public_name_is_found() -> None:
    assert [getattr(fedmq, name) for name in fedmq.__all__]


def test_images_and_texts_that_cannot_be_embedded_are_named(alone: Path) -> None:
    model = fedmq.load(alone)
    for image, words in (
        ("nowhere.png", "no such file"),
        (np.zeros((4, 4), np.uint8), r"shape \[4, 4\]"),
        (np.full((4, 4, 3), 2.0), "float64 values"),
        (7, "type int"),
    ):
        with pytest.raises(InputError, match=words):
            model.embed_images([image])
    with pytest.raises(InputError, match=r"a list of texts"):
        model.embed_texts("a red wall")
    with pytest.raises(InputError, match=r"texts\[1\]"):
        model.embed_texts(["a red wall", " "])
    assert model.embed_texts([]).shape == (0, 512)


def test_another_frozen_encoder_is_refused_by_name(alone: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["frozen"]["image"] = "0" * 64
    path.write_text(json.dumps(config))
    model = fedmq.load(tmp_path)
    with pytest.raises(InputError, match=r"frozen\.image.*lite.*the encoder the model was trained with"):
        model.embed_images([np.zeros((8, 8, 3), np.uint8)])
    assert model.embed_texts(["a red wall"]).shape == (1, 512)


def test_a_model_that_cannot_stand_alone_or_is_missing_is_refused(alone: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        fedmq.load(tmp_path)
    shutil.copytree(alone, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "personal_only": True}))
    with pytest.raises(InputError, match="fedmq search RUN"):
        fedmq.load(tmp_path / "model")


def test_the_written_forward_pass_gives_the_embedding(alone: Path, photos: Path) -> None:
    from safetensors.torch import load_file

    from fedmq.encoders import lite

    tensors = load_file(alone / "model.safetensors")

    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ tensors[f"visual.{name}.weight"].T + tensors[f"visual.{name}.bias"]

    with Image.open(photos / "05.png") as opened:
        x = torch.tensor(lite.encode_images([np.asarray(opened.convert("RGB"))]))
    x = x + layer("adapters.00.up", torch.nn.functional.gelu(layer("adapters.00.down", x)))
    z = layer("head.1", torch.relu(layer("head.0", x)))
    expected = torch.nn.functional.normalize(x + z, dim=1).numpy()
    assert np.abs(fedmq.load(alone).embed_images([photos / "05.png"]) - expected).max() < 1e-6


@pytest.mark.slow
def test_the_command_searches_a_folder_of_photos_with_a_model_alone(alone: Path, photos: Path) -> None:
    gallery = ("--gallery", photos, "--top", 3, "--json")
    by_image = json.loads(printed("search", alone, "--image", photos / "07.png", *gallery))
    assert by_image["results"][0]["item"] == "07.png"
    assert by_image["results"][0]["score"] == pytest.approx(1, abs=1e-6)
    by_text = json.loads(printed("search", alone, "a green wall", *gallery))
    assert by_text["gallery"] == by_image["gallery"]  # kept in the model's folder, and encoded once
    expected = fedmq.load(alone).search("a green wall", photos, top=3)
    assert [hit["item"] for hit in by_text["results"]] == [found.item.name for found in expected]


def test_a_search_that_a_model_alone_cannot_do_is_refused_in_one_line(alone: Path) -> None:
    for arguments, words in (
        (("a wall",), "--gallery: found 'nothing', allowed: a folder of images"),
        (("a wall", "--gallery", "nowhere"), "nowhere, which is not a folder"),
        (("a wall", "--gallery", ".", "--silo", "silo-00"), "--silo: found 'silo-00', allowed: no --silo: personal"),
        (("--image", "nowhere.png", "--gallery", "."), "nowhere.png: found 'no such file'"),
        (("--gallery", "."), "search: found 'no query'"),
    ):
        error = refused("search", alone, *arguments)
        assert words in error and len(error.splitlines()) == 1


def test_a_model_in_a_folder_that_cannot_be_written_keeps_its_gallery_in_the_cache(
    alone: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(alone, tmp_path / "model", ignore=shutil.ignore_patterns("gallery")))
    writable = os.access
    # Root may write everywhere, so that a mode would not do.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != model and writable(path, mode))
    told: list[str] = []
    files = replace(open_model(model), cache=tmp_path / "cache")
    made = galleries.export(files, photos, lambda what, _done, _total: told.append(what))
    assert made.folder.parent == tmp_path / "cache" / "galleries"
    assert told[0] == f"{model} cannot be written: the gallery is kept in {tmp_path / 'cache' / 'galleries'}"
    assert not (model / "gallery").exists()


def test_a_model_without_encoders_says_so(alone: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(alone, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    for texts, words in (("vectors", "precomputed features"), ("bag", "bags of words")):
        path.write_text(json.dumps({**json.loads(path.read_text()), "texts": texts}))
        assert words in refused("search", tmp_path / "model", "a red wall", "--gallery", photos)


def test_the_card_describes_the_model(alone: Path) -> None:
    card = fedmq.load(alone).card
    config = json.loads((alone / "config.json").read_text())
    wanted = "walls", "fedavg", config["model_digest"], config["data_digest"], "recall@1", "## Limits", "## Licence"
    assert [part for part in wanted if part not in card] == []


@pytest.mark.parametrize("binary", [True, False])
def test_the_nearest_of_many_rows_are_those_of_the_definition_and_ties_keep_their_order(binary: bool) -> None:
    generator, rows = np.random.default_rng(0), 2 * search_module._BLOCK + 5
    if binary:
        vectors, query = (generator.integers(0, 256, (n, 2), np.uint8) for n in (rows, 1))
        scores = np.unpackbits(vectors ^ query, axis=1).sum(axis=1)
    else:  # small integers, whose products are exact in any order
        vectors, query = (generator.integers(-3, 4, (n, 16)).astype(np.float32) for n in (rows, 1))
        scores = -(vectors @ query[0])
    found = search_module.nearest(vectors, query, rows)
    order = np.lexsort((np.arange(rows), scores))
    assert found == [(float(scores[row] if binary else -scores[row]), row) for row in order.tolist()]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_found_first(value: float) -> None:
    vectors = np.ones((9, 2), np.float32)
    vectors[5, 0] = value
    (first,) = search_module.nearest(vectors, np.ones((1, 2), np.float32), 1)
    assert first[1] == 5 and not np.isfinite(first[0])
