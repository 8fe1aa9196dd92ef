"""A mapping of bounded size, for what peers can add entries to."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """A dict that forgets its oldest entries; a key that is set again keeps its place.

    Args:
        most: maximum number of entries.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        """Set an entry, and forget the oldest one if there are too many."""
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
