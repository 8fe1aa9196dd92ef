"""The coordinator's half that most methods share: weights of the replies and the sum of their updates.

Weights are float64 [M], one per reply; updates are flat float32 buffers [P]. Sums run in the order given, which is the
fixed silo order, so that a merge never depends on who answered first.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.encoders.base import MODALITIES
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Reply, SiloFacts, take
from fedmq.models.two_tower import BRANCHES, SHARED, branch
from fedmq.wire.fields import all_finite
from fedmq.wire.layout import Layout
from fedmq.wire.messages import Delta, Model, PartialDelta

#: Elements summed at a time.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Update:
    """One reply's update, checked.

    Args:
        silo: who sent it.
        delta: float32 [P].
        samples: local samples behind it.
        factor: the reply's, from its staleness and its silo's rarity.
    """

    silo: SiloFacts
    delta: Tensor
    samples: int
    factor: float


def branch_slices(layout: Layout) -> dict[str, slice]:
    """Where each branch lies in the flat buffer: ``image``, ``text``, and ``shared`` if the network has such layers."""
    found: dict[str, slice] = {modality: branch(layout, BRANCHES[modality]) for modality in MODALITIES}
    shared = branch(layout, SHARED)
    return {**found, "shared": shared} if shared.stop > shared.start else found


def module_slices(layout: Layout) -> dict[str, slice]:
    """Where each module of each branch lies: ``visual.first``, ``shared.base``, ... in the layout's order.

    A silo may train some modules of a branch and not others: in FedSCMR, without both modalities, not the EnhanceNet.
    """
    found, offset = dict[str, slice](), 0
    for entry in layout.entries:
        module = ".".join(entry.name.split(".")[:2])
        start = found[module].start if module in found else offset
        offset += entry.size
        found[module] = slice(start, offset)
    return found


def owns(silo: SiloFacts, name: str) -> bool:
    """Whether a silo trains a branch or module: of a modality it has, a shared one; with both only, an EnhanceNet."""
    where, _, module = name.partition(".")
    has = {**dict.fromkeys(("image", "visual"), silo.image), "text": silo.text}.get(where, True)
    return has and (silo.paired or module != "enhance")


def ordered(replies: Sequence[Reply]) -> list[Reply]:
    """Replies in the fixed silo order, whatever the order of arrival.

    Raises:
        RemoteWireError: one silo's task is there twice.
    """
    result = sorted(replies, key=lambda reply: (reply.silo.index, reply.sequence))
    keys = [(reply.silo.index, reply.sequence) for reply in result]
    if len(set(keys)) != len(keys):
        raise RemoteWireError("replay", "one task of a silo is merged twice")
    return result


def update_of(reply: Reply, layout: Layout) -> Update:
    """The reply's update, checked against the layout.

    Raises:
        RemoteWireError: no Δ, another layout, a wrong size or dtype, NaN or infinity, or no samples behind it.
    """
    payload = take(reply.payloads, Delta)
    if payload.layout_digest != layout.digest:
        raise RemoteWireError("layout", f"{reply.silo.name}: delta of another layout")
    if payload.buffer.dtype != np.float32 or payload.buffer.shape != (layout.size,):
        found = f"{payload.buffer.dtype} {payload.buffer.shape}"
        raise RemoteWireError("layout", f"{reply.silo.name}: delta is {found}, expected float32 ({layout.size},)")
    if payload.n_samples < 1:
        raise RemoteWireError("malformed", f"{reply.silo.name}: delta of no samples")
    if not all_finite(payload.buffer):
        raise RemoteWireError("not_finite", f"{reply.silo.name}: delta holds NaN or infinity")
    delta = read_only(payload.buffer)
    return Update(reply.silo, delta, payload.n_samples, reply.factor)


def partial_update_of(reply: Reply, layout: Layout, names: Sequence[str]) -> Update:
    """The reply's update of some layers, checked; its delta is float32 [size of ``layout.part(names)``].

    Args:
        reply: with a PartialDelta.
        layout: of the whole model.
        names: the layers that are shared, sorted as the layout sorts them.

    Raises:
        RemoteWireError: no PartialDelta, other layers, a wrong size or dtype, NaN or infinity, or no samples behind it.
    """
    payload = take(reply.payloads, PartialDelta)
    part = layout.part(names)
    if payload.layout_digest != layout.digest or payload.names != tuple(entry.name for entry in part.entries):
        raise RemoteWireError("layout", f"{reply.silo.name}: partial delta of other layers")
    whole = Delta(part.digest, payload.buffer, payload.n_samples)
    return update_of(replace(reply, payloads=(whole,)), part)


def partial_model(layout: Layout, names: Sequence[str], theta: Tensor) -> Model:
    """The shared layers of a model as they go down: a buffer of ``layout.part(names)``, named by its digest."""
    return Model(layout.part(names).digest, extract(theta, layout, names).numpy())


def places(layout: Layout, names: Sequence[str]) -> list[slice]:
    """Where some layers lie in the flat buffer, in elements, in the layout's order."""
    wanted, found, offset = set(names), [], 0
    for entry in layout.entries:
        if entry.name in wanted:
            found.append(slice(offset, offset + entry.size))
        offset += entry.size
    return found


