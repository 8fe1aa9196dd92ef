"""Padding, repeated images, zeros and cut captions: read as meant, or refused, and always reported."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedmq.config.scenario import Backbone, Data
from fedmq.data.prepare import prepare
from fedmq.data.readers.features import FeatureSet, read_features
from fedmq.data.splits import NEAR, SPLITS, nearly_equal
from fedmq.data.warnings import (
    DataWarnings,
    of_captions,
    of_heldout_labels,
    of_labels,
    of_spellings,
    of_vectors,
    sentences,
)
from fedmq.errors import InputError
from fedmq.launch.data_check import check_raw
from tests.data_set_folders import add


def vectors(n: int = 12, captions: int = 3) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return (
        generator.normal(size=(n, 4)).astype(np.float32),
        generator.normal(size=(n, captions, 5)).astype(np.float32),
    )


def read(tmp_path: Path, **arrays: Any) -> FeatureSet:
    np.savez(tmp_path / "x.npz", **arrays)
    return read_features(tmp_path / "x.npz")


# --- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.integers(1, 5), min_size=2, max_size=20))
@settings(max_examples=30)
def test_rows_of_zeros_behind_the_captions_are_padding_as_if_their_numbers_were_given(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int]
) -> None:
    counts, folder = np.array(numbers), tmp_path_factory.mktemp("x")
    image, text = vectors(len(counts), 5)
    text[np.arange(5) >= counts[:, None]] = 0
    without, given_ = read(folder, image=image, text=text), read(folder, image=image, text=text, captions=counts)
    assert without.captions.tolist() == given_.captions.tolist() == numbers
    assert np.array_equal(without.text, given_.text)
    assert without.warnings.padding == 5 * len(counts) - sum(numbers)


@pytest.mark.parametrize(
    ("rows", "message"), [([0], "zeros before another caption in row 3"), ([0, 1, 2], "only zeros in row 3")]
)
def test_zeros_that_cannot_be_padding_are_refused(tmp_path: Path, rows: list[int], message: str) -> None:
    image, text = vectors()
    text[3, rows] = 0
    with pytest.raises(InputError, match=message):
        read(tmp_path, image=image, text=text)


# --- one row per caption --------------------------------------------------------------------------------------------


def test_a_row_for_each_caption_is_the_same_data_set_as_an_item_for_each_image(tmp_path: Path) -> None:
    image, text = vectors(20, 5)
    labels = np.arange(20) % 3
    items = read(tmp_path, image=image, text=text, labels=labels)
    order = np.random.default_rng(1).permutation(100)
    order = order[np.argsort(order // 5, kind="stable")]  # rows of an image together, in any order
    rows = read(
        tmp_path,
        image=np.repeat(image, 5, 0)[order],
        text=text.reshape(100, 5)[order],
        labels=np.repeat(labels, 5)[order],
    )
    for name in ("image", "captions", "labels", "split"):
        assert np.array_equal(getattr(items, name), getattr(rows, name)), name
    assert np.array_equal(np.sort(items.text, axis=0), np.sort(rows.text, axis=0))
    assert rows.warnings.merged == 80
    assert rows.keys[:3] == ("000000", "000005", "000010")


def test_rows_of_an_image_apart_in_the_file_or_in_two_splits(tmp_path: Path) -> None:
    image, text = vectors(6, 1)
    twice = {"image": np.concatenate([image, image]), "text": np.concatenate([text, text + 1])[:, 0]}
    joined = read(tmp_path, **twice)
    assert joined.captions.tolist() == [2] * 6
    assert np.array_equal(joined.text[1], text[0, 0] + 1)
    split = np.array(["train"] * 6 + ["test"] * 6)
    apart = read(tmp_path, **twice, split=split)
    assert len(apart.image) == 12
    assert "6 items of val and test have the image of a training item" in sentences(apart.warnings)
    keyed = read(tmp_path, **twice, keys=np.array([f"k{i}" for i in range(12)]))
    assert len(keyed.image) == 12
    assert (keyed.split[:6] == keyed.split[6:]).all()


def test_labels_of_an_images_rows_are_all_its_labels(tmp_path: Path) -> None:
    image, text = vectors(4, 1)
    found = read(
        tmp_path, image=image[[0, 1, 1, 2]], text=text[:, 0], labels=np.array([[1, 0], [1, 0], [0, 1], [0, 1]])
    )
    assert found.labels is not None
    assert found.labels.tolist() == [[1, 0], [1, 1], [0, 1]]


# --- captions that are cut ------------------------------------------------------------------------------------------


def photos(folder: Path, captions: list[str]) -> Data:
    for row in range(len(captions)):
        pixels = np.random.default_rng(row).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
    lines = [json.dumps({"image": f"{row}.png", "captions": [text]}) for row, text in enumerate(captions)]
    (folder / "list.jsonl").write_text("\n".join(lines))
    return Data(name="manifest", path=folder / "list.jsonl")


LONG = "examination of the site was done as ordered and nothing else was seen there; " * 25


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["lite", "tiny"])
def test_captions_longer_than_the_encoder_reads_are_counted_and_the_first_is_named(
    tmp_path: Path, backbone: str
) -> None:
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    }
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    name = str(tmp_path / "tiny.json") if backbone == "tiny" else backbone
    texts = [f"{LONG * (row > 1)}finding {row}" for row in range(5)]
    warnings = prepare(photos(tmp_path, texts), Backbone(name=name), tmp_path / "cache").meta.warnings
    assert (warnings.cut, warnings.first_cut, warnings.same_texts) == (3, "2.png", 2)
    assert any("3 captions were cut" in line and line.endswith("2.png") for line in sentences(warnings))


WORDS = st.sampled_from(["a", "dog ", "ü", "犬", "zebra-like "])


@pytest.mark.slow
@given(st.lists(st.builds(str.__mul__, WORDS, st.integers(1, 90)), min_size=5, max_size=10))
@settings(max_examples=8)
def test_a_text_is_cut_exactly_if_the_tokeniser_drops_its_end(texts: list[str]) -> None:
    import open_clip

    from fedmq.encoders import clip

    tokens = open_clip.get_tokenizer("ViT-B-32", context_length=1000)(texts)
    assert clip.cut("ViT-B-32", [*texts, "a dog"]) == [*((tokens > 0).sum(dim=1) > 77).tolist(), False]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_held_out_items_with_the_image_vector_of_a_training_item_are_counted(items: list[tuple[int, int]]) -> None:
    image, split = np.eye(6)[[image for image, _ in items]], np.array([code for _, code in items], np.uint8)
    found = of_vectors(image, image, np.ones(len(items), np.int64), split=split)
    trained = {image for image, code in items if SPLITS[code] == "train"}
    assert found.known == sum(SPLITS[code] in ("val", "test") and image in trained for image, code in items)
    public = {image for image, code in items if SPLITS[code] == "public"} - trained
    assert found.public == sum(SPLITS[code] in ("val", "test") and image in public for image, code in items)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ({"a": 4, "b": 1}, "every item has the label a, so each item is relevant to all others"),
        ({"a": 2, "b": 0, "c": 0}, "2 of 3 labels have no item: b, c"),
        ({"a": 1, "b": 1, "coarse:x": 4}, "no label has two items, so only an item's own texts are relevant to it"),
        ({"Dog": 2, "dog": 3, "cat": 2}, "2 labels differ only in spelling: Dog, dog"),
        ({"X-ray": 2, "x ray": 1, "xray.": 1}, "3 labels differ only in spelling: X-ray, x ray, xray."),
        ({"None": 2, "N/A": 1, "cat": 2}, "3 items with a label that often stands for a missing value: None, N/A"),
    ],
)
def test_labels_that_are_probably_unintended_are_reported(counts: dict[str, int], line: str) -> None:
    assert of_labels(counts, 4) == [line]


def test_ordinary_labels_get_no_remark() -> None:
    assert of_labels({"cat": 3, "dog": 2, "coarse:pet": 4}, 4) == of_labels({}, 4) == []
    assert of_spellings(["C", "C++", "T1-2", "T12", "level 1 2", "level 12", "1", "1.5"]) == []


# --- labels of held-out items ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(SPLITS), st.sets(st.integers(0, 3), max_size=3)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_held_out_labels_that_distinguish_no_items_are_reported(items: list[tuple[str, set[int]]]) -> None:
    labels = np.array([[column in held for column in range(4)] for _, held in items], np.uint8)
    split = np.array([SPLITS.index(name) for name, _ in items], np.uint8)
    lines = of_heldout_labels(labels, ("a", "b", "c", "coarse:d"), split)
    for name in ("val", "test"):
        fine = [held - {3} for split_name, held in items if split_name == name]
        none = bool(fine) and not any(fine) and any(held - {3} for _, held in items)
        assert (f"no item of {name} has a label, so no item is relevant to another one there" in lines) == none
        shared = set.intersection(*fine) - set.intersection(*(held for _, held in items)) if fine else set()
        told = any(line.startswith(f"every item of {name} has the label") for line in lines)
        assert told == (bool(shared - {3}) and len(fine) >= 5)


def test_sites_of_a_column_that_differ_only_in_spelling_are_reported(tmp_path: Path) -> None:
    image, text = vectors(12, 1)
    site = np.array(["Oslo", "oslo ", "bergen"] * 4)
    np.savez(tmp_path / "x.npz", image=image, text=text[:, 0], site=site)
    data = Data(name="features", path=tmp_path / "x.npz", column="site")
    made = prepare(data, Backbone(name="features"), tmp_path / "cache")
    assert made.warnings == ["2 values of the column of partition.column differ only in spelling: Oslo, oslo "]


# --- the same vector twice ------------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(2, 20), st.floats(0.0, 1e-4), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_vectors_of_one_image_that_was_encoded_twice_are_near_and_no_others(
    n: int, width: int, error: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    others = generator.normal(size=(n, width)).astype(np.float32)
    again = others[::-1] * 3 + error * generator.normal(size=(n, width)).astype(np.float32)
    new = generator.normal(size=(n, width)).astype(np.float32)
    both = np.concatenate([again, new, np.zeros((1, width), np.float32)])
    unit = [each / np.maximum(np.linalg.norm(each, axis=1, keepdims=True), 1e-9) for each in (both, others)]
    apart = np.linalg.norm(unit[0][:, None] - unit[1], axis=2).min(axis=1)
    clear = np.abs(apart - NEAR) > 1e-5  # float32 and float64 may disagree at the limit itself
    assert np.array_equal(nearly_equal(both, others)[clear], (apart <= NEAR)[clear])
    if width > 5:
        assert nearly_equal(again, others).all()


def test_held_out_items_with_nearly_the_vector_of_a_training_item_are_counted(tmp_path: Path) -> None:
    image, text = vectors(12, 1)
    image[8] = image[0] * np.float32(1.00001)
    image[9, 0] = image[1, 0] + 1e-4
    image[9, 1:] = image[1, 1:]
    image[10] = image[2]
    split = np.array(["train"] * 6 + ["test"] * 6)
    warnings = read(tmp_path, image=image, text=text[:, 0], split=split).warnings
    assert (warnings.known, warnings.near) == (1, 2)
    assert any(line.startswith("2 items of val and test have nearly the image vector") for line in sentences(warnings))


def test_test_items_of_one_image_are_counted_with_what_recall_can_reach(tmp_path: Path) -> None:
    image, text = vectors(12, 1)
    image[[7, 8]], image[9] = image[6], image[10] * np.float32(1.00001)
    split, keys = np.array(["train"] * 6 + ["test"] * 6), np.array([f"k{row}" for row in range(12)])
    warnings = read(tmp_path, image=image, text=text[:, 0], split=split, keys=keys).warnings
    assert (warnings.tested, warnings.repeated) == (6, 3)
    assert any(line.startswith("3 of 6 test items have") and "at most 0.50" in line for line in sentences(warnings))


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20))
@settings(max_examples=40, deadline=None)
def test_captions_that_are_copies_of_their_image_vector_are_counted(captions: list[int]) -> None:
    counts = np.array(captions, np.int64)
    generator = np.random.default_rng(0)
    image = generator.normal(size=(len(counts), 4))
    owner = np.repeat(np.arange(len(counts)), np.maximum(counts, 1))
    copied = generator.random(len(owner)) < 0.5
    text = np.where(copied[:, None], image[owner], generator.normal(size=(len(owner), 4)))
    held = counts[owner] > 0
    text[~held] = 0  # the row of an item without captions
    assert of_vectors(image, text, counts).copies == int((copied & held).sum())


# --- captions that are no sentences ---------------------------------------------------------------------------------

SENTENCES = ("a dog at 3.5 km", "l’île à São João & Co.", "IRMÃ", "<3 of them, a > b", "saved as jpg", "NÃO, Â", "犬")


def test_ordinary_captions_get_no_remark() -> None:
    assert not any(of_captions(SENTENCES).values())


@given(st.text(st.sampled_from("äöüéèñçßØÅ€–’😀°£"), min_size=1), st.sampled_from(["latin-1", "cp1252"]))
@settings(max_examples=60)
def test_captions_in_utf_8_that_were_read_in_another_encoding_are_counted(text: str, encoding: str) -> None:
    garbled = f"a {text} dog".encode().decode(encoding, "replace")
    assert of_captions([garbled, f"a {text} dog"])["garbled"] == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("scans/Patient 3.TIFF ", "file_names"),
        (" n/a", "placeholders"),
        ("Tom &amp; Jerry", "markup"),
        ("a dog<br/>a cat", "markup"),
    ],
)
def test_captions_that_are_no_sentences_are_counted(text: str, kind: str) -> None:
    assert [name for name, count in of_captions([text, "a dog"]).items() if count] == [kind]


#: 16 items of 8 images, each image twice: in training, then in test.
TWICE = [(image, "train" if image < 4 else "test", part) for image in range(8) for part in range(2)]


def _encoded(image: int, part: int) -> bytes:
    """The same pixels in two different files."""
    pixels, file = np.random.default_rng(image).integers(0, 255, (8, 8, 3), np.uint8), io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=9 * part)
    return file.getvalue()


def _parquet(folder: Path) -> Data:
    columns = {
        "image": [{"bytes": _encoded(image, part), "path": None} for image, _, part in TWICE],
        "caption": [f"scene {image} part {part}" for image, _, part in TWICE],
        "split": [split for _, split, _ in TWICE],
    }
    pyarrow.parquet.write_table(pa.table(columns), folder / "data.parquet")
    return Data(name="parquet", path=folder)


def _files(folder: Path) -> Data:
    with (folder / "list.jsonl").open("w") as file:
        for image, split, part in TWICE:
            (folder / f"{image}-{part}.png").write_bytes(_encoded(image, part))
            line = {"image": f"{image}-{part}.png", "captions": [f"scene {image} part {part}"], "split": split}
            file.write(json.dumps(line) + "\n")
    return Data(name="manifest", path=folder / "list.jsonl")


def _folder(folder: Path) -> Data:
    for name in ("train", "test"):
        (folder / name).mkdir()
        lines = ["file_name,text"]
        for image, split, part in TWICE:
            if split == name:
                (folder / name / f"{image}-{part}.png").write_bytes(_encoded(image, part))
                lines.append(f"{image}-{part}.png,scene {image} part {part}")
        (folder / name / "metadata.csv").write_text("\n".join(lines) + "\n")
    return Data(name="folder", path=folder)


def _tars(folder: Path) -> Data:
    for name in ("train", "test"):
        with tarfile.open(folder / f"{name}-000000.tar", "w") as archive:
            for image, split, part in TWICE:
                if split == name:
                    add(archive, f"{image}-{part}.png", _encoded(image, part))
                    add(archive, f"{image}-{part}.txt", f"scene {image} part {part}".encode())
    return Data(name="webdataset", path=folder)


CEILING = "4 of 8 test items have the image of another one, as each is an item of its own: from image to text, R@1 can"


@pytest.mark.parametrize("layout", [_parquet, _files, _folder, _tars])
def test_images_that_are_several_items_are_told_in_every_layout_before_they_are_encoded(
    tmp_path: Path, layout: Callable[[Path], Data]
) -> None:
    facts = check_raw(layout(tmp_path))
    assert (facts.items, facts.problems) == (16, ())
    assert f"{CEILING} reach at most 0.50" in sentences(facts.warnings or DataWarnings())


@pytest.mark.parametrize("kind", ["a key per row", "a last bit", "pixels"])
def test_images_that_are_several_items_are_told_of_what_is_trained_on(tmp_path: Path, kind: str) -> None:
    image, text = vectors(8, 2)
    rows, split = np.repeat(image, 2, 0), np.array([split for _, split, _ in TWICE])
    if kind == "a last bit":
        rows[1::2, 0] = np.nextafter(rows[1::2, 0], np.float32(9))
    if kind == "pixels":
        pixels, codes = (rows[:, :3, None, None] * 50).astype(np.int8).view(np.uint8), [*map(SPLITS.index, split)]
        words = np.arange(16)[:, None] + np.ones((1, 5), np.int64)
        found = of_vectors(pixels, words, np.ones(16, np.int64), split=np.array(codes, np.uint8))
    else:
        keys = np.array([f"item {row}" for row in range(16)])
        found = read(tmp_path, image=rows, text=text.reshape(16, 5), split=split, keys=keys).warnings
    assert f"{CEILING} reach at most 0.50" in sentences(found)
