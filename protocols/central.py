"""Central: one silo trains on the pooled training data of all silos; a reference, not an upper bound.

The first silo holds all silos' data in both modalities from the start; no message carries data. Only this silo is
eligible, so that training equals FedAvg with a single silo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmq.federation.protocol import Traits
from protocols import fedavg
from protocols.parts.options import check
from protocols.parts.variant import variant


@dataclass(frozen=True)
class CentralOptions:
    """Options of central training.

    Args:
        tau: temperature of InfoNCE.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "objective.base=info_nce": ("tau",),
    }

    tau: float = 0.07

    def __post_init__(self) -> None:
        check("tau", self.tau, 0.0, open_low=True)


PROTOCOL = variant(
    CentralOptions,
    eligible=lambda silo: silo.index == 0,
    traits=lambda _: Traits(pooled=True),
    fedavg_options=lambda options: fedavg.FedAvgOptions(tau=options.tau),
)
