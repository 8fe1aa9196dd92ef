"""Splits of a data set, and its partition among silos and modalities: none lost, none twice, reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.scenario import Backbone, Data, Partition
from fedmq.config.sections import MissingModality
from fedmq.data import catalogue, partition
from fedmq.data.labels import label_divergences
from fedmq.data.partition import at_least, deal, plan
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import all_present
from fedmq.data.readers.features import read_features
from fedmq.data.silo_dataset import modalities_held, silo_rows, validation_split, without_dropped
from fedmq.data.splits import Draw, draw_parts, split_of
from fedmq.errors import InputError
from tests import definitions

KINDS = ("iid", "dir_class", "dir_clusters", "shards_classes")
every_kind = pytest.mark.parametrize("kind", KINDS)


def groups(n: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, n)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    silos=st.integers(1, 12),
    samples=st.integers(12, 150),
    alpha=st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    balanced=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_sample_goes_to_one_silo_and_no_silo_is_empty(
    *, kind: Any, silos: int, samples: int, alpha: float, balanced: bool, seed: int
) -> None:
    chosen = Partition(kind=kind, alpha=alpha, balanced=balanced, classes_per_silo=6)
    group = groups(samples, 6, seed)
    group[:6] = range(6)
    shares = definitions.assign(chosen, silos, group, seed)
    assert len(shares) == silos
    assert min(map(len, shares)) >= 1
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))
    again = definitions.assign(chosen, silos, group, seed)
    assert all(np.array_equal(one, other) for one, other in zip(shares, again, strict=True))


@pytest.mark.parametrize(("kind", "sizes"), [("iid", "proportional"), ("iid", "equal"), ("dir_clusters", "equal")])
def test_silo_datasets_are_equal_in_size_where_the_recipe_says_so(kind: Any, sizes: Any) -> None:
    shares = definitions.assign(Partition(kind=kind, sizes=sizes), 7, groups(100, 10), 0)
    assert [len(share) for share in shares] == [15, 15, 14, 14, 14, 14, 14]


def test_proportional_sizes_split_each_cluster_by_the_silos_distributions() -> None:
    group, test = groups(6000, 12), groups(600, 12)
    made = partition.plan(Partition(alpha=0.3), 8, group, 0)
    counts = definitions.group_counts(group, partition.deal(made, group))
    wanted = made.proportions / made.proportions.sum(axis=1, keepdims=True) * np.bincount(group)[:, None]
    assert np.abs(counts - wanted).max() <= 1
    sizes = counts.sum(axis=0)
    assert sizes.max() > 2 * sizes.min()
    held = definitions.group_counts(test, partition.deal(made, test, "test"))
    assert np.abs(held - wanted * (np.bincount(test) / np.bincount(group))[:, None]).max() <= 1


@pytest.mark.parametrize("kind", ["iid", "dir_clusters"])
def test_dirichlet_sizes_are_the_same_shares_of_every_split_and_uneven_by_their_own_alpha(kind: Any) -> None:
    group, test = groups(4000, 10), groups(400, 10)

    def sizes(alpha: float) -> tuple[list[int], list[int]]:
        made = partition.plan(Partition(kind=kind, alpha=5.0, sizes="dirichlet", sizes_alpha=alpha), 8, group, 0)
        return [len(each) for each in partition.deal(made, group)], [
            len(each) for each in partition.deal(made, test, "test")
        ]

    train, held = sizes(1.0)
    assert sum(train) == 4000
    assert max(train) > 3 * min(train)
    assert np.abs(np.array(train) / 10 - np.array(held)).max() <= 1.0
    assert max(sizes(1e5)[0]) < 510


def test_a_large_silo_does_not_take_the_last_items_of_a_cluster_before_the_small_ones() -> None:
    group = np.repeat([0, 1], 500)
    made = partition.plan(Partition(alpha=1e5, sizes="dirichlet", sizes_alpha=0.5), 4, group, 3)
    for share in partition.deal(made, group):
        assert abs((group[share] == 0).mean() - 0.5) < 0.25 or len(share) < 30


@pytest.mark.parametrize("kind", ["dir_class", "shards_classes"])
def test_sizes_of_partitions_by_label_follow_from_the_labels(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"partition\.sizes equal needs partition\.kind dir_clusters or iid"):
        Partition(kind=kind, sizes="equal")


def test_a_lower_alpha_makes_silos_more_heterogeneous() -> None:
    group = groups(3000, 20)
    for kind in ("dir_class", "dir_clusters"):
        apart = []
        for alpha in (0.1, 1.0, 100.0):
            shares = definitions.assign(Partition(kind=kind, alpha=alpha), 10, group, 0)  # type: ignore[arg-type]
            apart.append(definitions.mean_js_divergence(definitions.group_counts(group, shares)))
        assert apart[0] > 2 * apart[1] > 4 * apart[2]


@pytest.mark.parametrize("kind", ["dir_class", "dir_clusters", "shards_classes"])
def test_a_silos_held_out_data_resembles_its_training_data(kind: Any) -> None:
    train, test = groups(4000, 12, 0), groups(1000, 12, 1)
    plan = partition.plan(Partition(kind=kind, alpha=0.2), 8, train, 0)
    one = definitions.group_counts(train, partition.deal(plan, train))
    other = definitions.group_counts(test, partition.deal(plan, test, "test"))

    def apart(a: int, b: int) -> float:
        return definitions.js_divergence(one[:, a] / one[:, a].sum(), other[:, b] / other[:, b].sum())

    own = np.mean([apart(silo, silo) for silo in range(8)])
    foreign = np.mean([apart(silo, (silo + 3) % 8) for silo in range(8)])
    assert own < 0.4 * foreign


def test_the_balanced_variant_leaves_no_silo_with_only_a_handful_of_samples() -> None:
    least = {}
    for balanced in (False, True):
        chosen = Partition(kind="dir_class", alpha=0.1, balanced=balanced)
        least[balanced] = [
            min(map(len, definitions.assign(chosen, 8, groups(800, 4, seed), seed))) for seed in range(5)
        ]
    assert min(least[False]) < 10 <= min(least[True])


def test_classes_without_samples_are_not_assigned() -> None:
    """Coarse labels are never a sample's rarest label: their numbers are group numbers without any sample."""
    group = np.repeat([4, 6, 7, 9, 11, 12], 30)
    shares = definitions.assign(Partition(kind="shards_classes", classes_per_silo=3), 8, group, 0)
    assert [len(set(group[share])) for share in shares] == [3] * 8
    assert {int(group[each]) for share in shares for each in share} == {4, 6, 7, 9, 11, 12}
    with pytest.raises(InputError, match=r"classes_per_silo.*1 to 6 for 6 classes"):
        partition.plan(Partition(kind="shards_classes", classes_per_silo=7), 8, group, 0)


