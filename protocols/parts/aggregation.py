"""Weights of the replies and the weighted sum of their updates, for most methods; updates without the missing branch.

Weights are float64 [M], one per reply; updates are flat float32 buffers [P]. Sums run in the fixed silo order, so that
a merge never depends on the order of arrival.

Nothing trains the branch that a single-modality silo has no data for, so its change is exactly zero and is not sent:
the silo uploads a partial delta of the layers it trains, and the coordinator, which knows the silo's modalities,
restores the zeros. Methods that complete the silo's items with public ones train both branches, and nothing is left out
(``Traits.completes_items``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmq.encoders.base import MODALITIES
from fedmq.federation.protocol import Added, MergeResult, ReportedValue, SiloFacts, Traits, Update, WeightedSum
from fedmq.federation.sums import SumLayout
from fedmq.federation.updates import read_only
from fedmq.models.two_tower import BRANCHES, SHARED, branch
from fedmq.wire.layout import Layout
from fedmq.wire.payloads import Delta, PartialDelta, Payload

#: How a merge combines the updates of a branch, the option ``branch_renorm`` of methods: see :func:`merge_updates`.
BranchRenorm = bool | Literal["conflict_free"]
#: Elements per block of a sum, which stays in the cache of a core.
_BLOCK = 1 << 15
#: How reports show the largest weight of a merge.
LARGEST_WEIGHT = ReportedValue(
    "Largest aggregation weight", "weight", "Weight of the reply that counts most in a merge."
)


def branch_slices(layout: Layout) -> dict[str, slice]:
    """Range of each branch in the flat buffer: ``image``, ``text``, and ``shared`` if the network has shared layers."""
    slices: dict[str, slice] = {modality: branch(layout, BRANCHES[modality]) for modality in MODALITIES}
    shared = branch(layout, SHARED)
    return {**slices, "shared": shared} if shared.stop > shared.start else slices


def module_slices(layout: Layout) -> dict[str, slice]:
    """Range of each module in the flat buffer: ``visual.first``, ``shared.base``, ... in the layout's order.

    A silo may train only some modules of a branch: in FedSCMR a single-modality silo does not train the EnhanceNet.
    """
    return slices_by(layout, lambda name: ".".join(name.split(".")[:2]))


def slices_by(layout: Layout, owner: Callable[[str], str]) -> dict[str, slice]:
    """Range in the flat buffer of all parameters whose name has the same owner, which are contiguous."""
    slices, offset = dict[str, slice](), 0
    for entry in layout.entries:
        start = slices[owner(entry.name)].start if owner(entry.name) in slices else offset
        offset += entry.size
        slices[owner(entry.name)] = slice(start, offset)
    return slices


def owns(silo: SiloFacts, name: str) -> bool:
    """Whether a silo trains a branch or module: one of its modalities', or a shared one; EnhanceNets need both."""
    where, _, module = name.partition(".")
    has = {**dict.fromkeys(("image", "visual"), silo.image), "text": silo.text}.get(where, True)
    return has and (silo.paired or module != "enhance")


def ordered(replies: Sequence[Update]) -> list[Update]:
    """Sort replies into the fixed silo order."""
    return sorted(replies, key=lambda reply: (reply.silo.index, reply.sequence))


def extract(theta: Tensor, layout: Layout, names: Sequence[str]) -> Tensor:
    """Some layers of a flat buffer [P], concatenated in the order of ``layout.part(names)``."""
    return torch.cat([theta[:0], *(theta[part] for part in layout.ranges(names))])


def insert(theta: Tensor, layout: Layout, names: Sequence[str], values: Tensor) -> None:
    """Replace some layers of a flat buffer [P] in place by ``values``; the inverse of :func:`extract`."""
    offset = 0
    for part in layout.ranges(names):
        size = part.stop - part.start
        theta[part] = values[offset : offset + size]
        offset += size


def inserted(theta: Tensor, layout: Layout, names: Sequence[str], values: Tensor) -> Tensor:
    """A copy of a flat buffer [P] with some layers replaced by ``values``."""
    result = theta.clone()
    insert(result, layout, names, values)
    return result


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Copy an array into memory from torch's allocator.

    A received array is a read-only view with arbitrary alignment, and the summation order of a matrix product depends
    on the alignment of its operands: results are reproducible only if operands are always aligned the same way.
    """
    copy = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    copy.numpy()[...] = array
    return copy


def sample_weights(samples: Sequence[int]) -> Tensor:
    """n_k / n over the replying silos -> float64 [M] (FedAvg, McMahan et al. 2017, algorithm 1)."""
    counts = torch.tensor(samples, dtype=torch.float64)
    return counts / counts.sum()


def damped_of(weights: Tensor, replies: Sequence[Update]) -> Tensor:
    """Weights [M] times the replies' factors, such as the damping of stale ones, renormalised."""
    return damped(weights, torch.tensor([reply.factor for reply in replies], dtype=torch.float64))


