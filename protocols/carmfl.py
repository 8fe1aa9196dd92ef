"""CAR-MFL: silos that lack a modality complete their items with those of similar public items (Poudel et al., 2024).

The data set marks public pairs (split ``public``), which all silos and the coordinator know. At the start of a task a
silo that lacks a modality embeds its items and the public ones, in the modality that it has, by the downloaded model.
Each of its items gets the other modality of the nearest public item by Euclidean distance. If the data have labels, it
gets that of the item with the most similar labels, by the Jaccard index, of the ``candidates`` nearest ones. The silo
then trains both towers on these pairs as a paired silo does. The coordinator trains the model on the public pairs, as
one more silo S.

The merge weights each tower separately. With w_k = n_k / sum_j n_j over the silos and S, and alpha < 1,

    v_k = softmax_k(a_k w_k),    a_k = alpha in the tower of the modality that silo k lacks, otherwise 1

so that towers trained on retrieved items count less (MICCAI 2024, arXiv 2407.08648). Retrieval and weights are those of
the released code, bhattarailab/CAR-MFL (``generate_RAG_mapping``, ``FedAvgInRAG.aggregrate``), as we had only the
paper's abstract; alpha is 0.3 in its instructions. As w_k is below 1, all v_k are close to 1 / (M + 1): silos of all
sizes count nearly alike.

Departures. The paper classifies by both modalities, here the base loss contrasts the two: a caption retrieved for two
images of one batch is a positive of one and a negative of the other. An item's first caption is its query. The
coordinator trains with ``training.learning_rate``, without the silos' schedule, and a stale reply's v_k is damped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import Count, Fraction, Modality
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
from fedmq.wire.payloads import Delta, Loss, Model, Payload
from protocols import fedavg
from protocols.creamfl_public import PublicItems
from protocols.parts import aggregation, training, unpaired
from protocols.parts.losses import TauOptions, refuse_other_bases

#: Maximum number of distances per block in :func:`retrieved`; 128 MiB of float64.
_DISTANCES = 1 << 24


@dataclass(frozen=True)
class CarMflOptions(TauOptions):
    """Options of CAR-MFL.

    Args:
        candidates: number of nearest public items among which labels decide; with 1, or without labels, the nearest
            one is taken.
        alpha: factor of a silo's weight in the tower of the modality that it lacks, before the softmax.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    candidates: Count = 10
    alpha: Fraction = 0.3


