"""A run of 200,000 items in 100 silos: its start, a round, ``--check``, a search in its gallery, and an evaluation.

Also the memory that recall needs beyond its embeddings.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.hamming import in_process
from benchmarks.measure import Number, Result
from benchmarks.runs import Roster, loop_seconds, output_of, roster_scenario, simulated
from fedmq.evaluation.recall import retrieval_ranks
from fedmq.runs.profile import Profile, read
from fedmq.seeds import numpy_generator
from fedmq.storage.run_folder import RunFolder
from fedmq.wire.messages import EVALUATOR

#: 200,000 items in 100 silos, of which 20 train in each round.
_LARGE = Roster(silos=100, items=200_000, width=512, rounds=4, selected=20, test=10_000, batch=128)
#: Its evaluation ranks 17,944 items for each of 10,000 queries.
_LABELLED = Roster(silos=100, items=17_944, width=512, rounds=1, selected=20, test=10_000, batch=128, labels=80)
#: Recall: images and captions, a tenth of 200,000 and of 1,000,000, and their width.
_IMAGES, _CAPTIONS, _WIDTH = 20_000, 100_000, 64


def run(*, smoke: bool = False) -> Result:
    """Measure a run, ``--check``, searches in its gallery, and an evaluation; ``smoke``: a hundredth of the items."""
    small = {"silos": 3, "width": 32, "selected": 2, "test": 40}
    large, labelled = (
        replace(each, **small, items=each.items // 100) if smoke else each for each in (_LARGE, _LABELLED)
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder, number = Path(name), f"{large.items:,} items"
        scenario, out = roster_scenario(folder, large), folder / "run"
        prepared = _seconds("data", "features", str(scenario))
        check = _seconds("scenario", str(scenario), "--check", "--quiet")
        start = simulated(scenario, out)["seconds"]["startup"]
        first, search = (_seconds("search", str(out), "--item", "000000") for _ in range(2))
        of_labels, with_labels = roster_scenario(folder, labelled), folder / "labelled"
        simulated(of_labels, with_labels, "evaluation.gallery=database", options=("--profile",))
        evaluated = Profile.of(read(RunFolder(with_labels).profile)).of_all([EVALUATOR])["evaluate"] / 2
        images, captions = (each // 100 if smoke else each for each in (_IMAGES, _CAPTIONS))
        half, many = (in_process(_recalled, images // part, captions // part) for part in (2, 1))
        further = 2 * (many[2] - half[2]) / captions  # of a caption and its share of the images
        of_recall = f"recall of {captions:,} captions x {images:,} images"
        numbers = (
            Number(f"{number}: prepared", prepared, "s"),
            Number(f"{number}: {large.silos} silos ready after", start, "s", "at most 10 s"),
            Number(f"{number}: a round", loop_seconds(out) / large.rounds, "s", "at most 3 s"),
            Number(f"{number}: --check", check, "s", "at most 5 s"),
            Number(f"{number}: first search, which encodes them", first, "s"),
            Number(f"{number}: another search", search, "s", "at most 1 s"),
            Number(f"{labelled.test:,} x {labelled.items:,} with labels: evaluation", evaluated, "s", "at most 3 s"),
            Number(of_recall, many[0], "s"),
            Number("  its memory beyond the embeddings", many[2], "MB"),
            Number("  the same with half of both", half[2], "MB"),
            Number("  extrapolated to 1,000,000 x 200,000", many[2] + further * (1_000_000 - captions), "MB"),
        )
    notes = (
        f"recall of embeddings {_WIDTH} wide, 2 threads",
        f"rounds of {large.selected} silos, features {large.width} wide, batches of {large.batch}; prepared once",
        f"{labelled.labels} labels; evaluated in both directions, before the first and after the last round (mean)",
    )
    return Result("large", numbers, notes)


def _recalled(images: int, captions: int, line: Connection) -> None:
    """Target of a separate process: sends seconds, mean rank, and peak memory beyond the embeddings [MB]."""
    generator, owner = numpy_generator(0, "benchmark", "recall"), np.arange(captions) % images
    image, text = (generator.standard_normal((n, _WIDTH), dtype=np.float32) for n in (images, captions))
    retrieval_ranks(image[:10], text[:10], owner[:10])  # what it imports is not counted
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    ranks = retrieval_ranks(image, text, owner, threads=2)[1]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line.send((time.perf_counter() - began, float(ranks.mean()), (peak - before) / 2**20))


def _seconds(*words: str) -> float:
    """How long a command takes [s]."""
    began = time.perf_counter()
    output_of(*words)
    return time.perf_counter() - began
