"""Two-level labels (FashionVC, Ssense): which label columns are coarse and which are fine."""

from __future__ import annotations

from collections.abc import Sequence

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
