"""Commands of fedmq that tests start as processes are forked with their imports done, which take seconds otherwise.

One that is given an environment of its own, which its imports may depend on, is started as ever.
Signals, files, sessions and exit codes of such a process are those of a program that was started from a shell.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from fedmq.launch.forkserver import CONTEXT, warm_up

#: Places of some arguments of Popen._execute_child, which carries out what Popen has prepared.
_WORDS, _PREPARE, _PLACE, _ENVIRONMENT, _PIPES, _SESSION = 0, 2, 5, 6, slice(10, 16), 21
#: An environment with this variable makes a command carry out its jobs itself, one after the other.
JOBS_HERE = "FEDMQ_TEST_JOBS_HERE"
_START = Path(sys.executable).parent / "fedmq"


class _File:
    """A file descriptor that is passed to a new process."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _passed, (reduction.DupFd(self._number),)


def _passed(file: Any) -> int:
    return int(file.detach())


def _run(
    words: Sequence[str], place: str, environment: Mapping[str, str], session: bool, files: Sequence[int], space: str
) -> None:
    """Become what a shell would have started, in a network namespace if one is named."""
    from fedmq.__main__ import main

    if space:
        with Path("/run/netns", space).open("rb") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0, f"no network namespace {space}"
    atexit._clear()  # what is registered from now on is due at the end
    if session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[:0] = ["fedmq", *words], [place]
    if JOBS_HERE in environment:
        from fedmq.launch import forkserver
        from tests.in_process_jobs import InThisProcess

        forkserver.start_job = InThisProcess  # type: ignore[assignment]
    try:
        main()
    finally:
        atexit._run_exitfuncs()


class Popen(subprocess.Popen[Any]):
    """In place of :class:`subprocess.Popen`: a command of fedmq is forked, another command runs as ever."""

    _process: Any = None

    def _execute_child(self, *arguments: Any) -> None:
        words = [os.fspath(word) for word in arguments[_WORDS]] if isinstance(arguments[_WORDS], Sequence) else []
        space = words[3] if words[:3] == ["ip", "netns", "exec"] else ""
        words = words[4:] if space else words
        prefix = 3 if words[:3] == [sys.executable, "-m", "fedmq"] else int(words[:1] == [str(_START)])
        if not prefix or arguments[_PREPARE] is not None or arguments[_ENVIRONMENT] is not None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pipes = arguments[_PIPES]
        theirs = [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        where = os.fspath(arguments[_PLACE] or Path.cwd())
        warm_up("features")
        files = [_File(number) for number in theirs]
        options = (words[prefix:], where, dict(os.environ), arguments[_SESSION], files, space)
        self._process = CONTEXT.Process(target=_run, args=options)
        self._process.start()
        self.pid, self._child_created = self._process.pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc]
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._process is None:
            return super()._wait(timeout)  # type: ignore[misc]
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode
