"""FedBridge: single-modality silos learn from centroids of what they lack, late and gently (this project's own method).

Anchoring a silo to one prototype of its missing modality pulls all its embeddings onto one point. Here a silo reports
several centroids per modality it has, each the mean of at least ``support`` embeddings. After a warm-up, in which only
paired silos train, a silo that lacks a modality gets all silos' centroids c_j of it and trains each sample to keep, and
sharpen, the soft assignment the downloaded model makes of it:

    L = KL(softmax(t_i . c / tau_teacher) || softmax(z_i . c / tau))
        + lambda_pair NCE(z_i, z_i') + lambda_keep (1 - z_i . t_i)

with t_i the downloaded model's embedding of sample i, z_i the trained one, and z_i' that of another caption of the same
item (text silos only). docs/explanation/fedbridge.md derives it and states its traffic
and what it reveals; docs/results has the ablations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

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
from fedmq.wire.messages import ClassPrototypes, Delta, Loss, Model, Payload
from protocols import _aggregation, _centroids, _personal, _training, fedavg
from protocols._losses import info_nce
from protocols._options import check, refuse_other_bases


@dataclass(frozen=True)
class FedBridgeOptions:
    """Options of FedBridge.

    Args:
        tau: temperature of InfoNCE and of the trained assignment.
        tau_teacher: temperature of the downloaded model's assignment; the lower, the sharper.
        warmup: share of the rounds during which silos that lack a modality stay idle.
        centroids: per silo and modality, at most.
        support: least samples behind a centroid that is reported.
        lambda_pseudo: weight of the assignment term.
        lambda_pair: weight of the contrast between two captions of one item, in silos that have only captions.
        lambda_keep: weight of staying near the downloaded model's embeddings.
        single_weight: factor of a single-modality silo's weight in a merge; in a merge of its reply alone, as in every
            one of ``async`` mode, its weight is 1 all the same, and in a branch that no paired silo trained.
        bank: whose centroids go with the released model as a query bank against hubs (``fedmq.models.query_bank``):
            nobody's, all silos', or those of paired silos alone. Silos' own models (``personal``) go without.
        branch_renorm: each branch is averaged over the silos that trained it.
        personal: FedBridge-p: paired silos also fine-tune RCSR-p's adapter on their pairs, which never leaves them. A
            silo that lacks a modality has no pair to fit one to and keeps the global model.
        lambda_p: strength of the adapter; this and the next four are of ``personal`` alone.
        personal_onset: round from which adapters are fine-tuned, as RCSR-p's T_p.
        personal_hidden: width of an adapter.
        personal_epochs: epochs of fine-tuning after each local training.
        personal_rate: learning rate of fine-tuning, as a share of the round's.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lambda_pseudo": ("tau_teacher",),
        "personal": ("lambda_p", "personal_*"),
    }

    tau: float = 0.07
    tau_teacher: float = 0.05
    warmup: float = 0.4
    centroids: int = 16
    support: int = 4
    lambda_pseudo: float = 1.0
    lambda_pair: float = 1.0
    lambda_keep: float = 1.0
    single_weight: float = 0.5
    bank: Literal["none", "all", "paired"] = "none"
    branch_renorm: bool = True
    personal: bool = False
    lambda_p: float = 0.2
    personal_onset: int = 50
    personal_hidden: int = 64
    personal_epochs: int = 1
    personal_rate: float = 0.1

    def __post_init__(self) -> None:
        for name in ("tau", "tau_teacher", "single_weight"):
            check(name, getattr(self, name), 0.0, open_low=True)
        for name in ("lambda_pseudo", "lambda_pair", "lambda_keep"):
            check(name, getattr(self, name), 0.0)
        check("warmup", self.warmup, 0.0, 1.0)
        check("centroids", self.centroids, 1)
        check("support", self.support, 1)
        check("lambda_p", self.lambda_p, 0.0, _personal.STRONGEST)
        check("personal_onset", self.personal_onset, 0)
        check("personal_hidden", self.personal_hidden, 1)
        check("personal_epochs", self.personal_epochs, 1)
        check("personal_rate", self.personal_rate, 0.0, open_low=True)


