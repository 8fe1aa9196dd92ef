"""Everything that needs a GPU, measured by one command in at most eight minutes, as a table in Markdown.

Usage: ``python -m benchmarks.gpu [--out FILE.md] [--minutes 8] [--smoke]``. Without a GPU it needs ``--smoke``, which
measures nothing of interest: it goes through every step on the CPU with a tiny model, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip.model import CLIP

from benchmarks.clip_models import ClipModel, clip_model, synthetic_dataset, synthetic_manifest
from benchmarks.measure import Number, machine, spread
from benchmarks.runs import loop_seconds, simulated
from benchmarks.vit import silo_task, training_rates
from fedmq.encoders.clip_weights import config_of
from fedmq.wire.payloads import Delta

ROOT = Path(__file__).resolve().parent.parent
#: Largest relative difference of an update between the CPU and a GPU that counts as equal.
CLOSE = 1e-3


@dataclass(frozen=True)
class Size:
    """Size of the measurements."""

    pairs: int = 2048  # for the throughput, like ``batch`` and ``repeats``
    compared: int = 32  # pairs for the comparison with the CPU
    batch: int = 128
    repeats: int = 5
    images: int = 1600  # synthetic, for the runs
    silos: int = 30  # in the run of rcsr_mr50_clip, like ``rounds`` and ``hosts``
    rounds: int = 6
    hosts: int = 4


_SMOKE = Size(pairs=8, compared=8, batch=4, repeats=1, images=40, silos=4, rounds=2, hosts=2)


@dataclass
class Bench:
    """The state of one call."""

    device: str  # ``cuda:0``, or ``cpu`` for a rehearsal
    model: ClipModel
    size: Size
    folder: Path  # for files, removed at the end
    until: float  # time at which no further step starts and a running one ends [s, monotonic]
    numbers: list[Number] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Remaining time [s]."""
        return self.until - time.monotonic()

    def step(self, name: str, measure: Callable[[Bench], list[Number]]) -> None:
        """Take a step of the benchmark, unless its time is up; a step that fails does not lose the others."""
        began = time.monotonic()
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            if self.left < 1:
                raise TimeoutError("no time was left")
            self.numbers += measure(self)
        except (subprocess.SubprocessError, RuntimeError, TimeoutError, OSError, ValueError) as error:
            self.left_out.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _update(bench: Bench, device: str) -> np.ndarray:
    """The update of one task on a device."""
    dataset = synthetic_dataset(bench.model, bench.size.compared)
    # With SGD: AdamW's first step has the size of the learning rate, even where a gradient is all rounding.
    task, _ = silo_task(bench.model, dataset, bench.size.compared, device, bench.folder / "cache", optimizer="sgd")
    (update,) = (each for each in task().payloads if isinstance(each, Delta))
    return np.asarray(update.buffer, dtype=np.float64)


def numerics(bench: Bench) -> list[Number]:
    """Compare the update of a task on the GPU with that on the CPU, and with itself."""
    from fedmq.federation.population import device_of

    device_of(bench.device)  # deterministic kernels, as in every run
    here, again, there = _update(bench, bench.device), _update(bench, bench.device), _update(bench, "cpu")
    difference = float(np.linalg.norm(here - there) / np.linalg.norm(there))
    return [
        Number("update of a task, GPU to CPU: relative difference", difference, "", f"below {CLOSE:g}"),
        Number("update of a task, GPU twice: values that differ", float(np.sum(here != again)), "", "0"),
    ]


def throughput(bench: Bench) -> list[Number]:
    """Compare a silo's training with a plain PyTorch loop."""
    size = bench.size
    if bench.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    rates = training_rates(bench.model, size.pairs, size.batch, size.repeats, bench.device, bench.folder / "cache")
    numbers = [
        spread("a silo's task, from download to update", rates.silo, "samples/s"),
        spread("a plain PyTorch loop", rates.bare, "samples/s"),
        spread("the silo as a multiple of the plain loop", rates.multiples, "x", "at least 0.98"),
    ]
    if bench.device != "cpu":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.empty_cache()
        numbers.append(Number(f"peak memory of both in turn, batches of {size.batch}", peak, "GiB"))
    return numbers


@contextlib.contextmanager
def peak_memory(device: str) -> Iterator[list[float]]:
    """Sample the memory in use on a device, by all processes; the list holds the largest value so far [GiB].

    This includes the CUDA context of this process, about half a GiB.
    """
    peak, over = [0.0], threading.Event()

    def sample() -> None:
        while not over.wait(0.2):
            free, total = torch.cuda.mem_get_info(device)
            peak[0] = max(peak[0], (total - free) / 2**30)

    thread = threading.Thread(target=sample, daemon=True)
    if device != "cpu":
        thread.start()
    try:
        yield peak
    finally:
        over.set()
        if device != "cpu":
            thread.join()


def _run(bench: Bench, out: str, *settings: str) -> tuple[dict[str, Any], float]:
    """Run rcsr_mr50_clip on synthetic images: its summary, and the peak memory of the device [GiB]."""
    manifest = bench.folder / "list.csv"
    if not manifest.exists():
        synthetic_manifest(bench.folder, bench.size.images)
    common = (
        f"backbone.name={bench.model.name}",
        "backbone.pretrained=null",
        f"data={{name: manifest, path: {manifest}}}",
        "partition.clusters=10",
        "evaluation.every=0",
        f"device={bench.device}",
    )
    with peak_memory(bench.device) as peak:
        scenario = ROOT / "scenarios" / "rcsr_mr50_clip.yaml"
        summary = simulated(scenario, bench.folder / out, *common, *settings, limit_s=max(1.0, bench.left))
    return summary, peak[0]


