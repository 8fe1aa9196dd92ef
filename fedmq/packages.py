"""Versions, the folders of an installation, and imports of optional packages."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

from fedmq.errors import InputError

__version__ = "0.1.0"

_HERE = Path(__file__).parent
_INSIDE = (_HERE / "protocols").is_dir()
SCENARIOS = (_HERE if _INSIDE else _HERE.parent) / "scenarios"
"""Folder of the scenarios that come with fedmq."""


def full_name(module: str) -> str:
    """Full name of a module of coordinator, protocols or silos, which a wheel has inside fedmq (tools/wheel.py)."""
    return f"fedmq.{module}" if _INSIDE else module


def versions() -> dict[str, str]:
    """Versions of fedmq, torch and Python, by name."""
    import torch  # noqa: PLC0415 - `fedmq --version` does without

    return {"fedmq": __version__, "torch": torch.__version__, "python": platform.python_version()}


class MissingPackageError(InputError):
    """An optional package is not installed, which has nothing to do with the file that needs it."""


def package(name: str, extra: str, what: str) -> Any:
    """Import an optional package.

    Args:
        name: the module to import.
        extra: fedmq's extra that installs it.
        what: the option, key or file that needs it, for the error.

    Raises:
        MissingPackageError: it is not installed; names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingPackageError(what, f"package {name} missing", install_hint(extra)) from None


def install_hint(extra: str) -> str:
    """How to install one of fedmq's extras, from its wheel or in its checkout."""
    if _INSIDE:
        return f"run pip install 'fedmq-{__version__}-py3-none-any.whl[{extra}]'"
    return f"run pip install -e '.[{extra}]' in fedmq's folder"
