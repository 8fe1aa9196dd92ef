"""The forkserver of a run: its imports start no thread and no CUDA, and silos import nothing after the fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_PROGRAM = """
import gc, json, pathlib, sys
import fedmq.launch.preload
import torch
status = pathlib.Path("/proc/self/status").read_text()
threads = next(line.split()[1] for line in status.splitlines() if line.startswith("Threads:"))
print(json.dumps({
    "threads": int(threads),
    "cuda": torch.cuda.is_initialized(),
    "collecting": gc.isenabled(),
    "frozen": gc.get_freeze_count(),
    "modules": sorted(sys.modules),
}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_forkserver_has_one_thread_no_cuda_and_every_module_that_a_silo_needs() -> None:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env={**os.environ, **one}, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["threads"] == 1
    assert not found["cuda"]
    # Frozen objects are not collected, so that no child writes to shared pages; its own garbage is.
    assert found["frozen"] > 100_000
    assert found["collecting"]
    needed = {"numpy.random", "numpy.ma", "protocols.rcsr", "protocols.objectives.info_nce", "silos.host", "zmq"}
    assert needed <= set(found["modules"])
    assert not {"pandas", "plotly", "scipy.linalg", "sklearn", "torchvision"} & set(found["modules"])
