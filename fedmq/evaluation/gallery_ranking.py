"""Embed items with a model, and rank a gallery for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from fedmq import seeds
from fedmq.config.sections import Evaluation
from fedmq.evaluation import hamming, label_metrics, recall

#: Tolerance of the length of float32 unit vectors.
_LENGTH = 1e-4

Way = Literal["i2t", "t2i", "i2i", "t2t"]


@dataclass(frozen=True)
class Embedded:
    """Items embedded in the joint space."""

    image: np.ndarray  # float32 [n, d]
    text: np.ndarray  # float32 [m, d], one row per caption
    owner: np.ndarray  # int64 [m], the image of each caption, 0 to n - 1
    labels: np.ndarray | None = None  # uint8 [n, L] multi-hot; None where the data set has none
    binary: bool = False  # the vectors are hash codes; only their signs count in rankings

    def subset(self, items: np.ndarray) -> Embedded:
        """Some of the items, by index int64 [k], with all their captions."""
        position = np.full(len(self.image), -1, np.int64)
        position[items] = np.arange(len(items))
        kept = position[self.owner] >= 0
        labels = None if self.labels is None else self.labels[items]
        return replace(
            self, image=self.image[items], text=self.text[kept], owner=position[self.owner[kept]], labels=labels
        )

    @property
    def first_captions(self) -> np.ndarray:
        """The first caption of each item, float32 [n, d]: label metrics take one text per item."""
        return self.text[np.searchsorted(self.owner, np.arange(len(self.image)))]


def comparable(items: Embedded, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors to rank by inner product: embeddings scaled to unit length, codes as signs in shuffled order.

    Codes have many ties, which are broken by index. Without shuffling, all captions of an image would rank together.
    Embeddings do not tie, and all except DSCMR's already have unit length.

    Returns:
        images [n, d], captions [m, d], and the image of each caption int64 [m].
    """
    if not items.binary:
        return _unit(items.image), _unit(items.text), items.owner
    rows, captions = shuffled(items, seed)
    new_rows = np.argsort(rows)
    return _signs(items.image[rows]), _signs(items.text[captions]), new_rows[items.owner[captions]]


def shuffled(items: Embedded, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Index int64 [n] and [m] of the image and of the caption at each place of :func:`comparable`."""
    if not items.binary:
        return np.arange(len(items.image)), np.arange(len(items.text))
    generator = seeds.numpy_generator(seed, "recalls")
    return generator.permutation(len(items.image)), generator.permutation(len(items.text))


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, d] scaled to unit length, except zero vectors; returned unchanged if all have unit length already."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    return vectors if np.abs(lengths - 1).max(initial=0) <= _LENGTH else vectors / lengths


def _signs(outputs: np.ndarray) -> np.ndarray:
    """Outputs as signs: their inner products are integers and rank as Hamming distances do."""
    return hamming.sign(outputs).astype(np.float32)


def rank(
    queries: Embedded,
    gallery: Embedded,
    evaluation: Evaluation,
    seed: int,
    ways: Sequence[Way],
    *,
    top_n: Sequence[int] = (),
    curves: bool = False,
    threads: int | None = None,
) -> dict[Way, label_metrics.RankingMetrics]:
    """Label metrics by direction of retrieval (image to text, image to image, ...), one text per item.

    Args:
        queries: the evaluated items.
        gallery: the items to retrieve.
        evaluation: cut-offs of mAP and NDCG.
        seed: seed of the gallery's order.
        ways: directions of retrieval.
        top_n: cut-offs N of precision@N and recall@N.
        curves: also compute precision and recall at every rank and Hamming radius.
        threads: number of threads that rank; None takes torch's number.

    Raises:
        ValueError: queries or gallery have no labels.
    """
    if queries.labels is None or gallery.labels is None:
        raise ValueError("label metrics need labels")
    cosine = partial(label_metrics.cosine_metrics, expected=False)
    metrics_of = label_metrics.hamming_metrics if queries.binary else cosine
    order = seeds.derive(seed, "gallery")
    query = {"i": queries.image, "t": queries.first_captions}
    database = {"i": gallery.image, "t": gallery.first_captions}
    return {
        way: metrics_of(
            query[way[0]],
            database[way[-1]],
            queries.labels,
            gallery.labels,
            at=evaluation.map_at,
            denominator=evaluation.map_denominator,
            empty=evaluation.map_empty,
            ndcg_at=evaluation.ndcg_at,
            top_n=top_n,
            curves=curves,
            order_seed=order,
            threads=threads,
        )
        for way in ways
    }


def fold_recalls(items: Embedded, size: int, seed: int = 0) -> dict[str, float]:
    """Recall within consecutive folds of ``size`` items, averaged over the full folds.

    COCO's 5,000 test images, for example, are evaluated as five galleries of 1,000. There are at least ``size`` items;
    the seed gives the order within a fold, which breaks ties.

    Returns:
        ``fold_i2t_r1``, ``fold_t2i_r1``, ``fold_mean_r1``, ...
    """
    starts = range(0, len(items.image) - size + 1, size)
    folds = []
    for start in starts:
        folds.append(recall.recalls(*comparable(items.subset(np.arange(start, start + size)), seed)))
    return {f"fold_{name}": float(np.mean([fold[name] for fold in folds])) for name in folds[0]}
