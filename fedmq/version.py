"""The version of fedmq, and of what else the last bits of a model depend on."""

from __future__ import annotations

import platform

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of fedmq, torch and Python, by name."""
    import torch  # noqa: PLC0415 - `fedmq --version` does without

    return {"fedmq": __version__, "torch": torch.__version__, "python": platform.python_version()}
