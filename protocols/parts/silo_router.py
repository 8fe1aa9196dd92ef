"""RCSR's router at the silos: each silo computes its own weight, and the coordinator learns only sums.

Our variant of RCSR (Zhou et al., 2026, arXiv 2604.22885) for secure sums: a silo's statistics leave it only as a part
of sums. A task contains the router's parameters and the sums of the last merge. The router's attention scores the
silo's token over two tokens, the silo's own and the mean token of the last merge. The silo's router factor is
g = e^score, and its factor in the merge is u = g q, with its minimax weight q (eq 10), which stays at the silo. Both
factors are bounded, so that no silo counts more than ``router_ratio`` times another one. All sums have equal weights: a
silo multiplies its values by its factor and also adds the factor itself; the coordinator divides by the sum of factors.

The router's loss (eqs 8 and 9) depends on the silos through M_v = sum_k w_k p_v^k, D = sum_k w_k d_k and the entropy of
w alone, with w_k = g_k / sum_j g_j, since sum_k w_k (1 - cos(d_k, unit(D))) = 1 - |D| for unit vectors d_k. So its
gradient is a sum over silos, sum_k w_k s_k grad(score_k), where s_k is the derivative of the loss as the sums move
towards the silo's own values. A silo computes s_k with the sums of the last merge, because those of the present one are
not known until all silos have answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedmq.errors import InputError, RemoteWireError
from fedmq.federation.protocol import Added, Context, MergeResult, SiloFacts, State, Task, Update, WeightedSum, take
from fedmq.federation.sums import SumLayout, SummedRows
from fedmq.seeds import torch_generator
from fedmq.wire.payloads import Delta, ModalityPrototypes, RouterSums
from protocols.parts import aggregation, fairness, prototypes, router
from protocols.parts.aggregation import as_tensor
from protocols.parts.fairness import LARGEST
from protocols.parts.losses import EPSILON, cosine, unit

#: Rows with the sums by the router's weights, which a task carries too: of both prototypes, of d_k, of the token.
_MIXES = ("mix.image", "mix.text", "direction", "token")
#: Rows with the losses of each group, see :func:`protocols.parts.fairness.group_of`.
_LOSSES = ("loss.paired", "loss.image", "loss.text")
#: Numbers of the token's row: those of a token without its prototypes, then the score, then log g.
_SCORE, _LOG, _NUMBERS = 8, 9, 10
#: Gradients are divided by this norm, and longer ones by their own; Adam takes no notice of a constant factor.
_LONGEST = 16.0
#: State tensor: the sums of :data:`_MIXES` when they were last known: the sum of the weights, and of what they weigh.
_MIX = "router_mix"
#: Personal tensor: log q of the silo, relative to a silo of average loss.
_LOG_Q = "fair_log_q"


@dataclass(frozen=True)
class Measured:
    """What a silo has measured in a task."""

    delta: Tensor  # float32 [P], the update
    prototypes: tuple[Tensor | None, Tensor | None]  # [d] of image and text; None of a modality that it lacks
    geometry: Tensor  # [4], see :func:`protocols.parts.router.geometry`
    loss: float  # at least 0
    samples: int  # number of its items; no weight depends on it


@dataclass(frozen=True)
class _Received:
    """The content of a task that the router needs."""

    values: Tensor  # float32 [R], the router's parameters
    mixes: Tensor  # [4, r], see _MIX
    known: bool  # whether all of them are
    token: bool  # whether that of the token is
    mean_loss: float | None  # mean loss of the silo's group; None if unknown
    target: tuple[Tensor | None, Tensor | None]  # global prototypes [d]; None of an unknown one


def objective(mixes: Tensor, target: Tensor, options: router.RcsrOptions) -> Tensor:
    """The router's loss without the entropy (RCSR eqs 8 and 9), as a function of the sums over silos.

    ``mixes`` [3, 1 + d] are, of both prototypes and of the directions, the sum of the weights and the weighted sum; the
    global prototypes are [2, d].
    """
    distance = 1 - cosine(mixes[:2, 1:], target)
    mixed, aim = mixes[2, 1:] / mixes[2, 0].clamp_min(EPSILON), unit(target[0] - target[1])
    alignment = 2 - cosine(mixed, aim) - torch.linalg.vector_norm(mixed)
    alignment = 0.5 * alignment if options.eq9_half else alignment
    total: Tensor = options.beta1 * distance[0] + options.beta2 * distance[1] + options.beta5 * alignment
    return total


def slope(mixes: Tensor, own: Tensor, target: Tensor, options: router.RcsrOptions) -> float:
    """Derivative of :func:`objective` as the sums [3, 1 + d] move towards a silo's own values, of the same shape."""
    step = torch.zeros((), requires_grad=True)
    (found,) = torch.autograd.grad(objective(mixes + step * (own - mixes), target, options), step)
    return float(found)


