"""Locks between the processes of a machine, by ``filelock``.

The kernel holds them for a process and frees them when it ends, even by SIGKILL; the lock file stays. A lock belongs to
the process that took it: a forked process takes its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, lock_descriptor, unlock_descriptor

#: Pause between two attempts to take a lock that another process holds [s].
_POLL = 0.05


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a lock file, which is made if needed; waits until it is free.

    Raises:
        OSError: the lock file cannot be made or opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path, poll_interval=_POLL):
        yield


def lock(file: IO[bytes]) -> None:
    """Lock an open file exclusively, until :func:`unlock` or until it is closed; waits until it is free.

    The file's content is left alone, so any file can be locked, not only one made for it.
    """
    lock_descriptor(file.fileno(), poll_interval=_POLL)


def try_lock(file: IO[bytes]) -> bool:
    """Lock an open file exclusively, as :func:`lock` does, if it is free; says whether it was.

    Raises:
        OSError: the file system has no locks.
    """
    return lock_descriptor(file.fileno(), blocking=False)


def unlock(file: IO[bytes]) -> None:
    """Free a file that :func:`lock` or :func:`try_lock` locked."""
    unlock_descriptor(file.fileno())


def is_locked(path: Path) -> bool:
    """Whether a process has locked this file; False if that cannot be found out, e.g. because it is not there."""
    # NFS locks a file exclusively only where it is open for writing, and a run folder to audit may be read-only.
    mode = "r+b" if os.access(path, os.W_OK) else "rb"
    try:
        with path.open(mode) as file:
            return not try_lock(file)
    except OSError:
        return False
