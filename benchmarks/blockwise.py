"""Memory of a FedUCH silo with 12,000 pairs, which computes similarities between all items in blocks.

``python -m benchmarks.blockwise`` measures 20,000 pairs with the paper's widths, in a quarter of an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import yaml

from benchmarks.measure import Number, Result

ROUNDS = 2
_EVERY_S = 0.2


@dataclass(frozen=True)
class Size:
    """Items of the silo, and widths of its images, texts and networks.

    All similarities between 12,000 items at once would take 0.6 GB, in each modality.
    """

    pairs: int = 12_000
    image: int = 512
    text: int = 256
    width: int = 256
    most_gb: float = 0.8


#: The widths of VGG-19, of FedUCH's bags of words, and of its networks.
PAPER = Size(pairs=20_000, image=4096, text=1386, width=4096, most_gb=2.0)


def _features(path: Path, size: Size) -> None:
    """Write synthetic features, dense ones of images and sparse ones of texts; a tenth as many test items."""
    generator = np.random.default_rng(0)
    n = size.pairs + size.pairs // 10
    image = generator.standard_normal((n, size.image), dtype=np.float32)
    text = (generator.random((n, size.text), dtype=np.float32) < 0.01).astype(np.float32)
    labels = np.eye(10, dtype=np.uint8)[np.arange(n) % 10]
    split = np.array(["train"] * size.pairs + ["test"] * (n - size.pairs))
    np.savez(path, image=image, text=text, labels=labels, split=split)


def _scenario(features: Path, width: int) -> dict[str, object]:
    """One silo with all data and the paper's batch size; one epoch per task, to save time."""
    return {
        "name": "blockwise",
        "rounds": ROUNDS,
        "protocol": "feduch",
        "objective": {"base": "dgcpn", "bits": 64, "hidden": width},
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


def run(*, smoke: bool = False) -> Result:
    """Measure the silo process over two tasks: the second one also contrasts with the previous networks.

    ``smoke``: a hundredth of the items, and narrow networks.
    """
    return measured(Size(pairs=200, image=64, text=32, width=64) if smoke else Size())


def measured(size: Size) -> Result:
    """Run the two tasks, and sample the memory of the silo's process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _features(folder / "items.npz", size)
        (folder / "s.yaml").write_text(yaml.safe_dump(_scenario(folder / "items.npz", size.width)), encoding="utf-8")
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
        Number(text, value / 1e9, "GB", f"at most {size.most_gb:g}")
        for text, value in (("resident", peak), ("PSS", peak_pss))
    ]
    notes = (
        f"{summary['tasks']['merged']} tasks of {size.pairs:,} pairs, {size.image:,} and {size.text:,} numbers wide, "
        f"networks of {size.width:,}, batches of 32",
        f"resident is the peak, PSS the largest of samples every {_EVERY_S} s",
    )
    return Result("blockwise", (*gigabytes, Number("whole run", seconds, "s")), notes)


if __name__ == "__main__":
    print(*(f"{number.name}: {number.value:.3g} {number.unit}" for number in measured(PAPER).numbers), sep="\n")
