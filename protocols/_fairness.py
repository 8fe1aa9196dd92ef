"""RCSR's minimax fairness: losses compared within groups of silos, and weights q moved towards the worse off (eq 10).

q is kept as log q, so that no silo's weight can vanish however long a run is or however extreme a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedmq.federation.protocol import SiloFacts

#: How many times its group's running mean a loss counts at most: one reply must not take the merge. Where half of the
#: group's silos would count that much, it is the running mean that is out of touch, and it is raised.
LARGEST = 10.0
#: How many times the median of the group's silos the running mean may be: one reply must not blind it for the rest of
#: the run. Honest losses of anchored silos lie orders of magnitude apart, so this has to be far.
FARTHEST = 1000.0
#: Fewest losses that have a median: of two one may be absurd, and nobody can say which.
FEWEST = 3
#: Losses up to this are no observation: rounding of 1 - cos, or the proximal term of a silo that has nothing else.
NOTHING = 1e-6

Rule = Literal["entropic", "paper", "code"]


def group_of(silo: SiloFacts) -> int:
    """0 paired, 1 image only, 2 text only: losses of different kinds are not comparable."""
    return 0 if silo.paired else 1 if silo.image else 2


def groups_of(mask: Tensor) -> Tensor:
    """The group int64 [N] of silos by the modalities they have, bool [N, 2]; of one that never replied, 0."""
    image, text = mask.bool().T
    return torch.where(image == text, 0, torch.where(image, 1, 2))


def normalised_losses(
    losses: Tensor,
    groups: Tensor,
    running: Tensor,
    seen: Tensor,
    rate: float = 0.9,
    *,
    known: tuple[Tensor, Tensor] | None = None,
    capped: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses divided by their group's running mean (first line of RCSR eq 10).

    A loss of nothing is no observation: the silo had nothing to minimise (its anchor not yet valid, or a batch of one).
    It leaves the running mean alone and counts as average, 1, where the plain ratio would read it as excellent.

    The running mean is held between 1 / :data:`LARGEST` and :data:`FARTHEST` times the median of the group's silos,
    where at least :data:`FEWEST` are known. A loss counts at most :data:`LARGEST` times the running mean; at a group's
    first observation, when there is none, at most :data:`FARTHEST` times the median.

    Args:
        losses: float64 [M], at least 0.
        groups: int64 [M], see :func:`group_of`.
        running: float64 [3] running mean of each group.
        seen: bool [3], whether the group was ever observed; the first observation is taken as it is.
        rate: share of the old mean that is kept.
        known: the last loss of every silo float64 [N], 0 of one that never replied, and its group int64 [N]: a merge of
            few replies has no median of its own. None takes this merge's.
        capped: without it nothing is bound, and no loss but 0 is nothing: the ratio as printed.

    Returns:
        normalised losses [M], and ``running`` and ``seen`` after this round.
    """
    running, seen = running.clone(), seen.clone()
    nothing = NOTHING if capped else 0.0
    observed = losses > nothing
    everybody, their_groups = (losses, groups) if known is None else known
    for group in range(len(running)):
        chosen = observed & (groups == group)
        if not bool(chosen.any()):
            continue
        if capped:
            last = everybody[(everybody > nothing) & (their_groups == group)]
            farthest = torch.tensor(torch.inf, dtype=losses.dtype)
            if len(last) >= FEWEST:
                median = last.median()
                farthest = FARTHEST * median
                running[group] = running[group].clamp(median / LARGEST, farthest)
            most = LARGEST * running[group] if bool(seen[group]) else farthest
            losses = torch.where(chosen, torch.minimum(losses, most), losses)
        mean = losses[chosen].mean()
        running[group] = rate * running[group] + (1 - rate) * mean if bool(seen[group]) else mean
        seen[group] = True
    return torch.where(observed, losses / torch.where(seen, running, 1.0)[groups], 1.0), running, seen


def updated_log_q(
    log_q: Tensor, values: Tensor, chosen: Tensor, rates: Tensor, *, tau: float, rule: Rule = "entropic"
) -> Tensor:
    """One step of q over all silos, renormalised (second line of RCSR eq 10).

    Args:
        log_q: float64 [N].
        values: float64 [M] what pulls: normalised losses, or those minus 1, or raw losses for ``code``.
        chosen: int64 [M] silo of each value.
        rates: float64 [M] step size eta of each value.
        tau: weight of the entropy of q.
        rule: ``entropic`` q^(1 - eta tau) e^(eta value), the exact mirror step; ``paper`` q e^(eta value), without the
            entropy; ``code`` q e^(eta value) and then every entry to the power 1 / (1 + tau).
    """
    result = log_q.clone()
    for value, silo, rate in zip(values.tolist(), chosen.tolist(), rates.tolist(), strict=True):
        pull = 1 - rate * tau if rule == "entropic" else 1.0
        result[silo] = pull * result[silo] + rate * value
    if rule == "code":
        result = result / (1 + tau)
    return result - result.logsumexp(0)


def fused_weights(router: Tensor, log_q: Tensor) -> Tensor:
    """w_k = w_k^R q_k / sum_j w_j^R q_j over the reporters (RCSR eq 11).

    Args:
        router: float64 [M], sum 1.
        log_q: float64 [M] of the reporters.
    """
    return (router.log() + log_q).softmax(0)


def objective(log_q: Tensor, values: Tensor, chosen: Tensor, tau: float) -> Tensor:
    """What q is to maximise: sum over reporters of q_k value_k, plus tau H(q) (RCSR eq 10), for the log."""
    q = log_q.exp()
    return (q[chosen] * values).sum() - tau * (q * log_q).sum()


def initial(count: int) -> dict[str, Tensor]:
    """The state's tensors before the first merge of ``count`` silos: uniform q, no group observed."""
    return {
        "fair_log_q": torch.full((count,), 1 / count, dtype=torch.float64).log(),
        "fair_running": torch.zeros(3, dtype=torch.float64),
        "fair_seen": torch.zeros(3, dtype=torch.bool),
    }


def stepped(
    tensors: Mapping[str, Tensor],
    losses: Tensor,
    rows: Tensor,
    groups: Tensor,
    rates: Tensor,
    *,
    kept: float,
    tau: float,
    rule: Rule,
    center: bool,
    known: tuple[Tensor, Tensor] | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Both lines of RCSR eq 10 for one merge.

    Args:
        tensors: those of :func:`initial`, as the merge finds them.
        losses: float64 [M] of the reporters, at least 0.
        rows: int64 [M] which silos they are.
        groups: int64 [M], see :func:`group_of`.
        rates: float64 [M] step size eta of each.
        kept: share of the groups' old running means.
        tau: weight of the entropy of q.
        rule: see :func:`updated_log_q`; ``code`` is pulled by the raw losses, ``paper`` by uncapped normalised ones.
        center: the normalised loss minus 1 pulls, not the loss itself.
        known: see :func:`normalised_losses`.

    Returns:
        the tensors after the merge, and the value of eq 10 there.
    """
    before = tensors["fair_running"], tensors["fair_seen"]
    normalised, running, seen = normalised_losses(losses, groups, *before, kept, known=known, capped=rule != "paper")
    values = losses if rule == "code" else normalised - 1 if center else normalised
    log_q = updated_log_q(tensors["fair_log_q"], values, rows, rates, tau=tau, rule=rule)
    value = float(objective(log_q, normalised, rows, tau))
    return {"fair_log_q": log_q, "fair_running": running, "fair_seen": seen}, value
