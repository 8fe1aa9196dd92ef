"""Imports of the forkserver, whose memory pages all processes of a run share.

Nothing here may start a thread, run a torch operation or use CUDA, whose state does not survive a fork.
"""

import atexit
import gc
import importlib
import os
import signal

from fedmq.packages import full_name

# Ctrl-C is handled by the command that started the forkserver; when it exits, the forkserver exits, too. Children
# inherit this.
signal.signal(signal.SIGINT, signal.SIG_IGN)
# A scheduler sends SIGTERM to every process of a run. It is blocked here, and children unblock it once they are ready.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
# fedmq.launch.forkserver blocked SIGINT.
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

_MODULES = (
    "cryptography.hazmat.backends.openssl.backend",
    "cryptography.hazmat.primitives.asymmetric.mlkem",
    "encodings.cp437",  # of the names in .npz files
    "msgpack",
    "numpy.ma",
    "numpy.random",
    "safetensors.torch",
    "torch",
    full_name("coordinator.program"),
    "fedmq.evaluation.program",
    "fedmq.launch.processes",
    full_name("protocols"),
    full_name("silos.host"),
)

# Imports leave almost no garbage, but collections during them take a fifth of the time.
gc.disable()
for _name in _MODULES:
    importlib.import_module(_name)
for _package, _plugins in ((full_name("protocols"), "METHODS"), (full_name("protocols.objectives"), "OBJECTIVES")):
    _registry = getattr(importlib.import_module(_package), _plugins)
    for _name in _registry.built_in():
        _registry.find(_name)
# Exclude all current objects from garbage collection, which would write to the shared pages in every child.
gc.freeze()
gc.enable()


def _leave(forkserver: int = os.getpid()) -> None:
    """Exit the forkserver without tearing down modules, at which triton's bindings print errors."""
    if os.getpid() == forkserver:
        os._exit(0)


atexit.register(_leave)
