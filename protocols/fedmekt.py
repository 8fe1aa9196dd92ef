"""FedMEKT (our reading): FedAvg whose silos distil the global model's embeddings (Le et al., 2025).

A silo minimises its base loss plus alpha times the KL divergence at temperature T = 3 from the global model's
embeddings to its own, summed over its modalities: the silos' objective of the paper and of its code (Agent2H/FedMEKT,
``KL_Loss``). The paper's embeddings are hidden states of 2 to 32 entries of order 1. Ours have unit length, so that
each of d entries is of order 1/sqrt(d): softmax(z / 3) is then uniform within a few per cent, the divergence is 1/(2d)
of the squared distance, and the method is FedAvg. ``rescale`` therefore gives them entries of mean square 1.

Departures from the paper, after RCSR's comparison: silos average parameters, and the embeddings are those of their own
batches. In the original, autoencoders exchange embeddings of a public set and no parameters; the coordinator distils
the silos' mean embedding with a weight of its own. So the teacher here is the download, from which the silo starts: the
first step of a task is FedAvg's, and with one step a task so is the method. One layer is distilled (``One_Layer`` in
the code, which otherwise adds a second one with weight 0.04); alpha is 0.5 as in RCSR's comparison (0.1 in the code).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedmq.config.sections import NonNegative, Positive
from fedmq.federation.protocol import Encoders, Local, Task, Traits, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import Model, Payload
from protocols import fedavg
from protocols.parts import personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import unit


@dataclass(frozen=True)
class FedMektOptions(fedavg.AnchoredOptions):
    """Options of FedMEKT, in addition to those of FedAvg.

    Args:
        weight: weight of the divergence; 0 gives FedAvg.
        temperature: temperature T of the divergence.
        rescale: rescale embeddings to entries of mean square 1, as large as the paper's, before the divergence.
        personal: evaluate each silo's personal model as of its last training, not the global model.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {**fedavg.AnchoredOptions.OF, "weight": ("temperature", "rescale")}

    weight: NonNegative = 0.5
    temperature: Positive = 3.0
    rescale: bool = True
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


def rescaled(z: Tensor) -> Tensor:
    """Embeddings [B, d] with entries of mean square 1: of length sqrt(d)."""
    return unit(z) * math.sqrt(z.shape[1])


class FedMekt(fedavg.AnchoredFedAvg):
    """FedMEKT in our reading, see the module docstring."""

    Options: ClassVar[type[Any]] = FedMektOptions
    options: FedMektOptions

    @classmethod
    def traits_of(cls, options: FedMektOptions) -> Traits:
        """Our reading of the paper; personal models by option."""
        return Traits(personalised=options.personal, our_reading=True)

    @override
    def extra_loss(self, local: Local, task: Task) -> training.Extra | None:
        options = self.options
        if options.weight == 0:
            return None
        theta = as_tensor(take(task.payloads, Model).buffer)
        shared = personal_model.Reference(local, theta, self.context.training.local_epochs)
        scaled: Callable[[Tensor], Tensor] = rescaled if options.rescale else lambda z: z

        def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor:
            terms = [
                divergence(scaled(student.code), scaled(teacher.code), options.temperature)
                for student, teacher in zip((image, text), shared(step), strict=True)
                if student is not None and teacher is not None
            ]
            return options.weight * torch.stack(terms).sum()

        return extra

    @override
    def kept(self, local: Local, *, trained: bool) -> Mapping[str, Tensor]:
        return personal_model.kept_or_before(local, newest=trained) if self.options.personal else {}

    @override
    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        return personal_model.last_encoders(local, payloads)


PROTOCOL = FedMekt
