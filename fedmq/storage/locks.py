"""Locks between processes of a machine: ``flock``, by ``filelock`` where a lock file is made.

A lock belongs to the process that acquired it, not to a forked child. The kernel releases it when the process ends,
even by SIGKILL; the lock file stays.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock

#: Interval between attempts to acquire a lock file that another process holds [s].
_POLL = 0.01


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a lock file, which is created if missing; waits until it is free.

    Raises:
        OSError: the lock file cannot be created or opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path, poll_interval=_POLL):
        yield


def lock(file: IO[bytes]) -> None:
    """Lock an open file exclusively, until :func:`unlock` or until it is closed; waits until it is free.

    The file's content does not change, so any file can be locked, not only a lock file. The system wakes a process
    that waits; ``filelock`` would have it look again at intervals, in which a slot stays idle.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file exclusively without waiting; return whether it was free.

    Raises:
        OSError: the file system does not support locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # some file systems refuse a held lock as forbidden
        return False
    return True


def unlock(file: IO[bytes]) -> None:
    """Unlock a file locked by :func:`lock` or :func:`try_lock`."""
    fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file; False if that cannot be determined, e.g. if the file is missing."""
    # On NFS an exclusive lock needs a file open for writing, but a run folder to audit may be read-only.
    mode = "r+b" if os.access(path, os.W_OK) else "rb"
    try:
        with path.open(mode) as file:
            return not try_lock(file)
    except OSError:
        return False
