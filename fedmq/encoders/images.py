"""Decoding images and videos, in the quarantine, and resizing images for an encoder."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from fedmq.errors import DataItemError, InputError
from fedmq.packages import package
from fedmq.storage import quarantine

Pixels = npt.NDArray[np.uint8]
T = TypeVar("T")

IMAGE_ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"})
VIDEO_ENDINGS = frozenset({".mp4", ".avi", ".webm", ".mkv", ".mov"})
#: Maximum aspect ratio: resizing a narrower image to a square would lose its content.
MAX_RATIO = 100
#: Version of the decoding, part of cache keys.
PIXELS_VERSION = 4
#: TIFF tag whose lowest bit says that a page is a smaller copy of another one.
_PAGE_KIND = 254
_ANIMATED = ("GIF", "PNG", "WEBP", "AVIF")
#: Level, of 256, that the brightest colour of an image of 16 bits reaches; those of 14 bits in it reach 63.
_LEAST_OF_16_BITS = 64
#: TIFF tag that says whether the smallest grayscale value is white (0) or black (1).
_PHOTOMETRIC = 262
#: TIFF tags that declare the smallest and the largest grayscale value, in order of preference.
_DECLARED = ((340, 341), (280, 281))
_LIBRARIES: Final = ("PIL.Image", "PIL.ImageOps")


def decode(path: Path, error: type[InputError] = InputError) -> Pixels:
    """Decode an image file as uint8 [height, width, 3], in its EXIF orientation, on a white background.

    Raises:
        InputError: the file is missing, truncated or not an image, or the image has an invalid size; for an item of a
            data set ``error`` is :class:`DataItemError`.
    """
    return _from(pixels_of, path, error)


def decode_bytes(content: bytes, place: str) -> Pixels:
    """Decode the bytes of an image file, like :func:`decode`; ``place`` is its place in error messages.

    Raises:
        InputError: they are not an image that can be read.
    """
    return quarantine.read(pixels_of, content, place, place=place, allowed="a readable image", libraries=_LIBRARIES)


def check_header(path: Path) -> None:
    """Check that an image file opens, without decoding its pixels.

    Raises:
        InputError: the file is missing or not an image, or the image has an invalid size.
    """
    _from(open_only, path)


def further_pages(path: Path) -> int:
    """Number of images in a file after the first, the only one that is decoded; 0 for most files.

    These are the pages of a TIFF and the frames of an animation. Smaller copies of an image are not counted: the
    reduced pages of a TIFF, and the previews that cameras add to a JPEG.

    Raises:
        InputError: as in :func:`check_header`.
    """
    return _from(pages_of, path)


def video_frames(path: Path, wanted: int) -> list[Pixels]:
    """Decode evenly spaced frames of a video: uint8 [height, width, 3] each.

    Raises:
        InputError: PyAV is not installed, or the file is not a video or is less than half complete.
    """
    allowed, libraries = "a readable video", ("av",)
    return quarantine.read(
        frames_of,
        path,
        wanted,
        place=str(path),
        allowed=allowed,
        files=[path],
        libraries=libraries,
        error=DataItemError,
    )


def _from(function: Callable[[str, str], T], path: Path, error: type[InputError] = InputError) -> T:
    """What a function reads from an image file."""
    if not path.exists():
        raise InputError(str(path), "no such file", "an image")
    allowed, name = "a readable image", str(path)
    return quarantine.read(
        function, path, name, place=name, allowed=allowed, files=[path], libraries=_LIBRARIES, error=error
    )


def spread_evenly(total: int, wanted: int) -> list[int]:
    """Indices of the middle frames of ``wanted`` equal parts of ``total`` frames, without duplicates.

    >>> spread_evenly(24, 12)[:3]
    [1, 3, 5]
    """
    return sorted({(2 * index + 1) * total // (2 * wanted) for index in range(wanted)}) if total else []


# --- in the quarantine ----------------------------------------------------------------------------------------------


def pixels_of(source: str | bytes, place: str) -> Pixels:
    """The pixels of an image file, or of the bytes of one."""

    def pixels(image: Any) -> Pixels:
        upper = _has_upper_bits_only(image)
        upright = package("PIL.ImageOps", "embedded", place).exif_transpose(image)
        rgb = _eight_bits(upright, getattr(image, "tag_v2", {}), place)
        if upper and rgb.max() < _LEAST_OF_16_BITS:
            bits = "colours of 16 bits of which at most the lower 14 are used"
            raise InputError(place, bits, "8 bits per colour, or colours that use all 16 bits")
        return rgb

    return _opened(source, place, pixels)


def open_only(source: str, place: str) -> None:
    """Open an image file, which reads its size."""
    _opened(source, place, lambda _image: None)


def pages_of(source: str, place: str) -> int:
    """See :func:`further_pages`."""

    def pages(image: Any) -> int:
        if image.format == "TIFF":
            count = 0
            for page in range(1, image.n_frames):
                image.seek(page)
                count += not int(image.tag_v2.get(_PAGE_KIND, 0)) & 1
            return count
        return image.n_frames - 1 if getattr(image, "is_animated", False) and image.format in _ANIMATED else 0

    return _opened(source, place, pages)


def frames_of(path: str, wanted: int) -> list[Pixels]:
    """See :func:`video_frames`."""
    av, frames = package("av", "video", path), list[Pixels]()
    with av.open(path) as container:
        # Only MP4's header is reliable; in other formats the number of frames is often missing or wrong.
        stated = container.streams.video[0].frames if "mp4" in container.format.name else 0
        # Counts packets, without decoding.
        total = sum(1 for packet in container.demux(video=0) if packet.size)
    keep = set(spread_evenly(total, wanted))
    with av.open(path) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index in keep:
                frames.append(cast("Pixels", frame.to_ndarray(format="rgb24")))
            if len(frames) == len(keep):
                break
    if not frames:
        raise InputError(path, "no frame", "a readable video")
    if 2 * total < stated:
        raise InputError(path, f"{total} of {stated} frames", "a video that was not cut off")
    return frames


def _opened(source: str | bytes, place: str, use: Callable[[Any], T]) -> T:
    pil = package("PIL.Image", "embedded", place)
    try:
        with pil.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            _check_sides(place, *image.size)
            return use(image)
    except pil.UnidentifiedImageError:  # its own words name the file once more
        raise ValueError("no image that Pillow can read") from None


def _has_upper_bits_only(image: Any) -> bool:
    """Whether an image that has not been loaded has 16 bits per colour, of which Pillow keeps the upper 8."""
    return not image.mode.startswith(("I", "F")) and any(";16" in str(tile[3]) for tile in image.tile)


def _check_sides(place: str, width: int, height: int) -> None:
    """Check that an image has pixels and is not too narrow."""
    if not 0 < max(width, height) <= MAX_RATIO * min(width, height):
        allowed = f"sides of 1 pixel or more, one at most {MAX_RATIO} times the other"
        raise InputError(place, f"{width} x {height} pixels", allowed)


def _eight_bits(image: Any, tags: Mapping[int, Any], place: str) -> Pixels:
    """Convert an opened image to uint8 [height, width, 3]."""
    if not image.mode.startswith(("I", "F")):
        return np.asarray(_on_white(image) if image.has_transparency_data else image.convert("RGB")).copy()
    return np.repeat(_grayscale(image, tags, place)[..., None], 3, axis=2)


def _on_white(image: Any) -> Any:
    """Compose an opened image with transparency on white, as RGB; colours of transparent pixels are arbitrary."""
    white, layer = package("PIL.Image", "embedded", "image").new("RGB", image.size, "white"), image.convert("RGBA")
    white.paste(layer, mask=layer)
    return white


def _grayscale(image: Any, tags: Mapping[int, Any], place: str) -> npt.NDArray[np.uint8]:
    """The values of an opened image of mode I or F, which Pillow would clip, as uint8: 0 for black to 255 for white.

    The value that the image declares transparent becomes white; ``tags`` are its TIFF tags.
    """
    values = np.asarray(image).astype(np.float64)
    clear = np.zeros(values.shape, np.bool_)
    if (transparent := image.info.get("transparency")) is not None:
        clear = values == transparent  # a 16-bit PNG can declare one value transparent
    low, high = _range_of(image.mode, tags, values[~clear], place)
    scaled = np.round((np.clip(values, low, high) - low) * (255 / (high - low)))
    if tags.get(_PHOTOMETRIC) == 0:  # 0 is white, as in many X-ray images; Pillow inverts only 8 bits or fewer
        scaled = 255 - scaled
    return np.where(clear, 255, scaled).astype(np.uint8)


def _range_of(mode: str, tags: Mapping[int, Any], values: npt.NDArray[np.float64], place: str) -> tuple[float, float]:
    """The values of black and white: those that a TIFF declares, or the narrowest usual range of the values.

    Usual are 0 to 1 for floating-point values, and 0 to the largest number of 8, 10, 12, 14 or 16 bits.
    """
    for pair in _DECLARED:
        try:
            low, high = (
                float(value[0] if isinstance(value, tuple) else value) for value in (tags[tag] for tag in pair)
            )
        except (KeyError, TypeError, ValueError, IndexError):  # no such tag, or a damaged one
            continue
        if (
            math.isfinite(high - low)
            and low < high
            and low <= values.min(initial=low)
            and values.max(initial=low) <= high
        ):
            return low, high
    if values.size and not np.isfinite(values).all():
        raise InputError(place, "grayscale values that are not finite", "numbers")
    lowest, highest = values.min(initial=0.0), values.max(initial=0.0)
    if mode.startswith("F") and lowest >= 0 and highest <= 1:
        return 0.0, 1.0
    for bits in (8, 10, 12, 14, 16):
        if lowest >= 0 and highest < 1 << bits:
            return 0.0, float((1 << bits) - 1)
    found_range = f"grayscale values from {lowest:.6g} to {highest:.6g} of Pillow's mode {mode}"
    raise InputError(place, found_range, "values from 0 to 1 or of 8 to 16 bits, or TIFF tags that declare the range")


# --- for encoders ---------------------------------------------------------------------------------------------------


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
        InputError: the image has no pixels or is too narrow.
    """
    image = package("PIL.Image", "embedded", "image")
    height, width = pixels.shape[:2]
    _check_sides("an image", width, height)
    short = max(edge, int(edge / crop))
    # As in torchvision, the longer side is rounded down, and crop offsets are rounded half to even.
    size = (short, short) if squash else tuple(int(short * side / min(height, width)) for side in (width, height))
    scaled = image.fromarray(pixels).resize(size, getattr(image.Resampling, resample))
    left, top = (round((side - edge) / 2) for side in size)
    return np.asarray(scaled.crop((left, top, left + edge, top + edge)))


