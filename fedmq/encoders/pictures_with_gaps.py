"""Pictures of a data set in which some items have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from fedmq.encoders.images import Pictures, Pixels
from fedmq.errors import InputError


@dataclass(frozen=True)
class WithGaps:
    """The pictures of n items, some of which have no picture.

    Args:
        held: the m existing pictures.
        rows: for each item, the row of its picture in ``held``; None for an item without one.
    """

    held: Pictures
    rows: tuple[int | None, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def clips(self) -> bool:
        """Whether the existing pictures are videos."""
        return self.held.clips

    def name(self, row: int) -> str:
        """The picture's name; ``no picture`` for an item without one."""
        at = self.rows[row]
        return "no picture" if at is None else self.held.name(at)

    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """As for the existing pictures; each item without one has its own stamp, as such items share no picture."""
        return self._filled(self.held.stamps(on_progress))

    def contents(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """As for the existing pictures; each item without one has distinct contents."""
        return self._filled(self.held.contents(on_progress))

    def _filled(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"none|{row}" if at is None else texts[at] for row, at in enumerate(self.rows))

    def missing(self, row: int) -> bool:
        """Whether the item has a picture whose file does not exist."""
        at = self.rows[row]
        return at is not None and self.held.missing(at)

    def frames(self, row: int) -> list[Pixels]:
        """Decode the item's picture.

        Raises:
            InputError: it has none, or its picture is unreadable.
        """
        at = self.rows[row]
        if at is None:
            raise InputError(f"item {row}", "no picture", "an item with a picture")
        return self.held.frames(at)

    def subset(self, rows: Sequence[int]) -> Self:
        """The pictures of the given items, in the given order."""
        chosen = [self.rows[row] for row in rows]
        places = {at: place for place, at in enumerate(at for at in chosen if at is not None)}
        return type(self)(self.held.subset(list(places)), tuple(None if at is None else places[at] for at in chosen))
