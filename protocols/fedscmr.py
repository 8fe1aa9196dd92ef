"""FedSCMR: averages the layers of two common subspaces, weighted by each silo's contribution (2024).

Every silo trains label prediction, discrimination and consistency in a common subspace S and an enhanced subspace S'
(eqs 1 to 8). Only the layers that both modalities share are exchanged; the coordinator weights them by size and
categories, training progress and validation mAP (eqs 9 to 13). All other layers are personal, and personal models are
evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmq import seeds
from fedmq.config.sections import NonNegative
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.evaluation.label_metrics import cosine_metrics
from fedmq.federation.protocol import (
    Context,
    Encoders,
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
from fedmq.models.two_tower import Out
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import LabelCount, Loss, MeanAveragePrecision, PartialDelta, Payload
from protocols.objectives.dscmr import logits_of, mean_length, pair_likelihood
from protocols.parts import aggregation, training
from protocols.parts.labelled import EveryLabelledBatch, similar_items
from protocols.parts.personal_model import PartialFedAvg

_LAYERS = {"base": ("shared.base.",), "base_enhance": ("shared.base.", "shared.enhance."), "all": ("",)}
#: Table of the silos' last scalars, with columns samples, categories, loss, mAP; -1 where unknown.
_TABLE = "scmr_table"
_VERSIONS = "scmr_versions"

#: How the paper's matrix norms are read; see the option ``norm``.
Norm = Literal["row", "frob"]


@dataclass(frozen=True)
class FedScmrOptions:
    """Options of FedSCMR; defaults are the paper's best values, and ours where the paper leaves them open.

    FedSCMR uses the network options of the base (``objective.enhance``, ``leaky``), but not the weights
    ``objective.alpha`` and ``objective.beta`` of DSCMR's loss: its own weights are ``alpha`` and ``beta`` here.

    Args:
        loss_cs: add discrimination and consistency in the common subspaces (eq 4).
        loss_ccs: add the constraint across subspaces (eq 7).
        alpha: weight of eq 4; only with ``loss_cs``.
        beta: weight of eq 7; only with ``loss_ccs``.
        gamma: weight of the validation mAP in eq 13; only with ``use_phi``.
        use_phi: include the validation mAP in eq 13; only with ``agg: adaptive``.
        agg: weights of the replies: ``adaptive`` (eq 13), ``proportional`` (eq 10 alone, renormalised), or by
            ``samples`` as in FedAvg.
        norm: ``row``, the mean length of the batch's rows, or ``frob``, the Frobenius norm of the batch's matrix.
        pairs: number of modality pairs in eq 2: 4 as printed, or 3 as in public code; δ (two items share a category or
            not) is as printed in both.
        eval_space: features used for retrieval: ``enhanced`` (S') or ``common`` (S). Default: ``common``, but
            ``enhanced`` with ``shared_layers: all``, whose global model gives these.
        shared_layers: layers that are exchanged: both common layers (``base_enhance``), the first alone as in FedCMR
            (``base``), or ``all`` as in FedAvg.
        sums: silos over which the sums of eqs 10 to 13 run: the ``reporters`` of a merge, as printed, or all silos in
            the ``table`` of last scalars, which gives useful weights when a merge has few replies. Default: ``table``
            if merges have fewer replies than a round (``async``, small buffers), else ``reporters``. Not used by
            ``agg: samples``.
        validation: fraction of a silo's items on which its mAP is measured and only this method does not train; with
            few items the mAP is coarse, with one it is 1. 0 measures it on the items of the training. Replaced by
            ``training.validation``, with which no method trains on them.
        preset: what is not given: as ``printed`` in the paper, or ``ours``; no code is public.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "printed": {"norm": "frob", "sums": "reporters"},
        "ours": {"training.validation": 0.2},
    }

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss_cs": ("alpha",),
        "loss_ccs": ("beta",),
        "agg=adaptive": ("use_phi", "gamma"),
        "use_phi": ("gamma",),
        "agg=adaptive|agg=proportional": ("sums",),
    }

    loss_cs: bool = True
    loss_ccs: bool = True
    alpha: NonNegative = 0.1
    beta: NonNegative = 0.1
    gamma: NonNegative = 30.0
    use_phi: bool = True
    agg: Literal["adaptive", "proportional", "samples"] = "adaptive"
    norm: Norm = "row"
    pairs: Literal[3, 4] = 4
    eval_space: Literal["enhanced", "common"] | None = None
    shared_layers: Literal["base", "base_enhance", "all"] = "base_enhance"
    sums: Literal["reporters", "table"] | None = None
    validation: Annotated[float, Field(ge=0.0, le=0.9)] = 0.2
    preset: Literal["printed", "ours"] | None = None


