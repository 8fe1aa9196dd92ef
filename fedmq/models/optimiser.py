"""Optimisers over tensors, and over branches of a model's flat buffer: torch's fused steps without its classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedmq.config.scenario import Training
from fedmq.models.two_tower import TwoTower


class FusedOptimiser:
    """Torch's fused steps over a few tensors.

    It calls the functions that ``torch.optim``'s classes end in, with their defaults, so the numbers are theirs. The
    classes themselves import ``torch._dynamo`` on first use: two seconds and seventy megabytes for nothing.

    Args:
        parameters: float32, changed in place by the gradients in their ``.grad``; without one, by a gradient of zero.
        training: kind of optimiser and weight decay.
        learning_rate: of all steps.
    """

    def __init__(self, parameters: Sequence[Tensor], training: Training, learning_rate: float) -> None:
        self._parameters = list(parameters)
        self._training, self._rate = training, learning_rate
        self._first = [torch.zeros_like(part) for part in self._parameters]
        self._second = [torch.zeros_like(part) for part in self._parameters]
        self._steps = [torch.zeros((), device=part.device) for part in self._parameters]
        self._momentum: list[Tensor | None] = [None] * len(self._parameters)

    @torch.no_grad()
    def step(self) -> None:
        """One step in place."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]
        if self._training.optimizer == "sgd":
            sgd(
                self._parameters,
                gradients,
                self._momentum,
                fused=True,
                weight_decay=self._training.weight_decay,
                momentum=self._training.momentum,
                lr=self._rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        adam(
            self._parameters,
            gradients,
            self._first,
            self._second,
            [],
            self._steps,
            # Fused: one pass over each tensor; the loops over tensors cost more than the arithmetic at this size.
            fused=True,
            decoupled_weight_decay=self._training.optimizer == "adamw",
            amsgrad=False,
            beta1=self._training.betas[0],
            beta2=self._training.betas[1],
            lr=self._rate,
            weight_decay=self._training.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def optimiser(model: TwoTower, training: Training, learning_rate: float, branches: Sequence[slice]) -> FusedOptimiser:
    """An optimiser over whole branches of a model.

    Parameters outside ``branches`` are never touched, not even by weight decay. Weight decay reaches biases too, as in
    RCSR's code.

    Args:
        model: whose ``flat`` is trained, with its parameters' gradients.
        training: kind of optimiser and weight decay.
        learning_rate: of this round.
        branches: of :meth:`TwoTower.branch`; empty ones are passed over.

    Raises:
        ValueError: nothing to train.
    """
    parameters = model.within(branches)
    if not parameters:
        raise ValueError("an optimiser needs at least one branch with parameters")
    return FusedOptimiser(parameters, training, learning_rate)
