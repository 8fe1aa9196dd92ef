"""Splits: those of the data set, random ones, and the data options of a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmq.config.scenario import Data
from fedmq.data import catalogue
from fedmq.data.splits import Draw, draw_parts, split_of
from fedmq.errors import InputError


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
