"""Pictures of a data set, decoded on demand: image files, videos, folders of frames, or rows of a stored array."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedmq.encoders.greys import eight_bits_of
from fedmq.errors import DataItemError, InputError
from fedmq.packages import package
from fedmq.storage.cache import file_digests
from fedmq.storage.regular_files import check_regular

Pixels = npt.NDArray[np.uint8]
T = TypeVar("T")

IMAGE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".webm", ".mkv", ".mov"})
#: Maximum number of pixels, against decompression bombs.
MAX_PIXELS = 300_000_000
#: Maximum size of an image file [bytes].
MAX_FILE = 1 << 31
#: Maximum aspect ratio: resizing a narrower picture to a square would lose its content.
MAX_RATIO = 100
#: Version of the decoding, part of cache keys. Version 2: transparent pictures are composed on white, and the centre
#: crop is identical to torchvision's. Version 3: greys of 9 to 15 bits and of 0 to 1 are scaled. Version 4: greys of
#: more than 8 bits in a TIFF in which 0 is white are not inverted any more.
PIXELS_VERSION = 4


class Pictures(Protocol):
    """n pictures in a fixed order."""

    def __len__(self) -> int: ...

    @property
    def clips(self) -> bool:
        """Whether the pictures are videos, whose frames are pooled."""
        ...

    def frames(self, row: int) -> list[Pixels]:
        """Decode one image or a video's frames: uint8 [height, width, 3] each.

        Raises:
            InputError: the picture is unreadable; the message names its file.
        """
        ...

    def name(self, row: int) -> str:
        """Name of this picture in error messages."""
        ...

    def stamps(self, on_progress: Callable[[int], None] = ...) -> tuple[str, ...]:
        """Fingerprint of each picture's content and of its decoding, which changes if the picture is replaced.

        Args:
            on_progress: receives the number of pictures whose files have been read.

        Raises:
            InputError: a file cannot be read.
        """
        ...

    def contents(self, on_progress: Callable[[int], None] = ...) -> tuple[str, ...]:
        """A text for each picture, the same for two pictures if one is a copy of the other; errors as of `stamps`."""
        ...

    def missing(self, row: int) -> bool:
        """Whether this picture's file does not exist."""
        ...

    def subset(self, rows: Sequence[int]) -> Pictures:
        """The pictures of the given rows, in the given order."""
        ...


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

    Args:
        folder: folder in which they are.
        leave: also follow links to folders that are not below ``folder``.

    Raises:
        InputError: there is such a link, and ``leave`` is false.
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


