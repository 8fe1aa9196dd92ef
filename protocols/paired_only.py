"""FedAvg over the paired silos alone: what the silos that lack a modality must add something to.

An honest control: a method that claims to use single-modality silos has to beat never asking them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmq.federation.protocol import Context, Local, MergeResult, Reply, SiloFacts, State, Task, Trained
from fedmq.wire.messages import Payload
from protocols import fedavg
from protocols._options import check


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


class PairedOnly:
    """FedAvg that asks paired silos only; everything but the choice of silos is FedAvg's."""

    Options: ClassVar[type[Any]] = PairedOnlyOptions

    def __init__(self, options: PairedOnlyOptions, context: Context) -> None:
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau, single_modality="idle"), context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Paired silos only."""
        return silo.paired

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update and the loss."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """The model."""
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model."""
        return self.fedavg.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on InfoNCE."""
        return self.fedavg.train(local, task)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Add the sample-weighted updates."""
        return self.fedavg.merge(state, replies, round_)


PROTOCOL = PairedOnly
