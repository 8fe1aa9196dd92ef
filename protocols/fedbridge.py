"""FedBridge: silos that lack a modality train on all silos' centroids of it, after a warm-up (this project's method).

Anchoring a silo to a single prototype of its missing modality pulls all its embeddings onto one point. Here a silo
reports several centroids for each modality it has, each the mean of at least ``support`` embeddings. Only paired silos
train during a warm-up. After it, a silo that lacks a modality downloads all silos' centroids c_j of that modality and
trains each sample to keep, and sharpen, the downloaded model's soft assignment to them:

    L = KL(softmax(t_i . c / tau_teacher) || softmax(z_i . c / tau))
        + lambda_pair NCE(z_i, z_i') + lambda_keep (1 - z_i . t_i)

where t_i is the downloaded model's embedding of sample i, z_i that of the model in training, and z_i' the embedding of
a second view of the same item: another caption, and, with ``feature_dropout``, its features with some set to zero.
docs/explanation/fedbridge.md gives the derivation, the traffic and what centroids reveal; docs/results has the
ablations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmq.config.sections import Count, Fraction, Modality, NonNegative, Number, Positive, Width
from fedmq.errors import InputError
from fedmq.federation.protocol import (
    Context,
    Encoders,
    FederatedProtocol,
    Local,
    MergeResult,
    ReportedValue,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
    take,
)
from fedmq.models.two_tower import Out
from fedmq.wire.payloads import ClassPrototypes, Delta, Loss, Model, Payload
from protocols import fedavg
from protocols.parts import aggregation, centroids, personal_adapter, training, unpaired
from protocols.parts.losses import TauOptions, info_nce, refuse_other_bases
from protocols.parts.personal_model import References


@dataclass(frozen=True)
class FedBridgeOptions(personal_adapter.AdapterOptions, TauOptions):
    """Options of FedBridge.

    Args:
        tau: temperature of InfoNCE and of the assignment by the model in training.
        tau_teacher: temperature of the assignment by the downloaded model; lower is sharper.
        warmup: fraction of the rounds during which silos that lack a modality stay idle.
        centroids: maximum number of centroids per silo and modality.
        support: minimum number of samples per reported centroid.
        lambda_pseudo: weight of the assignment term; with 0, silos use no centroids and report them only for ``bank``.
        lambda_pair: weight of the contrast between two views of one item. A second view is another caption of the item;
            images, and items with one caption, have one only with ``feature_dropout``.
        feature_dropout: fraction of an item's input features that is set to zero in its second view (dropout, scaled by
            1 / (1 - p)); with 0, only captions are contrasted. Pixels and tokens have no such views.
        lambda_keep: weight of the distance to the downloaded model's embeddings.
        bank: centroids released with the model as a query bank against hubs (``fedmq.models.query_bank``): of no silo
            (``none``), of ``all`` silos, or of ``paired`` silos only. Personal models (``personal``) do not use it.
        branch_renorm: average each branch over the silos that trained it; if false, use the plain sum. With
            ``conflict_free``, the single-modality silos' mean update loses its component against the paired silos' mean
            update, is shortened to at most its length, and is added to it by weight
            (``protocols.parts.aggregation.conflict_free``).
        personal: FedBridge-p: paired silos also fine-tune a personal adapter on their pairs, as in RCSR-p; it never
            leaves the silo. A silo that lacks a modality has no pairs to fit it and uses the global model.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lambda_pseudo": ("tau_teacher",),
        "lambda_pair": ("feature_dropout",),
        "personal": ("lambda_p", "personal_*"),
    }

    tau_teacher: Positive = 0.05
    warmup: Fraction = 0.4
    centroids: Width = 16
    support: Count = 4
    lambda_pseudo: NonNegative = 1.0
    lambda_pair: NonNegative = 1.0
    feature_dropout: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.0
    lambda_keep: NonNegative = 1.0
    bank: Literal["none", "all", "paired"] = "none"
    branch_renorm: aggregation.BranchRenorm = True
    personal: bool = False


