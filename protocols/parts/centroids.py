"""Several centroids per modality as anchors for silos that lack it, for FedBridge and RCSR's ``anchor: multi``.

A silo clusters its embeddings, assigns each item to a cluster once, and reports the mean of each cluster. The
coordinator keeps every silo's last report and sends a single-modality silo all centroids of the modality it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedmq.config.sections import Modality
from fedmq.encoders.base import MODALITIES
from fedmq.errors import RemoteWireError
from fedmq.federation.protocol import Context, Local, ReportedValue, SiloFacts, Task, Update, take
from fedmq.seeds import numpy_generator
from fedmq.wire.payloads import ClassPrototypes, Delta, PartialDelta, Payload
from protocols.parts import aggregation, class_prototypes, training, unpaired
from protocols.parts.aggregation import as_tensor
from protocols.parts.losses import unit

ITERATIONS = 50


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """Index int64 [n] of the nearest centre, ties to the lowest index; points [n, d], centres [C, d]."""
    x, c = points.double(), centres.double()
    return (c.square().sum(1)[None] - 2 * x @ c.T).argmin(1)


def k_means(points: Tensor, weights: Tensor, count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm from k-means++ seeds, at most 50 iterations.

    Args:
        points: [n, d], at least one.
        weights: [n], above 0.
        count: number of clusters.
        generator: draws the seeds.

    Returns:
        Centres float64 [count, d] and the total weight of each cluster float64 [count]. Rows of weight 0 are zero:
        there are fewer distinct points than clusters, or a cluster lost all its points.
    """
    x, mass = points.double(), weights.double()
    centres = x[_seeds(x, mass, count, generator)]
    owner = nearest(x, centres)
    for _ in range(ITERATIONS):
        centres, held = _means(x, mass, owner, centres)
        before, owner = owner, nearest(x, centres)
        if torch.equal(owner, before):
            break
    _, held = _means(x, mass, owner, centres)
    result, total = torch.zeros(count, x.shape[1], dtype=x.dtype), torch.zeros(count, dtype=x.dtype)
    result[: len(centres)], total[: len(centres)] = torch.where(held[:, None] > 0, centres, 0), held
    return result, total


def _seeds(x: Tensor, mass: Tensor, count: int, generator: np.random.Generator) -> list[int]:
    """k-means++ seeds, each row drawn by weight times squared distance to the nearest seed; fewer if points repeat."""
    chosen: list[int] = []
    distance = torch.ones_like(mass)
    for _ in range(count):
        edges = (mass * distance).cumsum(0)
        if float(edges[-1]) <= 0.0:
            break
        drawn = torch.tensor(generator.random() * float(edges[-1]), dtype=edges.dtype)
        chosen.append(min(int(torch.searchsorted(edges, drawn, right=True)), len(x) - 1))
        new = (x - x[chosen[-1]]).square().sum(1)
        distance = new if len(chosen) == 1 else torch.minimum(distance, new)
    return chosen


