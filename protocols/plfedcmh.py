"""PLFedCMH: personal hashing models mixed layer by layer by a hypernetwork at the server (Liu et al. 2022).

Every silo is sent a model of its own: each layer a weighted mean of all silos' last ones, the weights from a small
network per silo and branch. It trains its base loss with two terms towards the global class prototypes, and its update
trains its network in turn. Evaluated by each silo's own model; the global model is the plain average of the updates.

A stale update is seen with what the silo was sent: its model is that mixture and its update, and the hypernetwork's
gradient is that of the state the mixture was made in.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from fedmq.seeds import torch_generator
from fedmq.wire.messages import ClassPrototypes, Delta, Loss, Model, Payload
from protocols import _aggregation, _class_prototypes, _hypernetwork, _personal_model, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._options import check

_MODELS = "table_models"
_VERSIONS = "table_model_versions"
#: bool [K, branches]: which branches each silo's model was trained in.
_OWNERS = "table_model_owners"


@dataclass(frozen=True)
class PlFedCmhOptions:
    """Options of PLFedCMH; defaults are its released code's, except for the direction of the hypernetworks' steps.

    The code's local loss is ``objective: {base: shdch, levels: 1, beta: 0.5}``.

    Args:
        beta: weight of the codes' products with the class prototypes.
        eta: weight of the features' distance to the class prototypes.
        hn_rate: learning rate of the hypernetworks.
        hn_sign: ``descent`` moves a mixture where the silo's update points; the released ``code`` moves it away.
        branch_renorm: each branch of the global model is averaged over the silos that trained it.
        weighting: of the global model's average, ``uniform`` as the released code, or by ``samples``.
        measured: a silo by the ``mixture`` that a task of now would bring, or, as the released code, by its model as
            its last training left it, ``trained``.
    """

    beta: float = 0.5
    eta: float = 1e5
    hn_rate: float = 1e-3
    hn_sign: Literal["descent", "code"] = "descent"
    branch_renorm: bool = True
    weighting: Literal["samples", "uniform"] = "uniform"
    measured: Literal["mixture", "trained"] = "mixture"

    def __post_init__(self) -> None:
        check("beta", self.beta, 0.0)
        check("eta", self.eta, 0.0)
        check("hn_rate", self.hn_rate, 0.0)


def prototype_loss(
    codes: Tensor, features: Tensor, labels: Tensor, prototypes: Tensor, valid: Tensor, options: PlFedCmhOptions
) -> Tensor:
    """Prototype terms beta ||r L - H P^T||^2 + eta MSE(P_y, f) of one modality's batch, before division by B n_k.

    A sample of several classes is drawn to the mean of its classes' prototypes; one whose classes have none counts 0.

    Args:
        codes: H [B, r].
        features: f [B, r], the outputs before tanh.
        labels: multi-hot [B, C].
        prototypes: P [C, r]; rows of classes without one are zero in a run.
        valid: bool [C], which classes have one.
        options: beta and eta.
    """
    products = (codes.shape[1] * labels - codes @ prototypes.T).square().sum()
    mine = labels * valid
    counts = mine.sum(1, keepdim=True)
    target = torch.where(counts > 0, mine @ prototypes / counts.clamp(min=1), features)
    return options.beta * products + options.eta * (target - features).square().mean()


class PlFedCmh(FederatedProtocol):
    """PLFedCMH, see the module docstring."""

    Options: ClassVar[type[Any]] = PlFedCmhOptions

    def __init__(self, options: PlFedCmhOptions, context: Context) -> None:
        if context.objective.base == "info_nce" or not context.label_names:
            raise InputError("objective.base", context.objective.base, "any other base, and data with labels")
        self.options = options
        self.context = context
        self.columns = fine_columns(context.label_names)
        self.fedavg = fedavg.FedAvg(
            fedavg.FedAvgOptions(branch_renorm=options.branch_renorm, weighting=options.weighting), context
        )
        self.parts = {name: _hypernetwork.blocks(context.layout, part) for name, part in self.fedavg.branches.items()}
        self.shapes = {
            name: _hypernetwork.layout(list(parts), len(context.silos)) for name, parts in self.parts.items()
        }

    def traits(self) -> Traits:
        """Every silo has a personal model."""
        return Traits(personalised=True)

    def eligible(self, silo: SiloFacts) -> bool:
        """All silos are eligible."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of the mixture, the loss, and class prototypes."""
        return frozenset({Delta, Loss, ClassPrototypes})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the prototypes' shape, and that they can be means of outputs before tanh.

        Raises:
            RemoteWireError: another number of rows or columns, or a row too long.
        """
        longest = _class_prototypes.longest_output(self.context.dim)
        _class_prototypes.check_rows(take(payloads, ClassPrototypes), 2 * len(self.columns), self.context.dim, longest)

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs with the prototype terms, then the prototypes of the features as they are now."""
        shared = _class_prototypes.read_download(take(task.payloads, ClassPrototypes), local.model.flat.device)
        labels = _training.labels_of(local, np.arange(len(local.share)))[:, self.columns]

        def extra(step: _training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            own = labels[torch.from_numpy(step.rows).to(labels.device)]
            given = ((image, shared.image, shared.image_valid), (text, shared.text, shared.text_valid))
            parts = [
                prototype_loss(out.code, out.raw, own, prototypes, valid, self.options)
                for out, prototypes, valid in given
                if out is not None and bool(valid.any())
            ]
            return torch.stack(parts).sum() / (len(step.rows) * len(local.share)) if parts else None

        trained = self.fedavg.trained(local, task, extra=extra)
        own = _personal_model.kept(local) if self.options.measured == "trained" else {}
        payloads = (*trained.payloads, self._own_prototypes(local, task, labels))
        return replace(trained, payloads=payloads, state={**trained.state, **own})

    def _own_prototypes(self, local: Local, task: Task, labels: Tensor) -> ClassPrototypes:
        """Class means of the outputs before tanh, of one caption per item; count 0 for a modality the silo lacks."""
        caption = _training.choose_captions(local, _training.generator_of(self.context, local, task, "prototypes"))
        found = _training.outputs_of_all(local, caption, lambda out: out.raw)
        return _class_prototypes.of_features(found, labels.cpu(), self.context.dim)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The silo's own mixture, or its model as its last training left it."""
        mixture = take(payloads, Model).buffer
        own = local.state.get(_personal_model.OWN) if self.options.measured == "trained" else None
        return _personal_model.encoders_of(local, mixture if own is None else own)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """No silo's model and no prototype yet, fresh hypernetworks."""
        count = len(self.context.silos)
        tensors = {
            _MODELS: torch.zeros(count, len(theta)),
            _VERSIONS: torch.full((count,), -1, dtype=torch.int64),
            _OWNERS: torch.zeros(count, len(self.parts), dtype=torch.bool),
            **_class_prototypes.initial(count, 2 * len(self.columns), self.context.dim),
        }
        for name, shape in self.shapes.items():
            tensors[f"hyper_{name}"] = torch.stack(
                [
                    _hypernetwork.initial(shape, torch_generator(self.context.seed, "plfedcmh", name, silo.name))
                    for silo in self.context.silos
                ]
            )
        return State(theta, tensors)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The silo's mixture and the global prototypes."""
        model = Model(layout_digest=self.context.layout.digest, buffer=self.mixture(state, silo).numpy())
        return (model, _class_prototypes.download(state.tensors))

    def mixture(self, state: State, silo: SiloFacts) -> Tensor:
        """The silo's personal model float32 [P]; branches that nobody has trained yet are the global model's."""
        theta = state.theta.clone()
        for name, parts in self.parts.items():
            allowed = self._known(state, name)
            if not bool(allowed.any()):
                continue
            found = _hypernetwork.scores(state.tensors[f"hyper_{name}"][silo.index], self.shapes[name], list(parts))
            weights = _hypernetwork.shares(found, allowed)
            for block, values in _hypernetwork.mixed(weights, state.tensors[_MODELS], parts).items():
                theta[parts[block]] = values
        return theta

    def _known(self, state: State, name: str) -> Tensor:
        """Silos bool [K] whose branch can be mixed: they have it and have trained."""
        return self._owners(state)[:, list(self.parts).index(name)] & (state.tensors[_VERSIONS] >= 0)

    def _owners(self, state: State) -> Tensor:
        """Which branches each silo's model has, bool [K, branches], as of its last reply: faults may change that."""
        if _OWNERS in state.tensors:
            return state.tensors[_OWNERS]
        # A checkpoint from before the table kept it: as the run began.
        return torch.tensor([[_aggregation.owns(silo, name) for name in self.parts] for silo in self.context.silos])

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Each reporter's model and hypernetworks move by its update; prototypes and the global model are averaged."""
        replies = _aggregation.ordered(replies)
        merged = self.fedavg.merge(State(state.theta), replies, round_)
        models, versions = state.tensors[_MODELS].clone(), state.tensors[_VERSIONS].clone()
        owners = self._owners(state).clone()
        networks = {name: state.tensors[f"hyper_{name}"].clone() for name in self.parts}
        for reply in replies:
            update, sent = as_tensor(take(reply.payloads, Delta).buffer), reply.base or state
            for name in self.parts:
                if _aggregation.owns(reply.silo, name):
                    networks[name][reply.silo.index] -= self._step(sent, reply, name, update)
            if reply.base_version >= int(versions[reply.silo.index]):
                models[reply.silo.index] = self.mixture(sent, reply.silo) + update
                versions[reply.silo.index] = reply.base_version
                owners[reply.silo.index] = torch.tensor([_aggregation.owns(reply.silo, name) for name in self.parts])
        prototypes = _class_prototypes.updated(
            state.tensors,
            [(reply, _class_prototypes.own_rows(reply)) for reply in replies],
            round_,
            max_age=self.context.max_age,
            weighted=False,
        )
        hyper = {f"hyper_{name}": each for name, each in networks.items()}
        tensors = {_MODELS: models, _VERSIONS: versions, _OWNERS: owners, **hyper, **prototypes}
        return MergeResult(State(merged.state.theta, tensors, state.values), merged.log)

    def _step(self, sent: State, reply: Reply, name: str, update: Tensor) -> Tensor:
        """What a reporter's update takes off a branch's hypernetwork [H], seen with the state its mixture is of."""
        network = sent.tensors[f"hyper_{name}"][reply.silo.index]
        allowed = self._known(sent, name)
        if not bool(allowed.any()):
            return torch.zeros_like(network)  # nothing was mixed before anybody had trained
        rate = self.options.hn_rate * reply.damping
        return rate * _hypernetwork.gradient(
            network,
            self.shapes[name],
            self.parts[name],
            models=sent.tensors[_MODELS],
            allowed=allowed,
            direction=-update if self.options.hn_sign == "descent" else update,
        )


PROTOCOL = PlFedCmh
