"""The forkserver from which all processes of a simulated run are forked. Importing this module does not import torch.

The command starts it before its own imports, so that both import in parallel.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

from fedmq.config.scenario import MATCONVNET, TIMM
from fedmq.launch.private_folder import FORKSERVER, private_folder

CONTEXT = multiprocessing.get_context("forkserver")
#: Order of the removal of the forkserver's folder at the end of this process: after multiprocessing removed its own
#: folder in it (-100).
_LAST = -200


def warm_up(backbone: str) -> None:
    """Start the forkserver if it is not running; it imports in the background while this process continues.

    Args:
        backbone: name of the scenario's backbone; decides whether OpenCLIP is imported, too.
    """
    without_open_clip = backbone in ("lite", "features", MATCONVNET) or backbone.startswith(TIMM)
    CONTEXT.set_forkserver_preload(["fedmq.launch.preload", *([] if without_open_clip else ["open_clip"])])
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


@functools.cache
def _socket_folder() -> Path:
    """The folder in which multiprocessing makes its own one, which would stay after a SIGKILL.

    It is removed when this process ends.

    Raises:
        InputError: no folder for temporary files has a path that is short enough.
    """
    stack = contextlib.ExitStack()
    util.Finalize(None, stack.close, exitpriority=_LAST)
    return stack.enter_context(private_folder(FORKSERVER))