def retrieved(z: Tensor, public: Tensor, labels: tuple[Tensor, Tensor] | None, candidates: int) -> Tensor:
    """The public item that completes each item, int64 [n]; of equals the nearest (CAR-MFL, ``generate_RAG_mapping``).

    Args:
        z: [n, d] embeddings of the silo's items.
        public: [N, d] of the public items, in the same modality.
        labels: multi-hot [n, L] and [N, L]; None without labels.
        candidates: see :class:`CarMflOptions`.
    """
    count = 1 if labels is None else min(candidates, len(public))
    x, y, blocks = z.double(), public.double(), []
    for block in torch.split(x, max(1, _DISTANCES // len(y))):
        distance = y.square().sum(1) - 2 * block @ y.T  # without the term of the query, which orders nothing
        blocks.append(distance.topk(count, largest=False, sorted=True).indices)
    nearest = torch.cat(blocks)
    if labels is None:
        return nearest[:, 0]
    own, theirs = labels[0][:, None] > 0, labels[1][nearest] > 0
    common, either = (own & theirs).sum(2).double(), (own | theirs).sum(2)
    similarity = torch.where(either > 0, common / either.clamp(min=1), 1.0)
    best = (similarity == similarity.amax(1, keepdim=True)).int().argmax(1)  # the first maximum
    return nearest.gather(1, best[:, None]).squeeze(1)


def tower_weights(samples: Tensor, completed: Tensor, factors: Tensor, alpha: float) -> Tensor:
    """v_k of one tower, times the replies' factors, renormalised (CAR-MFL, ``aggregrate``).

    Args:
        samples: n_k float64 [M + 1] of the silos and the coordinator.
        completed: bool [M + 1], whose tower was trained on retrieved items.
        factors: float64 [M + 1], 1 for a fresh reply.
        alpha: see :class:`CarMflOptions`.
    """
    shares = samples / samples.sum()
    return aggregation.damped(torch.where(completed, alpha * shares, shares).softmax(0), factors)


class CarMfl(FederatedProtocol):
    """CAR-MFL, see the module docstring."""

    Options: ClassVar[type[Any]] = CarMflOptions
    options: CarMflOptions

    def __init__(self, options: CarMflOptions, context: Context) -> None:
        refuse_other_bases("carmfl", context)
        super().__init__(options, context)
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau), context)
        self.public = PublicItems.of(context, "carmfl", "fedavg")

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The method needs public items, which complete those of single-modality silos."""
        return Traits(needs_public=True, completes_items=True)

    def traits(self) -> Traits:
        """With the size of the public set."""
        return replace(self.traits_of(self.options), public_items=len(self.public.dataset))

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update of both towers, and the loss."""
        return frozenset({Delta, Loss})

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """FedAvg's local epochs, on completed items if the silo lacks a modality."""
        if local.silo.paired:
            return self.fedavg.train(local, task)
        training.load_model(local, take(task.payloads, Model).buffer)
        return self.fedavg.train(self.completed(local), task)

    def completed(self, local: Local) -> Local:
        """The silo with its items completed by public ones, by the model that it holds."""
        modality, own, theirs = unpaired.modality_of(local), local.dataset, self.public.dataset
        z, public = (self._embedded(replace(local, dataset=items), modality) for items in (own, theirs))
        labels = None if own.labels is None or theirs.labels is None else (own.labels, theirs.labels)
        chosen = retrieved(z, public, labels, self.options.candidates)
        assert theirs.image is not None and theirs.text is not None  # noqa: S101 - public items are pairs
        if modality == "image":
            dataset = replace(own, text=theirs.text.of(chosen), captions=theirs.captions[chosen])
        else:
            dataset = replace(own, image=theirs.image[chosen])
        return replace(local, silo=replace(local.silo, image=True, text=True), dataset=dataset)

    def _embedded(self, local: Local, modality: Modality) -> Tensor:
        """Embeddings [n, d] of a dataset's images or first captions."""
        first = None if local.dataset.text is None else np.zeros(len(local.dataset), np.int64)
        both = training.outputs_of_all(local, first, lambda out: out.code, runs=(modality,))
        (z,) = (each for each in both if each is not None)
        return z

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model."""
        return State(theta)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global model."""
        return self.fedavg.task(state, silo)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Train on the public pairs, then add each tower's weighted updates, the coordinator's among them."""
        own = self._trained(state.theta, round_)
        updates = [*(reply.delta for reply in replies), own.delta]
        samples = torch.tensor([*(reply.samples for reply in replies), len(self.public.dataset)], dtype=torch.float64)
        factors = torch.tensor([*(reply.factor for reply in replies), 1.0], dtype=torch.float64)
        step = torch.zeros_like(state.theta, dtype=torch.float64)
        for name, part in aggregation.branch_slices(self.context.layout).items():
            completed = torch.tensor([*(not aggregation.owns(reply.silo, name) for reply in replies), False])
            weights = tower_weights(samples, completed, factors, self.options.alpha)
            aggregation.add_weighted(step[part], [update[part] for update in updates], weights)
        theta = aggregation.stepped(state.theta, step)
        return MergeResult(replace(state, theta=theta), {"server_loss": own.loss})

    def _trained(self, theta: Tensor, round_: int) -> training.TrainingResult:
        """The coordinator's update of a model [P] on the public pairs."""
        coordinator = self.public.coordinator()
        task = Task(round_ + 1, round_, round_, self.context.training.learning_rate, ())
        coordinator.model.load(theta)
        base = coordinator.model.flat.detach().clone()
        work = self.fedavg.work(coordinator, task)
        return training.train_epochs(coordinator, self.context, task, base, work)


PROTOCOL = CarMfl
