"""FedCola: each kind of silo has its own model, and silos of one modality share layers (Sun et al., ECCV 2024).

The coordinator keeps three models: of the silos with both modalities, which is evaluated, of those with images only and
of those with captions only. Two things connect them (arXiv 2404.12467; coefficients and gates are those of the released
code, imguangyu/FedCola, as we had no full text of the paper):

- Complementary local training. A silo that lacks a modality also receives the other tower W', of the model of the silos
  that have only that modality. It trains W + s W' in place of each weight W, with a gate s per layer that starts at 0
  in each task, and sends the change of W + s W' (``CrossModalReparamLinear``, ``upload``).
- Collaborative aggregation. A model's shared layers take the updates of all silos that have the modality, its other
  layers those of its own kind of silos alone. With w_k = n_k / sum_j n_j, the sum of the updates of a modality v is
  divided by sum_j w_j over the silos j that the model can learn from: all in the model of both modalities, those that
  have v in the other two. With ``compensation`` this holds for the layers that are not shared too, so that they move
  less, the fewer silos train them; without it their updates are averaged (``_aggregate``).

Departures. The paper trains whole transformers and shares their attention layers; here the encoders are frozen, so the
adapters stand for the attention layers, and the heads for what each kind of silo has for itself. Its silos with one
modality classify their own labelled data; here they are anchored as in ``fedavg``. Layers whose shapes differ between
the towers have no gate. The code moves a model towards the silos' parameters one after the other; here all updates are
added at once, as in the paper's w + dw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError
from fedmq.federation.protocol import (
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
    take,
)
from fedmq.federation.updates import mixed
from fedmq.models.optimiser import FusedOptimiser
from fedmq.models.two_tower import BRANCHES, TwoTower
from fedmq.wire.payloads import Loss, Model, Payload
from protocols import fedavg
from protocols.parts import aggregation, training
from protocols.parts.anchoring import AnchoringOptions
from protocols.parts.losses import TauOptions, refuse_other_bases

#: The models of single-modality silos, float32 [P]: the image tower of one, the text tower of the other.
SINGLE = "single_modality_models"


@dataclass(frozen=True)
class FedColaOptions(AnchoringOptions, TauOptions):
    """Options of FedCola, in addition to anchoring.

    Args:
        complement: weights W' of complementary training: ``trained`` like W, ``frozen``, or ``none``, which trains W.
        shared: layers that silos of one modality share: the ``adapters``, ``all``, or ``none``.
        compensation: divide the updates of layers that are not shared by the weight of all silos that the model can
            learn from; if false, average them over the silos that train these layers.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "single_modality=anchor": (*AnchoringOptions.OF["single_modality=anchor"], "complement")
    }

    complement: Literal["trained", "frozen", "none"] = "trained"
    shared: Literal["adapters", "all", "none"] = "adapters"
    compensation: bool = True


def coefficients(
    weights: Tensor, has: Tensor, paired: Tensor, *, single: bool, shared: bool, compensation: bool
) -> Tensor:
    """Weights of the silos' updates in one model's layers of one modality, float64 [M]; all 0 if none counts (FedCola).

    Args:
        weights: w_k float64 [M] of the replies.
        has: bool [M], which silos have the modality.
        paired: bool [M], which silos have both.
        single: for the model of the silos that have only this modality, otherwise for that of both modalities.
        shared: for layers that silos of one modality share.
        compensation: see :class:`FedColaOptions`.
    """
    trains = has if shared else has & ~paired if single else paired
    learns_from = has if single else torch.ones_like(has)
    reached = learns_from if shared or compensation else trains
    total = weights[reached].sum()
    return weights * trains / total if float(total) > 0.0 else torch.zeros_like(weights)


class Complemented(training.Work):
    """A base loss on the weights W + s W' of one tower, which the model holds merged (``CrossModalReparamLinear``).

    With G the gradient of W + s W', the gradients are G of W, <G, W'> of s and s G of W'.

    Args:
        work: the base loss.
        model: the silo's model; the tower of the modality that the silo lacks has W'.
        silo: the silo, which lacks a modality.
        context: context of the run.
        rate: learning rate.
        frozen: do not train W'.
    """

    def __init__(
        self, work: training.Work, model: TwoTower, silo: SiloFacts, context: Context, rate: float, *, frozen: bool
    ) -> None:
        own, other = (BRANCHES[name] for name in (MODALITIES if silo.image else MODALITIES[::-1]))
        layout, self.work = context.layout, work
        names = [entry.name for entry in layout.entries if entry.name.startswith(own)]
        partner = {name: other + name.removeprefix(own) for name in names if name.endswith(".weight")}
        gated = [
            name
            for name, its in partner.items()
            if its in layout.by_name and layout.by_name[its].shape == layout.by_name[name].shape
        ]
        self.merged = [model.get_parameter(name) for name in gated]
        self.plain = [model.get_parameter(name) for name in names if name not in gated]
        self.weights = [layer.detach().clone() for layer in self.merged]
        self.others = [model.get_parameter(partner[name]).detach().clone() for name in gated]
        self.gates = [layer.new_zeros(()) for layer in self.weights]
        trained = [*self.plain, *self.weights, *self.gates, *([] if frozen else self.others)]
        self.optimiser = FusedOptimiser(trained, context.training, rate)

    def steps(self, epoch: int, generator: np.random.Generator) -> Iterator[training.Step]:
        """The steps of the base loss; W, s and W' are updated after each."""
        for step in self.work.steps(epoch, generator):
            yield replace(step, trains=())
            self._step()

    @torch.no_grad()
    def _step(self) -> None:
        layers = list(zip(self.merged, self.weights, self.gates, self.others, strict=True))
        for merged, weight, gate, other in layers:
            gradient = torch.zeros_like(weight) if merged.grad is None else merged.grad
            weight.grad, gate.grad, other.grad = gradient, (gradient * other).sum(), gate * gradient
        self.optimiser.step()
        for merged, weight, gate, other in layers:
            merged.copy_(weight + gate * other)


