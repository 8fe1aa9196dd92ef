"""Feature files: what is read, and that errors name the file and the key."""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fedmq.config.scenario import Backbone, Data
from fedmq.data.labels import label_array
from fedmq.data.prepare import prepare
from fedmq.data.readers.array_files import Stored
from fedmq.data.readers.features import read_features
from fedmq.data.splits import draw_split
from fedmq.errors import InputError

SHARED = Path(__file__).parents[2] / "shared" / "data"


def arrays(n: int = 10, captions: int = 3) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "image": generator.standard_normal((n, 6)).astype(np.float32),
        "text": generator.standard_normal((n, captions, 5)).astype(np.float16),
        "split": np.array(["train"] * (n - 3) + ["val", "test", "public"]),
    }


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "set.npz"
    np.savez(path, **{key: value for key, value in {**arrays(), **changes}.items() if value is not None})
    return path


def test_a_feature_file_is_read_with_its_split(tmp_path: Path) -> None:
    found = read_features(saved(tmp_path))
    assert found.image.shape == (10, 6)
    assert found.text.shape == (30, 5)
    assert found.image.dtype == found.text.dtype == np.float32
    assert found.split.tolist() == [0] * 7 + [1, 2, 3]
    assert found.split_given
    assert found.captions.tolist() == [3] * 10
    assert found.labels is None
    assert found.keys[3] == "000003"


def test_text_without_a_caption_axis_is_read_as_one_caption_per_item(tmp_path: Path) -> None:
    assert read_features(saved(tmp_path, text=np.ones((10, 5)))).text.shape == (10, 5)


