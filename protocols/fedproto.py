"""FedProto: silos exchange class prototypes instead of parameters and train personal models (Tan et al., 2022).

For each modality it has, a silo adds lambda times the squared distance of its embeddings to the global prototypes of
their classes to its base loss. It reports the mean embedding of each class by its trained model (the released code
takes running means over the last epoch). A global prototype is the unweighted mean, as in the code, of the last reports
of all silos that have the class. If the data set has two label levels, the classes are those of the lower level, which
also defines relevance in retrieval. The method needs labels. Personal models are evaluated; the coordinator's model
keeps its initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import NonNegative
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, MergeResult, SiloFacts, State, Task, Trained, Update, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Loss, Payload
from protocols.local import Alone
from protocols.parts import class_prototypes, personal_model, training
from protocols.parts.class_prototypes import Shared
from protocols.parts.losses import TauOptions, nothing


@dataclass(frozen=True)
class FedProtoOptions(TauOptions):
    """Options of FedProto.

    Args:
        weight: lambda, weight of the distance to the global prototypes; 0 gives purely local training.
        weighting: weights of the silos in a global prototype: ``uniform``, as in the released code, or by ``samples``
            of the class, as in the paper.
        proto_modal: target of a sample: the prototype of its own modality (``separate``) or the mean over both
            modalities (``fused``).
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {**TauOptions.OF, "weight": ("proto_modal", "weighting")}

    weight: NonNegative = 1.0
    weighting: Literal["uniform", "samples"] = "uniform"
    proto_modal: Literal["separate", "fused"] = "separate"


def prototype_loss(z: Tensor, members: Tensor, prototypes: Tensor, valid: Tensor) -> Tensor:
    """Mean over all B d entries of (target - z)^2; a sample without a target contributes 0 (FedProto's local loss).

    Args:
        z: [B, d].
        members: 0/1 [B, C]; the target of a sample with several labels is the mean of its classes' prototypes.
        prototypes: [C, d].
        valid: bool [C], True for classes with a prototype.
    """
    known = members.to(z.dtype) * valid
    count = known.sum(1, keepdim=True)
    target = torch.where(count > 0, known @ prototypes / count.clamp(min=1), z.detach())
    return (target - z).square().mean()


def fused(shared: Shared) -> Shared:
    """Prototypes of both modalities replaced by their mean, or by the only one that exists."""
    valid = torch.stack([shared.image_valid, shared.text_valid])
    rows = torch.stack([shared.image, shared.text]) * valid[..., None]
    mean, either = rows.sum(0) / valid.sum(0).clamp(min=1)[:, None], valid.any(0)
    return Shared(mean, mean, either, either)


class FedProto(Alone):
    """FedProto, see the module docstring."""

    Options: ClassVar[type[Any]] = FedProtoOptions
    options: FedProtoOptions

    def __init__(self, options: FedProtoOptions, context: Context) -> None:
        if not context.label_names:
            raise InputError("protocol.name", "fedproto", "a method that needs no labels: the data set has none")
        super().__init__(options, context)
        self.columns = fine_columns(context.label_names)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """Class prototypes and the loss; no parameters."""
        return frozenset({ClassPrototypes, Loss})

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs from the personal model on the base loss and the distance, then the class prototypes."""
        shared = class_prototypes.read_download(take(task.payloads, ClassPrototypes), local.model.flat.device)
        shared = fused(shared) if self.options.proto_modal == "fused" else shared
        alone = None
        if self.options.weight and bool((shared.image_valid | shared.text_valid).any()):
            alone = training.EveryBatch(local, self.context.training.batch_size, nothing)
        trained = self.trained(local, task, extra=self._distance(local, shared), otherwise=alone)
        return replace(trained, payloads=(self._prototypes(local, task), *trained.payloads))

    def _distance(self, local: Local, shared: Shared) -> training.Extra | None:
        if self.options.weight == 0:
            return None
        by_modality = (shared.image, shared.image_valid), (shared.text, shared.text_valid)

        def distance(step: training.Step, image: Out | None, text: Out | None) -> Tensor:
            members = training.labels_of(local, step.rows)[:, self.columns] > 0
            terms = [
                prototype_loss(out.code, members, prototypes, valid)
                for out, (prototypes, valid) in zip(
                    personal_model.unsharpened(local, image, text), by_modality, strict=True
                )
                if out is not None
            ]
            return self.options.weight * torch.stack(terms).sum()

        return distance

    def _prototypes(self, local: Local, task: Task) -> ClassPrototypes:
        """The class prototypes by the trained model; a modality that the silo lacks has count 0."""
        caption = training.choose_captions(local, training.generator_of(self.context, local, task, "class prototypes"))
        members = training.labels_of(local, np.arange(len(local.dataset)))[:, self.columns].cpu() > 0
        embeddings = training.embed_all(local, caption, self.context.training.batch_size)
        return class_prototypes.of_features(embeddings, members, self.context.dim)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model, which never changes, and empty tables of prototypes."""
        return State(theta, class_prototypes.initial(len(self.context.silos), 2 * len(self.columns), self.context.dim))

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global prototypes."""
        return (class_prototypes.download(state.tensors),)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Average the last reports of all silos for each class."""
        reports = [(reply, class_prototypes.rows_of_owned_modalities(reply)) for reply in replies]
        weighted = self.options.weighting == "samples"
        tensors = class_prototypes.updated(
            state.tensors, reports, round_, max_age=self.context.max_age, weighted=weighted
        )
        return MergeResult(
            replace(state, tensors=tensors), {"classes_known": float(tensors[class_prototypes.VALID].sum())}
        )

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the prototypes' shape, and that no row is longer than a mean of embeddings can be.

        Raises:
            RemoteWireError: wrong number of rows or columns, or a row that is too long.
        """
        longest = class_prototypes.longest_code(self.context)
        class_prototypes.check_rows(take(payloads, ClassPrototypes), 2 * len(self.columns), self.context.dim, longest)


PROTOCOL = FedProto
