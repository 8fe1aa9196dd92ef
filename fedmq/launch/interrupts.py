"""Ctrl-C handling from the first line on; this module imports hardly anything, so that it can be imported first."""

import contextlib
import os
import signal
from collections.abc import Callable
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
    """Print that the command was interrupted; ``more`` says how it continues."""
    _say(f"fedmq: {how}{more}")


def _say(line: str) -> None:
    """Print a line from a signal handler."""
    with contextlib.suppress(OSError):  # the reader of stderr may have been interrupted, too
        # A terminal has just echoed ^C.
        os.write(2, (b"\n" if os.isatty(2) else b"") + os.fsencode(f"{line}\n"))


def until_stopped(resume: Callable[[], str] = lambda: "the same command") -> Callable[[], bool]:
    """A function that returns whether SIGINT or SIGTERM was received; a second signal aborts the program.

    The first one is acknowledged, as a clean stop may take as long as a task.
    """
    caught: list[int] = []

    def note(number: int, _frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        _say(f"stopping; press Ctrl-C again to abort; continue with {resume()}")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return lambda: bool(caught)
