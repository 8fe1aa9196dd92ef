"""Mean AP of a full hashing benchmark: one pass over packed codes, compared with the usual NumPy loop over queries."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.line import CONTEXT
from benchmarks.measure import Number, Result
from fedmq.evaluation import label_metrics
from fedmq.seeds import numpy_generator

#: NUS-WIDE-21 as FedCAFE uses it.
QUERIES, ITEMS, BITS, LABELS = 2_100, 193_734, 64, 21
#: The loop over single queries is measured with one query in ten: all of them would take a minute.
_LOOP_PART = 10
#: Probability that an item has a label.
_RATE = 0.12


def codes_and_labels(queries: int, items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes in {-1, +1} that correlate with their multi-hot labels, for queries and database."""
    generator = numpy_generator(0, "benchmark", "hamming")
    directions = generator.normal(size=(LABELS, BITS))
    labels = [(generator.random((n, LABELS)) < _RATE).astype(np.float32) for n in (queries, items)]
    noise = [2 * generator.normal(size=(n, BITS)) for n in (queries, items)]
    code = [
        np.sign(multi_hot @ directions + each).astype(np.float32) for multi_hot, each in zip(labels, noise, strict=True)
    ]
    return code[0], code[1], labels[0], labels[1]


def usual_loop(q: np.ndarray, b: np.ndarray, q_labels: np.ndarray, b_labels: np.ndarray) -> float:
    """Mean AP as in public hashing code, one query at a time, but with a stable sort."""
    total = 0.0
    for code, labels in zip(q, q_labels, strict=True):
        relevant = (labels @ b_labels.T > 0).astype(np.float32)
        if relevant.sum() == 0:
            continue
        distance = 0.5 * (b.shape[1] - code @ b.T)
        ranked = relevant[np.argsort(distance, kind="stable")]
        places = np.flatnonzero(ranked) + 1.0
        total += float(np.mean(np.arange(1, len(places) + 1) / places))
    return total / len(q)


def _measured(name: str, size: tuple[int, int], line: Connection) -> None:
    """Target of a separate process: sends seconds, mean AP, and peak memory [MB]."""
    torch.set_num_threads(2)
    data = codes_and_labels(*size)
    began = time.perf_counter()
    match name:
        case "map":
            value = label_metrics.hamming_metrics(*data).map
        case "all":
            every = {"at": (50, 5000), "ndcg_at": (100,), "top_n": (100, 1000), "curves": True}
            value = label_metrics.hamming_metrics(*data, **every).map  # type: ignore[arg-type]
        case _:
            value = usual_loop(*data)
    seconds = time.perf_counter() - began
    line.send((seconds, value, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def in_process(target: Callable[..., None], *arguments: object) -> tuple[float, float, float]:
    """What a function sends in a separate process: seconds, a value, and peak memory [MB]."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    measured: tuple[float, float, float] = ours.recv()
    process.join()
    return measured


def run(*, smoke: bool = False) -> Result:
    """Measure mAP alone, all metrics in one pass, and the loop; ``smoke``: of a hundredth of the data."""
    size = (QUERIES // 100, ITEMS // 100) if smoke else (QUERIES, ITEMS)
    few = (size[0] // _LOOP_PART, size[1])
    alone, everything = (in_process(_measured, name, size) for name in ("map", "all"))
    same, loop = (in_process(_measured, name, few) for name in ("map", "loop"))
    numbers = (
        Number("mAP, mAP@50 and tie-averaged mAP", alone[0], "s", "at most 1 s"),
        Number("  peak memory of the process", alone[2], "MB", "at most 1500 MB"),
        Number("the same with NDCG, top-N and both curves", everything[0], "s"),
        Number("  peak memory of the process", everything[2], "MB", "at most 1500 MB"),
        Number(f"{few[0]:,} queries only: mAP, mAP@50 and tie-averaged mAP", same[0], "s"),
        Number("  the usual loop over them, mAP alone", loop[0], "s"),
        Number("  the loop's time as a multiple of ours", loop[0] / same[0], "x"),
        Number("  difference of the two mAPs", abs(same[1] - loop[1]), "", "below 1e-12"),
    )
    about = f"{size[0]:,} queries, {size[1]:,} codes of {BITS} bits, {LABELS} labels, 2 threads"
    return Result("hamming", numbers, (about, "memory includes Python, torch, and the input codes and labels"))
