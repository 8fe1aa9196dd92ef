"""A model's gradients as one flat vector."""

from __future__ import annotations

import torch

from fedmq.models.two_tower import TwoTower


def gradient_of(model: TwoTower) -> torch.Tensor:
    """The gradient [P] of the flat buffer on the CPU, zero where a parameter has none."""
    parameters = [parameter for _, parameter in sorted(model.named_parameters()) if parameter.requires_grad]
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    return torch.cat([each.flatten() for each in found]).cpu()