def _means(x: Tensor, mass: Tensor, owner: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and weights of the clusters; an empty cluster keeps its previous centre."""
    held = torch.zeros(len(before), dtype=x.dtype).index_add_(0, owner, mass)
    total = torch.zeros_like(before).index_add_(0, owner, x * mass[:, None])
    return torch.where(held[:, None] > 0, total / held.clamp(min=1e-300)[:, None], before), held


CENTROIDS = "centroids"
COUNTS = "centroid_counts"
VERSIONS = "centroid_versions"
#: At the silo, one tensor per modality: the cluster of every item that the silo has clustered, and those items' rows.
MEMBERS = "centroid_members"
ROWS = "centroid_rows"
#: How reports show the number of :func:`known` centroids.
KNOWN = ReportedValue("Known cluster centroids", "count", "Centroids for which at least one silo has sent a value.")


# --------------------------------------------------------------------------------------------------- silo side
def members_of(z: Tensor, count: int, support: int, generator: np.random.Generator) -> Tensor:
    """K-means cluster, of at most ``count``, of each of a silo's embeddings [n, d] of unit length: int64 [n] from 0.

    Clusters of fewer than ``support`` samples are dropped; their samples have -1.
    """
    clusters = min(count, len(z) // support)
    if clusters == 0:
        return torch.full((len(z),), -1)
    centres, held = k_means(z, torch.ones(len(z), dtype=torch.float64), clusters, generator)
    occupied = held.nonzero().squeeze(1)  # rows of empty clusters are zero and must not attract points
    owner = occupied[nearest(z, centres[occupied])]
    return torch.where(torch.bincount(owner, minlength=clusters)[owner] >= support, owner, -1)


def centroids_of(z: Tensor, members: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Unit-length means of the clusters' embeddings [n, d], whose members are as of :func:`members_of`.

    Returns:
        float32 [count, d] and the number of samples per cluster, int64 [count]; unused rows are zero.
    """
    kept = members >= 0
    sizes = torch.bincount(members[kept], minlength=count)
    total = torch.zeros(count, z.shape[1], dtype=torch.float64).index_add_(0, members[kept], z[kept].double())
    return unit(total).float() * (sizes > 0).unsqueeze(1), sizes


def _first(rows: Tensor) -> Tensor:
    """Mask bool [n] of first occurrences in rows [n]; drift may add an item that the silo already has."""
    order = rows.argsort(stable=True)
    first = torch.ones(len(rows), dtype=torch.bool)
    first[order[1:]] = rows[order[1:]] != rows[order[:-1]]
    return first


def _members(
    local: Local, context: Context, modality: Modality, z: Tensor, count: int, support: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clusters of the silo's items in one modality; each item is assigned once and never moves to another cluster.

    If every task clustered the items again, a silo would eventually send two clusters that differ in one item, and
    their difference reveals that item's embedding, whatever ``support`` is. So when a scenario's drift removes an item,
    its cluster is retired and the remaining items of the cluster belong to none. Items new to the silo are clustered
    among themselves, into free cluster numbers. An item that occurs twice counts once.

    Returns:
        As :func:`members_of` of the items' embeddings z [n, d]; and the tensors for the silo's state.
    """
    rows, names = local.dataset.rows, (f"{MEMBERS}_{modality}", f"{ROWS}_{modality}")
    first = _first(rows)
    seen = members = rows[:0]
    if names[0] in local.state:
        members, seen = local.state[names[0]], local.state[names[1]]
        ended = members[~(torch.isin(seen, rows) & _first(seen))]
        members = torch.where(torch.isin(members, ended), -1, members)
    new = first & ~torch.isin(rows, seen)
    if bool(new.any()):
        free = sorted(set(range(count)).difference(members.tolist()))
        generator = numpy_generator(context.seed, "centroids", local.silo.name, modality)
        clusters = members_of(z[new], len(free), support, generator)
        members = torch.cat([members, torch.tensor([*free, -1])[clusters]])  # index -1 picks the last entry, -1
        seen = torch.cat([seen, rows[new]])
    order = seen.argsort(stable=True)
    place = order[torch.searchsorted(seen[order], rows)]
    return torch.where(first, members[place], -1), dict(zip(names, (members, seen), strict=True))


def report(
    local: Local, context: Context, task: Task, count: int, support: int, *, begun: bool
) -> tuple[ClassPrototypes, dict[str, Tensor]]:
    """Centroids to report, image rows before text rows, and the cluster assignments for the silo's state.

    Rows of a modality that the silo lacks are empty, and all rows before clustering has ``begun``. The silo's model
    holds the trained parameters; ``count`` and ``support`` as in :func:`members_of`.
    """
    empty = torch.zeros(count, context.dim), torch.zeros(count, dtype=torch.int64)
    both = [empty, empty]
    kept = {name: tensor for name, tensor in local.state.items() if name.startswith((MEMBERS, ROWS))}
    if begun:
        # Always the first caption: two reports with different captions of one item would reveal their difference.
        for place, modality in enumerate(MODALITIES):
            if not getattr(local.silo, modality):
                continue
            held = replace(local, dataset=unpaired.items_with(local, modality), unpaired=())
            first = None if modality == "image" else np.zeros(len(held.dataset), np.int64)
            z = training.embed_all(held, first, context.training.batch_size)[place]
            if z is not None:
                members, assigned = _members(held, context, modality, z, count, support)
                both[place], kept = centroids_of(z, members, count), {**kept, **assigned}
    prototypes, counts = (torch.cat(parts) for parts in zip(*both, strict=True))
    return ClassPrototypes(prototypes.numpy(), counts.numpy(), "both"), kept


def received(payloads: Sequence[Payload], silo: SiloFacts) -> Tensor | None:
    """Centroids of a silo's missing modality in a task's payloads, float32 [J, d] of unit length; None if absent.

    The silo may be a view of its items that lack a modality.
    """
    if silo.paired:
        return None
    lacking = MODALITIES[int(silo.image)]
    for payload in (payload for payload in payloads if isinstance(payload, ClassPrototypes)):
        rows = as_tensor(payload.prototypes)
        if payload.modality == "both":
            half = slice(len(rows) // 2, None) if silo.image else slice(0, len(rows) // 2)
            rows = rows[half][as_tensor(payload.counts)[half] > 0]
        if payload.modality in ("both", lacking) and len(rows):
            return unit(rows)
    return None


# --------------------------------------------------------------------------------------------------- coordinator side
def check(payloads: Sequence[Payload], count: int, dim: int) -> None:
    """Check the centroids of a reply.

    Raises:
        RemoteWireError: a wrong number of rows or columns, rows too long, or more samples than the update has. The
            update's count was checked against the silo's dataset; query banks weight centroids by their counts.
    """
    centroids = take(payloads, ClassPrototypes)
    class_prototypes.check_rows(centroids, 2 * count, dim)
    samples = next(payload.n_samples for payload in payloads if isinstance(payload, Delta | PartialDelta))
    for modality, counts in zip(MODALITIES, np.split(centroids.counts, 2), strict=True):
        if (most := sum(counts.tolist())) > samples:
            raise RemoteWireError("malformed", f"{modality} centroids of {most} samples, allowed: at most {samples}")


def initial(context: Context, count: int) -> dict[str, Tensor]:
    """Empty table: centroids float32 [silos, 2, count, d], their sample counts, and each report's base version."""
    silos = len(context.silos)
    return {
        CENTROIDS: torch.zeros(silos, 2, count, context.dim),
        COUNTS: torch.zeros(silos, 2, count, dtype=torch.int64),
        VERSIONS: torch.full((silos,), -1, dtype=torch.int64),
    }


def download(tensors: Mapping[str, Tensor], silo: SiloFacts) -> tuple[ClassPrototypes, ...]:
    """All silos' centroids of the modalities that a silo or some of its items lack; empty while there are none.

    Of both modalities, image rows stand before as many text rows; the shorter part is filled up with absent rows.
    """
    needs = (bool(silo.text_only), bool(silo.image_only)) if silo.paired else (not silo.image, not silo.text)
    parts = []
    for lacking in (index for index, needed in enumerate(needs) if needed):
        counts, rows = tensors[COUNTS][:, lacking].reshape(-1), tensors[CENTROIDS][:, lacking].flatten(0, 1)
        present = counts > 0
        parts.append((rows[present], counts[present], MODALITIES[lacking]))
    parts = [part for part in parts if len(part[0])]
    if len(parts) < 2:
        return tuple(ClassPrototypes(rows.numpy(), counts.numpy(), modality) for rows, counts, modality in parts)
    most = max(len(rows) for rows, _, _ in parts)
    both = torch.cat([functional.pad(rows, (0, 0, 0, most - len(rows))) for rows, _, _ in parts])
    held = torch.cat([functional.pad(counts, (0, most - len(counts))) for _, counts, _ in parts])
    return (ClassPrototypes(both.numpy(), held.numpy(), "both"),)


def updated(
    tensors: Mapping[str, Tensor], replies: Sequence[Update], round_: int, max_age: int | None
) -> dict[str, Tensor]:
    """The table, from :func:`initial` or an earlier merge, after a merge.

    Replies older than a silo's entry are ignored, and entries of more than ``max_age`` versions dropped.
    """
    values: dict[str, list[Tensor]] = {CENTROIDS: [], COUNTS: []}
    for reply in replies:
        sent = class_prototypes.rows_of_owned_modalities(reply)
        counts = as_tensor(sent.counts).view(2, -1)
        values[COUNTS].append(counts)
        values[CENTROIDS].append(unit(as_tensor(sent.prototypes)).view(*counts.shape, -1) * (counts > 0).unsqueeze(2))
    table = aggregation.updated_table(tensors, replies, VERSIONS, values)
    if max_age is not None:
        table[COUNTS][round_ - table[VERSIONS] > max_age] = 0
    return table


def known(tensors: Mapping[str, Tensor]) -> float:
    """Number of centroids at the coordinator."""
    return float((tensors[COUNTS] > 0).sum())


def bank(tensors: Mapping[str, Tensor], silos: Sequence[SiloFacts]) -> tuple[ClassPrototypes, ...]:
    """Query bank of some silos' centroids: image rows before text rows, absent ones with count 0.

    One payload; none while a modality has no centroid.
    """
    whose = torch.tensor([silo.index for silo in silos], dtype=torch.int64)
    # [silos, 2, count, ...] to [2, silos * count, ...]
    rows, counts = (tensors[name][whose].transpose(0, 1).flatten(1, 2) for name in (CENTROIDS, COUNTS))
    if not bool((counts > 0).any(1).all()):
        return ()
    return (class_prototypes.payload(rows.flatten(0, 1), counts.flatten()),)
