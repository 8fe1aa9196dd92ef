"""How samples are shared out among silos, and which silos lack a modality.

Every sample belongs to a group: its label, its text cluster, or one group for all. A :class:`PartitionPlan` fixes,
from the training split and the seed, how much of each group each silo gets; :func:`deal` then shares out any split by
it, so that a silo's held-out share follows the proportions of its training share. Shares of one split are disjoint
and no share is empty.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import MissingModality, Partition
from fedmq.errors import InputError
from fedmq.seeds import derive, numpy_generator

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

#: The balanced variant draws again until every silo has this many samples (NIID-Bench), or half an equal share.
LEAST_BALANCED = 10
#: Draws before the balanced variant keeps the best one seen instead of looping for ever.
MOST_DRAWS = 100


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """How a partition shares out any split.

    Args:
        partition: the scenario's choice.
        silos: number K of silos.
        proportions: float64 [G, K]. Of ``dir_class`` and ``shards_classes`` row g says how group g is cut over the
            silos (sum 1); of ``dir_clusters`` column k is silo k's own distribution over groups (sum 1).
        seed: the scenario's seed.
    """

    partition: Partition
    silos: int
    proportions: F64
    seed: int


# --------------------------------------------------------------------------- groups
def rarest_label(labels: npt.NDArray[Any], frequency: I64 | None = None) -> I64:
    """One group per multi-hot label row [n, C]: its rarest label, the lowest among equals; C where it has none.

    Args:
        labels: 0/1 [n, C].
        frequency: [C] counts of the training split; None counts ``labels`` themselves.
    """
    hot = np.asarray(labels) > 0
    counts = hot.sum(axis=0) if frequency is None else frequency
    cost = np.where(hot, counts[None], np.iinfo(np.int64).max)
    groups: I64 = np.where(hot.any(axis=1), cost.argmin(axis=1), hot.shape[1]).astype(np.int64)
    return groups


def first_label(labels: npt.NDArray[Any]) -> I64:
    """One group per multi-hot label row [n, C]: its first label in the set's order; C where it has none."""
    hot = np.asarray(labels) > 0
    groups: I64 = np.where(hot.any(axis=1), hot.argmax(axis=1), hot.shape[1]).astype(np.int64)
    return groups


def label_groups(
    labels: npt.NDArray[Any],
    train_labels: npt.NDArray[Any] | None = None,
    by: Literal["rarest", "first"] = "rarest",
) -> I64:
    """Groups [n] from labels: int [n] as they are, multi-hot [n, C] by one label of each row.

    Args:
        labels: int [n] or 0/1 [n, C].
        train_labels: 0/1 [n', C], whose counts say which label is rare; None counts ``labels`` themselves.
        by: :func:`rarest_label` or :func:`first_label`.
    """
    labels = np.asarray(labels)
    if labels.ndim == 1:
        return labels.astype(np.int64)
    if by == "first":
        return first_label(labels)
    train = labels if train_labels is None else np.asarray(train_labels)
    return rarest_label(labels, (train > 0).sum(axis=0))


def cluster_centres(features: npt.NDArray[Any], clusters: int, seed: int) -> npt.NDArray[np.float32]:
    """K-means centres [min(clusters, n), d] of the training split's text features [n, d], n_init 10, seeded.

    One thread, because threads of K-means add their partial sums in no fixed order.
    """
    from sklearn.cluster import KMeans  # noqa: PLC0415 - takes a second to import, and only this partition needs it
    from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    random = derive(seed, "partition", "clusters") % 2**32
    model = KMeans(n_clusters=min(clusters, len(features)), n_init=10, random_state=random)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct texts than clusters
        model.fit(np.ascontiguousarray(features, dtype=np.float32))
    return np.asarray(model.cluster_centers_, dtype=np.float32)


