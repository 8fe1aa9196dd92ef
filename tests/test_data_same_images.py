"""Images are known by their content: in cache keys, in splits that are drawn, and in the data check."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fedmq.config.scenario import Backbone, Data
from fedmq.data import splits
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import Prepared
from fedmq.data.readers.features import read_features
from fedmq.data.splits import SPLITS, Draw, draw_parts, draw_split, first_of_equals, same_rows
from fedmq.errors import InputError
from fedmq.launch.data_check import check_raw
from fedmq.seeds import numpy_generator
from tests.read_data_sets import read


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMQ_CACHE", str(tmp_path / "cache"))


def photo(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def photos(folder: Path, seeds: list[int], ending: str = "bmp", split: bool = True) -> Path:
    """A manifest of one photo for each seed; all files have the same size, and a time of change of 0."""
    lines = []
    for row, seed in enumerate(seeds):
        photo(folder / f"{row:02d}.{ending}", seed)
        os.utime(folder / f"{row:02d}.{ending}", (0, 0))
        line = {"image": f"{row:02d}.{ending}", "captions": [f"thing {row}"]}
        lines.append(line | ({"split": "train" if row < len(seeds) // 2 else "test"} if split else {}))
    path = folder / "list.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepared(path: Path, cache: Path) -> Prepared:
    return prepare(Data(name="manifest", path=path), Backbone(name="lite"), cache)


def test_a_image_replaced_by_one_of_the_same_size_and_time_is_another_data_set(tmp_path: Path) -> None:
    path = photos(tmp_path / "a", [0, 1, 2])
    before = prepared(path, tmp_path / "cache")
    photo(tmp_path / "a" / "01.bmp", 77)
    os.utime(tmp_path / "a" / "01.bmp", (0, 0))
    after = prepared(path, tmp_path / "cache")
    assert (before.digest != after.digest, before.content != after.content) == (True, True)
    assert [np.array_equal(before.image[row], after.image[row]) for row in range(3)] == [True, False, True]
    copy = prepared(photos(tmp_path / "b", [0, 1, 2]), tmp_path / "cache")
    assert (copy.folder, copy.content) == (before.folder, before.content)


groups = st.lists(st.integers(0, 12), min_size=4, max_size=60).filter(lambda values: len(set(values)) > 1)


@given(groups, st.integers(0, 9))
def test_one_image_is_never_in_two_splits_that_are_drawn(values: list[int], seed: int) -> None:
    same = first_of_equals(values)
    queries, val = len(values) // 4, len(values) // 8
    for split in (
        draw_split(len(values), seed, same),
        draw_parts(len(values), Draw(queries, val), seed, same),
        draw_parts(len(values), Draw(queries, val, len(values) // 4), seed, same),
    ):
        assert len({(first, code) for first, code in zip(same.tolist(), split.tolist(), strict=True)}) == len(
            set(values)
        )
        assert {SPLITS.index("train"), SPLITS.index("test")} <= set(split.tolist())


@given(st.lists(st.integers(1, 4), min_size=2, max_size=8), st.randoms())
@settings(max_examples=30, deadline=None)
def test_a_row_per_caption_in_any_order_is_the_data_set_of_a_row_per_image(counts: list[int], random: Random) -> None:
    pairs = [(number, caption) for number, count in enumerate(counts) for caption in range(count)]
    random.shuffle(pairs)
    expected = {number: [c for p, c in pairs if p == number] for number in range(len(counts))}
    with tempfile.TemporaryDirectory() as folder:
        image = np.eye(len(counts), dtype=np.float32)[[number for number, _ in pairs]]
        text = np.array([[1 + number, 1 + caption] for number, caption in pairs], dtype=np.float32)
        np.savez(Path(folder) / "rows.npz", image=image, text=text)
        found = read_features(Path(folder) / "rows.npz")
        lines = "".join(f"{number}.png,caption {caption}\n" for number, caption in pairs)
        (Path(folder) / "rows.csv").write_text(f"image,caption\n{lines}")
        listed = read("manifest", Path(folder) / "rows.csv")
    assert found.warnings.merged == len(pairs) - len(counts)
    texts = np.split(found.text, np.cumsum(found.captions)[:-1])
    vectors = {int(row.argmax()): [tuple(each) for each in own] for row, own in zip(found.image, texts, strict=True)}
    assert vectors == {number: [(1 + number, 1 + c) for c in own] for number, own in expected.items()}
    captions = dict(zip(listed.keys, listed.captions, strict=True))
    assert captions == {f"{number}.png": tuple(f"caption {c}" for c in own) for number, own in expected.items()}


@given(st.integers(2, 80), st.integers(0, 9))
def test_a_split_of_different_images_is_the_one_that_was_always_drawn(n: int, seed: int) -> None:
    order = numpy_generator(seed, "split").permutation(n)
    split = draw_split(n, seed, np.arange(n))
    test = max(1, n // 10)
    assert set(np.flatnonzero(split == 2)) == set(order[:test])
    assert set(np.flatnonzero(split == 1)) == set(order[test : test + n // 10])
    assert (split == draw_split(n, seed)).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.uint8, np.float16, np.bool_]), st.integers(0, 11))
def test_rows_are_the_same_if_their_bytes_are_and_rows_of_zeros_never_are(seed: int, dtype: type, width: int) -> None:
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, 2, (generator.integers(0, 40), width, 2)).astype(dtype)
    if rows.dtype.kind == "f":
        rows *= generator.choice(np.array([-1, 1, np.nan], dtype), rows.shape)
    expected = first_of_equals(row.tobytes() if row.any() else number for number, row in enumerate(rows))
    assert same_rows(rows).tolist() == expected.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "_CHUNK_BYTES", 7)
        assert same_rows(rows[::-1][::-1]).tolist() == expected.tolist()
        patch.setattr(splits, "_weighted", lambda part: np.zeros(len(part), np.uint64))  # every sum is equal by chance
        assert same_rows(rows).tolist() == expected.tolist()


def test_one_image_for_all_items_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one image for all 4 items"):
        prepared(photos(tmp_path / "a", [0] * 4, split=False), tmp_path / "cache")


@pytest.mark.slow
def test_copies_of_a_photo_are_in_one_split_and_duplicates_across_a_given_split_are_reported(tmp_path: Path) -> None:
    made = prepared(photos(tmp_path / "a", [row // 4 for row in range(40)], split=False), tmp_path / "cache")
    assert all(len(set(made.split[row : row + 4].tolist())) == 1 for row in range(0, 40, 4))
    path = photos(tmp_path / "b", [0, 1, 2, 3, 1, 5])
    Image.open(tmp_path / "b" / "04.bmp").save(tmp_path / "b" / "04.png")  # the same pixels in other bytes
    path.write_text(path.read_text().replace("04.bmp", "04.png"))
    assert check_raw(Data(name="manifest", path=path)).duplicates_by_image == ("04.png",)


def test_images_that_look_like_training_images_are_named_and_others_are_not(tmp_path: Path) -> None:
    path = photos(tmp_path / "a", list(range(6)), "png")
    drawn = np.random.default_rng(9).integers(0, 256, (6, 8, 9, 3), dtype=np.uint8)
    for number, pixels in enumerate(drawn):
        Image.fromarray(pixels).resize((90, 80), Image.Resampling.NEAREST).save(tmp_path / "a" / f"{number:02d}.png")
    assert check_raw(Data(name="manifest", path=path)).alike == ()
    first = Image.open(tmp_path / "a" / "00.png")
    ImageOps.mirror(first).save(tmp_path / "a" / "04.png")
    first.resize((45, 40)).save(tmp_path / "a" / "05.png")
    assert check_raw(Data(name="manifest", path=path)).alike == ("04.png", "05.png")


@pytest.mark.parametrize("colour", [(3, 5, 4), (0, 128, 255)])
def test_photos_of_one_colour_are_named(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = photos(tmp_path / "a", [0, 1, 2, 3], "png")
    Image.new("RGB", (16, 16), colour).save(tmp_path / "a" / "02.png")
    facts = check_raw(Data(name="manifest", path=path))
    assert facts.constant == ("02.png",)
    assert facts.usable


def test_files_of_several_images_are_named(tmp_path: Path) -> None:
    path = photos(tmp_path / "a", [0, 1, 2, 3], "tif")
    with Image.open(tmp_path / "a" / "02.tif") as page:
        page.save(tmp_path / "a" / "02.tif", save_all=True, append_images=[page.rotate(90)])
    facts = check_raw(Data(name="manifest", path=path))
    assert facts.paged == ("02.tif",)
    assert facts.usable
