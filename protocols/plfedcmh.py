"""PLFedCMH: personal hashing models, mixed layer by layer by hypernetworks at the coordinator (Liu et al., 2022).

Every silo downloads a personal mixture: each layer is a weighted mean of all silos' last layers, with weights from a
small hypernetwork per silo and branch. The silo trains its base loss with two terms towards the global class
prototypes; its update also trains its hypernetwork. Personal models are evaluated; the plain average of the
updates moves the global model.

A stale update is applied to the state in which its mixture was sent: the silo's model is that mixture plus the update,
and the hypernetwork's gradient is computed in that state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import NonNegative
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.federation.protocol import (
    Context,
    Encoders,
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
from fedmq.models.two_tower import Out
from fedmq.seeds import torch_generator
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import ClassPrototypes, Delta, Loss, Model, Payload
from protocols import fedavg
from protocols.parts import aggregation, class_prototypes, personal_model, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.router import views

_MODELS = "table_models"
_VERSIONS = "table_model_versions"
#: bool [K, branches]: branches of each silo's model as of its last reply; faults may change them.
_OWNERS = "table_model_owners"
#: Width of a hypernetwork's embedding and hidden layers, and the number of hidden layers.
WIDTH = 32
HIDDEN = 3


@dataclass(frozen=True)
class PlFedCmhOptions:
    """Options of PLFedCMH; defaults follow the released code, except ``hn_sign`` and ``measured``.

    The released code's local loss is ``objective: {base: shdch, levels: 1, beta: 0.5}``.

    Args:
        beta: weight of the term on inner products of codes and class prototypes.
        eta: weight of the distance between features and class prototypes.
        hn_rate: learning rate of the hypernetworks.
        hn_sign: ``descent`` moves a mixture in the direction of the silo's update; the released ``code`` moves it in
            the opposite direction.
        branch_renorm: average each branch of the global model over the silos that trained it; if false, use the plain
            sum.
        weighting: weights of the updates in the global model: ``uniform``, as in the released code, or by ``samples``.
        measured: personal model to evaluate: the silo's current ``mixture``, or its model after its last training
            (``trained``), as in the released code.
    """

    beta: NonNegative = 0.5
    eta: NonNegative = 1e5
    hn_rate: NonNegative = 1e-3
    hn_sign: Literal["descent", "code"] = "descent"
    branch_renorm: bool = True
    weighting: Literal["samples", "uniform"] = "uniform"
    measured: Literal["mixture", "trained"] = "mixture"


def prototype_loss(
    codes: Tensor, features: Tensor, labels: Tensor, prototypes: Tensor, valid: Tensor, options: PlFedCmhOptions
) -> Tensor:
    """Prototype terms beta ||r L - H P^T||^2 + eta MSE(P_y, f) of one modality's batch, before division by B n_k.

    The target of a sample with several classes is the mean of their prototypes; without any its distance is 0.

    Args:
        codes: H [B, r].
        features: f [B, r], the outputs before tanh.
        labels: multi-hot [B, C].
        prototypes: P [C, r]; rows of classes without a prototype are zero in a run.
        valid: bool [C], True for classes with a prototype.
        options: beta and eta.
    """
    products = (codes.shape[1] * labels - codes @ prototypes.T).square().sum()
    members = labels * valid
    counts = members.sum(1, keepdim=True)
    target = torch.where(counts > 0, members @ prototypes / counts.clamp(min=1), features)
    return options.beta * products + options.eta * (target - features).square().mean()


# ------------------------------------------------------------------------------------------------------ hypernetworks
# A hypernetwork is an embedding, three ReLU layers and one linear layer per block of the model, all in one flat buffer.
# Its gradient comes from the silo's update of the mixed model it received.
def blocks(layout: Layout, part: slice) -> dict[str, slice]:
    """Blocks of a branch as ranges of the model's flat buffer; a block is one layer's weight and bias."""
    layers = aggregation.slices_by(layout, lambda name: name.rpartition(".")[0])
    return {owner: layer for owner, layer in layers.items() if part.start <= layer.start < part.stop}


def network_layout(names: Sequence[str], silos: int) -> Layout:
    """Names and shapes of the parameters of one network for K silos, of the blocks' names."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (WIDTH,)}
    for index in range(HIDDEN):
        shapes |= {f"hidden.{index}.weight": (WIDTH, WIDTH), f"hidden.{index}.bias": (WIDTH,)}
    for name in names:
        shapes |= {f"mix.{name}.weight": (silos, WIDTH), f"mix.{name}.bias": (silos,)}
    return Layout.of((name, shape, "float32") for name, shape in shapes.items())


def initial_network(shape: Layout, generator: torch.Generator) -> Tensor:
    """Parameters [H]: mixing weights uniform in [0, 1], hidden layers in +-1/sqrt(fan in), a normal embedding."""
    flat = torch.zeros(shape.size)
    for name, view in views(flat, shape).items():
        if name == "embedding":
            view.normal_(generator=generator)
        elif name.startswith("mix.") and name.endswith(".weight"):
            view.uniform_(0.0, 1.0, generator=generator)
        elif name.startswith("hidden."):
            bound = 1 / math.sqrt(WIDTH)
            view.uniform_(-bound, bound, generator=generator)
    return flat


