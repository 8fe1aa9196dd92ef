"""RCSR: weights updates by a learned router and minimax fairness; RCSR-p has personal adapters (Zhou et al., 2026).

Retrieval-centric semantic routing (arXiv 2604.22885) for silos that may lack a modality. Paired silos train InfoNCE;
other silos are anchored to the global prototype of the modality they lack, and so are single items of a paired silo
that lack one. All add regularisers towards the global prototypes and the downloaded model (eqs 2 to 5). Silos report
prototypes, the update's geometry and the loss (eq 6). The coordinator weights updates by a learned router (eqs 7 to 9)
times a minimax weight (eq 10), and keeps the global prototypes as moving averages (eq 11). With ``personal`` (RCSR-p,
eqs 12 and 13) each silo also fine-tunes a personal adapter on its embeddings, which never leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmq.federation.protocol import (
    Context,
    Encoders,
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
from fedmq.federation.sums import SumLayout
from fedmq.seeds import torch_generator
from fedmq.wire.payloads import (
    ClassPrototypes,
    Delta,
    Geometry,
    Loss,
    ModalityPrototypes,
    Model,
    Payload,
    RouterStatistics,
    RouterSums,
)
from protocols.parts import aggregation, centroids, fairness, personal_adapter, prototypes, router, training, unpaired
from protocols.parts.aggregation import as_tensor
from protocols.parts.item_groups import protected
from protocols.parts.losses import Shared, rcsr_loss, refuse_other_bases, unit
from protocols.parts.router import RcsrOptions, Routed, Statistics
from protocols.parts.silo_router import Measured, SiloRouter

#: Table column: modalities with a prototype in each silo's last report.
_MASK = "table_mask"


class Rcsr(FederatedProtocol):
    """RCSR, see the module docstring."""

    Options: ClassVar[type[Any]] = RcsrOptions
    REPORTED: ClassVar[Mapping[str, ReportedValue]] = {
        "router_loss": ReportedValue("Loss of the router", "loss", "Objective of the router that weights the replies."),
        "fair_value": ReportedValue(
            "Loss with the fairness weights",
            "loss",
            "Weighted mean of the silos' losses; silos with a high loss have a large weight. "
            "If it falls, the worst-served silos improve.",
        ),
        "weight_entropy": ReportedValue(
            "Entropy of the aggregation weights",
            "entropy",
            "Sum of -w ln w over the weights w. High: all replies count equally. Low: a few replies dominate "
            "the merge.",
        ),
        "weight_largest": aggregation.LARGEST_WEIGHT,
        "weight_single": ReportedValue(
            "Weight of silos with one modality",
            "weight",
            "Sum of the aggregation weights of the replies from silos that lack a modality.",
        ),
        "centroids": centroids.KNOWN,
    }
    options: RcsrOptions

    def __init__(self, options: RcsrOptions, context: Context) -> None:
        refuse_other_bases("rcsr", context)
        super().__init__(options, context)
        self._batch_loss = partial(rcsr_loss, tau=options.tau, lambda_anc=options.lambda_anc, lambda_a=options.lambda_a)
        self.branches = aggregation.branch_slices(context.layout)
        self.router_layout = router.layout(context.dim, options.filler == "learned")
        at_silos = options.router_at == "silos"
        self.silo_router = SiloRouter(options, context, self.branches) if at_silos else None
        self.router_over = options.router_over or ("reporters" if context.whole_rounds else "table")

    def uploads(self, silo: SiloFacts) -> frozenset[type[Payload]]:
        """The update and the statistics of eq 6; the prototypes payload includes the mask."""
        if self.silo_router:
            return frozenset({Delta, RouterSums})
        return frozenset({Delta, ModalityPrototypes, Geometry, Loss, *([ClassPrototypes] if self.multi else [])})

    @property
    def multi(self) -> bool:
        """Whether silos are anchored to centroids instead of one prototype."""
        return self.options.anchor == "multi"

    def check(self, payloads: Sequence[Payload]) -> None:
        """Check the shapes of centroids, and of what is added up for routers at the silos, if replies have them.

        Raises:
            RemoteWireError: wrong number of rows or columns.
        """
        for payload in payloads:
            if self.silo_router and isinstance(payload, RouterSums):
                self.silo_router.check(payload)
        if self.multi:
            centroids.check(payloads, self.options.anchor_centroids, self.context.dim)

    # ----------------------------------------------------------------------- silo side
    def train(self, local: Local, task: Task) -> Trained:
        """Local epochs, then the report of eq 6; the silo keeps the update as the reference of the next one."""
        base = training.load_model(local, take(task.payloads, Model).buffer)
        received = prototypes.read_download(take(task.payloads, ModalityPrototypes))
        begin = partial(self._work, received=received, payloads=task.payloads)
        work = unpaired.beside(begin(local), local, self.context, task, begin)
        work = protected(work, local, self.context, task)
        outcome = training.train_epochs(
            local, self.context, task, base, work, lambda_s=self.options.lambda_s, resumable=True
        )
        kept: Mapping[str, Tensor] = {"previous_update": outcome.delta, **self._personal(local, task, received)}
        samples = local.samples
        image, text = self.branches["image"], self.branches["text"]
        geometry = router.geometry(outcome.delta, local.state.get("previous_update"), image, text, samples)
        means = prototypes.silo_prototypes(local, self.context, task)
        if self.silo_router:
            found = Measured(outcome.delta, means, geometry, max(0.0, outcome.loss), samples)
            sent, log_q = self.silo_router.reply(found, local.silo, task, local.state)
            return Trained(sent, {**kept, **log_q}, outcome.loss, work is None)
        filler = received if self.options.filler == "ema" else (None, None)
        payloads: tuple[Payload, ...] = (
            training.delta_payload(self.context, outcome, samples),
            prototypes.upload(means, filler),
            Geometry(values=geometry.float().numpy()),
            Loss(value=max(0.0, outcome.loss)),  # 1 - cos may round to just below 0
        )
        if self.multi:
            begun, most = task.round >= self.options.warmup, self.options.anchor_centroids
            report, members = centroids.report(
                local, self.context, task, most, self.options.anchor_support, begun=begun
            )
            payloads, kept = (*payloads, report), {**kept, **members}
        return Trained(payloads, kept, outcome.loss, work is None)

    @classmethod
    def traits_of(cls, options: RcsrOptions) -> Traits:
        """RCSR-p gives silos personal adapters; without anchors and regulariser, nothing trains on unpaired items."""
        anchored, aligned = options.anchor and options.lambda_anc > 0, options.client_align and options.lambda_a > 0
        return Traits(
            personalised=options.personal != "none", unpaired="anchored" if anchored or aligned else "ignored"
        )

    def _strength(self, payloads: Sequence[Payload]) -> float:
        """s_k of eq 13, from the silo's router weight at its last participation."""
        if self.options.personal == "fixed":
            return self.options.lambda_p
        weight = take(payloads, RouterStatistics).weight
        return personal_adapter.strength(self.options.lambda_p, 0.0 if weight is None else weight)

    def _personal(self, local: Local, task: Task, received: Shared) -> dict[str, Tensor]:
        """The silo's adapter, fine-tuned if personalisation has begun; empty if the silo has none."""
        held = [local, *unpaired.views(local)] if self.options.personal != "none" else []
        held = [part for part in held if part.silo.paired or self._anchored(part.silo, received)]
        parts = [(part, self._personal_loss(part, task, received)) for part in held]
        strength = partial(self._strength, task.payloads)
        return personal_adapter.tuned_or_kept(local, self.context, task, self.options, strength, parts)

    def _personal_loss(self, local: Local, task: Task, received: Shared) -> training.LossFunction:
        """Eq 2 or eq 3 on personalised features, without eq 4, which regularises the shared model."""
        anchored, many = self._anchored(local.silo, received), centroids.received(task.payloads, local.silo)
        return partial(self._batch_loss, shared=received, anchored=anchored, aligned=False, centroids=many)

    def encoders(self, local: Local, payloads: Sequence[Payload]) -> Encoders:
        """The global model with the silo's personal adapter behind both towers (eq 12)."""
        training.load_model(local, take(payloads, Model).buffer)
        return personal_adapter.encoders(local, self._strength(payloads))

    def _anchored(self, silo: SiloFacts, shared: Shared) -> bool:
        """Whether a silo is anchored, which needs a global prototype of the modality it lacks."""
        missing = shared[1] if silo.image else shared[0]
        return bool(self.options.anchor) and self.options.lambda_anc > 0 and missing is not None

    def _work(self, local: Local, received: Shared, payloads: Sequence[Payload]) -> training.Work | None:
        """The training of the silo's dataset; None if its loss has no terms."""
        loss, least = self._loss(local, received, centroids.received(payloads, local.silo)), 1 + local.silo.paired
        return None if loss is None else training.EveryBatch(local, self.context.training.batch_size, loss, least)

    def _loss(self, local: Local, received: Shared, many: Tensor | None) -> training.LossFunction | None:
        """The silo's loss; None if it has no terms, e.g. a single-modality silo before the first prototypes."""
        options, silo = self.options, local.silo
        device = local.model.flat.device
        image, text = (None if prototype is None else prototype.to(device) for prototype in received)
        anchored = self._anchored(silo, received)
        known = (silo.image and image is not None) or (silo.text and text is not None)
        aligned = options.client_align and options.lambda_a > 0 and known
        if not (silo.paired or anchored or aligned):
            return None
        many = None if many is None else many.to(device)
        return partial(self._batch_loss, shared=(image, text), anchored=anchored, aligned=aligned, centroids=many)

    # ----------------------------------------------------------------------- coordinator side
    def initial(self, theta: Tensor) -> State:
        """The initial model and router, uniform q, and empty prototypes and tables."""
        count, dim = len(self.context.silos), self.context.dim
        steps = {"merges": 0, "router_steps": 0}
        if self.silo_router:
            return State(theta, {**prototypes.initial(dim), **self.silo_router.initial()}, steps)
        values = router.initial(self.router_layout, torch_generator(self.context.seed, "rcsr", "router"))
        tensors = {
            **prototypes.initial(dim),
            **(centroids.initial(self.context, self.options.anchor_centroids) if self.multi else {}),
            **fairness.initial(count),
            "table_prototypes": torch.zeros(count, 2, dim),
            _MASK: torch.zeros(count, 2, dtype=torch.bool),
            "table_geometry": torch.zeros(count, 4),
            "table_losses": torch.zeros(count, dtype=torch.float64),
            "table_versions": torch.full((count,), -1, dtype=torch.int64),
            "router": values,
            "router_first": torch.zeros_like(values),
            "router_second": torch.zeros_like(values),
        }
        if self.options.personal == "router":
            # Before its first participation a silo has the uniform weight, which is 1 in relative terms.
            relative = self.options.s_norm == "relative"
            tensors["personal_weights"] = torch.full((count,), 1.0 if relative else 1 / count, dtype=torch.float64)
        return State(theta, tensors, steps)

    def task(self, state: State, silo: SiloFacts) -> tuple[Payload, ...]:
        """The model and the global prototypes; by options also centroids and the silo's router weight."""
        down: tuple[Payload, ...] = (state.model(self.context.layout), prototypes.download(state.tensors))
        if self.multi:
            down = (*down, *centroids.download(state.tensors, silo))
        if self.silo_router:
            down = (*down, self.silo_router.task(state.tensors))
        if self.options.personal != "router":
            return down
        return (*down, RouterStatistics(weight=float(state.tensors["personal_weights"][silo.index])))

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """Weight the replies, step the router and q, add the updates, average the prototypes (algorithm 1)."""
        if self.silo_router:
            return self.silo_router.merge(state, replies, round_)
        routed, renorm = self._weighed(state, replies, round_), self.options.branch_renorm
        theta = aggregation.merge_updates(state.theta, replies, routed.weights, self.branches, renorm)
        return self._merged(theta, replies, routed.weights, state=state, round_=round_, routed=routed)

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """The weights of :meth:`merge`, in a secure sum; silos that drop out of it are not in the tables either."""
        if self.silo_router:
            return self.silo_router.weigh(state, replies, round_)
        weights, renorm = self._weighed(state, replies, round_).weights, self.options.branch_renorm
        merged = partial(self._merged, state=state, round_=round_)
        weighted = aggregation.sum_of(state.theta, replies, weights, self.branches, renorm, merged)
        average = partial(prototypes.with_sum, ema=self.options.ema, cohort=self.context.cohort)
        return average(weighted, state.tensors, replies, self.sum_layout(), unit_length=self.options.proto_unit)

    def sum_layout(self) -> SumLayout:
        """The whole update, and prototypes if they are only averaged: the router, and fillers, need single ones."""
        if self.silo_router:
            return self.silo_router.sum_layout()
        averaged = self.options.router is not True and self.options.masked_ema
        rows = prototypes.summed(self.context.dim) if averaged else {}
        return SumLayout(self.context.layout, None, self.branches, rows=rows)

    def no_sum(self) -> str:
        """Why a merge with centroids is no sum."""
        return "anchor multi needs single centroids" if self.multi else ""

    def no_items(self) -> str:
        """Empty: eqs 2 to 4 depend on a batch and on global prototypes."""
        return ""

    def _weighed(self, state: State, replies: Sequence[Update], round_: int) -> Routed:
        """The weights of the replies, and what the router, q and the tables become with them."""
        options, tensors, statistics = self.options, state.tensors, self._read(replies)
        rows = torch.tensor([reply.silo.index for reply in replies])
        table = aggregation.updated_table(
            tensors,
            replies,
            "table_versions",
            {
                "table_prototypes": list(statistics.prototypes),
                _MASK: list(statistics.mask),
                "table_geometry": list(statistics.geometry),
                "table_losses": list(statistics.losses),
            },
        )
        pool = self._pool(table, replies, statistics, round_)
        weights, within, adam, log = self._routed_weights(state, replies, *pool)
        minimax: Mapping[str, Tensor] = {}
        if options.minimax:
            minimax, log["fair_value"] = self._fairness_stepped(tensors, table, rows, replies, statistics)
            weights = fairness.fused_weights(weights, minimax["fair_log_q"][rows])
        weights = aggregation.damped_of(weights, replies)
        kept = {**table, **minimax, **self._personal_weights(tensors, rows, *within)}
        return Routed(weights, statistics, kept, adam, log)

    def _merged(
        self,
        theta: Tensor,
        replies: Sequence[Update],
        weights: Tensor,
        *,
        state: State,
        round_: int,
        routed: Routed | None = None,
    ) -> MergeResult:
        """The result of a merge from its parameters, replies and weights; in a secure sum, of the silos in it alone."""
        options, tensors = self.options, state.tensors
        routed = routed or self._weighed(state, replies, round_)
        statistics, adam, log = routed.statistics, routed.adam, dict(routed.log)
        averages = prototypes.updated(
            tensors,
            router.filled(statistics.prototypes, statistics.mask, self._filler(adam.values, tensors)),
            statistics.mask,
            weights,
            aggregation.decay_at_merge(options.ema, len(replies), self.context.cohort),
            unit_length=options.proto_unit,
            masked=options.masked_ema,
        )
        stepped = {"router": adam.values, "router_first": adam.first, "router_second": adam.second}
        log |= {"weight_entropy": float(router.entropy(weights)), "weight_largest": float(weights.max())}
        # Shows the effect of fairness on silos that lack a modality.
        log["weight_single"] = float(weights[[not reply.silo.paired for reply in replies]].sum())
        many: Mapping[str, Tensor] = {}
        if self.multi:
            many = centroids.updated(tensors, replies, round_, self.context.max_age)
            log["centroids"] = centroids.known(many)
        values = {**state.values, "merges": state.values["merges"] + 1, "router_steps": adam.steps}
        return MergeResult(State(theta, {**tensors, **routed.kept, **averages, **stepped, **many}, values), log)

    def _routed_weights(
        self, state: State, replies: Sequence[Update], pool: Statistics, where: Tensor
    ) -> tuple[Tensor, tuple[Tensor, int], router.Adam, dict[str, float]]:
        """The reporters' weights w^R and what the router becomes (phase 2 of algorithm 1).

        Returns:
            Weights float64 [M] with sum 1; the reporters' weights in the router's pool, and its size; the router after
            its step; its loss for the log.
        """
        options, tensors, merges = self.options, state.tensors, int(state.values["merges"])
        uniform = options.router == "uniform"
        weights = aggregation.sample_weights([1 if uniform else update.samples for update in replies])
        adam = router.Adam(
            tensors["router"], tensors["router_first"], tensors["router_second"], int(state.values["router_steps"])
        )
        log: dict[str, float] = {}
        # Silos receive their weight within the router's pool, which may include silos outside this merge.
        within = (weights, len(replies))
        if options.router is True and self._router_rate(merges) > 0:
            if merges >= options.warmup:
                routed = self._routed(adam.values, pool, tensors)
                within = (routed[where], len(routed))
                weights = routed[where] / routed[where].sum()
            adam, log["router_loss"] = self._router_stepped(adam, pool, tensors, merges)
        return weights, within, adam, log

    def _router_rate(self, merges: int) -> float:
        """The router's learning rate after this number of merges; ``router_warmup_rate`` in the warm-up."""
        return self.options.router_rate if merges >= self.options.warmup else self.options.router_warmup_rate

    def _fairness_stepped(
        self,
        tensors: Mapping[str, Tensor],
        table: Mapping[str, Tensor],
        rows: Tensor,
        replies: Sequence[Update],
        statistics: Statistics,
    ) -> tuple[Mapping[str, Tensor], float]:
        """The fairness tensors after a step of q (eq 10), and the value of the minimax objective."""
        options = self.options
        damping = torch.tensor([reply.damping for reply in replies], dtype=torch.float64)
        # By last reports, because faults may remove or restore a modality.
        groups = fairness.groups_of(table[_MASK])
        groups[rows] = torch.tensor([fairness.group_of(reply.silo) for reply in replies])
        return fairness.stepped(
            tensors,
            statistics.losses,
            rows,
            groups[rows],
            options.fair_eta * damping,  # a stale loss moves q less
            kept=aggregation.decay_at_merge(options.fair_ema, len(replies), self.context.cohort),
            tau=options.fair_tau,
            rule=options.fair_update,
            center=options.fair_center,
            known=(table["table_losses"], groups),
        )

    def _personal_weights(
        self, tensors: Mapping[str, Tensor], rows: Tensor, weights: Tensor, pool_size: int
    ) -> dict[str, Tensor]:
        """The router weights to send to each silo (eq 13); with ``relative``, times the size of the router's pool."""
        if self.options.personal != "router":
            return {}
        personal = tensors["personal_weights"].clone()
        personal[rows] = (weights * pool_size if self.options.s_norm == "relative" else weights).clamp(0.0, 1.0)
        return {"personal_weights": personal}

    def _read(self, replies: Sequence[Update]) -> Statistics:
        """The reporters' statistics."""
        means, mask = prototypes.read_uploads(replies, self.context.dim)
        geometry = torch.stack([as_tensor(take(reply.payloads, Geometry).values) for reply in replies])
        losses = [max(0.0, take(reply.payloads, Loss).value) for reply in replies]
        return Statistics(means, mask, geometry, torch.tensor(losses, dtype=torch.float64))

    def _pool(
        self, table: Mapping[str, Tensor], replies: Sequence[Update], statistics: Statistics, version: int
    ) -> tuple[Statistics, Tensor]:
        """Statistics of the router's pool of silos, and the reporters' positions in it; outdated rows are excluded."""
        if self.router_over == "reporters":
            return statistics, torch.arange(len(replies))
        valid = aggregation.still_known(table["table_versions"], version, self.context.max_age, replies)
        known = valid.nonzero().squeeze(1)
        # By last reports, because faults may remove or restore a modality.
        columns = (table[name][known] for name in ("table_prototypes", _MASK, "table_geometry", "table_losses"))
        return Statistics(*columns), torch.searchsorted(known, torch.tensor([reply.silo.index for reply in replies]))

    def _filler(self, values: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Fillers [2, d] for missing prototypes at the coordinator; what silos send in their place is ignored."""
        match self.options.filler:
            case "ema":
                return tensors[prototypes.PROTOTYPES]
            case "zero":
                return torch.zeros(2, self.context.dim)
            case "learned":
                return unit(router.views(values, self.router_layout)["filler"])

    def _router_weights(
        self, values: Tensor, pool: Statistics, tensors: Mapping[str, Tensor], generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Router weights [M] (eq 7) and the filled prototypes [M, 2, d] they were computed from."""
        filled = router.filled(pool.prototypes, pool.mask, self._filler(values, tensors))
        hidden = self.options.router_mask == "input"
        losses = pool.losses
        if self.options.router_losses == "normalised":
            groups, seen = fairness.groups_of(pool.mask), (tensors["fair_running"], tensors["fair_seen"])
            losses, _, _ = fairness.normalised_losses(losses, groups, *seen, self.options.fair_ema)
        tokens = router.tokens(filled, pool.mask, pool.geometry, losses, hidden)
        scores = router.logits(router.views(values, self.router_layout), tokens, generator)
        return router.weights(scores), filled

    def _routed(self, values: Tensor, pool: Statistics, tensors: Mapping[str, Tensor]) -> Tensor:
        """The router weights applied in a merge, float64 [M], without dropout."""
        with torch.no_grad():
            return self._router_weights(values, pool, tensors, None)[0]

    def _router_stepped(
        self, adam: router.Adam, pool: Statistics, tensors: Mapping[str, Tensor], merges: int
    ) -> tuple[router.Adam, float]:
        """One step of the router on L_R = L_pc + beta5 L_ac against the prototypes before this merge's average."""
        if not bool(tensors[prototypes.VALID].all()):
            return adam, 0.0
        generator = torch_generator(self.context.seed, "rcsr", "dropout", merges)
        values = adam.values.clone().requires_grad_()
        weights, filled = self._router_weights(values, pool, tensors, generator)
        loss = router.loss(weights, filled, pool.mask, tensors[prototypes.PROTOTYPES], self.options)
        (gradient,) = torch.autograd.grad(loss, values)
        return router.adam_step(adam, gradient, self._router_rate(merges)), float(loss.detach())


PROTOCOL = Rcsr