def test_a_silo_of_shards_holds_at_most_the_requested_classes_and_every_class_is_held() -> None:
    group = groups(900, 24)
    shares = definitions.assign(Partition(kind="shards_classes", classes_per_silo=3), 20, group, 0)
    held = definitions.group_counts(group, shares) > 0
    assert held.sum(axis=0).max() <= 3
    assert held.sum(axis=1).min() >= 2  # 60 places for 24 classes
    assert held.sum(axis=1).max() <= 3


def test_in_n_way_k_shot_a_silo_trains_on_k_samples_of_each_of_its_classes() -> None:
    group = np.repeat(np.arange(10), 60)
    plan = partition.plan(Partition(kind="shards_classes", classes_per_silo=5, shots=20), 6, group, 0)
    counts = definitions.group_counts(group, partition.deal(plan, group))
    assert set(np.unique(counts)) == {0, 20}
    assert (counts > 0).sum(axis=0).tolist() == [5] * 6
    # Held-out samples are all kept for evaluation.
    assert sum(map(len, partition.deal(plan, group, "test"))) == len(group)


def skewed(samples: int, classes: int) -> np.ndarray:
    """Groups of very different sizes, none empty, like MS-COCO's when an image counts under its first label."""
    weights = 1.0 / np.arange(1, classes + 1)
    drawn = np.random.default_rng(0).choice(classes, samples - classes, p=weights / weights.sum())
    return np.concatenate([np.arange(classes), drawn])


