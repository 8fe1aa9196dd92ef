"""Find modules, test files and functions that are too long.

    python -m tools.size_limits

Modules of fedmq, protocols, coordinator and silos have at most 500 lines, their functions at most 60 (from ``def`` to
the last line, with docstring, without decorators), test files at most 600. Prints all that exceed the limits, and exits
with 1 if any do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("fedmq", "protocols", "coordinator", "silos")
MODULE_LINES, FUNCTION_LINES, TEST_LINES = 500, 60, 600


def too_long(root: Path) -> Iterator[str]:
    """A message for each file and function that is too long."""
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
    """Print all that is too long; return 1 if anything is."""
    found = list(too_long(Path(__file__).parent.parent))
    print(*found, f"{len(found)} too long", sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