def test_safetensors_files_are_read_with_split_numbers_and_label_names(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    given_ = {**arrays(), "split": np.array([0, 0, 0, 0, 0, 0, 0, 1, 2, 3]), "labels": np.array([0, 1] * 5)}
    save_file(given_, path, metadata={"label_names": json.dumps(["cat", "dog"])})
    found = read_features(path)
    assert found.label_names == ("cat", "dog")
    assert found.split.tolist() == [0] * 7 + [1, 2, 3]


def test_class_numbers_are_read_as_one_hot_rows(tmp_path: Path) -> None:
    found = read_features(saved(tmp_path, labels=np.array([0, 2] * 5)))
    assert found.labels is not None
    assert found.labels[:2].tolist() == [[1, 0, 0], [0, 0, 1]]
    assert found.label_names == ("label-000", "label-001", "label-002")


def test_multi_hot_labels_keep_their_rows_and_names(tmp_path: Path) -> None:
    multi = np.array([[1, 1, 0], [0, 0, 0]] * 5, dtype=np.int64)
    found = read_features(saved(tmp_path, labels=multi, label_names=np.array(["a", "b", "c"])))
    assert found.labels is not None
    assert found.labels.dtype == np.uint8
    assert (found.labels == multi).all()
    assert found.label_names == ("a", "b", "c")


def test_rows_beyond_an_items_captions_are_left_out_whatever_they_hold(tmp_path: Path) -> None:
    found = read_features(saved(tmp_path, captions=np.array([1, 2, 3, 3, 3, 3, 3, 3, 3, 3])))
    assert found.text.shape == (27, 5)
    given_text = arrays()["text"].astype(np.float32)
    assert np.array_equal(found.text[:3], np.concatenate([given_text[0, :1], given_text[1, :2]]))


def test_without_a_split_a_random_one_is_drawn_from_the_seed(tmp_path: Path) -> None:
    path = saved(tmp_path, split=None)
    found = read_features(path, 5)
    assert not found.split_given
    assert np.bincount(found.split).tolist() == [8, 1, 1]
    assert (found.split == read_features(path, 5).split).all()
    assert any((found.split != read_features(path, other).split).any() for other in range(6, 12))


@pytest.mark.parametrize("header", ["{'descr': '<f8', 'shape': (10, 6, ", "  {'descr'\n x", "{'shape': 3}"])
def test_a_damaged_array_header_is_a_one_line_error(header: str, tmp_path: Path) -> None:
    padded = header.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as file:
        for key in ("image", "text"):
            file.writestr(f"{key}.npy", b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded)
    with pytest.raises(InputError, match=r"set\.npz") as caught:
        read_features(tmp_path / "set.npz")
    assert "\n" not in str(caught.value)


@given(
    number=st.integers(0, 0x10FFFF) | st.integers(0x110000, 2**32 - 1),
    key=st.sampled_from(["split", "keys", "label_names"]),
    order=st.sampled_from("<>"),
)
@settings(max_examples=40)
def test_a_string_with_a_number_that_is_no_character_is_a_one_line_error(number: int, key: str, order: str) -> None:
    numbers = np.array(["train"] * 8).view(np.uint32)
    numbers[1] = number
    with tempfile.TemporaryDirectory() as folder:
        strings = numbers.astype(f"{order}u4").view(f"{order}U5")
        path = saved(Path(folder), **{**arrays(8), key: strings})
        for read in (partial(read_features, path), Stored(path, key, strings.shape, strings=True).read):
            try:
                read()
            except InputError as error:
                assert "\n" not in str(error)
            else:
                assert number <= 0x10FFFF


@given(n=st.integers(2, 400), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_a_random_split_always_has_train_and_test_items(n: int, seed: int) -> None:
    counts = np.bincount(draw_split(n, seed), minlength=3)
    assert counts[0] >= 1
    assert counts[2] >= 1
    assert counts[1] == n // 10


@given(st.integers(2, 6), st.integers(2, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_class_numbers_are_the_same_in_every_shape_and_type(classes: int, n: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, classes, n)
    shapes = (numbers, numbers[:, None], numbers[None], numbers.astype(float), numbers[:, None].astype(np.float32))
    for value in (*shapes, *([numbers[:, None] == 1] if numbers.max() <= 1 else [])):
        found = label_array("x", value, n)
        assert (found.dtype, found.shape) == (np.int64, (n,)) and np.array_equal(found, numbers)
    one_hot = label_array("x", np.eye(classes)[numbers], n)
    assert (one_hot.dtype, one_hot.shape) == (np.uint8, (n, classes))
    assert np.array_equal(one_hot.argmax(axis=1), numbers)


@given(st.lists(st.integers(1, 5), min_size=4, max_size=9), st.integers(30, 90))
@settings(max_examples=15, deadline=None)
def test_captions_take_the_room_of_their_number_however_many_one_item_has(counts: list[int], many: int) -> None:
    counts = [*counts, many]
    generator = np.random.default_rng(many)
    rows = [generator.normal(size=(count, 3)).astype(np.float32) for count in counts]
    padded = np.stack([np.pad(each, ((0, many - len(each)), (0, 0))) for each in rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f.npz"
        np.savez(path, image=generator.normal(size=(len(counts), 2)), text=padded, captions=np.array(counts))
        found = read_features(path)
    assert np.array_equal(found.text, np.concatenate(rows))
    assert found.captions.tolist() == counts


NAN, HUGE = np.ones((10, 6)), np.ones((10, 6))
NAN[4, 2] = np.nan
HUGE[7, 0] = 1e300
SPLIT = arrays()["split"]


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"image": None, "text": None}, "image", "no such key.*or both"),
        ({"text": None, "captions": None, "text_present": SPLIT == "train"}, "text_present", "items with text"),
        ({"image": NAN}, "image", "row 4"),
        ({"image": HUGE}, "image", "row 7.*finite float32"),
        ({"image": np.ones((10, 6), dtype=np.int32)}, "image", "dtype int32.*float16, float32, float64"),
        ({"image": np.ones(10)}, "image", r"shape \[10\].*2 dimensions"),
        ({"image": np.ones((10, 0))}, "image", r"shape \[10, 0\]"),
        ({"text": np.ones((9, 5))}, "text", "9 items.*10"),
        ({"text": np.ones((10, 2, 3, 4))}, "text", "2 or 3 dimensions"),
        ({"captions": np.zeros(10, dtype=int)}, "captions", "0 in row 0.*1 to 3"),
        ({"captions": np.full(10, 4)}, "captions", "4 in row 0"),
        ({"captions": np.ones(9, dtype=int)}, "captions", r"\[10\]"),
        ({"captions": np.ones(10)}, "captions", "float64"),
        ({"labels": np.array([0, -1] * 5)}, "labels", "-1"),
        ({"labels": np.full(10, 10**9)}, "labels", "1000000000"),
        ({"labels": np.full((10, 2), 2)}, "labels", "0 and 1"),
        ({"labels": np.zeros((9, 2), dtype=int)}, "labels", r"\[9, 2\]"),
        ({"labels": np.array([0, 5] * 5), "label_names": np.array(["a", "b"])}, "labels", "5.*0 to 1"),
        ({"labels": np.zeros((10, 2), dtype=int), "label_names": np.array(["a"])}, "label_names", r"\[2\]"),
        ({"labels": np.zeros((10, 2), dtype=int), "label_names": np.array(["a", "a"])}, "label_names", "twice"),
        ({"split": np.array(["train"] * 9 + ["tset"])}, "split", "'tset' in row 9.*train, val, test, public"),
        ({"split": np.array([0] * 9 + [5])}, "split", "5 in row 9"),
        ({"split": np.array(["train"] * 10)}, "split", "no test item"),
        ({"split": np.array(["test"] * 10)}, "split", "no train item"),
        ({"split": SPLIT[:9]}, "split", r"\[10\]"),
        ({"split": np.ones(10)}, "split", "float64"),
        ({"keys": np.array(["a"] * 10)}, "keys", "'a' twice"),
        ({"keys": np.array([*"abcdefghi", "cut \ud83d"])}, "keys", "whole characters of Unicode"),
        ({"labels": np.array([{"a": 1}] * 10, dtype=object)}, "labels", "Object arrays cannot be loaded"),
        ({"lables": np.zeros(10, dtype=int)}, "lables", "did you mean labels"),
    ],
)
def test_errors_in_a_feature_file_name_the_file_and_the_key(
    tmp_path: Path, changes: dict[str, Any], key: str, words: str
) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(InputError, match=words) as caught:
        read_features(path)
    assert caught.value.place == f"{path}: {key}"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.npz", None, "no such file"),
        ("a.npz", b"", "npz"),
        ("b.npz", b"no zip file at all", "npz"),
        ("c.npz", b"PK\x03\x04" + bytes(60), "npz"),
        ("d.npz", b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94.", "npz"),
        ("e.safetensors", b"", "safetensors"),
        ("f.safetensors", bytes(100), "safetensors"),
        ("g.safetensors", b"\xff" * 100, "safetensors"),
        ("h.csv", b"1,2", r"\.npz or \.safetensors"),
        ("i", b"1", "no ending"),
    ],
)
def test_an_unreadable_feature_file_is_a_one_line_error(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_features(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.99])
def test_a_truncated_archive_is_refused(tmp_path: Path, cut: float) -> None:
    path = saved(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * cut)])
    with pytest.raises(InputError, match=re.escape(str(path))):
        read_features(path)


