"""FedHAP: federated hashing with global binary prototypes and an adversarial loss (Yang et al., 2022).

Silos train their base loss (objective ``triplet``: eqs 2 and 7), pull codes towards the global prototype of their class
and away from those of other classes (eq 3), and train against a discriminator that distinguishes codes from prototypes
(eq 8). They report the mean code of each class (eq 5); a prototype is the sign of the mean over the silos that hold the
class (eq 6). Networks and discriminators are averaged with uniform weights (algorithm 1).

A silo votes with the codes of all its modalities, and triplets mix modalities. The coordinator keeps the last vote of
every silo, so that a class does not vanish if merges have few replies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.scenario import Training
from fedmq.config.sections import NonNegative, Width
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import (
    Added,
    Context,
    FederatedProtocol,
    Local,
    MergeResult,
    SiloFacts,
    State,
    Task,
    Trained,
    Traits,
    Update,
    WeightedSum,
    take,
)
from fedmq.federation.sums import SumLayout
from fedmq.federation.updates import mixed
from fedmq.models.hash_networks import initial_parameters, signs, straight_through
from fedmq.models.objective_registry import TowerPlan
from fedmq.models.optimiser import FusedOptimiser
from fedmq.models.two_tower import Out
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import ClassPrototypes, Delta, DiscriminatorDelta, Payload
from protocols import fedavg, objectives
from protocols.objectives import triplet
from protocols.parts import aggregation, class_prototypes, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.labelled import Samples, samples_of

Eq8 = Literal["corrected", "printed"]
Adversarial = Literal["nonsat", "minimax", "literal"]


def discriminator_layout(bits: int, classes: int, hidden: int) -> Layout:
    """Parameters of the discriminator: r + C inputs, a ReLU layer of width ``hidden``, one output."""
    shapes: dict[str, tuple[int, ...]] = {
        "discriminator.hidden.weight": (hidden, bits + classes),
        "discriminator.hidden.bias": (hidden,),
        "discriminator.output.weight": (1, hidden),
        "discriminator.output.bias": (1,),
    }
    return Layout.of((name, shape, "float32") for name, shape in shapes.items())


def initial_discriminator(layout: Layout, seed: int) -> Tensor:
    """Initial parameters float32 [Q], distributed as those of torch's linear layer."""
    return initial_parameters(layout, TowerPlan(), seed)


def discriminator_logits(theta: Tensor, layout: Layout, codes: Tensor, labels: Tensor) -> Tensor:
    """Log-odds [B] that codes [B, r] with labels [B, C] are prototypes, by parameters [Q]; D is their logistic."""
    parts = torch.split(theta, [entry.size for entry in layout.entries])
    w1, b1, w2, b2 = (part.view(entry.shape) for part, entry in zip(parts, layout.entries, strict=True))
    hidden = functional.relu(functional.linear(torch.cat([codes, labels], 1), w1, b1))
    return functional.linear(hidden, w2, b2)[:, 0]


def label_vectors(labels: Tensor) -> Tensor:
    """Labels [B, C] normalised to sum to 1 per sample; zero for a sample without labels."""
    return labels / labels.sum(1, keepdim=True).clamp_min(1)


def discriminator_loss(local: Tensor, prototypes: Tensor, eq8: Eq8 = "corrected") -> Tensor:
    """Cross-entropy with local codes as 0 and prototypes as 1 (eq 8), from log-odds [B] and [C].

    The paper prints 1 - log D instead of log(1 - D); that loss falls when D mistakes local codes for prototypes, so it
    cannot train D.
    """
    real = functional.softplus(-prototypes).mean()
    if eq8 == "printed":
        return real - (1 + functional.softplus(-local)).mean()
    return functional.softplus(local).mean() + real


def generator_loss(local: Tensor, prototypes: Tensor, kind: Adversarial, eq8: Eq8 = "corrected") -> Tensor:
    """Adversarial loss of the hashing network, from the discriminator's log-odds of codes [B] and of prototypes [C].

    ``nonsat`` is -mean log D, ``minimax`` mean log(1 - D); ``literal`` takes L_d itself, in the form ``eq8``, as
    algorithm 1 does, which trains the network to help the discriminator.
    """
    match kind:
        case "nonsat":
            return functional.softplus(-local).mean()
        case "minimax":
            return -functional.softplus(local).mean()
        case "literal":
            return discriminator_loss(local, prototypes, eq8)


