"""What a silo has of a data set: which of its items are pairs, and its dataset in memory.

A data set may hold items with only an image or only captions, and ``missing_modality.per: item`` removes a modality of
some training items. A silo's dataset consists of the items that have all of the silo's modalities. Its other items are
passed to methods separately, so that no method can mistake them for pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.config.sections import MissingModality
from fedmq.data.partition import assignment_seed
from fedmq.data.prepared_arrays import Prepared, Present, first_rows, mapped
from fedmq.errors import InputError
from fedmq.seeds import numpy_generator

I64 = npt.NDArray[np.int64]
#: Rows of at least this size are read faster from the file than by page faults [bytes].
_LONG_ROW = 1024


# --- items ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SiloRows:
    """A silo's training items by what the silo can use of them; int64 rows of the data set, ascending."""

    dataset: I64  # items with all of the silo's modalities; in a silo with both, its pairs
    image_only: I64  # further items of a silo with both modalities, with an image only
    text_only: I64  # likewise, with captions only
    unusable: I64  # items without any of the silo's modalities


def silo_rows(rows: I64, present: Present, *, image: bool, text: bool) -> SiloRows:
    """Sort a silo's items, int64 [m], by their modalities.

    ``present`` bool [n, 2] is that of all items of the data set; ``image`` and ``text`` say what the silo has.
    """
    has_image, has_text = _usable(rows, present, image=image, text=text)
    neither = ~(has_image | has_text)
    if image and text:
        both = has_image & has_text
        return SiloRows(rows[both], rows[has_image & ~both], rows[has_text & ~both], rows[neither])
    whole, nothing = (has_image | has_text) if image or text else neither, rows[:0]
    return SiloRows(rows[whole], nothing, nothing, rows[neither])


def _usable(rows: I64, present: Present, *, image: bool, text: bool) -> tuple[Present, Present]:
    """Whether each item has an image, and captions, that a silo may use: two arrays of bool [m]."""
    # Selecting columns first is faster.
    return np.asarray(present)[:, 0][rows] & image, np.asarray(present)[:, 1][rows] & text


def modalities_held(rows: I64, present: Present, *, image: bool, text: bool) -> tuple[bool, bool]:
    """The modalities that a silo trains, out of those it may have: (image, text); arguments as of :func:`silo_rows`.

    A silo has a modality if one of its items has it. Without any pair it trains the modality of which it has more
    items, images if there are as many, because no method is defined on a silo with both modalities but no pair.
    """
    has_image, has_text = _usable(rows, present, image=image, text=text)
    images, texts = int(has_image.sum()), int(has_text.sum())
    if images and texts and not (has_image & has_text).any():
        return images >= texts, images < texts
    return images > 0, texts > 0


def without_dropped(present: Present, train: I64, missing: MissingModality, run_seed: int) -> Present:
    """Modalities, bool [n, 2], after ``missing_modality.per: item`` has removed one of some training pairs.

    round(rate * n) of the n training pairs, of the rows ``train`` int64 [m], lose a modality, the same ones in every
    partition. They keep ``missing.only``, or either modality with equal probability. The scenario's seed draws them
    unless the section has its own.
    """
    pairs = train[np.asarray(present)[train].all(axis=1)]
    if missing.per != "item" or not len(pairs):
        return present
    generator = numpy_generator(assignment_seed(missing, run_seed), "missing_modality", "items")
    chosen = pairs[generator.permutation(len(pairs))[: round(missing.rate * len(pairs))]]
    keeps_image = generator.random(len(chosen)) < 0.5
    if missing.only is not None:
        keeps_image[:] = missing.only == "image"
    result = np.array(present)
    result[chosen] = np.stack([keeps_image, ~keeps_image], axis=1)
    return result


def validation_split(rows: I64, share: float, seed: int, silo: str) -> tuple[I64, I64]:
    """Divide a silo's pairs into those that methods train on and those that ``training.validation`` holds out.

    The rows are int64 [m], ascending; ``share`` is the fraction to hold out, 0 in a silo that lacks a modality.

    Returns:
        Rows for training, of which at least one remains, and rows that are held out; int64, ascending.
    """
    held = min(round(share * len(rows)), max(0, len(rows) - 1))
    order = numpy_generator(seed, "validation", silo).permutation(len(rows)) if held else np.arange(len(rows))
    return np.sort(rows[order[held:]]), np.sort(rows[order[:held]])


