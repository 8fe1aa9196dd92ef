"""The lite backbone: shapes, unit length, deterministic bytes, and drawings that retrieve their names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fedmq.data.readers import openmoji
from fedmq.encoders import lite, lite_inputs

KEYS = ["1F436", "1F347", "1F697", "1F3B8", "2602", "1F40D", "1F382", "1F511", "1F33B", "1F6B2", "1F98B", "1F355"]


@pytest.fixture(scope="module")
def drawings() -> list[np.ndarray]:
    return [openmoji.render(key) for key in KEYS]


@pytest.fixture(scope="module")
def vectors(drawings: list[np.ndarray]) -> np.ndarray:
    return lite.encode_images(drawings)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_vectors_have_unit_length(vectors: np.ndarray) -> None:
    texts = lite.encode_texts(["dog face", "", "a " * 500, "смайлик 🐶"])
    for found, rows in ((vectors, len(KEYS)), (texts, 4)):
        assert found.shape == (rows, lite.DIM)
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_empty_input_gives_empty_output() -> None:
    assert lite.encode_images([]).shape == (0, lite.DIM)
    assert lite.encode_texts([]).shape == (0, lite.DIM)


@pytest.mark.usefixtures("one_thread")
def test_an_image_encodes_to_the_same_bytes_alone_and_at_any_thread_count(
    drawings: list[np.ndarray], vectors: np.ndarray
) -> None:
    again = lite.encode_images(iter(drawings[:5]))
    assert again.tobytes() == vectors[:5].tobytes()
    assert torch.get_num_threads() == 1


def test_a_text_encodes_to_the_same_bytes_in_any_batch() -> None:
    texts = ["dog face", "a very long caption about a very small dog", "key", *map(str, range(40))]
    together = lite.encode_texts(texts)
    for i in (0, 1, 2, 30):
        assert lite.encode_texts([texts[i]]).tobytes() == together[i].tobytes()


def test_drawings_retrieve_their_names(vectors: np.ndarray) -> None:
    names = {item.key: item.captions[0] for item in openmoji.load_items()}
    found = (vectors @ lite.encode_texts([names[key] for key in KEYS]).T).argmax(axis=1)
    assert (found == np.arange(len(KEYS))).mean() >= 0.75  # chance is one in twelve


def test_margins_do_not_change_the_framed_drawing(drawings: list[np.ndarray]) -> None:
    wide = np.pad(drawings[0], ((40, 40), (10, 90), (0, 0)), constant_values=255)
    assert (lite_inputs.frame(wide) == lite_inputs.frame(drawings[0])).all()


def test_a_photo_and_a_blank_image_are_resized_without_cropping() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    assert lite_inputs.frame(noise).shape == (224, 224, 3)
    assert (lite_inputs.frame(np.full((9, 9, 3), 255, np.uint8)) == 255).all()