def spread_evenly(total: int, wanted: int) -> list[int]:
    """Indices of the middle frames of ``wanted`` equal parts of ``total`` frames, without duplicates.

    >>> spread_evenly(24, 12)[:3]
    [1, 3, 5]
    """
    return sorted({(2 * index + 1) * total // (2 * wanted) for index in range(wanted)}) if total else []


def decode(path: Path, error: type[InputError] = InputError) -> Pixels:
    """Decode an image file as uint8 [height, width, 3], in its EXIF orientation, on a white background.

    Args:
        path: path of the file.
        error: what is raised for a file that is not an image; :class:`DataItemError` for an item of a data set.

    Raises:
        InputError: the file is missing, truncated or not an image, or the picture has an invalid size.
    """
    if path.exists():
        check_regular(path, MAX_FILE, "an image")
    return _decoded(path, str(path), error)


def decode_bytes(content: bytes, place: str) -> Pixels:
    """Decode the bytes of an image file, like :func:`decode`.

    Args:
        content: content of the file.
        place: place of the picture in error messages.

    Raises:
        InputError: as in :func:`decode`.
    """
    return _decoded(io.BytesIO(content), place)


def check_header(path: Path) -> None:
    """Check that an image file opens, without decoding its pixels.

    Raises:
        InputError: the file is missing or not an image, or the picture has an invalid size.
    """
    if path.exists():
        check_regular(path, MAX_FILE, "an image")
    _read(path, str(path), lambda _: None)


def further_pages(path: Path) -> int:
    """Number of pictures in an image file after the first, the only one that is decoded; 0 for most files.

    These are the pages of a TIFF and the frames of an animation. Smaller copies of a picture are not counted: the
    reduced pages of a TIFF, and the previews that cameras add to a JPEG.

    Raises:
        InputError: as in :func:`check_header`.
    """

    def pages(image: Any) -> int:
        if image.format == "TIFF":
            found = 0
            for page in range(1, image.n_frames):
                image.seek(page)
                found += not int(image.tag_v2.get(_PAGE_KIND, 0)) & 1
            return found
        return image.n_frames - 1 if getattr(image, "is_animated", False) and image.format in _ANIMATED else 0

    return _read(path, str(path), pages)


#: TIFF tag whose lowest bit says that a page is a smaller copy of another one.
_PAGE_KIND = 254
_ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")


def _decoded(source: Path | io.BytesIO, place: str, error: type[InputError] = InputError) -> Pixels:
    ops = package("PIL.ImageOps", "embedded", place)

    def pixels(image: Any) -> Pixels:
        upper = _has_upper_bits_only(image)
        found = _eight_bits(ops.exif_transpose(image), getattr(image, "tag_v2", {}), place)
        if upper and found.max() < _LEAST_OF_16_BITS:
            bits = "colours of 16 bits of which at most the lower 14 are used"
            raise InputError(place, bits, "8 bits per colour, or colours that use all 16 bits")
        return found

    return _read(source, place, pixels, error)


def _has_upper_bits_only(image: Any) -> bool:
    """Whether an image that has not been loaded has 16 bits per colour, of which Pillow keeps the upper 8."""
    return not image.mode.startswith(("I", "F")) and any(";16" in str(tile[3]) for tile in image.tile)


def _read(source: Path | io.BytesIO, place: str, use: Callable[[Any], T], error: type[InputError] = InputError) -> T:
    """Open an image and use it; every failure becomes an InputError, of a broken file the given one."""
    image = package("PIL.Image", "embedded", place)
    try:
        with image.open(source) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise InputError(place, f"{opened.width} x {opened.height} pixels", f"at most {MAX_PIXELS}")
            _check_sides(place, *opened.size)
            return use(opened)
    except FileNotFoundError:
        raise InputError(place, "no such file", "an image") from None
    except InputError:
        raise
    except image.UnidentifiedImageError:
        raise error(place, "no picture that Pillow can read", "an image, e.g. JPEG or PNG") from None
    except Exception as broken:  # Pillow's decoders raise various exceptions on a broken file
        reason = str(broken).replace(place, "file") or type(broken).__name__
        raise error(place, reason, "a readable image") from None


def _check_sides(place: str, width: int, height: int) -> None:
    """Check that a picture has pixels and is not too narrow.

    Raises:
        InputError: a side is 0, or the aspect ratio exceeds :data:`MAX_RATIO`.
    """
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        allowed = f"sides of 1 pixel or more, one at most {MAX_RATIO} times the other"
        raise InputError(place, f"{width} x {height} pixels", allowed)


def _eight_bits(image: Any, tags: Mapping[int, Any], place: str) -> Pixels:
    """Convert an opened image to uint8 [height, width, 3].

    Raises:
        InputError: the range of the grey values is not known.
    """
    if not image.mode.startswith(("I", "F")):
        return np.asarray(_on_white(image) if image.has_transparency_data else image.convert("RGB")).copy()
    grey = eight_bits_of(image, tags, place)
    return np.repeat(grey[..., None], 3, axis=2)


#: Level, of 256, that the brightest colour of a picture of 16 bits reaches; those of 14 bits in it reach 63.
_LEAST_OF_16_BITS = 64


def _on_white(image: Any) -> Any:
    """Compose an opened image with transparency on white, as RGB; colours of transparent pixels are arbitrary."""
    white, layer = package("PIL.Image", "embedded", "image").new("RGB", image.size, "white"), image.convert("RGBA")
    white.paste(layer, mask=layer)
    return white


def video_frames(path: Path, wanted: int) -> list[Pixels]:
    """Decode evenly spaced frames of a video: uint8 [height, width, 3] each.

    Raises:
        InputError: PyAV is not installed, or the file is not a video or is less than half complete.
    """
    av = package("av", "video", str(path))
    if path.exists():
        check_regular(path, 1 << 62, "a video")
    try:
        with av.open(str(path)) as container:
            # Only MP4's header is reliable; in other formats the number of frames is often missing or wrong.
            stated = container.streams.video[0].frames if "mp4" in container.format.name else 0
            # Counts packets, without decoding.
            total = sum(1 for packet in container.demux(video=0) if packet.size)
        keep, found = set(spread_evenly(total, wanted)), []
        with av.open(str(path)) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in keep:
                    found.append(cast("Pixels", frame.to_ndarray(format="rgb24")))
                if len(found) == len(keep):
                    break
    except Exception as error:  # FFmpeg's errors, and various exceptions of PyAV on a broken stream or frame
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataItemError(str(path), reason, "a readable video") from None
    if not found:
        raise InputError(str(path), "no frame", "a readable video")
    if 2 * total < stated:
        raise InputError(str(path), f"{total} of {stated} frames", "a video that was not cut off")
    return found


def _numbered(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that orders names by the numbers in them: 2.jpg before 10.jpg."""
    parts = re.findall(r"[0-9]+|[^0-9]+", path.name)
    return [(int(part), "") if part[0] in "0123456789" else (-1, part) for part in parts], path.name


@dataclass(frozen=True)
class Files:
    """Pictures in files.

    Args:
        paths: path of each image, video, or folder of a video's frames (ordered by the numbers in their names).
        wanted: number of frames to take from a video or folder.
        folders: accept folders as videos; in a set of photos a folder is an error.
    """

    paths: tuple[Path, ...]
    wanted: int = 1
    folders: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def clips(self) -> bool:
        """Whether more than one frame per picture is taken."""
        return self.wanted > 1

    def name(self, row: int) -> str:
        """The picture's path."""
        return str(self.paths[row])

    def stamps(self, on_progress: Callable[[int], None] = lambda _done: None) -> tuple[str, ...]:
        """The digest of the bytes, and the parameters of decoding; of a folder, the digests of its frames in order."""
        files = [self._frames(path) if is_folder(path) else [path] for path in self.paths]
        flat = [file for inside in files for file in inside]
        digests = iter(file_digests(flat, lambda done: on_progress(done * len(files) // len(flat))))
        stamps = []
        for path, inside in zip(self.paths, files, strict=True):
            content = ",".join(itertools.islice(digests, len(inside)))
            order = "|by number" if is_folder(path) else ""  # the order of frames is part of cache keys
            stamps.append(f"{content}|{self.wanted}|{PIXELS_VERSION}{order}")
        return tuple(stamps)

    contents = stamps

    def _frames(self, folder: Path) -> list[Path]:
        """The frames in a folder, ordered by the numbers in their names.

        Raises:
            InputError: there are none, or the set is one of photos.
        """
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

    def missing(self, row: int) -> bool:
        """Whether the path does not exist."""
        return not exists(self.paths[row])

    def frames(self, row: int) -> list[Pixels]:
        """Decode one image, or ``wanted`` evenly spaced frames: uint8 [height, width, 3] each."""
        path = self.paths[row]
        if is_folder(path):
            inside = self._frames(path)
            return [decode(inside[index], DataItemError) for index in spread_evenly(len(inside), self.wanted)]
        return (
            video_frames(path, self.wanted) if path.suffix.lower() in VIDEO_ENDINGS else [decode(path, DataItemError)]
        )

    def subset(self, rows: Sequence[int]) -> Self:
        """The pictures of the given rows, in the given order."""
        return type(self)(tuple(self.paths[row] for row in rows), self.wanted, self.folders)


def fit(pixels: Pixels, edge: int, crop: float = 1.0, resample: str = "BICUBIC", *, squash: bool = False) -> Pixels:
    """Resize the shorter side to ``edge / crop`` and centre-crop, with the same rounding as CLIP and timm.

    Args:
        pixels: uint8 [height, width, 3].
        edge: edge length of the result [pixels].
        crop: fraction of the shorter side to keep.
        resample: Pillow's name of the interpolation, e.g. ``BICUBIC``.
        squash: resize both sides to ``edge / crop``, ignoring the aspect ratio.

    Returns:
        uint8 [edge, edge, 3].

    Raises:
        InputError: the picture has no pixels or is too narrow.
    """
    image = package("PIL.Image", "embedded", "image")
    height, width = pixels.shape[:2]
    _check_sides("a picture", width, height)
    short = max(edge, int(edge / crop))
    # As in torchvision, the longer side is rounded down, and crop offsets are rounded half to even.
    size = (short, short) if squash else tuple(int(short * side / min(height, width)) for side in (width, height))
    scaled = image.fromarray(pixels).resize(size, getattr(image.Resampling, resample))
    left, top = (round((side - edge) / 2) for side in size)
    return np.asarray(scaled.crop((left, top, left + edge, top + edge)))


def as_pixels(picture: object, place: str) -> Pixels:
    """Decode a picture given as a path, a Pillow image, an array or a tensor.

    Args:
        picture: path of an image; Pillow image; NumPy array [height, width, 3]; or tensor [3, height, width], as in
            torchvision. Arrays and tensors are uint8, or floating point in [0, 1].
        place: place of the picture in error messages.

    Returns:
        uint8 [height, width, 3].

    Raises:
        InputError: the file is not an image, or the object has another type, shape, dtype or range.
    """
    if isinstance(picture, str | os.PathLike):
        return decode(Path(picture))
    if hasattr(picture, "convert") and hasattr(picture, "getexif"):  # Pillow is imported only where it is used
        tags, image = getattr(picture, "tag_v2", {}), package("PIL.ImageOps", "embedded", place).exif_transpose(picture)
        _check_sides(place, *image.size)
        return _eight_bits(image, tags, place)
    # There are no tensors before torch is imported, which takes seconds that readers do without.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(picture, torch.Tensor):
        array = picture.detach().cpu().numpy()
        picture = array.transpose(1, 2, 0) if array.ndim == 3 else array
    if not isinstance(picture, np.ndarray):
        raise InputError(place, f"an object of type {type(picture).__name__}", "a path, Pillow image, array or tensor")
    if picture.ndim != 3 or picture.shape[2] != 3:
        allowed = "an array [height, width, 3] or a tensor [3, height, width] of RGB values"
        raise InputError(place, f"shape {list(picture.shape)}", allowed)
    _check_sides(place, picture.shape[1], picture.shape[0])
    if picture.dtype == np.uint8:
        return np.ascontiguousarray(picture)
    if not np.issubdtype(picture.dtype, np.floating) or not ((picture >= 0) & (picture <= 1)).all():
        raise InputError(place, f"{picture.dtype} values", "uint8, or floating point in [0, 1]")
    return np.round(255 * picture).astype(np.uint8)
