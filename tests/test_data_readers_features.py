"""Feature files: what is read, and that errors name the file and the key."""

from __future__ import annotations

import json
import tempfile
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from fedmq.config.scenario import Backbone, Data
from fedmq.data.prepare import prepare
from fedmq.data.readers.features import read_features
from fedmq.data.readers.formats import Stored
from fedmq.errors import InputError
from tests.array_files import feature_arrays

SHARED = Path(__file__).parents[2] / "shared" / "data"


def saved(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "set.npz"
    np.savez(path, **{key: value for key, value in {**feature_arrays(), **changes}.items() if value is not None})
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


def test_a_prepared_set_says_where_its_split_comes_from_and_what_was_ignored(tmp_path: Path) -> None:
    def notes(path: Path) -> list[str]:
        return prepare(Data(name="features", path=path), Backbone(name="features"), tmp_path / "cache").notes

    given = ["split: from the files: 7 train, 1 val, 1 test, 1 public", "ignored, other arrays (1): weather"]
    assert notes(saved(tmp_path, weather=np.zeros(10))) == given
    assert notes(saved(tmp_path, split=None)) == ["split: drawn, because the files say none: 8 train, 1 val, 1 test"]


def test_the_version_of_safetensors_that_scrambles_fortran_order_is_excluded() -> None:
    needed = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [Requirement(line) for line in needed if line.startswith("safetensors")]
    assert not found.specifier.contains("0.8.0") and found.specifier.contains("0.7.0")


def test_safetensors_files_are_read_with_split_numbers_and_label_names(tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    given_ = {**feature_arrays(), "split": np.array([0, 0, 0, 0, 0, 0, 0, 1, 2, 3]), "labels": np.array([0, 1] * 5)}
    save_file(given_, path, metadata={"label_names": json.dumps(["cat", "dog"])})
    found = read_features(path)
    assert found.label_names == ("cat", "dog")
    assert found.split.tolist() == [0] * 7 + [1, 2, 3]


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
    given_text = feature_arrays()["text"].astype(np.float32)
    assert np.array_equal(found.text[:3], np.concatenate([given_text[0, :1], given_text[1, :2]]))


def test_without_a_split_a_random_one_is_drawn_from_the_seed(tmp_path: Path) -> None:
    path = saved(tmp_path, split=None)
    found = read_features(path, 5)
    assert not found.split_given
    assert np.bincount(found.split).tolist() == [8, 1, 1]
    assert (found.split == read_features(path, 5).split).all()
    assert any((found.split != read_features(path, other).split).any() for other in range(6, 12))


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
        path = saved(Path(folder), **{**feature_arrays(8), key: strings})
        for read in (partial(read_features, path), Stored(path, key, strings.shape, strings=True).read):
            try:
                read()
            except InputError as error:
                assert "\n" not in str(error)
            else:
                assert number <= 0x10FFFF


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


@pytest.mark.slow
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
def test_two_classes_are_the_same_labels_in_every_shape_type_and_file(tmp_path: Path, labels: Any) -> None:
    image, text = np.random.default_rng(0).normal(size=(2, 10, 3))
    expected = np.eye(2, dtype=np.uint8)[COLUMN]
    stored = labels.astype(np.uint8) if labels.dtype.kind == "b" else labels
    scipy.io.savemat(tmp_path / "x.mat", {"IAll": image, "YAll": text, "LAll": stored})
    data = Data(name="mirflickr", path=tmp_path / "x.mat", queries=2, train=5)
    assert (prepare(data, Backbone(name="features"), tmp_path / "cache").labels == expected).all()
    np.savez(tmp_path / "x.npz", image=image, text=text, labels=labels)
    arrays = {"image": image, "text": text, "labels": np.ascontiguousarray(labels)}
    save_file(arrays, tmp_path / "x.safetensors")
    for ending in ("npz", "safetensors"):
        assert (read_features(tmp_path / f"x.{ending}").labels == expected).all()


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
    changed = {name: np.array(feature_arrays()[name], np.float32) for name in ("image", "text")}
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
    text = np.array(feature_arrays()["text"], np.float32)
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


def test_texts_of_more_captions_than_numbers_are_read_where_the_captions_differ_in_number(tmp_path: Path) -> None:
    image, text = np.random.default_rng(0).normal(size=(10, 6)), np.random.default_rng(1).normal(size=(10, 6, 3))
    many = read_features(saved(tmp_path, image=image, text=text, captions=np.arange(10) % 6 + 1))
    assert many.captions.max() == 6
    text[4, 5] = 0  # padding, so that the second axis counts captions
    assert read_features(saved(tmp_path, image=image, text=text)).captions.min() == 5
