"""FedMEKT with averaged parameters, our reading: silos distil the global model's embeddings (Le et al. 2025).

This is the variant of RCSR's comparison: FedAvg, plus the divergence at temperature 3 between the
embeddings of the silo's model and those of the downloaded one, on the silo's own batches. Its details are our reading.
The original, which exchanges embeddings of a public set between autoencoders and averages no parameters, is not built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    Encoders,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    take,
)
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Model, Payload
from protocols import _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._options import check
from protocols.moon import has_trained


@dataclass(frozen=True)
class FedMektOptions(fedavg.FedAvgOptions):
    """Options of FedMEKT: FedAvg's and

    Args:
        weight: of the divergence; 0 is FedAvg.
        temperature: T of the divergence.
        personal: silos are measured by their own models as their last training left them, not by the global one.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.FedAvgOptions.OF,
        "weight": ("temperature",),
    }

    weight: float = 0.5
    temperature: float = 3.0
    personal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check("weight", self.weight, 0.0)
        check("temperature", self.temperature, 0.0, open_low=True)


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) over the d entries, mean over the batch (FedMEKT).

    Args:
        student: [B, d] embeddings, whose gradient is wanted.
        teacher: [B, d] embeddings.
        temperature: T.
    """
    wanted, found = ((each / temperature).log_softmax(1) for each in (teacher, student))
    return temperature**2 * (wanted.exp() * (wanted - found)).sum(1).mean()


class FedMekt:
    """FedMEKT with averaged parameters, see the module's text."""

    Options: ClassVar[type[Any]] = FedMektOptions
    our_reading: ClassVar[bool] = True

    def __init__(self, options: FedMektOptions, context: Context) -> None:
        self.options = options
        self.fedavg = fedavg.FedAvg(options, context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return self.fedavg.eligible(silo)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """As FedAvg."""
        return self.fedavg.initial(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg."""
        return self.fedavg.task(state, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the divergence."""
        trained = self.fedavg.trained(local, task, extra=self._distillation(task, local))
        if not self.options.personal:
            return trained
        own = _personal_model.kept_or_before(local, newest=has_trained(self.fedavg, local, task, trained))
        return replace(trained, state={**trained.state, **own})

    def _distillation(self, task: Task, local: Local) -> _training.Extra | None:
        if self.options.weight == 0:
            return None
        theta = as_tensor(take(task.payloads, Model).buffer)
        shared = _personal_model.Reference(local, theta, self.fedavg.context.training.local_epochs)

        def distillation(step: _training.Step, image: Out | None, text: Out | None) -> Tensor:
            terms = [
                divergence(own.code, glob.code, self.options.temperature)
                for own, glob in zip((image, text), shared(step), strict=True)
                if own is not None and glob is not None
            ]
            return self.options.weight * torch.stack(terms).sum()

        return distillation

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """As FedAvg."""
        return self.fedavg.merge(state, replies, round_)

    @property
    def personalised(self) -> bool:
        """If its option says so."""
        return self.options.personal

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's model as its last training left it; the global one before the first."""
        return _personal_model.last_encoders(local, payloads)


PROTOCOL = FedMekt
