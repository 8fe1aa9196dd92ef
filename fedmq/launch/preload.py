"""What the forkserver imports once so that every process of a run shares the pages.

Nothing here may start a thread, run a torch operation or touch CUDA: a fork would copy a broken state.
"""

import atexit
import gc
import importlib
import os
import signal

# Ctrl-C is for the command that started the forkserver: it ends, and then the forkserver does. The forkserver itself
# ignores it only once all is imported. The children inherit this, and none of them wants anything else.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# SIGTERM, which a scheduler sends to every process of a run, is blocked here: a child takes what came once it is ready.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
# SIGINT came blocked, see fedmq.launch.forkserver.
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

_MODULES = (
    "cryptography.hazmat.primitives.asymmetric.mlkem",
    "msgpack",
    "safetensors.torch",
    "torch",
    "coordinator.program",
    "fedmq.evaluation.program",
    "protocols",
    "silos.program",
)

for _name in _MODULES:
    importlib.import_module(_name)
for _name in importlib.import_module("protocols").METHODS.built_in():
    importlib.import_module(f"protocols.{_name}")
# What lives now lives for good: the collector must not write to these pages in every child.
gc.collect()
gc.freeze()


def _leave(forkserver: int = os.getpid()) -> None:
    """End the forkserver itself without tearing modules down: triton's bindings complain loudly when they are."""
    if os.getpid() == forkserver:
        os._exit(0)


atexit.register(_leave)
