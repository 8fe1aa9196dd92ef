"""Robust aggregation: changes or drops replies before a method merges them, so that it works with every method.

``norm_bound`` scales updates, ``krum`` drops replies, ``median`` and ``trimmed_mean`` replace every update by the same
robust update: any method weights that sum to 1 over the silos that train a module then yield that update (with
``branch_renorm: true``; if modalities are missing, the papers' plain sum shortens it, ``conflict_free`` lengthens it).

A silo counts for a module of the network only if it trained it, so that silos that lack a modality neither outvote the
others nor appear as outliers. An idle silo's reply, whose update is zero throughout, and one whose factor is
0 pass unchanged and are not counted, neither in the median norm nor in Krum's M. Arithmetic is in float64, in the fixed
silo order.

With fewer than :data:`LEAST` updates a false one cannot be identified, so rules that compare updates are not applied:
``median`` and ``trimmed_mean`` leave a module unchanged that fewer silos trained, ``krum`` and ``norm_bound`` without a
bound leave the whole model unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Robust
from fedmq.federation.protocol import Update
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, PartialDelta
from protocols.parts.aggregation import module_slices, ordered, owns

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: Minimum number of updates to compare: two have no majority that excludes one.
LEAST = 3
#: Elements per block of each update.
_BLOCK = 1 << 16


def norm_bound_factors(norms: F64, bound: float | None) -> F64:
    """min(1, c / ||Δ_k||) of each update, of their L2 norms [M] (norm thresholding, Sun et al. 2019, section 4).

    Without a bound c it is the median norm of the silos that trained.
    """
    limit = float(np.median(norms)) if bound is None else bound
    return np.divide(limit, norms, out=np.ones_like(norms), where=norms > limit)


def coordinate_median(updates: F64) -> F64:
    """Coordinate-wise median of updates [M, n] -> [n] (Yin et al. 2018, definition 1)."""
    result: F64 = np.median(updates, axis=0)
    return result


def trimmed_mean(updates: F64, trim: float) -> F64:
    """Coordinate-wise mean of updates [M, n] without the ⌊trim M⌋ smallest and largest (Yin et al. 2018, def. 2).

    At least one of three or more is cut at either end, because with few updates the paper's formula cuts none.
    """
    cut = max(1, math.floor(trim * len(updates) + 1e-9))
    ranked = np.sort(updates, axis=0)
    result: F64 = ranked[cut : len(updates) - cut].mean(axis=0)
    return result


def krum_scores(distances: F64, byzantine: int) -> F64:
    """Krum's scores [M]: squared distances of each update to its M - f - 2 nearest (Blanchard et al. 2017, sec. 4).

    Uses the mean instead of the sum: the ranking is the same, without favouring updates comparable with fewer others.
    Squared distances [M, M] are NaN if two updates share no module; an update that shares none has the score infinity.
    """
    scores = np.full(len(distances), math.inf)
    for k, row in enumerate(distances):
        others = np.sort(np.delete(row, k)[~np.isnan(np.delete(row, k))])
        nearest = others[: max(1, len(others) + 1 - byzantine - 2)]
        if len(nearest):
            scores[k] = nearest.mean()
    return scores


def multi_krum(scores: F64, keep: int) -> list[int]:
    """Sorted indices of the ``keep`` lowest scores; keep = 1 is Krum (Blanchard et al. 2017, section 4)."""
    return sorted(np.argsort(scores, kind="stable")[:keep].tolist())


def distances(updates: Sequence[F32], active: Mapping[str, npt.NDArray[np.bool_]], modules: Mapping[str, slice]) -> F64:
    """Mean squared distance per coordinate of each pair of updates float32 [P] over what both trained: [M, M].

    NaN for pairs that share no module. ``active`` bool [M] says which silos trained a module, ``modules`` has its
    slice.
    """
    count = len(updates)
    total, size = np.zeros((count, count)), np.zeros((count, count))
    for module, part in modules.items():
        both = np.outer(active[module], active[module])
        size += both * (part.stop - part.start)
        for block in _blocks(part):
            rows = np.stack([update[block].astype(np.float64) for update in updates])
            for k in range(count):
                total[k] += both[k] * ((rows - rows[k]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / size


def robust_replies(
    replies: Sequence[Update], rule: Robust, layout: Layout, left: Callable[[str], None] = lambda module: None
) -> list[Update]:
    """Apply a robust aggregation rule to the replies of a merge.

    Args:
        replies: as received. Only their updates (Delta, PartialDelta) are read and changed, and only if all cover the
            same parameters; updates that are zero throughout, or whose reply has the factor 0, stay unchanged.
        rule: rule of the scenario.
        layout: layout of the shared parameters.
        left: called with each module that is left as it is because too few silos trained it.

    Returns:
        The replies to merge, in the fixed silo order; unchanged replies are the same objects.
    """
    replies = ordered(replies)
    updated = [(place, _update(reply)) for place, reply in enumerate(replies)]
    sent = [
        (place, update)
        for place, update in updated
        if update is not None and update.buffer.any() and replies[place].factor
    ]
    named = {update.names if isinstance(update, PartialDelta) else None for _, update in sent}
    if rule.rule == "none" or len(named) != 1:
        return replies
    (names,) = named
    modules = module_slices(layout if names is None else layout.part(names))
    updates = [update.buffer.astype(np.float32, copy=False) for _, update in sent]
    owners = {name: np.array([owns(replies[place].silo, name) for place, _ in sent]) for name in modules}
    active = {name: owners[name] & [bool(u[part].any()) for u in updates] for name, part in modules.items()}
    if len(sent) < LEAST and (rule.rule == "krum" or (rule.rule == "norm_bound" and rule.bound is None)):
        for module in modules:
            left(module)
        changed = [np.zeros_like(update) for update in updates]
    elif rule.rule == "krum":
        kept = _krum(distances(updates, active, modules), rule)
        dropped = {place for k, (place, _) in enumerate(sent) if k not in kept}
        return [reply for place, reply in enumerate(replies) if place not in dropped]
    elif rule.rule == "norm_bound":
        changed = _bounded(updates, rule)
    else:
        changed = _replaced(updates, owners, active, modules, rule, left)
    result = list(replies)
    for (place, _), buffer in zip(sent, changed, strict=True):
        payloads = (
            replace(payload, buffer=buffer) if isinstance(payload, Delta | PartialDelta) else payload
            for payload in replies[place].payloads
        )
        result[place] = replace(replies[place], payloads=tuple(payloads))
    return result


def _krum(apart: F64, rule: Robust) -> list[int]:
    """Indices of the updates that Krum keeps, from their distances [M, M]."""
    byzantine = math.ceil(rule.byzantine * len(apart) - 1e-9)
    honest = max(1, len(apart) - byzantine)
    return multi_krum(krum_scores(apart, byzantine), min(rule.keep or honest, honest))


def _bounded(updates: Sequence[F32], rule: Robust) -> list[F32]:
    norms = np.array([np.linalg.norm(update.astype(np.float64)) for update in updates])
    factors = norm_bound_factors(norms, rule.bound).tolist()
    return [u if factor == 1.0 else u * np.float32(factor) for u, factor in zip(updates, factors, strict=True)]


def _replaced(
    updates: Sequence[F32],
    owners: Mapping[str, npt.NDArray[np.bool_]],
    active: Mapping[str, npt.NDArray[np.bool_]],
    modules: Mapping[str, slice],
    rule: Robust,
    left: Callable[[str], None],
) -> list[F32]:
    """Replace the updates of each module by the robust update of the silos that trained it, for all that could."""
    changed = [np.zeros_like(update) for update in updates]
    for module, part in modules.items():
        members = np.flatnonzero(active[module]).tolist()
        if len(members) < LEAST:
            if members:
                left(module)
            continue
        for block in _blocks(part):
            rows = np.stack([updates[k][block].astype(np.float64) for k in members])
            value = coordinate_median(rows) if rule.rule == "median" else trimmed_mean(rows, rule.trim)
            for k in np.flatnonzero(owners[module]).tolist():
                changed[k][block] = value
    return changed


def _blocks(part: slice) -> list[slice]:
    return [slice(start, min(start + _BLOCK, part.stop)) for start in range(part.start, part.stop, _BLOCK)]


def _update(reply: Update) -> Delta | PartialDelta | None:
    """A reply's update, if it has one."""
    return next((payload for payload in reply.payloads if isinstance(payload, Delta | PartialDelta)), None)
