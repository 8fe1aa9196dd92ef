"""FedAvg over paired silos: silos that lack a modality never take part.

A control: a method that claims to benefit from single-modality silos has to beat this one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fedmq.federation.protocol import Context, SiloFacts, Traits
from protocols import fedavg
from protocols.parts.losses import TauOptions


class PairedOnly(fedavg.FedAvg):
    """FedAvg over paired silos, see the module docstring."""

    Options: ClassVar[type[Any]] = TauOptions

    def __init__(self, options: TauOptions, context: Context) -> None:
        super().__init__(fedavg.FedAvgOptions(tau=options.tau), context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Paired silos."""
        return silo.paired

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """No single-modality silo replies."""
        return Traits(weighs_single_silos=False)


PROTOCOL = PairedOnly