def nearest_centre(features: npt.NDArray[Any], centres: npt.NDArray[Any]) -> I64:
    """Index of the nearest centre [n]; features [n, d], centres [G, d]; the lowest among equals."""
    x, c = np.asarray(features, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    nearest: I64 = ((c**2).sum(axis=1)[None] - 2 * x @ c.T).argmin(axis=1).astype(np.int64)
    return nearest


# --------------------------------------------------------------------------- proportions and counts
def class_proportions(groups: int, silos: int, alpha: float, generator: np.random.Generator) -> F64:
    """For each group a draw from Dir(alpha) over silos -> [G, K], rows sum to 1."""
    return generator.dirichlet(np.full(silos, alpha), size=groups)


def cluster_proportions(groups: int, silos: int, alpha: float, generator: np.random.Generator) -> F64:
    """For each silo a draw from Dir(alpha) over groups -> [G, K], columns sum to 1 (RCSR)."""
    return np.ascontiguousarray(generator.dirichlet(np.full(groups, alpha), size=silos).T)


def shard_proportions(groups: int, silos: int, per_silo: int, generator: np.random.Generator) -> F64:
    """Each silo gets ``per_silo`` different groups, each group shared equally by its silos -> [G, K].

    Silos choose in turn among the groups chosen least so far, at random among equals, so that every group finds a silo
    and no group is in much more demand than another.
    """
    chosen = np.zeros((groups, silos))
    for silo in range(silos):
        order = np.lexsort((generator.random(groups), chosen.sum(axis=1)))
        chosen[order[:per_silo], silo] = 1
    shares: F64 = chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1)
    return shares


def sorted_shard_proportions(sizes: I64, silos: int, per_silo: int, generator: np.random.Generator) -> F64:
    """Samples sorted by group are cut into ``per_silo`` equal shards per silo and dealt out at random -> [G, K].

    That is FedAvg's way, for more groups than silos have places: a silo holds few groups, of one shard seldom more than
    two, though small groups may lie together in one; what is large is in many shards.

    Args:
        sizes: int64 [G] samples of each group.
        silos: K.
        per_silo: shards of each silo.
        generator: deals.
    """
    shards = silos * per_silo
    ends = np.cumsum(sizes)
    cuts = np.cumsum([0, *_equal_sizes(int(ends[-1]), shards)])
    common = np.minimum(ends[:, None], cuts[None, 1:]) - np.maximum((ends - sizes)[:, None], cuts[None, :-1])
    owners = generator.permutation(np.repeat(np.arange(silos), per_silo))
    held = np.zeros((len(sizes), silos))
    np.add.at(held.T, owners, np.maximum(common, 0).T)
    shares: F64 = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
    return shares


def split_counts(sizes: npt.ArrayLike, proportions: F64) -> I64:
    """Samples of each group for each silo [G, K]: cut at floor(cumsum(p) n_c), the last silo takes the rest.

    Args:
        sizes: [G] samples of each group.
        proportions: [G, K], rows sum to 1.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    cuts = (np.cumsum(proportions, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
    edges = np.concatenate([np.zeros((len(sizes), 1), np.int64), cuts, sizes[:, None]], axis=1)
    return np.diff(edges, axis=1)


def split_counts_balanced(sizes: npt.ArrayLike, proportions: F64) -> I64:
    """As :func:`split_counts`, but a silo that already holds n/K samples gets no more (MOON, NIID-Bench)."""
    sizes = np.asarray(sizes, dtype=np.int64)
    silos = proportions.shape[1]
    result = np.zeros(proportions.shape, dtype=np.int64)
    held = np.zeros(silos, dtype=np.int64)
    for group, size in enumerate(sizes):
        share = proportions[group] * (held < sizes.sum() / silos)
        if share.sum() == 0:  # all its mass lies on silos that are full, or everybody is
            share = np.where(held == held.min(), 1.0, 0.0)
        result[group] = split_counts([size], (share / share.sum())[None])[0]
        held += result[group]
    return result


# --------------------------------------------------------------------------- dealing
def _by_counts(groups: I64, counts: I64, generator: np.random.Generator) -> list[I64]:
    """Shuffle each group and cut it by the counts [G, K]; what they leave over is nobody's."""
    parts: list[list[I64]] = [[] for _ in range(counts.shape[1])]
    for group in range(len(counts)):
        rows = generator.permutation(np.flatnonzero(groups == group))
        edges = np.cumsum(counts[group])
        for silo, part in enumerate(np.split(rows[: edges[-1]], edges[:-1])):
            parts[silo].append(part)
    return [np.concatenate(part).astype(np.int64) for part in parts]


