"""Retrieval metrics against brute force, and their invariances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.evaluation import label_metrics, recall
from fedmq.evaluation.recall import fairness
from tests import definitions


def embeddings(seed: int, images: int = 9, dim: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    captions = generator.integers(1, 4, images)
    owner = definitions.owners(captions)
    zi = generator.normal(size=(images, dim))
    zt = zi[owner] + 0.8 * generator.normal(size=(len(owner), dim))
    return zi, zt, owner


def coarse(seed: int, queries: int = 5, items: int = 14) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Three-bit codes, whose distances have many ties, and labels, which some queries lack."""
    generator = np.random.default_rng(seed)
    q, b = (2.0 * generator.integers(0, 2, (n, 3)) - 1 for n in (queries, items))
    ql, bl = (generator.random((n, 3)) < 0.3 for n in (queries, items))
    return q, b, ql, bl


seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("dim", [7, 63, 384])
@pytest.mark.parametrize("items", [5, 33, 100])
def test_equal_rows_tie_and_rank_in_the_order_of_the_gallery(dim: int, items: int) -> None:
    generator = np.random.default_rng(1)
    gallery = np.repeat(generator.normal(size=(1, dim)).astype(np.float32), items, 0)
    labels, queries = generator.random((items, 1)) < 0.4, generator.normal(size=(3, dim)).astype(np.float32)
    places = np.flatnonzero(labels[:, 0])
    expected = (np.arange(1, len(places) + 1) / (places + 1)).mean() if len(places) else 0.0
    found = label_metrics.cosine_metrics(queries, gallery, np.ones((3, 1), np.uint8), labels.astype(np.uint8))
    assert found.map == pytest.approx(expected, abs=1e-12)
    unit = generator.normal(size=(items, dim)).astype(np.float32)
    twice = np.repeat(unit / np.linalg.norm(unit, axis=1, keepdims=True), 2, 0)
    ranks = recall.retrieval_ranks(twice, twice, np.arange(2 * items))
    assert all(np.array_equal(way, np.tile([0, 1], items)) for way in ranks)


