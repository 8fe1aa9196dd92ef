"""Prepare the data of a run before its processes start, and refuse a run that cannot carry out its scenario on them."""

from __future__ import annotations

import tempfile
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from coordinator.run_context import run_context_of
from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Scenario
from fedmq.data import extract
from fedmq.data.extract import ExtractionPlan
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import save_arrays, save_present
from fedmq.data.splits import SPLITS
from fedmq.encoders.base import MODALITIES
from fedmq.errors import RunError
from fedmq.evaluation.custom_metrics import measures_of
from fedmq.federation.population import Population, build_population, check_clusters
from fedmq.launch.forkserver import CONTEXT, warm_up
from fedmq.launch.processes import raise_reported, report, report_result, set_up_child
from fedmq.storage.cache import cache_folder
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress


def prepare_population(run: ResolvedRun, progress: Progress | None) -> Path:
    """Prepare the run's data in a separate process, as only extraction needs the encoders; returns their folder.

    Raises:
        InputError: the data cannot be read, or not partitioned as configured.
        RunError: the process died.
    """
    warm_up(run.scenario.backbone.name)
    line, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=population_process, args=(run, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        while True:
            match line.recv():
                case (str(what), int(done), int(total)):
                    if progress is not None:
                        progress(what, done, total)
                case Path() as folder:
                    return folder
                case item:
                    raise_reported(item)
    except EOFError:
        process.join(1.0)
        raise RunError(f"preparing the data ended with exit code {process.exitcode}, see above") from None
    finally:
        if process.is_alive():
            process.join(1.0)
            process.kill()
        process.join()


def population_process(run: ResolvedRun, line: Connection) -> None:
    """Prepare the data; sends progress and finally the folder or the error to the parent."""
    set_up_child()
    report_result(line, lambda: population_here(run, lambda *progress: report(line, progress)))


def population_here(run: ResolvedRun, progress: Progress | None) -> Path:
    """Prepare the run's data in this process, otherwise like :func:`prepare_population`.

    Raises:
        InputError: the run's programs would refuse the data, or the scenario with these data.
    """
    before = partial(refuse_before_extraction, run)
    population = build_population(run.scenario, progress, pooled=run.pooled, before=before)
    _can_start(run, run.scenario, population)
    return population.prepared.folder


_WIDTH = 8  # of placeholder features, if the width is only known after loading the encoder


def planned(scenario: Scenario, progress: Progress | None) -> ExtractionPlan | Path:
    """What a run would still extract from its data; their folder if the cache or a file has the features.

    Raises:
        InputError: the data cannot be read.
    """
    if scenario.backbone.name == "features":
        return prepare(scenario.dataset, scenario.backbone, None, scenario.seed, progress).folder
    made = extract.plan(scenario.dataset, scenario.backbone, cache_folder(), scenario.seed, progress=progress)
    folder = cache_folder() / "data" / made.digest
    return folder if folder.is_dir() else made


def check_data(run: ResolvedRun, progress: Progress | None, known: ExtractionPlan | Path | None = None) -> None:
    """Refuse a run whose data do not suffice, without extracting features.

    ``known`` is what :func:`planned` says, if it was asked already.

    Raises:
        InputError: the run's programs would refuse the data, or the scenario with these data.
    """
    scenario = run.scenario
    if scenario.data is None:
        return
    known = planned(scenario, progress) if known is None else known
    if isinstance(known, Path):
        _can_start(run, scenario, build_population(_on_cpu(scenario), progress, folder=known, pooled=run.pooled))
    else:
        refuse_before_extraction(run, known)


def _can_start(run: ResolvedRun, scenario: Scenario, population: Population) -> None:
    """Check that a run can start, by constructing what its programs construct.

    Raises:
        InputError: the backbone does not fit the data, weights are missing or of other shapes, no silo is eligible, or
            one of the user's own metrics cannot be loaded.
    """
    scenario = _on_cpu(scenario)
    with run.source.naming_the_file():
        run_context_of(scenario, population.counted(scenario), RunFolder(Path()))
    population.build_model(scenario, "cpu", MODALITIES)
    measures_of(scenario.evaluation)


def _on_cpu(scenario: Scenario) -> Scenario:
    """The scenario on a device that every machine has; the devices of the programs have a check of their own."""
    return scenario.model_copy(update={"device": "cpu"})


def refuse_before_extraction(run: ResolvedRun, made: ExtractionPlan) -> None:
    """Refuse a scenario that cannot run on a data set, as far as that can be seen without its features.

    Raises:
        InputError: a run would refuse it, or there are fewer training texts than ``partition.clusters``.
    """
    scenario = run.scenario
    if scenario.partition.kind == "dir_clusters":
        present, train = made.raw.present(made.kind), made.split == SPLITS.index("train")
        texts = int((train if present is None else train & present[:, 1]).sum())
        check_clusters(scenario.partition.clusters, texts)
    if scenario.backbone.adapter_site == "blocks" or scenario.backbone.end_to_end:
        return  # needs pixels, for which there are no placeholders
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _write_placeholder(made, scenario.backbone.dim or _WIDTH, Path(name))
        vectors = _on_cpu(_on_vectors(scenario))
        _can_start(run, vectors, build_population(vectors, folder=Path(name), pooled=run.pooled))


def _write_placeholder(made: ExtractionPlan, usual: int, folder: Path) -> None:
    """Write a prepared data set with the labels and splits of a raw one, and zeros as features.

    Their width is that of the features or, if unknown, of the other modality's, or ``usual``.
    """
    n = len(made.raw)
    image, text = made.image.width, made.text.width if made.text else 0
    if made.text is None and made.raw.bag is not None:
        text = made.raw.bag.shape[1]
    for name, shape in (("image", (n, image or text or usual)), ("text", (n, text or image or usual))):
        # A sparse file: NUS-WIDE's bags of words would take 780 MB of zeros.
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
    present = made.raw.present(made.kind)
    counts = np.ones(n, np.int64) if present is None else present[:, 1].astype(np.int64)
    save_arrays(folder, captions=counts, labels=made.raw.labels, split=made.split)
    lacking = save_present(folder, present)
    made.finish(folder, made.digest, lacking, made.raw.keys, made.raw.label_names)


def _on_vectors(scenario: Scenario) -> Scenario:
    """The scenario with a backbone and a partition that need no encoder."""
    backbone = scenario.backbone.model_copy(update={"name": "features", "pretrained": None, "text_encoder": None})
    partition = scenario.partition
    if partition.kind == "dir_clusters":
        partition = partition.model_copy(update={"kind": "iid"})
    return scenario.model_copy(update={"backbone": backbone, "partition": partition})
