"""The registry of metrics: name, range and direction of each metric, and the function that computes it.

To add a metric, add a :class:`Measure` to :data:`BUILT_IN`: a function of a :class:`Measured`, and a :class:`Metric`
entry for each value that it returns. Summaries, tables, reports, comparisons and the checks of received and recorded
values all use these entries. User files can add more (``fedmq.evaluation.custom_metrics``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt

from fedmq.config.sections import Evaluation
from fedmq.errors import InputError, RunError
from fedmq.evaluation import recall
from fedmq.evaluation.gallery_ranking import Embedded, Way, comparable, fold_recalls, rank, shuffled
from fedmq.evaluation.label_metrics import RankingMetrics
from fedmq.evaluation.recall import HEADLINE
from fedmq.text import nearest

#: Metrics in one-line descriptions of a run, and the default columns of a comparison.
BRIEF = (HEADLINE, "mean_r10")
#: Tolerance of the bounds, for rounding errors.
ROUNDING = 1e-6
#: Prefixes of a summary's cost values; lower is better.
_COSTS = ("bytes.", "seconds.", "messages.", "processes.", "privacy.", "item_privacy.", "seconds to ")

#: Directions of retrieval in names of metrics; ``mean`` is the mean of ``i2t`` and ``t2i``.
WAYS: Mapping[str, str] = {
    "i2t": "image to text",
    "t2i": "text to image",
    "mean": "mean",
    "i2i": "image to image",
    "t2t": "text to text",
}
_PLACEHOLDERS = {
    r"\{n\}": r"(?P<n>[1-9]\d{0,17})",
    r"\{way\}": "(?P<way>mean|i2t|t2i)",
    r"\{_way\}": "(?:_(?P<way>i2t|t2i|i2i|t2t))?",
}
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


@dataclass(frozen=True)
class Metric:
    """A metric, or a family of metrics whose names differ in a cut-off or in the direction of retrieval.

    Raises:
        ValueError: the name is invalid, or the bounds are not finite or not in order.
    """

    # Small letters, digits and ``_``; of a family with the placeholders ``{n}`` (a cut-off), ``{way}`` (mean, i2t or
    # t2i) or ``{_way}`` (nothing for the mean, or _i2t, _t2i, _i2i, _t2t), e.g. ``map_at{n}{_way}``.
    name: str
    title: str  # description in words; may have ``{n}``
    low: float = 0.0  # smallest possible value
    high: float = 1.0  # largest possible value
    higher_is_better: bool = True  # whether larger values are better
    short: str = ""  # heading of its column in tables; may have ``{n}``; the name if empty
    # Whether terminal tables and the curves of the report show it. The summary, the report's table and comparisons that
    # request it always do.
    shown: bool = True
    way: str = ""  # direction of retrieval, a key of WAYS; empty if the metric has none. In a family, the name sets it.

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(re.sub(r"\{(n|way|_way)\}", "x", self.name)):
            raise ValueError(f"metric name {self.name!r}: small letters, digits and _ are allowed, a letter first")
        finite = all(isinstance(bound, int | float) and math.isfinite(bound) for bound in (self.low, self.high))
        if not (finite and self.low < self.high):
            allowed = "must be finite numbers, low below high"
            raise ValueError(f"metric {self.name}: low {self.low} and high {self.high} {allowed}")

    @property
    def is_family(self) -> bool:
        """Whether the name has a placeholder."""
        return "{" in self.name

    @property
    def heading(self) -> str:
        """Heading of its column in a table."""
        return self.short or self.name

    def named(self, name: str) -> Metric | None:
        """The metric of a name that is this metric's or in this family; None for any other name."""
        if not self.is_family:
            return self if name == self.name else None
        return _of_family(self, name)

    def objection(self, value: float) -> str | None:
        """What is wrong with a value, e.g. ``mean_r1 1.2, allowed: 0 to 1``; None if it is within the bounds."""
        if self.low - ROUNDING <= value <= self.high + ROUNDING:
            return None
        return f"{self.name} {value:.4g}, allowed: {self.low:.10g} to {self.high:.10g}"


