"""Central: one silo trains on all training data in both modalities; a reference point, no federated method.

Those data are in one place before the run begins; no message carries them.
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


class Central:
    """Central training: FedAvg of one silo.

    Attributes:
        pooled: the first silo is given everybody's training data, in both modalities.
    """

    Options: ClassVar[type[Any]] = CentralOptions
    pooled: ClassVar[bool] = True

    def __init__(self, options: CentralOptions, context: Context) -> None:
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau, single_modality="idle"), context)

    def eligible(self, silo: SiloFacts) -> bool:
        """The first silo alone, which holds everything."""
        return silo.index == 0

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
        """Local epochs over all the data."""
        return self.fedavg.train(local, task)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Take the update as it is."""
        return self.fedavg.merge(state, replies, round_)


PROTOCOL = Central