class Discriminator:
    """A discriminator in local training, with its optimiser.

    Args:
        theta: float32 [Q] initial parameters; not modified.
        layout: layout of the discriminator.
        prototypes: [V, r] valid global prototypes.
        prototype_labels: [V, C] their one-hot labels.
        training: kind of optimiser and weight decay.
        learning_rate: learning rate of this round.
    """

    def __init__(
        self,
        theta: Tensor,
        layout: Layout,
        prototypes: Tensor,
        prototype_labels: Tensor,
        training: Training,
        learning_rate: float,
    ) -> None:
        self.theta = theta.clone()
        self._layout = layout
        self._prototypes, self._prototype_labels = prototypes, prototype_labels
        self._optimiser = FusedOptimiser([self.theta], training, learning_rate)

    def step(self, codes: Tensor, labels: Tensor, eq8: Eq8) -> None:
        """Take one optimiser step on eq 8 for binary codes [B, r] and label vectors [B, C]."""
        theta = self.theta.clone().requires_grad_()
        lost = discriminator_loss(self._logits(theta, codes, labels), self._real(theta), eq8)
        (self.theta.grad,) = torch.autograd.grad(lost, theta)
        self._optimiser.step()

    def fooled(self, codes: Tensor, labels: Tensor, kind: Adversarial, eq8: Eq8) -> Tensor:
        """The hashing network's adversarial loss for codes [B, r], with the discriminator frozen."""
        return generator_loss(self._logits(self.theta, codes, labels), self._real(self.theta), kind, eq8)

    def _logits(self, theta: Tensor, codes: Tensor, labels: Tensor) -> Tensor:
        return discriminator_logits(theta, self._layout, codes, labels)

    def _real(self, theta: Tensor) -> Tensor:
        return self._logits(theta, self._prototypes, self._prototype_labels)


_CHANGE = "fedhap.discriminator_change"
_CODES = "fedhap.prototypes"
_OWN = "fedhap.discriminator"
#: Default hysteresis of prototypes if merges have fewer replies than a round.
_STEADY = 0.05