def test_classes_beyond_the_silos_class_slots_are_split_into_equal_shards() -> None:
    """FedHAP on MS-COCO: 20 silos with three of its 80 classes each hold 60."""
    group, silos, each = skewed(10_000, 80), 20, 3
    plan = partition.plan(Partition(kind="shards_classes", classes_per_silo=each), silos, group, 0)
    shares = partition.deal(plan, group)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(group)))
    assert {len(share) for share in shares} <= {498, 499, 500, 501, 502}  # three shards of 166 or 167
    counts = definitions.group_counts(group, shares)
    # A silo holds three shards of the sorted samples: most are of three classes, which are 37 % of all samples.
    largest = np.sort(counts, axis=0)[::-1][:each].sum(axis=0) / counts.sum(axis=0)
    assert np.median(largest) > 0.7
    # The largest class, a fifth of all samples, fills about a fifth of the 60 shards.
    assert counts[0].max() <= each * 167 and 4 <= (counts[0] > 0).sum() <= 13
    # Held-out samples follow the same partition.
    test = skewed(5_000, 80)
    held = definitions.group_counts(test, partition.deal(plan, test, "test"))
    assert not (held * (counts == 0)).any()


@pytest.mark.parametrize(("silos", "each", "classes"), [(2, 2, 6), (3, 1, 50)])
def test_equal_shards_leave_no_silo_empty_and_lose_no_sample(silos: int, each: int, classes: int) -> None:
    for seed in range(5):
        group = groups(97, classes, seed)
        shares = definitions.assign(Partition(kind="shards_classes", classes_per_silo=each), silos, group, seed)
        assert sorted(np.concatenate(shares).tolist()) == list(range(97))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= each


def test_more_silos_than_samples_are_refused(kind: Any = "dir_class") -> None:
    with pytest.raises(InputError, match=r"silos\.count: found 11, allowed: at most 10"):
        definitions.assign(Partition(kind=kind), 11, groups(10, 3), 0)
    plan = partition.plan(Partition(kind=kind, classes_per_silo=1), 5, np.zeros(10, np.int64), 0)
    with pytest.raises(InputError, match="test"):
        partition.deal(plan, np.zeros(4, np.int64), "test")


def test_a_group_missing_from_the_training_split_is_still_assigned() -> None:
    for kind in KINDS:
        plan = partition.plan(Partition(kind=kind, classes_per_silo=2), 3, groups(60, 4), 0)  # type: ignore[arg-type]
        shares = partition.deal(plan, groups(40, 6), "test")
        assert sorted(np.concatenate(shares).tolist()) == list(range(40))


def test_a_multi_label_sample_counts_under_its_rarest_label() -> None:
    labels = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 1, 1], [0, 0, 0], [0, 1, 1]])
    # counts 3, 3, 3: ties go to the lowest label; a sample without labels gets a group of its own
    assert partition.rarest_label(labels).tolist() == [0, 0, 0, 1, 3, 1]
    assert partition.rarest_label(labels, np.array([9, 5, 1])).tolist() == [1, 0, 2, 2, 3, 2]
    assert partition.label_groups(labels[:2], labels).tolist() == [0, 0]
    assert partition.label_groups(np.array([4, 2])).tolist() == [4, 2]


