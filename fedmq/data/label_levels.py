"""Labels on two levels, as FashionVC and Ssense have them: which of a data set's labels are of which level."""

from __future__ import annotations

from collections.abc import Sequence

#: Prefix of the names of labels on the upper level; those of the lower level begin with ``fine:``.
COARSE = "coarse:"


def coarse_columns(names: Sequence[str]) -> list[int]:
    """Columns of the upper level; empty where labels have one level."""
    return [column for column, name in enumerate(names) if name.startswith(COARSE)]


def fine_columns(names: Sequence[str]) -> list[int]:
    """Columns that say what is alike: the lower level's, or all where labels have one level."""
    return [column for column, name in enumerate(names) if not name.startswith(COARSE)]


def trained_columns(names: Sequence[str], *, both_levels: bool) -> list[int]:
    """Columns that silos train on: those of both levels for an objective that wants them, else the lower level's."""
    return list(range(len(names))) if both_levels else fine_columns(names)
