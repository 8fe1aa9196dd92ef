"""Build hook of the wheel, which installs one top-level package, fedmq, with the others and the scenarios inside.

In the repository coordinator, protocols and silos are folders at the top, imported as ``protocols``. A package called
``coordinator`` on PyPI or a user's ``protocols.py`` would take their place in an installation, so the wheel's copies
import ``fedmq.protocols``. Names of modules in strings go through ``fedmq.packages.full_name``.
"""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = ("coordinator", "protocols", "silos")
_NAMES = "|".join(MOVED)
_FROM = re.compile(rf"^(\s*)from ({_NAMES})(?=[. ])")
_IMPORT = re.compile(rf"^(\s*)import ({_NAMES})(?=$|\s)")


def moved(source: str, path: str) -> str:
    """The source of a module with its imports of moved packages changed.

    Raises:
        ValueError: an import is in a form that this does not change, e.g. ``import protocols.parts.memory``.
    """
    lines = source.split("\n")
    for number in _imports(source):
        line = _FROM.sub(r"\1from fedmq.\2", lines[number - 1])
        lines[number - 1] = _IMPORT.sub(r"\1from fedmq import \2", line)
    result = "\n".join(lines)
    if left := _imports(result):
        raise ValueError(f"{path}: line {left[0]}: write `import protocols` or `from protocols... import ...`")
    return result


def _imports(source: str) -> list[int]:
    """Numbers of the lines that import a moved package by its name in the repository."""
    numbers = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.level == 0 else []
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.split(".")[0] in MOVED for name in names):
            numbers.append(node.lineno)
    return numbers


class OnePackage(BuildHookInterface):  # type: ignore[type-arg]
    """Stages the package fedmq as the wheel contains it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy the packages with changed imports; an editable installation keeps those of the repository."""
        if version == "editable":
            return
        root = Path(self.root)
        self._stage = Path(tempfile.mkdtemp(prefix="fedmq-wheel-"))
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "fedmq", self._stage, dirs_exist_ok=True, ignore=ignored)
        for name in (*MOVED, "scenarios"):
            shutil.copytree(root / name, self._stage / name, ignore=ignored)
        for path in self._stage.rglob("*.py"):
            path.write_text(moved(path.read_text("utf-8"), str(path.relative_to(self._stage))), "utf-8")
        build_data["force_include"][str(self._stage)] = "fedmq"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        if version != "editable":
            shutil.rmtree(self._stage)
