"""Locks between processes of a machine, using ``filelock``.

A lock belongs to the process that acquired it, not to a forked child. The kernel releases it when the process ends,
even by SIGKILL; the lock file stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, lock_descriptor, unlock_descriptor

#: Interval between attempts to acquire a lock that another process holds [s].
_POLL = 0.05


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

    The file's content does not change, so any file can be locked, not only a lock file.
    """
    lock_descriptor(file.fileno(), poll_interval=_POLL)


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file exclusively without waiting; return whether it was free.

    Raises:
        OSError: the file system does not support locks.
    """
    return lock_descriptor(file.fileno(), blocking=False)


def unlock(file: IO[bytes]) -> None:
    """Unlock a file locked by :func:`lock` or :func:`try_lock`."""
    unlock_descriptor(file.fileno())


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file; False if that cannot be determined, e.g. if the file is missing."""
    # On NFS an exclusive lock needs a file open for writing, but a run folder to audit may be read-only.
    mode = "r+b" if os.access(path, os.W_OK) else "rb"
    try:
        with path.open(mode) as file:
            return not try_lock(file)
    except OSError:
        return False
