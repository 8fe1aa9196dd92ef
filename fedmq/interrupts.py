"""Ctrl-C while modules are imported. This module imports next to nothing itself, to be there first."""

import contextlib
import os
import signal
from collections.abc import Iterator

#: What a command that failed, or was interrupted, exits with.
FAILED = 1


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends this process at once while it imports: raised in one of importlib's callbacks it would be lost.

    The forkserver and what it forked end by themselves when their starter is gone.
    """

    def leave(_number: int, _frame: object) -> None:
        os.write(2, b"fedmq: interrupted\n")
        os._exit(FAILED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
