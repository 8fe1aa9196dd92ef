"""Partition samples among silos, and choose which silos lack a modality.

Every sample belongs to a group: its label, its text cluster, or one group for all. A :class:`PartitionPlan` fixes each
silo's proportion of each group from the training split and the seed. :func:`deal` then partitions any split by these
proportions, so that a silo's held-out set has the distribution of its training set. The silo datasets of a split are
disjoint and, unless stated otherwise, not empty.
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

from fedmq.config.scenario import Partition
from fedmq.config.sections import MissingModality
from fedmq.errors import InputError
from fedmq.seeds import derive, numpy_generator

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

#: The balanced variant resamples until every silo has this many samples (NIID-Bench), or half of n/K if that is less.
LEAST_BALANCED = 10
#: Maximum number of draws of the balanced variant; it then keeps the best one.
MOST_DRAWS = 100


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """Proportions by which :func:`deal` partitions any split."""

    partition: Partition
    silos: int  # number K of silos
    # Float64 [G, K]. With ``dir_class`` and ``shards_classes``, row g is group g's distribution over silos (rows sum to
    # 1); with ``dir_clusters``, column k is silo k's distribution over groups (columns sum to 1).
    proportions: F64
    seed: int
    shares: F64  # float64 [K], share of the items of each silo: drawn with ``partition.sizes: dirichlet``, else 1 / K


# --------------------------------------------------------------------------- groups
def rarest_label(labels: npt.NDArray[Any], frequency: I64 | None = None) -> I64:
    """Group of each row of 0/1 [n, C], int64 [n]: its rarest label (ties: the lowest index), or C if it has none.

    ``frequency`` int64 [C] has the label counts of the training split; None counts ``labels``.
    """
    hot = np.asarray(labels) > 0
    counts = hot.sum(axis=0) if frequency is None else frequency
    cost = np.where(hot, counts[None], np.iinfo(np.int64).max)
    groups: I64 = np.where(hot.any(axis=1), cost.argmin(axis=1), hot.shape[1]).astype(np.int64)
    return groups


def label_groups(
    labels: npt.NDArray[Any], train_labels: npt.NDArray[Any] | None = None, by: Literal["rarest", "first"] = "rarest"
) -> I64:
    """Groups int64 [n] from class numbers [n] (unchanged) or from multi-hot labels 0/1 [n, C] (one label per row).

    The label is the first in column order, or that of :func:`rarest_label`, whose counts are those of ``train_labels``
    0/1 [n', C], by default of ``labels``.
    """
    labels = np.asarray(labels)
    if labels.ndim == 1:
        return labels.astype(np.int64)
    if by == "first":
        return rarest_label(labels, np.zeros(labels.shape[1], np.int64))  # all are equally rare
    return rarest_label(labels, None if train_labels is None else (np.asarray(train_labels) > 0).sum(axis=0))


def cluster_centres(features: npt.NDArray[Any], clusters: int, seed: int) -> npt.NDArray[np.float32]:
    """K-means centres float32 [min(clusters, n), d] of the training split's text features [n, d]; n_init is 10.

    Runs on one thread: with several threads the order of the partial sums, and so the result, would vary.
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
    """Index of the nearest centre, int64 [n], of features [n, d] and centres [G, d]; ties go to the lowest index."""
    x, c = np.asarray(features, dtype=np.float64), np.asarray(centres, dtype=np.float64)
    nearest: I64 = ((c**2).sum(axis=1)[None] - 2 * x @ c.T).argmin(axis=1).astype(np.int64)
    return nearest


# --------------------------------------------------------------------------- proportions and counts
def shard_proportions(groups: int, silos: int, per_silo: int, generator: np.random.Generator) -> F64:
    """Assign ``per_silo`` distinct groups to each silo; a group is split equally among its silos: float64 [G, K].

    Silos choose in turn among the groups chosen least often so far (ties at random), so that every group is assigned
    and the groups have nearly equal numbers of silos.
    """
    chosen = np.zeros((groups, silos))
    for silo in range(silos):
        order = np.lexsort((generator.random(groups), chosen.sum(axis=1)))
        chosen[order[:per_silo], silo] = 1
    proportions: F64 = chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1)
    return proportions