def difference_hash(pixels: Pixels) -> int:
    """64 bits: whether each of 8 x 8 areas is darker than the one to its right (Krawetz 2013, "Kind of Like That")."""
    image = package("PIL.Image", "embedded", "image")
    small = np.asarray(image.fromarray(pixels).convert("L").resize((9, 8), image.Resampling.BOX))
    return int.from_bytes(np.packbits(small[:, :-1] < small[:, 1:]).tobytes(), "big")


def as_pixels(image: object, place: str) -> Pixels:
    """Decode an image given as a path, a Pillow image, an array or a tensor: uint8 [height, width, 3].

    Arrays are [height, width, 3], tensors [3, height, width] as in torchvision; both are uint8, or floating point in
    [0, 1]. ``place`` names the image in error messages.

    Raises:
        InputError: the file is not an image, or the object has another type, shape, dtype or range.
    """
    if isinstance(image, str | os.PathLike):
        return decode(Path(image))
    if hasattr(image, "convert") and hasattr(image, "getexif"):  # Pillow is imported only where it is used
        tags, upright = getattr(image, "tag_v2", {}), package("PIL.ImageOps", "embedded", place).exif_transpose(image)
        _check_sides(place, *upright.size)
        return _eight_bits(upright, tags, place)
    # There are no tensors before torch is imported, which takes seconds that readers do without.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(image, torch.Tensor):
        array = image.detach().cpu().numpy()
        image = array.transpose(1, 2, 0) if array.ndim == 3 else array
    if not isinstance(image, np.ndarray):
        raise InputError(place, f"an object of type {type(image).__name__}", "a path, Pillow image, array or tensor")
    if image.ndim != 3 or image.shape[2] != 3:
        allowed = "an array [height, width, 3] or a tensor [3, height, width] of RGB values"
        raise InputError(place, f"shape {list(image.shape)}", allowed)
    _check_sides(place, image.shape[1], image.shape[0])
    if image.dtype == np.uint8:
        return np.ascontiguousarray(image)
    if not np.issubdtype(image.dtype, np.floating) or not ((image >= 0) & (image <= 1)).all():
        raise InputError(place, f"{image.dtype} values", "uint8, or floating point in [0, 1]")
    return np.round(255 * image).astype(np.uint8)
