"""Optional packages, imported when something needs them."""

from __future__ import annotations

import importlib
from typing import Any

from fedmq.errors import InputError


def package(name: str, extra: str, what: str) -> Any:
    """Import an optional package.

    Raises:
        InputError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            what, f"package {name} missing", f"pip install -e '.[{extra}]', in fedmq's own folder"
        ) from None