def test_any_of_an_images_captions_is_a_hit() -> None:
    image = np.eye(3)
    text = np.array([[0, 0, 1.0], [1, 0, 0], [0, 1, 0], [0, 1, 0]])  # captions of image 0: one wrong, one right
    found = recall.recalls(image, text, np.array([0, 0, 1, 2]))
    assert found["i2t_r1"] == pytest.approx(2 / 3)  # image 2 has only a caption of image 1
    assert found["t2i_r1"] == pytest.approx(2 / 4)
    assert found["mean_r1"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert (found["i2t_medr"], found["t2i_medr"]) == (1, 1)  # ranks 0 0 2, and 1 0 2 0: floor of the median 0.5, plus 1


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_ranks_equal_those_of_a_stable_sort(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 3, (6, 12)).astype(float)  # ties everywhere
    positive = generator.random((6, 12)) < 0.3
    positive[np.arange(6), generator.integers(0, 12, 6)] = True
    order = np.argsort(-scores, axis=1, kind="stable")
    expected = [int(np.flatnonzero(row[places])[0]) for row, places in zip(positive, order, strict=True)]
    assert recall.best_ranks(scores, positive).tolist() == expected


def test_ranks_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = embeddings(0, images=40)
    whole = recall.retrieval_ranks(*data)
    monkeypatch.setattr(recall, "CHUNK_SCORES", 100)
    for one, other in zip(whole, recall.retrieval_ranks(*data), strict=True):
        assert np.array_equal(one, other)


def test_a_perfect_model_has_recall_one_and_a_collapsed_one_recall_at_chance_level() -> None:
    zi = np.eye(20)
    owner = definitions.owners(np.full(20, 2))
    assert recall.recalls(zi, zi[owner], owner)["mean_r1"] == 1.0
    same = np.ones((20, 20))
    assert recall.recalls(same, same[owner], owner)["t2i_r1"] == 1 / 20


def test_a_model_of_nan_scores_at_most_at_chance_level() -> None:
    zi, zt, owner = embeddings(2, images=20)
    found = recall.recalls(np.full_like(zi, np.nan), zt, owner)
    assert found["i2t_r1"] <= 1 / 20
    assert found["t2i_r1"] <= 3 / 20


def test_a_caption_of_no_image_is_refused() -> None:
    zi, zt, owner = embeddings(3)
    with pytest.raises(ValueError, match="owner"):
        recall.retrieval_ranks(zi[:-1], zt, owner)
    with pytest.raises(ValueError, match="positive"):
        recall.best_ranks(np.zeros((1, 2)), np.zeros((1, 2)))


def test_no_queries_give_zeros() -> None:
    nothing = recall.recalls(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros(0, int))
    assert set(nothing.values()) == {0.0}
    assert fairness([]) == {"mean": 0.0, "std": 0.0, "worst": 0.0, "gap": 0.0}


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_permuting_the_database_with_its_labels_does_not_change_tie_averaged_map(seed: int) -> None:
    q, b, ql, bl = coarse(seed)
    order = np.random.default_rng(seed).permutation(len(b))
    here, there = label_metrics.hamming_metrics(q, b, ql, bl), label_metrics.hamming_metrics(q, b[order], ql, bl[order])
    assert there.map_expected == pytest.approx(here.map_expected, abs=1e-12)


def test_tie_averaged_ap_is_the_mean_over_all_orders_of_ties() -> None:
    query, gallery = np.ones((1, 2)), np.array([[1, 1], [1, -1], [1, -1], [-1, 1], [-1, -1], [-1, -1], [-1, -1]])
    relevant = np.array([[0.0, 1, 0, 1, 1, 0, 0]])
    labels = np.concatenate([relevant.T, 1 - relevant.T], axis=1)
    values = []
    for first in itertools.permutations(range(1, 4)):
        for second in itertools.permutations(range(4, 7)):
            ranked = relevant[0][[0, *first, *second]]
            hits = ranked.cumsum() / np.arange(1, 8)
            values.append((hits * ranked).sum() / ranked.sum())
    found = label_metrics.hamming_metrics(query, gallery, np.array([[1.0, 0.0]]), labels)
    assert found.map_expected == pytest.approx(np.mean(values), abs=1e-12)
    distance = definitions.hamming(query, gallery)
    assert definitions.mean_expected_ap(distance, relevant) == pytest.approx(np.mean(values), abs=1e-12)


def test_the_ideal_order_has_an_ndcg_of_one() -> None:
    relevant = np.random.default_rng(0).random(20) < 0.4
    labels = np.stack([relevant, ~relevant], axis=1)
    gallery = np.where(relevant[:, None], 1.0, -1.0) * np.ones((1, 6))
    query, of_query = np.ones((1, 6)), np.array([[True, False]])
    for find in (label_metrics.hamming_metrics, label_metrics.cosine_metrics):
        assert find(query, gallery, of_query, labels, ndcg_at=(10,)).ndcg == {10: pytest.approx(1)}
        assert find(-query, gallery, of_query, labels, ndcg_at=(10,)).ndcg[10] < 0.5


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 20), d=st.integers(1, 8), seed=st.integers(0, 99), scale=st.floats(1e-3, 1e3))
def test_embeddings_with_one_common_direction_have_no_spread(n: int, d: int, seed: int, scale: float) -> None:
    generator = np.random.default_rng(seed)
    direction = generator.normal(size=d)
    same = direction * generator.uniform(0.1, 10, size=(n, 1))
    assert recall.spread(same) == pytest.approx(0.0, abs=1e-9)
    z = generator.normal(size=(n, d))
    assert 0.0 <= recall.spread(z) <= 1.0
    assert recall.spread(z * scale) == pytest.approx(recall.spread(z), abs=1e-9)
    assert recall.spread(np.concatenate([z, -z])) == pytest.approx(1.0)
