"""Ctrl-C, from the first line on. This module imports next to nothing itself, to be there first."""

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

#: What a command that failed, or was interrupted, exits with.
FAILED = 1


def answer_interrupts() -> None:
    """Let Ctrl-C end this process, wherever it is: at once while it imports, as KeyboardInterrupt otherwise.

    Raised in one of importlib's callbacks it would be lost, and the command would go on to its end. The forkserver and
    what it forked end by themselves when their starter is gone. Scripts start what they put in the background with
    SIGINT ignored; it is answered there, too.
    """
    signal.signal(signal.SIGINT, _answer)


def _answer(_number: int, frame: FrameType | None) -> NoReturn:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            with contextlib.suppress(OSError):  # who read it may have been interrupted, too
                os.write(2, b"fedmq: interrupted\n")
            os._exit(FAILED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_stopping() -> None:
    """Answer the first Ctrl-C at once, from its handler: what runs may take as long as a task does to end."""
    with contextlib.suppress(OSError):  # who read it may have been interrupted, too
        # A terminal has just echoed ^C.
        start = b"\n" if os.isatty(2) else b""
        os.write(2, start + b"stopping cleanly, to be gone on with; once more ends at once\n")