def sorted_shard_proportions(sizes: I64, silos: int, per_silo: int, generator: np.random.Generator) -> F64:
    """Sort samples by group, cut them into K * ``per_silo`` equal shards and assign these at random: float64 [G, K].

    Used as in FedAvg if there are more groups than K * ``per_silo``. ``sizes`` int64 [G] are the samples of each group;
    a large group spans many shards, and a shard may hold several small groups.
    """
    shards = silos * per_silo
    ends = np.cumsum(sizes)
    cuts = np.cumsum([0, *_equal_sizes(int(ends[-1]), shards)])
    common = np.minimum(ends[:, None], cuts[None, 1:]) - np.maximum((ends - sizes)[:, None], cuts[None, :-1])
    owners = generator.permutation(np.repeat(np.arange(silos), per_silo))
    held = np.zeros((len(sizes), silos))
    np.add.at(held.T, owners, np.maximum(common, 0).T)
    proportions: F64 = held / np.maximum(held.sum(axis=1, keepdims=True), 1)
    return proportions


def split_counts(sizes: npt.ArrayLike, proportions: F64) -> I64:
    """Number of samples of each group for each silo: cuts at floor(cumsum(p) n_g), remainder to the last silo.

    Takes the samples of each group, int [G], and proportions float64 [G, K] whose rows sum to 1; returns int64 [G, K].
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    cuts = (np.cumsum(proportions, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
    edges = np.concatenate([np.zeros((len(sizes), 1), np.int64), cuts, sizes[:, None]], axis=1)
    return np.diff(edges, axis=1)


def split_counts_balanced(sizes: npt.ArrayLike, proportions: F64) -> I64:
    """Like :func:`split_counts`, but silos that already hold n/K samples receive no more (MOON, NIID-Bench)."""
    sizes = np.asarray(sizes, dtype=np.int64)
    silos = proportions.shape[1]
    result = np.zeros(proportions.shape, dtype=np.int64)
    held = np.zeros(silos, dtype=np.int64)
    for group, size in enumerate(sizes):
        mass = proportions[group] * (held < sizes.sum() / silos)
        if mass.sum() == 0:  # all of the group's silos are full
            mass = np.where(held == held.min(), 1.0, 0.0)
        result[group] = split_counts([size], (mass / mass.sum())[None])[0]
        held += result[group]
    return result


# --------------------------------------------------------------------------- assignment of samples
def _by_counts(groups: I64, counts: I64, generator: np.random.Generator) -> list[I64]:
    """Shuffle each group and cut it by the counts [G, K]; samples beyond the counts stay unassigned."""
    parts: list[list[I64]] = [[] for _ in range(counts.shape[1])]
    for group in range(len(counts)):
        rows = generator.permutation(np.flatnonzero(groups == group))
        edges = np.cumsum(counts[group])
        for silo, part in enumerate(np.split(rows[: edges[-1]], edges[:-1])):
            parts[silo].append(part)
    return [np.concatenate(part).astype(np.int64) for part in parts]


def _equal_sizes(total: int, silos: int) -> list[int]:
    """K sizes of n // K; the first n % K silos get one more."""
    return [total // silos + (silo < total % silos) for silo in range(silos)]


def _sizes(plan_: PartitionPlan, total: int) -> list[int]:
    """Number of a split's ``total`` samples for each silo; ``partition.sizes: proportional`` counts as ``equal``."""
    if plan_.partition.sizes != "dirichlet":
        return _equal_sizes(total, plan_.silos)
    sizes: list[int] = split_counts([total], plan_.shares[None])[0].tolist()
    return sizes


def _turns(plan_: PartitionPlan, total: int) -> list[int]:
    """The silo whose turn it is in each of the ``total`` draws; the turns of a silo are spread evenly."""
    sizes = _sizes(plan_, total)
    if plan_.partition.sizes == "equal":
        return [drawn % plan_.silos for drawn in range(total)]
    times = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in sizes])
    turns: list[int] = np.repeat(np.arange(plan_.silos), sizes)[np.argsort(times, kind="stable")].tolist()
    return turns


