"""RCSR's minimax fairness: normalises losses within groups of silos and raises the weights q of high losses (eq 10).

It stores log q, so that no weight underflows to 0 in long runs or under extreme losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedmq.federation.protocol import SiloFacts

#: A loss is capped at this multiple of its group's running mean, so that one reply cannot dominate the merge. If half
#: of the group's silos would be capped, the running mean is too low and is raised.
LARGEST = 10.0
#: The running mean is capped at this multiple of the group's median, so that one reply cannot distort it for the rest
#: of the run. The factor is large because honest losses of anchored silos differ by orders of magnitude.
FARTHEST = 1000.0
#: Minimum number of losses for a median: with two losses, it is unclear which one is the outlier.
FEWEST = 3
#: Losses up to this value are not observations: rounding of 1 - cos, or a silo with only the proximal term.
NOTHING = 1e-6

Rule = Literal["entropic", "paper", "code"]


def group_of(silo: SiloFacts) -> int:
    """0 paired, 1 image only, 2 text only: their losses are not comparable with each other."""
    return 0 if silo.paired else 1 if silo.image else 2


def groups_of(mask: Tensor) -> Tensor:
    """Groups int64 [N] of silos from their modalities bool [N, 2]; 0 for a silo that never replied."""
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

    A loss up to :data:`NOTHING` is not an observation: the silo had nothing to minimise (no valid anchor yet, or a
    batch of one). It does not enter the running mean and counts as average, 1; the plain ratio would rate it excellent.

    If at least :data:`FEWEST` losses of a group are known, the running mean is clamped to between 1 / :data:`LARGEST`
    and :data:`FARTHEST` times their median. A loss is capped at :data:`LARGEST` times the running mean, or, at a
    group's first observation, at :data:`FARTHEST` times the median.

    Args:
        losses: float64 [M], at least 0.
        groups: int64 [M], see :func:`group_of`.
        running: float64 [3] running mean of each group.
        seen: bool [3], whether the group was ever observed; the first observation becomes the running mean.
        rate: fraction of the old mean that is kept.
        known: the last loss of every silo float64 [N], 0 for a silo that never replied, and its group int64 [N], since
            a merge of few replies has no useful median. None uses this merge's losses.
        capped: false disables all bounds, and only a loss of 0 is no observation: the formula as printed.

    Returns:
        Normalised losses [M], and ``running`` and ``seen`` after this round.
    """
    running, seen = running.clone(), seen.clone()
    nothing = NOTHING if capped else 0.0
    observed = losses > nothing
    all_losses, all_groups = (losses, groups) if known is None else known
    for group in range(len(running)):
        chosen = observed & (groups == group)
        if not bool(chosen.any()):
            continue
        if capped:
            last = all_losses[(all_losses > nothing) & (all_groups == group)]
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
        values: float64 [M] gradients: normalised losses, optionally minus 1, or raw losses for ``code``.
        chosen: int64 [M] silo of each value.
        rates: float64 [M] step size eta of each value.
        tau: weight of the entropy of q.
        rule: ``entropic`` q^(1 - eta tau) e^(eta value), the exact mirror step; ``paper`` q e^(eta value), without the
            entropy; ``code`` q e^(eta value), then every entry to the power 1 / (1 + tau).
    """
    result = log_q.clone()
    for value, silo, rate in zip(values.tolist(), chosen.tolist(), rates.tolist(), strict=True):
        pull = 1 - rate * tau if rule == "entropic" else 1.0
        result[silo] = pull * result[silo] + rate * value
    if rule == "code":
        result = result / (1 + tau)
    return result - result.logsumexp(0)


def fused_weights(router: Tensor, log_q: Tensor) -> Tensor:
    """w_k = w_k^R q_k / sum_j w_j^R q_j over the replying silos (RCSR eq 11): w^R and log q, float64 [M]."""
    return (router.log() + log_q).softmax(0)


def objective(log_q: Tensor, values: Tensor, chosen: Tensor, tau: float) -> Tensor:
    """Objective that q maximises, for the log: sum over replying silos of q_k value_k, plus tau H(q) (RCSR eq 10)."""
    q = log_q.exp()
    return (q[chosen] * values).sum() - tau * (q * log_q).sum()


def initial(count: int) -> dict[str, Tensor]:
    """State tensors for ``count`` silos before the first merge: uniform q, no group observed."""
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
    """Both lines of RCSR eq 10 for one merge: the tensors after it, and the value of eq 10.

    Args:
        tensors: from :func:`initial` or an earlier merge.
        losses: float64 [M] of the replying silos, at least 0.
        rows: int64 [M] indices of these silos.
        groups: int64 [M], see :func:`group_of`.
        rates: float64 [M] step size eta of each.
        kept: fraction of the groups' old running means that is kept.
        tau: weight of the entropy of q.
        rule: see :func:`updated_log_q`; ``code`` uses raw losses, ``paper`` uncapped normalised losses.
        center: use the normalised loss minus 1 as the gradient.
        known: see :func:`normalised_losses`.
    """
    before = tensors["fair_running"], tensors["fair_seen"]
    normalised, running, seen = normalised_losses(losses, groups, *before, kept, known=known, capped=rule != "paper")
    values = losses if rule == "code" else normalised - 1 if center else normalised
    log_q = updated_log_q(tensors["fair_log_q"], values, rows, rates, tau=tau, rule=rule)
    value = float(objective(log_q, normalised, rows, tau))
    return {"fair_log_q": log_q, "fair_running": running, "fair_seen": seen}, value
