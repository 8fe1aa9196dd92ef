"""Galleries of released models and search in them. The releases are hand-written and untrained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Data, Scenario
from fedmq.data.prepare import prepare
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.federation.population import Population
from fedmq.models.two_tower import TwoTower
from fedmq.retrieval import encoded_gallery, gallery, search
from fedmq.retrieval.encoded_gallery import Gallery
from fedmq.retrieval.gallery import export
from fedmq.retrieval.released_model import Release, open_release
from fedmq.storage.cache import cache_folder
from fedmq.storage.run_folder import write_json
from fedmq.wire.codec import digest
from fedmq.wire.payloads import Memory
from tests import data_set_folders, definitions
from tests.command_line import completed, fedmq
from tests.run_summaries import release_config
from tests.threaded_run import resolved, run
from tests.waiting import PATIENCE

DCMH = "objective={base: dcmh, bits: 12, hidden: 16}"


def model_of(scenario: Scenario) -> TwoTower:
    prepared = prepare(scenario.data, scenario.backbone, seed=scenario.seed)
    nothing = np.zeros(0, np.int64)
    population = Population(
        prepared, (), (), (), evaluated=nothing, database=nothing, galleries=(), cache=cache_folder()
    )
    return population.build_model(scenario, "cpu", ("image", "text"))


def released(root: Path, scenario: Scenario, memory: np.ndarray | None = None, scale: float = 1.0) -> Path:
    """The folder of a run that ended with its initial parameters, or with a multiple of them."""
    model = model_of(scenario)
    theta = scale * model.flat.detach()
    (root / "model").mkdir(parents=True)
    (root / "scenario.yaml").write_text(scenario.dump())
    views = model.layout.views(theta.numpy())
    save_file({name: torch.tensor(view) for name, view in views.items()}, root / "model" / "model.safetensors")
    beside = {}
    if memory is not None:
        beside["memory"] = digest(remember(root, memory))
    config = release_config(
        backbone=scenario.backbone.model_dump(mode="json"),
        objective=scenario.objective.model_dump(mode="json"),
        layout=[entry.name for entry in model.layout.entries],
        protocol=scenario.protocol.name,
        dim=model.dim,
        layout_digest=model.layout.digest,
        model_digest=model.layout.model_digest(theta.numpy()),
        released_with=beside,
    )
    write_json(root / "model" / "config.json", config.plain())
    return root


def remember(root: Path, centroids: np.ndarray) -> Memory:
    """Write a memory next to a released model."""
    memory = Memory(centroids, np.ones(len(centroids), np.int64))
    save_arrays(vars(memory), root / "model" / "memory.safetensors")
    return memory


@pytest.fixture
def embeddings(tiny: Path, tmp_path: Path) -> Release:
    return open_release(released(tmp_path / "run", scenarios.load(tiny)))


@pytest.fixture
def hashing(tiny: Path, tmp_path: Path) -> Release:
    return open_release(released(tmp_path / "run", scenarios.load(tiny, [DCMH])))


def outputs(release: Release) -> tuple[np.ndarray, np.ndarray]:
    """The model's outputs for all images and captions."""
    prepared = prepare(release.scenario.data, release.scenario.backbone)
    model = release.model(prepared)
    with torch.no_grad():
        image = model.image(torch.tensor(np.array(prepared.image)))
        text = model.caption(torch.tensor(np.array(prepared.text).reshape(-1, prepared.text.shape[-1])))
    return image.numpy(), text.numpy()


def by_item(release: Release, key: str, **options: Any) -> search.SearchHits:
    return search.find(release, search.Query(item=key), **options)


def test_embeddings_are_exported_with_their_names(embeddings: Release) -> None:
    made = export(embeddings)
    image, text = outputs(embeddings)
    np.testing.assert_allclose(made.array("image"), image, atol=1e-6)
    np.testing.assert_allclose(made.array("text"), text, atol=1e-6)
    assert made.array("owner").tolist() == np.repeat(np.arange(150), 2).tolist()
    assert made.items.keys[:2] == ["000000", "000001"]


