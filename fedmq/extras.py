"""Imports of optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from fedmq.errors import InputError


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
        raise MissingPackageError(
            what, f"package {name} missing", f"run pip install -e '.[{extra}]' in fedmq's folder"
        ) from None