def extract(theta: Tensor, layout: Layout, names: Sequence[str]) -> Tensor:
    """Some layers of a flat buffer [P], one after the other, as ``layout.part(names)`` has them."""
    return torch.cat([theta[:0], *(theta[part] for part in places(layout, names))])


def insert(theta: Tensor, layout: Layout, names: Sequence[str], values: Tensor) -> None:
    """Replace some layers of a flat buffer [P] by ``values``, the counterpart of :func:`extract`."""
    offset = 0
    for part in places(layout, names):
        size = part.stop - part.start
        theta[part] = values[offset : offset + size]
        offset += size


def inserted(theta: Tensor, layout: Layout, names: Sequence[str], values: Tensor) -> Tensor:
    """A copy of a flat buffer [P] with some layers replaced by ``values``."""
    result = theta.clone()
    insert(result, layout, names, values)
    return result


def read_only(array: npt.NDArray[Any]) -> Tensor:
    """An array from the wire as a tensor without copying it: for sums alone, which do not depend on where it starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only arrays; nobody writes to this one
        return torch.from_numpy(array)


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """A copy in memory of torch's own allocator.

    Arrays from the wire are read-only views that start wherever their message put them, and the order in which a matrix
    product sums depends on where its operands start: the same numbers must always lie alike.
    """
    copy = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    copy.numpy()[...] = array
    return copy


def sample_weights(samples: Sequence[int]) -> Tensor:
    """n_k / n over the reporters -> float64 [M] (FedAvg, McMahan et al. 2017, algorithm 1)."""
    counts = torch.tensor(samples, dtype=torch.float64)
    return counts / counts.sum()


def damped(weights: Tensor, factors: Tensor) -> Tensor:
    """w_k h_k / sum_j w_j h_j: weights [M] scaled by the replies' factors [M] and renormalised."""
    scaled = weights * factors
    return scaled / scaled.sum()


def kept_share(rate: float, replies: int, cohort: int | None) -> float:
    """mu^(M / |S|): what a moving average keeps at a merge of M replies so that it forgets mu per full round.

    Args:
        rate: mu, the share kept at a full round.
        replies: M.
        cohort: |S|, the silos of a full round; None takes this merge for one.
    """
    return rate if cohort is None else float(rate ** (replies / cohort))


