"""What every frozen encoder has in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from fedmq.config.parts import Modality
from fedmq.encoders.images import Pixels

Array = npt.NDArray[Any]

BATCH = 32  # captions encoded at once


@dataclass(frozen=True)
class Encoder:
    """One modality's frozen encoder.

    Args:
        digest: of its weights and of whatever else changes its rows.
        encode: items to rows [n, ...]; a row depends on nothing but its item and its place in the call.
        fit: what happens to a picture right after it was read.
        mean: per channel, where rows are pixels that are normalised later; else empty.
        std: likewise.
        edge: in pixels, of the pictures that need no scaling; drawings are rendered so.
        later: digest of the weights that a model puts over the rows, where rows are pixels; else empty.
        width: of a row, where it is known before there is one; else 0.
    """

    digest: str
    encode: Callable[[Sequence[Any]], Array]
    fit: Callable[[Pixels], Pixels] = lambda picture: picture
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    edge: int = 224
    later: str = ""
    width: int = 0


MODALITIES: tuple[Modality, Modality] = ("image", "text")


@dataclass(frozen=True)
class InputSpec:
    """What one item looks like to the model.

    Args:
        image_shape: ``(d,)`` for features, ``(3, S, S)`` for pixels, ``(F, 3, S, S)`` for those of a video's frames.
        text_shape: ``(d,)`` for features of one caption, ``(77,)`` for token ids.
        image_dtype: ``float32`` for features, ``uint8`` for pixels.
        text_dtype: ``float32`` for features, ``int32`` for token ids.
        mean: per channel, of pixels scaled to [0, 1]; empty for features.
        std: per channel, as ``mean``.
    """

    image_shape: tuple[int, ...]
    text_shape: tuple[int, ...]
    image_dtype: str = "float32"
    text_dtype: str = "float32"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
