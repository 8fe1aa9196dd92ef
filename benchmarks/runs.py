"""Complete runs for the benchmarks: their scenario, the command, and the time of their rounds."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

#: The setting of the RCSR paper's main table; the benchmarks vary its size.
RCSR: dict[str, Any] = {
    "name": "bench",
    "rounds": 200,
    "participation": 0.5,
    "protocol": {"name": "rcsr"},
    "data": {"name": "openmoji"},
    "backbone": {"name": "lite"},
    "silos": {"count": 30},
    "partition": {"kind": "dir_clusters", "alpha": 0.1, "clusters": 50, "sizes": "equal"},
    "missing_modality": {"rate": 0.5, "seed": 42},
    "training": {
        "learning_rate": 1.0e-3,
        "weight_decay": 0.01,
        "batch_size": 128,
        "local_epochs": 1,
        "warmup_rounds": 5,
    },
    "evaluation": {"every": 10, "split": "test"},
}


def rcsr_scenario(folder: Path, *, smoke: bool) -> Path:
    """Write the scenario of :data:`RCSR` into a folder; ``smoke``: three silos on a few synthetic features."""
    scenario = RCSR
    if smoke:
        scenario = {**RCSR, **synthetic_features(folder / "items.npz", train=120, test=20, width=32)}
        scenario["partition"] = {"kind": "iid"}
        scenario["silos"] = {"count": 3}
        scenario["training"] = {**RCSR["training"], "warmup_rounds": 0}
    path = folder / "bench.yaml"
    path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Roster:
    """Size of a run of RCSR on synthetic features."""

    silos: int
    items: int  # number of training items of all silos together
    width: int  # of images and texts, which decides about the size of the model
    rounds: int
    selected: int  # number of silos that train in each round
    missing: float = 0.5  # share of the silos with one modality
    test: int = 20  # number of test items; at least one for each silo
    labels: int = 0  # number of labels, of which an item has three on average; 0 for none
    batch: int = 20  # batch size


def roster_scenario(folder: Path, roster: Roster) -> Path:
    """Write the scenario of a roster, and its features, into a folder."""
    name = f"roster-{roster.silos}-{roster.items}-{roster.width}"
    path, test = folder / f"{name}.npz", max(roster.silos, roster.test)
    scenario: dict[str, Any] = {
        "name": name,
        "rounds": roster.rounds,
        "participation": roster.selected / roster.silos,
        "protocol": {"name": "rcsr"},
        **synthetic_features(path, train=roster.items, test=test, width=roster.width, labels=roster.labels),
        "silos": {"count": roster.silos},
        "partition": {"kind": "iid"},
        "missing_modality": {"rate": roster.missing},
        "training": {"learning_rate": 1.0e-3, "batch_size": roster.batch, "warmup_rounds": 0},
        "evaluation": {"every": 0},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    return path


def synthetic_features(path: Path, *, train: int, test: int, width: int, labels: int = 0) -> dict[str, Any]:
    """Write synthetic features of pairs, and return a scenario's sections ``data`` and ``backbone`` that read them."""
    generator = np.random.default_rng(0)
    latent = generator.standard_normal((train + test, width), dtype=np.float32)
    noise = generator.standard_normal((2, train + test, width), dtype=np.float32)
    image, text = latent + 0.5 * noise
    write = partial(np.savez, path, image=image, text=text[:, None], split=["train"] * train + ["test"] * test)
    if labels:
        write(labels=generator.random((train + test, labels)) < 3 / labels)
    else:
        write()
    return {"data": {"name": "features", "path": str(path)}, "backbone": {"name": "features"}}


def simulated(
    scenario: Path, out: Path, *settings: str, options: Sequence[str] = (), limit_s: float = 300.0
) -> dict[str, Any]:
    """Run ``fedmq scenario`` and return its summary.

    Raises:
        subprocess.SubprocessError: the run failed or exceeded the time limit.
    """
    return output_of(
        "scenario", str(scenario), "--out", str(out), "--quiet", *options, settings=settings, limit_s=limit_s
    )


def output_of(*words: str, settings: Sequence[str] = (), limit_s: float = 300.0) -> dict[str, Any]:
    """Run a command of fedmq with ``--json`` and return what it prints; see :func:`simulated`."""
    command = [sys.executable, "-m", "fedmq", *words, "--json"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=limit_s)
    if done.returncode:
        raise subprocess.SubprocessError(f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr.decode()}")
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Sample the memory of all descendants of this process; the list holds the largest value so far [MB PSS].

    A run itself measures its memory only twice a minute, so that it costs nothing.
    """
    peak, over = [0.0], threading.Event()

    def sample() -> None:
        while True:
            began, total = time.thread_time(), 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):  # it has just ended
                    total += process.memory_full_info().pss
            peak[0] = max(peak[0], total / 2**20)
            # Sampling takes at most a twentieth of a core, and does not become rare on a busy machine.
            if over.wait(max(0.25, 20 * (time.thread_time() - began))):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def loop_seconds(run: Path) -> float:
    """Seconds of all rounds: the mean time between two merges, times their number.

    Raises:
        ValueError: the run has fewer than two merges.
    """
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    merged = [datetime.fromisoformat(line["wall"]) for line in lines if line["kind"] == "merge"]
    if len(merged) < 2:
        raise ValueError(f"{len(merged)} merges, two or more are needed")
    return (merged[-1] - merged[0]).total_seconds() * len(merged) / (len(merged) - 1)
