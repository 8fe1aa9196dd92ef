"""Limits the number of silos of a machine that train at the same time to the scenario's ``slots``.

A slot is a file lock, which the kernel releases when its silo ends or is killed. Waiting silos queue, in no fixed
order, on another lock: only its holder polls the slots, at short intervals.

Each process locks a file of its own, ``user-...``, as long as it uses the folder. A folder without such a lock is
removed by the last process that used it, or after a SIGKILL by the next one that starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedmq.errors import InputError
from fedmq.storage.locks import is_locked, lock, locked, try_lock, unlock
from fedmq.storage.run_folder import make_folder, writing

#: Intervals between polls for a free slot [s]. Each is 2% longer than the one before, so about 2% of the wait so far:
#: slots stay idle only briefly, and a long wait needs few wake-ups.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0005, 0.02, 1.02


class Slots:
    """The slots of one run on this machine.

    Args:
        folder: shared by all silos of the run on this machine; created if missing, removed by the last of them.
        count: number of slots.

    Raises:
        InputError: the folder cannot be written.
        RunError: the disk is full or broken.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        make_folder(folder.parent)
        with writing(folder), _changing(folder):
            for other in folder.parent.iterdir():
                if other.is_dir() and other != folder:
                    _remove_unused(other)
            folder.mkdir(exist_ok=True)
            self._user = (folder / f"user-{secrets.token_hex(8)}").open("xb")
            try_lock(self._user)
            self._files = [(folder / f"slot-{index}").open("ab") for index in range(count)]
            self._queue = (folder / "queue").open("ab")

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot; waits until one is free."""
        lock(self._queue)
        try:
            slot = self._wait()
        finally:
            unlock(self._queue)
        try:
            yield
        finally:
            unlock(slot)

    def _wait(self) -> IO[bytes]:
        pause = _FIRST_PAUSE
        while True:
            for file in self._files:
                if try_lock(file):
                    return file
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close all files, which releases their locks; the last user removes the folder."""
        for file in (*self._files, self._queue, self._user):
            file.close()
        with contextlib.suppress(OSError), _changing(self._folder):
            Path(self._user.name).unlink(missing_ok=True)
            _remove_unused(self._folder)


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Hold the lock under which folders next to this one are created and removed."""
    with locked(folder.parent / "lock"):
        yield


def _remove_unused(folder: Path) -> None:
    if any(is_locked(path) for path in folder.glob("user-*")):
        return
    with contextlib.suppress(OSError):
        for path in (*folder.glob("user-*"), *folder.glob("slot-*"), folder / "queue"):
            path.unlink(missing_ok=True)
        folder.rmdir()


def slots_folder(run: str) -> Path:
    """Folder of the slots of a run on this machine, inside a private folder of the user that is created if missing.

    The private folder is in the first usable of ``$XDG_RUNTIME_DIR``, ``$TMPDIR`` and ``/tmp``. On cluster nodes and
    under ``su``, ``$XDG_RUNTIME_DIR`` may not exist.

    Raises:
        InputError: the private folder cannot be created, or belongs to another user.
        RunError: the disk is full or broken.
    """
    configured = [Path(os.environ[name]) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if os.environ.get(name)]
    writable = (place for place in configured if place.is_dir() and os.access(place, os.W_OK | os.X_OK))
    folder = next(writable, Path("/tmp")) / f"fedmq-slots-{os.getuid()}"  # noqa: S108 - private by mode 0700
    with writing(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        # In a shared folder, another user may already have created a folder or link of this name.
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            allowed = "a folder owned by this user; set TMPDIR to use another place"
            raise InputError(str(folder), "a link or a folder of another user", allowed)
        folder.chmod(0o700)
    return folder / run
