"""FedProx: FedAvg with a proximal term that keeps silos near the downloaded model (Li et al. 2020).

mu is 0.01, the papers' "as original"; RCSR's table uses 0.1, its code 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmq.federation.protocol import Context, Local, MergeResult, Reply, SiloFacts, State, Task, Trained
from fedmq.wire.messages import Payload
from protocols import fedavg
from protocols._options import check


@dataclass(frozen=True)
class FedProxOptions(fedavg.FedAvgOptions):
    """Options of FedProx: FedAvg's and

    Args:
        mu: weight of the proximal term (mu / 2) ||theta_k - theta_t||^2 over the shared parameters; 0 is FedAvg.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check("mu", self.mu, 0.0)


class FedProx:
    """FedProx, see the module's text."""

    Options: ClassVar[type[Any]] = FedProxOptions

    def __init__(self, options: FedProxOptions, context: Context) -> None:
        self.options = options
        self.fedavg = fedavg.FedAvg(options, context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return self.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg."""
        return self.fedavg.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the proximal term."""
        # The shared proximal term is RCSR's, lambda_s ||.||^2 without a half.
        return self.fedavg.trained(local, task, lambda_s=self.options.mu / 2)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """As FedAvg."""
        return self.fedavg.merge(state, replies, round_)


PROTOCOL = FedProx
