"""Python files of the user's own, which a scenario names: a method, a metric. They run with the user's own rights."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from fedmq.errors import InputError


def load_user_module(path: Path, needs: tuple[str, ...]) -> ModuleType:
    """Run a Python file and return it as a module; the same file with the same content is run once in a process.

    Args:
        path: the file, which ends in ``.py``.
        needs: names of which the module must define at least one.

    Raises:
        InputError: there is no such file, it raises an error, or it defines none of the names.
    """
    allowed = f"a Python file that defines {' or '.join(needs)}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error), allowed) from None
    name = f"fedmq_user_file_{path.stem}_{hashlib.sha256(str(path.absolute()).encode() + source).hexdigest()[:16]}"
    module = sys.modules.get(name) or _run(path, name, allowed)
    if not any(hasattr(module, each) for each in needs):
        raise InputError(str(path), "none of these names", allowed)
    return module


def _run(path: Path, name: str, allowed: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(str(path), f"the ending {path.suffix!r}", allowed)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f"{path}: line {line}" if line else str(path)
        raise InputError(place, f"{type(error).__name__}: {error}", allowed) from error
    return module
