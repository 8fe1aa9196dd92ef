"""Pictures of a data set that are stored together, in an array or an archive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import blake3

from fedmq.encoders import images
from fedmq.encoders.images import Pixels

_REPORTED = 256  # pictures between two reports of progress


class Stack(Protocol):
    """n pictures stored together, in an array or an archive, opened and read lazily."""

    def __len__(self) -> int: ...

    def name(self, row: int) -> str:
        """Name of one picture in error messages."""
        ...

    @property
    def stamp(self) -> str:
        """Fingerprint of the pictures and their order, which changes if one of their files is replaced."""
        ...

    def picture(self, row: int) -> Pixels:
        """Read one picture: uint8 [height, width, 3]."""
        ...


@dataclass(frozen=True)
class Rows:
    """Pictures that are stored together, as the rows of an array or in an archive.

    Args:
        stack: the stored pictures.
        rows: row of each picture in the stack.
    """

    stack: Stack
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def clips(self) -> bool:
        """Always False: the rows are images."""
        return False

    def name(self, row: int) -> str:
        """As the stack calls it: file, array and row."""
        return self.stack.name(self.rows[row])

    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """The stack's fingerprint, the row, and the version of the decoding."""
        del on_progress  # few files
        stamp = self.stack.stamp
        return tuple(f"{stamp}|{row}|{images.PIXELS_VERSION}" for row in self.rows)

    def contents(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """The digest of each row's pixels."""
        found = []
        for done, row in enumerate(self.rows, 1):
            pixels = self.stack.picture(row)
            found.append(blake3.blake3(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest())
            if done % _REPORTED == 0 or done == len(self.rows):
                on_progress(done)
        return tuple(found)

    def missing(self, row: int) -> bool:
        """Always False: the array holds all rows."""
        del row
        return False

    def frames(self, row: int) -> list[Pixels]:
        """Read one image: uint8 [height, width, 3], as a list of one frame."""
        return [self.stack.picture(self.rows[row])]

    def subset(self, rows: Sequence[int]) -> Self:
        """The pictures of the given rows, in the given order."""
        return type(self)(self.stack, tuple(self.rows[row] for row in rows))
