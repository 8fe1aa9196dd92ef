"""Types shared by all frozen encoders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Modality
from fedmq.encoders.images import Pixels

Array = npt.NDArray[Any]

BATCH = 32  # items per forward pass


def stated_digest(digest: str, later: str = "") -> str:
    """Digest (hex) by which a site with its own data states ``digest`` and ``later`` of its :class:`Encoder`."""
    return hashlib.sha256(f"{digest} {later}".encode()).hexdigest()


def too_long(texts: Sequence[str], most: int, longer: Callable[[list[str]], Iterable[bool]]) -> list[bool]:
    """Whether each text has more tokens than the ``most`` that an encoder reads, two of which mark its start and end.

    ``longer`` says it of some texts by tokenising them. A token stands for at least one byte, so most need not be.
    """
    doubtful = [text for text in texts if len(text.encode()) + 2 > most]
    found = dict(zip(doubtful, longer(doubtful), strict=True)) if doubtful else {}
    return [found.get(text, False) for text in texts]


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder of one modality."""

    digest: str  # digest of the weights and of everything else that affects the encoder's rows
    # Maps items to rows [n, ...]; a row depends only on its item and its position in the call.
    encode: Callable[[Sequence[Any]], Array]
    fit: Callable[[Pixels], Pixels] = lambda image: image  # resizes an image right after decoding
    mean: tuple[float, ...] = ()  # mean per channel if rows are pixels that the model normalises; else empty
    # Standard deviation per channel if rows are pixels that the model normalises; else empty.
    std: tuple[float, ...] = ()
    edge: int = 224  # edge length [pixels] of images that need no resizing; drawings are rendered at this size
    later: str = ""  # digest of the weights that the model applies to the rows if these are pixels; else empty
    width: int = 0  # length of a row if known before encoding; else 0
    # For a text encoder, whether it reads only the beginning of each text; None if it reads any length.
    cut: Callable[[Sequence[str]], Sequence[bool]] | None = None

    @property
    def stated(self) -> str:
        """:func:`stated_digest` of this encoder."""
        return stated_digest(self.digest, self.later)


MODALITIES: tuple[Modality, Modality] = ("image", "text")


@dataclass(frozen=True)
class InputSpec:
    """Shapes and dtypes of the model inputs of one item."""

    # ``(d,)`` for features, ``(3, S, S)`` for pixels, ``(F, 3, S, S)`` for the frames of a video.
    image_shape: tuple[int, ...]
    text_shape: tuple[int, ...]  # ``(d,)`` for features of one caption, ``(77,)`` for token ids
    image_dtype: str = "float32"  # ``float32`` for features, ``uint8`` for pixels
    text_dtype: str = "float32"  # ``float32`` for features, ``int32`` for token ids
    mean: tuple[float, ...] = ()  # mean per channel of pixels scaled to [0, 1]; empty for features
    std: tuple[float, ...] = ()  # standard deviation per channel of pixels scaled to [0, 1]; empty for features

    @classmethod
    def of(cls, recorded: object) -> InputSpec:
        """Those of a record with fields of the same names, in which lists or arrays stand for tuples."""
        found: dict[str, Any] = {field.name: getattr(recorded, field.name) for field in fields(cls)}
        lists = {name: tuple(np.asarray(each).tolist()) for name, each in found.items() if not isinstance(each, str)}
        return cls(**{**found, **lists})
