"""Centroids of what silos have, several for each modality, for silos that lack it: FedBridge's and RCSR's many anchors.

A silo clusters its embeddings, each item once, reports the mean of each cluster, and keeps whose cluster each item is;
the coordinator keeps every silo's last report and hands a silo that lacks a modality all centroids of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmq.config.parts import Modality
from fedmq.encoders.base import MODALITIES
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Context, Local, Reply, SiloFacts, Task, take
from fedmq.seeds import numpy_generator
from fedmq.wire.messages import ClassPrototypes, Delta, PartialDelta, Payload
from protocols import _class_prototypes, _training
from protocols._aggregation import as_tensor
from protocols._clusters import k_means, nearest
from protocols._losses import unit

CENTROIDS = "centroids"
COUNTS = "centroid_counts"
VERSIONS = "centroid_versions"
#: Silo-side, one for each modality: the cluster of each item that the silo ever clustered, and those items' rows.
MEMBERS = "centroid_members"
ROWS = "centroid_rows"


# --------------------------------------------------------------------------------------------------- the silo's half
def members_of(z: Tensor, count: int, support: int, generator: np.random.Generator) -> Tensor:
    """Which K-means cluster each of a silo's embeddings belongs to; none has fewer than ``support``.

    Args:
        z: [n, d] of unit length.
        count: most clusters.
        support: least samples of one.
        generator: of K-means.

    Returns:
        int64 [n], from 0 to ``count - 1``; -1 for samples of clusters that are too small.
    """
    clusters = min(count, len(z) // support)
    if clusters == 0:
        return torch.full((len(z),), -1)
    centres, held = k_means(z, torch.ones(len(z), dtype=torch.float64), clusters, generator)
    there = held.nonzero().squeeze(1)  # a row without points is zero, and no place to be near to
    owner = there[nearest(z, centres[there])]
    return torch.where(torch.bincount(owner, minlength=clusters)[owner] >= support, owner, -1)


def centroids_of(z: Tensor, members: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Unit-length means of the clusters' embeddings.

    Args:
        z: [n, d] of unit length.
        members: int64 [n], see :func:`members_of`.
        count: rows wanted.

    Returns:
        float32 [count, d] and the samples behind each, int64 [count]; rows not used are zero.
    """
    kept = members >= 0
    sizes = torch.bincount(members[kept], minlength=count)
    total = torch.zeros(count, z.shape[1], dtype=torch.float64).index_add_(0, members[kept], z[kept].double())
    return unit(total).float() * (sizes > 0).unsqueeze(1), sizes


def _first(rows: Tensor) -> Tensor:
    """Which places [n] hold a row that none before them holds; drift may bring an item that is there already."""
    order = rows.argsort(stable=True)
    first = torch.ones(len(rows), dtype=torch.bool)
    first[order[1:]] = rows[order[1:]] != rows[order[:-1]]
    return first


