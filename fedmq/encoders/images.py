"""Pictures of a data set: image files, videos, folders of frames, or rows of a stored array; decoded when asked for."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError
from fedmq.extras import package

Pixels = npt.NDArray[np.uint8]

IMAGE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".webm", ".mkv", ".mov"})
#: A larger picture is a decompression bomb or a mistake.
MAX_PIXELS = 300_000_000
#: Longest side of a picture in its shortest: what a strip shows is lost in the square that a network sees.
MAX_RATIO = 100
#: Of how a stored picture becomes pixels; rows that another version made are not used again. 2: transparent pictures
#: lie on white, and the middle is cut out to the pixel where torchvision cuts it out.
PIXELS_VERSION = 2


class Pictures(Protocol):
    """n pictures in a fixed order."""

    def __len__(self) -> int: ...

    @property
    def clips(self) -> bool:
        """Whether these are videos, whose frames are pooled."""
        ...

    def frames(self, row: int) -> list[Pixels]:
        """One image, or a video's frames: uint8 [height, width, 3] each.

        Raises:
            InputError: it cannot be read; its file is named.
        """
        ...

    def name(self, row: int) -> str:
        """What a message calls this picture."""
        ...

    def stamp(self, row: int) -> str:
        """What changes when the picture is replaced by another."""
        ...

    def missing(self, row: int) -> bool:
        """Whether there is no such file."""
        ...

    def subset(self, rows: Sequence[int]) -> Pictures:
        """Some of them."""
        ...


def exists(path: Path) -> bool:
    """Whether a file or folder lies there; no name is too long or too strange to ask."""
    try:
        path.stat()
    except PermissionError:
        return True  # whoever opens it is told the reason
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: Path) -> bool:
    """Whether a folder lies there, likewise."""
    return exists(path) and path.is_dir()


def is_leftover(name: str) -> bool:
    """Whether a file or folder is hidden or what a Mac adds to an archive: nobody's data.

    >>> is_leftover("._25.jpg"), is_leftover("25.jpg")
    (True, False)
    """
    return name.startswith(".") or name == "__MACOSX"


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder; links to folders are followed, but no folder is entered twice, so circles end.

    Leftovers (:func:`is_leftover`) are passed over.

    A folder that lies there itself and is linked to as well is listed where it lies.
    """
    seen: set[tuple[int, int]] = set()
    waiting, links = [folder], deque[Path]()
    while waiting or links:
        here = waiting.pop() if waiting else links.popleft()
        try:
            about = here.stat()
            with os.scandir(here) as listed:
                inside = sorted((entry.name, entry.is_dir(), entry.is_symlink()) for entry in listed)
        except OSError:
            continue  # as a search does: lost+found and the like are nobody's data
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        for name, holds_more, link in inside:
            if is_leftover(name):
                continue
            if holds_more:
                (links if link else waiting).append(here / name)
            else:
                yield here / name