# --- in memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptionRows:
    """The captions of n items: ``text[items, numbers]`` are inputs [B, ...] of one caption of each of some items.

    Items differ in their number of captions, so the captions are stored one after the other, without padding.
    """

    values: Tensor  # [N, ...], all captions
    first: Tensor  # int64 [n], row of each item's first caption

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, items: Any, numbers: Any) -> Tensor:
        """Rows in ``values`` of one caption of each of some items: int64 [B].

        Items are int64 [B] or a slice; numbers are int64 [B] or one number, each less than the item's number of
        captions.
        """
        rows: Tensor = self.first[items] + numbers
        return rows

    def __getitem__(self, index: tuple[Any, Any]) -> Tensor:
        return self.values[self.rows(*index)]

    def of(self, items: Any) -> CaptionRows:
        """The captions of the given items (int64 [m] or a slice), in the given order."""
        return CaptionRows(self.values, self.first[items])


def joined(parts: Sequence[CaptionRows]) -> CaptionRows:
    """The captions of the items of several parts, one part after the other."""
    starts = accumulate((len(part.values) for part in parts[:-1]), initial=0)
    first = [part.first + start for part, start in zip(parts, starts, strict=True)]
    return CaptionRows(torch.cat([part.values for part in parts]), torch.cat(first))


@dataclass(frozen=True)
class SiloDataset:
    """One silo's dataset."""

    image: Tensor | None  # [n, *image_shape] in the prepared dtype; None if the silo has no images
    text: CaptionRows | None  # caption inputs in the prepared dtype; None if the silo has no captions
    captions: Tensor  # int64 [n], number of captions of each item; all 1 if the silo has no captions
    labels: Tensor | None  # multi-hot uint8 [n, L]; None if the data set has no labels
    rows: Tensor  # int64 [n], rows of the items in the data set

    def __len__(self) -> int:
        return self.rows.shape[0]


def _rows_of(path: Path, rows: npt.NDArray[np.int64]) -> Tensor:
    """Copy rows of an array on disk into memory; reads only the pages that hold them."""
    array = mapped(path)
    if not isinstance(array, np.memmap) or array[:1].nbytes < _LONG_ROW or not array.flags.c_contiguous:
        return torch.from_numpy(np.ascontiguousarray(np.asarray(array)[rows]))
    found = np.empty((len(rows), *array.shape[1:]), array.dtype)
    with path.open("rb", buffering=0) as file:
        for row, place in zip(found.reshape(len(rows), -1).view(np.uint8), rows.tolist(), strict=True):
            file.seek(array.offset + place * row.nbytes)
            if file.readinto(row.data) != row.nbytes:
                raise InputError(
                    str(path), "a file that became shorter while in use", "the prepared data, unchanged during a run"
                )
    return torch.from_numpy(found)


def _captions_of(prepared: Prepared, items: npt.NDArray[np.int64]) -> tuple[CaptionRows, Tensor]:
    """The captions of some items and their numbers, int64 [n]."""
    counts = np.asarray(mapped(prepared.folder / "captions.npy"))
    several = np.maximum(counts[items], 1)
    first = first_rows(several)
    rows = np.repeat(first_rows(counts)[items] - first, several) + np.arange(several.sum())
    text = CaptionRows(_rows_of(prepared.folder / "text.npy", rows), torch.from_numpy(first))
    return text, torch.from_numpy(counts[items])


def load_silo_dataset(
    prepared: Prepared, rows: Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor, image: bool, text: bool
) -> SiloDataset:
    """Load one silo's rows, int [n], in their order; files of a modality that the silo lacks are not opened.

    Raises:
        ValueError: both modalities are missing, or a row is out of range.
    """
    if not (image or text):
        raise ValueError("a silo dataset needs images, captions or both")
    chosen = np.array(rows, dtype=np.int64).reshape(-1)
    if len(chosen) and not (chosen.min() >= 0 and chosen.max() < prepared.n):
        raise ValueError(f"rows {chosen.min()} to {chosen.max()} of a data set of {prepared.n} items")
    captions, counts = _captions_of(prepared, chosen) if text else (None, torch.ones(len(chosen), dtype=torch.int64))
    return SiloDataset(
        image=_rows_of(prepared.folder / "image.npy", chosen) if image else None,
        text=captions,
        captions=counts,
        labels=_rows_of(prepared.folder / "labels.npy", chosen) if prepared.label_names else None,
        rows=torch.from_numpy(chosen),
    )
