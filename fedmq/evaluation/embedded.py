"""Items as a model embeds them, and how the items of a gallery rank for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from fedmq import seeds
from fedmq.config.scenario import Evaluation
from fedmq.data.silo_dataset import SiloDataset
from fedmq.evaluation import hamming, label_metrics
from fedmq.federation.protocol import Encoders

_BATCH = 256
#: By how much float32 vectors of unit length may miss it.
_LENGTH = 1e-4

Way = Literal["i2t", "t2i", "i2i", "t2t"]


@dataclass(frozen=True)
class Embedded:
    """Items in the joint space.

    Args:
        image: float32 [n, d].
        text: float32 [m, d], one row per caption.
        owner: int64 [m], the image of each caption, 0 to n - 1.
        labels: uint8 [n, L] multi-hot; None where the data set has none.
        binary: the vectors are codes, of which the signs rank.
    """

    image: np.ndarray
    text: np.ndarray
    owner: np.ndarray
    labels: np.ndarray | None = None
    binary: bool = False

    def subset(self, items: np.ndarray) -> Embedded:
        """Some of the images [k] with their captions."""
        place = np.full(len(self.image), -1, np.int64)
        place[items] = np.arange(len(items))
        kept = place[self.owner] >= 0
        labels = None if self.labels is None else self.labels[items]
        return replace(
            self, image=self.image[items], text=self.text[kept], owner=place[self.owner[kept]], labels=labels
        )

    @property
    def first_captions(self) -> np.ndarray:
        """The first caption of each item, float32 [n, d]: label metrics take one text per item."""
        return self.text[np.searchsorted(self.owner, np.arange(len(self.image)))]


def embed(encoders: Encoders, share: SiloDataset, *, binary: bool) -> Embedded:
    """Embed every image and every caption of a share that has both."""
    if share.image is None or share.text is None:
        raise ValueError("evaluation needs both modalities")
    owner = torch.repeat_interleave(torch.arange(len(share)), share.captions)
    number = torch.cat([torch.arange(int(count)) for count in share.captions])
    with torch.no_grad():
        image = torch.cat([encoders.image(part) for part in torch.split(share.image, _BATCH)])
        pairs = zip(torch.split(owner, _BATCH), torch.split(number, _BATCH), strict=True)
        text = torch.cat([encoders.caption(share.text[item, caption]) for item, caption in pairs])
    labels = None if share.labels is None else share.labels.numpy()
    return Embedded(image.cpu().numpy(), text.cpu().numpy(), owner.numpy(), labels, binary)


def comparable(items: Embedded, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, captions and the captions' owners, whose inner products rank: codes as signs, others of unit length.

    Codes tie massively, and a stable order would let captions that lie image by image come all together or not at
    all: they are shuffled. Embeddings, DSCMR's apart, are of unit length as they are, and do not tie.
    """
    if not items.binary:
        return _unit(items.image), _unit(items.text), items.owner
    generator = seeds.numpy_generator(seed, "recalls")
    rows, captions = generator.permutation(len(items.image)), generator.permutation(len(items.text))
    places = np.argsort(rows)
    return _signs(items.image[rows]), _signs(items.text[captions]), places[items.owner[captions]]


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, d] scaled to unit length, zero ones left; as they are, to the bit, where all have it already."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    return vectors if np.abs(lengths - 1).max(initial=0) <= _LENGTH else vectors / lengths


def _signs(outputs: np.ndarray) -> np.ndarray:
    """Outputs as signs, whose products are whole numbers and order as Hamming distances do."""
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
) -> dict[Way, label_metrics.RankingMetrics]:
    """Label metrics of some ways of retrieval, one text per item: from images to texts, within images, ...

    Args:
        queries: the evaluated items.
        gallery: what is retrieved from.
        evaluation: cut-offs of mAP and NDCG.
        seed: of the gallery's order.
        ways: which.
        top_n: cut-offs of precision and recall among the first N.
        curves: precision and recall at every place and radius, too.
    """
    if queries.labels is None or gallery.labels is None:
        raise ValueError("label metrics need labels")
    metrics_of = label_metrics.hamming_metrics if queries.binary else label_metrics.cosine_metrics
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
        )
        for way in ways
    }