def heard(
    versions: Tensor | None, table: Tensor, replies: Sequence[Reply], version: int, max_age: int | None
) -> tuple[Tensor, Tensor]:
    """The versions that a table's rows stand on after a merge, int64 [N], and which of them count, bool [N].

    The merge's own replies count however old they are.

    Args:
        versions: before; a checkpoint from before rows had versions lacks them, and its rows count as of now.
        table: [N] before, below 0 where nothing is known of a silo.
        replies: of the merge.
        version: of now.
        max_age: see :func:`still_known`.
    """
    versions = torch.where(table >= 0, version, -1) if versions is None else versions.clone()
    rows = [reply.silo.index for reply in replies]
    versions[rows] = torch.tensor([reply.base_version for reply in replies])
    known = still_known(versions, version, max_age)
    known[rows] = True
    return versions, known


def still_known(versions: Tensor, version: int, max_age: int | None) -> Tensor:
    """Which rows of a table of silos' last statistics count, bool [N]: heard of, and not too long ago.

    Args:
        versions: int64 [N], the version a row stands on; -1 where nothing is known.
        version: of now.
        max_age: versions after which a row no longer counts; None keeps all.
    """
    known = versions >= 0
    return known if max_age is None else known & (version - versions <= max_age)


def trained(delta: Tensor, part: slice, has_modality: bool) -> bool:
    """Whether an update changes a branch: the silo has the modality and Δ is not all zero there."""
    # The first few elements nearly always answer it; a full pass over float32 costs more than adding the update.
    values = delta[part]
    return has_modality and (bool(values[:256].any()) or bool(values.any()))


def weighted_sum(parts: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_k w_k parts_k, [P] each, accumulated in float64 in the order given."""
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    add_weighted(total, parts, weights)
    return total


def add_weighted(total: Tensor, parts: Sequence[Tensor], weights: Tensor) -> None:
    """Add sum_k w_k parts_k to a float64 total [P] in place; what weighs nothing is not looked at."""
    accumulate(total, [pair for pair in zip(parts, weights.tolist(), strict=True) if pair[1] != 0.0])


def accumulate(total: Tensor, pairs: Sequence[tuple[Tensor, float]]) -> None:
    """Add weighted parts [P] to a float64 total [P] in place, in the order given.

    Block by block, so that the float64 copies torch makes of the parts stay in cache; the sums are the same.
    """
    for start in range(0, total.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        for part, weight in pairs:
            total[block].add_(part[block], alpha=weight)


def branch_weights(weights: Tensor, took_part: Tensor) -> Tensor:
    """Weights of a branch that is averaged over those that trained it alone; all zero if nobody did.

    Args:
        weights: [M].
        took_part: [M] bool or 0/1.
    """
    kept = weights * took_part
    total = kept.sum()
    return kept if float(total) == 0.0 else kept / total


def merge_updates(
    theta: Tensor, updates: Sequence[Update], weights: Tensor, branches: Mapping[str, slice], branch_renorm: bool
) -> Tensor:
    """Add the weighted updates: theta + sum_k w_k Δ_k, branch by branch (RCSR eq 11, FedAvg).

    A silo's Δ is zero on the branch of a modality it lacks. With ``branch_renorm`` such zeros do not shrink the step:
    the weights are renormalised among those that trained the branch; without it the sum is taken as the papers print
    it. What a silo sends for a branch it does not have is never used, so noise on it cannot enter.

    Args:
        theta: float32 [P].
        updates: M of them, in the fixed silo order.
        weights: float64 [M], sum 1.
        branches: each branch's slice; together they are the whole buffer.
        branch_renorm: see above.

    Returns:
        [P], in theta's precision; float32 in a run.
    """
    step = torch.zeros_like(theta, dtype=torch.float64)
    for name, part in branches.items():
        owners = [owns(update.silo, name) for update in updates]
        parts = [update.delta[part] for update in updates]
        if branch_renorm:
            active = [trained(update.delta, part, owner) for update, owner in zip(updates, owners, strict=True)]
            add_weighted(step[part], parts, branch_weights(weights, torch.tensor(active)))
        else:
            add_weighted(step[part], parts, weights * torch.tensor(owners))
    return step.add_(theta).to(theta.dtype)
