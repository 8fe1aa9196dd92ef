"""The images of a data set, decoded on demand: image files, videos, folders of frames, or rows of a stored array."""

from __future__ import annotations

import itertools
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import blake3
from typing_extensions import override

from fedmq.encoders import images
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS, Pixels, decode, spread_evenly, video_frames
from fedmq.errors import DataItemError, InputError
from fedmq.storage.cache import file_digests

_REPORTED = 256  # images between two reports of progress


class Images(ABC):
    """n images in a fixed order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def clips(self) -> bool:
        """Whether the images are videos, whose frames are pooled."""
        return False

    @abstractmethod
    def frames(self, row: int) -> list[Pixels]:
        """Decode one image or a video's frames: uint8 [height, width, 3] each.

        Raises:
            InputError: the image is unreadable; the message names its file.
        """

    @abstractmethod
    def name(self, row: int) -> str:
        """Name of this image in error messages."""

    @abstractmethod
    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """Fingerprint of each image's content and of its decoding, which changes if the image is replaced.

        ``on_progress`` receives the number of images whose files have been read.

        Raises:
            InputError: a file cannot be read.
        """

    def contents(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """A text for each image, the same for two images if one is a copy of the other; errors as of `stamps`."""
        return self.stamps(on_progress)

    def missing(self, row: int) -> bool:
        """Whether this image's file does not exist."""
        del row
        return False

    @abstractmethod
    def subset(self, rows: Sequence[int]) -> Self:
        """The images of the given rows, in the given order."""


def exists(path: Path) -> bool:
    """Whether a file or folder exists; False for names that the file system does not accept."""
    try:
        path.stat()
    except PermissionError:
        return True  # opening it reports the reason
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether a folder exists; False for names that the file system does not accept."""
    return exists(path) and path.is_dir()


def is_leftover(name: str) -> bool:
    """Whether a file or folder is hidden or added to archives by macOS, and so not part of a data set.

    >>> is_leftover("._25.jpg"), is_leftover("25.jpg")
    (True, False)
    """
    return name.startswith(".") or name == "__MACOSX"


def files_below(folder: Path, *, leave: bool = True) -> Iterator[Path]:
    """All files below a folder, without leftovers (:func:`is_leftover`).

    Symbolic links to folders are followed, but each folder is visited once, under its real path if that is below
    ``folder``.

    Raises:
        InputError: a link leads to a folder that is not below ``folder``, and ``leave`` is false.
    """
    root = folder.resolve()
    seen: set[tuple[int, int]] = set()
    waiting, links = [folder], deque[Path]()
    while waiting or links:
        here = waiting.pop() if waiting else links.popleft()
        try:
            about = here.stat()
            with os.scandir(here) as listed:
                inside = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in listed)
        except OSError:
            continue  # unreadable folders such as lost+found are not part of a data set
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        for name, is_dir, link in inside:
            if is_leftover(name):
                continue
            if is_dir:
                if link and not leave and not (here / name).resolve().is_relative_to(root):
                    allowed = f"links to folders in {folder}; replace the link by the folder, or delete it"
                    raise InputError(str(here / name), f"a link to {(here / name).readlink()}", allowed)
                (links if link else waiting).append(here / name)
            else:
                yield here / name


def _numbered(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that orders names by the numbers in them: 2.jpg before 10.jpg."""
    parts = re.findall(r"[0-9]+|[^0-9]+", path.name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], path.name