class SiloRouter:
    """The router at the silos, and the coordinator's part in it.

    Raises:
        InputError: merges do not take whole rounds.
    """

    def __init__(self, options: router.RcsrOptions, context: Context, branches: Mapping[str, slice]) -> None:
        if not context.whole_rounds:
            allowed = "coordinator, or mode sync: a task has the sums of the last round"
            raise InputError("protocol.router_at", "silos, with merges of fewer replies than a round", allowed)
        self.options, self.context, self.branches = options, context, branches
        self.layout = router.layout(context.dim, learned_filler=False)
        self.names = ("prototype.image", "prototype.text", *_MIXES, *(f"branch.{each}" for each in branches), *_LOSSES)
        self._wide = 1 + context.dim
        self._width = max(self._wide, 1 + _NUMBERS)
        self._bound = 0.5 * math.log(options.router_ratio)

    def _used(self, round_: int) -> bool:
        return round_ >= self.options.warmup

    def _rate(self, round_: int) -> float:
        return self.options.router_rate if self._used(round_) else self.options.router_warmup_rate

    def check(self, payload: RouterSums, *, down: bool = False) -> None:
        """Check the shape of a payload.

        Raises:
            RemoteWireError: it is not this run's.
        """
        rows = len(_MIXES) + len(_LOSSES) if down else len(self.names)
        if payload.values.size != self.layout.size or payload.rows.shape != (rows, self._width):
            raise RemoteWireError("layout", f"a {payload.KIND} of another router, or of other rows")

    # ----------------------------------------------------------------------- silo side
    def reply(
        self, found: Measured, silo: SiloFacts, task: Task, before: Mapping[str, Tensor]
    ) -> tuple[tuple[Delta, RouterSums], dict[str, Tensor]]:
        """The silo's weighted update and rows, and the personal tensor that it keeps for the next task.

        Raises:
            RemoteWireError: the task is of another router.
        """
        received, options = self._received(task, silo), self.options
        own, observed = self._own(found, silo, received), found.loss > fairness.NOTHING
        loss = min(found.loss / (received.mean_loss or 1.0), LARGEST)  # as it is added up, since sums are bounded
        relative = loss if observed and received.mean_loss else 1.0
        log_q = self._log_q(before, relative)
        tokens = self._tokens(
            found, own, silo, relative if options.router_losses == "normalised" else found.loss, received
        )
        with torch.no_grad():
            score = float(router.logits(router.views(received.values, self.layout), tokens)[0])
        log_g = self._bounded(score) if self._used(task.round) else 0.0
        g, u = (math.exp(each - self._bound) for each in (log_g, self._bounded(log_g + log_q)))  # at most 1
        numbers = torch.cat([tokens[0, 2 * self.context.dim :], torch.tensor([score, log_g]).clamp(-LARGEST, LARGEST)])
        rows = {name: (u, own[place, 1:]) for place, name in enumerate(self.names[:2]) if own[place, 0]}
        rows |= {name: (g, own[place, 1:]) for place, name in enumerate(_MIXES[:3]) if own[place, 0]}
        rows["token"] = g, numbers
        for name, part in self.branches.items():
            if aggregation.trained(found.delta, part, aggregation.owns(silo, name)):
                rows[f"branch.{name}"] = u, torch.zeros(0)
        if observed:
            rows[_LOSSES[fairness.group_of(silo)]] = loss, torch.zeros(0)
        gradient = torch.zeros(self.layout.size)
        if self._rate(task.round) and received.known:
            gradient = g * self._gradient(received, tokens, own, silo, task, score)
            gradient /= torch.linalg.vector_norm(gradient).clamp_min(_LONGEST)  # so that no value is above 1
        held = torch.tensor([int(name in rows) for name in self.names])
        sent = torch.stack([self._row(*rows.get(name, (0.0, torch.zeros(0)))) for name in self.names])
        update = Delta(self.context.layout.digest, (found.delta * u).numpy(), found.samples)
        kept = {_LOG_Q: torch.tensor(log_q, dtype=torch.float64)}
        return (update, RouterSums(gradient.numpy(), sent.numpy(), held.numpy())), kept

    def _received(self, task: Task, silo: SiloFacts) -> _Received:
        sums = take(task.payloads, RouterSums)
        self.check(sums, down=True)
        rows, known, place = as_tensor(sums.rows), sums.support > 0, len(_MIXES) + fairness.group_of(silo)
        target = prototypes.read_download(take(task.payloads, ModalityPrototypes))
        all_known = bool(known[: len(_MIXES)].all()) and None not in target
        mean = float(rows[place, 0]) if known[place] else None
        return _Received(as_tensor(sums.values), rows[: len(_MIXES)], all_known, bool(known[3]), mean, target)

    def _bounded(self, log_factor: float) -> float:
        return max(-self._bound, min(log_factor, self._bound))

    def _row(self, factor: float, values: Tensor) -> Tensor:
        row = torch.zeros(self._width)
        row[0], row[1 : 1 + len(values)] = factor, factor * values
        return row

    def _log_q(self, before: Mapping[str, Tensor], relative: float) -> float:
        """The silo's log q after a step with its normalised loss (eq 10).

        The entropy pulls it to 0, the log q of a silo of average loss, as the silo does not know the others' q.
        """
        options = self.options
        if not options.minimax:
            return 0.0
        pull = 1 - options.fair_eta * options.fair_tau if options.fair_update == "entropic" else 1.0
        value = relative - 1 if options.fair_center else relative
        return pull * float(before.get(_LOG_Q, torch.zeros(()))) + options.fair_eta * value

    def _own(self, found: Measured, silo: SiloFacts, received: _Received) -> Tensor:
        """[3, 1 + d]: the silo's prototypes, zero of a modality that it lacks, and their direction d_k.

        The first number is 1 of a row that the silo adds. The direction has the filler in place of what is missing.
        """
        own, both = torch.zeros(3, self._wide), list[Tensor]()
        fillers = received.target if self.options.filler == "ema" else (None, None)
        for place, (prototype, filler) in enumerate(zip(found.prototypes, fillers, strict=True)):
            if prototype is not None:
                own[place, 0], own[place, 1:] = 1.0, prototype
            both.append(own[place, 1:] if filler is None or prototype is not None else filler)
        if silo.paired or not self.options.masked_ac:
            own[2, 0], own[2, 1:] = 1.0, unit(both[0] - both[1])
        return own

    def _tokens(self, found: Measured, own: Tensor, silo: SiloFacts, loss: float, received: _Received) -> Tensor:
        """The silo's token and, if known, the mean one of the last merge: [2, 2d + 8], within :data:`LARGEST`."""
        facts = torch.tensor([prototypes.has(silo)]), found.geometry[None].float(), torch.tensor([loss])
        token = router.tokens(own[None, :2, 1:], *facts, hide_filled=True).clamp(-LARGEST, LARGEST)
        if not received.token:
            return token
        mean = torch.cat([received.mixes[:2, 1 : self._wide].flatten(), received.mixes[3, 1 : 1 + _SCORE]])
        return torch.cat([token, mean[None]])

    def _gradient(
        self, received: _Received, tokens: Tensor, own: Tensor, silo: SiloFacts, task: Task, score: float
    ) -> Tensor:
        """s_k grad(score_k), float32 [R], with dropout; zero if the score is at its bound and would move beyond it."""
        target = torch.stack([each for each in received.target if each is not None])
        # The entropy's part is log w_k + H(w), which log g_k stands for: the mean score is kept near 0.
        rising = slope(received.mixes[:3, : self._wide], own, target, self.options)
        rising += self.options.beta4 * self._bounded(score)
        if abs(score) > self._bound and score * rising < 0:
            return torch.zeros_like(received.values)
        generator = torch_generator(self.context.seed, "rcsr", "dropout", task.base_version, silo.name)
        parameters = received.values.clone().requires_grad_()
        found = router.logits(router.views(parameters, self.layout), tokens, generator)[0]
        (gradient,) = torch.autograd.grad(found, parameters)
        return rising * gradient

    # ----------------------------------------------------------------------- coordinator side
    def initial(self) -> dict[str, Tensor]:
        """State tensors beside the global prototypes: the router, the last sums, and the groups' mean losses."""
        values = router.initial(self.layout, torch_generator(self.context.seed, "rcsr", "router"))
        # All scores are 0 at first, as most scores of a random router would be at their bound.
        router.views(values, self.layout)["score.weight"].zero_()
        moments = {name: torch.zeros_like(values) for name in ("router_first", "router_second")}
        groups = {name: tensor for name, tensor in fairness.initial(1).items() if name != "fair_log_q"}
        return {"router": values, **moments, **groups, _MIX: torch.zeros(len(_MIXES), self._width)}

    def task(self, tensors: Mapping[str, Tensor]) -> RouterSums:
        """The payload of a task: the router's parameters, the last sums and the groups' mean losses."""
        losses = torch.zeros(len(_LOSSES), self._width)
        losses[:, 0] = tensors["fair_running"]
        known = torch.cat([tensors[_MIX][:, 0] > 0, tensors["fair_seen"]])
        return RouterSums(tensors["router"].numpy(), torch.cat([tensors[_MIX], losses]).numpy(), known.long().numpy())

    def sum_layout(self) -> SumLayout:
        """The whole update, the gradient, and the rows; all but the losses have a factor of the silo."""
        rows = SummedRows(len(self.names), self._width, LARGEST, common=True)
        layout = SumLayout(
            self.context.layout, None, self.branches, {RouterSums: self.layout.size}, rows={RouterSums: rows}
        )
        weighed = [name for name in layout.sizes if name not in layout.row_names(RouterSums)[-len(_LOSSES) :]]
        return replace(layout, factors=dict.fromkeys(weighed, self.options.router_ratio))

    def weigh(self, state: State, replies: Sequence[Update], round_: int) -> WeightedSum:
        """Equal weights in every sum, as far as the scenario does not damp replies; the factors are the silos' own."""
        count = len(replies)
        weights = aggregation.damped_of(torch.full((count,), 1 / count, dtype=torch.float64), replies)
        rows = aggregation.branch_rows(replies, weights, self.branches, branch_renorm=True)
        rows[RouterSums.KIND] = weights * float(self._trains(state, round_))
        held = self._held(replies)
        for place, name in enumerate(self.sum_layout().row_names(RouterSums)):
            rows[name] = aggregation.branch_weights(weights, held[:, place])
        return WeightedSum(weights, rows, renormalised=True, finish=partial(self._merged, state=state, round_=round_))

    def merge(self, state: State, replies: Sequence[Update], round_: int) -> MergeResult:
        """The merge of replies in clear: the same sums, added by the coordinator."""
        weighted = self.weigh(state, replies, round_)
        step = torch.zeros_like(state.theta, dtype=torch.float64)
        for name, part in self.branches.items():
            aggregation.add_weighted(step[part], [reply.delta[part] for reply in replies], weighted.rows[name])
        sums = [take(reply.payloads, RouterSums) for reply in replies]
        parts = {RouterSums.KIND: [as_tensor(each.values) for each in sums]}
        for place, name in enumerate(self.sum_layout().row_names(RouterSums)):
            parts[name] = [as_tensor(each.rows[place]) for each in sums]
        means = {
            name: aggregation.weighted_sum(part, weighted.rows[name])
            for name, part in parts.items()
            if float(weighted.rows[name].sum())
        }
        return weighted.finish(Added(step, replies, weighted.weights, means))

    def _trains(self, state: State, round_: int) -> bool:
        known = bool((state.tensors[_MIX][:, 0] > 0).all()) and bool(state.tensors[prototypes.VALID].all())
        return known and self._rate(round_) > 0

    @staticmethod
    def _held(replies: Sequence[Update]) -> Tensor:
        """Which rows each reply has, bool [M, C]."""
        reports = (reply.report or take(reply.payloads, RouterSums) for reply in replies)
        return torch.stack([as_tensor(report.support) > 0 for report in reports])

    def _merged(self, added: Added, *, state: State, round_: int) -> MergeResult:
        """The result of a merge from the means over the silos in it."""
        tensors, values, ratio = state.tensors, state.values, self.options.router_ratio
        rows = self.sum_layout().row_names(RouterSums)
        means = {name: added.means[row] for name, row in zip(self.names, rows, strict=True) if row in added.means}
        # Honest factors are within these bounds.
        factors = {name: float(row[0].clamp(1 / ratio, 1.0)) for name, row in means.items()}
        step = added.step.clone()
        for name, part in self.branches.items():
            factor = factors.get(f"branch.{name}")
            step[part] *= 0.0 if factor is None else 1 / factor
        known = torch.tensor([[name in means for name in self.names[:2]]])
        found = torch.zeros(1, 2, self.context.dim, dtype=torch.float64)
        for place, name in enumerate(self.names[:2]):
            if name in means:
                found[0, place] = means[name][1 : self._wide] / factors[name]
        one, count, cohort = torch.ones(1, dtype=torch.float64), len(added.replies), self.context.cohort
        rate = aggregation.decay_at_merge(self.options.ema, count, cohort)
        kept = prototypes.updated(tensors, found.float(), known, one, rate, unit_length=self.options.proto_unit)
        losses = self._mean_losses(tensors, means, aggregation.decay_at_merge(self.options.fair_ema, count, cohort))
        mixes = self._mixes(tensors[_MIX], means, factors, added)
        adam = router.Adam(
            tensors["router"], tensors["router_first"], tensors["router_second"], int(values["router_steps"])
        )
        adam, log = self._stepped(adam, added, mixes, factors, state, round_)
        stepped = {"router": adam.values, "router_first": adam.first, "router_second": adam.second, _MIX: mixes}
        after = {**values, "merges": values["merges"] + 1, "router_steps": adam.steps}
        theta = aggregation.stepped(state.theta, step)
        return MergeResult(State(theta, {**tensors, **kept, **losses, **stepped}, after), log)

    def _mixes(self, before: Tensor, means: Mapping[str, Tensor], factors: Mapping[str, float], added: Added) -> Tensor:
        """The sums by the weights w_k = g_k / sum_j g_j of all silos of the merge; rows that are not known stay."""
        mixes, held = before.clone(), self._held(added.replies).double()
        for place, name in enumerate(_MIXES):
            if name in means and "token" in means:
                share = float((added.weights * held[:, 2 + place]).sum())
                mixes[place] = (means[name] * share / factors["token"]).float()
        return mixes

    @staticmethod
    def _mean_losses(tensors: Mapping[str, Tensor], means: Mapping[str, Tensor], kept: float) -> dict[str, Tensor]:
        """The groups' moving mean losses (eq 10); silos add their loss relative to the last one, if there was one."""
        running, seen = tensors["fair_running"].clone(), tensors["fair_seen"].clone()
        for group, name in enumerate(_LOSSES):
            if name in means and float(mean := means[name][0]) > 0:
                running[group] = running[group] * (kept + (1 - kept) * mean) if seen[group] else mean
                seen[group] = True
        return {"fair_running": running, "fair_seen": seen}

    def _stepped(
        self, adam: router.Adam, added: Added, mixes: Tensor, factors: Mapping[str, float], state: State, round_: int
    ) -> tuple[router.Adam, dict[str, float]]:
        """The router after a step by the summed gradient, with scores whose mean is 0 again; its loss for the log."""
        log = dict[str, float]()
        if "token" not in factors:
            return adam, log
        if self._trains(state, round_) and RouterSums.KIND in added.means:
            gradient = (added.means[RouterSums.KIND] / factors["token"]).float()
            target = state.tensors[prototypes.PROTOTYPES]
            spread = math.log(len(added.replies) * factors["token"]) + self._bound - float(mixes[3, 1 + _LOG])
            loss = float(objective(mixes[:3, : self._wide], target, self.options)) - self.options.beta4 * spread
            adam, log["router_loss"] = router.adam_step(adam, gradient, self._rate(round_)), loss
        # A softmax ignores what all scores have in common; here they have bounds.
        values = adam.values.clone()
        router.views(values, self.layout)["score.bias"] -= mixes[3, 1 + _SCORE]
        return replace(adam, values=values), log