def assignment_loss(z: Tensor, teacher: Tensor, centroids: Tensor, tau: float, tau_teacher: float) -> Tensor:
    """KL between the teacher's and the student's soft assignments to centroids, mean over the batch.

    Args:
        z: [B, d] unit-length embeddings in training.
        teacher: [B, d] of the downloaded model, a constant.
        centroids: [J, d] of unit length.
        tau: of the student.
        tau_teacher: of the teacher.
    """
    target = (teacher @ centroids.T / tau_teacher).softmax(1)
    student = (z @ centroids.T / tau).log_softmax(1)
    return (target * (target.clamp_min(1e-12).log() - student)).sum(1).mean()


@dataclass(frozen=True)
class Assigning(_training.Work):
    """A single-modality silo's loss at work."""

    options: FedBridgeOptions
    local: Local
    batch_size: int
    centroids: Tensor
    teacher: Tensor

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[_training.Step]:
        """One step per batch over a permutation."""
        caption = _training.choose_captions(self.local, generator)
        other = None if caption is None else _another(self.local, caption, generator)
        for rows in _training.batches(len(self.local.share), self.batch_size, generator):

            def loss(image: Out | None, text: Out | None, rows: Any = rows) -> Tensor:
                return self._loss(image, text, rows, caption, other)

            yield _training.Step(rows, caption, loss)

    def _loss(self, image: Out | None, text: Out | None, rows: Any, caption: Any, other: Any) -> Tensor:
        options, held = self.options, image if image is not None else text
        assert held is not None  # noqa: S101 - a silo has at least one modality
        z, index = held.code, torch.from_numpy(rows)
        teacher = self.teacher[index] if text is None else self.teacher[index, torch.from_numpy(caption[rows])]
        loss = options.lambda_pseudo * assignment_loss(z, teacher, self.centroids, options.tau, options.tau_teacher)
        loss = loss + options.lambda_keep * (1 - (z * teacher).sum(1)).mean()
        if text is not None and options.lambda_pair:
            several = self.local.share.captions.numpy()[rows] > 1
            if several.sum() > 1:  # of one item there is nothing to tell it from
                _, second = _training.embed(self.local, rows[several], other)
                assert second is not None  # noqa: S101 - the silo has captions
                own = z[torch.from_numpy(several).to(z.device)]
                loss = loss + options.lambda_pair * info_nce(own, second, options.tau)
        return loss


def _another(local: Local, caption: _training.I64, generator: np.random.Generator) -> _training.I64:
    """Of each item another caption than ``caption`` [n]; the same of an item that has but one."""
    counts = local.share.captions.numpy()
    steps = 1 + (generator.random(len(counts)) * (counts - 1)).astype(np.int64)
    other: _training.I64 = np.where(counts > 1, (caption + steps) % counts, caption)
    return other


