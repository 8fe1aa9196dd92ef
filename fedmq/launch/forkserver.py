"""The forkserver that all processes of a simulated run come from. Importing this module brings no torch.

The command starts it before its own imports, so that both import at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver, resource_tracker

from fedmq.config.scenario import MATCONVNET, TIMM

CONTEXT = multiprocessing.get_context("forkserver")


def warm_up(backbone: str) -> None:
    """Start the forkserver, once; it imports in the background while this process goes on.

    Args:
        backbone: name of the scenario's.
    """
    bare = backbone in ("lite", "features", MATCONVNET) or backbone.startswith(TIMM)
    CONTEXT.set_forkserver_preload(["fedmq.launch.preload", *([] if bare else ["open_clip"])])
    settings = {
        # One thread per process: the silos share the cores, and a library that starts threads while it is imported
        # would leave every fork with a broken pool.
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        # Two threads per process, two arenas: more would keep freed buffers that nobody can use. (Lower thresholds for
        # giving memory back were measured: they halve a silo's memory, and double the time of its small steps.)
        "MALLOC_ARENA_MAX": "2",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    # Started first, for its start would unblock what is blocked below.
    resource_tracker.ensure_running()
    # The forkserver inherits this: no Ctrl-C reaches it before its first import ignores them. Here one only waits.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