def test_a_single_array_with_the_wrong_file_ending_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(InputError, match="not a zip file"):
        read_features(path)


def test_a_single_item_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 2"):
        read_features(saved(tmp_path, image=np.ones((1, 2)), text=np.ones((1, 2)), split=None))


@pytest.mark.parametrize(("name", "shape"), [("aligned", (512, 512)), ("features", (1280, 384))])
def test_the_flickr8k_files_are_read(name: str, shape: tuple[int, int]) -> None:
    path = SHARED / "flickr8k" / f"{name}.npz"
    if not path.is_file():
        pytest.skip("shared data not there")
    found = read_features(path)
    assert found.image.shape == (8000, shape[0])
    assert found.text.shape == (40_000, shape[1])
    assert np.bincount(found.split, minlength=4)[2] == 1000
    assert found.keys[0].endswith(".jpg")


def test_the_wikipedia_file_is_read_except_for_its_pickled_labels(tmp_path: Path) -> None:
    path = SHARED / "wikipedia" / "features.npz"
    if not path.is_file():
        pytest.skip("shared data not there")
    # Its labels are a pickled scipy matrix, which must never be loaded.
    with pytest.raises(InputError, match=r"labels.*Object arrays cannot be loaded"):
        read_features(path)
    with np.load(path, allow_pickle=False) as opened:
        plain = {key: opened[key] for key in ("image", "text", "split")}
    np.savez(tmp_path / "plain.npz", **plain)
    found = read_features(tmp_path / "plain.npz")
    # Six of its 2,866 rows repeat an image of their split: six items have two captions.
    assert found.image.shape == (2860, 128) and found.text.shape[0] == found.captions.sum() == 2866
    split = np.bincount(np.repeat(found.split, found.captions), minlength=4)
    assert split.tolist() == [2173, 0, 693, 0]


