"""Standard output and standard error of the commands, and progress lines."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal, NoReturn

from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType

from fedmq.launch.interrupts import FAILED, say_interrupted
from fedmq.safe_console import SafeConsole

#: Exit code of a refused input, and of an audit or replay with differences.
BAD_INPUT, DIFFERENT = 2, 3
#: Exit code of an audit that lacks logs, and of one whose policy is broken, if nothing was altered.
INCOMPLETE, AGAINST_POLICY = 4, 5

out = SafeConsole()
err = SafeConsole(stderr=True)


def print_anything() -> None:
    """Print characters that standard output cannot encode in escaped form, as standard error does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and not (writes_unicode() and sys.stdout.errors == "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def writes_unicode() -> bool:
    """Whether standard output can encode every character."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def starting(*, quiet: bool = False) -> None:
    """Print on a terminal that the command is starting, since loading torch takes seconds."""
    if err.is_terminal and not quiet:
        err.print("starting: reading the scenario, loading torch")


@contextlib.contextmanager
def continued_by_repeating() -> Iterator[None]:
    """On Ctrl-C, say that the same command continues; for steps that keep what they have done in the cache."""
    try:
        yield
    except KeyboardInterrupt:
        say_interrupted("; repeat the command to continue")
        sys.exit(FAILED)


@contextlib.contextmanager
def continued_by_the_same_command() -> Iterator[None]:
    """On Ctrl-C or SIGTERM, say that the same command continues, and end as without a handler."""
    more = "; start it again with the same command, and it continues"

    def terminated(number: int, _frame: object) -> None:
        say_interrupted(more, "terminated")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except KeyboardInterrupt:
        say_interrupted(more)
        sys.exit(FAILED)
    finally:
        signal.signal(signal.SIGTERM, before)


def say(kind: Literal["warning", "failed", "left out"], line: str) -> None:
    """Print a line on standard error after what kind of problem it tells."""
    err.print(f"[{'red' if kind == 'failed' else 'yellow'}]{kind}[/] {escape(line)}", soft_wrap=True)


def to_copy(before: str, command: str) -> None:
    """Print a command on standard error in one line, however long, to be copied."""
    err.print(f"{before} [bold]{escape(command)}[/bold]", no_wrap=True, overflow="ignore", crop=False)


def exit_stopped(command: str, others: str = "") -> NoReturn:
    """Print the command that continues a stopped run, and exit."""
    to_copy(f"stopped{others}; continue with", command)
    sys.exit(FAILED)


def bar() -> Callable[[str, int, int], None]:
    """A progress line on standard error; returns the function that updates it with (what, done, total).

    A step that is repeated instantly, because its result is cached, is shown once.
    """
    shown: tuple[str, float] = ("", 0.0)
    step, began = ("", 0), 0.0  # what and how far; when its first report came
    finished: set[tuple[str, int]] = set()

    def show(what: str, done: int, total: int) -> None:
        nonlocal shown, step, began
        now, interval = time.monotonic(), 0.5 if err.is_terminal else 10.0
        if what != step[0] or done < step[1]:
            began = now
        step = (what, done)
        if (what, total) in finished and now - began < interval:
            return
        if what == shown[0] and done < total and now - shown[1] < interval:
            return
        shown = (what, now)
        again = err.is_terminal and done < total
        err.print(f"{what}: {done}/{total}", end="" if again else "\n", markup=False)
        if again:
            err.control(Control(ControlType.CARRIAGE_RETURN))
        if done >= total:
            finished.add((what, total))

    return show


def later(show: Callable[[str, int, int], None], seconds: float = 2.0) -> Callable[[str, int, int], None]:
    """A progress line that appears only once the work has taken some seconds."""
    began = time.monotonic()

    def show_later(what: str, done: int, total: int) -> None:
        if time.monotonic() - began >= seconds:
            show(what, done, total)

    return show_later