class FedCola(FederatedProtocol):
    """FedCola, see the module docstring."""

    Options: ClassVar[type[Any]] = FedColaOptions
    options: FedColaOptions

    def __init__(self, options: FedColaOptions, context: Context) -> None:
        refuse_other_bases("fedcola", context)
        super().__init__(options, context)
        if "shared" in aggregation.branch_slices(context.layout):
            raise InputError("backbone.adapter", "mma", "bottleneck, as fedcola has a model of each modality")
        anchored = {name: getattr(options, name) for name in ("single_modality", "lambda_anc", "ema", "proto_unit")}
        self.fedavg = fedavg.AnchoredFedAvg(fedavg.AnchoredOptions(tau=options.tau, **anchored), context)

    @classmethod
    def traits_of(cls, options: FedColaOptions) -> Traits:
        """Silos of one modality have another model than those of both."""
        return Traits(model_per_silo=True)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss and the silo's prototypes."""
        return self.fedavg.uploads(silo)

    def initial(self, theta: Tensor) -> State:
        """Three equal models."""
        state = self.fedavg.initial(theta)
        return replace(state, tensors={**state.tensors, SINGLE: theta.clone()})

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model of the silo's kind, with the other tower that complements it, and the global prototypes."""
        own = state if silo.paired else replace(state, theta=state.tensors[SINGLE])
        return self.fedavg.task(own, silo)

    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs; a silo that lacks a modality trains complemented weights."""
        work = None if local.silo.paired or self.options.complement == "none" else self.fedavg.work(local, task)
        if work is None:
            return self.fedavg.train(local, task)
        base = training.load_model(local, take(task.payloads, Model).buffer)
        frozen = self.options.complement == "frozen"
        work = Complemented(work, local.model, local.silo, self.context, task.learning_rate, frozen=frozen)
        outcome = training.train_epochs(local, self.context, task, base, work, trains=lambda _: {})
        update = training.delta_payload(self.context, outcome, len(local.dataset))
        prototypes = self.fedavg.anchoring.report(local, task)
        return Trained((update, Loss(outcome.loss), *prototypes), {}, outcome.loss)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Collaborative aggregation of the three models, and FedAvg's of the prototypes."""
        weights = self.fedavg.weights(replies)
        tensors = dict(self.fedavg.anchoring.averaged(state.tensors, replies, weights))
        tensors[SINGLE] = self._merged(state.tensors[SINGLE], replies, weights, single=True)
        return MergeResult(State(self._merged(state.theta, replies, weights, single=False), tensors, state.values))

    def mix_state(self, before: State, after: State, rate: float) -> State:
        """The models of single-modality silos move by the same fraction."""
        single = mixed(before.tensors[SINGLE], after.tensors[SINGLE], rate)
        return replace(after, tensors={**after.tensors, SINGLE: single})

    def _merged(self, theta: Tensor, replies: Sequence[Update], weights: Tensor, *, single: bool) -> Tensor:
        """The model of both modalities, or those of one, after a merge [P]."""
        paired = torch.tensor([reply.silo.paired for reply in replies])
        step = torch.zeros_like(theta, dtype=torch.float64)
        for owner, part in aggregation.slices_by(self.context.layout, _group).items():
            branch, _, kind = owner.partition(" ")
            has = torch.tensor([aggregation.owns(reply.silo, branch) for reply in replies])
            shared = self.options.shared in ("all", kind)
            row = coefficients(
                weights, has, paired, single=single, shared=shared, compensation=self.options.compensation
            )
            aggregation.add_weighted(step[part], [reply.delta[part] for reply in replies], row)
        return aggregation.stepped(theta, step)


def _group(name: str) -> str:
    """The branch of a layer and whether it is an adapter: ``visual adapters``, ``text other``."""
    branch = name.partition(".")[0]
    return f"{branch} {'adapters' if '.adapters.' in name else 'other'}"


PROTOCOL = FedCola
