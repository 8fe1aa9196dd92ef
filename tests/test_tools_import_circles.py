"""The check that no modules import each other in a circle."""

from __future__ import annotations

from tools.import_circles import circles, imports


def test_a_circle_is_named_however_long_it_is() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"f"}, "f": {"e"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["e", "f"]]


def test_modules_without_a_circle_are_passed() -> None:
    assert list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set[str]()})) == []


def test_imports_for_types_and_in_functions_count() -> None:
    found = imports()
    assert "fedmq.data.raw_set" in found["fedmq.data.catalogue"]  # under TYPE_CHECKING
    assert "fedmq.models.clip_two_tower" in found["fedmq.models.build"]  # in a function