def _in_turn(groups: I64, proportions: F64, turns: Sequence[int], generator: np.random.Generator) -> list[I64]:
    """Rows of each silo, sampled without replacement in turns.

    ``turns`` names the silo of each draw, so a silo gets as many samples as it has turns.

    In its turn a silo samples a group from its distribution, renormalised over the groups that still have samples, and
    takes the next of the group's shuffled samples. Taking turns keeps the last silos from receiving only leftovers. A
    silo whose groups are all exhausted samples in proportion to the remaining samples.
    """
    count, silos = proportions.shape
    stock = [generator.permutation(np.flatnonzero(groups == group)).tolist() for group in range(count)]
    assigned: list[list[int]] = [[] for _ in range(silos)]
    uniform = generator.random(len(groups)).tolist()
    cumulative: list[list[float]] = []

    def renormalise() -> None:
        left = np.array([len(rows) for rows in stock], dtype=np.float64)
        cumulative.clear()
        for silo in range(silos):
            mass = proportions[:, silo] * (left > 0)
            cumulative.append(list(accumulate((mass if mass.sum() > 1e-300 else left).tolist())))

    renormalise()
    for drawn, silo in enumerate(turns):
        edges = cumulative[silo]
        group = min(bisect_right(edges, uniform[drawn] * edges[-1]), count - 1)
        while not stock[group]:  # rounding moved the draw onto an edge
            group -= 1
        assigned[silo].append(stock[group].pop())
        if not stock[group]:
            renormalise()
    return [np.array(rows, dtype=np.int64) for rows in assigned]


def at_least(parts: Sequence[I64], least: int) -> list[I64]:
    """Move samples to silo datasets with fewer than ``least``, each time the last one of the largest (ties: the first).

    A silo without data could be selected, yet could neither train nor be evaluated.
    """
    result = list(parts)
    for silo in range(len(result)):
        while len(result[silo]) < least:
            giver = int(np.argmax([len(other) for other in result]))
            result[silo] = np.concatenate([result[silo], result[giver][-1:]])
            result[giver] = result[giver][:-1]
    return result


#: How a user gets a larger test split out of few items.
_LARGER = "data.queries is the number of test items, data.val that of validation items, which may be 0"


def _check(silos: int, samples: int, split: str) -> None:
    if silos > samples:
        way = "fewer silos" + ("" if split == "training" else f", or a larger {split} split: {_LARGER}")
        raise InputError("silos.count", silos, f"at most {samples}, the samples of the {split} split; set {way}")


def plan(partition: Partition, silos: int, groups: I64, seed: int) -> PartitionPlan:
    """Determine the proportions from the training split; ``groups`` int64 [n] is the group of each sample, from 0.

    Raises:
        InputError: more silos than samples, or more classes per silo than there are classes.
    """
    _check(silos, len(groups), "training")
    generator = numpy_generator(seed, "partition", "proportions")
    count = int(groups.max()) + 1
    match partition.kind:
        case "iid":
            proportions = np.full((1, silos), 1 / silos)
        case "dir_clusters":
            # Each silo's distribution over groups (RCSR).
            proportions = np.ascontiguousarray(generator.dirichlet(np.full(count, partition.alpha), size=silos).T)
        case "shards_classes":
            # Labels that are no sample's rarest, e.g. coarse labels, have no samples to assign.
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
            # Each group's distribution over silos.
            proportions = generator.dirichlet(np.full(silos, partition.alpha), size=count)
            if partition.balanced:
                sizes = np.bincount(groups, minlength=count)
                proportions = until_balanced(sizes, proportions, partition.alpha, generator)
    shares = np.full(silos, 1 / silos)
    if partition.sizes == "dirichlet":
        drawn = numpy_generator(seed, "partition", "sizes")
        shares = drawn.dirichlet(np.full(silos, partition.sizes_alpha))
    return PartitionPlan(partition, silos, proportions, seed, shares)


