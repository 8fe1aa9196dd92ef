"""What methods share whose silos keep whole models, or parts of models, of their own."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.protocol import Encoders, Local
from protocols import _local

#: Name of a silo's own parameters [P], or its own part of them, among its personal tensors.
OWN = "own_model"


def own_parameters(local: Local) -> Tensor:
    """The silo's own whole model float32 [P]: that of its last task, before the first the initial one."""
    own = local.state.get(OWN)
    return local.model.initial() if own is None else own


def kept(local: Local) -> dict[str, Tensor]:
    """The silo's whole model as it is now, for its personal state."""
    return {OWN: local.model.flat.detach().cpu().clone()}


def encoders_of(local: Local, theta: Tensor | npt.NDArray[Any]) -> Encoders:
    """The silo's model with parameters [P] as what it is measured by."""
    model = local.model
    model.load(theta)
    device = model.flat.device
    return Encoders(lambda x: model.image(x.to(device)), lambda x: model.caption(x.to(device)))


def reference(local: Local, theta: Tensor, step: _local.Step) -> _local.Outs:
    """What other parameters [P] make of a step's batch, without gradient and without dropout."""
    with _local.parameters(local, theta), torch.no_grad():
        return _local.outputs(local, step.rows, step.caption, step.runs)
