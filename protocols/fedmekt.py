"""FedMEKT with averaged parameters, our reading: silos distil the global model's embeddings (Le et al. 2025).

This is the variant of RCSR's comparison: FedAvg, plus the divergence at temperature 3 between the
embeddings of the silo's model and those of the downloaded one, on the silo's own batches. Its details are our reading.
The original, which exchanges embeddings of a public set between autoencoders and averages no parameters, is not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmq.federation.protocol import Context, Local, Task, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.messages import Model
from protocols import _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._options import check
from protocols._variant import variant


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


def distillation(options: FedMektOptions, context: Context, local: Local, task: Task) -> _training.Extra | None:
    """The divergence of a batch, from the downloaded model's embeddings; None without weight."""
    if options.weight == 0:
        return None
    theta = as_tensor(take(task.payloads, Model).buffer)
    shared = _personal_model.Reference(local, theta, context.training.local_epochs)

    def extra(step: _training.Step, image: Out | None, text: Out | None) -> Tensor:
        terms = [
            divergence(own.code, glob.code, options.temperature)
            for own, glob in zip((image, text), shared(step), strict=True)
            if own is not None and glob is not None
        ]
        return options.weight * torch.stack(terms).sum()

    return extra


def kept(options: FedMektOptions, local: Local, trained: bool) -> dict[str, Tensor]:
    """The silo's model as its last training left it, where silos are measured by it."""
    return _personal_model.kept_or_before(local, newest=trained) if options.personal else {}


PROTOCOL = variant(
    FedMektOptions,
    extra_loss=distillation,
    kept=kept,
    traits=lambda options: Traits(personalised=options.personal, our_reading=True),
    encoders=_personal_model.last_encoders,
)
