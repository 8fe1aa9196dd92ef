"""Central: one silo trains on the pooled training data of all silos; a reference, not an upper bound.

The first silo holds all silos' data in both modalities from the start; no message carries data. Only this silo is
eligible, so that training equals FedAvg with a single silo.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fedmq.federation.protocol import Context, SiloFacts, Traits
from protocols import fedavg
from protocols.parts.losses import TauOptions


class Central(fedavg.FedAvg):
    """Central training, see the module docstring."""

    Options: ClassVar[type[Any]] = TauOptions

    def __init__(self, options: TauOptions, context: Context) -> None:
        super().__init__(fedavg.FedAvgOptions(tau=options.tau), context)

    def eligible(self, silo: SiloFacts) -> bool:
        """The silo that holds the data of all."""
        return silo.index == 0

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The training data are pooled."""
        return Traits(pooled=True, weighs_single_silos=False)

    def no_sum(self) -> str:
        """A sum of one silo's update shows it."""
        return "one silo trains on all data"


PROTOCOL = Central