COLUMN = np.array([0, 1] * 5)


@pytest.mark.parametrize(
    "labels",
    [COLUMN, COLUMN[:, None], COLUMN[None], COLUMN + 1, COLUMN[:, None] + 1, COLUMN[:, None] == 1, COLUMN.astype(float),
     COLUMN[:, None].astype(np.float32), np.eye(2, dtype=int)[COLUMN], 2 * np.eye(2)[COLUMN] - 1, COLUMN.astype("u8")],
    ids=["flat", "column", "row", "from 1", "column from 1", "bools", "floats", "float column", "one-hot", "-1 and 1",
         "u8"],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["npz", "safetensors", "mat"])
def test_two_classes_are_the_same_labels_in_every_shape_type_and_file(tmp_path: Path, labels: Any, ending: str) -> None:
    image, text = np.random.default_rng(0).normal(size=(2, 10, 3))
    path, expected = tmp_path / f"x.{ending}", np.eye(2, dtype=np.uint8)[COLUMN]
    if ending == "mat":
        stored = labels.astype(np.uint8) if labels.dtype.kind == "b" else labels
        scipy.io.savemat(path, {"IAll": image, "YAll": text, "LAll": stored})
        data = Data(name="mirflickr", path=path, queries=2, train=5)
        prepared = prepare(data, Backbone(name="features"), tmp_path / "cache")
        assert (prepared.labels == expected).all()
        return
    if ending == "npz":
        np.savez(path, image=image, text=text, labels=labels)
    else:
        save_file({"image": image, "text": text, "labels": np.ascontiguousarray(labels)}, path)
    assert (read_features(path).labels == expected).all()


def test_a_column_of_a_single_named_label_is_that_label(tmp_path: Path) -> None:
    found = read_features(saved(tmp_path, labels=COLUMN[:, None], label_names=np.array(["cat"])))
    assert found.label_names == ("cat",)
    assert (found.labels == COLUMN[:, None]).all()


@pytest.mark.parametrize(("lacks", "width"), [("text", 6), ("image", 5)])
def test_a_file_of_one_modality_needs_no_key_for_the_other(tmp_path: Path, lacks: str, width: int) -> None:
    found = read_features(saved(tmp_path, **{lacks: None}))
    assert found.present is not None
    assert found.present.all(axis=0).tolist() == [lacks != "image", lacks != "text"]
    assert not found.present[:, int(lacks == "text")].any()
    assert (found.image if lacks == "text" else found.text).shape[-1] == width


@given(exponent=st.floats(-44, 37), which=st.sampled_from(["image", "text"]), row=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_vectors_of_any_scale_are_refused_or_have_unit_length_in_float32(exponent: float, which: str, row: int) -> None:
    changed = {name: np.array(arrays()[name], np.float32) for name in ("image", "text")}
    changed[which][row] *= np.float32(10.0**exponent)
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder), **changed)
        try:
            found = read_features(path)
        except InputError as error:
            assert not -9 < exponent < 14
            assert f"set.npz: {which}: found" in str(error) and f"in row {row}" in str(error)
            return
    for vectors in (found.image, found.text):
        some = torch.from_numpy(vectors[vectors.any(axis=1)])
        lengths = torch.linalg.vector_norm(torch.nn.functional.normalize(some, dim=1), dim=1)
        assert torch.allclose(lengths, torch.ones(len(some)), atol=1e-5)


