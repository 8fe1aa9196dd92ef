"""Packed hash codes against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.evaluation import hamming
from tests import definitions


def drawn(seed: int, items: int, bits: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(items, bits)).astype(np.float32)


def test_the_sign_of_zero_is_plus_one() -> None:
    values = np.array([[0.0, -0.0, 1e-9, -1e-9, np.nan, 3.0, -3.0, np.inf]])
    assert hamming.sign(values).tolist() == [[1, 1, 1, -1, -1, 1, -1, 1]]
    assert definitions.unpacked(hamming.pack(values), 8).tolist() == hamming.sign(values).tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_packed_codes_unpack_to_the_same_codes(seed: int, bits: int) -> None:
    values = drawn(seed, 5, bits)
    packed = hamming.pack(values)
    assert packed.shape == (5, -(-bits // 8))
    assert np.array_equal(definitions.unpacked(packed, bits), hamming.sign(values))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_distances_count_differing_bits(seed: int, bits: int) -> None:
    a, b = drawn(seed, 4, bits), drawn(seed + 1, 7, bits)
    differing = (hamming.sign(a)[:, None] != hamming.sign(b)[None]).sum(axis=2)
    assert np.array_equal(hamming.hamming(a, b), differing)
    assert np.array_equal(hamming.hamming(hamming.pack(a), torch.from_numpy(b)), differing)


def test_the_largest_distance_does_not_overflow() -> None:
    for bits in (192, 200, 256, 1024):
        a = np.ones((1, bits))
        assert hamming.hamming(a, -a).item() == bits


def test_items_share_a_label_if_a_bit_is_set_in_both() -> None:
    for labels in (1, 21, 64, 130):
        generator = np.random.default_rng(labels)
        a, b = (generator.random((n, labels)) < 1 / labels**0.5 for n in (6, 9))
        first, second = (hamming.words(np.packbits(flags, axis=1)) for flags in (a, b))
        shared = np.stack([hamming.shared(query, second) for query in first.T])
        assert np.array_equal(shared, (a[:, None] & b[None]).any(axis=2))


def test_codes_of_mismatched_length_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        hamming.hamming(np.ones((1, 8)), np.ones((1, 9)))
    with pytest.raises(ValueError, match="shape"):
        hamming.packed_codes(np.ones(8))
