"""CreamFL with a public set: silos exchange representations of public pairs, not parameters (Yu et al., 2023).

The data set marks public pairs (split ``public``), which belong to no silo and are known to all silos and the
coordinator. A silo trains its personal model on its own pairs, then on the public pairs with contrasts against the
global representations, and uploads its representations of the public pairs. The coordinator averages these for each
item, giving a silo more weight where its representation retrieves the item's other modality among the global ones. It
distils the average into the global model while training that on the public pairs, and sends the new model's
representations down, as float16. The coordinator's model is evaluated. The paper trains five local epochs a task:
``training.local_epochs: 5``.

Departures: all use one architecture; before the first merge the initial model's representations are sent, where the
code's coordinator first trains an epoch on the public pairs; and a silo trains all epochs on its own pairs before those
on the public ones, where the code (FLAIR-THU/CreamFL) alternates them epoch by epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive
from fedmq.data.silo_dataset import SiloDataset
from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError, RemoteWireError
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
from fedmq.models.two_tower import Out, TwoTower
from fedmq.wire.payloads import Loss, Payload, Representations
from protocols.creamfl import LAST, contrasts, distillation
from protocols.local import Alone
from protocols.parts import personal_model, prototypes, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import TauOptions, nothing, refuse_other_bases


@dataclass(frozen=True)
class PublicItems:
    """The public items, and the coordinator's model of a method whose coordinator trains on them."""

    dataset: SiloDataset  # the items, in both modalities
    context: Context

    @classmethod
    def of(cls, context: Context, name: str, instead: str) -> PublicItems:
        """The public items of a run.

        Raises:
            InputError: the data set marks no public items.
        """
        found = context.public()
        if found is None:
            raise InputError("protocol.name", name, f"{instead}, as the data set marks no public items")
        return cls(found, context)

    @cached_property
    def model(self) -> TwoTower:
        """The model that the coordinator trains on the public pairs."""
        if self.context.build is None:
            raise ValueError("a coordinator can build its model")
        return self.context.build()

    def coordinator(self) -> Local:
        """The coordinator in the role of a silo that holds the public pairs."""
        facts = SiloFacts("coordinator", len(self.context.silos), True, True)
        return Local(facts, self.dataset, self.model, {})


#: Name prefix of a modality's global representations, float32 [N, d], in the coordinator's state.
GLOBAL = "public_"
#: Maximum number of scores per block in :func:`item_weights`; 64 MiB of float32.
_SCORES = 1 << 24


@dataclass(frozen=True)
class CreamFlPublicOptions(TauOptions):
    """Options of CreamFL with a public set; defaults are the paper's.

    Args:
        inter: weight of the contrast with the other modality's global representations.
        intra: weight of the contrast of the global representation against the previous local one.
        contrast_tau: temperature of both contrasts.
        kd: weight of the distillation at the coordinator.
        server_rate: the coordinator's learning rate.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {"inter|intra": ("contrast_tau",)}

    inter: NonNegative = 0.5
    intra: NonNegative = 0.5
    contrast_tau: Positive = 0.5
    kd: NonNegative = 0.3
    server_rate: NonNegative = 2e-4


def item_weights(representations: Tensor, other: Tensor, most: int = _SCORES) -> Tensor:
    """Softmax over silos of the log-probability that each item retrieves its own pair (CreamFL, ensemble score).

    All M N^2 scores would take 100 GB for ten silos and the paper's 50,000 items. They are computed in blocks of items,
    so that at most two arrays of ``most`` scores (by default 128 MiB of float32) are held beyond the result, or of M N
    scores if a single item has more.

    Args:
        representations: [M, N, d] of one modality by M silos.
        other: [N, d] global representations of the other modality.
        most: maximum number of scores per block.

    Returns:
        [M, N], columns sum to 1.
    """
    silos, items, _ = representations.shape
    step, scores = max(1, most // (silos * items)), representations.new_empty(silos, items)
    for start in range(0, items, step):
        rows = slice(start, start + step)
        # One expression: a variable would keep a block's scores in memory while the next block is computed.
        scores[:, rows] = (representations[:, rows] @ other.T).log_softmax(2).diagonal(start, dim1=1, dim2=2)
    return scores.softmax(0)


def ensemble(representations: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over silos for each item: [M, N, d] and [M, N] -> [N, d] (CreamFL)."""
    return (weights[..., None] * representations).sum(0)


