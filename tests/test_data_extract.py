"""Extraction of frozen features: computed once, shared between prepared folders, resumed after a kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from PIL import Image

from fedmq.config.scenario import Backbone, Data
from fedmq.data.catalogue import SETS
from fedmq.data.extract import left_out, pooled, store
from fedmq.data.prepare import prepare, text_features
from fedmq.data.prepared_arrays import Prepared
from fedmq.encoders import images
from fedmq.encoders.image_sets import ImageFiles
from fedmq.encoders.images import decode
from fedmq.encoders.select import image_encoder
from fedmq.errors import InputError
from fedmq.models.build import build
from fedmq.models.two_tower import Branch
from tests import data_set_folders
from tests.gradients import gradient_of

if TYPE_CHECKING:
    from fedmq.encoders import clip, clip_weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what takes seconds for these tests only, not in each process that collects them."""
    for name in ("fedmq.encoders.clip", "fedmq.encoders.clip_weights"):
        globals()[name.rpartition(".")[2]] = import_module(name)


def tiny_clip(folder: Path, **options: Any) -> Backbone:
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (folder / "tiny.json").write_text(json.dumps(config))
    return Backbone(name=str(folder / "tiny.json"), **options)


def prepared(tmp_path: Path, backbone: Backbone | None = None, **options: Any) -> Prepared:
    data_set_folders.flickr(tmp_path / "set") if not (tmp_path / "set").exists() else None
    data = Data(name="flickr8k", path=tmp_path / "set", **options)
    return prepare(data, backbone or tiny_clip(tmp_path), tmp_path / "cache")


# --- cached rows ----------------------------------------------------------------------------------------------------


def _square(rows: range) -> np.ndarray:
    return np.array([[row, row**2] for row in rows], dtype=np.float32)


def _die_at(path: Path, row: int) -> None:
    def encode(rows: range) -> np.ndarray:
        if row in rows:
            os.kill(os.getpid(), signal.SIGKILL)
        return _square(rows)

    store(path, 20, 4, encode, lambda _: None)


def test_a_killed_extraction_resumes_after_its_last_finished_chunk(tmp_path: Path) -> None:
    path = tmp_path / "features" / "rows.npy"
    process = multiprocessing.get_context("fork").Process(target=_die_at, args=(path, 13))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not path.exists()
    asked: list[range] = []

    def encode(rows: range) -> np.ndarray:
        asked.append(rows)
        return _square(rows)

    told: list[int] = []
    store(path, 20, 4, encode, told.append)
    assert asked == [range(12, 16), range(16, 20)]
    assert told == [16, 20]
    assert np.array_equal(np.load(path), _square(range(20)))
    assert sorted(file.name for file in path.parent.iterdir()) == ["rows.npy", "rows.npy.lock"]
    store(path, 20, 4, encode, told.append)
    assert len(asked) == 2