def test_codes_are_exported_packed(hashing: Release) -> None:
    made = export(hashing)
    image, text = outputs(hashing)
    assert (made.array("image").dtype, made.array("image").shape) == (np.uint8, (150, 2))
    assert np.array_equal(definitions.unpacked(made.array("image"), 12), hamming.sign(image))
    assert np.array_equal(definitions.unpacked(made.array("text"), 12), hamming.sign(text))


def test_images_are_ranked_by_their_cosine(embeddings: Release) -> None:
    image, text = outputs(embeddings)
    scores = image @ text[2 * 7]
    order = np.argsort(-scores, kind="stable")[:5]
    found = search.find(embeddings, search.Query(item="000007", side="text"), top=5)
    assert found.among == "images"
    assert [hit.item for hit in found.hits] == [f"{place:06d}" for place in order]
    assert [hit.score for hit in found.hits] == pytest.approx(scores[order].tolist(), abs=1e-6)
    assert [hit.rank for hit in found.hits] == [1, 2, 3, 4, 5]


def test_equally_distant_codes_are_ranked_in_gallery_order(hashing: Release) -> None:
    image, _ = outputs(hashing)
    distance = hamming.hamming(image[7:8], image)[0]
    order = np.argsort(distance, kind="stable")
    for top in (1, 9, 40, 150, 1000):  # twelve bits: hardly any cut falls between two distances
        found = by_item(hashing, "000007", among="images", top=top)
        assert [hit.item for hit in found.hits] == [f"{place:06d}" for place in order[:top]]
        assert [hit.score for hit in found.hits] == distance[order[:top]].tolist()


def test_equal_images_are_ranked_in_gallery_order(embeddings: Release) -> None:
    made = export(embeddings)
    rows = np.repeat(np.array(made.array("image")[:1]), 150, axis=0)
    rows[30] = made.array("text")[2 * 7]  # one is nearer than all others, which are equal
    np.save(made.folder / "image.npy", rows)
    for top in (1, 4, 40, 150):
        found = search.find(embeddings, search.Query(item="000007", side="text"), top=top)
        wanted = [30, *(place for place in range(150) if place != 30)][:top]
        assert [hit.item for hit in found.hits] == [f"{place:06d}" for place in wanted]


def test_an_item_is_listed_once_by_its_nearest_caption(embeddings: Release) -> None:
    image, text = outputs(embeddings)
    scores = (text @ image[3]).reshape(150, 2).max(axis=1)
    found = by_item(embeddings, "000003", top=150)
    assert found.among == "captions"
    assert [hit.item for hit in found.hits] == [f"{place:06d}" for place in np.argsort(-scores, kind="stable")]


