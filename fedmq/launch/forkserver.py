"""The forkserver: all processes of a simulated run, and the runs of a comparison or a search, are forked from it.

The command starts it before its own imports, so that both import in parallel. Importing this module imports little, and
not torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmq.errors import InputError
from fedmq.storage.locks import try_lock
from fedmq.storage.run_folder import writing

if TYPE_CHECKING:
    from fedmq.experiments.process_pool import Job

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


CONTEXT = multiprocessing.get_context("forkserver")
#: Order of the removal of the forkserver's folder at the end of this process: after multiprocessing removed its own
#: folder in it (-100). Before that, the forkserver ends, so that no one waits for it to close standard error.
_LAST, _BEFORE = -200, -50


def warm_up(backbone: str) -> None:
    """Start the forkserver if it is not running; it imports in the background what a backbone needs."""
    CONTEXT.set_forkserver_preload(["fedmq.launch.preload", *(["open_clip"] if needs_open_clip(backbone) else [])])
    settings = {
        # One thread per process: the silos share the cores, and a library that starts threads on import would leave
        # every fork with a broken thread pool.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        # Two arenas for the two threads of a process: more would hold freed buffers that no thread reuses. (Measured:
        # lower trim thresholds halve a silo's memory but double the time of its small steps.)
        "MALLOC_ARENA_MAX": "2",
    }
    before, folder = {name: os.environ.get(name) for name in settings}, tempfile.tempdir
    os.environ.update(settings)
    # Started first, because starting it would unblock the signal blocked below.
    resource_tracker.ensure_running()
    # The forkserver inherits the mask, so that no Ctrl-C reaches it before its first import ignores SIGINT. In this
    # process a Ctrl-C stays pending until the mask is restored.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        tempfile.tempdir = str(_socket_folder())
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = folder
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def needs_open_clip(backbone: str) -> bool:
    """Whether the processes of a run with a backbone import open_clip."""
    if backbone in ("lite", "features"):
        return False
    from fedmq.config.scenario import MATCONVNET, TIMM  # noqa: PLC0415 - takes longer than all imports above

    return backbone != MATCONVNET and not backbone.startswith(TIMM)


def stop() -> None:
    """End the forkserver if it is running and no process that this one forked from it is."""
    server: Any = getattr(forkserver, "_forkserver", None)
    if server is not None and server._forkserver_pid is not None and not multiprocessing.active_children():
        os.kill(server._forkserver_pid, signal.SIGKILL)  # it may be importing, and not notice a closed pipe
        server._stop()


@functools.cache
def _socket_folder() -> Path:
    """The folder in which multiprocessing makes its own one, which would stay after a SIGKILL.

    It is removed when this process ends.
    """
    stack = contextlib.ExitStack()
    util.Finalize(None, stack.close, exitpriority=_LAST)
    util.Finalize(None, stop, exitpriority=_BEFORE)
    return stack.enter_context(private_folder(FORKSERVER))


# ---------------------------------------------------------------------------------------------------- forked processes
_PR_SET_PDEATHSIG = 1


def end_with_forkserver(number: int) -> None:
    """In a forked process: let the forkserver end with the process that started it, and then receive a signal.

    The forkserver lives as long as any process holds the write end of its pipe, which every child inherits. Here it is
    closed; when the process that started the forkserver is gone, the kernel sends the signal to all children, even to
    a paused one.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    server: Any = getattr(forkserver, "_forkserver", None)
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        server._forkserver_alive_fd = None
        os.close(alive)


def start_job(job: Job) -> BaseProcess:
    """Start a run as ``python -m fedmq`` would, in a process whose imports are done; see :func:`start`."""
    return start(_fedmq, job.words, log=job.log)


def start(program: Callable[[Any], object], argument: object, *, log: Path) -> BaseProcess:
    """Start a process that calls ``program`` with one argument; its standard error goes to a log, a new file.

    It has a session of its own, so that it does not receive the terminal's Ctrl-C.

    Raises:
        DiskError: the log cannot be written.
    """
    with writing(log):
        log.write_bytes(b"")
    warm_up("features")  # without effect if a command has done so, for its backbone
    process = CONTEXT.Process(target=_alone, args=(program, argument, log))
    process.start()
    return process


def _alone(program: Callable[[Any], object], argument: object, log: Path) -> None:
    """Call a program in this forked process, which stops when the process that asked for it is gone."""
    os.setsid()
    end_with_forkserver(signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():
        os._exit(1)
    with log.open("ab") as errors, Path(os.devnull).open("ab") as nothing:
        os.dup2(errors.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    program(argument)


def _fedmq(words: tuple[str, ...]) -> None:
    sys.argv = ["fedmq", *words]
    runpy.run_module("fedmq", run_name="__main__", alter_sys=True)
