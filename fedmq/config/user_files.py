"""Python files of the user's own that a scenario names: a method, an objective or a data set.

A scenario says ``./mine.py``. Where the user names the scenario, :func:`adopt` reads the file, keeps a copy in the
cache under its SHA-256 and gives its *reference*, ``mine.py@<SHA-256>``, which stands in the resolved scenario from
then on. So the run's id depends on the file's content but not on where it lies, every process of the run executes the
same bytes, and a run can be replayed after the file was edited.

Only :func:`load` executes such a file, by its reference and from the cache alone. A scenario of a run folder that
somebody else made may hold any reference; what nobody adopted on this machine is refused. Whoever may write to the
cache folder may thus have code executed: it must not be shared with people one does not trust.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import threading
import traceback
from functools import partial
from pathlib import Path
from types import ModuleType

from fedmq.errors import InputError, RunError
from fedmq.storage.cache import cache_folder
from fedmq.storage.run_folder import write_atomically

_FILE = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.py"
_REFERENCE = re.compile(rf"(?P<file>{_FILE})@(?P<digest>[0-9a-f]{{64}})")
#: Two threads of one process must not execute a file twice: its classes would be different ones.
_LOCK = threading.RLock()


class UserFileError(InputError):
    """A user's Python file cannot be used; the place is the file itself, with the line where there is one."""


def is_path(name: str) -> bool:
    """Whether a name in a scenario is the path of a Python file, as ``./mine.py``."""
    return name.endswith(".py")


def is_reference(name: str) -> bool:
    """Whether a name in a scenario is a reference to a file that was adopted, ``mine.py@<SHA-256>``."""
    return _REFERENCE.fullmatch(name) is not None


def label(name: str) -> str:
    """A name for people: of a reference the file's name alone, of any other the name itself."""
    match = _REFERENCE.fullmatch(name)
    return match["file"] if match else name


def adopt(path: Path) -> str:
    """Keep a copy of a file that the user names, so that this machine's processes may execute it.

    Args:
        path: of the file. It is compiled, not executed.

    Returns:
        The reference.

    Raises:
        UserFileError: no such file, a name that is not allowed, or a syntax error, with its line.
        RunError: the cache cannot be written.
    """
    if not re.fullmatch(_FILE, path.name):
        raise UserFileError(str(path), path.name, "a file name of letters, digits, '_', '-' and '.' that ends in .py")
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise UserFileError(str(path), "no such file", "a Python file that is there") from None
    except OSError as error:
        raise UserFileError(str(path), error.strerror or str(error), "a readable Python file") from None
    try:
        compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}: line {error.lineno}" if error.lineno else str(path)
        raise UserFileError(place, error.msg, "valid Python") from None
    except ValueError as error:  # a null byte
        raise UserFileError(str(path), str(error), "valid Python") from None
    digest = hashlib.sha256(source).hexdigest()
    kept = _copy(digest)
    try:
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, partial(_write, source))
    except OSError as error:
        raise RunError(f"cache {kept.parent} cannot be written: {error.strerror or error}") from error
    return f"{path.name}@{digest}"


def _write(source: bytes, path: Path) -> None:
    path.write_bytes(source)


def _copy(digest: str) -> Path:
    return cache_folder() / "code" / f"{digest}.py"


@functools.cache
def _executed(reference: str) -> ModuleType:
    match = _REFERENCE.fullmatch(reference)
    assert match is not None  # noqa: S101 - the caller has seen to it
    file, digest = match["file"], match["digest"]
    path = _copy(digest)
    try:
        source = path.read_bytes()
    except OSError:
        source = b""
    if hashlib.sha256(source).hexdigest() != digest:
        allowed = "a file that was run on this machine: name the file itself, e.g. fedmq protocols FILE, to allow it"
        raise UserFileError(file, f"content with SHA-256 {digest[:12]}, unknown here", allowed)
    module = ModuleType(f"fedmq_user_{digest}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and type hints look their module up there
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102 - what the user asked for
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{file}: line {own[-1]}" if own else file
        raise UserFileError(place, f"{type(error).__name__}: {error}", "a file that can be imported") from error
    return module


def load(reference: str) -> ModuleType:
    """Execute an adopted file, once in a process.

    Args:
        reference: from :func:`adopt`, or out of a run folder's scenario.

    Raises:
        UserFileError: nobody adopted a file of this content on this machine, or executing it fails.
    """
    with _LOCK:
        return _executed(reference)
