"""FedAdam and FedYogi: the coordinator takes an adaptive step along the mean update (Reddi et al., 2021).

Algorithm 2 of arXiv 2003.00295, with FedAvg's mean update Δ of a merge, all operations per parameter:

m ← β1 m + (1 - β1) Δ

v ← β2 v + (1 - β2) Δ² for ``adam``; v ← v - (1 - β2) Δ² sign(v - Δ²) for ``yogi``

θ ← θ + η m / (√v + τ)

m starts at 0 and v at τ², the least value that the paper allows, without bias correction, as printed. β1, β2
and τ are those of the paper's experiments. The paper tunes η for each task; ``server_rate`` has to be tuned, too.

Departures: updates are weighted by samples, where algorithm 2 has the plain mean (``weighting: uniform``). A branch
that no silo of a merge trained keeps its parameters and its moments; the paper has no such branches. In merges of one
reply (``async``) the mixing rate scales the step, while the moments take the update in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedmq.config.scenario import Decay
from fedmq.config.sections import NonNegative, Positive
from fedmq.federation.protocol import MergeResult, State, Update
from protocols import fedavg

_FIRST, _SECOND = "first_moment", "second_moment"


@dataclass(frozen=True)
class FedOptOptions(fedavg.AnchoredOptions):
    """Options of FedAdam and FedYogi, in addition to those of FedAvg.

    Args:
        optimizer: rule of the second moment: ``adam`` gives FedAdam, ``yogi`` FedYogi.
        server_rate: η, the coordinator's learning rate.
        beta1: β1, decay rate of the first moment.
        beta2: β2, decay rate of the second moment.
        adaptivity: τ; the smaller it is, the more steps of all parameters have the same length.
    """

    optimizer: Literal["adam", "yogi"] = "adam"
    server_rate: NonNegative = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    adaptivity: Positive = 1e-3


def second_moment(before: Tensor, squared: Tensor, options: FedOptOptions) -> Tensor:
    """The second moment [P] after a merge, from that before it and Δ²."""
    if options.optimizer == "adam":
        return torch.lerp(squared, before, options.beta2)
    return before - (1 - options.beta2) * squared * torch.sign(before - squared)


class FedOpt(fedavg.AnchoredFedAvg):
    """FedAdam and FedYogi, see the module docstring."""

    Options: ClassVar[type[Any]] = FedOptOptions
    options: FedOptOptions

    def initial(self, theta: Tensor) -> State:
        """FedAvg's, and the moments float32 [P]."""
        first, start = super().initial(theta), self.options.adaptivity**2
        moments = {_FIRST: torch.zeros_like(theta), _SECOND: torch.full_like(theta, start)}
        return replace(first, tensors={**first.tensors, **moments})

    def merged(self, theta: Tensor, replies: Sequence[Update], weights: Tensor, *, state: State) -> MergeResult:
        """The adaptive step along FedAvg's mean update, ``theta`` minus the state's parameters."""
        plain = super().merged(theta, replies, weights, state=state)
        options, mean, after = self.options, theta - state.theta, state.theta.clone()
        first, second = (state.tensors[name].clone() for name in (_FIRST, _SECOND))
        for part in self.branches.values():
            update = mean[part]
            if not update.any():
                continue  # no silo trained it
            first[part] = torch.lerp(update, first[part], options.beta1)
            second[part] = second_moment(second[part], update.square(), options)
            after[part] += options.server_rate * first[part] / (second[part].sqrt() + options.adaptivity)
        tensors = {**plain.state.tensors, _FIRST: first, _SECOND: second}
        return replace(plain, state=replace(plain.state, theta=after, tensors=tensors))


PROTOCOL = FedOpt
