"""Every golden value has its own test, or is listed as pending with the reason."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests import golden_checks, golden_pending


def module_of(name: str) -> ModuleType | None:
    """The module with the checks of a golden file, if there is one."""
    if not (Path(__file__).parent / f"test_golden_{name}.py").exists():
        return None
    return importlib.import_module(f"tests.test_golden_{name}")


def checked_keys(name: str) -> list[str]:
    """The keys over which a golden test is parametrised, read from its parametrize mark."""
    module = module_of(name)
    if module is None:
        return []
    test = getattr(module, f"test_golden_{name}")
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    assert mark.args[0] == "key"
    assert [mark.name for mark in test.pytestmark] == ["parametrize"], "a golden test is never skipped"
    return list(mark.args[1])


def pending_keys(name: str) -> set[str]:
    if name in golden_pending.FILES:
        return set(golden_checks.expected(name))
    return set(golden_pending.KEYS.get(name, {}))


def test_golden_folder_has_files() -> None:
    assert golden_checks.names(), f"no golden values in {golden_checks.FOLDER}"


@pytest.mark.parametrize("name", golden_checks.names())
def test_golden_every_key_is_checked_or_pending(name: str) -> None:
    there, checked, pending = set(golden_checks.expected(name)), checked_keys(name), pending_keys(name)
    assert sorted(there - set(checked) - pending) == [], "neither checked nor listed in tests/golden_pending.py"
    assert sorted(pending & set(checked)) == [], "checked, so no longer pending"
    assert sorted((set(checked) | pending) - there) == [], "no such golden value"
    assert len(checked) == len(set(checked)), "a key is checked twice"


def test_golden_pending_lists_only_files_that_exist() -> None:
    listed = set(golden_pending.FILES) | set(golden_pending.KEYS)
    assert sorted(listed - set(golden_checks.names())) == []
    assert not set(golden_pending.FILES) & set(golden_pending.KEYS)


def test_golden_pending_gives_reasons() -> None:
    reasons = [
        *golden_pending.FILES.values(),
        *(text for keys in golden_pending.KEYS.values() for text in keys.values()),
    ]
    assert all(len(reason) > 10 for reason in reasons)
