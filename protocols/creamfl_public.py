"""CreamFL with a public set: silos exchange representations of public pairs and no parameters (Yu et al. 2023).

The data set marks public pairs (split ``public``), which no silo owns and everybody holds. A silo trains its own model
on its own pairs, then on the public ones, contrasting them with the global representations, and uploads its
representations of them. The coordinator averages these item by item, a silo weighing more where its representation
finds the item's other modality among the global ones, distils them into the global model while it trains that on the
public pairs, and sends the new model's representations down, as float16. The coordinator's model is what is measured.
One architecture for all; before the first merge the initial model's representations go down (our choice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedmq.encoders.base import MODALITIES
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import (
    Context,
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
from fedmq.models.two_tower import Out, TwoTower
from fedmq.wire.messages import Loss, Payload, Representations
from protocols import _aggregation, _personal_model, _prototypes, _training, fedavg
from protocols._aggregation import as_tensor
from protocols._options import check, refuse_other_bases
from protocols.creamfl import LAST, Weights, contrasts, distillation

#: Name of the global representations float32 [N, d] of a modality among the coordinator's tensors.
GLOBAL = "public_"
#: Scores that are held at a time while silos are weighed; 64 MiB of float32.
_SCORES = 1 << 24


@dataclass(frozen=True)
class CreamFlPublicOptions:
    """Options of CreamFL with a public set; defaults are the paper's.

    Args:
        tau: temperature of InfoNCE.
        inter: weight of the contrast with the other modality's global representations.
        intra: weight of the contrast of the global representation against the last local one.
        contrast_tau: temperature of both.
        kd: weight of the distillation at the coordinator.
        server_rate: the coordinator's learning rate.
    """

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "inter|intra": ("contrast_tau",),
    }

    tau: float = 0.07
    inter: float = 0.5
    intra: float = 0.5
    contrast_tau: float = 0.5
    kd: float = 0.3
    server_rate: float = 2e-4

    def __post_init__(self) -> None:
        check("tau", self.tau, 0.0, open_low=True)
        check("contrast_tau", self.contrast_tau, 0.0, open_low=True)
        for name in ("inter", "intra", "kd", "server_rate"):
            check(name, getattr(self, name), 0.0)


def item_weights(representations: Tensor, other: Tensor, most: int = _SCORES) -> Tensor:
    """Softmax over silos of the log-probability that each item finds its own pair (CreamFL, score of the ensemble).

    All M N^2 scores at once would be 100 GB for ten silos and the paper's 50,000 items. They are made for so many items
    at a time that besides the result at most two arrays of ``most`` scores are held, or of M N where one item alone
    has more: 128 MiB of float32 by default.

    Args:
        representations: [M, N, d] of one modality by M silos.
        other: [N, d] global representations of the other modality.
        most: scores at a time; where all fit, nothing is split.

    Returns:
        [M, N], columns sum to 1.
    """
    silos, items, _ = representations.shape
    step, scores = max(1, most // (silos * items)), representations.new_empty(silos, items)
    for start in range(0, items, step):
        rows = slice(start, start + step)
        # In one expression: a name would keep one block's scores while the next one's are made.
        scores[:, rows] = (representations[:, rows] @ other.T).log_softmax(2).diagonal(start, dim1=1, dim2=2)
    return scores.softmax(0)


def ensemble(representations: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over silos, item by item: [M, N, d] and [M, N] -> [N, d] (CreamFL)."""
    return (weights[..., None] * representations).sum(0)


def nothing(image: Tensor | None, text: Tensor | None) -> Tensor:
    """No loss besides the contrasts."""
    return torch.zeros(())


