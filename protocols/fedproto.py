"""FedProto: silos exchange class prototypes and no parameters; each keeps a model of its own (Tan et al. 2022).

A silo adds lambda times the squared distance of its embeddings to their class's global prototypes to its base loss, in
each modality it has, and reports the mean embedding of each class by the model it ends with (the code takes running
means of the last epoch). Silos are averaged equally, as in the code, over all that have a class, by each one's last
report. Of two label levels the classes are those of the lower one, by which retrieval is judged. The method needs
labels, and its result is measured at the silos: the coordinator's model stays as it was drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.data.label_levels import fine_columns
from fedmq.errors import InputError
from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    Reply,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    take,
)
from fedmq.models.two_tower import Out
from fedmq.wire.messages import ClassPrototypes, Loss, Payload
from protocols import _aggregation, _class_prototypes, _personal_model, _training, fedavg
from protocols._class_prototypes import Shared
from protocols._options import check


@dataclass(frozen=True)
class FedProtoOptions:
    """Options of FedProto.

    Args:
        tau: temperature of InfoNCE.
        weight: lambda of the distance to the global prototypes; 0 leaves every silo alone.
        weighting: silos count ``uniform``, as in the code, or by ``samples`` of the class, as the paper prints it.
        proto_modal: a sample is pulled to its class's prototype of the same modality, ``separate``, or to the mean of
            both modalities', ``fused``.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "objective.base=info_nce": ("tau",),
        "weight": ("proto_modal", "weighting"),
    }

    tau: float = 0.07
    weight: float = 1.0
    weighting: Literal["uniform", "samples"] = "uniform"
    proto_modal: Literal["separate", "fused"] = "separate"

    def __post_init__(self) -> None:
        check("tau", self.tau, 0.0, open_low=True)
        check("weight", self.weight, 0.0)


def prototype_loss(z: Tensor, members: Tensor, prototypes: Tensor, valid: Tensor) -> Tensor:
    """Mean over all B d entries of (target - z)^2; a sample without a target contributes 0 (FedProto's local loss).

    Args:
        z: [B, d].
        members: 0/1 [B, C]; the target of a sample with several labels is the mean of its classes' prototypes.
        prototypes: [C, d].
        valid: bool [C], classes that have one.
    """
    known = members.to(z.dtype) * valid
    count = known.sum(1, keepdim=True)
    target = torch.where(count > 0, known @ prototypes / count.clamp(min=1), z.detach())
    return (target - z).square().mean()


def fused(shared: Shared) -> Shared:
    """Both modalities' prototypes replaced by their mean, where one is missing by the other."""
    valid = torch.stack([shared.image_valid, shared.text_valid])
    rows = torch.stack([shared.image, shared.text]) * valid[..., None]
    mean, either = rows.sum(0) / valid.sum(0).clamp(min=1)[:, None], valid.any(0)
    return Shared(mean, mean, either, either)


def nothing(image: Tensor | None, text: Tensor | None) -> Tensor:
    """The base loss of a silo that has none, as one with a single modality under InfoNCE."""
    return torch.zeros(())


class FedProto(FederatedProtocol):
    """FedProto, see the module's text."""

    Options: ClassVar[type[Any]] = FedProtoOptions

    def __init__(self, options: FedProtoOptions, context: Context) -> None:
        if not context.label_names:
            raise InputError("protocol.name", "fedproto", "a method without labels: the data set has none")
        self.options = options
        self.context = context
        self.columns = fine_columns(context.label_names)
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau, single_modality="idle"), context)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """Class prototypes and the loss; no parameters."""
        return frozenset({ClassPrototypes, Loss})

    # ----------------------------------------------------------------------- the silo's half
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs from the silo's own parameters on the base loss and the distance; then the prototypes."""
        local.model.load(_personal_model.own_parameters(local))
        base = local.model.flat.detach().clone()
        shared = _class_prototypes.read_download(take(task.payloads, ClassPrototypes), base.device)
        shared = fused(shared) if self.options.proto_modal == "fused" else shared
        work = self.fedavg.work(local, task)
        if work is None and self.options.weight and bool((shared.image_valid | shared.text_valid).any()):
            work = _training.EveryBatch(local, self.context.training.batch_size, nothing)
        outcome = _training.train_epochs(local, self.context, task, base, work, extra=self._distance(local, shared))
        state = {**({} if work is None else work.kept()), **_personal_model.kept(local)}
        return Trained((self._prototypes(local, task), Loss(outcome.loss)), state, outcome.loss)

    def _distance(self, local: Local, shared: Shared) -> _training.Extra | None:
        if self.options.weight == 0:
            return None
        by_modality = (shared.image, shared.image_valid), (shared.text, shared.text_valid)

        def distance(step: _training.Step, image: Out | None, text: Out | None) -> Tensor:
            members = _training.labels_of(local, step.rows)[:, self.columns] > 0
            terms = [
                prototype_loss(out.code, members, prototypes, valid)
                for out, (prototypes, valid) in zip(
                    _personal_model.unsharpened(local, image, text), by_modality, strict=True
                )
                if out is not None
            ]
            return self.options.weight * torch.stack(terms).sum()

        return distance

    def _prototypes(self, local: Local, task: Task) -> ClassPrototypes:
        """The class prototypes by the model as training left it; rows of a modality the silo lacks are absent."""
        caption = _training.choose_captions(
            local, _training.generator_of(self.context, local, task, "class prototypes")
        )
        members = _training.labels_of(local, np.arange(len(local.share)))[:, self.columns].cpu() > 0
        found = _training.embed_all(local, caption, self.context.training.batch_size)
        return _class_prototypes.of_features(found, members, self.context.dim)

    # ----------------------------------------------------------------------- the coordinator's half
    def initial(self, theta: Tensor) -> State:
        """The initial model, which stays what it is, and no prototype yet."""
        return State(theta, _class_prototypes.initial(len(self.context.silos), 2 * len(self.columns), self.context.dim))

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global prototypes."""
        return (_class_prototypes.download(state.tensors),)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Average the last reports of all silos, class by class."""
        found = [(reply, _class_prototypes.own_rows(reply)) for reply in _aggregation.ordered(replies)]
        weighted = self.options.weighting == "samples"
        tensors = _class_prototypes.updated(
            state.tensors, found, round_, max_age=self.context.max_age, weighted=weighted
        )
        return MergeResult(
            replace(state, tensors=tensors), {"classes_known": float(tensors[_class_prototypes.VALID].sum())}
        )

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the prototypes' shape, and that they can be means of embeddings.

        Raises:
            RemoteWireError: another number of rows or columns, or a row longer than any embedding.
        """
        longest = _class_prototypes.longest_code(self.context)
        _class_prototypes.check_rows(take(payloads, ClassPrototypes), 2 * len(self.columns), self.context.dim, longest)

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The coordinator's model stays as it was drawn; the silos' personal models are what is measured."""
        return Traits(own_only=True, personalised=True)

    def traits(self) -> Traits:
        """As for any options."""
        return self.traits_of(self.options)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's own model."""
        return _personal_model.encoders_of(local, _personal_model.own_parameters(local))


PROTOCOL = FedProto