@dataclass(frozen=True)
class FedHapOptions(fedavg.AnchoredOptions):
    """Options of FedHAP, in addition to those of FedAvg; ``weighting`` defaults to ``uniform``.

    Args:
        proto_triplet: add triplets with the global prototypes (eq 3); off in FedHAP-1 and -2.
        discriminator: add the adversarial loss (eq 8); off in FedHAP-1 and -3.
        lambda_d: weight of the adversarial loss in the hashing network's loss; this and the next five only with
            ``discriminator``.
        eq8: ``corrected``, or as ``printed``, for comparison only.
        adv_g: loss of the hashing network in eq 8: non-saturating (``nonsat``), ``minimax``, or ``literal`` as in
            algorithm 1.
        adv_input: input of the discriminator while the network trains: the sign of the code with a straight-through
            gradient (``ste``), or the code itself (``relaxed``).
        disc_hidden: hidden width of the discriminator.
        share_disc: average discriminators over silos; if false, each silo keeps its own.
        proto_counts: report the number of samples of each class mean; if false, only whether there are any.
        hysteresis: a prototype's bit flips only if the absolute mean exceeds this; 0 gives eq 6. Default: 0.05 if
            merges have fewer replies than a round (``async``, small buffers), because single votes would keep flipping
            bits near a tie, else 0.
        preset: what is not given: as ``printed`` in the paper, eq 8 with its misprint, or ``ours``; no code is public.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "printed": {
            "branch_renorm": False,
            "eq8": "printed",
            "adv_g": "literal",
            "hysteresis": 0.0,
            "training.optimizer": "adam",
            "training.learning_rate": 0.005,
            "training.weight_decay": 0.0,
            "training.schedule": "constant",
            "training.warmup_rounds": 0,
            "training.local_epochs": 5,
        },
        "ours": {},
    }

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **fedavg.AnchoredOptions.OF,
        "discriminator": ("lambda_d", "eq8", "adv_g", "adv_input", "disc_hidden", "share_disc"),
        "proto_triplet|discriminator": ("proto_counts", "hysteresis"),
    }

    weighting: Literal["samples", "uniform"] = "uniform"
    proto_triplet: bool = True
    discriminator: bool = True
    lambda_d: NonNegative = 0.1
    eq8: Eq8 = "corrected"
    adv_g: Adversarial = "nonsat"
    adv_input: Literal["ste", "relaxed"] = "ste"
    disc_hidden: Width = 128
    share_disc: bool = True
    proto_counts: bool = True
    hysteresis: NonNegative | None = None
    preset: Literal["printed", "ours"] | None = None


def binary_prototypes(means: Tensor, valid: Tensor, old: Tensor, hysteresis: float = 0.0) -> Tensor:
    """The sign of the mean of the silos' class means (eq 6), [C, r] in {-1, 1}.

    Args:
        means: [C, r] over the silos that hold the class. The printed sum also has a zero vector for each silo without
            the class, which changes no sign.
        valid: bool [C], whether any silo holds the class; other classes keep their old prototype.
        old: [C, r] in {-1, 1}; 0 for classes without a prototype.
        hysteresis: bits whose absolute mean is at most this keep their old value.
    """
    steady = (means.abs() <= hysteresis) & (old != 0) if hysteresis > 0 else torch.zeros_like(old, dtype=torch.bool)
    return torch.where(valid[:, None] & ~steady, signs(means).to(old.dtype), old)


def prototype_triplets(
    samples: Samples, prototypes: Tensor, valid: Tensor, options: triplet.Options, generator: np.random.Generator
) -> Tensor:
    """Ranking loss of triplets: a code, a prototype of its class and one of another class (eq 3).

    Args:
        samples: a batch.
        prototypes: [C, r].
        valid: bool [C], True for classes with a prototype.
        options: distance, margin, mining.
        generator: draws one positive and one negative class per anchor.
    """
    members = samples.labels > 0
    return triplet.ranking_loss(samples.codes, prototypes, members & valid, ~members & valid, options, generator)


class FedHap(FederatedProtocol):
    """FedHAP, see the module docstring."""

    Options: ClassVar[type[Any]] = FedHapOptions
    options: FedHapOptions

    def __init__(self, options: FedHapOptions, context: Context) -> None:
        super().__init__(options, context)
        self.fedavg = fedavg.AnchoredFedAvg(options, context)
        self.prototypes = options.proto_triplet or options.discriminator
        if self.prototypes and not context.label_names:
            raise InputError("protocol.name", "fedhap", "a method that needs no labels: the data set has no labels")
        # SHDCH trains on two label levels; the lower one defines relevance.
        self.columns = fine_columns(context.label_names)
        self.layout = discriminator_layout(context.dim, len(self.columns), options.disc_hidden)
        default = 0.0 if context.whole_rounds else _STEADY
        self.hysteresis = default if options.hysteresis is None else options.hysteresis
        triplets = context.objective.base == "triplet"
        # The other bases' losses are means, so eq 3 is one beside them.
        self.triplets = objectives.options_of(context.objective) if triplets else triplet.Options(reduce="mean")

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """An item's image and caption both count in its class's mean code."""
        return Traits(counts_items_twice=True)

    @property
    def _shares_discriminator(self) -> bool:
        return self.options.discriminator and self.options.share_disc

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """As FedAvg, with class means and the discriminator's update if these are used."""
        more: set[type[Payload]] = {ClassPrototypes} if self.prototypes else set()
        if self._shares_discriminator:
            more.add(DiscriminatorDelta)
        return self.fedavg.uploads(silo) | more

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the class means and the discriminator of a reply.

        Raises:
            RemoteWireError: class means or a discriminator of a wrong shape, or a class mean longer than any code.
        """
        longest = class_prototypes.longest_code(self.context)
        for payload in payloads:
            if isinstance(payload, ClassPrototypes):
                class_prototypes.check_rows(payload, len(self.columns), self.context.dim, longest)
            elif isinstance(payload, DiscriminatorDelta) and (
                payload.layout_digest != self.layout.digest or payload.buffer.size != self.layout.size
            ):
                raise RemoteWireError("layout", "a discriminator of another layout")

    def initial(self, theta: Tensor) -> State:
        """The initial model, empty tables of votes and prototypes, and the initial discriminator."""
        state = self.fedavg.initial(theta)
        tensors = dict(state.tensors)
        if self.prototypes:
            classes, bits = len(self.columns), self.context.dim
            tensors |= class_prototypes.initial(len(self.context.silos), classes, bits)
            tensors[_CODES] = torch.zeros(classes, bits)
        if self._shares_discriminator:
            tensors[_CHANGE] = torch.zeros(self.layout.size)
        return replace(state, tensors=tensors)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """As FedAvg, with binary prototypes (count 1 if valid) and the discriminator's change since initialisation."""
        payloads = self.fedavg.task(state, silo)
        if self.prototypes:
            valid = state.tensors[class_prototypes.VALID]
            payloads = (*payloads, class_prototypes.payload(state.tensors[_CODES], valid))
        if self._shares_discriminator:
            payloads = (*payloads, DiscriminatorDelta(self.layout.digest, state.tensors[_CHANGE].numpy(), 0))
        return payloads

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs with FedHAP's terms; the discriminator steps before each step of the network."""
        if not self.prototypes:
            return self.fedavg.trained(local, task)
        start = self._discriminator(local, task) if self.options.discriminator else None
        terms = Terms(self, local, task, start)
        trained = self.fedavg.trained(local, task, extra=terms if terms.valid.any() else None)
        payloads, state = (*trained.payloads, self._class_means(local, task)), trained.state
        if start is not None and terms.discriminator is not None:
            end = terms.discriminator.theta.cpu()
            if self.options.share_disc:
                change = (end - start).numpy()
                payloads = (*payloads, DiscriminatorDelta(self.layout.digest, change, len(local.dataset)))
            else:
                state = {**state, _OWN: end}
        return replace(trained, payloads=payloads, state=state)

    def labels_of(self, local: Local, rows: training.I64) -> Tensor:
        """Classes of the given items, float32 multi-hot [B, C]."""
        return training.labels_of(local, rows)[:, self.columns]

    def _discriminator(self, local: Local, task: Task) -> Tensor:
        """The discriminator at the start of a task, float32 [Q]: the shared one, or the silo's personal one."""
        initial = initial_discriminator(self.layout, self.context.seed)
        if self.options.share_disc:
            return initial + as_tensor(take(task.payloads, DiscriminatorDelta).buffer)
        return local.state.get(_OWN, initial)

    def _class_means(self, local: Local, task: Task) -> ClassPrototypes:
        """The silo's vote (eq 5): the mean code of each class over its modalities, with one caption per item."""
        caption = training.choose_captions(local, training.generator_of(self.context, local, task, "class prototypes"))
        size, step = len(local.dataset), self.context.training.batch_size
        with torch.no_grad():
            parts = [
                samples_of(*training.outputs(local, rows, caption), self.labels_of(local, rows))
                for rows in np.split(np.arange(size), range(step, size, step))
            ]
        codes, labels = (torch.cat([getattr(part, name) for part in parts]).cpu() for name in ("codes", "labels"))
        means, counts = class_prototypes.class_means(codes.double(), labels)
        modality = "both" if local.silo.paired else "image" if local.silo.image else "text"
        return class_prototypes.payload(means, counts if self.options.proto_counts else counts.clamp(max=1), modality)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Average networks and discriminators; compute the prototypes from the table of votes."""
        merged = self.fedavg.merge(state, replies, round_)
        tensors = dict(merged.state.tensors)
        if self.prototypes:
            votes = [(reply, take(reply.payloads, ClassPrototypes)) for reply in replies]
            tensors |= class_prototypes.updated(tensors, votes, round_, max_age=self.context.max_age, weighted=False)
            means, valid = tensors[class_prototypes.GLOBAL], tensors[class_prototypes.VALID]
            tensors[_CODES] = binary_prototypes(means, valid, tensors[_CODES], self.hysteresis)
        if self._shares_discriminator:
            tensors[_CHANGE] = self._merged_discriminator(state.tensors[_CHANGE], replies)
        return replace(merged, state=replace(merged.state, tensors=tensors))

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """Networks, discriminators and class means as secure sums; a prototype's votes are those of this round."""
        layout, weighted = self.sum_layout(), self.fedavg.weigh(state, replies, round_)
        rows = {**weighted.rows, **dict.fromkeys((kind.KIND for kind in layout.changes), weighted.weights)}
        if self.prototypes:
            rows |= aggregation.row_weights(replies, layout, ClassPrototypes, weighted=False)

        def finish(added: Added) -> MergeResult:
            merged = weighted.finish(added)
            tensors = dict(merged.state.tensors)
            if self.prototypes:
                tensors |= class_prototypes.updated_by_sum(tensors, added.means, layout)
                means, valid = tensors[class_prototypes.GLOBAL], tensors[class_prototypes.VALID]
                tensors[_CODES] = binary_prototypes(means, valid, tensors[_CODES], self.hysteresis)
            if (step := added.means.get(DiscriminatorDelta.KIND)) is not None:
                tensors[_CHANGE] = (tensors[_CHANGE].double() + step).float()
            return replace(merged, state=replace(merged.state, tensors=tensors))

        return replace(weighted, rows=rows, finish=finish)

    def sum_layout(self) -> SumLayout:
        """The update, the discriminator's and the class means."""
        rows = class_prototypes.summed(self.context, len(self.columns), class_prototypes.longest_code(self.context))
        changes: Mapping[type[Payload], int] = (
            {DiscriminatorDelta: self.layout.size} if self._shares_discriminator else {}
        )
        layout = self.fedavg.sum_layout()
        return replace(layout, changes=changes, rows={**layout.rows, **(rows if self.prototypes else {})})

    def mix_state(self, before: State, after: State, rate: float) -> State:
        """The discriminator moves by the same fraction as the networks."""
        if not self._shares_discriminator:
            return after
        change = mixed(before.tensors[_CHANGE], after.tensors[_CHANGE], rate)
        return replace(after, tensors={**after.tensors, _CHANGE: change})

    def _merged_discriminator(self, change: Tensor, replies: Sequence[Update]) -> Tensor:
        updates = [_as_delta(reply) for reply in replies]
        weights = self.fedavg.weights(updates)
        step = aggregation.weighted_sum([update.delta for update in updates], weights)
        return (change.double() + step).float()


