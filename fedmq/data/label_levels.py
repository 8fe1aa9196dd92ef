"""Labels: how many items have each, and which columns of two levels (FashionVC, Ssense) are coarse and fine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Name prefix of coarse labels; fine labels start with ``fine:``.
COARSE = "coarse:"


def coarse_columns(names: Sequence[str]) -> list[int]:
    """Columns of coarse labels; empty if labels have one level."""
    return [column for column, name in enumerate(names) if name.startswith(COARSE)]


def fine_columns(names: Sequence[str]) -> list[int]:
    """Columns that define relevance: the fine labels, or all if labels have one level."""
    return [column for column, name in enumerate(names) if not name.startswith(COARSE)]


def trained_columns(names: Sequence[str], *, both_levels: bool) -> list[int]:
    """Columns that silos train on: those of both levels for an objective that uses them, else the lower level's."""
    return list(range(len(names))) if both_levels else fine_columns(names)


def counts_of(labels: npt.NDArray[np.uint8] | None, names: Sequence[str]) -> dict[str, int]:
    """Number of items of each label; empty without labels.

    Args:
        labels: multi-hot [n, L], or None.
        names: names of the L labels.
    """
    if labels is None:
        return {}
    return dict(zip(names, np.asarray(labels).sum(axis=0, dtype=np.int64).tolist(), strict=True))
