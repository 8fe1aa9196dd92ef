"""FedProx: FedAvg with a proximal term that keeps silos near the downloaded model (Li et al., 2020).

The default mu is 0.01, as in RCSR's code and in papers that keep the original settings; RCSR's table lists 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedmq.config.sections import NonNegative
from fedmq.federation.protocol import Local, Task, Trained
from protocols import fedavg


@dataclass(frozen=True)
class FedProxOptions(fedavg.AnchoredOptions):
    """Options of FedProx, in addition to those of FedAvg.

    Args:
        mu: weight of the proximal term (mu / 2) ||theta_k - theta_t||^2 over the shared parameters; 0 gives FedAvg.
    """

    mu: NonNegative = 0.01


class FedProx(fedavg.AnchoredFedAvg):
    """FedProx, see the module docstring."""

    Options: ClassVar[type[Any]] = FedProxOptions
    options: FedProxOptions

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the proximal term."""
        # ``lambda_s`` weights RCSR's proximal term ||.||^2, which has no factor 1/2.
        return self.trained(local, task, lambda_s=self.options.mu / 2)

    def no_items(self) -> str:
        """As FedAvg's: the proximal term does not depend on items."""
        return super().no_items()


PROTOCOL = FedProx
