"""pFedMMA: multi-modal adapters whose middle layers are averaged while all else stays personal (Ghiasvand et al. 2025).

``backbone.adapter: mma`` gives both towers such adapters, x + s up(relu(shared(relu(down x)))), their middle layers
shared by the towers; RCSR's comparison has s = 0.5 (``backbone.adapter_scale``), the original 0.001. Every silo keeps
its own projections up and down and its own heads. The loss is the scenario's, not the original's classification, and
adapters are drawn small as all others are, so that the frozen encoder is where a silo starts; both are our choice.
As in the original, the first synchronous round asks every silo, whatever the participation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Encoders, Local, MergeResult, Reply, SiloFacts, State, Task, Trained
from fedmq.wire.messages import Payload
from protocols import fedavg
from protocols._partial import PartialFedAvg

#: Name prefix of the middle layers.
SHARED = "shared.adapters."


class PFedMma:
    """pFedMMA, see the module's text; its options are FedAvg's.

    Attributes:
        opening: the first round asks everybody.
    """

    Options: ClassVar[type[Any]] = fedavg.FedAvgOptions
    opening: ClassVar[bool] = True

    def __init__(self, options: fedavg.FedAvgOptions, context: Context) -> None:
        shared = [entry.name for entry in context.layout.entries if entry.name.startswith(SHARED)]
        if not shared:
            raise InputError(
                "backbone.adapter", "a model without shared adapters", "mma, which protocol pfedmma averages"
            )
        self.partial = PartialFedAvg(options, context, shared)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of the middle layers; otherwise as FedAvg."""
        return self.partial.uploads()

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.partial.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The middle layers; otherwise as FedAvg."""
        return self.partial.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs over all layers."""
        return self.partial.train(local, task)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """FedAvg of the middle layers."""
        return self.partial.merge(state, replies)

    @property
    def layers(self) -> tuple[str, ...]:
        """The middle layers."""
        return self.partial.shared

    @staticmethod
    def own_only(options: fedavg.FedAvgOptions) -> bool:
        """Always: of the coordinator's model the middle layers alone are trained."""
        return True

    @property
    def personalised(self) -> bool:
        """Always: the middle layers alone are no model."""
        return True

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The middle layers of now between the silo's own."""
        return self.partial.encoders(local, payloads)


PROTOCOL = PFedMma
