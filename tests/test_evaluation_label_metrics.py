"""Packed codes, recalls, and one-pass metrics over codes or embeddings against the definitions on whole matrices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.evaluation import hamming, label_metrics, recall
from fedmq.evaluation.recall import chance_std, fairness
from tests import definitions

seeds = st.integers(0, 2**32 - 1)


def example(seed: int, queries: int = 40, items: int = 70, bits: int = 12, labels: int = 5) -> tuple[np.ndarray, ...]:
    """Real-valued codes correlated with their labels; few bits, so that ties are frequent; some items have no label."""
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(labels, bits))
    own = [(generator.random((n, labels)) < 0.25).astype(np.uint8) for n in (queries, items)]
    values = [(each @ directions + generator.normal(size=(len(each), bits))).astype(np.float32) for each in own]
    return values[0], values[1], own[0], own[1]


def one_pass(data: tuple[Any, ...], **options: Any) -> label_metrics.RankingMetrics:
    return label_metrics.hamming_metrics(*data, **options)


def assert_equal(one: label_metrics.RankingMetrics, other: label_metrics.RankingMetrics) -> None:
    """All averages are equal; ``queries`` has the values that they are averages of."""
    one, other = (replace(each, queries=None) for each in (one, other))
    np.testing.assert_equal(vars(one), vars(other))


def test_metrics_of_some_queries_are_those_of_a_ranking_of_them_alone() -> None:
    generator, some = np.random.default_rng(1), np.array([2, 3, 11, 29])
    vectors = [generator.normal(size=(n, 4)).astype(np.float32) for n in (30, 50)]
    labels = [(generator.random((n, 5)) < 0.3).astype(np.uint8) for n in (30, 50)]
    for metrics_of in (label_metrics.cosine_metrics, label_metrics.hamming_metrics):
        whole = metrics_of(*vectors, *labels, at=(5,), ndcg_at=(5,), top_n=(3,))
        alone = metrics_of(vectors[0][some], vectors[1], labels[0][some], labels[1], at=(5,), ndcg_at=(5,), top_n=(3,))
        assert_equal(whole.of(some), alone)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_one_pass_values_equal_the_definitions(seed: int) -> None:
    q, b, ql, bl = data = example(seed)
    found = one_pass(data, at=(1, 7, 70, 500), ndcg_at=(3, 100), top_n=(5, 100), curves=True)
    distance, relevant = definitions.hamming(hamming.sign(q), hamming.sign(b)), definitions.relevance(ql, bl)
    close = {"rtol": 1e-12, "atol": 1e-14}
    np.testing.assert_allclose(found.map, definitions.mean_ap(distance, relevant), **close)
    np.testing.assert_allclose(found.map_expected, definitions.mean_expected_ap(distance, relevant), **close)
    for n in (1, 7, 70, 500):
        np.testing.assert_allclose(found.map_at[n], definitions.mean_ap(distance, relevant, n), **close)
    for n in (3, 100):
        np.testing.assert_allclose(found.ndcg[n], definitions.ndcg(distance, relevant, n), **close)
        np.testing.assert_allclose(
            found.ndcg_retrieved[n], definitions.ndcg(distance, relevant, n, ideal="retrieved"), **close
        )
    for n in (5, 100):
        np.testing.assert_allclose(found.top_n[n], definitions.precision_recall_at(distance, relevant, n), **close)
    assert found.pr_rank is not None
    assert found.pr_radius is not None
    np.testing.assert_allclose(
        (found.pr_rank.precision, found.pr_rank.recall), definitions.pr_by_rank(distance, relevant), **close
    )
    np.testing.assert_allclose(
        (found.pr_radius.precision, found.pr_radius.recall), definitions.pr_by_radius(distance, relevant, 12), **close
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_cosine_values_equal_the_definitions(seed: int) -> None:
    q, b, ql, bl = data = example(seed)
    found = label_metrics.cosine_metrics(*data, at=(7,), ndcg_at=(9,), top_n=(5,), curves=True)
    unit = [torch.nn.functional.normalize(torch.from_numpy(each), dim=1) for each in (q, b)]
    distance, relevant = -(unit[0] @ unit[1].T).numpy(), definitions.relevance(ql, bl)
    assert found.map == pytest.approx(definitions.mean_ap(distance, relevant), abs=1e-12)
    assert found.map_expected == pytest.approx(definitions.mean_expected_ap(distance, relevant), abs=1e-12)
    assert found.map_at[7] == pytest.approx(definitions.mean_ap(distance, relevant, 7), abs=1e-12)
    assert found.ndcg[9] == pytest.approx(definitions.ndcg(distance, relevant, 9), abs=1e-12)
    assert found.top_n[5] == pytest.approx(definitions.precision_recall_at(distance, relevant, 5), abs=1e-12)
    assert found.pr_rank is not None
    np.testing.assert_allclose(found.pr_rank.precision, definitions.pr_by_rank(distance, relevant)[0], atol=1e-12)
    assert found.pr_radius is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([-np.inf, -2.0, -1e-30, -0.0, 0.0, 1e-40, 0.5, 1.0, np.inf, np.nan]), max_size=20))
def test_similarities_of_any_sign_are_ranked_like_a_stable_sort(values: list[float]) -> None:
    similarity = np.array(values, np.float32)
    for item in range(len(values)):
        relevant = np.arange(len(values)) == item
        lowest = np.where(np.isnan(similarity), np.float32(-np.inf), similarity)
        place = int(np.flatnonzero(np.argsort(-lowest, kind="stable") == item)[0])
        (found,) = label_metrics.similarity_ranked(similarity[None], relevant[None])
        assert found.places.tolist() == [place]
        assert found.ends.tolist() == np.cumsum(np.unique(-lowest, return_counts=True)[1]).tolist()


@pytest.mark.parametrize("values", [1, 3, 1000, 1 << 20])
def test_rankings_of_many_ties_are_those_of_one_stable_sort(values: int) -> None:
    generator = np.random.default_rng(values)
    similarity = (generator.integers(-values, values, (3, 5000)) / np.float32(values)).astype(np.float32)
    similarity[generator.integers(0, 3, 20), generator.integers(0, 5000, 20)] = np.nan
    relevant = generator.random((3, 5000)) < 0.2
    lowest = np.where(np.isnan(similarity), np.float32(-np.inf), similarity)
    both = (label_metrics.similarity_ranked(similarity, relevant, ties=ties) for ties in (True, False))
    for row, flags, found, alone in zip(lowest, relevant, *both, strict=True):
        places = np.flatnonzero(flags[np.argsort(-row, kind="stable")])
        assert np.array_equal(found.places, places)
        assert np.array_equal(found.ends, np.cumsum(np.unique(-row, return_counts=True)[1]))
        assert np.array_equal(found.hits, np.searchsorted(places, found.ends))
        assert np.array_equal(alone.places, places)


def test_map_is_the_same_whether_or_not_ties_are_averaged() -> None:
    data = example(4)
    one, other = (label_metrics.cosine_metrics(*data, at=(3,), expected=expected) for expected in (True, False))
    assert np.isnan(other.map_expected)
    assert (other.map, other.map_at) == (one.map, one.map_at)


def test_packed_codes_and_tensors_give_the_same_values() -> None:
    q, b, ql, bl = example(0, bits=16)
    options: dict[str, Any] = {"at": (5,), "ndcg_at": (5,), "top_n": (5,), "curves": True}
    whole = one_pass((q, b, ql, bl), **options)
    assert_equal(one_pass((hamming.sign(q), hamming.sign(b), ql, bl), **options), whole)
    assert_equal(one_pass((hamming.pack(q), hamming.pack(b), ql, bl), **options), whole)
    assert_equal(one_pass(tuple(map(torch.from_numpy, (q, b, ql, bl))), **options), whole)
    assert_equal(one_pass((q, torch.from_numpy(hamming.pack(b)), ql, bl), **options), whole)


@pytest.mark.parametrize("bits", [64, 300])
def test_codes_longer_than_a_machine_word_rank_as_defined(bits: int) -> None:
    q, b, ql, bl = data = example(3, bits=bits, labels=70)
    distance = definitions.hamming(hamming.sign(q), hamming.sign(b))
    expected = definitions.mean_ap(distance, definitions.relevance(ql, bl))
    assert one_pass(data).map == pytest.approx(expected, abs=1e-13)


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = example(1, queries=200)
    options: dict[str, Any] = {"at": (5,), "ndcg_at": (5,), "top_n": (5,), "curves": True}
    monkeypatch.setattr(label_metrics, "CHUNK_SCORES", 32 * 70)  # several blocks
    monkeypatch.setattr(recall, "BLOCK", 3)
    captions, before = embeddings(0, images=40), torch.get_num_threads()
    for metrics_of in (label_metrics.hamming_metrics, label_metrics.cosine_metrics):
        alone = metrics_of(*data, **options, threads=1)
        assert_equal(metrics_of(*data, **options, threads=3), alone)
        torch.set_num_threads(3)
        try:
            assert_equal(metrics_of(*data, **options), alone)
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)
    for one, other in zip(*(recall.retrieval_ranks(*captions, threads=threads) for threads in (None, 3)), strict=True):
        assert np.array_equal(one, other)


def test_cosine_ranking_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sums of products of small whole numbers are exact in any order.
    generator = np.random.default_rng(0)
    vectors = [np.where(generator.random((n, 4)) < 0.5, -1.0, 1.0) for n in (30, 50)]
    labels = [(generator.random((n, 5)) < 0.3).astype(np.uint8) for n in (30, 50)]
    whole = label_metrics.cosine_metrics(*vectors, *labels, at=(5,), ndcg_at=(5,))
    monkeypatch.setattr(label_metrics, "CHUNK_SCORES", 100)
    monkeypatch.setattr(label_metrics, "CHUNK_QUERIES", 3)
    monkeypatch.setattr(label_metrics, "CHUNK_RANKED", 100)
    assert_equal(label_metrics.cosine_metrics(*vectors, *labels, at=(5,), ndcg_at=(5,)), whole)


def test_shuffling_a_gallery_sorted_by_class_makes_tied_ranks_independent_of_labels() -> None:
    labels = np.eye(2, dtype=np.uint8)
    gallery = labels.repeat(500, axis=0)
    data = (np.ones((1, 8)), np.ones((1000, 8)), labels[:1], gallery)
    assert one_pass(data).map == 1.0  # a constant code gets a perfect score
    assert one_pass(data, order_seed=0).map == pytest.approx(0.5, abs=0.1)
    assert one_pass(data).map_expected == pytest.approx(one_pass(data, order_seed=0).map_expected, abs=1e-12)


def test_a_model_of_nan_scores_at_chance_level() -> None:
    q, b, ql, bl = example(0)
    found = label_metrics.cosine_metrics(np.full_like(q, np.nan), b, ql, bl)
    relevant = definitions.relevance(ql, bl)
    assert found.map_expected == pytest.approx(
        definitions.mean_expected_ap(np.zeros_like(relevant), relevant), abs=1e-12
    )


def test_no_queries_and_nothing_relevant_give_zeros() -> None:
    q, b, ql, bl = example(0)
    options: dict[str, Any] = {"at": (5,), "ndcg_at": (5,), "top_n": (5,), "curves": True}
    for data in ((q[:0], b, ql[:0], bl), (q, b, ql, 0 * bl), (q, b[:0], ql, bl[:0])):
        for find in (label_metrics.hamming_metrics, label_metrics.cosine_metrics):
            found = find(*data, **options)
            assert (found.map, found.map_expected, found.map_at, found.ndcg) == (0.0, 0.0, {5: 0.0}, {5: 0.0})
            assert found.top_n == {5: (0.0, 0.0)}


def test_mismatched_codes_and_labels_are_refused() -> None:
    q, b, ql, bl = example(0)
    for data in (
        (q[:, :3], b, ql, bl),
        (q, b, ql[:3], bl),
        (q, b, ql[:, :1].repeat(70, 1), bl),
        (q, b, ql, np.pad(bl, ((0, 0), (0, 2)))),
        (q, b, ql[:, 0], bl),
    ):
        with pytest.raises(ValueError, match=r"bytes|labels"):
            one_pass(data)
    with pytest.raises(ValueError, match="at least 1"):
        one_pass((q, b, ql, bl), at=(0,))


# ---------------------------------------------------------------------------------- Hamming distances of packed codes
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


# ------------------------------------------------------------------------------------------------------------ recalls
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
    owner = generator.permutation(np.concatenate([np.arange(6), generator.integers(0, 6, 6)]))
    positive = owner == np.arange(6)[:, None]
    order = np.argsort(-scores, axis=1, kind="stable")
    expected = [int(np.flatnonzero(row[places])[0]) for row, places in zip(positive, order, strict=True)]
    assert recall.retrieval_ranks(scores, np.eye(12), owner)[0].tolist() == expected


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([1, 2, 512]))
def test_ranks_of_tied_and_undefined_embeddings_equal_those_of_a_stable_sort(seed: int, block: int) -> None:
    generator = np.random.default_rng(seed)
    owner = generator.permutation(np.concatenate([np.arange(9), generator.integers(0, 9, 14)]))
    image, text = (generator.integers(-1, 2, (n, 2)).astype(np.float32) for n in (9, len(owner)))
    image[generator.integers(0, 9)] = text[generator.integers(0, len(owner))] = np.nan

    def expected(scores: np.ndarray, positive: np.ndarray) -> list[int]:
        order = np.argsort(np.where(np.isnan(scores), np.inf, -scores), axis=1, kind="stable")
        return np.take_along_axis(positive, order, axis=1).argmax(axis=1).tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "BLOCK", block)
        i2t, t2i = recall.retrieval_ranks(image, text, owner)
    positive = owner[None] == np.arange(9)[:, None]
    assert i2t.tolist() == expected(image @ text.T, positive)
    assert t2i.tolist() == expected(text @ image.T, positive.T)


@pytest.mark.parametrize("captions", [1, 3, 4096])
def test_ranks_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch, captions: int) -> None:
    data = embeddings(0, images=40)
    whole = recall.retrieval_ranks(*data)
    monkeypatch.setattr(recall, "BLOCK", 7)
    monkeypatch.setattr(recall, "MOST_CAPTIONS", captions)
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
    with pytest.raises(ValueError, match="without a caption"):
        recall.retrieval_ranks(zi, zt[owner > 0], owner[owner > 0])


def test_no_queries_give_zeros() -> None:
    nothing = recall.recalls(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros(0, int))
    assert set(nothing.values()) == {0.0}
    assert fairness([]) == {"mean": 0.0, "std": 0.0, "worst": 0.0, "gap": 0.0}


def test_chance_alone_spreads_recall_over_equal_silos_as_stated() -> None:
    drawn = np.random.default_rng(0).binomial(2 * np.array([20, 80]), 0.3, (20000, 2)) / [40, 160]
    assert chance_std(0.3, [20, 80]) == pytest.approx(np.sqrt(drawn.var(axis=0).mean()), rel=0.02)


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