def _equal_sizes(total: int, silos: int) -> list[int]:
    """Sizes n // K, the first n % K silos one more."""
    return [total // silos + (silo < total % silos) for silo in range(silos)]


def _in_turn(groups: I64, proportions: F64, generator: np.random.Generator) -> list[I64]:
    """Equal shares, silos drawing one sample each in turn, without replacement (RCSR, as we read it).

    A silo draws a group from its own distribution, renormalised over the groups that still have samples, then takes the
    next of the group's shuffled samples. Taking turns, rather than one silo after the other, keeps the last silos from
    getting only what the others left. A silo whose groups are all exhausted draws by what is left.
    """
    count, silos = proportions.shape
    stock = [generator.permutation(np.flatnonzero(groups == group)).tolist() for group in range(count)]
    sizes = _equal_sizes(len(groups), silos)
    shares: list[list[int]] = [[] for _ in range(silos)]
    uniform = generator.random(len(groups)).tolist()
    cumulative: list[list[float]] = []

    def renormalise() -> None:
        left = np.array([len(rows) for rows in stock], dtype=np.float64)
        cumulative.clear()
        for silo in range(silos):
            mass = proportions[:, silo] * (left > 0)
            cumulative.append(list(accumulate((mass if mass.sum() > 1e-300 else left).tolist())))

    renormalise()
    for drawn in range(len(groups)):
        silo = drawn % silos  # the first n % K silos come one turn more often, which is _equal_sizes
        edges = cumulative[silo]
        group = min(bisect_right(edges, uniform[drawn] * edges[-1]), count - 1)
        while not stock[group]:  # rounding put the draw on an edge
            group -= 1
        shares[silo].append(stock[group].pop())
        if not stock[group]:
            renormalise()
    assert [len(share) for share in shares] == sizes  # noqa: S101 - turns and equal sizes are one rule
    return [np.array(share, dtype=np.int64) for share in shares]


def never_empty(shares: Sequence[I64]) -> list[I64]:
    """Give each empty share one sample: the last one of the then largest share (the first among equals).

    A silo without data could not train, report a prototype or be evaluated, yet would still be asked to.
    """
    result = list(shares)
    for silo, share in enumerate(result):
        if not len(share):
            giver = int(np.argmax([len(other) for other in result]))
            result[silo], result[giver] = result[giver][-1:], result[giver][:-1]
    return result


def _check(partition: Partition, silos: int, samples: int, split: str) -> None:
    if silos > samples:
        raise InputError("silos.count", silos, f"at most {samples}, the samples of the {split} split")


def plan(partition: Partition, silos: int, groups: I64, seed: int) -> PartitionPlan:
    """Fix the proportions from the training split.

    Args:
        partition: the scenario's choice.
        silos: number of silos.
        groups: int64 [n] group of each training sample, from 0.
        seed: the scenario's seed.

    Raises:
        InputError: more silos than samples, or a number of classes per silo that cannot be dealt out.
    """
    _check(partition, silos, len(groups), "training")
    generator = numpy_generator(seed, "partition", "proportions")
    count = int(groups.max()) + 1
    match partition.kind:
        case "iid":
            proportions = np.full((1, silos), 1 / silos)
        case "dir_clusters":
            proportions = cluster_proportions(count, silos, partition.alpha, generator)
        case "shards_classes":
            # Labels that are no sample's rarest, as those of a coarse level, are no class that could be dealt out.
            each, present = partition.classes_per_silo, np.unique(groups)
            if each > len(present):
                raise InputError("partition.classes_per_silo", each, f"1 to {len(present)} for {len(present)} classes")
            proportions = np.full((count, silos), 1 / silos)
            if each * silos < len(present):
                sizes = np.bincount(groups, minlength=count)[present]
                proportions[present] = sorted_shard_proportions(sizes, silos, each, generator)
            else:
                proportions[present] = shard_proportions(len(present), silos, each, generator)
        case "dir_class":
            proportions = class_proportions(count, silos, partition.alpha, generator)
            if partition.balanced:
                sizes = np.bincount(groups, minlength=count)
                proportions = until_balanced(sizes, proportions, partition.alpha, generator)
    return PartitionPlan(partition, silos, proportions, seed)


def until_balanced(sizes: I64, proportions: F64, alpha: float, generator: np.random.Generator) -> F64:
    """Draw again until the smallest silo has 10 samples (or half an equal share); else the best of 100 draws."""
    silos = proportions.shape[1]
    wanted = min(LEAST_BALANCED, int(sizes.sum()) // silos // 2)
    best, best_least = proportions, -1
    for _ in range(MOST_DRAWS):
        least = int(split_counts_balanced(sizes, proportions).sum(axis=0).min())
        if least > best_least:
            best, best_least = proportions, least
        if best_least >= wanted:
            break
        proportions = class_proportions(len(sizes), silos, alpha, generator)
    return best


def deal(plan_: PartitionPlan, groups: I64, split: str = "train", *, sparse: bool = False) -> list[I64]:
    """Share out one split by a plan.

    Args:
        plan_: from :func:`plan`.
        groups: int64 [n] group of each sample of the split; a group the training split lacks is dealt out evenly.
        split: its name; names the random draws, so that splits are dealt independently.
        sparse: some silos may get none.

    Returns:
        For each silo its positions in the split, ascending; disjoint, none empty unless ``sparse``, and together the
        whole split, unless ``partition.shots`` leaves training samples over.

    Raises:
        InputError: more silos than samples, unless ``sparse``.
    """
    partition, silos = plan_.partition, plan_.silos
    if not sparse:
        _check(partition, silos, len(groups), split)
    generator = numpy_generator(plan_.seed, "partition", "deal", split)
    count = max(len(plan_.proportions), int(groups.max(initial=-1)) + 1)
    proportions = np.full((count, silos), 1 / silos)
    proportions[: len(plan_.proportions)] = plan_.proportions
    match partition.kind:
        case "iid":
            shares = np.array_split(generator.permutation(len(groups)), silos)
        case "dir_clusters":
            proportions[len(plan_.proportions) :] = 0
            shares = _in_turn(groups, proportions, generator)
        case "shards_classes":
            counts = _shard_counts(np.bincount(groups, minlength=count), proportions)
            if split == "train" and partition.shots is not None:
                counts = np.minimum(counts, partition.shots)
            shares = _by_counts(groups, counts, generator)
        case "dir_class":
            cut = split_counts_balanced if partition.balanced else split_counts
            shares = _by_counts(groups, cut(np.bincount(groups, minlength=count), proportions), generator)
    return [np.sort(share).astype(np.int64) for share in (shares if sparse else never_empty(shares))]


def _shard_counts(sizes: I64, proportions: F64) -> I64:
    """Whole-number shares of each group among the silos that hold it -> [G, K]; no rounding to non-holders."""
    counts = np.zeros(proportions.shape, dtype=np.int64)
    for group, size in enumerate(sizes):
        holders = np.flatnonzero(proportions[group] > 0)
        shares = proportions[group, holders]
        if (shares == shares[0]).all():
            counts[group, holders] = _equal_sizes(int(size), len(holders))
        else:
            # Rounded: of the split they were made of, these are whole numbers but for the last bits.
            counts[group, holders] = np.diff(np.rint(np.cumsum(shares) * size).astype(np.int64), prepend=0)
    return counts


# --------------------------------------------------------------------------- missing modalities
def modalities(missing: MissingModality, names: Sequence[str]) -> tuple[tuple[bool, bool], ...]:
    """(image, text) of each silo: listed by name, or round(rate K) silos, either alike unless ``only`` says which.

    The draw has its own seed, so that changing the run's seed leaves it alone (RCSR uses 42 throughout).
    """
    if missing.silos:
        only = dict(missing.silos)
    else:
        generator = numpy_generator(missing.seed, "missing_modality")
        chosen = generator.permutation(len(names))[: round(missing.rate * len(names))]
        coins = generator.random(len(chosen)) < 0.5
        drawn = [missing.only or ("image" if coin else "text") for coin in coins]
        only = {names[index]: held for index, held in zip(chosen, drawn, strict=True)}
    return tuple((only.get(name) != "text", only.get(name) != "image") for name in names)
