"""Refuse a scenario that cannot run on its data before their features are extracted, which can take hours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedmq.config.scenario import Scenario
from fedmq.data.extract import ExtractionPlan
from fedmq.data.prepared_arrays import finish, save_arrays, save_present
from fedmq.data.splits import SPLITS
from fedmq.errors import InputError

_WIDTH = 8  # of placeholder features, if the width is only known after loading the encoder

#: Raises InputError if a scenario cannot run on the prepared data in a folder.
Fits = Callable[[Scenario, Path], None]


def refuse_before_extraction(made: ExtractionPlan, scenario: Scenario, fits: Fits) -> None:
    """Refuse a scenario that cannot run on a data set, as far as that can be seen without its features.

    Args:
        made: what would be extracted.
        scenario: the resolved scenario.
        fits: raises InputError if a run would refuse the scenario with prepared data.

    Raises:
        InputError: as of ``fits``, or there are fewer training texts than ``partition.clusters``.
    """
    if scenario.partition.kind == "dir_clusters":
        present, train = made.raw.present(made.kind), made.split == SPLITS.index("train")
        texts = int((train if present is None else train & present[:, 1]).sum())
        check_clusters(scenario.partition.clusters, texts)
    if scenario.backbone.adapter_site == "blocks" or scenario.backbone.end_to_end:
        return  # needs pixels, for which there are no placeholders
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _write_placeholder(made, scenario.backbone.dim or _WIDTH, Path(name))
        fits(_on_vectors(scenario), Path(name))


def check_clusters(clusters: int, texts: int) -> None:
    """Refuse more text clusters than there are training items with texts.

    Raises:
        InputError: see above.
    """
    if clusters > texts:
        raise InputError("partition.clusters", clusters, f"at most {texts}, the training samples with captions")


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
    finish(folder, made.digest, lacking, made.raw.keys, made.raw.label_names, column=made.raw.column)


def _on_vectors(scenario: Scenario) -> Scenario:
    """The scenario with a backbone and a partition that need no encoder."""
    backbone = scenario.backbone.model_copy(update={"name": "features", "pretrained": None, "text_encoder": None})
    partition = scenario.partition
    if partition.kind == "dir_clusters":
        partition = partition.model_copy(update={"kind": "iid"})
    return scenario.model_copy(update={"backbone": backbone, "partition": partition})
