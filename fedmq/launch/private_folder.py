"""Temporary folders with keys, sockets and messages: removed at their end, or by a later process after a SIGKILL."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedmq.errors import InputError
from fedmq.storage.locks import try_lock

#: Prefix of the folders of runs, with their keys and sockets.
RUN = "fedmq-run-"
#: Prefix of the folders of processes that a cluster's engine placed on this machine.
PEER = "fedmq-peer-"
#: Prefix of the folders with the forkserver's sockets.
FORKSERVER = "fedmq-fork-"
#: File in such a folder that its process has locked.
_LOCK = "lock"
#: Maximum length of the path of a folder for sockets [bytes]. Unix sockets have at most 107, and the forkserver's is 52
#: longer.
_SOCKET_FOLDER_BYTES = 52


def socket_folder() -> Path:
    """The folder for temporary files, or another one if its path is too long for sockets in it.

    Raises:
        InputError: no folder has a short path and can be written.
    """
    usual = tempfile.gettempdir()
    for place in (usual, os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):  # noqa: S108 - mkdtemp makes a private folder in it
        if not place or len(os.fsencode(place)) > _SOCKET_FOLDER_BYTES:
            continue
        if os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    allowed = f"a folder with a path of at most {_SOCKET_FOLDER_BYTES} bytes, as Unix sockets need it"
    raise InputError("TMPDIR", usual, allowed)


@contextlib.contextmanager
def private_folder(prefix: str = RUN) -> Iterator[Path]:
    """A temporary folder that only this user can open, removed at the end.

    A process ended by SIGKILL cannot remove its folder; the next process of fedmq that makes such a folder does, as the
    lock is then free. The path is short, because paths of Unix sockets must be.

    Args:
        prefix: beginning of its name: :data:`RUN`, :data:`PEER` or :data:`FORKSERVER`.

    Raises:
        InputError: no folder for temporary files has a path that is short enough.
    """
    parent = socket_folder()
    for each in (RUN, PEER, FORKSERVER):
        for lock in parent.glob(f"{each}*/{_LOCK}"):
            with contextlib.suppress(OSError), lock.open("r+b") as file:
                if try_lock(file):
                    shutil.rmtree(lock.parent)
    private, owner = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)), os.getpid()
    try:
        # Locked under another name first, so that no other run mistakes the folder for an abandoned one.
        with (private / "fresh").open("xb") as file:
            with contextlib.suppress(OSError):  # without support for locks, no other run gets this one
                try_lock(file)
            (private / "fresh").rename(private / _LOCK)
            yield private
    finally:
        # A forked child drops this generator, too, when multiprocessing clears its finalizers.
        if os.getpid() == owner:
            shutil.rmtree(private, ignore_errors=True)
