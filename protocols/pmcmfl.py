"""PmcmFL (our reading): class prototypes take the place of a missing modality in the base loss (Bao et al., 2023).

Paired silos report the mean embedding of each class and modality by their trained model. A global prototype P_c is the
mean of the silos' last ones, with weight 1 + n_k for each silo that has the class. From the second round on

- prototype mask: a silo that lacks a modality trains the base loss, InfoNCE, of its items' embeddings with the
  prototypes of their classes in the modality that it lacks, in place of the embeddings that are missing;
- prototype contrast: every silo adds, for each modality that it has, ``weight`` times the cross-entropy of the item i
  and softmax_j(z_i . P_c(j) / tau) over the items j of a batch, with prototypes of this modality (``ClipLossHalf``).

As in the code, items of one class in a batch are negatives of each other although they have the same prototype, and an
item with several labels belongs to the first one. The data need labels.

Source: arXiv 2312.13508, by its abstract and the public code (Noirebao/Multimodal_Federated), as we had no full text.
Departures. The paper answers questions about images by a network that fuses both modalities, and puts prototypes in
place of what is fused; its code gives the contrast of the fused representation the weight 0.01 and turns those of the
single modalities off (1e-8). A model with two towers fuses nothing: here the base loss takes the prototype, and the
contrast acts on the embeddings that are ranked, with the weight 0.01. Where the code averages the prototypes of the
last round and starts from random ones, those of all silos are known here, and a class without one has no term. We do
not answer queries that lack a modality by prototypes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import NonNegative
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.federation.protocol import Context, Local, MergeResult, SiloFacts, State, Task, Trained, Traits, Update, take
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Payload
from protocols import fedavg
from protocols.parts import class_prototypes, training
from protocols.parts.class_prototypes import Shared
from protocols.parts.labelled import EveryLabelledBatch
from protocols.parts.losses import info_nce, refuse_other_bases


@dataclass(frozen=True)
class PmcmFlOptions(fedavg.FedAvgOptions):
    """Options of PmcmFL, in addition to those of FedAvg.

    Args:
        mask: train silos that lack a modality on prototypes in its place; otherwise on the contrast alone.
        weight: weight of the contrast with prototypes.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    mask: bool = True
    weight: NonNegative = 0.01


def prototype_contrast(z: Tensor, prototypes: Tensor, tau: float) -> Tensor:
    """Cross-entropy of item i and softmax_j(z_i . P_c(j) / tau), mean over a batch (PmcmFL, ``ClipLossHalf``).

    Args:
        z: [B, d].
        prototypes: [B, d], row j the prototype of item j's class.
        tau: temperature.
    """
    scores = z @ prototypes.T / tau
    return functional.cross_entropy(scores, torch.arange(len(z), device=z.device))


