"""Weights of stale and rare replies: damping functions h(s) of the staleness s, the weight of rarely replying silos,
and FedAsync's mixing.

Both factors multiply a reply's weight before weights are normalised, so they have an effect only among the replies of
one merge. In a merge of a single reply, FedAsync's mixing rate scales the step instead.
"""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from fedmq.config.sections import Staleness


def polynomial(staleness: float, exponent: float) -> float:
    """h(s) = (1 + s)^-a (Xie et al. 2019, section 5.2)."""
    return float((1.0 + staleness) ** -exponent)


def hinge(staleness: float, slope: float, grace: float) -> float:
    """h(s) = 1 up to s = b, then 1 / (a (s - b) + 1) (Xie et al. 2019, section 5.2)."""
    return 1.0 if staleness <= grace else 1.0 / (slope * (staleness - grace) + 1.0)


def damping(function: Staleness, staleness: int) -> float:
    """The scenario's h(s); every function is 1 for a fresh reply, s = 0."""
    match function.kind:
        case "constant":
            return 1.0
        case "polynomial":
            return polynomial(staleness, function.exponent)
        case "hinge":
            return hinge(staleness, function.slope, function.grace)
        case _:
            assert_never(function.kind)


def rarity(replies: int, mean: float, cap: float) -> float:
    """Weight factor of a rarely replying silo: (mean + 1) / (replies + 1), limited to [1/cap, cap].

    Without rounds, a silo that is ten times slower is merged a tenth as often, and the model forgets its data. A weight
    proportional to the interval between a silo's replies compensates for this, as in FedAU (Wang and Ji, ICLR 2024).
    As there, it is capped, since one update of a silo cannot replace arbitrarily many.

    Args:
        replies: number of the silo's merged replies.
        mean: mean of that number over all eligible silos.
        cap: largest factor, at least 1; the smallest is 1/cap.
    """
    return min(cap, max(1.0 / cap, (mean + 1.0) / (replies + 1.0)))


def mixed(old: Tensor, merged: Tensor, rate: float) -> Tensor:
    """Scale a merge's step: theta + a (theta' - theta) (FedAsync, Xie et al. 2019, algorithm 1).

    Args:
        old: [P] parameters before the merge.
        merged: [P] parameters after it.
        rate: a = mixing * h(s), in [0, 1]; 1 returns ``merged`` itself.
    """
    return merged if rate == 1.0 else (old.double() + rate * (merged.double() - old.double())).to(merged.dtype)
