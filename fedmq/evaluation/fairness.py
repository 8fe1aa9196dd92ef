"""Means of metrics over silos, and fairness: how much a metric varies between silos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fedmq.evaluation.metrics import HEADLINE


def means(by_silo: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean over silos of each metric that all silos have."""
    names = sorted(set.intersection(*(set(values) for values in by_silo.values())))
    return {name: math.fsum(values[name] for values in by_silo.values()) / len(by_silo) for name in names}


def weighted_means(by_silo: Mapping[str, Mapping[str, float]], items: Mapping[str, int]) -> dict[str, float]:
    """Mean over silos of each metric that all silos have, each silo weighted by its number of items; {} for no silo."""
    if not by_silo:
        return {}
    total = math.fsum(items[silo] for silo in by_silo)
    first, *others = by_silo.values()
    names = [name for name in first if all(name in other for other in others)]
    return {name: math.fsum(items[silo] * by_silo[silo][name] for silo in by_silo) / total for name in names}


def fairness(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean, population standard deviation, worst and gap (best - worst) over silos; zeros for no silo."""
    v = np.asarray(values, dtype=np.float64)
    if not v.size:
        return {"mean": 0.0, "std": 0.0, "worst": 0.0, "gap": 0.0}
    return {"mean": float(v.mean()), "std": float(v.std()), "worst": float(v.min()), "gap": float(v.max() - v.min())}


def fairness_of(per_silo: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """``std_r1``, ``worst_r1`` and ``gap_r1`` over the silos that have a ``mean_r1``."""
    spread = fairness([values[HEADLINE] for values in per_silo.values() if HEADLINE in values])
    return {f"{name}_r1": spread[name] for name in ("std", "worst", "gap")}
