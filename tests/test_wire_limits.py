"""Mappings of bounded size."""

from __future__ import annotations

from fedmq.wire.limits import BoundedDict


def test_the_oldest_entries_are_forgotten_and_one_that_is_set_again_keeps_its_place() -> None:
    recent = BoundedDict[str, int](2)
    for number, key in enumerate("abac"):
        recent[key] = number
    assert recent == {"b": 1, "c": 3}
