"""List import circles among the project's modules, including lazy and TYPE_CHECKING imports; exit with 1 if any.

python -m tools.import_circles
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import grimp

PACKAGES = ("fedmq", "protocols", "silos", "coordinator")


def imports() -> dict[str, set[str]]:
    """Modules that each module imports, anywhere in its source."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Groups of modules that import each other, directly or not: Tarjan's strongly connected components."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in number:
                yield from visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], number[imported])
        if lowest[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                yield sorted(group)

    for module in sorted(graph):
        if module not in number:
            yield from visit(module)


def main() -> int:
    """Print each circle on a line; return 1 if there is any."""
    found = list(circles(imports()))
    for group in found:
        print("import circle:", ", ".join(group))
    print(f"{len(found)} import circles")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