def spread_evenly(total: int, wanted: int) -> list[int]:
    """Indices of ``wanted`` frames in the middle of as many equal parts of ``total``; each at most once.

    >>> spread_evenly(24, 12)[:3]
    [1, 3, 5]
    """
    return sorted({(2 * index + 1) * total // (2 * wanted) for index in range(wanted)}) if total else []


def decode(path: Path) -> Pixels:
    """An image file as uint8 [height, width, 3], turned as its EXIF tag says, on white where it is transparent.

    Raises:
        InputError: missing, truncated, or no image.
    """
    image, ops = (package(f"PIL.{part}", "embedded", str(path)) for part in ("Image", "ImageOps"))
    try:
        with image.open(path) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise InputError(str(path), f"{opened.width} x {opened.height} pixels", f"at most {MAX_PIXELS}")
            _check_sides(str(path), *opened.size)
            return _eight_bits(ops.exif_transpose(opened), str(path))
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "an image") from None
    except InputError:
        raise
    except Exception as error:  # Pillow's readers raise whatever they like on a broken file
        reason = str(error).replace(str(path), "file") or type(error).__name__
        raise InputError(str(path), reason, "a readable image; fedmq data check lists all that are not") from None


def _check_sides(place: str, width: int, height: int) -> None:
    """Refuse a picture without pixels, and a strip.

    Raises:
        InputError: it is one of these.
    """
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        allowed = f"sides of 1 pixel or more, one at most {MAX_RATIO} times the other"
        raise InputError(place, f"{width} x {height} pixels", allowed)


def _eight_bits(image: Any, place: str) -> Pixels:
    """An opened image as uint8 [height, width, 3].

    Pillow cuts the grey values of wider images off at 255, which makes scans and depth maps white.

    Raises:
        InputError: grey values of more than 16 bits, whose white nobody knows.
    """
    if not image.mode.startswith(("I", "F")):
        return np.asarray(_on_white(image) if image.has_transparency_data else image.convert("RGB")).copy()
    grey = np.asarray(image).astype(np.float64)
    if (clear := image.info.get("transparency")) is not None:
        grey[grey == clear] = 65535  # one grey of a PNG of 16 bits
    if image.mode.startswith("I;16") or (image.mode == "I" and 255 < grey.max(initial=0) <= 65535):
        grey = np.round(grey / 257)
    if not ((grey >= 0) & (grey <= 255)).all():
        raise InputError(place, f"grey values of Pillow's mode {image.mode}", "8 or 16 bits a channel")
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=2)


def _on_white(image: Any) -> Any:
    """An opened image with transparency as RGB on white; the colours below what is transparent are arbitrary."""
    white, layer = package("PIL.Image", "embedded", "image").new("RGB", image.size, "white"), image.convert("RGBA")
    white.paste(layer, mask=layer)
    return white