class PmcmFl(fedavg.FedAvg):
    """PmcmFL in our reading, see the module docstring."""

    Options: ClassVar[type[Any]] = PmcmFlOptions
    options: PmcmFlOptions

    def __init__(self, options: PmcmFlOptions, context: Context) -> None:
        refuse_other_bases("pmcmfl", context)
        if not context.label_names:
            raise InputError("protocol.name", "pmcmfl", "a method that needs no labels: the data set has none")
        super().__init__(options, context)
        self.columns = fine_columns(context.label_names)

    @classmethod
    def traits_of(cls, options: PmcmFlOptions) -> Traits:
        """FedAvg's, and our reading of the paper."""
        return replace(super().traits_of(options), our_reading=True)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update and the loss; from a paired silo also class prototypes."""
        kinds = super().uploads(silo)
        return kinds | {ClassPrototypes} if silo.paired else kinds

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on the base loss and the contrast, then a paired silo's class prototypes."""
        shared = self._shared(local, task)
        trained = self.trained(local, task, extra=self._contrast(local, shared) if self.options.weight else None)
        if not local.silo.paired:
            return trained
        generator = training.generator_of(self.context, local, task, "class prototypes")
        embeddings = training.embed_all(
            local, training.choose_captions(local, generator), self.context.training.batch_size
        )
        members = training.labels_of(local, np.arange(len(local.dataset)))[:, self.columns].cpu() > 0
        report = class_prototypes.of_features(embeddings, members, self.context.dim)
        return replace(trained, payloads=(*trained.payloads, report))

    def work(self, local: Local, task: Task) -> training.Work | None:
        """FedAvg's; in a silo that lacks a modality the base loss with prototypes in its place, once there are any."""
        if local.silo.paired:
            return super().work(local, task)
        shared, options = self._shared(local, task), self.options
        lacking, valid = (shared.text, shared.text_valid) if local.silo.image else (shared.image, shared.image_valid)
        if not (bool(valid.any()) and (options.mask or options.weight)):
            return None

        def loss(image: Out | None, text: Out | None, labels: Tensor, _: np.random.Generator) -> Tensor:
            held = image if image is not None else text
            assert held is not None  # noqa: S101 - a silo has at least one modality
            rows, classes = self._classes(labels, valid)
            if not options.mask or not len(classes):
                return held.code.sum() * 0.0
            return info_nce(held.code[rows], lacking[classes], options.tau)

        return EveryLabelledBatch(local, self.context.training.batch_size, loss)

    def _shared(self, local: Local, task: Task) -> Shared:
        return class_prototypes.read_download(take(task.payloads, ClassPrototypes), local.model.flat.device)

    def _classes(self, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Mask bool [B] of items whose first class has a prototype, and these classes, from labels [B, L]."""
        members = labels[:, self.columns] > 0
        first = members.int().argmax(1)
        rows = members.any(1) & valid[first]
        return rows, first[rows]

    def _contrast(self, local: Local, shared: Shared) -> training.Extra:
        by_modality = ((shared.image, shared.image_valid), (shared.text, shared.text_valid))

        def contrast(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            labels, terms = training.labels_of(local, step.rows), []
            for out, (prototypes, valid) in zip((image, text), by_modality, strict=True):
                rows, classes = self._classes(labels, valid)
                if out is not None and len(classes):
                    terms.append(prototype_contrast(out.code[rows], prototypes[classes], self.options.tau))
            return self.options.weight * torch.stack(terms).sum() if terms else None

        return contrast

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model, and no prototypes yet."""
        return State(theta, class_prototypes.initial(len(self.context.silos), 2 * len(self.columns), self.context.dim))

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global model and the global prototypes."""
        return (*super().task(state, silo), class_prototypes.download(state.tensors))

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """FedAvg's; no secure sum, as the prototypes are those of single silos."""
        return super().merge(state, replies, round_)

    def merged(self, theta: Tensor, replies: Sequence[Update], weights: Tensor, *, state: State) -> MergeResult:
        """The average of the updates, and the prototypes with those that the replies bring."""
        reports = []
        for reply in (each for each in replies if each.silo.paired):
            sent = take(reply.payloads, ClassPrototypes)
            # In the table, the counts are the weights of the silo's prototypes.
            reports.append((reply, replace(sent, counts=np.where(sent.counts > 0, 1 + reply.samples, 0))))
        version = replies[0].base_version + replies[0].staleness
        tensors = class_prototypes.updated(state.tensors, reports, version, max_age=self.context.max_age, weighted=True)
        known = float(tensors[class_prototypes.VALID].sum())
        return MergeResult(State(theta, tensors, state.values), {"classes_known": known})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the prototypes' shape, and that no row is longer than a mean of embeddings can be.

        Raises:
            RemoteWireError: wrong number of rows or columns, or a row that is too long.
        """
        for payload in payloads:
            if isinstance(payload, ClassPrototypes):
                class_prototypes.check_rows(payload, 2 * len(self.columns), self.context.dim)


PROTOCOL = PmcmFl
