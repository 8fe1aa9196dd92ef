"""Optimisers for lists of tensors and for branches of a model, using torch's fused step functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedmq.config.scenario import Training
from fedmq.models.two_tower import TwoTower


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Zeros of the shapes of some tensors; one allocation takes less time than one for each."""
    if not tensors:
        return []
    sizes = [each.numel() for each in tensors]
    parts = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device).split_with_sizes(sizes)
    return [part.view_as(each) for part, each in zip(parts, tensors, strict=True)]


class FusedOptimiser:
    """SGD, Adam or AdamW with torch's fused step functions.

    Calls the functions behind ``torch.optim``'s classes with their defaults, so results are identical. The classes
    themselves import ``torch._dynamo`` on first use, which takes two seconds and 70 MB.

    Args:
        parameters: float32 tensors, updated in place from their ``.grad``; None counts as a zero gradient.
        training: optimiser, momentum or betas, and weight decay.
        learning_rate: learning rate of all steps.
        corrections: a float32 tensor for each parameter, which is added to it after every step; empty adds nothing.

    Attributes:
        taken: number of steps so far.
    """

    def __init__(
        self, parameters: Sequence[Tensor], training: Training, learning_rate: float, corrections: Sequence[Tensor] = ()
    ) -> None:
        self._parameters, self._corrections, self.taken = list(parameters), corrections, 0
        self._training, self._rate = training, learning_rate
        moments = [] if training.optimizer == "sgd" else self._parameters
        self._first, self._second = _zeros_like(moments), _zeros_like(moments)
        self._steps = [torch.zeros((), device=part.device) for part in self._parameters]
        self._momentum: list[Tensor | None] = [None] * len(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """Copies of its moments and step counts on the CPU, by name."""
        taken = {"taken": torch.tensor(self.taken)}
        lists: dict[str, Sequence[Tensor | None]] = {
            "first": self._first, "second": self._second, "steps": self._steps, "momentum": self._momentum
        }  # fmt: skip
        return taken | {
            f"{name}.{number}": tensor.cpu().clone()
            for name, tensors in lists.items()
            for number, tensor in enumerate(tensors)
            if tensor is not None
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what :meth:`state` returned for the same parameters."""
        self.taken = int(state["taken"])
        for name, tensors in {"first": self._first, "second": self._second, "steps": self._steps}.items():
            for number, tensor in enumerate(tensors):
                tensor.copy_(state[f"{name}.{number}"])
        for number, part in enumerate(self._parameters):
            momentum = state.get(f"momentum.{number}")
            self._momentum[number] = None if momentum is None else torch.empty_like(part).copy_(momentum)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters in place."""
        self._descend()
        self.taken += 1
        for parameter, correction in zip(self._parameters, self._corrections, strict=False):
            parameter.add_(correction)

    def _descend(self) -> None:
        gradients = [torch.zeros_like(part) if part.grad is None else part.grad for part in self._parameters]
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
            # The unfused loops over tensors cost more than the arithmetic at this size.
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


def optimiser(
    model: TwoTower,
    training: Training,
    learning_rate: float,
    branches: Sequence[slice],
    correction: Tensor | None = None,
) -> FusedOptimiser:
    """Create an optimiser for some branches of a model, ranges from :meth:`TwoTower.branch`.

    Parameters outside ``branches`` do not change, not even by weight decay. Weight decay also applies to biases, as in
    RCSR's code. The correction, float32 [P], is added to the parameters after every step.

    Raises:
        ValueError: the branches contain no parameters.
    """
    parameters = model.within(branches)
    if not parameters:
        raise ValueError("an optimiser needs at least one branch with parameters")
    corrections = [] if correction is None else model.within(branches, correction)
    return FusedOptimiser(parameters, training, learning_rate, corrections)
