"""Ctrl-C handling from the first line on; this module imports hardly anything, so that it can be imported first."""

import contextlib
import os
import signal
from types import FrameType
from typing import NoReturn

#: Exit status of a command that failed or was interrupted.
FAILED = 1


def answer_interrupts() -> None:
    """Make Ctrl-C end this process: immediately during an import, with KeyboardInterrupt otherwise.

    A KeyboardInterrupt raised in one of importlib's callbacks would be swallowed and the command would run on. The
    forkserver and its children exit when the process that started them is gone. Shell scripts start background jobs
    with SIGINT ignored; the handler is installed there, too.
    """
    signal.signal(signal.SIGINT, _answer)


def _answer(_number: int, frame: FrameType | None) -> NoReturn:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            say_interrupted()
            os._exit(FAILED)
        frame = frame.f_back
    raise KeyboardInterrupt


def say_interrupted(more: str = "", how: str = "interrupted") -> None:
    """Print that the command was interrupted.

    Args:
        more: how it continues, e.g. ``; repeat the command to continue``.
        how: how it ended.
    """
    with contextlib.suppress(OSError):  # the reader of stderr may have been interrupted, too
        # A terminal has just echoed ^C.
        start = b"\n" if os.isatty(2) else b""
        os.write(2, start + f"fedmq: {how}{more}\n".encode())


def say_stopping(resume: str = "--resume RUN") -> None:
    """Acknowledge the first Ctrl-C from its signal handler; a clean stop may take as long as a task.

    Args:
        resume: the options or the command that continue the run.
    """
    with contextlib.suppress(OSError):  # the reader of stderr may have been interrupted, too
        # A terminal has just echoed ^C.
        start = b"\n" if os.isatty(2) else b""
        os.write(2, start + os.fsencode(f"stopping; press Ctrl-C again to abort; continue with {resume}\n"))
