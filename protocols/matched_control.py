"""The matched control: FedAvg that samples single-modality silos as always, but has them train nothing.

A method that claims to learn from single-modality silos has to beat it: each round samples the same silos as for
every other method, and paired silos get the same tasks. ``paired_only`` samples from the paired silos alone.
"""

from __future__ import annotations

from fedmq.federation.protocol import Local, Task, Traits
from protocols import fedavg
from protocols.parts import training


class MatchedControl(fedavg.FedAvg):
    """FedAvg over all silos, in which only paired silos train."""

    @classmethod
    def traits_of(cls, options: fedavg.FedAvgOptions) -> Traits:
        """Single-modality silos have no update to weight."""
        return Traits(weighs_single_silos=False)

    def work(self, local: Local, task: Task) -> training.Work | None:
        """FedAvg's for a paired silo; None for another."""
        return super().work(local, task) if local.silo.paired else None

    def no_items(self) -> str:
        """As FedAvg's."""
        return super().no_items()


PROTOCOL = MatchedControl
