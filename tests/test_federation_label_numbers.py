"""Labels without names, and names in several spellings, at sites with data of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmq.config.scenario import Backbone, Data
from fedmq.data.prepare import prepare
from fedmq.federation.agreement import difference, format_of
from fedmq.wire.payloads import DataFormat

numbers = st.lists(st.integers(0, 5), min_size=2, max_size=8)


def stated(folder: Path, name: str, labels: np.ndarray) -> tuple[DataFormat, list[list[str]]]:
    """The format that a site states, and the labels of its items by name."""
    vectors = np.random.default_rng(0).normal(size=(len(labels), 4))
    np.savez(folder / f"{name}.npz", image=vectors, text=vectors + 1, labels=labels)
    data = Data(name="features", path=folder / f"{name}.npz")
    made = prepare(data, Backbone(name="features"), folder / "cache")
    assert made.labels is not None
    held = [[made.label_names[column] for column in np.flatnonzero(row)] for row in made.labels]
    return format_of(made, image=True, text=True), held


@given(numbers, numbers)
@settings(max_examples=40, deadline=None)
def test_sites_with_unnamed_labels_agree_only_if_equal_names_are_equal_numbers(
    one: list[int], other: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, held_first = stated(Path(folder), "one", np.array(one))
        second, held_second = stated(Path(folder), "other", np.array(other))
        text = difference("silo-00", first, "silo-01", second)
        if text is None:
            named = {*zip(one, (label for (label,) in held_first), strict=True)}
            named |= {*zip(other, (label for (label,) in held_second), strict=True)}
            assert len({number for number, _ in named}) == len({label for _, label in named}) == len(named)
        else:
            assert (min(one), max(one)) != (min(other), max(other))
            assert "label columns without names" in text and "give every file label_names" in text