class CreamFlPublic(FederatedProtocol):
    """CreamFL with a public set, see the module docstring."""

    Options: ClassVar[type[Any]] = CreamFlPublicOptions
    options: CreamFlPublicOptions

    def __init__(self, options: CreamFlPublicOptions, context: Context) -> None:
        refuse_other_bases("creamfl_public", context)
        super().__init__(options, context)
        self.alone = Alone(options, context)
        self.public = PublicItems.of(context, "creamfl_public", "creamfl")

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """The method needs public items."""
        return Traits(needs_public=True)

    def traits(self) -> Traits:
        """Size of the public set, and of the largest reply that :meth:`check` accepts: both modalities in float32."""
        items = len(self.public.dataset)
        largest = 2 * items * self.context.dim * np.dtype(np.float32).itemsize
        return Traits(needs_public=True, public_items=items, reply_bytes=largest)

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """Representations of the public items in the modalities the silo has, and the loss."""
        return frozenset({Representations, Loss})

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs from the personal model, on the silo's pairs, then on the public ones."""
        trained = self.alone.trained(local, task)
        public, size = self._public_of(local), self.context.training.batch_size
        image, text = as_tensor(take(task.payloads, Representations).values).float().chunk(2)
        last: dict[str, Tensor] = {name: local.state[LAST + name] for name in MODALITIES if LAST + name in local.state}
        inter, intra, tau = self.options.inter, self.options.intra, self.options.contrast_tau
        terms = contrasts(public, {"image": image, "text": text}, last, inter=inter, intra=intra, kd=0.0, tau=tau)
        if terms is not None:
            start = local.model.flat.detach().clone()
            public_work = training.EveryBatch(public, size, nothing)
            training.train_epochs(public, self.context, task, start, public_work, extra=terms)
        representations = dict(_named(training.embed_all(public, _first(public), size)))
        kept = {LAST + name: z for name, z in representations.items()}
        state = {**trained.state, **personal_model.kept(local), **kept}
        return replace(trained, payloads=(_payload(representations), *trained.payloads), state=state)

    def _public_of(self, local: Local) -> Local:
        """The silo with the public items in place of its own dataset, in its modalities."""
        public = self.public.dataset
        dataset = replace(
            public, image=public.image if local.silo.image else None, text=public.text if local.silo.text else None
        )
        return replace(local, dataset=dataset)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model and its representations of the public set."""
        return State(theta, self._represented(theta))

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global representations of both modalities."""
        return (_payload({name: state.tensors[GLOBAL + name] for name in MODALITIES}),)

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the representations' shape, and that they have unit length, as every tower's output has.

        Raises:
            RemoteWireError: ``layout`` for a wrong number of items or columns; ``malformed`` for a wrong length: a long
                one would get too much weight and could make the coordinator's training diverge.
        """
        payload = take(payloads, Representations)
        rows = len(self.public.dataset) * (2 if payload.modality == "both" else 1)
        if payload.values.shape != (rows, self.context.dim):
            raise RemoteWireError("layout", f"representations of shape {payload.values.shape}")
        lengths = prototypes.lengths(payload.values)
        # A tower may output a zero vector for an item; it has no effect.
        wrong = lengths[(np.abs(lengths - 1) > prototypes.TOLERANCE) & (lengths != 0)]
        if len(wrong):
            allowed = f"1 within {prototypes.TOLERANCE}"
            raise RemoteWireError("malformed", f"a representation of length {wrong.max():.4g}, here {allowed}")

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Average the representations, distil them into the global model, and recompute its representations."""
        targets = self.targets(state, replies)
        theta, loss = self._distilled(state.theta, targets, round_)
        return MergeResult(
            replace(state, theta=theta, tensors={**state.tensors, **self._represented(theta)}), {"server_loss": loss}
        )

    def targets(self, state: State, replies: Sequence[Update]) -> dict[str, Tensor]:
        """What the coordinator distils: by modality, the weighted mean of the replies' representations, [N, d]."""
        targets: dict[str, Tensor] = {}
        for name, other in (MODALITIES, MODALITIES[::-1]):
            read = [(reply.factor, _read(reply, name)) for reply in replies if getattr(reply.silo, name)]
            uploads = [(factor, rows) for factor, rows in read if rows is not None and factor > 0]
            if uploads:
                stacked = torch.stack([rows for _, rows in uploads])
                factors = torch.tensor([factor for factor, _ in uploads])[:, None]
                weights = item_weights(stacked, state.tensors[GLOBAL + other]) * factors
                targets[name] = ensemble(stacked, weights / weights.sum(0))
        return targets

    def mix_state(self, before: State, after: State, rate: float) -> State:
        """The representations are recomputed with the model that the coordinator keeps."""
        return replace(after, tensors={**after.tensors, **self._represented(after.theta)})

    def _distilled(self, theta: Tensor, targets: Mapping[str, Tensor], round_: int) -> tuple[Tensor, float]:
        """The global model [P] and loss after epochs on the public pairs with distillation of the targets [N, d]."""
        coordinator, options = self.public.coordinator(), self.options
        task = Task(round_ + 1, round_, round_, options.server_rate, ())
        coordinator.model.load(theta)
        base = coordinator.model.flat.detach().clone()

        def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            rows = torch.from_numpy(step.rows)
            terms = [
                options.kd * distillation(out.code, targets[name][rows].to(out.code.device))
                for name, out in zip(MODALITIES, (image, text), strict=True)
                if out is not None and name in targets and options.kd
            ]
            return torch.stack(terms).sum() if terms else None

        work = self.alone.fedavg.work(coordinator, task)
        outcome = training.train_epochs(coordinator, self.context, task, base, work, extra=extra)
        return coordinator.model.flat.detach().cpu().clone(), outcome.loss

    def _represented(self, theta: Tensor) -> dict[str, Tensor]:
        """A model's representations [N, d] of the public items by modality, using each item's first caption."""
        coordinator = self.public.coordinator()
        coordinator.model.load(theta)
        embeddings = training.embed_all(coordinator, _first(coordinator), self.context.training.batch_size)
        return {GLOBAL + name: z for name, z in _named(embeddings)}


def _first(local: Local) -> training.I64 | None:
    """Index 0, the first caption, for each item; None without text."""
    return None if local.dataset.text is None else np.zeros(len(local.dataset), np.int64)


def _named(embeddings: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, z) for name, z in zip(MODALITIES, embeddings, strict=True) if z is not None]


def _payload(by_modality: Mapping[str, Tensor]) -> Representations:
    """Representations as a payload: float16, rows of images before rows of texts."""
    rows = torch.cat([by_modality[name] for name in MODALITIES if name in by_modality])
    return Representations(rows.half().numpy(), "both" if len(by_modality) == 2 else next(iter(by_modality)))


def _read(reply: Update, modality: str) -> Tensor | None:
    """A reply's representations of a modality, float32 [N, d]; None if it has none."""
    payload = take(reply.payloads, Representations)
    if payload.modality not in ("both", modality):
        return None
    values = as_tensor(payload.values).float()
    if payload.modality == modality:
        return values
    image, text = values.chunk(2)
    return image if modality == "image" else text


PROTOCOL = CreamFlPublic
