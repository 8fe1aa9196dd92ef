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

    The forkserver and what it forked end by themselves when their starter is gone. Scripts start what they put in the
    background with SIGINT ignored: from here on it is answered there, too, as a run answers it.
    """

    def leave(_number: int, _frame: object) -> None:
        with contextlib.suppress(OSError):  # who read it may have been interrupted, too
            os.write(2, b"fedmq: interrupted\n")
        os._exit(FAILED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is signal.SIG_IGN else before)


def say_stopping() -> None:
    """Answer the first Ctrl-C at once, from its handler: what runs may take as long as a task does to end."""
    with contextlib.suppress(OSError):  # who read it may have been interrupted, too
        # A terminal has just echoed ^C.
        start = b"\n" if os.isatty(2) else b""
        os.write(2, start + b"stopping cleanly, to be gone on with; once more ends at once\n")
