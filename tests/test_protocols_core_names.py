"""The core names no method and no objective: both register themselves and say what is special about them.

Docstrings may cite a paper as the source of an equation. The command line and the Python interface show examples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import protocols
from fedmq.models.objective_registry import OBJECTIVES

pytestmark = pytest.mark.slow

ROOT = Path(protocols.__file__).parents[1]
#: Words of the language too, not only names of methods.
WORDS = {"central", "local"}
NAMES = sorted({*protocols.METHODS.built_in(), *OBJECTIVES.built_in()} - WORDS, key=len, reverse=True)
NAMED = re.compile(rf"(?<![a-z])({'|'.join(NAMES)})(?![a-z])", re.IGNORECASE)
#: The base loss of a scenario that names none, and the method with which a check compares every other.
DEFAULTS = {"fedmq/config/scenario.py": {"info_nce"}, "fedmq/launch/rehearsal.py": {"fedavg"}}


def core() -> Iterator[Path]:
    """Modules below and beside the methods, without the user's interfaces."""
    for package in ("fedmq", "coordinator", "silos"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] not in (("fedmq", "cli"), ("fedmq", "api")):
                yield path


def names_in(path: Path) -> Iterator[str]:
    """Names of methods and objectives in the identifiers and strings of a module, except in docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docstrings:
                pass
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                pass
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                pass
            case _:
                continue
        yield from (name.lower() for name in NAMED.findall(text))


def test_the_core_names_no_method_and_no_objective() -> None:
    named = {str(path.relative_to(ROOT)): set(names_in(path)) for path in core()}
    assert {path: names for path, names in named.items() if names} == DEFAULTS
