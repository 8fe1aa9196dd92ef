"""Central: one silo trains on the pooled training data of all silos; a reference, not an upper bound.

The first silo holds all silos' data in both modalities from the start; no message carries data. Only this silo is
eligible, so that training equals FedAvg with a single silo.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedmq.federation.protocol import Traits
from protocols import fedavg
from protocols.parts.losses import TauOptions
from protocols.parts.variant import variant


@dataclass(frozen=True)
class CentralOptions(TauOptions):
    """Options of central training."""


PROTOCOL = variant(
    CentralOptions,
    eligible=lambda silo: silo.index == 0,
    traits=lambda _: Traits(pooled=True),
    fedavg_options=lambda options: fedavg.AnchoredOptions(tau=options.tau, single_modality="idle"),
)