def test_rows_after_an_items_captions_may_have_any_scale(tmp_path: Path) -> None:
    text = np.array(arrays()["text"], np.float32)
    text[:, 1:] = 1e-30
    assert read_features(saved(tmp_path, text=text, captions=np.ones(10, np.int64))).captions.sum() == 10


# --- the numbers of classes -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=2, max_size=9), st.booleans())
@settings(max_examples=60, deadline=None)
def test_class_numbers_name_the_labels_that_they_count_or_are_refused(classes: list[int], from_1: bool) -> None:
    names, numbers = np.array(list("abcdefg")), np.array(classes) + from_1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npz"
        stored = {"image": np.eye(len(numbers)), "text": np.eye(len(numbers)), "labels": numbers, "label_names": names}
        np.savez(path, **stored)
        if 0 not in numbers and 7 not in numbers:
            with pytest.raises(InputError, match=r"class numbers \d to \d for 7 label_names', allowed: a key first_"):
                read_features(path)
            np.savez(path, **stored, first_class=int(from_1))
        found = read_features(path)
        assert found.labels is not None
        assert [found.label_names[row.argmax()] for row in found.labels] == [names[each] for each in classes]


@pytest.mark.parametrize(
    ("first_class", "numbers", "message"),
    [
        (2, [0, 1], "first_class: found 2, allowed: 0 or 1, the number of the first class"),
        ([0, 1], [0, 1], r"first_class: found 'int64 \[2\]', allowed: 0 or 1"),
        ("1", [1, 2], "first_class: found '1', allowed: 0 or 1"),
        (1, [0, 1], "labels: found 0, allowed: class numbers 1 to 3"),
        (0, [0, 3], "labels: found 3, allowed: class numbers 0 to 2"),
        (1, [1, 4], "labels: found 4, allowed: class numbers 1 to 3"),
    ],
)
def test_class_numbers_outside_the_stated_ones_are_refused(
    tmp_path: Path, first_class: object, numbers: list[int], message: str
) -> None:
    stated = {"labels": np.array(numbers * 5), "label_names": np.array(list("abc")), "first_class": first_class}
    with pytest.raises(InputError, match=message):
        read_features(saved(tmp_path, **{name: np.array(value) for name, value in stated.items()}))


@pytest.mark.parametrize("stated", [False, True])
def test_texts_with_the_captions_in_the_last_axis_are_refused(tmp_path: Path, stated: bool) -> None:
    image, text = np.random.default_rng(0).normal(size=(10, 6)), np.random.default_rng(1).normal(size=(10, 3, 6))
    captions = {"captions": np.full(10, 3)} if stated else {}
    turned = np.ascontiguousarray(text.transpose(0, 2, 1))
    with pytest.raises(InputError, match=r"text: found 'shape \[10, 6, 3\]: 6 captions of 3 numbers for each item"):
        read_features(saved(tmp_path, image=image, text=turned, **captions))
    many = read_features(saved(tmp_path, image=image, text=turned, captions=np.arange(10) % 6 + 1))
    assert many.captions.max() == 6
    turned[4, 5] = 0  # padding, so that the second axis counts captions
    assert read_features(saved(tmp_path, image=image, text=turned)).captions.min() == 5


def test_one_image_in_all_rows_is_refused_by_name(tmp_path: Path) -> None:
    split = np.array(["train"] * 6 + ["test"] * 4)
    with pytest.raises(InputError, match="the same image in all 10 rows"):
        read_features(saved(tmp_path, image=np.ones((10, 6)), text=np.eye(10), split=split))


@pytest.mark.parametrize("name", ["image_test", "text_val", "X_train", "query_images"])
def test_vectors_of_a_part_next_to_those_of_all_items_are_refused_instead_of_ignored(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: found 'an array of a part of the items"):
        read_features(saved(tmp_path, **{name: np.ones((4, 6))}))
    read_features(saved(tmp_path, **{f"{name}_ids": np.arange(4), "hospital": np.ones((10, 2))}))