def damped(weights: Tensor, factors: Tensor) -> Tensor:
    """w_k h_k / sum_j w_j h_j: weights [M] times the replies' factors [M], renormalised; all 0 if every product is."""
    scaled = weights * factors
    total = scaled.sum()
    return scaled if float(total) == 0.0 else scaled / total


def decay_at_merge(rate: float, replies: int, cohort: int | None) -> float:
    """mu^(M / |S|): decay of a moving average at a merge of M replies, so that a full round decays it by mu = ``rate``.

    |S| is the number of silos in a full round; None treats this merge as a full round.
    """
    return rate if cohort is None else float(rate ** (replies / cohort))


def updated_table(
    tensors: Mapping[str, Tensor], replies: Sequence[Update], versions: str, values: Mapping[str, Sequence[Tensor]]
) -> dict[str, Tensor]:
    """A table of the silos' last statistics after a merge; replies older than a silo's row are ignored.

    Args:
        tensors: with the table's columns, [N, ...] each.
        replies: M replies of the merge.
        versions: name of the column int64 [N] of each row's base version, -1 for silos that have not reported.
        values: the M replies' values of each other column, by name.
    """
    table = {name: tensors[name].clone() for name in (versions, *values)}
    for place, reply in enumerate(replies):
        row = reply.silo.index
        if reply.base_version >= int(table[versions][row]):
            table[versions][row] = reply.base_version
            for name, column in values.items():
                table[name][row] = column[place]
    return table


def still_known(versions: Tensor, version: int, max_age: int | None, replies: Sequence[Update] = ()) -> Tensor:
    """Which rows of a table of silos' last statistics are in use, bool [N]: those reported at most ``max_age`` ago.

    Args:
        versions: int64 [N], the model version each row was reported for; -1 for silos that have not reported.
        version: current model version.
        max_age: oldest row in use, in versions; None sets no limit.
        replies: replies of this merge, whose silos' rows are in use whatever their age.
    """
    known = versions >= 0
    known = known if max_age is None else known & (version - versions <= max_age)
    known[[reply.silo.index for reply in replies]] = True
    return known


def trained(delta: Tensor, part: slice, has_modality: bool) -> bool:
    """Whether an update changes a branch: the silo has the modality and Δ is not zero throughout the branch."""
    # The first elements nearly always decide; a full pass over float32 costs more than adding the update.
    values = delta[part]
    return has_modality and (bool(values[:256].any()) or bool(values.any()))


def weighted_sum(parts: Sequence[Tensor], weights: Tensor) -> Tensor:
    """sum_k w_k parts_k, [P] each, accumulated in float64 in the order given."""
    total = torch.zeros_like(parts[0], dtype=torch.float64)
    add_weighted(total, parts, weights)
    return total


def add_weighted(total: Tensor, parts: Sequence[Tensor], weights: Tensor) -> None:
    """Add sum_k w_k parts_k to a float64 total [P] in place; parts of weight 0 are skipped, even if not finite."""
    accumulate(total, _counted(parts, weights))


def _counted(parts: Sequence[Tensor], weights: Tensor) -> list[tuple[Tensor, float]]:
    return [pair for pair in zip(parts, weights.tolist(), strict=True) if pair[1] != 0.0]


