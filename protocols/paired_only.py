"""FedAvg over paired silos: silos that lack a modality never take part.

A control: a method that claims to benefit from single-modality silos has to beat this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols import fedavg
from protocols.parts.losses import TauOptions
from protocols.parts.variant import variant


@dataclass(frozen=True)
class PairedOnlyOptions(TauOptions):
    """Options of FedAvg over paired silos."""


PROTOCOL = variant(
    PairedOnlyOptions,
    eligible=lambda silo: silo.paired,
    fedavg_options=lambda options: fedavg.AnchoredOptions(tau=options.tau, single_modality="idle"),
)
