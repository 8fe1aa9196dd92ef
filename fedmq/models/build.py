"""Build the model of a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from fedmq.config.scenario import Backbone, Objective
from fedmq.config.sections import Modality
from fedmq.data.labels import fine_columns
from fedmq.encoders.base import MODALITIES, InputSpec
from fedmq.errors import InputError
from fedmq.models import hash_networks
from fedmq.models.objective_registry import network_of
from fedmq.models.two_tower import TwoTower, feature_towers, initial_parameters, joint_dim


def build(
    backbone: Backbone,
    inputs: InputSpec,
    seed: int,
    *,
    objective: Objective | None = None,
    label_names: Sequence[str] = (),
    device: str | torch.device = "cpu",
    modalities: Sequence[Modality] = MODALITIES,
    cache: Path | None = None,
    initial: bool = True,
) -> TwoTower:
    """Build the two towers of an objective with their initial parameters, the same in every process.

    The objective may replace the towers, adapters and heads, by a hash network, and ``label_names`` determine the size
    of classifiers. Only the frozen towers of ``modalities`` are loaded, with weights of the cache; the model always has
    the trainable parameters of both, which are 0 until others are loaded if not ``initial``.

    Raises:
        InputError: backbone, objective and data do not fit together.
    """
    place = torch.device(device)
    if objective is not None and network_of(objective) is not None:
        trained = backbone if backbone.end_to_end else None
        classes = len(fine_columns(label_names))
        model = hash_networks.build(objective, inputs, classes, seed, place, trained=trained)
    elif backbone.adapter_site == "blocks":
        from fedmq.models import clip_two_tower  # noqa: PLC0415 - open_clip is slow to import and not needed for features

        model = clip_two_tower.build(backbone, inputs, seed, place, modalities, cache=cache)
        model.initial = partial(initial_parameters, model.layout, backbone, seed)
    else:
        for what, shape in (("image", inputs.image_shape), ("text", inputs.text_shape)):
            if len(shape) != 1:
                raise InputError(
                    f"data: {what}", f"items of shape {list(shape)}", "features [d] with adapter_site feature"
                )
        dim = joint_dim(backbone, inputs.image_shape[0], inputs.text_shape[0])
        model = feature_towers(backbone, inputs, dim, place)
        model.initial = partial(initial_parameters, model.layout, backbone, seed)
    if initial:
        model.load(model.initial())
    return model
