"""FedAvg over paired silos: silos that lack a modality never take part.

A control: a method that claims to benefit from single-modality silos has to beat this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from protocols import fedavg
from protocols.parts.options import check
from protocols.parts.variant import variant


@dataclass(frozen=True)
class PairedOnlyOptions:
    """Options of FedAvg over paired silos.

    Args:
        tau: temperature of InfoNCE.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {"objective.base=info_nce": ("tau",)}

    tau: float = 0.07

    def __post_init__(self) -> None:
        check("tau", self.tau, 0.0, open_low=True)


PROTOCOL = variant(
    PairedOnlyOptions,
    eligible=lambda silo: silo.paired,
    fedavg_options=lambda options: fedavg.FedAvgOptions(tau=options.tau),
)