def until_balanced(sizes: I64, proportions: F64, alpha: float, generator: np.random.Generator) -> F64:
    """Resample until the smallest silo has :data:`LEAST_BALANCED` samples; else the best of :data:`MOST_DRAWS`."""
    silos = proportions.shape[1]
    wanted = min(LEAST_BALANCED, int(sizes.sum()) // silos // 2)
    best, best_least = proportions, -1
    for _ in range(MOST_DRAWS):
        least = int(split_counts_balanced(sizes, proportions).sum(axis=0).min())
        if least > best_least:
            best, best_least = proportions, least
        if best_least >= wanted:
            break
        proportions = generator.dirichlet(np.full(silos, alpha), size=len(sizes))
    return best


def by_column(values: Sequence[str], column: str, silos: int) -> I64:
    """Silo of each item by its value in a column: the distinct values in sorted order, numbers by size; int64 [n].

    Raises:
        InputError: there are more or fewer values than silos.
    """
    numbers = all(value.isascii() and value.lstrip("-").isdecimal() for value in values)
    distinct = sorted(set(values), key=(lambda value: (int(value), value)) if numbers else None)
    if len(distinct) != silos:
        listed = ", ".join(distinct[:8]) + (", ..." if len(distinct) > 8 else "")
        raise InputError("silos.count", silos, f"{len(distinct)}, the values of column {column}: {listed}")
    silo = {value: index for index, value in enumerate(distinct)}
    return np.array([silo[value] for value in values], dtype=np.int64)


def deal(plan_: PartitionPlan, groups: I64, split: str = "train", *, sparse: bool = False) -> list[I64]:
    """Partition one split among the silos by a plan; ``groups`` int64 [n] is the group of each of its samples.

    Groups absent from the training split are spread evenly. The split's name is part of the RNG path, so that splits
    are partitioned independently.

    Returns:
        Each silo's positions in the split, int64, ascending. They are disjoint, not empty unless ``sparse``, and cover
        the split unless ``partition.shots`` limits the training samples.

    Raises:
        InputError: more silos than samples, unless ``sparse``, or too few for ``partition.least``.
    """
    partition, silos = plan_.partition, plan_.silos
    if not sparse:
        _check(silos, len(groups), split)
    generator = numpy_generator(plan_.seed, "partition", "deal", split)
    count = max(len(plan_.proportions), int(groups.max(initial=-1)) + 1)
    proportions = np.full((count, silos), 1 / silos)
    proportions[: len(plan_.proportions)] = plan_.proportions
    match partition.kind:
        case "iid":
            ends = np.cumsum(_sizes(plan_, len(groups)))[:-1]
            parts = np.split(generator.permutation(len(groups)), ends)
        case "dir_clusters" if partition.sizes == "proportional":
            total = proportions.sum(axis=1, keepdims=True)
            shares = np.where(total > 0, proportions / np.maximum(total, np.finfo(float).tiny), 1 / silos)
            parts = _by_counts(groups, split_counts(np.bincount(groups, minlength=count), shares), generator)
        case "dir_clusters":
            proportions[len(plan_.proportions) :] = 0
            parts = _in_turn(groups, proportions, _turns(plan_, len(groups)), generator)
        case "shards_classes":
            counts = _shard_counts(np.bincount(groups, minlength=count), proportions)
            if split == "train" and partition.shots is not None:
                counts = np.minimum(counts, partition.shots)
            parts = _by_counts(groups, counts, generator)
        case "dir_class":
            cut = split_counts_balanced if partition.balanced else split_counts
            parts = _by_counts(groups, cut(np.bincount(groups, minlength=count), proportions), generator)
    least, assigned = 0 if sparse else partition.least if split == "train" else 1, sum(map(len, parts))
    if least * silos > assigned:
        most = f"at most {assigned // silos}, for {assigned} training samples and {silos} silos"
        raise InputError("partition.least", partition.least, most)
    return [np.sort(rows).astype(np.int64) for rows in at_least(parts, least)]


def _shard_counts(sizes: I64, proportions: F64) -> I64:
    """Number of samples of each group for the silos that hold it: int64 [G, K]; other silos get none by rounding."""
    counts = np.zeros(proportions.shape, dtype=np.int64)
    for group, size in enumerate(sizes):
        holders = np.flatnonzero(proportions[group] > 0)
        shares = proportions[group, holders]
        if (shares == shares[0]).all():
            counts[group, holders] = _equal_sizes(int(size), len(holders))
        else:
            # For the split that the proportions come from, these are integers up to floating-point error.
            counts[group, holders] = np.diff(np.rint(np.cumsum(shares) * size).astype(np.int64), prepend=0)
    return counts


# --------------------------------------------------------------------------- missing modalities
def assignment_seed(missing: MissingModality, run_seed: int) -> int:
    """The seed that draws which silos or items lack a modality: the section's own, else the run's."""
    return run_seed if missing.seed is None else missing.seed


def modalities(missing: MissingModality, names: Sequence[str], run_seed: int) -> tuple[tuple[bool, bool], ...]:
    """Whether each silo has images and whether it has texts, in the order of ``names``.

    Silos with one modality are listed by name, or round(rate * K) of them are sampled and keep ``missing.only``, or
    either modality with equal probability. ``missing.seed`` draws them (RCSR always uses 42), or else ``run_seed``.
    """
    if missing.silos:
        only = dict(missing.silos)
    else:
        generator = numpy_generator(assignment_seed(missing, run_seed), "missing_modality")
        chosen = generator.permutation(len(names))[: round(missing.rate * len(names))]
        coins = generator.random(len(chosen)) < 0.5
        drawn = [missing.only or ("image" if coin else "text") for coin in coins]
        only = {names[index]: held for index, held in zip(chosen, drawn, strict=True)}
    return tuple((only.get(name) != "text", only.get(name) != "image") for name in names)