@lru_cache(4096)  # an evaluation asks for the same names of every silo
def _of_family(family: Metric, name: str) -> Metric | None:
    match = _pattern(family.name).fullmatch(name)
    if match is None:
        return None
    parts = match.groupdict()
    way = (parts["way"] or "mean") if "way" in parts else family.way
    n = parts.get("n") or ""
    title = family.title.replace("{n}", n) + (f", {WAYS[way]}" if way else "")
    return replace(family, name=name, title=title, short=family.short.replace("{n}", n), way=way)


@lru_cache
def _pattern(template: str) -> re.Pattern[str]:
    pattern = re.escape(template)
    for placeholder, group in _PLACEHOLDERS.items():
        pattern = pattern.replace(placeholder, group)
    return re.compile(pattern)


# ------------------------------------------------------------------------------------------------- what is measured
@dataclass(frozen=True)
class Measured:
    """One model's embeddings of a set of items: the whole split, or a silo's part of it."""

    queries: Embedded  # the evaluated items
    evaluation: Evaluation  # the scenario's options of evaluation, such as cut-offs
    gallery: Embedded | None = None  # the items that label metrics retrieve; None takes the queries' other modality
    seed: int = 0  # seed of the order of items and captions, which breaks ties
    # The whole split and the indices int64 [k], ascending, of the queries in it, if the queries are some of its items
    # that retrieve from the whole gallery; None if they retrieve from each other or from ``gallery``.
    part: tuple[Measured, npt.NDArray[np.int64]] | None = None
    threads: int | None = None  # number of threads that rank; None takes as many as torch or NumPy have

    def silo(self, items: npt.NDArray[np.int64]) -> Measured:
        """Some of the items, by index int64 [k], ascending, as queries into this gallery.

        Nothing is ranked again: the values of these queries are taken from those of the whole split.
        """
        gallery = self.queries if self.gallery is None else self.gallery
        return Measured(self.queries.subset(items), self.evaluation, gallery, self.seed, (self, items))

    @cached_property
    def vectors(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Images [n, d], captions [m, d] and each caption's image int64 [m], to be ranked by inner product.

        Embeddings have unit length; codes are signs, -1 and +1.
        """
        return comparable(self.queries, self.seed)

    @cached_property
    def ranks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rank, from 0, of each image's best match among captions [n], and of each caption's among images [m]."""
        if self.part is not None:
            whole, items = self.part
            i2t, t2i = whole.ranks
            return i2t[items], t2i[np.isin(whole.queries.owner, items)]
        i2t, t2i = recall.retrieval_ranks(*self.vectors, threads=self.threads)
        rows, captions = shuffled(self.queries, self.seed)
        return i2t[np.argsort(rows)], t2i[np.argsort(captions)]

    @cached_property
    def labelled(self) -> bool:
        """Whether the items have labels, by which gallery items are relevant or not."""
        return self.queries.labels is not None

    @cached_property
    def rankings(self) -> Mapping[Way, RankingMetrics]:
        """Label metrics of image-to-text and text-to-image retrieval, one text per item.

        Raises:
            ValueError: the items have no labels.
        """
        return self._ranked(("i2t", "t2i"))

    @cached_property
    def rankings_within(self) -> Mapping[Way, RankingMetrics]:
        """The same of retrieval within a modality; empty without labels or without a separate gallery."""
        whole = self if self.part is None else self.part[0]
        return self._ranked(("i2i", "t2t")) if self.labelled and whole.gallery is not None else {}

    def _ranked(self, ways: tuple[Way, Way]) -> Mapping[Way, RankingMetrics]:
        if self.part is None:
            gallery = self.gallery or self.queries
            return rank(self.queries, gallery, self.evaluation, self.seed, ways, threads=self.threads)
        whole, items = self.part
        rankings = whole.rankings if ways == ("i2t", "t2i") else whole.rankings_within
        return {way: ranking.of(items) for way, ranking in rankings.items()}


Compute = Callable[[Measured], Mapping[str, float]]


@dataclass(frozen=True)
class Measure:
    """Metrics that one function computes.

    Raises:
        ValueError: a family without ``names``.
    """

    metrics: tuple[Metric, ...]  # entries of all values that ``compute`` may return
    # Returns values by name. It omits those that the items do not allow, as label metrics without labels.
    compute: Compute
    # Names that ``compute`` may return under a scenario's ``evaluation``; required if there are families.
    names: Callable[[Evaluation], Iterable[str]] | None = None
    whole_split_only: bool = False  # whether to compute it for the whole split only, not for the silos' parts

    def __post_init__(self) -> None:
        if self.names is None and any(metric.is_family for metric in self.metrics):
            raise ValueError(f"{self.metrics[0].name}: a family of metrics needs `names`")

    @cached_property
    def _entry(self) -> Callable[[str], Metric | None]:
        """Finds the entry of a name; remembers it, as the values of every silo have the same names."""
        return lru_cache(partial(_found, metrics=self.metrics))

    def names_under(self, evaluation: Evaluation) -> tuple[str, ...]:
        """Names of the values it may have under a scenario's ``evaluation``."""
        return tuple(self.names(evaluation)) if self.names else tuple(metric.name for metric in self.metrics)

    def of(self, items: Measured) -> dict[str, float]:
        """Compute the metrics, and check each value against its entry.

        Raises:
            RunError: the function returned a name without an entry, or a value out of bounds.
        """
        values = self.compute(items)
        for name, value in values.items():
            metric = self._entry(name)
            if metric is None:
                raise RunError(f"metric {name}: computed by {_place(self.compute)}, which has no entry for it")
            if (objection := metric.objection(value)) is not None:
                raise RunError(f"metric {objection}; computed by {_place(self.compute)}")
        return {name: float(value) for name, value in values.items()}


def _place(function: Compute) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def _recalls(items: Measured) -> dict[str, float]:
    return recall.recalls_of(*items.ranks)


def _spreads(items: Measured) -> dict[str, float]:
    image, text, _ = items.vectors
    return {"spread_image": recall.spread(image), "spread_text": recall.spread(text)}


def _label_metrics(items: Measured) -> dict[str, float]:
    """MAP and NDCG in both directions and their means, over the whole list and at each cut-off."""
    if not items.labelled:
        return {}
    evaluation, (i2t, t2i) = items.evaluation, items.rankings.values()
    values = {"map_i2t": i2t.map, "map_t2i": t2i.map, "map": (i2t.map + t2i.map) / 2}
    if items.queries.binary:
        values |= {"map_expected_i2t": i2t.map_expected, "map_expected_t2i": t2i.map_expected}
        values["map_expected"] = (i2t.map_expected + t2i.map_expected) / 2
    for n in evaluation.map_at:
        values |= {f"map_at{n}_i2t": i2t.map_at[n], f"map_at{n}_t2i": t2i.map_at[n]}
        values[f"map_at{n}"] = (i2t.map_at[n] + t2i.map_at[n]) / 2
    for n in evaluation.ndcg_at:
        whole = evaluation.ndcg_ideal == "database"
        ndcg = [(ranking.ndcg if whole else ranking.ndcg_retrieved)[n] for ranking in (i2t, t2i)]
        values |= {f"ndcg_at{n}_i2t": ndcg[0], f"ndcg_at{n}_t2i": ndcg[1], f"ndcg_at{n}": sum(ndcg) / 2}
    return values


def _within(items: Measured) -> dict[str, float]:
    """MAP of retrieval within a modality, as in image hashing papers, over the whole list and at each cut-off."""
    queries, evaluation = items.queries, items.evaluation
    if not evaluation.within:
        return {}
    values: dict[str, float] = {}
    for way, ranking in items.rankings_within.items():
        values |= {f"map_{way}": ranking.map, **{f"map_at{n}_{way}": ranking.map_at[n] for n in evaluation.map_at}}
        if queries.binary:
            values[f"map_expected_{way}"] = ranking.map_expected
    return values


def _folds(items: Measured) -> dict[str, float]:
    size = items.evaluation.fold_size
    return fold_recalls(items.queries, size, items.seed) if size else {}


# ----------------------------------------------------------------------------------------------------- the registry
_LARGEST_RANK = 2.0**32  # the largest number of items that a run can evaluate


def _recall_names(prefix: str = "") -> tuple[str, ...]:
    ranks = (f"{prefix}i2t_medr", f"{prefix}t2i_medr")
    return (*ranks, *(f"{prefix}{way}_r{k}" for k in recall.RECALLS for way in ("i2t", "t2i", "mean")))


def _label_names(evaluation: Evaluation) -> tuple[str, ...]:
    kinds = ("map", "map_expected", *(f"{kind}_at{n}" for kind in ("map", "ndcg") for n in _cut_offs(evaluation, kind)))
    return tuple(f"{kind}{way}" for kind in kinds for way in ("_i2t", "_t2i", ""))


def _cut_offs(evaluation: Evaluation, kind: str) -> tuple[int, ...]:
    return evaluation.map_at if kind == "map" else evaluation.ndcg_at


def _within_names(evaluation: Evaluation) -> tuple[str, ...]:
    kinds = ("map", *(f"map_at{n}" for n in evaluation.map_at), "map_expected") if evaluation.within else ()
    return tuple(f"{kind}_{way}" for way in ("i2i", "t2t") for kind in kinds)


_MAPS = (
    Metric("map{_way}", "mean average precision (mAP)", short="mAP"),
    Metric("map_expected{_way}", "mAP averaged over the orders of tied items", short="mAP tied", shown=False),
    Metric("map_at{n}{_way}", "mAP of the first {n} items", short="mAP@{n}", shown=False),
)

#: In the order of the summary's entries.
BUILT_IN: tuple[Measure, ...] = (
    Measure(
        (
            Metric(
                "{way}_medr",
                "median rank of the first match",
                high=_LARGEST_RANK,
                higher_is_better=False,
                short="median rank",
                shown=False,
            ),
            Metric("{way}_r{n}", "recall@{n}", short="R@{n}"),
        ),
        _recalls,
        lambda _: _recall_names(),
    ),
    Measure(
        (
            Metric("spread_image", "spread of the images' embeddings (0: all are the same)", shown=False),
            Metric("spread_text", "spread of the texts' embeddings (0: all are the same)", shown=False),
        ),
        _spreads,
    ),
    Measure(
        (*_MAPS, Metric("ndcg_at{n}{_way}", "NDCG of the first {n} items", short="NDCG@{n}", shown=False)),
        _label_metrics,
        _label_names,
    ),
    Measure(_MAPS, _within, _within_names),
    Measure(
        (
            Metric(
                "fold_{way}_medr",
                "median rank of the first match, mean over folds",
                high=_LARGEST_RANK,
                higher_is_better=False,
                shown=False,
            ),
            Metric("fold_{way}_r{n}", "recall@{n} within folds, mean over folds", shown=False),
        ),
        _folds,
        lambda evaluation: _recall_names("fold_") if evaluation.fold_size else (),
        whole_split_only=True,
    ),
)
#: Fairness over silos in :data:`HEADLINE`, computed by ``fedmq.evaluation.recall``.
OVER_SILOS: tuple[Metric, ...] = (
    Metric("std_r1", "standard deviation of mean recall@1 over silos", higher_is_better=False, shown=False),
    Metric("worst_r1", "mean recall@1 of the worst silo", shown=False),
    Metric("gap_r1", "mean recall@1 of the best silo minus that of the worst", higher_is_better=False, shown=False),
)
_KNOWN = (*(metric for measure in BUILT_IN for metric in measure.metrics), *OVER_SILOS)


def _found(name: str, metrics: Iterable[Metric]) -> Metric | None:
    return next((named for metric in metrics if (named := metric.named(name)) is not None), None)


@lru_cache  # the values of every silo have the same names
def _built_in(name: str) -> Metric | None:
    return _found(name, _KNOWN)


def metric_of(name: str, custom: Sequence[Metric] = ()) -> Metric:
    """The entry of a metric, e.g. ``map_at50_i2t``; ``custom`` has those of user-defined metrics.

    Raises:
        InputError: there is no such metric; the error suggests similar names.
    """
    metric = _built_in(name) or _found(name, custom)
    if metric is None:
        known = dict.fromkeys([*known_names(Evaluation()), *(entry.name for entry in (*OVER_SILOS, *custom))])
        raise InputError("metric", name, f"a metric; did you mean {' or '.join(nearest(name, known)[:3])}?")
    return metric


def is_known(name: str, custom: Sequence[Metric] = ()) -> bool:
    """Whether there is a metric of that name."""
    return (_built_in(name) or _found(name, custom)) is not None


def known_names(evaluation: Evaluation, measures: Iterable[Measure] = BUILT_IN) -> tuple[str, ...]:
    """The names that :func:`measure` may return; which of them it returns depends on the items' labels."""
    return tuple(dict.fromkeys(name for part in measures for name in part.names_under(evaluation)))


def higher_is_better(column: str, custom: Sequence[Metric] = ()) -> bool:
    """Whether larger values of a metric, or of a summary value such as ``bytes.up``, are better."""
    if column.startswith(_COSTS):
        return False
    name = column.rpartition(".")[2]
    metric = _built_in(name) or _found(name, custom)
    return metric is None or metric.higher_is_better


def shown(values: Mapping[str, float], custom: Sequence[Metric] = ()) -> list[Metric]:
    """Entries of the measured values that tables and curves show, in the order of the values."""
    found = (_built_in(name) or _found(name, custom) for name in values)
    return [metric for metric in found if metric is not None and metric.shown]


def measure(items: Measured, measures: Iterable[Measure] = BUILT_IN, *, whole_split: bool = False) -> dict[str, float]:
    """Compute all metrics of a set of items.

    Args:
        items: the evaluated items, and what they retrieve from.
        measures: the measures to compute.
        whole_split: whether the items are the whole split; some metrics are computed only then.

    Returns:
        ``i2t_r1``, ``t2i_r1``, ``mean_r1``, ...; ``i2t_medr`` and ``t2i_medr``; ``spread_image`` and ``spread_text``;
        with labels ``map_i2t``, ``map_t2i``, ``map``, and ``map_at50``, ``ndcg_at50``, ... for each cut-off; for codes
        also ``map_expected_i2t``, ..., averaged over the orders of tied items; with ``evaluation.within`` and a
        separate gallery also the mAPs within a modality, ``map_i2i``, ``map_t2t``, ...

    Raises:
        RunError: a value is out of its metric's bounds.
    """
    values: dict[str, float] = {}
    for part in measures:
        if whole_split or not part.whole_split_only:
            values |= part.of(items)
    return values


def objection(
    values: Mapping[str, float], custom: Sequence[Metric] = (), names: Iterable[str] | None = None
) -> str | None:
    """What is wrong with values that another process reported; None if they are valid.

    ``names`` are the allowed ones; None allows all known ones, those of ``custom`` included.
    """
    allowed = None if names is None else frozenset(names)
    for name, value in values.items():
        metric = _built_in(name) or _found(name, custom)
        if metric is None or (allowed is not None and name not in allowed):
            return f"{name}, which is not measured in this run"
        if (wrong := metric.objection(value)) is not None:
            return wrong
    return None
