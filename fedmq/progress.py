"""Progress reporting of long tasks."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of items done, and the total number of items."""


def tell(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """A function that reports the number of items done, out of ``total``, to ``progress``."""

    def report(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    return report
