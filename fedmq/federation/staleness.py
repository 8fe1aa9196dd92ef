"""What a stale or a rare reply is worth: damping functions h(s) of the staleness s, the say of silos that reply rarely,
and the mixing of FedAsync.

Both factors multiply a reply's weight before the weights are renormalised, so they decide between the replies of one
merge. A merge of a lone reply has nothing to decide between: there FedAsync's mixing rate scales the step itself.
"""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from fedmq.config.parts import Staleness


def polynomial(staleness: float, exponent: float) -> float:
    """h(s) = (1 + s)^-a (Xie et al. 2019, section 5.2)."""
    return float((1.0 + staleness) ** -exponent)


def hinge(staleness: float, slope: float, grace: float) -> float:
    """h(s) = 1 up to s = b, then 1 / (a (s - b) + 1) (Xie et al. 2019, section 5.2)."""
    return 1.0 if staleness <= grace else 1.0 / (slope * (staleness - grace) + 1.0)


def damping(function: Staleness, staleness: int) -> float:
    """h(s) as the scenario says; 1 for a fresh reply under every function."""
    match function.kind:
        case "constant":
            return 1.0
        case "polynomial":
            return polynomial(staleness, function.exponent)
        case "hinge":
            return hinge(staleness, function.slope, function.grace)
        case _:
            assert_never(function.kind)


def rarity(own: int, mean: float, most: float) -> float:
    """What a reply counts more because its silo replied more rarely than others: (mean + 1) / (own + 1).

    Without rounds a silo ten times slower is merged a tenth as often, and the model forgets its data. A weight in
    proportion to the time between a silo's replies makes up for it, as in FedAU (Wang and Ji, ICLR 2024); like there it
    is cut off, since one silo's update cannot stand for any number of merges.

    Args:
        own: the silo's replies merged so far.
        mean: of all silos that can be asked.
        most: the cut-off, at least 1; 1/most is the least.
    """
    return min(most, max(1.0 / most, (mean + 1.0) / (own + 1.0)))


def mixed(old: Tensor, merged: Tensor, rate: float) -> Tensor:
    """A merge's step at a rate: theta + a (theta' - theta) (FedAsync, Xie et al. 2019, algorithm 1).

    Args:
        old: [P] parameters before the merge.
        merged: [P] parameters after it.
        rate: a = mixing * h(s), in [0, 1]; 1 gives ``merged`` to the bit.
    """
    return merged if rate == 1.0 else (old.double() + rate * (merged.double() - old.double())).to(merged.dtype)