def mixing_scores(flat: Tensor, shape: Layout, names: Sequence[str]) -> Tensor:
    """Unnormalised mixing weights a [blocks, K], at least 0."""
    p = views(flat, shape)
    x = p["embedding"]
    for index in range(HIDDEN):
        x = functional.relu(functional.linear(x, p[f"hidden.{index}.weight"], p[f"hidden.{index}.bias"]))
    return torch.stack(
        [functional.relu(functional.linear(x, p[f"mix.{name}.weight"], p[f"mix.{name}.bias"])) for name in names]
    )


def mixing_weights(raw: Tensor, allowed: Tensor) -> Tensor:
    """Scores [blocks, K] normalised to sum to 1 over the silos ``allowed``, bool [K]; equal weights if all are zero.

    A block's scores are all zero once its ReLUs are dead; without the equal weights the silo's model would become zero.
    """
    kept = raw * allowed
    total = kept.sum(1, keepdim=True)
    equal = (allowed / allowed.sum()).to(raw.dtype).expand_as(raw)
    return torch.where(total > 0, kept / total.clamp(min=torch.finfo(raw.dtype).tiny), equal)


def mixed_blocks(weights: Tensor, models: Tensor, parts: Mapping[str, slice]) -> dict[str, Tensor]:
    """Personal blocks sum_j w_bj theta_j,b.

    Args:
        weights: [blocks, K] of :func:`mixing_weights`.
        models: [K, P] the last model of every silo.
        parts: each block's range of P.
    """
    return {name: weights[row] @ models[:, part] for row, (name, part) in enumerate(parts.items())}


def network_gradient(
    flat: Tensor, shape: Layout, parts: Mapping[str, slice], *, models: Tensor, allowed: Tensor, direction: Tensor
) -> Tensor:
    """The network's gradient (d theta~ / d phi)^T g [H]; zero where every ReLU is dead.

    Args:
        flat: phi [H].
        shape: its layout.
        parts: the branch's blocks.
        models: [K, P] the mixed models.
        allowed: bool [K], silos that may be mixed.
        direction: g [P]; the negative of the silo's update for descent.
    """
    # <g, theta~> depends on phi only through the mixing weights, so one number per block and silo suffices.
    along = torch.stack([models[:, part] @ direction[part] for part in parts.values()])
    values = flat.clone().requires_grad_()
    total = (mixing_weights(mixing_scores(values, shape, list(parts)), allowed) * along).sum()
    if not total.requires_grad:
        return torch.zeros_like(flat)
    (result,) = torch.autograd.grad(total, values)
    return result


