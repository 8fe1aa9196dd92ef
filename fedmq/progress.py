"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


def tell(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """A function that is told how many of ``total`` are done and tells ``progress``."""

    def told(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    return told
