"""Robust merges: replies are changed or left out before a method merges them, so that every method has them.

``norm_bound`` scales updates, ``krum`` leaves replies out, ``median`` and ``trimmed_mean`` put one robust update in the
place of everybody's: whatever weights a method then gives them, weights that sum to 1 over the silos that trained a
branch give that update back (with ``branch_renorm``; the papers' plain sum shrinks it where modalities are missing).

A silo counts for a branch only if it trained it, so that silos which lack a modality neither outvote those that have
it nor look like outliers. Arithmetic is in float64, in the fixed silo order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fedmq.layout import Layout
from fedmq.messages import Delta, Payload
from fedmq.parts import Robust
from fedmq.protocol import Reply
from protocols._merge import branch_slices, ordered

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: Elements of each update looked at together.
_BLOCK = 1 << 16


def norm_bound_factors(norms: F64, bound: float | None) -> F64:
    """min(1, c / ||Δ_k||) of each update [M] (norm thresholding, Sun et al. 2019, section 4).

    Args:
        norms: L2 norms [M].
        bound: c; None takes the median of the norms.
    """
    limit = float(np.median(norms)) if bound is None else bound
    return np.divide(limit, norms, out=np.ones_like(norms), where=norms > limit)


def coordinate_median(updates: F64) -> F64:
    """Coordinate-wise median of updates [M, n] -> [n] (Yin et al. 2018, definition 1)."""
    result: F64 = np.median(updates, axis=0)
    return result


def trimmed_mean(updates: F64, trim: float) -> F64:
    """Coordinate-wise mean of updates [M, n] without its ⌊trim M⌋ least and greatest (Yin et al. 2018, def. 2)."""
    cut = math.floor(trim * len(updates) + 1e-9)
    ranked = np.sort(updates, axis=0)
    result: F64 = ranked[cut : len(updates) - cut].mean(axis=0)
    return result


def krum_scores(distances: F64, byzantine: int) -> F64:
    """Krum's score of each update: its squared distances to its M - f - 2 nearest (Blanchard et al. 2017, sec. 4).

    The mean instead of the sum, which ranks alike, and is fair to updates that can be compared with fewer others.

    Args:
        distances: squared distances [M, M]; NaN where two updates share no branch and cannot be compared.
        byzantine: f.

    Returns:
        [M]; infinite for an update that can be compared with none.
    """
    scores = np.full(len(distances), math.inf)
    for k, row in enumerate(distances):
        others = np.sort(np.delete(row, k)[~np.isnan(np.delete(row, k))])
        nearest = others[: max(1, len(others) + 1 - byzantine - 2)]
        if len(nearest):
            scores[k] = nearest.mean()
    return scores


def multi_krum(scores: F64, keep: int) -> list[int]:
    """The ``keep`` lowest scores' places, in order; keep = 1 is Krum (Blanchard et al. 2017, section 4)."""
    return sorted(np.argsort(scores, kind="stable")[:keep].tolist())


def distances(
    updates: Sequence[F32], active: Mapping[str, npt.NDArray[np.bool_]], branches: Mapping[str, slice]
) -> F64:
    """Mean squared distance per coordinate of each two updates over the branches that both trained -> [M, M].

    Args:
        updates: M of float32 [P].
        active: who trained a branch, [M] each.
        branches: each modality's slice.

    Returns:
        NaN where two share no branch.
    """
    count = len(updates)
    total, size = np.zeros((count, count)), np.zeros((count, count))
    for modality, part in branches.items():
        both = np.outer(active[modality], active[modality])
        size += both * (part.stop - part.start)
        for block in _blocks(part):
            rows = np.stack([update[block].astype(np.float64) for update in updates])
            for k in range(count):
                total[k] += both[k] * ((rows - rows[k]) ** 2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return total / size


def robust_replies(replies: Sequence[Reply], rule: Robust, layout: Layout) -> list[Reply]:
    """The replies a method merges in place of those that came.

    Args:
        replies: as they came; of their payloads only Delta is looked at and changed.
        rule: as in the scenario.
        layout: of the shared parameters.

    Returns:
        In the fixed silo order; the same objects where nothing is changed.
    """
    replies = ordered(replies)
    places = [k for k, reply in enumerate(replies) if _update(reply) is not None]
    if rule.rule == "none" or not places:
        return replies
    updates = [update for reply in replies if (update := _update(reply)) is not None]
    branches = branch_slices(layout)
    active = {
        modality: np.array(
            [getattr(replies[k].silo, modality) and bool(u[part].any()) for k, u in zip(places, updates, strict=True)]
        )
        for modality, part in branches.items()
    }
    match rule.rule:
        case "norm_bound":
            norms = np.array([np.linalg.norm(update.astype(np.float64)) for update in updates])
            factors = norm_bound_factors(norms, rule.bound)
            changed: list[F32] = [
                u if f == 1.0 else u * np.float32(f) for u, f in zip(updates, factors.tolist(), strict=True)
            ]
        case "krum":
            byzantine = math.ceil(rule.byzantine * len(places) - 1e-9)
            scores = krum_scores(distances(updates, active, branches), byzantine)
            kept = multi_krum(scores, rule.keep or max(1, len(places) - byzantine))
            left_out = set(places) - {places[k] for k in kept}
            return [reply for k, reply in enumerate(replies) if k not in left_out]
        case _:
            changed = _replaced(updates, active, branches, rule)
    result = list(replies)
    for k, update in zip(places, changed, strict=True):
        result[k] = _with_update(replies[k], update)
    return result


def _replaced(
    updates: Sequence[F32],
    active: Mapping[str, npt.NDArray[np.bool_]],
    branches: Mapping[str, slice],
    rule: Robust,
) -> list[F32]:
    """One update in the place of everybody's, branch by branch among those that trained it."""
    changed = [np.zeros_like(update) for update in updates]
    for modality, part in branches.items():
        members = np.flatnonzero(active[modality]).tolist()
        if not members:
            continue
        for block in _blocks(part):
            rows = np.stack([updates[k][block].astype(np.float64) for k in members])
            value = coordinate_median(rows) if rule.rule == "median" else trimmed_mean(rows, rule.trim)
            for k in members:
                changed[k][block] = value
    return changed


def _blocks(part: slice) -> list[slice]:
    return [slice(start, min(start + _BLOCK, part.stop)) for start in range(part.start, part.stop, _BLOCK)]


def _update(reply: Reply) -> F32 | None:
    """The update [P] of a reply that brings one of all parameters."""
    found = [payload.buffer for payload in reply.payloads if isinstance(payload, Delta)]
    return None if not found else found[0].astype(np.float32, copy=False)


def _with_update(reply: Reply, update: F32) -> Reply:
    def exchanged(payload: Payload) -> Payload:
        return replace(payload, buffer=update) if isinstance(payload, Delta) else payload

    return replace(reply, payloads=tuple(exchanged(payload) for payload in reply.payloads))