def _members(
    local: Local, context: Context, modality: Modality, z: Tensor, count: int, support: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clusters of the silo's items in one modality; an item is in one cluster at most, for ever.

    Made anew in every task, clusters of m and of m - 1 items that differ by one would be sent sooner or later, and
    their difference is that item's embedding, whatever ``support`` says. So where a scenario's drift changes the
    items, a cluster that lost one ends for good, all its items are in none from then on, and items that the silo never
    had are clustered among themselves, into the numbers that are free. An item that is there twice counts once.

    Args:
        local: the silo.
        context: of the run.
        modality: whose clusters.
        z: [n, d] of unit length, the silo's items.
        count: most clusters.
        support: least samples of one.

    Returns:
        int64 [n], from 0 to ``count - 1``, -1 for items in no cluster; and what the silo keeps of it.
    """
    rows, names = local.share.rows, (f"{MEMBERS}_{modality}", f"{ROWS}_{modality}")
    first = _first(rows)
    seen = members = rows[:0]
    if names[0] in local.state:
        members = local.state[names[0]]
        seen = local.state.get(names[1], rows)  # a state from before rows were kept: taken to be of the items of now
        ended = members[~(torch.isin(seen, rows) & _first(seen))]
        members = torch.where(torch.isin(members, ended), -1, members)
    new = first & ~torch.isin(rows, seen)
    if bool(new.any()):
        free = sorted(set(range(count)).difference(members.tolist()))
        generator = numpy_generator(context.seed, "centroids", local.silo.name, modality)
        found = members_of(z[new], len(free), support, generator)
        members = torch.cat([members, torch.tensor([*free, -1])[found]])  # -1 takes the last: no cluster
        seen = torch.cat([seen, rows[new]])
    order = seen.argsort(stable=True)
    place = order[torch.searchsorted(seen[order], rows)]
    return torch.where(first, members[place], -1), dict(zip(names, (members, seen), strict=True))


def report(
    local: Local, context: Context, task: Task, count: int, support: int, *, begun: bool
) -> tuple[ClassPrototypes, dict[str, Tensor]]:
    """Image centroids, then text centroids, all rows of a modality the silo lacks empty; and whose they are.

    Args:
        local: the silo; its model holds the trained parameters.
        context: of the run.
        task: the task.
        count: centroids of a modality, at most.
        support: least samples behind one.
        begun: whether any are made yet; all rows are empty before.
    """
    empty = torch.zeros(count, context.dim), torch.zeros(count, dtype=torch.int64)
    found = [empty, empty]
    kept = {name: each for name, each in local.state.items() if name.startswith((MEMBERS, ROWS))}
    if begun:
        # Always an item's first caption: two reports of which one has another caption of one item differ by that.
        first = None if local.share.text is None else np.zeros(len(local.share), np.int64)
        pair = _training.embed_all(local, first, context.training.batch_size)
        for place, (modality, z) in enumerate(zip(MODALITIES, pair, strict=True)):
            if z is not None:
                members, known = _members(local, context, modality, z, count, support)
                found[place], kept = centroids_of(z, members, count), {**kept, **known}
    prototypes, counts = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ClassPrototypes(prototypes.numpy(), counts.numpy(), "both"), kept


def received(payloads: Sequence[Payload]) -> Tensor | None:
    """Centroids of the modality a silo lacks as its task brings them, float32 [J, d] of unit length; None for none."""
    given = [payload for payload in payloads if isinstance(payload, ClassPrototypes)]
    return unit(as_tensor(given[0].prototypes)) if given else None


# --------------------------------------------------------------------------------------------------- the coordinator's
def check(payloads: Sequence[Payload], count: int, dim: int) -> None:
    """Check the centroids of a reply.

    Raises:
        RemoteWireError: another number of rows or columns, rows too long, or more samples behind them than behind the
            update, which was checked against what the silo has: a query bank weighs by them.
    """
    given = take(payloads, ClassPrototypes)
    _class_prototypes.check_rows(given, 2 * count, dim)
    samples = next(each.n_samples for each in payloads if isinstance(each, Delta | PartialDelta))
    for modality, counts in zip(MODALITIES, np.split(given.counts, 2), strict=True):
        if (most := sum(counts.tolist())) > samples:
            raise RemoteWireError("malformed", f"{modality} centroids of {most} samples, the update of {samples}")


def initial(context: Context, count: int) -> dict[str, Tensor]:
    """Nobody's centroids yet: float32 [silos, 2, count, d], samples behind them, and each report's version."""
    silos = len(context.silos)
    return {
        CENTROIDS: torch.zeros(silos, 2, count, context.dim),
        COUNTS: torch.zeros(silos, 2, count, dtype=torch.int64),
        VERSIONS: torch.full((silos,), -1, dtype=torch.int64),
    }


def download(tensors: Mapping[str, Tensor], silo: SiloFacts) -> tuple[ClassPrototypes, ...]:
    """Everybody's centroids of the modality a silo lacks; nothing for a paired silo, or while there are none."""
    if silo.paired:
        return ()
    lacking = 1 if silo.image else 0
    counts = tensors[COUNTS][:, lacking].reshape(-1)
    rows = tensors[CENTROIDS][:, lacking].flatten(0, 1)
    there = counts > 0
    if not bool(there.any()):
        return ()
    return (ClassPrototypes(rows[there].numpy(), counts[there].numpy(), MODALITIES[lacking]),)


def updated(
    tensors: Mapping[str, Tensor], replies: Sequence[Reply], round_: int, max_age: int | None
) -> dict[str, Tensor]:
    """The table after a merge; a reply older than the entry leaves it alone, entries too old are forgotten.

    Args:
        tensors: of :func:`initial`, or what it became.
        replies: of the merge.
        round_: the merge's number.
        max_age: of entries, in versions; None keeps them for ever.
    """
    centroids, counts, versions = (tensors[name].clone() for name in (CENTROIDS, COUNTS, VERSIONS))
    count = centroids.shape[2]
    for reply in replies:
        if reply.base_version < int(versions[reply.silo.index]):
            continue  # an older report than the one that is known
        versions[reply.silo.index] = reply.base_version
        given = take(reply.payloads, ClassPrototypes)
        own = torch.tensor([[reply.silo.image], [reply.silo.text]])
        counts[reply.silo.index] = as_tensor(given.counts).view(2, count) * own
        rows = unit(as_tensor(given.prototypes)).view(2, count, -1)
        centroids[reply.silo.index] = rows * (counts[reply.silo.index] > 0).unsqueeze(2)
    if max_age is not None:
        counts[round_ - versions > max_age] = 0
    return {CENTROIDS: centroids, COUNTS: counts, VERSIONS: versions}


def known(tensors: Mapping[str, Tensor]) -> float:
    """How many centroids the coordinator knows."""
    return float((tensors[COUNTS] > 0).sum())


def bank(tensors: Mapping[str, Tensor], silos: Sequence[SiloFacts]) -> tuple[ClassPrototypes, ...]:
    """Some silos' centroids as a query bank: all their image rows, then all their text rows, absent ones of count 0.

    Args:
        tensors: of :func:`initial`, or what it became.
        silos: whose.

    Returns:
        One payload; none while a modality has no centroid.
    """
    whose = torch.tensor([silo.index for silo in silos], dtype=torch.int64)
    # [silos, 2, count, ...] to [2, silos * count, ...]
    rows, counts = (tensors[name][whose].transpose(0, 1).flatten(1, 2) for name in (CENTROIDS, COUNTS))
    if not bool((counts > 0).any(1).all()):
        return ()
    return (_class_prototypes.payload(rows.flatten(0, 1), counts.flatten()),)
