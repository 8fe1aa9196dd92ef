"""FedMEKT (our reading): FedAvg whose silos distil the global model's embeddings (Le et al., 2025).

This is the variant of RCSR's comparison: FedAvg, plus the KL divergence at temperature 3 between the embeddings of the
downloaded model and those of the model in training, on the silo's own batches. Its details are our reading. The
original method, in which autoencoders exchange embeddings of a public set and no parameters, is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive
from fedmq.federation.protocol import Context, Local, Task, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model
from protocols import fedavg
from protocols.parts import personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.variant import variant


@dataclass(frozen=True)
class FedMektOptions(fedavg.AnchoredOptions):
    """Options of FedMEKT, in addition to those of FedAvg.

    Args:
        weight: weight of the divergence; 0 gives FedAvg.
        temperature: temperature T of the divergence.
        personal: evaluate each silo's personal model as of its last training, not the global model.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.AnchoredOptions.OF,
        "weight": ("temperature",),
    }

    weight: NonNegative = 0.5
    temperature: Positive = 3.0
    personal: bool = False


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)) over the d entries, mean over the batch (FedMEKT).

    Args:
        student: [B, d] embeddings of the model in training.
        teacher: [B, d] embeddings of the downloaded model.
        temperature: T.
    """
    target, predicted = ((codes / temperature).log_softmax(1) for codes in (teacher, student))
    return temperature**2 * (target.exp() * (target - predicted)).sum(1).mean()


def distillation(options: FedMektOptions, context: Context, local: Local, task: Task) -> training.Extra | None:
    """The divergence of a batch from the downloaded model's embeddings; None if its weight is 0."""
    if options.weight == 0:
        return None
    theta = as_tensor(take(task.payloads, Model).buffer)
    shared = personal_model.Reference(local, theta, context.training.local_epochs)

    def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor:
        terms = [
            divergence(student.code, teacher.code, options.temperature)
            for student, teacher in zip((image, text), shared(step), strict=True)
            if student is not None and teacher is not None
        ]
        return options.weight * torch.stack(terms).sum()

    return extra


def kept(options: FedMektOptions, local: Local, trained: bool) -> dict[str, Tensor]:
    """The silo's model after its last training, if personal models are evaluated."""
    return personal_model.kept_or_before(local, newest=trained) if options.personal else {}


PROTOCOL = variant(
    FedMektOptions,
    extra_loss=distillation,
    kept=kept,
    traits=lambda options: Traits(personalised=options.personal, our_reading=True),
    encoders=personal_model.last_encoders,
)