@dataclass(frozen=True)
class ImageFiles(Images):
    """Images in files."""

    # Path of each image, video, or folder of a video's frames (ordered by the numbers in their names).
    paths: tuple[Path, ...]
    wanted: int = 1  # number of frames to take from a video or folder
    folders: bool = False  # accept folders as videos; in a set of photos a folder is an error

    def __len__(self) -> int:
        return len(self.paths)

    @property
    @override
    def clips(self) -> bool:
        return self.wanted > 1

    @override
    def name(self, row: int) -> str:
        return str(self.paths[row])

    @override
    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        # The digest of the bytes, and the parameters of decoding; of a folder, the digests of its frames in order.
        files = [self._frames(path) if is_folder(path) else [path] for path in self.paths]
        flat = [file for inside in files for file in inside]
        digests = iter(file_digests(flat, lambda done: on_progress(done * len(files) // len(flat))))
        stamps = []
        for path, inside in zip(self.paths, files, strict=True):
            content = ",".join(itertools.islice(digests, len(inside)))
            order = "|by number" if is_folder(path) else ""  # the order of frames is part of cache keys
            stamps.append(f"{content}|{self.wanted}|{images.PIXELS_VERSION}{order}")
        return tuple(stamps)

    def _frames(self, folder: Path) -> list[Path]:
        """The frames in a folder, by the numbers in their names; refuses an empty folder, and sets of photos."""
        if not self.folders:
            raise InputError(str(folder), "a folder", "an image or a video")
        try:
            frames = (file for file in folder.iterdir() if file.suffix.lower() in IMAGE_ENDINGS)
            inside = sorted((file for file in frames if not is_leftover(file.name)), key=_numbered)
        except OSError as error:
            raise InputError(str(folder), error.strerror or str(error), "a readable folder") from None
        if not inside:
            raise InputError(str(folder), "a folder without images", "a folder of a video's frames")
        return inside

    @override
    def missing(self, row: int) -> bool:
        return not exists(self.paths[row])

    @override
    def frames(self, row: int) -> list[Pixels]:
        path = self.paths[row]
        if is_folder(path):
            inside = self._frames(path)
            return [decode(inside[index], DataItemError) for index in spread_evenly(len(inside), self.wanted)]
        return (
            video_frames(path, self.wanted) if path.suffix.lower() in VIDEO_ENDINGS else [decode(path, DataItemError)]
        )

    @override
    def subset(self, rows: Sequence[int]) -> Self:
        return type(self)(tuple(self.paths[row] for row in rows), self.wanted, self.folders)


@dataclass(frozen=True)
class StoredImages(Images):
    """Images that are stored together, in an array, a table or an archive, and read one by one."""

    rows: tuple[int, ...]  # place of each image among the stored ones

    def __len__(self) -> int:
        return len(self.rows)

    @property
    @abstractmethod
    def stamp(self) -> str:
        """Fingerprint of all stored images and their order, which changes if one of their files is replaced."""

    @abstractmethod
    def stored_name(self, at: int) -> str:
        """Name of a stored image in error messages."""

    @abstractmethod
    def stored_image(self, at: int) -> Pixels:
        """Read a stored image: uint8 [height, width, 3].

        Raises:
            InputError: it cannot be read.
        """

    @override
    def name(self, row: int) -> str:
        return self.stored_name(self.rows[row])

    @override
    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        del on_progress  # few files
        return tuple(f"{self.stamp}|{row}|{images.PIXELS_VERSION}" for row in self.rows)

    @override
    def contents(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        found = []
        for done, row in enumerate(self.rows, 1):
            pixels = self.stored_image(row)
            found.append(blake3.blake3(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest())
            if done % _REPORTED == 0 or done == len(self.rows):
                on_progress(done)
        return tuple(found)

    @override
    def frames(self, row: int) -> list[Pixels]:
        return [self.stored_image(self.rows[row])]

    @override
    def subset(self, rows: Sequence[int]) -> Self:
        return replace(self, rows=tuple(self.rows[row] for row in rows))


@dataclass(frozen=True)
class ImagesWithGaps(Images):
    """The images of n items, some of which have no image."""

    held: Images  # the m existing images
    rows: tuple[int | None, ...]  # for each item, the row of its image in ``held``; None for an item without one

    def __len__(self) -> int:
        return len(self.rows)

    @property
    @override
    def clips(self) -> bool:
        return self.held.clips

    @override
    def name(self, row: int) -> str:
        at = self.rows[row]
        return "no image" if at is None else self.held.name(at)

    @override
    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        return self._filled(self.held.stamps(on_progress))

    @override
    def contents(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        return self._filled(self.held.contents(on_progress))

    def _filled(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        # Each item without an image has a text of its own, as such items share no image.
        return tuple(f"none|{row}" if at is None else texts[at] for row, at in enumerate(self.rows))

    @override
    def missing(self, row: int) -> bool:
        at = self.rows[row]
        return at is not None and self.held.missing(at)

    @override
    def frames(self, row: int) -> list[Pixels]:
        at = self.rows[row]
        if at is None:
            raise InputError(f"item {row}", "no image", "an item with an image")
        return self.held.frames(at)

    @override
    def subset(self, rows: Sequence[int]) -> Self:
        chosen = [self.rows[row] for row in rows]
        places = {at: place for place, at in enumerate(at for at in chosen if at is not None)}
        return type(self)(self.held.subset(list(places)), tuple(None if at is None else places[at] for at in chosen))