def assignment_loss(z: Tensor, target: Tensor, anchors: Tensor, tau: float) -> Tensor:
    """KL between the teacher's and the student's soft assignments to anchors, mean over the batch.

    Args:
        z: [B, d] unit-length embeddings by the model in training.
        target: [B, J] the teacher's assignment, rows of sum 1.
        anchors: [J, d] of unit length.
        tau: temperature of the student.
    """
    student = (z @ anchors.T / tau).log_softmax(1)
    return (target * (target.clamp_min(1e-12).log() - student)).sum(1).mean()


@dataclass(frozen=True)
class Assigning(training.Work):
    """Training of a single-modality silo."""

    options: FedBridgeOptions  # temperatures and weights
    local: Local
    batch_size: int  # items per step
    anchors: Tensor | None  # [J, d] centroids of the modality the silo lacks; None without pseudo-labels
    teacher: References  # the downloaded model's embeddings

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """One step per batch of a random permutation of the items."""
        caption = training.choose_captions(self.local, generator)
        other = None if caption is None else _another(self.local, caption, generator)
        for rows in training.batches(len(self.local.dataset), self.batch_size, generator):

            def loss(image: Out | None, text: Out | None, rows: Any = rows) -> Tensor:
                return self._loss(image, text, rows, caption, partial(self._second, other=other, generator=generator))

            yield training.Step(rows, caption, loss)

    def _second(self, rows: training.I64, *, other: training.I64 | None, generator: np.random.Generator) -> Tensor:
        """Embeddings [B, d] of second views: other captions, with some features set to zero."""
        items, index, dropped = self.local.dataset, torch.from_numpy(rows), self.options.feature_dropout
        modality: Modality = "image"
        inputs = items.image[index] if items.image is not None else None
        if items.text is not None and other is not None:
            modality, inputs = "text", items.text[index, torch.from_numpy(other[rows])]
        assert inputs is not None  # noqa: S101 - a silo has at least one modality
        if dropped:
            if not inputs.is_floating_point():
                raise InputError(
                    "protocol.feature_dropout", dropped, "0, as a tower reads pixels or tokens instead of features"
                )
            kept = torch.from_numpy(generator.random(inputs.shape) >= dropped)
            inputs = inputs * kept / (1 - dropped)
        return self.local.model.outputs(modality, inputs.to(self.local.model.flat.device)).code

    def _loss(
        self,
        image: Out | None,
        text: Out | None,
        rows: training.I64,
        caption: training.I64 | None,
        second: Callable[[training.I64], Tensor],
    ) -> Tensor:
        options, held = self.options, image if image is not None else text
        assert held is not None  # noqa: S101 - a silo has at least one modality
        z = held.code
        (teacher,) = self.teacher.of(rows, caption)
        loss = options.lambda_keep * (1 - (z * teacher).sum(1)).mean()
        if self.anchors is not None:
            target = (teacher @ self.anchors.T / options.tau_teacher).softmax(1)
            loss = options.lambda_pseudo * assignment_loss(z, target, self.anchors, options.tau) + loss
        viewed = np.full(len(rows), options.feature_dropout > 0)
        if text is not None:
            viewed |= self.local.dataset.captions.numpy()[rows] > 1
        if options.lambda_pair and viewed.sum() > 1:  # the contrast needs at least two items
            first = z[torch.from_numpy(viewed).to(z.device)]
            loss = loss + options.lambda_pair * info_nce(first, second(rows[viewed]), options.tau)
        return loss


def _another(local: Local, caption: training.I64, generator: np.random.Generator) -> training.I64:
    """A random caption of each item other than ``caption`` [n]; the same one if the item has only one."""
    counts = local.dataset.captions.numpy()
    steps = 1 + (generator.random(len(counts)) * (counts - 1)).astype(np.int64)
    other: training.I64 = np.where(counts > 1, (caption + steps) % counts, caption)
    return other