class FedBridge(FederatedProtocol):
    """FedBridge, see the module's text."""

    Options: ClassVar[type[Any]] = FedBridgeOptions

    def __init__(self, options: FedBridgeOptions, context: Context) -> None:
        refuse_other_bases("fedbridge", context)
        self.options = options
        self.context = context
        plain = fedavg.FedAvgOptions(tau=options.tau, single_modality="idle", branch_renorm=options.branch_renorm)
        self.fedavg = fedavg.FedAvg(plain, context)
        self.onset = round(options.warmup * context.rounds)

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part; silos that lack a modality idle through the warm-up."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss, and centroids."""
        return frozenset({Delta, Loss, ClassPrototypes})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the centroids' shape.

        Raises:
            RemoteWireError: another number of rows or columns.
        """
        _centroids.check(payloads, self.options.centroids, self.context.dim)

    def initial(self, theta: Tensor) -> State:
        """The model, and no centroid yet."""
        return State(theta, _centroids.initial(self.context, self.options.centroids), {})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model; for a silo that lacks a modality also everybody's centroids of it."""
        return (*self.fedavg.task(state, silo), *_centroids.download(state.tensors, silo))

    def release(self, state: State) -> tuple[Payload, ...]:
        """The query bank, if there is to be one and both modalities have a centroid."""
        if self.options.bank == "none":
            return ()
        return _centroids.bank(
            state.tensors, [silo for silo in self.context.silos if self.options.bank == "all" or silo.paired]
        )

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on InfoNCE, on the assignment loss, or nothing during the warm-up; after it, the centroids."""
        if local.silo.paired:
            update, loss = self.fedavg.trained(local, task).payloads
        else:
            base = _training.load_model(local, take(task.payloads, Model).buffer)
            outcome = _training.train_epochs(local, self.context, task, base, self._work(local, task))
            update, loss = (
                _training.delta_payload(self.context, outcome, len(local.share)),
                Loss(max(0.0, outcome.loss)),
            )
        # During the warm-up nobody needs any, and clusters made then would be of towers that are not aligned yet.
        centroids, members = _centroids.report(
            local, self.context, task, self.options.centroids, self.options.support, begun=task.round >= self.onset
        )
        state = {**self._adapter(local, task), **members}
        return Trained((update, loss, centroids), state, loss.value if isinstance(loss, Loss) else 0.0)

    def traits(self) -> Traits:
        """FedBridge-p gives paired silos adapters of their own."""
        return Traits(personalised=self.options.personal)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The global model with the silo's own adapter behind both towers."""
        _training.load_model(local, take(payloads, Model).buffer)
        return _personal.encoders(local, self.options.lambda_p)

    def _adapter(self, local: Local, task: Task) -> dict[str, Tensor]:
        """A paired silo's adapter, fine-tuned once personalisation has begun; nothing where there is none."""
        options = self.options
        if not (options.personal and task.round >= options.personal_onset and local.silo.paired):
            return _personal.kept(local)
        tuning = _personal.Tuning(options.personal_hidden, options.personal_epochs, options.personal_rate)
        return {_personal.STATE: _personal.fine_tuned(local, self.context, task, tuning, options.lambda_p, self._pairs)}

    def _pairs(self, image: Tensor | None, text: Tensor | None) -> Tensor:
        assert image is not None and text is not None  # noqa: S101 - asked of paired silos only
        return info_nce(image, text, self.options.tau)

    def _work(self, local: Local, task: Task) -> Assigning | None:
        centroids = _centroids.received(task.payloads)
        if task.round < self.onset or centroids is None:
            return None
        device = local.model.flat.device
        centroids = centroids.to(device)
        return Assigning(
            self.options, local, self.context.training.batch_size, centroids, self._everything(local).to(device)
        )

    def _everything(self, local: Local) -> Tensor:
        """The downloaded model's embeddings of all the silo's images [n, d], or of all its captions [n, C, d]."""
        share, model = local.share, local.model
        with torch.no_grad():
            if share.image is not None:
                return torch.cat([model.image(x.to(model.flat.device)) for x in torch.split(share.image, 256)])
            assert share.text is not None  # noqa: S101 - a silo has at least one modality
            flat = share.text.flatten(0, 1)
            z = torch.cat([model.caption(x.to(model.flat.device)) for x in torch.split(flat, 256)])
            return z.view(*share.text.shape[:2], -1)

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Average each branch over the silos that trained it; remember everybody's last centroids."""
        options = self.options
        replies = _aggregation.ordered(replies)
        updates = [_aggregation.update_of(reply, self.context.layout) for reply in replies]
        factors = [update.factor * (1.0 if update.silo.paired else options.single_weight) for update in updates]
        weights = _aggregation.sample_weights([update.samples for update in updates])
        weights = _aggregation.damped(weights, torch.tensor(factors, dtype=torch.float64))
        theta = _aggregation.merge_updates(state.theta, updates, weights, self.fedavg.branches, options.branch_renorm)
        tensors = _centroids.updated(state.tensors, replies, round_, self.context.max_age)
        return MergeResult(State(theta, tensors, state.values), {"centroids": _centroids.known(tensors)})


PROTOCOL = FedBridge