def accumulate(total: Tensor, pairs: Sequence[tuple[Tensor, float]]) -> None:
    """Add weighted parts [P] to a float64 total [P] in place, in the order given.

    It works block by block so that torch's float64 copies of the parts stay in cache; the result is the same.
    """
    for start in range(0, total.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        for part, weight in pairs:
            total[block].add_(part[block], alpha=weight)


def _add_step(theta: Tensor, pairs: Sequence[tuple[Tensor, float]]) -> None:
    """Add weighted parts [P] to parameters [P] in place: :func:`accumulate` and :func:`stepped` in one pass."""
    buffers = [theta, *(part for part, _ in pairs)]
    for values, *parts in zip(*(torch.split(each, _BLOCK) for each in buffers), strict=True):
        total = torch.zeros_like(values, dtype=torch.float64)
        for part, (_, weight) in zip(parts, pairs, strict=True):
            total.add_(part, alpha=weight)
        values.copy_(total.add_(values))


def branch_weights(weights: Tensor, took_part: Tensor) -> Tensor:
    """Weights [M] of a branch renormalised among the silos that trained it (bool or 0/1 [M]); all 0 if none did."""
    kept = weights * took_part
    total = kept.sum()
    return kept if float(total) == 0.0 else kept / total


def conflict_free(parts: Sequence[Tensor], weights: Tensor, paired: Tensor) -> Tensor:
    """Step of a branch in which single-modality silos add to the paired silos' step and never oppose it.

    With P the mean update of the paired silos, S that of the others and r the others' share of the weights:

        S' = S - min(0, <S, P>) P / |P|^2,    step = P + r min(1, |P| / |S'|) S'

    so <step, P> >= |P|^2 and |step| <= (1 + r) |P|. The projection is that of PCGrad (Yu et al., NeurIPS 2020) between
    tasks and of FedGH (Zhang et al., 2023, arXiv 2309.06692) between all pairs of silos; here only the update
    of the single-modality silos is projected.

    Args:
        parts: updates [n] of the silos that trained the branch or have weight 0.
        weights: float64 [M], sum 1.
        paired: bool [M], which silos hold both modalities.

    Returns:
        float64 [n]; the mean of all updates if no paired silo has moved the branch.
    """
    leading, others = (weighted_sum(parts, branch_weights(weights, side)) for side in (paired, ~paired))
    length = torch.linalg.vector_norm(leading)
    if float(length) == 0.0:
        return others
    others -= (torch.dot(others, leading) / length.square()).clamp(max=0.0) * leading
    longest = torch.maximum(length, torch.linalg.vector_norm(others))
    step: Tensor = leading + weights[~paired].sum() * (length / longest) * others
    return step


def branch_rows(
    updates: Sequence[Update], weights: Tensor, branches: Mapping[str, slice], branch_renorm: BranchRenorm
) -> dict[str, Tensor]:
    """Each branch's weights of the updates, float64 [M]; arguments as for :func:`merge_updates`."""
    rows = dict[str, Tensor]()
    for name, part in branches.items():
        owners = [owns(update.silo, name) for update in updates]
        if branch_renorm:
            active = [_trained(update, name, part, owner) for update, owner in zip(updates, owners, strict=True)]
            rows[name] = branch_weights(weights, torch.tensor(active))
        else:
            rows[name] = weights * torch.tensor(owners)
    return rows


def _trained(update: Update, name: str, part: slice, owner: bool) -> bool:
    """Whether an update changes a branch, or in a secure sum is reported to."""
    if (report := update.report) is not None:
        return owner and name in report.trained
    return trained(update.delta, part, owner)


def merge_updates(
    theta: Tensor,
    updates: Sequence[Update],
    weights: Tensor,
    branches: Mapping[str, slice],
    branch_renorm: BranchRenorm,
) -> Tensor:
    """Add the weighted updates: theta + sum_k w_k Δ_k, branch by branch (RCSR eq 11, FedAvg).

    A silo's Δ is zero on the branch of a modality it lacks. With ``branch_renorm`` such zeros do not shrink the step:
    weights are renormalised among the silos that trained the branch, and ``conflict_free`` combines the updates by
    :func:`conflict_free` instead. Without it, the sum is the plain one of the papers. Values that a silo sends for a
    branch it lacks are ignored, so that noise on them has no effect.

    Args:
        theta: float32 [P].
        updates: M of them, in the fixed silo order.
        weights: float64 [M], sum 1, or all 0 if no reply counts.
        branches: each branch's slice; together they cover the buffer.
        branch_renorm: see above.

    Returns:
        [P], in theta's precision; float32 in a run.
    """
    merged = theta.clone()
    paired = torch.tensor([update.silo.paired for update in updates])
    for name, row in branch_rows(updates, weights, branches, branch_renorm).items():
        part = branches[name]
        parts = [update.delta[part] for update in updates]
        if branch_renorm == "conflict_free":
            merged[part] = stepped(theta[part], conflict_free(parts, row, paired))
        else:
            _add_step(merged[part], _counted(parts, row))
    return merged


def stepped(theta: Tensor, step: Tensor) -> Tensor:
    """Parameters [P] after a step float64 [P], in their own precision; the step is overwritten."""
    return step.add_(theta).to(theta.dtype)


def sum_of(
    theta: Tensor,
    replies: Sequence[Update],
    weights: Tensor,
    branches: Mapping[str, slice],
    branch_renorm: BranchRenorm,
    merged: Callable[[Tensor, Sequence[Update], Tensor], MergeResult],
) -> WeightedSum:
    """:func:`merge_updates` as a secure sum of updates alone, but for ``conflict_free``; replies have reports.

    ``merged`` gives the merge's result from the parameters [P], the replies in the sum and their weights float64 [M].
    """
    rows = branch_rows(replies, weights, branches, branch_renorm)

    def finish(added: Added) -> MergeResult:
        return merged(stepped(theta, added.step), added.replies, added.weights)

    return WeightedSum(weights, rows, branch_renorm is True, finish)


def no_sum(branch_renorm: BranchRenorm) -> str:
    """Why a merge is no secure sum; empty if it is one."""
    return "branch_renorm conflict_free compares the silos' updates" if branch_renorm == "conflict_free" else ""


def row_weights(
    replies: Sequence[Update], layout: SumLayout, kind: type[Payload], *, weighted: bool
) -> dict[str, Tensor]:
    """Weights float64 [M] of the replies, with reports, in the mean of each row of a payload, in a secure sum.

    ``weighted`` weights rows by the samples behind them; otherwise each silo that holds a row counts once.
    """
    counts = supports(replies, layout, kind).double()
    counts = counts if weighted else (counts > 0).double()
    shares = counts / counts.sum(0).clamp(min=1)
    return dict(zip(layout.row_names(kind), shares.T, strict=True))


def supports(replies: Sequence[Update], layout: SumLayout, kind: type[Payload]) -> Tensor:
    """The samples behind each row of a payload, int64 [M, C], that the replies of a secure sum report."""
    first = 0
    for other, rows in layout.rows.items():
        if other is kind:
            break
        first += rows.count
    found = torch.stack([as_tensor(report.support) for report in (reply.report for reply in replies) if report])
    return found[:, first : first + layout.rows[kind].count]


def means_of(means: Mapping[str, Tensor], layout: SumLayout, kind: type[Payload]) -> tuple[Tensor, Tensor]:
    """The means float64 [C, r] of a payload's rows in a secure sum, and which are known, bool [C]; others are zero."""
    names = layout.row_names(kind)
    known = torch.tensor([name in means for name in names])
    empty = torch.zeros(layout.rows[kind].width, dtype=torch.float64)
    return torch.stack([means.get(name, empty) for name in names]), known


def layers_of(layout: Layout, layers: Sequence[str] | None) -> tuple[str, ...]:
    """The layers that a method's updates cover: its shared layers, all of the model if it names none."""
    return tuple(layout.by_name) if layers is None else tuple(layers)


def updating(silo: SiloFacts, traits: Traits) -> SiloFacts:
    """The silo as the other functions here take it: with the modalities whose branches its updates cover."""
    return replace(silo, image=True, text=True) if traits.completes_items else silo


def trainable(layers: Sequence[str], silo: SiloFacts) -> tuple[str, ...]:
    """The subset of ``layers`` that a silo trains; empty if all of them are of the modality it lacks."""
    lacked = tuple(prefix for modality, prefix in BRANCHES.items() if not getattr(silo, modality))
    return tuple(name for name in layers if not name.startswith(lacked))


def shortened(payload: Payload, layout: Layout, silo: SiloFacts) -> Payload:
    """Reduce an update (float32) to the layers that the silo trains; other payloads are returned unchanged."""
    if not isinstance(payload, Delta | PartialDelta):
        return payload
    layers = layers_of(layout, payload.names if isinstance(payload, PartialDelta) else None)
    kept = trainable(layers, silo)
    if kept == layers:
        return payload
    part = layout.part(layers) if isinstance(payload, PartialDelta) else layout
    whole, ranges = read_only(payload.buffer), part.ranges(kept)
    change = whole[ranges[0]] if len(ranges) == 1 else extract(whole, part, kept)
    return PartialDelta(payload.layout_digest, kept, change.numpy(), payload.n_samples)


def completed(payload: Payload, layout: Layout, layers: Sequence[str] | None, silo: SiloFacts) -> Payload:
    """Inverse of :func:`shortened`, at the coordinator: restore the method's update with zeros for the missing branch.

    The payload is as received, checked by ``coordinator.updates``; ``layers`` as in :func:`layers_of`.
    """
    if not isinstance(payload, PartialDelta):
        return payload
    names = layers_of(layout, layers)
    if trainable(names, silo) == names:
        return payload
    part = layout if layers is None else layout.part(names)
    change = torch.empty(part.size)
    for lacking in part.ranges(set(names).difference(payload.names)):
        change[lacking] = 0.0
    insert(change, part, payload.names, read_only(payload.buffer))
    buffer = change.numpy()
    if layers is None:
        return Delta(payload.layout_digest, buffer, payload.n_samples)
    return PartialDelta(payload.layout_digest, names, buffer, payload.n_samples)