class Terms:
    """FedHAP's loss terms in one task of one silo; called in each batch's main step.

    Args:
        method: options and context.
        local: the silo.
        task: with the prototypes.
        start: initial discriminator float32 [Q]; None without one.
    """

    def __init__(self, method: FedHap, local: Local, task: Task, start: Tensor | None) -> None:
        device = local.model.flat.device
        received = take(task.payloads, ClassPrototypes)
        self.method, self.options, self.triplets, self.local = method, method.options, method.triplets, local
        self.prototypes = as_tensor(received.prototypes).to(device)
        self.valid = as_tensor(received.counts).to(device) > 0
        self.generator = training.generator_of(method.context, local, task, "fedhap")
        self.discriminator = None
        if start is not None:
            one_hot = torch.eye(len(self.valid), device=device)[self.valid]
            self.discriminator = Discriminator(
                start.to(device),
                method.layout,
                self.prototypes[self.valid],
                one_hot,
                method.context.training,
                task.learning_rate,
            )

    def __call__(self, step: training.Step, image: Out | None, text: Out | None) -> Tensor:
        """Eq 3 plus lambda_d times the adversarial loss of a batch, after a step of the discriminator."""
        samples = samples_of(image, text, self.method.labels_of(self.local, step.rows))
        terms: list[Tensor] = []
        if self.options.proto_triplet:
            terms.append(prototype_triplets(samples, self.prototypes, self.valid, self.triplets, self.generator))
        if self.discriminator is not None:
            options, labels = self.options, label_vectors(samples.labels)
            self.discriminator.step(signs(samples.codes.detach()), labels, options.eq8)
            seen = straight_through(samples.codes) if options.adv_input == "ste" else samples.codes
            terms.append(options.lambda_d * self.discriminator.fooled(seen, labels, options.adv_g, options.eq8))
        return torch.stack(terms).sum()


def _as_delta(reply: Update) -> Update:
    """The reply with its discriminator's update in place of the model's."""
    payload = take(reply.payloads, DiscriminatorDelta)
    return replace(reply, payloads=(Delta(payload.layout_digest, payload.buffer, payload.n_samples),))


PROTOCOL = FedHap
