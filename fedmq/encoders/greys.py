"""Greys of more than 8 bits, which Pillow would clip at 255, and floating-point ones, which it would cut to black."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.errors import InputError

#: TIFF tag that says whether the smallest grey value is white (0) or black (1).
_PHOTOMETRIC = 262
#: TIFF tags that declare the smallest and the largest grey value, in order of preference.
_DECLARED = ((340, 341), (280, 281))


def eight_bits_of(image: Any, tags: Mapping[int, Any], place: str) -> npt.NDArray[np.uint8]:
    """The greys of an opened image of Pillow's mode I or F, scaled to 0 for black and 255 for white.

    Args:
        image: the image; the grey value that it declares transparent becomes white.
        tags: its TIFF tags; empty for other formats.
        place: place of the picture in error messages.

    Returns:
        uint8 [height, width].

    Raises:
        InputError: the range of the grey values is not known.
    """
    grey = np.asarray(image).astype(np.float64)
    clear = np.zeros(grey.shape, np.bool_)
    if (transparent := image.info.get("transparency")) is not None:
        clear = grey == transparent  # a 16-bit PNG can declare one grey value transparent
    low, high = _grey_range(image.mode, tags, grey[~clear], place)
    scaled = np.round((np.clip(grey, low, high) - low) * (255 / (high - low)))
    if tags.get(_PHOTOMETRIC) == 0:  # 0 is white, as in many X-ray pictures; Pillow inverts only 8 bits or fewer
        scaled = 255 - scaled
    return np.where(clear, 255, scaled).astype(np.uint8)


def _grey_range(mode: str, tags: Mapping[int, Any], grey: npt.NDArray[np.float64], place: str) -> tuple[float, float]:
    """The grey values of black and white: those that a TIFF declares, or the narrowest usual range of the values.

    Usual are 0 to 1 for floating-point values, and 0 to the largest number of 8, 10, 12, 14 or 16 bits.

    Raises:
        InputError: no usual range holds all values.
    """
    for pair in _DECLARED:
        try:
            low, high = (
                float(value[0] if isinstance(value, tuple) else value) for value in (tags[tag] for tag in pair)
            )
        except (KeyError, TypeError, ValueError, IndexError):  # no such tag, or a damaged one
            continue
        if math.isfinite(high - low) and low < high and low <= grey.min(initial=low) and grey.max(initial=low) <= high:
            return low, high
    if grey.size and not np.isfinite(grey).all():
        raise InputError(place, "grey values that are not finite", "numbers")
    lowest, highest = grey.min(initial=0.0), grey.max(initial=0.0)
    if mode.startswith("F") and lowest >= 0 and highest <= 1:
        return 0.0, 1.0
    for bits in (8, 10, 12, 14, 16):
        if lowest >= 0 and highest < 1 << bits:
            return 0.0, float((1 << bits) - 1)
    found_range = f"grey values from {lowest:.6g} to {highest:.6g} of Pillow's mode {mode}"
    raise InputError(place, found_range, "values from 0 to 1 or of 8 to 16 bits, or TIFF tags that declare the range")
