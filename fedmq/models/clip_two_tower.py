"""Two-tower models over open_clip with an adapter in every block: after it (RCSR, section 4.2), or LoRA's inside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from fedmq.config.scenario import Backbone
from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES, InputSpec
from fedmq.encoders.clip import blocks_of, load_tower, tower_of
from fedmq.encoders.clip_weights import config_of, context_length, image_size, skeleton, weights
from fedmq.errors import InputError
from fedmq.models.two_tower import Branch, LowRankAttention, TwoTower, adapters_of, joint_dim, shared_adapters
from fedmq.storage.cache import cache_folder


def _attach(block: nn.Module, adapter: nn.Module, name: str) -> None:
    """Apply an adapter to the output of a block, by a forward hook, or low-rank changes to its attention's weights."""
    if isinstance(adapter, LowRankAttention):
        # `unsafe` skips a trial computation; the shapes are those that `_attention_weight` has checked.
        register_parametrization(*_attention_weight(block, name), adapter, unsafe=True)
        return

    def after(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        adapted: Tensor = adapter(output)
        return adapted

    block.register_forward_hook(after)


def _attention_weight(block: nn.Module, model: str) -> tuple[nn.Module, str]:
    """The module and name of a block's weight [3 d, d] of queries, keys and values; refuses a block without it."""
    attention = getattr(block, "attn", None)
    for module, name in ((attention, "in_proj_weight"), (getattr(attention, "qkv", None), "weight")):
        weight = getattr(module, name, None)
        if isinstance(module, nn.Module) and isinstance(weight, Tensor) and weight.shape[0] == 3 * weight.shape[1]:
            return module, name
    allowed = "bottleneck, or a model with one weight of queries, keys and values in each block"
    raise InputError("backbone.adapter", f"lora with {model}", allowed)


def adapted(backbone: Backbone, device: str | torch.device = "cpu") -> TwoTower:
    """The model with one adapter per block, without frozen weights; trainable parameters are not yet initialised.

    Raises:
        InputError: the model is unknown, or has no transformer blocks or none that low-rank adapters can be added to.
    """
    config = config_of(backbone.name)
    bare = skeleton(backbone.name, config)
    width = int(config["embed_dim"])
    dim = joint_dim(backbone, width, width)
    sites = []
    for modality in MODALITIES:
        blocks, block_width = blocks_of(tower_of(bare, modality), backbone.name)
        sites.append([block_width] * len(blocks))
        if backbone.adapter == "lora":
            for block in blocks:
                _attention_weight(block, backbone.name)
    # If one tower has more blocks, the middle layers of its last blocks are used by that tower only.
    shared, residual = shared_adapters(backbone, max(map(len, sites))), backbone.head == "residual"
    branches = [
        Branch([*adapters_of(backbone, widths, shared)], width, dim, residual=residual, blocks=True) for widths in sites
    ]
    return TwoTower(branches[0], branches[1], dim, torch.device(device), shared=shared)


def build(
    backbone: Backbone,
    inputs: InputSpec,
    seed: int,
    device: torch.device,
    modalities: Sequence[Modality],
    *,
    cache: Path | None = None,
) -> TwoTower:
    """The model with adapters in its blocks; trainable parameters are not yet initialised.

    The seed is that of random frozen weights; only the frozen towers of ``modalities`` are loaded.

    Raises:
        InputError: the model has no transformer blocks, or the data are not pixels and token ids of its size.
    """
    config = config_of(backbone.name)
    edge = image_size(backbone.name, config)
    for what, shape, expected in (
        # Videos have an additional leading dimension for frames.
        ("image", inputs.image_shape[-3:], (3, edge, edge)),
        ("text", inputs.text_shape, (context_length(config),)),
    ):
        if tuple(shape) != expected:
            raise InputError(f"data: {what}", f"items of shape {list(shape)}", f"{list(expected)} for {backbone.name}")
    model = adapted(backbone, device)
    # The coordinator passes no modalities: it needs only the trainable parameters, and no frozen weights are loaded.
    for modality in modalities:
        stored = weights(backbone, seed, cache_folder() if cache is None else cache)
        branch = model.visual if modality == "image" else model.text
        assert isinstance(branch, Branch)  # noqa: S101 - `adapted` returns branches
        branch.frozen = load_tower(stored, modality, device, half=backbone.precision == "bfloat16")
        blocks, _ = blocks_of(branch.frozen.tower, stored.name)
        for block, adapter in zip(blocks, branch.adapters.values(), strict=True):
            _attach(block, adapter, stored.name)
    return model
