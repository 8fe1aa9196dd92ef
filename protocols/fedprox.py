"""FedProx: FedAvg with a proximal term that keeps silos near the downloaded model (Li et al. 2020).

mu is 0.01, the papers' "as original"; RCSR's table uses 0.1, its code 0.01.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.federation.protocol import Local, Task, Trained
from protocols import fedavg
from protocols._options import check
from protocols._variant import variant


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


def train(method: fedavg.FedAvg, options: FedProxOptions, local: Local, task: Task) -> Trained:
    """Local epochs on the base loss and the proximal term."""
    # The shared proximal term is RCSR's, lambda_s ||.||^2 without a half.
    return method.trained(local, task, lambda_s=options.mu / 2)


PROTOCOL = variant(FedProxOptions, train=train)
