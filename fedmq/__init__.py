"""fedmq: message-queue based asynchronous cross-silo federated learning of cross-modal retrieval models.

The Python interface: :func:`run`, :func:`resume`, :func:`compare`, :func:`open_run` and :func:`load`. It is imported on
first use, so that ``import fedmq`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedmq.packages import __version__

if TYPE_CHECKING:
    from fedmq.api.launch import Comparison, StopRun, compare, resume, run
    from fedmq.api.model import Embeddings, Found, Model, load
    from fedmq.api.results import Run, open_run

_MODULES = {
    "launch": ("Comparison", "StopRun", "compare", "resume", "run"),
    "model": ("Embeddings", "Found", "Model", "load"),
    "results": ("Run", "open_run"),
}

__all__ = [
    "Comparison",
    "Embeddings",
    "Found",
    "Model",
    "Run",
    "StopRun",
    "__version__",
    "compare",
    "load",
    "open_run",
    "resume",
    "run",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedmq.api.{module}"), name)
    raise AttributeError(f"module 'fedmq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
