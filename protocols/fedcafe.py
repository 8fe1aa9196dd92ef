"""FedCAFE: hashing with features that a global memory of class centroids enhances (ACM MM, 2024).

Silos train their base loss on DCMH or SHDCH networks with a classifier per modality. The global memory P_g, weighted by
the predicted labels, enhances a tower's outputs (eqs 3 and 4). Three terms pull plain outputs towards enhanced ones
(eq 5), the silo towards the downloaded model (eq 6) and predictions towards labels (eq 7). A silo reports its update
and its memory. The coordinator computes the global memory from all silos' last memories, and gives an update more
weight the more its silo's memory differs from the global one (eqs 9 to 11). The memory is released with the model, as
inference needs it.

The scale and the inputs of the hash loss are options of the base, so that FedAvg can train the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedmq.config.sections import NonNegative, Positive
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import (
    Added,
    Context,
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
    WeightedSum,
    take,
)
from fedmq.federation.sums import SumLayout, SummedRows
from fedmq.models.hash_networks import towers_with
from fedmq.models.objective_registry import OBJECTIVES, TowerPlan, network_of
from fedmq.models.two_tower import Out
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import Delta, Loss, Memory, Model, Payload
from protocols import fedavg
from protocols.parts import aggregation, memory, training
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import cosine, unit
from protocols.parts.personal_model import References
from protocols.parts.prototypes import TOLERANCE

#: Added to all labels in the printed form of eq 7, whose divergence is infinite for zero labels.
_SMOOTHING = 1e-6
#: Columns of the table of the silos' last memories.
_ROWS, _SUPPORT, _VERSIONS = "table_rows", "table_support", "table_versions"
#: Larger reported supports are clamped, so that their sums do not overflow.
_MOST = 2**31 - 1


@dataclass(frozen=True)
class FedCafeOptions:
    """Options of FedCAFE; defaults are the paper's values, and ours where the paper leaves them open.

    Args:
        afe: adaptive feature enhancement: the memory enhances the codes; if false, codes are the plain outputs.
        loss_e: add eq 5, which pulls plain outputs towards enhanced ones.
        loss_c: add eq 6, which pulls enhanced outputs towards the downloaded model's in both modalities.
        loss_d: add eq 7, which pulls predicted labels towards the labels.
        weighted_agg: weight updates by eqs 9 and 10; if false, as FedAvg does.
        alpha: weight of eq 5; only with ``loss_e``.
        eta: weight of eq 6; only with ``loss_c``.
        gamma: weight of eq 7, called mu in the released code; only with ``loss_d``. At the paper's value 1, the term is
            C times larger with ``normalised`` than with ``code``.
        kl: form of eq 7: ``normalised``, KL(L / |L| || L') per sample; ``code``, as in the released code, on raw labels
            and averaged over classes too, which is about C times smaller; ``printed``, in the printed order, on
            smoothed labels.
        le_detach: stop the gradient through the enhanced features of eq 5.
        memory: how memories are computed: ``kmeans_seeded``, cosine K-means initialised with class means, so that rows
            keep their classes; ``class_mean``; ``kmeans_random``, as in the released code; or ``kmeans_two_stage``, as
            in the paper.
        similarity: local and global rows that eq 9 compares: of the same class (``identity``), or each local row with
            its nearest global row (``cluster``; the released code clusters all rows jointly). Memories whose rows have
            no class always use ``cluster``. This and the next three only with ``weighted_agg``.
        weight: eq 10: ``linear``, as in the released code, or ``softmax``, as printed.
        temperature: temperature of the softmax.
        cap: maximum weight of a stale silo, in multiples of an equal weight: its memory differs because it is old.
        branch_renorm: average each branch over the silos that trained it; if false, use the paper's plain sum. With
            ``conflict_free``, the single-modality silos' mean update loses its component against the paired silos' mean
            update, is shortened to at most its length, and is added to it by weight
            (``protocols.parts.aggregation.conflict_free``).
        weighting: weight updates by ``samples`` or ``uniform``; only without ``weighted_agg``.
        weight_samples: multiply eq 10's weights by the silos' numbers of samples; only with ``weighted_agg``.
        preset: what is not given: as ``printed`` in the paper, as in the ``released`` code, or ``ours``.
    """

    PRESETS: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "printed": {
            "kl": "printed",
            "memory": "kmeans_two_stage",
            "weight": "softmax",
            "branch_renorm": False,
            "objective.dcmh.eta": 1.0,
            "training.local_epochs": 20,
        },
        "released": {
            "kl": "code",
            "memory": "kmeans_random",
            "similarity": "cluster",
            "branch_renorm": False,
            "objective.scale": "silos",
            "objective.draws": "fresh",
            "objective.dcmh.eta": 1.0,
            "training.optimizer": "sgd",
            "training.momentum": 0.0,
            "training.learning_rate": 0.0316,
            "training.weight_decay": 0.0,
            "training.schedule": "constant",
            "training.warmup_rounds": 0,
            "training.local_epochs": 20,
        },
        "ours": {"weight_samples": True},
    }

    OF: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "loss_e": ("alpha", "le_detach"),
        "loss_c": ("eta",),
        "loss_d": ("gamma", "kl"),
        "weighted_agg": ("similarity", "weight", "weight_samples", "temperature", "cap"),
        "weight=softmax": ("temperature",),
        "weighted_agg=false": ("weighting",),
    }

    afe: bool = True
    loss_e: bool = True
    loss_c: bool = True
    loss_d: bool = True
    weighted_agg: bool = True
    alpha: NonNegative = 0.1
    eta: NonNegative = 0.1
    gamma: NonNegative = 1.0
    kl: Literal["normalised", "code", "printed"] = "normalised"
    le_detach: bool = False
    memory: memory.Kind = "kmeans_seeded"
    similarity: Literal["identity", "cluster"] = "identity"
    weight: Literal["linear", "softmax"] = "linear"
    temperature: Positive = 1.0
    cap: Annotated[Positive, Field(ge=1.0)] = 3.0
    branch_renorm: aggregation.BranchRenorm = True
    weighting: Literal["samples", "uniform"] = "samples"
    weight_samples: bool = False
    preset: Literal["printed", "released", "ours"] | None = None


def enhancement_loss(enhanced: Tensor, plain: Tensor) -> Tensor:
    """L_E = mean of 1 - cos(V_E, O) over rows; V_E (enhanced) and O (plain) [B, r] (eq 5)."""
    return 1 - cosine(enhanced, plain).mean()


def consistency_loss(enhanced: Tensor, references: Sequence[Tensor]) -> Tensor:
    """L_C: mean over the modalities' references of 1 - cos(V_E, V_E,g), rows [B, r] (eq 6).

    V_E is by the model in training, V_E,g by the downloaded one, a tensor for each modality of the silo.
    """
    return torch.stack([1 - cosine(enhanced, reference).mean() for reference in references]).mean()


def label_divergence(logits: Tensor, labels: Tensor, kl: Literal["normalised", "code", "printed"]) -> Tensor:
    """L_D of logits and multi-hot labels [B, C] (eq 7); see ``FedCafeOptions.kl``."""
    predicted = logits.log_softmax(1)
    match kl:
        case "normalised":
            target = labels / labels.sum(1, keepdim=True).clamp(min=1)
            return (torch.xlogy(target, target) - target * predicted).sum(1).mean()
        case "code":
            return (torch.xlogy(labels, labels) - labels * predicted).mean()
        case "printed":
            smooth = labels + _SMOOTHING
            target = smooth / smooth.sum(1, keepdim=True)
            return (predicted.exp() * (predicted - target.log())).sum(1).mean()


def auxiliary_loss(
    enhanced: Tensor,
    plain: Tensor,
    logits: Tensor,
    labels: Tensor,
    references: Sequence[Tensor],
    options: FedCafeOptions,
) -> Tensor | None:
    """The enabled terms of alpha L_E + eta L_C + gamma L_D (eq 8) of one modality's batch; None if there are none."""
    parts = []
    if options.loss_e:
        parts.append(options.alpha * enhancement_loss(enhanced.detach() if options.le_detach else enhanced, plain))
    if options.loss_c:
        parts.append(options.eta * consistency_loss(enhanced, references))
    if options.loss_d:
        parts.append(options.gamma * label_divergence(logits, labels, options.kl))
    return torch.stack(parts).sum() if parts else None


class FedCafe(FederatedProtocol):
    """FedCAFE, see the module docstring."""

    Options: ClassVar[type[Any]] = FedCafeOptions
    REPORTED: ClassVar[Mapping[str, ReportedValue]] = {
        "weight_largest": aggregation.LARGEST_WEIGHT,
        "difference_mean": ReportedValue("Mean difference between silos", "difference", "Mean over pairs of replies."),
    }
    options: FedCafeOptions

    def __init__(self, options: FedCafeOptions, context: Context) -> None:
        base = context.objective.base
        plan = network_of(context.objective)
        if not isinstance(plan, TowerPlan) or not plan.classifier:
            kinds = {name: OBJECTIVES.find(name) for name in OBJECTIVES.built_in()}
            plans = {name: kind.network(kind.options()) for name, kind in kinds.items()}
            known = ", ".join(name for name, plan in plans.items() if isinstance(plan, TowerPlan) and plan.classifier)
            raise InputError("objective.base", base, f"{known}: FedCAFE needs a classifier in each tower")
        super().__init__(options, context)
        self.classes, self.bits = context.layout.by_name["visual.classifier.weight"].shape
        self.columns = fine_columns(context.label_names)
        self.fedavg = fedavg.FedAvg(
            fedavg.FedAvgOptions(branch_renorm=options.branch_renorm, weighting=options.weighting), context
        )

    @classmethod
    def traits_of(cls, options: FedCafeOptions) -> Traits:
        """With two-stage K-means, an item's image and caption both count in the support of a row."""
        return Traits(counts_items_twice=options.memory == "kmeans_two_stage")

    @property
    def remembers(self) -> bool:
        """Whether the options use the memories."""
        return self.options.afe or self.options.weighted_agg

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update, the loss, and the memory if the options use it."""
        return frozenset({Delta, Loss, Memory} if self.remembers else {Delta, Loss})

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the shape of the memory.

        Raises:
            RemoteWireError: it has another number of rows or columns than the classifiers have classes and inputs.
        """
        for payload in payloads:
            if isinstance(payload, Memory) and payload.centroids.shape != (self.classes, self.bits):
                shape = f"{payload.centroids.shape}, not ({self.classes}, {self.bits})"
                raise RemoteWireError("layout", f"a memory of shape {shape}")

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs on eq 8, then the memory by the trained model."""
        training.load_model(local, take(task.payloads, Model).buffer)
        received = None
        if self.options.afe:
            received = as_tensor(take(task.payloads, Memory).centroids).to(local.model.flat.device)
        with towers_with(local.model, memory=received):
            known = References.by(local) if self.options.loss_c else References(None, None)
            labels = self._labels(local, np.arange(len(local.dataset)))

            def extra(step: training.Step, image: Out | None, text: Out | None) -> Tensor | None:
                own = labels[torch.from_numpy(step.rows).to(labels.device)]
                parts = [
                    self._auxiliary(out, own, known.of(step.rows, step.caption))
                    for out in (image, text)
                    if out is not None
                ]
                terms = [part for part in parts if part is not None]
                return torch.stack(terms).sum() if terms else None

            trained = self.fedavg.trained(local, task, extra=extra)
            if not self.remembers:
                return trained
            centroids, support = self._own_memory(local, task, labels)
        up = Memory(centroids=centroids.numpy(), support=support.numpy())
        return Trained((*trained.payloads, up), trained.state, trained.loss)

    def _labels(self, local: Local, rows: training.I64) -> Tensor:
        return training.labels_of(local, rows)[:, self.columns]

    def _auxiliary(self, out: Out, labels: Tensor, known: Sequence[Tensor]) -> Tensor | None:
        if out.logits is None:
            raise ValueError("FedCAFE's towers have classifiers")
        return auxiliary_loss(out.code, out.plain, out.logits, labels, known, self.options)

    def _own_memory(self, local: Local, task: Task, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The silo's memory, with one caption per item."""
        generator = training.generator_of(self.context, local, task, "memory")
        caption = training.choose_captions(local, generator)
        outputs = training.outputs_of_all(local, caption, lambda out: out.code)
        features = [codes for codes in outputs if codes is not None]
        return memory.local_memory(features, labels.cpu(), self.options.memory, generator)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model, a memory of zeros, which enhances nothing, and an empty table of the silos' memories."""
        if not self.remembers:
            return self.fedavg.initial(theta)
        count = len(self.context.silos)
        tensors = {
            "memory": torch.zeros(self.classes, self.bits),
            "memory_support": torch.zeros(self.classes, dtype=torch.int64),
            _ROWS: torch.zeros(count, self.classes, self.bits),
            _SUPPORT: torch.zeros(count, self.classes, dtype=torch.int64),
            _VERSIONS: torch.full((count,), -1, dtype=torch.int64),
        }
        return State(theta, tensors)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model, and the memory if it enhances codes."""
        return (*self.fedavg.task(state, silo), *self.release(state))

    def release(self, state: State) -> tuple[Payload, ...]:
        """The global memory, which inference needs to enhance codes."""
        if not self.options.afe:
            return ()
        return (Memory(centroids=state.tensors["memory"].numpy(), support=state.tensors["memory_support"].numpy()),)

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Update the global memory from the table, weight the updates by it, and add them (algorithm 1)."""
        if not self.remembers:
            return self.fedavg.merge(state, replies, round_)
        reports = [self._report(reply) for reply in replies]
        columns = {_ROWS: [rows for rows, _ in reports], _SUPPORT: [support for _, support in reports]}
        table = aggregation.updated_table(state.tensors, replies, _VERSIONS, columns)
        rows, support, filled = self._global_memory(state.tensors["memory"], table, round_)
        tensors = {"memory": rows, "memory_support": support, **table}
        if not self.options.weighted_agg:
            merged = self.fedavg.merge(State(state.theta), replies, round_)
            return MergeResult(State(merged.state.theta, tensors, state.values), merged.log)
        by_class = self.options.similarity == "identity" and memory.has_classes(self.options.memory)
        differences = memory.differences(reports, rows, filled, by_class=by_class)
        weights = self._weights(differences, replies)
        theta = aggregation.merge_updates(
            state.theta, replies, weights, self.fedavg.branches, self.options.branch_renorm
        )
        log = {"weight_largest": float(weights.max()), "difference_mean": float(differences.mean())}
        return MergeResult(State(theta, tensors, state.values), log)

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """Updates and memories as secure sums; a row of the global memory is of the silos of this round."""
        weighted, layout = self.fedavg.weigh(state, replies, round_), self.sum_layout()
        if not self.remembers:
            return weighted

        def finish(added: Added) -> MergeResult:
            merged = weighted.finish(added)
            means, known = aggregation.means_of(added.means, layout, Memory)
            reports = (reply.report for reply in added.replies)
            support = torch.stack([as_tensor(report.support) for report in reports if report is not None]).sum(0)
            tensors = {
                **state.tensors,
                "memory": torch.where(known[:, None], unit(means).float(), state.tensors["memory"]),
                "memory_support": torch.where(known, support, state.tensors["memory_support"]),
            }
            return replace(merged, state=replace(merged.state, tensors=tensors))

        rows = {**weighted.rows, **aggregation.row_weights(replies, layout, Memory, weighted=True)}
        return replace(weighted, rows=rows, finish=finish)

    def sum_layout(self) -> SumLayout:
        """The update and the memory, whose rows are means of unit vectors."""
        rows: Mapping[type[Payload], SummedRows] = {Memory: SummedRows(self.classes, self.bits, 1 + TOLERANCE)}
        return replace(self.fedavg.sum_layout(), rows=rows if self.remembers else {})

    def no_sum(self) -> str:
        """Which options need single memories."""
        options = self.options
        if options.weighted_agg:
            return "weighted_agg true compares each silo's memory with the global one; allowed: false"
        if self.remembers and options.memory != "class_mean":
            return f"memory {options.memory} clusters the silos' memories; allowed: class_mean"
        return ""

    def _report(self, reply: Update) -> memory.Rows:
        """A reply's memory; rows longer than 1, which no honest silo sends, are scaled to length 1."""
        payload = take(reply.payloads, Memory)
        rows = as_tensor(payload.centroids)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return rows / lengths.clamp(min=1.0), as_tensor(payload.support).clamp(max=_MOST)

    def _global_memory(self, previous: Tensor, table: dict[str, Tensor], round_: int) -> tuple[Tensor, Tensor, Tensor]:
        """P_g [C, r], samples per row int64 [C], and rows with current support bool [C]."""
        known = aggregation.still_known(table[_VERSIONS], round_, self.context.max_age)
        generator = numpy_generator(self.context.seed, "fedcafe", "memory", round_)
        support = table[_SUPPORT][known]
        rows, filled = memory.global_memory(table[_ROWS][known], support, previous, self.options.memory, generator)
        behind = support.sum(0) if memory.has_classes(self.options.memory) else filled.long()
        return rows, behind, filled

    def _weights(self, differences: Tensor, replies: Sequence[Update]) -> Tensor:
        """Weights by eq 10, times the replies' factors; weights of stale replies are capped."""
        weights = memory.shares(differences, self.options.weight, self.options.temperature)
        if self.options.weight_samples:
            weights = weights * aggregation.sample_weights([reply.samples for reply in replies])
        weights = aggregation.damped_of(weights, replies)
        # Replies whose factor is 0 get nothing of the excess. A weight may be 0 without it: a softmax underflows.
        counted = torch.tensor([reply.factor > 0 for reply in replies])
        stale = torch.tensor([reply.staleness > 0 for reply in replies])[counted]
        limits = torch.where(stale, self.options.cap / max(1, len(stale)), torch.inf).double()
        return weights.masked_scatter(counted, memory.capped(weights[counted], limits))


PROTOCOL = FedCafe
