"""Items that lack a modality: which a silo can use, and which pairs ``missing_modality.per: item`` takes apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.scenario import Backbone, Data, MissingModality, Partition
from fedmq.data.partition import at_least, deal, plan
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import all_present
from fedmq.data.readers.features import read_features
from fedmq.data.silo_dataset import modalities_held, silo_rows, without_dropped
from fedmq.errors import InputError

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


@given(flags)
def test_a_silo_without_a_pair_trains_the_modality_of_which_it_has_more(
    present: list[tuple[bool, bool]],
) -> None:
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
    after = without_dropped(before, train, missing)
    changed = np.flatnonzero(~after.all(axis=1))
    assert len(changed) == round(rate * 25)
    assert set(changed) <= set(train)
    assert after.any(axis=1).all()
    if given_only:
        assert after[changed, 0].all() == (given_only == "image") or not len(changed)
    assert np.array_equal(after, without_dropped(before, train, missing))


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
    ("more", "expected"),
    [
        ({"image_present": IMAGE_PRESENT}, "text: found 'a value in row 2 .*text_present"),
    ],
)
def test_wrong_declarations_of_absent_features_are_refused(
    more: dict[str, np.ndarray], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=expected):
        read_features(features(tmp_path / "x.npz", **more))