def distance(difference: Tensor, norm: Norm) -> Tensor:
    """Length of a difference of matrices [B, d]: mean of row lengths, or the Frobenius norm."""
    if norm == "row":
        return mean_length(difference)
    frobenius: Tensor = torch.linalg.vector_norm(difference)
    return frobenius


def label_loss(predicted: Tensor, labels: Tensor, norm: Norm) -> Tensor:
    """L_imd of one modality (eq 1) for predictions and multi-hot labels [B, C]; ``frob`` divides by B as printed."""
    length = distance(predicted - labels, norm)
    return length if norm == "row" else length / len(labels)


def discrimination(image: Tensor | None, text: Tensor | None, similar: Tensor, pairs: int) -> Tensor:
    """l_csd (eq 2) over S_V and S_T [B, d]: four pairs of modalities as printed, or three as in public code.

    Each summand is DSCMR's J2, with δ instead of its counts S. Pairs with a modality that the silo lacks (None) are
    left out. ``similar`` [B, B] is 1 if two samples share a category; with three pairs, counts of shared labels.
    """
    terms = [pair_likelihood(present, present, similar) for present in (image, text) if present is not None]
    if image is not None and text is not None:
        terms += [pair_likelihood(image, text, similar)]
        terms += [pair_likelihood(text, image, similar)] if pairs == 4 else []
    return torch.stack(terms).sum()