def test_a_multi_label_sample_counts_under_its_first_label_if_configured() -> None:
    labels = np.array([[1, 0, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    assert partition.label_groups(labels, labels, "first").tolist() == [0, 1, 2, 3]
    assert partition.label_groups(labels, labels, "rarest").tolist() == [0, 1, 2, 3]
    often = np.concatenate([labels, np.tile([[1, 0, 0]], (5, 1))])
    assert partition.label_groups(often, often, "rarest")[0] == 2
    assert partition.label_groups(often, often, "first")[0] == 0


@every_kind
def test_fewer_samples_than_silos_are_partitioned_where_empty_silos_are_allowed(kind: Any) -> None:
    made = partition.plan(Partition(kind=kind), 6, groups(60, 6), 0)
    for count in (0, 1, 4):
        shares = partition.deal(made, groups(count, 6), "gallery", sparse=True)
        assert sorted(np.concatenate(shares).tolist()) == list(range(count))


def test_text_clusters_are_recovered_and_reproducible() -> None:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(5, 16)) * 10
    true = groups(200, 5)
    features = (centres[true] + generator.normal(size=(200, 16))).astype(np.float32)
    found = partition.cluster_centres(features, 5, 0)
    assert np.array_equal(found, partition.cluster_centres(features, 5, 0))
    near = partition.nearest_centre(features, found)
    assert len({(int(a), int(b)) for a, b in zip(true, near, strict=True)}) == 5
    assert len(partition.cluster_centres(features[:3], 50, 0)) == 3


def test_an_empty_silo_receives_one_sample_from_the_largest() -> None:
    shares = partition.at_least([np.array([], int), np.array([5, 6, 7]), np.array([1])], 1)
    assert [share.tolist() for share in shares] == [[7], [5, 6], [1]]


@settings(max_examples=50, deadline=None)
@given(rate=st.floats(0, 1), silos=st.integers(1, 40), seed=st.integers(0, 1000))
def test_the_configured_fraction_of_silos_lacks_one_modality_and_none_lacks_both(
    rate: float, silos: int, seed: int
) -> None:
    names = [f"silo-{index:02d}" for index in range(silos)]
    flags = partition.modalities(MissingModality(rate=rate, seed=seed), names, 0)
    assert sum(not (image and text) for image, text in flags) == round(rate * silos)
    assert all(image or text for image, text in flags)


def test_missing_modalities_listed_by_name_are_applied_as_listed() -> None:
    listed = MissingModality(silos={"silo-01": "image", "silo-02": "text"})
    flags = partition.modalities(listed, ["silo-00", "silo-01", "silo-02"], 0)
    assert flags == ((True, True), (True, False), (False, True))


def test_who_lacks_a_modality_varies_with_the_runs_seed_unless_it_has_its_own() -> None:
    names, present = [f"silo-{index:02d}" for index in range(30)], all_present(40)
    varying, fixed = (
        [partition.modalities(missing, names, seed) for seed in (0, 1, 42)]
        for missing in (MissingModality(rate=0.5), MissingModality(rate=0.5, seed=42))
    )
    assert len(set(varying)) == 3
    assert set(fixed) == {varying[2]}
    items = MissingModality(per="item", rate=0.5)
    first, second = (without_dropped(present, np.arange(40), items, seed) for seed in (0, 1))
    assert not np.array_equal(first, second)


# ------------------------------------------------------------------------------------------------------------- splits
def test_a_random_split_has_the_requested_sizes_and_the_rest_is_database() -> None:
    split = draw_parts(100, Draw(10, 5, 30), 0)
    assert np.bincount(split, minlength=5).tolist() == [30, 5, 10, 0, 55]
    assert (split == draw_parts(100, Draw(10, 5, 30), 0)).all()
    assert (split != draw_parts(100, Draw(10, 5, 30), 1)).any()
    # More training items do not change the queries.
    assert (np.flatnonzero(draw_parts(100, Draw(10, 5, 40), 0) == 2) == np.flatnonzero(split == 2)).all()


@pytest.mark.parametrize("sizes", [Draw(100), Draw(10, 90), Draw(10, 0, 91)])
def test_a_data_set_too_small_for_the_requested_sizes_is_refused(sizes: Draw) -> None:
    with pytest.raises(InputError, match=r"data\.queries.*the 100 items"):
        draw_parts(100, sizes, 0)


def test_the_scenarios_split_sizes_replace_the_data_sets_split() -> None:
    own = np.array([0] * 8 + [2, 2], dtype=np.uint8)
    plain = Data(name="flickr8k", path=Path("x"))
    assert (split_of(own, 10, plain, Draw()) == own).all()
    drawn = split_of(own, 10, plain.model_copy(update={"queries": 3, "train": 2}), Draw())
    assert np.bincount(drawn, minlength=5).tolist() == [2, 0, 3, 0, 5]
    with pytest.raises(InputError, match=r"data\.queries"):
        split_of(own, 10, plain.model_copy(update={"train": 2}), Draw())
    assert np.bincount(split_of(None, 10, plain, Draw())).tolist() == [8, 1, 1]
    assert np.bincount(split_of(None, 10, plain, Draw(4)), minlength=5).tolist() == [6, 0, 4, 0, 0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "flicker8k", "path": "x"}, "did you mean flickr8k"),
        ({"name": "coco"}, "data.path: found 'nothing'"),
        ({"name": "openmoji", "frames": 3}, "data.frames: .*no such key with data.name openmoji"),
        ({"name": "features", "path": "x", "train": 3}, "data.train: .*no such key with data.name features"),
        ({"name": "manifest", "path": "x.csv", "annotations": "y"}, "data.annotations: .*data.name manifest"),
    ],
)
def test_a_scenario_may_use_only_known_data_sets_and_their_options(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        catalogue.check(Data.model_validate(options))


# -------------------------------------------------------------------------------------------- items with one modality
flags = st.lists(st.sampled_from([(True, True), (True, False), (False, True)]), min_size=1, max_size=12)


@given(flags, st.booleans(), st.booleans())
def test_each_item_of_a_silo_is_in_exactly_one_part(present: list[tuple[bool, bool]], image: bool, text: bool) -> None:
    rows = np.arange(len(present))
    found = silo_rows(rows, np.array(present), image=image, text=text)
    parts = [found.dataset, found.image_only, found.text_only, found.unusable]
    if image or text:
        assert sorted(np.concatenate(parts).tolist()) == rows.tolist()
        for row in found.dataset:
            assert (not image or present[row][0]) and (not text or present[row][1])
    if not (image and text):
        assert not len(found.image_only) + len(found.text_only)


@given(st.integers(0, 40), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_a_validation_share_is_disjoint_from_the_rows_trained_on_and_leaves_one(count: int, share: float) -> None:
    rows = 3 * np.arange(count)
    trained, held = validation_split(rows, share, 0, "silo-00")
    assert sorted([*trained, *held]) == rows.tolist()
    assert np.array_equal(trained, np.sort(trained))
    assert len(held) == min(round(share * count), max(0, count - 1))
    again = validation_split(rows, share, 0, "silo-00")
    assert np.array_equal(held, again[1])


@given(flags)
def test_a_silo_without_a_pair_trains_the_modality_of_which_it_has_more(present: list[tuple[bool, bool]]) -> None:
    rows, table = np.arange(len(present)), np.array(present)
    image, text = modalities_held(rows, table, image=True, text=True)
    assert image or text
    assert len(silo_rows(rows, table, image=image, text=text).dataset)
    if table.all(axis=1).any():
        assert image and text
    elif table[:, 0].any() and table[:, 1].any():
        assert image == (table[:, 0].sum() >= table[:, 1].sum()) != text


@given(st.floats(0, 1), st.integers(0, 3), st.sampled_from([None, "image", "text"]))
def test_a_rate_takes_apart_that_many_training_pairs_only(rate: float, seed: int, only: str | None) -> None:
    before, train = all_present(40), np.arange(5, 30)
    given_only = only if rate > 0 else None
    missing = MissingModality.model_validate({"per": "item", "rate": rate, "seed": seed, "only": given_only})
    after = without_dropped(before, train, missing, 9)
    changed = np.flatnonzero(~after.all(axis=1))
    assert len(changed) == round(rate * 25)
    assert set(changed) <= set(train)
    assert after.any(axis=1).all()
    if given_only:
        assert after[changed, 0].all() == (given_only == "image") or not len(changed)
    assert np.array_equal(after, without_dropped(before, train, missing, 9))


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 3))
def test_the_smallest_silo_has_at_least_the_number_that_the_scenario_asks_for(least: int, more: int, seed: int) -> None:
    partition, silos = Partition(kind="dir_class", alpha=0.05, least=least), 4
    groups = np.random.default_rng(seed).integers(0, 3, size=4 * least + more)
    parts = deal(plan(partition, silos, groups, seed), groups)
    assert min(map(len, parts)) >= least
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))


