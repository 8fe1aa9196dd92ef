"""The matched control: FedAvg whose single-modality silos are sampled as always and train nothing.

The control of claims about single-modality silos: rounds sample the same silos as in every other row, and paired silos
get the same tasks. It is ``fedavg`` with ``aggregation.single_weight: 0``, without the training of the void updates.
``paired_only`` differs: it samples among the paired silos alone.
"""

from __future__ import annotations

from fedmq.federation.protocol import Local, Task, Traits
from protocols import fedavg
from protocols.parts import training


class MatchedControl(fedavg.FedAvg):
    """FedAvg of paired silos' updates among all silos, see the module docstring."""

    @classmethod
    def traits_of(cls, options: fedavg.FedAvgOptions) -> Traits:
        """Single-modality silos have no update to weight."""
        return Traits(single_weight=False)

    def work(self, local: Local, task: Task) -> training.Work | None:
        """FedAvg's for a paired silo; None for another."""
        return super().work(local, task) if local.silo.paired else None


PROTOCOL = MatchedControl
