"""Memory of a FedUCH silo with 20,000 pairs, which computes similarities between all items in blocks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import yaml

from benchmarks.measure import Number, Result, load_average

PAIRS, IMAGE, TEXT, WIDTH, ROUNDS = 20_000, 4096, 1386, 4096, 2
_EVERY_S = 0.2


def _features(path: Path) -> None:
    """Write synthetic features with the widths of VGG-19 and a bag of words; a tenth as many test items."""
    generator = np.random.default_rng(0)
    n = PAIRS + PAIRS // 10
    image = generator.standard_normal((n, IMAGE), dtype=np.float32)
    text = (generator.random((n, TEXT), dtype=np.float32) < 0.01).astype(np.float32)
    labels = np.eye(10, dtype=np.uint8)[np.arange(n) % 10]
    split = np.array(["train"] * PAIRS + ["test"] * (n - PAIRS))
    np.savez(path, image=image, text=text, labels=labels, split=split)


def _scenario(features: Path) -> dict[str, object]:
    """One silo with all data, the paper's networks and batch size; one epoch per task, to save time."""
    return {
        "name": "blockwise",
        "rounds": ROUNDS,
        "protocol": "feduch",
        "objective": {"base": "dgcpn", "bits": 64, "hidden": WIDTH},
        "data": {"name": "features", "path": str(features)},
        "backbone": {"name": "features"},
        "silos": {"count": 1},
        "partition": {"kind": "iid"},
        "training": {
            "optimizer": "sgd",
            "learning_rate": 0.005,
            "batch_size": 32,
            "local_epochs": 1,
            "schedule": "constant",
            "warmup_rounds": 0,
        },
        "evaluation": {"every": 0, "gallery": "split"},
    }


def _peak(process: psutil.Process) -> tuple[int, int]:
    """Peak resident memory of a process, with shared libraries, and its current PSS [bytes]."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    (most,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return 1024 * int(most), int(process.memory_full_info().pss)


def _is_silo(process: psutil.Process, run: Path) -> bool:
    return any(Path(file.path) == run / "messages" / "silo-00.jsonl" for file in process.open_files())


def run() -> Result:
    """Measure the silo process over two tasks: the second one also contrasts with the previous networks."""
    before = load_average()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _features(folder / "items.npz")
        (folder / "s.yaml").write_text(yaml.safe_dump(_scenario(folder / "items.npz")), encoding="utf-8")
        out, peak, peak_pss, began = folder / "run", 0, 0, time.perf_counter()
        command = [sys.executable, "-m", "fedmq", "scenario", str(folder / "s.yaml"), "--out", str(out), "--quiet"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as started:
            silo: psutil.Process | None = None
            while started.poll() is None:
                time.sleep(_EVERY_S)
                try:
                    if silo is None:
                        children = psutil.Process(started.pid).children(recursive=True)
                        silo = next((each for each in children if _is_silo(each, out)), None)
                    else:
                        resident, pss = _peak(silo)
                        peak, peak_pss = max(peak, resident), max(peak_pss, pss)
                except (psutil.Error, OSError, ValueError):
                    continue  # the process has just ended
        seconds = time.perf_counter() - began
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    gigabytes = [
        Number(text, value / 1e9, "GB", "at most 2") for text, value in (("resident", peak), ("PSS", peak_pss))
    ]
    notes = (
        f"{summary['tasks']['merged']} tasks of {PAIRS:,} pairs, {IMAGE:,} and {TEXT:,} numbers wide, networks of "
        f"{WIDTH:,}, batches of 32; resident is the peak, PSS the largest of samples every {_EVERY_S} s",
    )
    return Result("blockwise", (*gigabytes, Number("whole run", seconds, "s")), notes, (before, load_average()))