def test_more_items_for_each_silo_than_there_are_is_refused() -> None:
    groups = np.zeros(9, np.int64)
    with pytest.raises(InputError, match=r"partition\.least: found 4, allowed: at most 3"):
        deal(plan(Partition(kind="iid", least=4), 3, groups, 0), groups)
    assert [len(part) for part in at_least([np.arange(5), np.arange(0), np.arange(0)], 1)] == [3, 1, 1]


def features(path: Path, **more: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    image, text = (generator.normal(size=(6, width)).astype(np.float32) for width in (4, 3))
    image[1], text[2] = np.nan, np.inf
    np.savez(path, image=image, text=text, split=np.array(["train"] * 4 + ["test"] * 2), **more)
    return path


IMAGE_PRESENT, TEXT_PRESENT = np.arange(6) != 1, np.arange(6) != 2


def test_features_of_an_absent_modality_may_hold_anything_and_become_zero(tmp_path: Path) -> None:
    path = features(tmp_path / "x.npz", image_present=IMAGE_PRESENT, text_present=TEXT_PRESENT.astype(int))
    found = read_features(path)
    assert found.present is not None
    assert found.present.tolist() == [[row != 1, row != 2] for row in range(6)]
    assert not found.image[1].any() and not found.text[2].any()
    assert found.captions.tolist() == [1, 1, 0, 1, 1, 1]
    data, backbone = Data(name="features", path=path), Backbone(name="features", head="mlp")
    prepared = prepare(data, backbone, tmp_path / "cache")
    assert prepared.unpaired
    assert prepared.present.tolist() == found.present.tolist()
    assert prepared.pairs("train").tolist() == [0, 3]


@pytest.mark.parametrize(
    ("more", "expected"), [({"image_present": IMAGE_PRESENT}, "text: found 'a value in row 2 .*text_present")]
)
def test_wrong_declarations_of_absent_features_are_refused(
    more: dict[str, np.ndarray], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=expected):
        read_features(features(tmp_path / "x.npz", **more))


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=6))
def test_the_divergence_of_a_silos_labels_is_the_one_of_scipy(counts: list[list[int]]) -> None:
    from scipy.spatial.distance import jensenshannon

    arrays = [np.array(row, np.int64) for row in counts]
    found, whole = label_divergences(arrays), np.sum(arrays, axis=0)
    for own, value in zip(arrays, found, strict=True):
        if not own.any():
            assert value is None
        else:
            assert value == pytest.approx(jensenshannon(own, whole, base=2) ** 2, abs=1e-7)


def test_silos_with_the_same_share_of_each_label_do_not_diverge_and_single_labels_do() -> None:
    assert label_divergences([np.array([2, 4]), np.array([1, 2])]) == [0.0, 0.0]
    assert label_divergences([np.array([5, 0]), np.array([0, 5])]) == [pytest.approx(0.3113, abs=1e-4)] * 2
