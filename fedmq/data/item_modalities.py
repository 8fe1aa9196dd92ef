"""Which modalities each item has, and which of a silo's items are pairs.

A data set may hold items with only an image or only captions, and ``missing_modality.per: item`` removes a modality of
some training items. A silo's dataset consists of the items that have all of the silo's modalities. Its other items are
passed to methods separately, so that no method can mistake them for pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import MissingModality
from fedmq.seeds import numpy_generator

I64 = npt.NDArray[np.int64]
#: bool [n, 2]: whether each item has an image, and whether it has captions.
Present = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SiloRows:
    """A silo's training items by what the silo can use of them; int64 rows of the data set, ascending.

    Args:
        dataset: items with all of the silo's modalities; in a silo with both, its pairs.
        image_only: further items of a silo with both modalities, with an image only.
        text_only: likewise, with captions only.
        unusable: items without any of the silo's modalities.
    """

    dataset: I64
    image_only: I64
    text_only: I64
    unusable: I64


def silo_rows(rows: I64, present: Present, *, image: bool, text: bool) -> SiloRows:
    """Sort a silo's items by their modalities.

    Args:
        rows: int64 [m], the silo's items.
        present: bool [n, 2], of all items of the data set.
        image: whether the silo has images.
        text: whether the silo has captions.
    """
    usable = np.asarray(present)[rows] & np.array([image, text])
    whole = usable.sum(axis=1) == image + text
    paired = image and text
    image_only, text_only = (usable[:, column] & ~whole & paired for column in (0, 1))
    return SiloRows(rows[whole], rows[image_only], rows[text_only], rows[~usable.any(axis=1)])


def modalities_held(rows: I64, present: Present, *, image: bool, text: bool) -> tuple[bool, bool]:
    """The modalities that a silo trains, out of those it may have: (image, text).

    A silo has a modality if one of its items has it. Without any pair it trains the modality of which it has more
    items, images if there are as many, because no method is defined on a silo with both modalities but no pair.

    Args:
        rows: int64 [m], the silo's items.
        present: bool [n, 2], of all items of the data set.
        image: whether the silo may have images.
        text: whether the silo may have captions.
    """
    usable = np.asarray(present)[rows] & np.array([image, text])
    images, texts = (int(count) for count in usable.sum(axis=0))
    if images and texts and not usable.all(axis=1).any():
        return images >= texts, images < texts
    return images > 0, texts > 0


def without_dropped(present: Present, train: I64, missing: MissingModality) -> Present:
    """The modalities of each item after ``missing_modality.per: item`` has removed one of some training pairs.

    round(rate * n) of the n training pairs lose a modality, the same ones in every partition. They keep
    ``missing.only``, or either modality with equal probability.

    Args:
        present: bool [n, 2], as in the data set.
        train: int64 [m], rows of the training split.
        missing: the scenario's section; with ``per: silo`` nothing is removed.

    Returns:
        bool [n, 2].
    """
    pairs = train[np.asarray(present)[train].all(axis=1)]
    if missing.per != "item" or not len(pairs):
        return present
    generator = numpy_generator(missing.seed, "missing_modality", "items")
    chosen = pairs[generator.permutation(len(pairs))[: round(missing.rate * len(pairs))]]
    keeps_image = generator.random(len(chosen)) < 0.5
    if missing.only is not None:
        keeps_image[:] = missing.only == "image"
    result = np.array(present)
    result[chosen] = np.stack([keeps_image, ~keeps_image], axis=1)
    return result


def all_present(n: int) -> Present:
    """Both modalities for each of n items: bool [n, 2], read-only."""
    return np.broadcast_to(np.ones((1, 2), dtype=np.bool_), (n, 2))


def presence(image: npt.NDArray[Any], text: npt.NDArray[Any]) -> Present | None:
    """Two bool arrays [n] as one [n, 2]; None if every item has both modalities."""
    both = np.stack([image, text], axis=1).astype(np.bool_)
    return None if both.all() else both