class FedBridge(FederatedProtocol):
    """FedBridge, see the module docstring."""

    Options: ClassVar[type[Any]] = FedBridgeOptions
    REPORTED: ClassVar[Mapping[str, ReportedValue]] = {"centroids": centroids.KNOWN}
    options: FedBridgeOptions

    def __init__(self, options: FedBridgeOptions, context: Context) -> None:
        refuse_other_bases("fedbridge", context)
        super().__init__(options, context)
        plain = fedavg.FedAvgOptions(tau=options.tau, branch_renorm=options.branch_renorm)
        self.fedavg = fedavg.FedAvg(plain, context)
        self.onset = round(options.warmup * context.rounds)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss, and centroids."""
        return frozenset({Delta, Loss, ClassPrototypes})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the centroids' shape.

        Raises:
            RemoteWireError: wrong number of rows or columns.
        """
        centroids.check(payloads, self.options.centroids, self.context.dim)

    def initial(self, theta: Tensor) -> State:
        """The initial model and an empty table of centroids."""
        return State(theta, centroids.initial(self.context, self.options.centroids), {})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model; for a silo that lacks a modality also all silos' centroids of it, if it is assigned to them."""
        model = self.fedavg.task(state, silo)
        if not self.options.lambda_pseudo:
            return model
        return (*model, *centroids.download(state.tensors, silo))

    def release(self, state: State) -> tuple[Payload, ...]:
        """The query bank, if the options ask for one and both modalities have centroids."""
        if self.options.bank == "none":
            return ()
        return centroids.bank(
            state.tensors, [silo for silo in self.context.silos if self.options.bank == "all" or silo.paired]
        )

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on InfoNCE, on the assignment loss, or nothing during the warm-up; after it, the centroids."""
        base = training.load_model(local, take(task.payloads, Model).buffer)
        work = self.fedavg.work(local, task) if local.silo.paired else self._work(local, task)
        work = unpaired.beside(work, local, self.context, task, lambda view: self._work(view, task))
        outcome = training.train_epochs(local, self.context, task, base, work)
        update, loss = training.delta_payload(self.context, outcome, local.samples), Loss(max(0.0, outcome.loss))
        # During the warm-up no silo uses centroids, and the towers are not aligned enough for clustering.
        begun = task.round >= self.onset and (self.options.lambda_pseudo > 0 or self.options.bank != "none")
        report, members = centroids.report(
            local, self.context, task, self.options.centroids, self.options.support, begun=begun
        )
        state = {**self._adapter(local, task), **members}
        return Trained((update, loss, report), state, loss.value, work is None)

    @classmethod
    def traits_of(cls, options: FedBridgeOptions) -> Traits:
        """FedBridge-p gives paired silos personal adapters."""
        return Traits(personalised=options.personal, unpaired="anchored")

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The global model with the silo's personal adapter behind both towers."""
        training.load_model(local, take(payloads, Model).buffer)
        return personal_adapter.encoders(local, self.options.lambda_p)

    def _adapter(self, local: Local, task: Task) -> dict[str, Tensor]:
        """The silo's adapter, fine-tuned if personalisation has begun and the silo is paired; empty if it has none."""
        options = self.options
        loss = partial(fedavg.paired_loss, tau=options.tau)
        parts = [(local, loss)] if options.personal and local.silo.paired else []
        return personal_adapter.tuned_or_kept(local, self.context, task, options, lambda: options.lambda_p, parts)

    def _work(self, local: Local, task: Task) -> Assigning | None:
        options, device = self.options, local.model.flat.device
        received = centroids.received(task.payloads, local.silo) if options.lambda_pseudo else None
        if task.round < self.onset or (options.lambda_pseudo and received is None):
            return None
        anchors = None if received is None else received.to(device)
        return Assigning(options, local, self.context.training.batch_size, anchors, References.by(local))

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Average each branch over the silos that trained it; store each silo's last centroids."""
        theta, _ = self.fedavg.averaged(state.theta, replies)
        tensors = centroids.updated(state.tensors, replies, round_, self.context.max_age)
        return MergeResult(State(theta, tensors, state.values), {"centroids": centroids.known(tensors)})


PROTOCOL = FedBridge
