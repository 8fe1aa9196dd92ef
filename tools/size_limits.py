"""Find modules, test files and functions that are longer than one sitting takes to read.

    python -m tools.size_limits

A module of fedmq, protocols, coordinator or silos has at most 500 lines, a function of theirs at most 60, counted from
its ``def`` to its last line, docstring included and decorators not; a test file has at most 600 lines. Prints what is
longer, and exits with 1 if anything is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("fedmq", "protocols", "coordinator", "silos")
MODULE_LINES, FUNCTION_LINES, TEST_LINES = 500, 60, 600


def too_long(root: Path) -> Iterator[str]:
    """A line for every file and function below a folder that is too long.

    Args:
        root: the repository, or a folder laid out like it.
    """
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            text, place = path.read_text(encoding="utf-8"), path.relative_to(root)
            yield from _file(place, text, MODULE_LINES)
            for node in ast.walk(ast.parse(text, str(path))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > FUNCTION_LINES:
                        yield f"{place}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES}"
    for path in sorted((root / "tests").rglob("*.py")):
        yield from _file(path.relative_to(root), path.read_text(encoding="utf-8"), TEST_LINES)


def _file(place: Path, text: str, most: int) -> Iterator[str]:
    lines = len(text.splitlines())
    if lines > most:
        yield f"{place}: {lines} lines, at most {most}"


def main() -> int:
    """Print what is too long; 1 if anything is."""
    found = list(too_long(Path(__file__).parent.parent))
    print(*found, f"{len(found)} too long", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