class PlFedCmh(FederatedProtocol):
    """PLFedCMH, see the module docstring."""

    Options: ClassVar[type[Any]] = PlFedCmhOptions
    options: PlFedCmhOptions

    def __init__(self, options: PlFedCmhOptions, context: Context) -> None:
        if context.objective.base == "info_nce" or not context.label_names:
            raise InputError("objective.base", context.objective.base, "any other base, and data with labels")
        super().__init__(options, context)
        self.columns = fine_columns(context.label_names)
        self.fedavg = fedavg.FedAvg(
            fedavg.FedAvgOptions(branch_renorm=options.branch_renorm, weighting=options.weighting), context
        )
        self.parts = {name: blocks(context.layout, part) for name, part in self.fedavg.branches.items()}
        self.shapes = {name: network_layout(list(parts), len(context.silos)) for name, parts in self.parts.items()}

    @classmethod
    def traits_of(cls, options: PlFedCmhOptions) -> Traits:
        """Every silo has a personal model, and is sent a mixture of its own, whose weights are learned."""
        return Traits(personalised=True, model_per_silo=True, weighs_single_silos=False)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of the mixture, the loss, and class prototypes."""
        return frozenset({Delta, Loss, ClassPrototypes})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the prototypes' shape, and that no row is longer than a mean of outputs before tanh can be.

        Raises:
            RemoteWireError: wrong number of rows or columns, or a row that is too long.
        """
        longest = class_prototypes.longest_output(self.context.dim)
        class_prototypes.check_rows(take(payloads, ClassPrototypes), 2 * len(self.columns), self.context.dim, longest)

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs with the prototype terms, then the class prototypes by the trained model."""
        shared = class_prototypes.read_download(take(task.payloads, ClassPrototypes), local.model.flat.device)
        labels = training.labels_of(local, np.arange(len(local.dataset)))[:, self.columns]

        def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            batch = labels[torch.from_numpy(step.rows).to(labels.device)]
            by_modality = ((image, shared.image, shared.image_valid), (text, shared.text, shared.text_valid))
            parts = [
                prototype_loss(out.code, out.raw, batch, prototypes, valid, self.options)
                for out, prototypes, valid in by_modality
                if out is not None and bool(valid.any())
            ]
            return torch.stack(parts).sum() / (len(step.rows) * len(local.dataset)) if parts else None

        trained = self.fedavg.trained(local, task, extra=extra)
        kept = personal_model.kept(local) if self.options.measured == "trained" else {}
        payloads = (*trained.payloads, self._own_prototypes(local, task, labels))
        return replace(trained, payloads=payloads, state={**trained.state, **kept})

    def _own_prototypes(self, local: Local, task: Task, labels: Tensor) -> ClassPrototypes:
        """Class means of the outputs before tanh, one caption per item; count 0 for a modality the silo lacks."""
        caption = training.choose_captions(local, training.generator_of(self.context, local, task, "prototypes"))
        features = training.outputs_of_all(local, caption, lambda out: out.raw)
        return class_prototypes.of_features(features, labels.cpu(), self.context.dim)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's current mixture, or its model after its last training."""
        mixture = take(payloads, Model).buffer
        trained = local.state.get(personal_model.OWN) if self.options.measured == "trained" else None
        return personal_model.encoders_of(local, mixture if trained is None else trained)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model, empty tables of models and prototypes, and initial hypernetworks."""
        count = len(self.context.silos)
        tensors = {
            _MODELS: torch.zeros(count, len(theta)),
            _VERSIONS: torch.full((count,), -1, dtype=torch.int64),
            _OWNERS: torch.zeros(count, len(self.parts), dtype=torch.bool),
            **class_prototypes.initial(count, 2 * len(self.columns), self.context.dim),
        }
        for name, shape in self.shapes.items():
            tensors[f"hyper_{name}"] = torch.stack(
                [
                    initial_network(shape, torch_generator(self.context.seed, "plfedcmh", name, silo.name))
                    for silo in self.context.silos
                ]
            )
        return State(theta, tensors)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The silo's mixture and the global prototypes."""
        model = Model(layout_digest=self.context.layout.digest, buffer=self.mixture(state, silo).numpy())
        return (model, class_prototypes.download(state.tensors))

    def mixture(self, state: State, silo: SiloFacts) -> Tensor:
        """The silo's mixture float32 [P]; branches that no silo has trained yet are the global model's."""
        theta = state.theta.clone()
        for name, parts in self.parts.items():
            allowed = self._known(state, name)
            if not bool(allowed.any()):
                continue
            scores = mixing_scores(state.tensors[f"hyper_{name}"][silo.index], self.shapes[name], list(parts))
            weights = mixing_weights(scores, allowed)
            for block, values in mixed_blocks(weights, state.tensors[_MODELS], parts).items():
                theta[parts[block]] = values
        return theta

    def _known(self, state: State, name: str) -> Tensor:
        """Silos whose branch can be mixed, bool [K]: they have the branch and have trained."""
        return state.tensors[_OWNERS][:, list(self.parts).index(name)] & (state.tensors[_VERSIONS] >= 0)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Update each reporter's model and hypernetworks; average the prototypes and the global model."""
        merged = self.fedavg.merge(State(state.theta), replies, round_)
        values: dict[str, list[Tensor]] = {_MODELS: [], _OWNERS: []}
        networks = {name: state.tensors[f"hyper_{name}"].clone() for name in self.parts}
        for reply in replies:
            update, sent = as_tensor(take(reply.payloads, Delta).buffer), reply.base or state
            for name in self.parts:
                if aggregation.owns(reply.silo, name):
                    networks[name][reply.silo.index] -= self._step(sent, reply, name, update)
            values[_MODELS].append(self.mixture(sent, reply.silo) + update)
            values[_OWNERS].append(torch.tensor([aggregation.owns(reply.silo, name) for name in self.parts]))
        table = aggregation.updated_table(state.tensors, replies, _VERSIONS, values)
        prototypes = class_prototypes.updated(
            state.tensors,
            [(reply, class_prototypes.rows_of_owned_modalities(reply)) for reply in replies],
            round_,
            max_age=self.context.max_age,
            weighted=False,
        )
        hyper = {f"hyper_{name}": network for name, network in networks.items()}
        tensors = {**table, **hyper, **prototypes}
        return MergeResult(State(merged.state.theta, tensors, state.values), merged.log)

    def _step(self, sent: State, reply: Update, name: str, update: Tensor) -> Tensor:
        """Step [H] to subtract from a reporter's computed in the state in which its mixture was sent."""
        network = sent.tensors[f"hyper_{name}"][reply.silo.index]
        allowed = self._known(sent, name)
        if not bool(allowed.any()):
            return torch.zeros_like(network)  # the sent model was not mixed, as no silo had trained
        rate = self.options.hn_rate * reply.damping
        return rate * network_gradient(
            network,
            self.shapes[name],
            self.parts[name],
            models=sent.tensors[_MODELS],
            allowed=allowed,
            direction=-update if self.options.hn_sign == "descent" else update,
        )


PROTOCOL = PlFedCmh
