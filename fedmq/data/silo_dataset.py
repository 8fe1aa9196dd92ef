"""One silo's part of the data, in memory, without the modality it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.data.prepared import Prepared, mapped


@dataclass(frozen=True)
class SiloDataset:
    """One silo's data.

    Args:
        image: [n, *image_shape] in the prepared data's type, or None where the silo has no images.
        text: [n, C, *text_shape], C the most captions an item of the data set has, or None without captions.
        captions: int64 [n], how many of an item's C rows of ``text`` are captions, 1 to C; all 1 without captions.
        labels: uint8 [n, L], multi-hot, or None where the data set has none.
        rows: int64 [n], the items' rows in the data set.
    """

    image: Tensor | None
    text: Tensor | None
    captions: Tensor
    labels: Tensor | None
    rows: Tensor

    def __len__(self) -> int:
        return self.rows.shape[0]


def _rows_of(path: Path, rows: npt.NDArray[np.int64]) -> Tensor:
    """Copy some rows of an array on disk into memory; only their pages are read."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(mapped(path))[rows]))


def load_silo_dataset(
    prepared: Prepared, rows: Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor, image: bool, text: bool
) -> SiloDataset:
    """Load one silo's rows; a modality's file is opened only where the silo has that modality.

    Args:
        prepared: the data set.
        rows: [n], rows of the data set, kept in this order.
        image: whether the silo has images.
        text: whether the silo has captions.

    Raises:
        ValueError: neither modality, or a row that is not in the data set.
    """
    if not (image or text):
        raise ValueError("a share has images, captions or both")
    chosen = np.array(rows, dtype=np.int64).reshape(-1)
    if len(chosen) and not (chosen.min() >= 0 and chosen.max() < prepared.n):
        raise ValueError(f"rows {chosen.min()} to {chosen.max()} of a data set of {prepared.n} items")
    counts = _rows_of(prepared.folder / "captions.npy", chosen) if text else torch.ones(len(chosen), dtype=torch.int64)
    return SiloDataset(
        image=_rows_of(prepared.folder / "image.npy", chosen) if image else None,
        text=_rows_of(prepared.folder / "text.npy", chosen) if text else None,
        captions=counts,
        labels=_rows_of(prepared.folder / "labels.npy", chosen) if prepared.label_names else None,
        rows=torch.from_numpy(chosen),
    )
