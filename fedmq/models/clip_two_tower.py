"""Two towers over an open_clip model with an adapter in every block (RCSR, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedmq.config.parts import Modality
from fedmq.config.scenario import Backbone
from fedmq.encoders.base import MODALITIES, InputSpec
from fedmq.encoders.clip import _tower_of, blocks_of, load_tower
from fedmq.encoders.clip_weights import config_of, context_length, image_size, skeleton, weights
from fedmq.errors import InputError
from fedmq.models.two_tower import Branch, TwoTower, joint_dim, shared_adapters
from fedmq.storage.cache import cache_folder


def _follow(block: nn.Module, adapter: nn.Module) -> None:
    """Let an adapter run after a block, whoever calls the block."""

    def after(_module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        adapted: Tensor = adapter(output)
        return adapted

    block.register_forward_hook(after)


def adapted(backbone: Backbone, device: str | torch.device = "cpu") -> TwoTower:
    """The two towers with one adapter per block, without frozen weights, parameters not yet drawn.

    Raises:
        InputError: unknown model, or one without such blocks.
    """
    config = config_of(backbone.name)
    bare = skeleton(backbone.name, config)
    width = int(config["embed_dim"])
    dim = joint_dim(backbone, width, width)
    sites = []
    for modality in MODALITIES:
        blocks, block_width = blocks_of(_tower_of(bare, modality), backbone.name)
        sites.append([block_width] * len(blocks))
    # Where one tower has more blocks, the layers of its last ones are shared with nobody.
    shared, residual = shared_adapters(backbone, max(map(len, sites))), backbone.head == "residual"
    branches = [
        Branch(widths, backbone.bottleneck, width, dim, residual=residual, blocks=True, shared=shared)
        for widths in sites
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
    """The two towers with adapters in their blocks, parameters not yet drawn; see ``two_tower.build``.

    Raises:
        InputError: the model has no such blocks, or the data are not pixels and token ids of its size.
    """
    config = config_of(backbone.name)
    edge = image_size(backbone.name, config)
    for what, shape, expected in (
        # Before a picture's own three there may be one for the frames of a video.
        ("image", inputs.image_shape[-3:], (3, edge, edge)),
        ("text", inputs.text_shape, (context_length(config),)),
    ):
        if tuple(shape) != expected:
            raise InputError(f"data: {what}", f"items of shape {list(shape)}", f"{list(expected)} for {backbone.name}")
    model = adapted(backbone, device)
    # The coordinator trains nothing: it needs the parameters alone, and no weights are made or read for it.
    for modality in modalities:
        found = weights(backbone, seed, cache_folder() if cache is None else cache)
        branch = model.visual if modality == "image" else model.text
        assert isinstance(branch, Branch)  # noqa: S101 - `adapted` made it
        branch.frozen = load_tower(found, modality, device, half=backbone.precision == "bfloat16")
        blocks, _ = blocks_of(branch.frozen.tower, found.name)
        for block, adapter in zip(blocks, branch.adapters.values(), strict=True):
            _follow(block, adapter)
    return model
