"""Name an import circle among the project's modules, lazy and TYPE_CHECKING imports included; exit with 1 if any.

python -m tools.import_circles
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGES = ("fedmq", "protocols", "silos", "coordinator")


def imports() -> dict[str, set[str]]:
    """Modules that each module imports, anywhere in its source."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each is imported by the next one, the first also being the last; empty without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    """Print an import circle; return 1 if there is any."""
    found = circle(imports())
    print("import circle:", " is imported by ".join(found) or "none")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