@pytest.mark.parametrize(
    "damage", [*("mark empty", "mark too far", "rows cut", "rows of another set", "a value", "a type", "a pipe")]
)
def test_rows_damaged_by_a_machine_crash_are_recomputed(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    half, mark = tmp_path / "rows.npy.partial", tmp_path / "rows.npy.done"

    def stopped(rows: range) -> np.ndarray:
        if rows.start == 8:
            raise KeyboardInterrupt
        return _square(rows)

    with pytest.raises(KeyboardInterrupt):
        store(path, 20, 4, stopped, lambda _: None)
    whole, (number, digest) = bytearray(half.read_bytes()), mark.read_text().split()
    assert number == "8"
    match damage:
        case "mark empty" | "mark too far":
            mark.write_text("" if damage == "mark empty" else f"24 {digest}")
        case "rows cut":
            half.write_bytes(whole[:200])
        case "rows of another set":
            np.save(tmp_path / "other.npy", np.full((9, 2), 7, np.float32))
            (tmp_path / "other.npy").replace(half)
        case "a value":
            whole[130] ^= 1
            half.write_bytes(whole)
        case "a type":
            half.write_bytes(whole.replace(b"<f4", b"<i4"))
        case "a pipe":
            mark.unlink()
            os.mkfifo(mark)
    asked: list[range] = []

    def encode(rows: range) -> np.ndarray:
        asked.append(rows)
        return _square(rows)

    store(path, 20, 4, encode, lambda _: None)
    assert asked[0] == range(4)
    assert np.array_equal(np.load(path), _square(range(20)))


def test_a_videos_features_are_the_unit_length_mean_of_its_frames() -> None:
    vectors = np.array([[2, 0], [0, 2], [0, 5]], dtype=np.float32)
    assert np.allclose(pooled(vectors, [2, 1]), [[0.5**0.5, 0.5**0.5], [0, 1]])
    assert not pooled(np.zeros((2, 3), np.float32), [2]).any()


@pytest.mark.parametrize(("total", "expected"), [(24, list(range(1, 24, 2))), (12, list(range(12))), (3, [0, 1, 2])])
def test_frames_are_taken_from_the_middle_of_equal_segments(total: int, expected: list[int]) -> None:
    assert images.spread_evenly(total, 12) == expected


@pytest.mark.parametrize("shape", [(1, 30000, 3), (0, 5, 3)])
def test_a_thin_strip_and_an_image_without_pixels_are_refused(shape: tuple[int, int, int], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 100 times the other"):
        images.fit(np.zeros(shape, np.uint8), 16)
    if 0 not in shape:
        Image.fromarray(np.zeros(shape, np.uint8)).save(tmp_path / "strip.png")
        with pytest.raises(InputError, match=r"strip\.png: found '\d+ x \d+ pixels'"):
            images.decode(tmp_path / "strip.png")


# --- whole data sets ------------------------------------------------------------------------------------------------


def test_another_split_gets_its_own_folder_but_shares_the_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(tmp_path)
    monkeypatch.setattr(images, "decode", lambda *_: pytest.fail("images were decoded again"))
    second = prepared(tmp_path, queries=2, train=1)
    assert second.folder != first.folder
    assert np.bincount(second.split, minlength=5).tolist() == [1, 0, 2, 0, 3]
    assert (second.folder / "image.npy").stat().st_ino == (first.folder / "image.npy").stat().st_ino
    assert prepared(tmp_path).folder == first.folder


def test_a_replaced_photo_is_encoded_again(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    data_set_folders.photo(tmp_path / "set" / "images" / "0.jpg", 77, (24, 24))
    second = prepared(tmp_path)
    assert not np.array_equal(first.image[0], second.image[0])
    assert np.array_equal(first.image[1], second.image[1])


def test_with_adapters_in_the_blocks_photos_are_stored_as_pixels_and_captions_as_tokens(tmp_path: Path) -> None:
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp")
    found = prepared(tmp_path, backbone)
    assert (found.image.dtype, found.image.shape) == (np.uint8, (6, 3, 32, 32))
    assert (found.text.dtype, found.text.shape) == (np.int32, (12, 20))
    assert build(backbone, found.inputs, 0, cache=tmp_path / "cache").dim == 16
    assert text_features(found, backbone).shape == (6, 16)


def test_pixels_and_tokens_are_shared_across_weights_but_features_are_not(tmp_path: Path) -> None:
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp")
    data = Data(name="flickr8k", path=data_set_folders.flickr(tmp_path / "set"))

    def made(seed: int, folder: str) -> tuple[Prepared, npt.NDArray[np.float32]]:
        found = prepare(data, backbone, tmp_path / folder, seed)
        return found, text_features(found, backbone, seed)

    (zero, _), (one, vectors) = made(0, "cache"), made(1, "cache")
    alone, wanted = made(1, "other")
    assert one.digest == alone.digest != zero.digest
    assert np.array_equal(vectors, wanted)
    assert len(list((tmp_path / "cache" / "features").glob("*.npy"))) == 2


def test_a_replaced_checkpoint_changes_the_digest_and_a_moved_one_does_not(tmp_path: Path) -> None:
    weights = [clip_weights.weights(tiny_clip(tmp_path), seed, tmp_path / "cache").folder for seed in (0, 1)]

    def write(path: Path, folder: Path) -> Backbone:
        towers = [safetensors.torch.load_file(folder / f"{name}.safetensors") for name in ("image", "text")]
        safetensors.torch.save_file(towers[0] | towers[1], path)
        return tiny_clip(tmp_path, pretrained=str(path), adapter_site="blocks", head="mlp")

    first = prepared(tmp_path, write(tmp_path / "w.safetensors", weights[0]))
    second = prepared(tmp_path, write(tmp_path / "w.safetensors", weights[1]))
    assert first.digest != second.digest
    moved = write(tmp_path / "old.safetensors", weights[0])
    found = prepared(tmp_path, moved)
    assert found.digest == first.digest
    # The first folder was prepared from w.safetensors, which now holds other weights.
    same = prepare(Data(name="flickr8k", path=tmp_path / "set"), moved, tmp_path / "other")
    assert np.array_equal(text_features(found, moved), text_features(same, moved))


@pytest.mark.parametrize("there", [15, 5])
def test_with_adapters_in_the_blocks_videos_are_pooled_after_the_tower(
    there: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Data(name="msrvtt", path=data_set_folders.msrvtt(tmp_path / "videos", there))
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp")
    found = prepare(data, backbone, tmp_path / "cache")
    assert (found.image.dtype, found.image.shape) == (np.uint8, (4, 12, 3, 32, 32))
    # A shorter video's frames are repeated, so the mean covers each of them.
    assert len(np.unique(found.image[0], axis=0)) == min(there, 12)
    model = build(backbone, found.inputs, 0, cache=tmp_path / "cache")
    videos = torch.from_numpy(np.array(found.image))
    assert isinstance(model.visual, Branch) and model.visual.frozen is not None
    with torch.no_grad():
        # Adapters start near zero; without them the tower is the frozen one that features are extracted with.
        model.load(torch.zeros_like(model.flat))
        pooled = model.visual.frozen(videos).numpy()
        monkeypatch.setattr(clip, "FRAMES_AT_ONCE", 12)
        assert np.array_equal(model.visual.frozen(videos).numpy(), pooled)
    features = np.array(prepare(data, tiny_clip(tmp_path), tmp_path / "cache").image)
    assert np.allclose(pooled, features, atol=1e-5 if there >= 12 else 0.05)
    model.load(model.initial())
    model.image(videos).sum().backward()
    assert gradient_of(model)[model.branch("image")].abs().sum() > 0


def test_frames_without_leading_zeros_are_sorted_by_number(tmp_path: Path) -> None:
    for frame in range(1, 25):
        data_set_folders.photo(tmp_path / "video0" / f"frame{frame}.jpg", frame)
    taken = ImageFiles((tmp_path / "video0",), 12, folders=True).frames(0)
    wanted = [decode(tmp_path / "video0" / f"frame{frame}.jpg") for frame in range(2, 25, 2)]
    assert all(np.array_equal(*each) for each in zip(taken, wanted, strict=True))


def test_a_folder_of_frames_takes_precedence_over_its_video_file(tmp_path: Path) -> None:
    data_set_folders.msrvtt(tmp_path / "videos")
    (tmp_path / "videos" / "video1.mp4").write_bytes(b"cut off")
    found = SETS["msrvtt"].read(Data(name="msrvtt", path=tmp_path / "videos"))
    assert len(found.images.frames(1)) == 12


def test_interrupted_text_features_for_clustering_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_clip(tmp_path, adapter_site="blocks", head="mlp")
    monkeypatch.setattr("fedmq.data.prepare.ITEMS", 2)
    found = prepared(tmp_path, backbone)
    whole = text_features(found, backbone)
    (found.folder / "text_features.npy").unlink()
    encode, calls = clip.encode_texts, []

    def stopped(*arguments: Any) -> npt.NDArray[np.float32]:
        calls.append(len(arguments[1]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(*arguments)

    monkeypatch.setattr(clip, "encode_texts", stopped)
    with pytest.raises(KeyboardInterrupt):
        text_features(found, backbone)
    assert not (found.folder / "text_features.npy").exists()
    told: list[tuple[str, int, int]] = []
    assert np.array_equal(text_features(found, backbone, progress=lambda *each: told.append(each)), whole)
    (found.folder / "text_features.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match=r"text_features\.npy: found .*"):
        text_features(found, backbone)
    assert (len(calls), told) == (4, [("captions for the clusters", 6, 6)])


def test_tags_are_read_as_a_bag_of_words_or_as_one_sentence(tmp_path: Path) -> None:
    data = Data(name="mirflickr", path=data_set_folders.mirflickr(tmp_path / "mir"), queries=2, train=3)
    found = prepare(data, tiny_clip(tmp_path), tmp_path / "cache")
    assert (found.text.shape, found.text.dtype) == ((7, 3), np.float32)
    assert found.text[0].tolist() == [1, 0, 1]
    assert text_features(found, tiny_clip(tmp_path)).tolist() == found.text.tolist()
    said = prepare(data.model_copy(update={"text": "sentences"}), tiny_clip(tmp_path), tmp_path / "cache")
    assert said.text.shape == (7, 16)
    data_set_folders.flickr(tmp_path / "set")
    with pytest.raises(InputError, match=r"data\.text.*no bag of words"):
        prepared(tmp_path, text="bag")


def test_a_missing_photo_is_refused_by_name_or_skipped(tmp_path: Path) -> None:
    data_set_folders.flickr(tmp_path / "set")
    (tmp_path / "set" / "images" / "1.jpg").unlink()
    (tmp_path / "set" / "images" / "4.jpg").unlink()
    with pytest.raises(InputError, match=r"1\.jpg and 1 more.*fedmq data check"):
        prepared(tmp_path)
    data_set_folders.truncate(tmp_path / "set" / "images" / "3.jpg")
    with pytest.raises(InputError, match=r"(?i)3\.jpg.*truncated"):
        prepared(tmp_path, missing="skip")
    assert not (tmp_path / "cache" / "data").exists()
    data_set_folders.photo(tmp_path / "set" / "images" / "3.jpg", 3)
    found = prepared(tmp_path, missing="skip")
    assert found.keys == ("0.jpg", "2.jpg", "3.jpg", "5.jpg")
    assert found.captions.tolist() == [1, 3, 1, 3]
    data = Data(name="flickr8k", path=tmp_path / "set", missing="skip")
    assert left_out(data) == "2 of 6 items left out: no image"
    assert left_out(data.model_copy(update={"missing": "refuse"})) == ""


def test_items_of_a_manifest_without_image_or_captions_have_rows_of_zeros(tmp_path: Path) -> None:
    rows: list[dict[str, str]] = [
        {"image": "a.png", "caption": "a", "split": "train"},
        {"image": "b.png", "split": "train"},
        {"caption": "c", "split": "train"},
        {"image": "d.png", "caption": "d", "split": "test"},
    ]
    data = Data(name="manifest", path=data_set_folders.manifest(tmp_path / "m", rows))
    backbone = tiny_clip(tmp_path)
    found = prepare(data, backbone, tmp_path / "cache")
    assert found.present.tolist() == [[True, True], [True, False], [False, True], [True, True]]
    assert found.image.any(axis=1).tolist() == [True, True, False, True]
    assert found.text.any(axis=1).tolist() == [True, False, True, True]
    assert found.captions.tolist() == [1, 0, 1, 1]
    assert not any("zero" in line for line in found.warnings), found.warnings
    assert text_features(found, backbone).any(axis=1).tolist() == [True, False, True, True]
    whole = prepare(data.model_copy(update={"missing": "skip"}), backbone, tmp_path / "cache")
    assert whole.keys == ("a.png", "d.png")
    assert np.allclose(whole.image, found.image[[0, 3]], atol=1e-6)
    assert not whole.unpaired


@pytest.mark.parametrize("lacking", ["image", "caption"])
def test_a_manifest_may_lack_a_modality_altogether(lacking: str, tmp_path: Path) -> None:
    rows = [{"image": "a.png", "caption": "a"}, {"image": "b.png", "caption": "b"}]
    kept = [{name: value for name, value in row.items() if name != lacking} for row in rows]
    data_set_folders.manifest(tmp_path / "m", rows)
    data = Data(name="manifest", path=data_set_folders.manifest(tmp_path / "m", kept))
    found = prepare(data, tiny_clip(tmp_path), tmp_path / "cache")
    assert found.present.tolist() == [[lacking != "image", lacking != "caption"]] * 2
    assert (found.image.shape, found.text.shape) == ((2, 16), (2, 16))


# --- timm -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentence vectors without loading the sentence encoder."""
    lite = pytest.importorskip("fedmq.encoders.lite")
    monkeypatch.setattr("fedmq.encoders.lite_inputs.weights_digest", lambda: "lite")
    monkeypatch.setattr(lite, "text_features", lambda texts: np.ones((len(texts), lite.TEXT_DIM), np.float32))


def test_a_timm_model_yields_the_features_before_its_classifier(tmp_path: Path, few_words: None) -> None:
    pytest.importorskip("timm")
    found = prepared(tmp_path, Backbone(name="timm:resnet10t", head="mlp"))
    assert found.image.shape == (6, 512)
    assert found.text.shape == (12, 384)
    assert len({row.tobytes() for row in found.image}) == 6


def test_a_timm_checkpoint_is_loaded_and_a_mismatched_one_is_refused_by_name(tmp_path: Path, few_words: None) -> None:
    timm = pytest.importorskip("timm")
    torch = pytest.importorskip("torch")
    model = timm.create_model("resnet10t", num_classes=7)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    backbone = Backbone(name="timm:resnet10t", pretrained=str(tmp_path / "w.pt"), head="mlp")
    found = prepared(tmp_path, backbone)
    assert not np.allclose(found.image, prepared(tmp_path, Backbone(name="timm:resnet10t")).image)
    state = {**model.state_dict(), "conv1.0.weight": torch.zeros(3)}
    torch.save(state, tmp_path / "w.pt")
    data_set_folders.photo(tmp_path / "set" / "images" / "0.jpg", 5)
    with pytest.raises(InputError, match=r"conv1\.0\.weight.*shape \[3\]"):
        prepared(tmp_path, backbone)
    with pytest.raises(InputError, match=r"timm:resnet10tt.*close: resnet10t"):
        prepared(tmp_path, Backbone(name="timm:resnet10tt"))
    with pytest.raises(InputError, match=r"backbone\.pretrained.*a tag of resnet10t: c3_in1k"):
        prepared(tmp_path, backbone.model_copy(update={"pretrained": "nowhere.pt"}))


@pytest.mark.parametrize(
    ("name", "tag", "mode"),
    [("convnext_tiny", "in12k_ft_in1k", "center"), ("convnext_tiny", "in12k_ft_in1k_384", "squash")],
)
def test_an_image_is_resized_as_timm_does_for_the_tag(name: str, tag: str, mode: str, tmp_path: Path) -> None:
    timm, torch = pytest.importorskip("timm"), pytest.importorskip("torch")
    how = timm.get_pretrained_cfg(f"{name}.{tag}")
    assert (how.crop_mode, how.crop_pct) == (mode, 0.95 if mode == "center" else 1.0)
    image = np.random.default_rng(3).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    encoder = image_encoder(Backbone(name=f"timm:{name}", pretrained=tag), 0, tmp_path, "cpu")
    config = timm.data.resolve_data_config(pretrained_cfg=how.to_dict()) | {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    theirs = timm.data.create_transform(**config)(Image.fromarray(image))
    assert np.array_equal(encoder.fit(image), (255 * theirs).round().permute(1, 2, 0).to(torch.uint8).numpy())


@pytest.mark.parametrize("changed", [{"crop_mode": "border"}, {"input_size": (3, 64, 48)}])
def test_a_timm_model_with_unsupported_preprocessing_is_refused(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = pytest.importorskip("timm")
    usual = timm.get_pretrained_cfg("resnet10t")
    monkeypatch.setattr(timm, "get_pretrained_cfg", lambda _: replace(usual, **changed))
    with pytest.raises(InputError, match=r"timm:resnet10t, whose images are .*crop_mode center or squash"):
        image_encoder(Backbone(name="timm:resnet10t"), 0, tmp_path, "cpu")


def test_a_torchvision_vgg_file_yields_fc7_features(tmp_path: Path) -> None:
    timm_images = pytest.importorskip("fedmq.encoders.timm_images")
    torch = pytest.importorskip("torch")
    vgg = pytest.importorskip("torchvision").models.vgg11()
    torch.save(vgg.state_dict(), tmp_path / "vgg11.pth")
    backbone = Backbone(name="timm:vgg11", pretrained=str(tmp_path / "vgg11.pth"))
    model, how = timm_images.load(backbone, 0, "cpu")
    image = torch.rand(1, *how["input_size"])
    with torch.inference_mode():
        ours, theirs = model(image), vgg.eval().features(image)
        fc7 = vgg.classifier[:5](theirs.flatten(1))
    assert ours.shape == (1, 4096)
    assert torch.allclose(ours, fc7, atol=1e-5)


@pytest.mark.parametrize("old", [True, False])
def test_a_matconvnet_file_yields_the_layer_before_its_classifier(old: bool, tmp_path: Path, few_words: None) -> None:
    path = data_set_folders.matconvnet(tmp_path / "vgg-f.mat", old=old)
    found = prepared(tmp_path, Backbone(name="matconvnet", pretrained=str(path), head="mlp"))
    assert found.image.shape == (6, 7)
    assert found.image.min() >= 0
    assert len({row.tobytes() for row in found.image}) == 6
    whole = path.read_bytes()
    for length in (len(whole) - 8, len(whole) // 2):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"vgg-f\.mat: found"):
            prepared(tmp_path, Backbone(name="matconvnet", pretrained=str(path), head="mlp"))
    path.write_bytes(b"x" * 600)
    with pytest.raises(InputError, match=r"vgg-f\.mat.*network of MatConvNet"):
        prepared(tmp_path, Backbone(name="matconvnet", pretrained=str(path), head="mlp"))
    with pytest.raises(InputError, match=r"backbone\.pretrained.*imagenet-vgg-f\.mat"):
        prepared(tmp_path, Backbone(name="matconvnet"))


def test_response_normalisation_follows_matconvnets_formula() -> None:
    functional = pytest.importorskip("fedmq.encoders.matconvnet")
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(1, 6, 2, 2)
    found = functional.response_normalisation({"param": [5, 2, 1e-2, 0.75]})(x)
    # y = x / (kappa + alpha sum over 5 channels of x^2)^beta
    window = x[0, 0:4, 1, 1].square().sum()
    assert torch.allclose(found[0, 1, 1, 1], x[0, 1, 1, 1] / (2 + 1e-2 * window) ** 0.75)