def rounds(bench: Bench) -> list[Number]:
    """Time rounds of the paper's federation, hosted by a few processes."""
    size = bench.size
    settings = (f"silos.count={size.silos}", f"rounds={size.rounds}", f"silos.hosts={size.hosts}")
    summary, peak = _run(bench, "rounds", *settings)
    what = f"rcsr_mr50_clip, {size.silos} silos in {size.hosts} processes"
    return [
        Number(f"{what}: a round", loop_seconds(bench.folder / "rounds") / size.rounds, "s"),
        Number(f"{what}: until all silos are ready", summary["seconds"]["startup"], "s"),
        *_memory(what, peak),
    ]


def towers(bench: Bench) -> list[Number]:
    """Compare the memory of one and of several processes of silos, of which one trains: do they share the tower?"""
    size, peaks = bench.size, []
    for hosts in (1, size.hosts):
        # One round of one silo: activations of all other processes would hide their towers.
        settings = (f"silos.count={size.silos}", "rounds=1", f"silos.hosts={hosts}", f"participation={1 / size.silos}")
        peaks.append(_run(bench, f"towers-{hosts}", *settings)[1])
    tower = tower_size(bench.model) / 2**30
    frozen = Number("size of the frozen tower", tower, "GiB")
    if bench.device == "cpu":
        return [frozen]
    context = context_memory(bench.device)
    added = (peaks[1] - peaks[0]) / (size.hosts - 1)
    return [
        Number(f"{size.silos} silos: memory of the GPU for each further process that does not train", added, "GiB"),
        Number("of that the CUDA context", context, "GiB"),
        frozen,
        Number("frozen towers in each further process", (added - context) / tower, "", "at most 0.2: one for all"),
    ]


def context_memory(device: str) -> float:
    """Memory of a device that a process takes which does nothing on it [GiB]."""
    code = "import sys, torch; torch.zeros(1, device=sys.argv[1]); print(flush=True); sys.stdin.read()"
    before, _ = torch.cuda.mem_get_info(device)
    words = [sys.executable, "-c", code, device]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        after, _ = torch.cuda.mem_get_info(device)
        process.stdin.close()
    return (before - after) / 2**30


def tower_size(model: ClipModel) -> int:
    """Bytes of the frozen parameters of both encoders, in float32."""
    with torch.device("meta"):
        return 4 * sum(int(each.numel()) for each in CLIP(**config_of(model.name)).parameters())


def four_silos(bench: Bench) -> list[Number]:
    """Time four silos on one GPU, each in its own process, first one at a time, then in parallel."""
    numbers, digests, seconds, peaks = [], set(), [], []
    for slots in (1, 4):
        settings = ("silos.count=4", f"silos.slots={slots}", f"rounds={bench.size.rounds}", "participation=1.0")
        summary, peak = _run(bench, f"four-{slots}", *settings, "missing_modality.rate=0.0")
        digests.add(summary["model_digest"])
        seconds.append(loop_seconds(bench.folder / f"four-{slots}") / bench.size.rounds)
        peaks.append(peak)
        what = f"four silos on one GPU, {slots} at a time"
        numbers += [Number(f"{what}: a round", seconds[-1], "s"), *_memory(what, peak)]
    numbers.append(Number("four silos, 4 at a time to 1: time", seconds[1] / seconds[0], "x", "at most 0.6"))
    if all(peaks):
        numbers.append(Number("four silos, 4 at a time to 1: memory", peaks[1] / peaks[0], "x", "at most 1.5"))
    return [*numbers, Number("four silos: different models of the two runs", len(digests) - 1, "", "0")]


def _memory(what: str, peak: float) -> list[Number]:
    return [Number(f"{what}: peak memory of the GPU", peak, "GiB")] if peak else []


def markdown(bench: Bench) -> str:
    """The table."""
    about: dict[str, Any] = machine()
    if bench.device != "cpu":
        properties = torch.cuda.get_device_properties(bench.device)
        about["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    lines = [
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"{Path(bench.model.name).stem} with adapters in every block, random weights, {bench.device}",
        "",
        "| measured | median | least | most | target |",
        "|---|---|---|---|---|",
    ]
    for each in bench.numbers:
        low, high = ("", "") if each.low is None else (f"{each.low:.4g}", f"{each.high:.4g}")
        lines.append(f"| {each.name} | {each.value:.4g} {each.unit} | {low} | {high} | {each.aim} |")
    if bench.device == "cpu":
        lines += ["", "A rehearsal without a GPU: no number says anything about one."]
    lines += ["", *(f"Left out: {each}" for each in bench.left_out)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table to this file, after each step")
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all steps together (default 8)")
    parser.add_argument(
        "--smoke", action="store_true", help="rehearse with a tiny model, without a GPU if there is none"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        sys.exit("no GPU: torch.cuda.is_available() is false here; --smoke rehearses on the CPU")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, until = Path(name), time.monotonic() + 60 * arguments.minutes
        size = _SMOKE if arguments.smoke else Size()
        bench = Bench(device, clip_model(folder, smoke=arguments.smoke), size, folder, until)
        for step in (numerics, throughput, rounds, towers, four_silos):
            bench.step(step.__name__, step)
            if arguments.out is not None:
                arguments.out.write_text(markdown(bench), encoding="utf-8")
        print(markdown(bench))
        sys.exit(1 if bench.left_out else 0)


if __name__ == "__main__":
    main()