class CreamFlPublic(FederatedProtocol):
    """CreamFL with a public set, see the module's text."""

    Options: ClassVar[type[Any]] = CreamFlPublicOptions

    def __init__(self, options: CreamFlPublicOptions, context: Context) -> None:
        refuse_other_bases("creamfl_public", context)
        self.options = options
        self.context = context
        self.fedavg = fedavg.FedAvg(fedavg.FedAvgOptions(tau=options.tau, single_modality="idle"), context)
        public = context.public()
        if public is None:
            raise InputError("protocol.name", "creamfl_public", "creamfl: the data set marks no public items")
        self.public = public

    def traits(self) -> Traits:
        """The public set; the largest reply that :meth:`check` lets through has both modalities of it in float32."""
        largest = 2 * len(self.public) * self.context.dim * np.dtype(np.float32).itemsize
        return Traits(public_items=len(self.public), reply_bytes=largest)

    @cached_property
    def model(self) -> TwoTower:
        """The coordinator's own model, which it trains on the public pairs."""
        if self.context.build is None:
            raise ValueError("a coordinator can build its model")
        return self.context.build()

    def eligible(self, silo: SiloFacts) -> bool:
        """Everybody takes part."""
        return silo.image or silo.text

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """Representations of the public items in the modalities the silo has, and the loss."""
        return frozenset({Representations, Loss})

    # ----------------------------------------------------------------------- the silo's half
    def train(self, local: Local, task: Task) -> Trained:
        """The silo's own pairs, then the public ones; from its own parameters, which are kept."""
        local.model.load(_personal_model.own_parameters(local))
        base = local.model.flat.detach().clone()
        work = self.fedavg.work(local, task)
        outcome = _training.train_epochs(local, self.context, task, base, work)
        public, size = self._public_of(local), self.context.training.batch_size
        image, text = as_tensor(take(task.payloads, Representations).values).float().chunk(2)
        last: dict[str, Tensor] = {name: local.state[LAST + name] for name in MODALITIES if LAST + name in local.state}
        weights = Weights(self.options.inter, self.options.intra, 0.0, self.options.contrast_tau)
        terms = contrasts({"image": image, "text": text}, last, weights)
        if terms is not None:
            start = local.model.flat.detach().clone()
            everything = _training.EveryBatch(public, size, nothing)
            _training.train_epochs(public, self.context, task, start, everything, extra=terms)
        found = dict(_named(_training.embed_all(public, _first(public), size)))
        state = {**({} if work is None else work.kept()), **_personal_model.kept(local)}
        kept = {LAST + name: z for name, z in found.items()}
        return Trained((_payload(found), Loss(outcome.loss)), {**state, **kept}, outcome.loss)

    def _public_of(self, local: Local) -> Local:
        """The silo with the public items in the place of its own, in the modalities it has."""
        share = self.public
        held = replace(
            share, image=share.image if local.silo.image else None, text=share.text if local.silo.text else None
        )
        return replace(local, share=held)

    # ----------------------------------------------------------------------- the coordinator's half
    def initial(self, theta: Tensor) -> State:
        """The initial model and its representations."""
        return State(theta, self._represented(theta))

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The global representations of both modalities."""
        return (_payload({name: state.tensors[GLOBAL + name] for name in MODALITIES}),)

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the representations' shape, and that they are of unit length as every tower's output is.

        Raises:
            RemoteWireError: ``layout`` for another number of items or columns; ``malformed`` for another length, which
                would weigh more than others' and, being large enough, end the coordinator's own training.
        """
        found = take(payloads, Representations)
        rows = len(self.public) * (2 if found.modality == "both" else 1)
        if found.values.shape != (rows, self.context.dim):
            raise RemoteWireError("layout", f"representations of shape {found.values.shape}")
        found_lengths = _prototypes.lengths(found.values)
        # An item of which a tower makes nothing at all is honestly 0 long, and moves nothing.
        wrong = found_lengths[(np.abs(found_lengths - 1) > _prototypes.TOLERANCE) & (found_lengths != 0)]
        if len(wrong):
            allowed = f"1 within {_prototypes.TOLERANCE}"
            raise RemoteWireError("malformed", f"a representation of length {wrong.max():.4g}, here {allowed}")

    def merge(self, state: State, replies: Sequence[Reply], round_: int) -> MergeResult:
        """Average representations item by item, distil them, train on the public pairs, represent them anew."""
        replies = _aggregation.ordered(replies)
        wanted: dict[str, Tensor] = {}
        for name, other in (MODALITIES, MODALITIES[::-1]):
            given = [(reply.factor, _read(reply, name)) for reply in replies if getattr(reply.silo, name)]
            found = [(factor, each) for factor, each in given if each is not None]
            if found:
                stacked = torch.stack([each for _, each in found])
                factors = torch.tensor([factor for factor, _ in found])[:, None]
                weights = item_weights(stacked, state.tensors[GLOBAL + other]) * factors
                wanted[name] = ensemble(stacked, weights / weights.sum(0))
        theta, loss = self._taught(state.theta, wanted, round_)
        return MergeResult(
            replace(state, theta=theta, tensors={**state.tensors, **self._represented(theta)}), {"server_loss": loss}
        )

    def followed(self, before: State, after: State, rate: float) -> State:
        """The representations that go down are of the model that is kept."""
        return replace(after, tensors={**after.tensors, **self._represented(after.theta)})

    def _coordinator(self) -> Local:
        """The coordinator as it trains on the public pairs."""
        return Local(SiloFacts("coordinator", len(self.context.silos), True, True), self.public, self.model, {})

    def _taught(self, theta: Tensor, wanted: Mapping[str, Tensor], round_: int) -> tuple[Tensor, float]:
        """The global model after its epochs on the public pairs, with the ensemble's representations distilled."""
        own, options = self._coordinator(), self.options
        task = Task(round_ + 1, round_, round_, options.server_rate, ())
        own.model.load(theta)
        base = own.model.flat.detach().clone()

        def taught(step: _training.Step, image: Out | None, text: Out | None) -> Tensor | None:
            rows = torch.from_numpy(step.rows)
            terms = [
                options.kd * distillation(out.code, wanted[name][rows].to(out.code.device))
                for name, out in zip(MODALITIES, (image, text), strict=True)
                if out is not None and name in wanted and options.kd
            ]
            return torch.stack(terms).sum() if terms else None

        outcome = _training.train_epochs(own, self.context, task, base, self.fedavg.work(own, task), extra=taught)
        return own.model.flat.detach().cpu().clone(), outcome.loss

    def _represented(self, theta: Tensor) -> dict[str, Tensor]:
        """The public items as a model [P] represents them, [N, d] by modality, the first caption of each."""
        own = self._coordinator()
        own.model.load(theta)
        found = _training.embed_all(own, _first(own), self.context.training.batch_size)
        return {GLOBAL + name: z for name, z in _named(found)}


def _first(local: Local) -> _training.I64 | None:
    """The first caption of each item; None where there is no text."""
    return None if local.share.text is None else np.zeros(len(local.share), np.int64)


def _named(found: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, z) for name, z in zip(MODALITIES, found, strict=True) if z is not None]


def _payload(found: Mapping[str, Tensor]) -> Representations:
    """Representations by modality as they travel: float16, both modalities' rows one after the other."""
    rows = torch.cat([found[name] for name in MODALITIES if name in found])
    return Representations(rows.half().numpy(), "both" if len(found) == 2 else next(iter(found)))


def _read(reply: Reply, modality: str) -> Tensor | None:
    """A reply's representations float32 [N, d] of a modality; None where it has none of it."""
    found = take(reply.payloads, Representations)
    if found.modality not in ("both", modality):
        return None
    values = as_tensor(found.values).float()
    if found.modality == modality:
        return values
    image, text = values.chunk(2)
    return image if modality == "image" else text


PROTOCOL = CreamFlPublic
