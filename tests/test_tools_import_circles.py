"""The check for circular imports."""

from __future__ import annotations

from tools.import_circles import circles, imports


def test_a_circular_import_of_any_length_is_named() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set[str](), "e": {"f"}, "f": {"e"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["e", "f"]]


def test_modules_without_circular_imports_pass() -> None:
    assert list(circles({"a": {"b", "c"}, "b": {"c"}, "c": set[str]()})) == []


def test_imports_for_type_checking_and_in_functions_count() -> None:
    found = imports()
    assert "fedmq.data.raw_set" in found["fedmq.data.catalogue"]  # under TYPE_CHECKING
    assert "fedmq.models.clip_two_tower" in found["fedmq.models.build"]  # in a function
