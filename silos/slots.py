"""At most ``slots`` silos of a machine train at once; a killed silo frees its slot by itself.

Slots are files under an exclusive ``flock``, which the kernel drops when a process dies. Waiting silos queue on one
further lock, so only the first of them looks for a free slot and the others sleep in the kernel.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_SECONDS = 0.0005


def _try(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Slots:
    """The slots of one run on this machine.

    Args:
        folder: shared by all silos of the run on this machine; made if needed.
        count: how many train at once.
    """

    def __init__(self, folder: Path, count: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._files = [(folder / f"slot-{index}").open("ab") for index in range(count)]
        self._queue = (folder / "queue").open("ab")

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a slot; waits until there is one."""
        fcntl.flock(self._queue, fcntl.LOCK_EX)
        try:
            held = self._wait()
        finally:
            fcntl.flock(self._queue, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(held, fcntl.LOCK_UN)

    def _wait(self) -> IO[bytes]:
        while True:
            for file in self._files:
                if _try(file):
                    return file
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Give everything back."""
        for file in (*self._files, self._queue):
            file.close()


def slots_folder(run: str) -> Path:
    """Where the silos of a run on this machine meet."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp")  # noqa: S108 - private by mode 0700
    return base / f"fedmq-slots-{os.getuid()}" / run
