"""Checks early that the pictures of a data set open, long before their features are extracted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedmq.data.raw_set import RawSet
from fedmq.encoders.image_sets import ImageFiles, ImagesWithGaps, is_folder
from fedmq.encoders.images import VIDEO_ENDINGS, check_header
from fedmq.errors import InputError
from fedmq.packages import MissingPackageError
from fedmq.text import Progress, tell

#: Maximum number of image files whose headers are read, and of pictures inside other files that are decoded.
MOST_FILES, MOST_STORED = 10_000, 500
#: Names listed in one message.
LISTED = 5
_THREADS, _BATCH = 8, 64


@dataclass(frozen=True)
class Unreadable:
    """What opening the pictures of a data set found.

    Args:
        tried: number of pictures that were opened.
        names: ``name (reason)`` of those that cannot be read.
    """

    tried: int
    names: tuple[str, ...]


def unreadable(raw: RawSet, progress: Progress | None = None) -> Unreadable:
    """Open the pictures of a data set in order, for image files only the headers; videos are not opened.

    Args:
        raw: the data set; its missing pictures are passed over.
        progress: called while pictures are opened.

    Raises:
        InputError: the package that reads these files is missing.
    """
    files = in_files(raw)
    rows = [row for row in range(len(raw)) if raw.pictured[row] and not raw.pictures.missing(row)]
    rows = rows[: MOST_FILES if files else MOST_STORED]
    report, found = tell(progress, "pictures opened", len(rows)), list[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            found += filter(None, pool.map(partial(_problem, raw, files), batch))
            report(start + len(batch))
    return Unreadable(len(rows), tuple(found))


def in_files(raw: RawSet) -> bool:
    """Whether each picture is a file of its own, not one in an archive or an array."""
    return isinstance(raw.pictures.held if isinstance(raw.pictures, ImagesWithGaps) else raw.pictures, ImageFiles)


def _problem(raw: RawSet, files: bool, row: int) -> str:
    """Name and reason of a picture that cannot be read; empty if it can."""
    try:
        if not files:
            raw.pictures.frames(row)
            return ""
        path = Path(raw.pictures.name(row))
        if path.suffix.lower() not in VIDEO_ENDINGS and not is_folder(path):
            check_header(path)
    except MissingPackageError:
        raise
    except InputError as error:
        return f"{raw.keys[row]} ({error.found})"
    return ""