def test_a_second_search_needs_neither_the_data_nor_the_model(
    hashing: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = by_item(hashing, "000007")
    monkeypatch.setattr(gallery, "prepare", lambda *_: pytest.fail("the data was looked for"))
    (hashing.run.model / "model.safetensors").unlink()
    assert by_item(open_release(hashing.run.root), "000007").hits == before.hits


def test_a_failed_export_leaves_no_partial_files(embeddings: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gallery, "embed", die)
        export(embeddings)
    assert not [path for path in (embeddings.run.model / "gallery").iterdir() if path.is_dir()]
    assert isinstance(export(embeddings), Gallery)


def test_the_memory_released_with_a_model_changes_its_codes(hashing: Release, tmp_path: Path) -> None:
    memory = 50 * np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    other = open_release(released(tmp_path / "other", hashing.scenario, memory))
    assert not np.array_equal(export(hashing).array("image"), export(other).array("image"))
    assert np.array_equal(definitions.unpacked(export(other).array("image"), 12), hamming.sign(outputs(other)[0]))


def test_another_runs_memory_next_to_the_model_is_refused(hashing: Release, tmp_path: Path) -> None:
    memory = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    root = released(tmp_path / "other", hashing.scenario, memory)
    own, found = digest(Memory(memory, np.ones(5, np.int64))), digest(remember(root, -memory))
    message = f"^{root}/model/memory.safetensors: found 'a memory with digest {found}', .*{own}$"
    with pytest.raises(InputError, match=message):
        export(open_release(root))


def test_another_scenarios_data_can_be_the_gallery(embeddings: Release, features: Path, tmp_path: Path) -> None:
    with np.load(features) as whole:
        part = {name: whole[name][:20] for name in ("image", "text")}
    np.savez(tmp_path / "part.npz", **part, keys=np.array([f"part-{i}" for i in range(20)]))
    scenario = embeddings.scenario.model_dump(mode="json") | {
        "data": {"name": "features", "path": str(tmp_path / "part.npz")}
    }
    (tmp_path / "part.yaml").write_text(json.dumps(scenario))
    found = by_item(embeddings, "part-7", chosen=tmp_path / "part.yaml", among="images", top=1)
    assert [hit.item for hit in found.hits] == ["part-7"]
    assert found.gallery.folder.name.startswith("part-")


def test_free_text_queries_on_array_features_are_refused_before_anything_is_encoded(embeddings: Release) -> None:
    with pytest.raises(InputError, match="encoder"):
        search.find(embeddings, search.Query(text="a dog"))
    with pytest.raises(InputError, match="encoder"):
        search.find(embeddings, search.Query(image=Path("dog.png")))
    assert not (embeddings.run.model / "gallery").exists()


def test_invalid_searches_are_refused_by_name(embeddings: Release, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one of the gallery's 150 items"):
        by_item(embeddings, "0007")
    with pytest.raises(InputError, match=r"--gallery .*nowhere: found 'no such file or folder'"):
        export(embeddings, tmp_path / "nowhere")
    with pytest.raises(InputError, match="one of TEXT"):
        search.Query(text="a dog", item="000007")
    with pytest.raises(InputError, match=r"--side.*only with --item"):
        search.Query(text="a dog", side="image")
    with pytest.raises(InputError, match="a run folder"):
        open_release(tmp_path)
    (embeddings.run.model / "config.json").unlink()
    with pytest.raises(InputError, match="finished run"):
        open_release(embeddings.run.root)


@pytest.mark.parametrize("name", ["image", "text", "owner"])
def test_arrays_that_do_not_fit_their_description_are_refused(name: str, embeddings: Release) -> None:
    made = export(embeddings)
    path, right = made.folder / f"{name}.npy", np.array(made.array(name))
    others = [right[::-1]] if name == "owner" else []
    for wrong in (right[:-1], right[..., None], right.astype("complex64"), *others):
        np.save(path, wrong)
        with pytest.raises(InputError, match=rf"{name}\.npy: found"):
            made.array(name)
    for damaged in (b"no array", path.read_bytes()[:-9], b""):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"{name}\.npy: found"):
            made.array(name)


def test_a_gallery_that_is_damaged_or_another_models_is_refused(embeddings: Release, tmp_path: Path) -> None:
    made = export(embeddings)
    rows, names = np.array(made.array("image")), made.folder / "items.jsonl"
    rows[30] = np.nan
    np.save(made.folder / "image.npy", rows)
    with pytest.raises(InputError, match="found 'vectors that are not finite'"):
        by_item(embeddings, "000007", among="images", top=1)
    names.write_text("".join(names.read_text().splitlines(keepends=True)[:50]))
    with pytest.raises(InputError, match="50 items in a gallery of 150"):
        by_item(embeddings, "000003", top=60)
    other = export(open_release(released(tmp_path / "other", embeddings.scenario, scale=2.0)))
    shutil.rmtree(made.folder)
    shutil.copytree(other.folder, made.folder)
    with pytest.raises(InputError, match=r"gallery\.json: found 'a gallery of model"):
        by_item(embeddings, "000003")


def test_a_named_pipe_among_the_images_is_refused_and_never_opened(embeddings: Release, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match=r"pipe\.png: found 'a FIFO'"):
        gallery.of_folder(embeddings, tmp_path)


@pytest.mark.parametrize("settings", [[], [DCMH]], ids=["embeddings", "codes"])
def test_parameters_that_are_not_the_runs_are_refused(tiny: Path, tmp_path: Path, settings: list[str]) -> None:
    scenario = scenarios.load(tiny, settings)
    own, other = (open_release(released(tmp_path / f"x{scale}", scenario, scale=scale)) for scale in (1.0, 2.0))
    path = own.run.model / "model.safetensors"
    path.write_bytes((other.run.model / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=f"^{path}: found 'a model with digest {other.used}', .*{own.used}$"):
        export(own)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    with pytest.raises(InputError, match=f"^{path}: .*bfloat16"):
        export(own)
    assert not [path for path in own.run.model.glob("gallery/*") if path.is_dir()]


def test_the_command_prints_the_search_results(
    hashing: Release, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = hashing.run.root
    assert fedmq(monkeypatch, "export", root, "--json") == 0
    assert json.loads(capfd.readouterr().out)["bits"] == 12
    assert fedmq(monkeypatch, "search", root, "--item", "000007", "--among", "images", "--top", 3, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["among"], found["measure"]) == ("images", "distance")
    assert found["results"][0]["score"] == 0
    assert [hit["rank"] for hit in found["results"]] == [1, 2, 3]
    assert fedmq(monkeypatch, "search", root, "--item", "000007") == 0
    assert "distance" in capfd.readouterr().out
    assert fedmq(monkeypatch, "search", root, "a dog") == 2
    assert "encoder" in capfd.readouterr().err
    assert fedmq(monkeypatch, "search", root, "--help") == 0
    assert "Example: fedmq search" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["wikipedia", "mirflickr"])
def test_a_data_set_of_array_features_is_searched_by_item_number(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    arrays = {key: generator.normal(size=(20, 24)).astype(np.float32) for key in ("IAll", "TAll")}
    np.savez(tmp_path / "arrays.npz", **arrays, LAll=np.arange(20) % 3)
    data = {"name": name, "path": str(tmp_path / "arrays.npz"), "queries": 4, "val": 2, "train": 10}
    scenario = scenarios.load(tiny).model_copy(update={"data": Data.model_validate(data)})
    release = open_release(released(tmp_path / "run", scenario))
    found = by_item(release, "000007", among="images", top=2)
    assert found.hits[0].item == "000007"
    assert found.hits[0].caption == ""
    assert fedmq(monkeypatch, "export", release.run.root) == 0
    assert "20 images, 20 captions" in capfd.readouterr().out.replace("\n", " ")


def test_an_undecodable_query_is_a_one_line_error(
    hashing: Release, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = os.fsdecode(b"caf\xe9")
    for arguments, expected in ((["--", broken], "search: TEXT"), (["--item", broken], "search: --item")):
        assert fedmq(monkeypatch, "search", hashing.run.root, *arguments) == 2
        error = capfd.readouterr().err.strip()
        assert expected in error
        assert "whole characters of Unicode" in error
        assert len(error.splitlines()) == 1


def test_a_folder_of_images_is_read_through_symlinks_with_printable_names(
    embeddings: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_set_folders.photo(tmp_path / "elsewhere" / "a.png", 1)
    data_set_folders.photo(tmp_path / "pictures" / "b.png", 2)
    (tmp_path / "pictures" / "b.png").rename(tmp_path / "pictures" / os.fsdecode(b"caf\xe9.png"))
    (tmp_path / "pictures" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "pictures")
    monkeypatch.setattr(Release, "encoder", lambda *_: None)
    assert [key for key, _ in gallery.of_folder(embeddings, tmp_path / "pictures").items()] == [
        "caf\\xe9.png",
        "linked/a.png",
    ]


def drawings(folder: Path) -> Path:
    """A scenario of two silos on two dozen OpenMoji drawings, as a manifest of image files."""
    from PIL import Image

    from fedmq.data.readers import openmoji

    items = {item.key: item for item in openmoji.load_items()}
    keys = ["1F3BB", "1F697", "1F436", *list(items)[:: len(items) // 21]]
    lines = []
    for number, key in enumerate(dict.fromkeys(keys)):
        Image.fromarray(openmoji.render(key, 160)).save(folder / f"{key}.png")
        split = "test" if number % 4 == 0 else "train"
        line = {"image": f"{key}.png", "key": key, "captions": list(items[key].captions), "split": split}
        lines.append(json.dumps(line))
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    scenario = {
        "name": "drawings",
        "rounds": 1,
        "protocol": "fedavg",
        "data": {"name": "manifest", "path": str(folder / "items.jsonl")},
        "silos": {"count": 2},
        "partition": {"kind": "iid"},
        "evaluation": {"every": 0},
    }
    (folder / "drawings.yaml").write_text(json.dumps(scenario))
    return folder / "drawings.yaml"


def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that cannot import torch."""
    code = "import sys; sys.modules['torch'] = None; from fedmq.cli.main import main; main()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.slow
def test_a_fresh_process_retrieves_drawings_by_text_and_captions_by_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, root = tmp_path / "pictures", tmp_path / "run"
    images.mkdir()
    scenario = resolved(drawings(images))
    run(scenario, root)
    (root / "scenario.yaml").write_text(scenario.dump())

    def in_a_fresh_process(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fedmq", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def results(
        *arguments: object, command: Callable[..., subprocess.CompletedProcess[str]] = completed
    ) -> list[dict[str, Any]]:
        done = command("search", str(root), *map(str, arguments), "--json")
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout)["results"])

    violin, image = ("playing the violin", "--top", 3), ("--image", images / "1F697.png", "--top", 3)
    car = ("a car", "--gallery", images, "--top", 1)
    found, captions, cars = results(*violin, command=in_a_fresh_process), results(*image), results(*car)
    assert (found[0]["rank"], found[0]["item"], found[0]["caption"]) == (1, "1F3BB", "violin")
    assert "1F697" in [hit["item"] for hit in captions]
    assert cars[0]["item"] == "1F697.png"
    for words, first in ((violin, found), (image, captions), (car, cars)):
        assert results(*words, command=without_torch) == first
    queries = (search.Query(text=violin[0]), found), (search.Query(image=image[1]), captions)
    without = ("find_spec", None), ("cache_folder", images / "1F697.png")  # onnxruntime, a cache that can be written
    for (name, value), (query, first) in product(without, queries):
        with monkeypatch.context() as changed:
            changed.setattr(encoded_gallery, name, lambda *_, value=value: value)
            hits = search.find(open_release(root), query, top=3).hits
        assert [hit.item for hit in hits] == [hit["item"] for hit in first]
        assert [hit.score for hit in hits] == pytest.approx([hit["score"] for hit in first], abs=1e-5)
    kept = [path for path in (root / "model" / "gallery").glob("pictures-*") if path.is_dir()]
    assert json.loads((kept[0] / "gallery.json").read_text())["captions"] == 0
    config = open_release(root).files.config
    folders = encoded_gallery.query_folders(config, "text")
    assert folders is not None
    file = folders.tower / encoded_gallery.ONNX_FILE
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # a weight: onnxruntime would compute something else
    file.write_bytes(content)
    damaged = without_torch("search", str(root), *map(str, violin))
    shutil.rmtree(folders.tower)  # from the cache of all tests
    assert damaged.returncode == 2, damaged.stdout
    assert f"{file}: found 'other content than model.sha256 says'" in damaged.stderr


def test_an_item_of_an_encoded_gallery_is_searched_without_torch(embeddings: Release) -> None:
    words = ["search", str(embeddings.run.root), "--item", "000007", "--top", "3", "--json"]
    first = completed(*words)  # encodes the gallery
    second = without_torch(*words)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert json.loads(second.stdout)["results"] == json.loads(first.stdout)["results"]
