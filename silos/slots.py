"""At most ``slots`` silos of a machine train at once; a killed silo frees its slot by itself.

Slots are locked files, which the kernel frees when a process dies. Waiting silos queue on one further lock, so only one
of them looks often for a free slot; the others look seldom whether it is their turn, which they get in no fixed order.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fedmq.errors import InputError
from fedmq.storage.locks import lock, try_lock, unlock
from fedmq.storage.run_folder import make_folder, writing

#: Pauses between two looks for a free slot [s]. Each is longer by a fiftieth, so about a fiftieth of the wait so far: a
#: slot hardly lies idle, and a long wait costs few wake-ups.
_FIRST_PAUSE, _LONGEST_PAUSE, _GROWTH = 0.0005, 0.02, 1.02


class Slots:
    """The slots of one run on this machine.

    Args:
        folder: shared by all silos of the run on this machine; made if needed.
        count: how many train at once.

    Raises:
        InputError: the folder is not one that can be written.
        RunError: the disk is full or broken.
    """

    def __init__(self, folder: Path, count: int) -> None:
        make_folder(folder)
        with writing(folder):
            self._files = [(folder / f"slot-{index}").open("ab") for index in range(count)]
            self._queue = (folder / "queue").open("ab")

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot; waits until there is one."""
        lock(self._queue)
        try:
            held = self._wait()
        finally:
            unlock(self._queue)
        try:
            yield
        finally:
            unlock(held)

    def _wait(self) -> IO[bytes]:
        pause = _FIRST_PAUSE
        while True:
            for file in self._files:
                if try_lock(file):
                    return file
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_PAUSE)

    def close(self) -> None:
        """Give everything back."""
        for file in (*self._files, self._queue):
            file.close()


def slots_folder(run: str) -> Path:
    """Where the silos of a run on this machine meet: in a folder of this user alone, made if needed.

    It lies in ``$XDG_RUNTIME_DIR``, which a cluster's nodes and ``su`` may name without having it, else in ``$TMPDIR``,
    else in ``/tmp``.

    Raises:
        InputError: the user's folder cannot be made, or belongs to somebody else.
        RunError: the disk is full or broken.
    """
    named = [Path(os.environ[name]) for name in ("XDG_RUNTIME_DIR", "TMPDIR") if os.environ.get(name)]
    writable = (place for place in named if place.is_dir() and os.access(place, os.W_OK | os.X_OK))
    own = next(writable, Path("/tmp")) / f"fedmq-slots-{os.getuid()}"  # noqa: S108 - private by mode 0700
    with writing(own):
        own.mkdir(mode=0o700, exist_ok=True)
        # Anybody may make a folder or a link of that name in a shared place before we do.
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            allowed = "a folder of this user alone; with TMPDIR another place is taken"
            raise InputError(str(own), "a link or a folder of somebody else", allowed)
        own.chmod(0o700)
    return own / run