def video_frames(path: Path, wanted: int) -> list[Pixels]:
    """Evenly spaced frames of a video: uint8 [height, width, 3] each.

    Raises:
        InputError: PyAV is not installed, or the file is no video, or less than half of one.
    """
    av = package("av", "video", str(path))
    try:
        with av.open(str(path)) as container:
            # Only MP4's header lists every frame; the number in others is often absent or wrong.
            stated = container.streams.video[0].frames if "mp4" in container.format.name else 0
            # Counting packets decodes nothing.
            total = sum(1 for packet in container.demux(video=0) if packet.size)
        keep, found = set(spread_evenly(total, wanted)), []
        with av.open(str(path)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in keep:
                    found.append(cast("Pixels", frame.to_ndarray(format="rgb24")))
                if len(found) == len(keep):
                    break
    except Exception as error:  # FFmpeg's errors, and whatever PyAV makes of a broken stream or frame
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(str(path), reason, "a readable video; fedmq data check lists all that are not") from None
    if not found:
        raise InputError(str(path), "no frame", "a readable video")
    if 2 * total < stated:
        raise InputError(str(path), f"{total} of {stated} frames", "a video that was not cut off")
    return found


def _numbered(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sorts frames by the numbers in their names: 2.jpg comes before 10.jpg."""
    parts = re.findall(r"[0-9]+|[^0-9]+", path.name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], path.name


@dataclass(frozen=True)
class Files:
    """Pictures in files.

    Args:
        paths: of each an image, a video, or a folder of a video's frames in the order of their numbers.
        root: what names and stamps are relative to.
        wanted: frames taken of a video or a folder.
        folders: whether a folder is a video's frames; in a set of photos it is a mistake.
    """

    paths: tuple[Path, ...]
    root: Path
    wanted: int = 1
    folders: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def clips(self) -> bool:
        """Whether more than one frame is wanted."""
        return self.wanted > 1

    def name(self, row: int) -> str:
        """The path as given."""
        return str(self.paths[row])

    def stamp(self, row: int) -> str:
        """Path below the root, size, time of change, and how pixels are made of it."""
        path = self.paths[row]
        try:
            about = path.stat()
        except OSError as error:
            raise InputError(str(path), error.strerror or str(error), "a readable file") from None
        inner = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        # A folder's time changes with its list of files, which is what its frames are.
        order = "|by number" if is_folder(path) else ""  # rows from before names were sorted so are not used again
        return f"{inner}|{about.st_size}|{about.st_mtime_ns}|{self.wanted}|{PIXELS_VERSION}{order}"

    def missing(self, row: int) -> bool:
        """Whether neither a file nor a folder lies there."""
        return not exists(self.paths[row])

    def frames(self, row: int) -> list[Pixels]:
        """One image, or ``wanted`` evenly spaced frames."""
        path = self.paths[row]
        if is_folder(path):
            if not self.folders:
                raise InputError(str(path), "a folder", "an image or a video")
            frames = (file for file in path.iterdir() if file.suffix.lower() in IMAGE_ENDINGS)
            inside = sorted((file for file in frames if not is_leftover(file.name)), key=_numbered)
            if not inside:
                raise InputError(str(path), "a folder without images", "a folder of a video's frames")
            return [decode(inside[index]) for index in spread_evenly(len(inside), self.wanted)]
        return video_frames(path, self.wanted) if path.suffix.lower() in VIDEO_ENDINGS else [decode(path)]

    def subset(self, rows: Sequence[int]) -> Self:
        """Some of them."""
        return type(self)(tuple(self.paths[row] for row in rows), self.root, self.wanted, self.folders)


class Stack(Protocol):
    """An array of n pictures, opened and read only when needed."""

    def __len__(self) -> int: ...

    @property
    def place(self) -> str:
        """What a message calls it."""
        ...

    @property
    def stamp(self) -> str:
        """What changes when the file is replaced by another."""
        ...

    def picture(self, row: int) -> Pixels:
        """uint8 [height, width, 3]."""
        ...


@dataclass(frozen=True)
class Rows:
    """Pictures that are rows of an array in a file.

    Args:
        stack: the array.
        rows: places in it.
    """

    stack: Stack
    rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def clips(self) -> bool:
        """Never."""
        return False

    def name(self, row: int) -> str:
        """File, array and row."""
        return f"{self.stack.place}[{self.rows[row]}]"

    def stamp(self, row: int) -> str:
        """The file's stamp, the row, and how pixels are made of it."""
        return f"{self.stack.stamp}|{self.rows[row]}|{PIXELS_VERSION}"

    def missing(self, row: int) -> bool:
        """Never: the file holds as many as it says."""
        del row
        return False

    def frames(self, row: int) -> list[Pixels]:
        """The one image."""
        return [self.stack.picture(self.rows[row])]

    def subset(self, rows: Sequence[int]) -> Self:
        """Some of them."""
        return type(self)(self.stack, tuple(self.rows[row] for row in rows))


def fit(pixels: Pixels, edge: int, crop: float = 1.0, resample: str = "BICUBIC", *, squash: bool = False) -> Pixels:
    """Scale the shorter side to ``edge / crop`` and cut the middle out, to the pixel as CLIP and timm do.

    Args:
        pixels: uint8 [height, width, 3].
        edge: of the result.
        crop: share of the shorter side that is kept.
        resample: Pillow's name of the interpolation.
        squash: scale both sides to ``edge / crop``, whatever shape the picture had.

    Returns:
        uint8 [edge, edge, 3].

    Raises:
        InputError: a strip, or a picture without pixels.
    """
    image = package("PIL.Image", "embedded", "image")
    height, width = pixels.shape[:2]
    _check_sides("a picture", width, height)
    short = max(edge, int(edge / crop))
    # Torchvision cuts the longer side's fraction off, and its halves go to the even number.
    size = (short, short) if squash else tuple(int(short * side / min(height, width)) for side in (width, height))
    scaled = image.fromarray(pixels).resize(size, getattr(image.Resampling, resample))
    left, top = (round((side - edge) / 2) for side in size)
    return np.asarray(scaled.crop((left, top, left + edge, top + edge)))