def consistency(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """l_csc (eq 3): sum of the distances between the modalities in S and in S', all [B, d]."""
    return distance(image - text, norm) + distance(image2 - text2, norm)


def hinge(enhanced: Tensor, other: Tensor, same: Tensor, norm: Norm) -> Tensor:
    """max(0, |S' - S of the other modality| - |S' - S of the same modality|) (eqs 5 and 6), one value per batch."""
    return (distance(enhanced - other, norm) - distance(enhanced - same, norm)).clamp_min(0.0)


def cross_space(image: Tensor, text: Tensor, image2: Tensor, text2: Tensor, norm: Norm) -> Tensor:
    """L_ccs (eq 7): eq 5 for images plus eq 6 for captions."""
    return hinge(image2, text, image, norm) + hinge(text2, image, text, norm)


# --------------------------------------------------------------------------------------------- contribution weights
def proportion(samples: Tensor, labels: Tensor) -> Tensor:
    """Ω = (n_k / Σn)(c_k / Σc) (eq 10), [M]; not renormalised, as printed."""
    return samples / samples.sum() * (labels / labels.sum())


def progress(losses: Tensor) -> Tensor:
    """Ψ = exp(-l_k / mean l) (eq 11), [M]; all 1 if every loss is zero."""
    mean = losses.mean()
    return torch.exp(-losses / mean) if float(mean) > 0 else torch.ones_like(losses)


def quality(maps: Tensor) -> Tensor:
    """Φ = v_k / Σv (eq 12), [M]; uniform if every mAP is zero."""
    total = maps.sum()
    return maps / total if float(total) > 0 else torch.full_like(maps, 1 / len(maps))


def contribution(samples: Tensor, labels: Tensor, losses: Tensor, maps: Tensor, gamma: float) -> Tensor:
    """λ = softmax(Ω + Ψ + γ Φ) (eq 13), [M] float64, summing to 1."""
    return (proportion(samples, labels) + progress(losses) + gamma * quality(maps)).softmax(0)


def local_loss(image: Out | None, text: Out | None, labels: Tensor, options: FedScmrOptions) -> Tensor:
    """Eq 8: alpha L_cs + beta L_ccs + L_imd over the modalities of a batch; terms that need both are skipped for one.

    Args:
        image: S in ``raw``, S' in ``code`` [B, d], label predictions in ``logits`` [B, C]; None without images.
        text: likewise for texts.
        labels: float [B, C], multi-hot.
        options: weights and switches.
    """
    held = [out for out in (image, text) if out is not None]
    norm = options.norm
    total = torch.stack([label_loss(logits_of(out), labels, norm) for out in held]).sum()
    if options.loss_cs:
        similar = similar_items(labels, labels)
        pair = (None if image is None else image.raw, None if text is None else text.raw)
        term = discrimination(*pair, similar, options.pairs)
        if image is not None and text is not None:
            term = term + consistency(image.raw, text.raw, image.code, text.code, norm)
        total = total + options.alpha * term
    if options.loss_ccs and image is not None and text is not None:
        total = total + options.beta * cross_space(image.raw, text.raw, image.code, text.code, norm)
    return total


class FedScmr(PartialFedAvg):
    """FedSCMR, see the module docstring."""

    Options: ClassVar[type[Any]] = FedScmrOptions

    def __init__(self, options: FedScmrOptions, context: Context) -> None:
        # Both terms need pairs: EnhanceNets that single-modality silos left untrained must not dilute the average.
        super().__init__(options, context, modules=options.loss_cs or options.loss_ccs)
        self.sums = options.sums or ("reporters" if context.whole_rounds else "table")

    @staticmethod
    def layers_of(options: FedScmrOptions, context: Context) -> list[str]:
        """The layers that are exchanged.

        Raises:
            InputError: the network has no EnhanceNet, or features are evaluated that the global model does not give.
        """
        layers = [entry.name for entry in context.layout.entries]
        if "shared.enhance.weight" not in layers:
            network = f"{context.objective.base} with layers {', '.join(layers[:3])}, ..."
            raise InputError("objective", network, "base dscmr with enhance true: FedSCMR needs the EnhanceNet")
        if options.shared_layers == "all" and options.eval_space == "common":
            # The global model is evaluated, released and searched with its codes, which are the enhanced features.
            raise InputError(
                "protocol.eval_space", "common with shared_layers all", "enhanced, or another shared_layers"
            )
        return [name for name in layers if name.startswith(_LAYERS[options.shared_layers])]

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The shared layers' update and the scalars of eqs 10 to 12; only paired silos report mAP."""
        scalars = {PartialDelta, Loss, LabelCount}
        return frozenset(scalars | {MeanAveragePrecision} if silo.paired else scalars)

    def initial(self, theta: Tensor) -> State:
        """The initial model and an empty table."""
        count = len(self.context.silos)
        table, versions = torch.full((count, 4), -1.0, dtype=torch.float64), torch.full((count,), -1, dtype=torch.int64)
        return State(theta, {_TABLE: table, _VERSIONS: versions})

    # ----------------------------------------------------------------------- silo side
    def _split(self, local: Local) -> tuple[training.I64, training.I64]:
        """Rows for training and for validation, the same in every task; a single item serves both."""
        if local.validation is not None:
            return np.arange(len(local.dataset)), np.arange(len(local.validation))
        size = len(local.dataset)
        order = numpy_generator(self.context.seed, "validation", local.silo.name).permutation(size)
        held = min(round(self.options.validation * size), size - 1) if local.silo.paired else 0
        return np.sort(order[held:]), np.sort(order[:held] if held else order)

    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on eq 8 over all layers; uploads the shared layers and the scalars, keeps the rest."""
        local.model.load(self.parameters(local, task.payloads))
        base = local.model.flat.detach().clone()
        rows, validation = self._split(local)
        work = EveryLabelledBatch(local, self.context.training.batch_size, self._loss, rows)
        outcome = training.train_epochs(local, self.context, task, base, work)
        up: tuple[Payload, ...] = (
            self.update(outcome.delta, len(rows)),
            Loss(outcome.last_loss),
            LabelCount(training.categories(local, self.context)),
        )
        if local.silo.paired:
            measured = local if local.validation is None else replace(local, dataset=local.validation)
            up = (*up, MeanAveragePrecision(self._validated(measured, validation)))
        return Trained(up, self.kept(local), outcome.loss)

    def _loss(self, image: Out | None, text: Out | None, labels: Tensor, generator: np.random.Generator) -> Tensor:
        return local_loss(image, text, labels, self.options)

    def _validated(self, local: Local, rows: training.I64) -> float:
        """v_k: mean mAP of both retrieval directions on the validation items, each with its first caption."""
        first = np.zeros(len(local.dataset), np.int64)
        with torch.no_grad():
            image, text = training.outputs(local, rows, first)
        assert image is not None and text is not None  # noqa: S101 - only paired silos validate
        labels = training.labels_of(local, rows)[:, fine_columns(self.context.label_names)].cpu().numpy()
        a, b = (self._space(out).cpu().numpy() for out in (image, text))
        order = seeds.derive(self.context.seed, "validation")
        maps = [cosine_metrics(x, y, labels, labels, at=(), order_seed=order).map for x, y in ((a, b), (b, a))]
        return min(1.0, max(0.0, sum(maps) / 2))

    def _space(self, out: Out) -> Tensor:
        enhanced = self.options.eval_space == "enhanced" or self.options.shared_layers == "all"
        return out.code if enhanced else out.raw

    @classmethod
    def traits_of(cls, options: Any) -> Traits:
        """Unless all layers are shared, only personal models are trained completely."""
        everything = options.shared_layers == "all"
        return Traits(personal_only=not everything, personalised=not everything)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The downloaded shared layers inside the silo's personal layers."""
        model = local.model
        model.load(self.parameters(local, payloads))
        device = model.flat.device
        return Encoders(
            lambda x: self._space(model.outputs("image", x.to(device))),
            lambda x: self._space(model.outputs("text", x.to(device))),
        )

    # ----------------------------------------------------------------------- coordinator side
    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Eq 9: the shared layers' updates weighted by eq 13, times the damping of stale replies."""
        table, weights = self._weighed(state, replies, round_)
        merged = self.averaged(state, replies, aggregation.damped_of(weights, replies))
        return MergeResult(replace(merged, tensors=table), _logged(replies, weights))

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """The weights of :meth:`merge`, in a secure sum; silos that drop out of it are not in the table either."""

        def merged(after: State, arrived: Sequence[Update], weights: Tensor) -> MergeResult:
            table, _ = self._weighed(state, arrived, round_)
            return MergeResult(replace(after, tensors=table), _logged(arrived, weights))

        weights = aggregation.damped_of(self._weighed(state, replies, round_)[1], replies)
        return self.summed(state, replies, weights, merged)

    def _weighed(self, state: State, replies: Sequence[Update], round_: int) -> tuple[dict[str, Tensor], Tensor]:
        """The table after a merge, and the weights [M] of the replies by eq 13."""
        table = aggregation.updated_table(
            state.tensors, replies, _VERSIONS, {_TABLE: [self._scalars(reply) for reply in replies]}
        )
        rows = torch.tensor([reply.silo.index for reply in replies])
        known = aggregation.still_known(table[_VERSIONS], round_, self.context.max_age, replies)
        return table, self._weights(table[_TABLE], rows, known)

    def _scalars(self, reply: Update) -> Tensor:
        """A reply's row of the table, float64 [4]."""
        # Eq 11 assumes non-negative losses: with a negative one its exponential may overflow.
        loss = max(0.0, take(reply.payloads, Loss).value)
        measured = take(reply.payloads, MeanAveragePrecision).value if reply.silo.paired else -1.0
        row = [reply.samples, take(reply.payloads, LabelCount).value, loss, measured]
        return torch.tensor(row, dtype=torch.float64)

    def _weights(self, table: Tensor, rows: Tensor, known: Tensor) -> Tensor:
        """Weights [M] of the reporters by eq 13, with sum 1; ``known`` bool [N] selects valid rows of the table."""
        options, measured = self.options, table[known][:, -1]
        known = rows if self.sums == "reporters" else known.nonzero().squeeze(1)
        samples, labels, losses, maps = table[known].unbind(1)
        if options.agg == "samples":
            return samples[torch.isin(known, rows)] / samples[torch.isin(known, rows)].sum()
        if options.agg == "proportional":
            weights = proportion(samples, labels.clamp_min(1))
        else:
            gamma = options.gamma if options.use_phi else 0.0
            maps = _filled(maps, measured)
            weights = contribution(samples, labels.clamp_min(1), losses, maps, gamma)
        weights = weights[torch.isin(known, rows)]
        return weights / weights.sum()


def _logged(replies: Sequence[Update], weights: Tensor) -> dict[str, float]:
    return {f"weight_{reply.silo.name}": float(weight) for reply, weight in zip(replies, weights, strict=True)}


def _filled(maps: Tensor, table: Tensor) -> Tensor:
    """Validation mAPs [M], unknown ones replaced by the median of the known mAPs in ``table`` [K], or 0 without any."""
    known = table[table >= 0]
    return torch.where(maps >= 0, maps, known.quantile(0.5) if len(known) else torch.zeros((), dtype=maps.dtype))


PROTOCOL = FedScmr
