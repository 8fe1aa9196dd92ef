"""Precision and recall curves of released models: by rank, by Hamming radius, and among the first N.

These are the usual figures of papers on hashing: precision against recall, and precision or recall among the first N.
Models are evaluated as in their runs: same split, same gallery, same order of ties.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedmq.errors import InputError
from fedmq.evaluation.embedding import embed
from fedmq.evaluation.gallery_ranking import Way, rank
from fedmq.evaluation.heldout import HeldOut
from fedmq.evaluation.label_metrics import Curve, RankingMetrics
from fedmq.federation.population import Population, build_population
from fedmq.retrieval.released_model import Release
from fedmq.runs.report import html
from fedmq.runs.report.html import Figure
from fedmq.runs.tables import as_csv
from fedmq.text import Progress

Key = TypeVar("Key")

#: Maximum number of points of a curve by rank, in figures and files.
_POINTS = 200


@dataclass(frozen=True)
class Measured:
    """The curves of one run, or the means over several that differ in their seed.

    Args:
        name: name of the runs, followed by the silo if its personal models are used.
        ways: ``i2t`` and ``t2i``; with ``evaluation.within`` also ``i2i`` and ``t2t``.
    """

    name: str
    ways: dict[Way, RankingMetrics]


def parse_cutoffs(text: str) -> tuple[int, ...]:
    """Read ``1,5,10``.

    Raises:
        InputError: they are not whole numbers from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", part) and int(part) for part in parts):
        raise InputError("--top", text, "whole numbers from 1, e.g. 1,10,100")
    return tuple(sorted({int(part) for part in parts}))


def labelled_population(release: Release, progress: Progress | None = None) -> Population:
    """Load a run's data, or those of the site whose personal model is used, checked to have labels.

    Args:
        release: the run.
        progress: called while data are prepared.

    Raises:
        InputError: the data are not those of the run, or have no labels, or only the sites have them, or the site has
            no pair to evaluate.
    """
    scenario = release.scenario
    if release.site is not None:
        if not release.site.prepared.label_names:
            raise InputError("--site", "a site whose data have no labels", "data with labels")
        if not len(release.site.evaluated):
            split = scenario.evaluation.split
            raise InputError("--site", f"a site without a pair in its {split} split", f"a site with {split} pairs")
        return release.site
    release.check_one_data_set(
        "a run on one data set; --site FILE measures a silo's personal model at its site, and summary.json has the "
        "metrics of the silos' held-out items under own_heldout"
    )
    population = build_population(scenario, progress, release.cache)
    release.check_data(population.prepared)
    if not population.prepared.label_names:
        raise InputError(f"data.name of {release.run.root}", scenario.dealt.name, "a data set with labels")
    return population


def measured(release: Release, top_n: Sequence[int], progress: Progress | None = None) -> dict[Way, RankingMetrics]:
    """Compute the curves of a released model.

    Args:
        release: the run.
        top_n: cut-offs of precision@N and recall@N; those beyond the gallery are left out.
        progress: called while data are prepared.

    Raises:
        InputError: the data are not those of the run, or have no labels, or only the sites have them.
    """
    scenario = release.scenario
    population = labelled_population(release, progress)
    heldout, model = HeldOut.load(scenario, population), release.retriever(population.prepared)
    queries = embed(model.encoders, heldout.dataset, binary=model.binary)
    gallery = queries if heldout.gallery is None else embed(model.encoders, heldout.gallery, binary=model.binary)
    cutoffs = tuple(n for n in top_n if n <= len(gallery.image))
    ways: tuple[Way, ...] = ("i2t", "t2i")
    if scenario.evaluation.within and heldout.gallery is not None:
        ways = (*ways, "i2i", "t2t")
    return rank(queries, gallery, scenario.evaluation, scenario.seed, ways, top_n=cutoffs, curves=True)


def mean(name: str, runs: Sequence[Mapping[Way, RankingMetrics]]) -> Measured:
    """Average the curves of several runs.

    Args:
        name: name of the runs.
        runs: result of :func:`measured` for each run; at least one.

    Raises:
        InputError: their lists or codes have different lengths, so that they cannot be averaged.
    """
    sizes = {
        tuple(
            (way, *(None if curve is None else len(curve.recall) for curve in (each.pr_rank, each.pr_radius)))
            for way, each in run.items()
        )
        for run in runs
    }
    if len(sizes) > 1:
        raise InputError(f"runs of {name}", "lists or codes of different lengths", "runs that differ in their seed")
    return Measured(name, {way: _mean([run[way] for run in runs]) for way in runs[0]})


def _mean(found: Sequence[RankingMetrics]) -> RankingMetrics:
    return RankingMetrics(
        map=float(np.mean([each.map for each in found])),
        map_expected=float(np.mean([each.map_expected for each in found])),
        map_at=_means([each.map_at for each in found]),
        ndcg=_means([each.ndcg for each in found]),
        ndcg_retrieved=_means([each.ndcg_retrieved for each in found]),
        top_n={n: tuple(np.mean([each.top_n[n] for each in found], axis=0).tolist()) for n in found[0].top_n},
        pr_rank=_curve([each.pr_rank for each in found]),
        pr_radius=_curve([each.pr_radius for each in found]),
    )


def _means(found: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    return {key: float(np.mean([each[key] for each in found])) for key in found[0]}


def _curve(found: Sequence[Curve | None]) -> Curve | None:
    """The mean curve; runs that retrieve nothing within a radius are left out of its precision."""
    curves = [each for each in found if each is not None]
    if not curves:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)  # NaN if no run retrieves anything
        precision = np.nanmean([each.precision for each in curves], axis=0)
    return Curve(precision, np.mean([each.recall for each in curves], axis=0))


def _thinned(curve: Curve) -> tuple[np.ndarray, Curve]:
    """Ranks [k] from 1, geometrically spaced if the curve is long, and the curve at these ranks."""
    length = len(curve.precision)
    kept = np.unique(np.geomspace(1, length, _POINTS).round().astype(np.int64)) if length > _POINTS else None
    places = np.arange(1, length + 1) if kept is None else kept
    return places, Curve(curve.precision[places - 1], curve.recall[places - 1])


def table(runs: Sequence[Measured]) -> str:
    """All curves as CSV: run, way, curve (``rank``, ``radius`` or ``top``), place, precision, recall."""
    records: list[dict[str, object]] = []
    for run in runs:
        for way, found in run.ways.items():
            rows: list[tuple[str, int, float, float]] = []
            if found.pr_rank is not None:
                places, curve = _thinned(found.pr_rank)
                rows += [("rank", int(at), *pair) for at, *pair in zip(places, *curve, strict=True)]
            if found.pr_radius is not None:
                rows += [("radius", at, *pair) for at, pair in enumerate(zip(*found.pr_radius, strict=True))]
            rows += [("top", n, *pair) for n, pair in found.top_n.items()]
            for kind, at, precision, recall in rows:
                head = {"run": run.name, "way": way, "curve": kind, "place": at}
                records.append({**head, "precision": round(float(precision), 6), "recall": round(float(recall), 6)})
    return as_csv(records)


def page(runs: Sequence[Measured], title: str) -> str:
    """The curves as one self-contained HTML page, with figures for each direction of retrieval."""
    figures = []
    for way in dict.fromkeys(way for run in runs for way in run.ways):
        have = [(run.name, run.ways[way]) for run in runs if way in run.ways]
        figure = Figure(f"{way}: precision against recall, by rank", "recall", "precision")
        for name, found in have:
            if found.pr_rank is not None:
                _, curve = _thinned(found.pr_rank)
                figure.draw("scatter", x=curve.recall, y=curve.precision, name=name, mode="lines")
        figures.append(figure)
        if any(found.pr_radius is not None for _, found in have):
            figure = Figure(f"{way}: precision against recall, by Hamming radius", "recall", "precision")
            for name, found in have:
                if found.pr_radius is not None:
                    precision, recall = found.pr_radius
                    radii = [f"radius {radius}" for radius in range(len(recall))]
                    figure.draw("scatter", x=recall, y=precision, text=radii, name=name, mode="lines+markers")
            figures.append(figure)
        for place, what in enumerate(("precision", "recall")):
            figure = Figure(f"{way}: {what} among the first N", "N", what)
            for name, found in have:
                values = [pair[place] for pair in found.top_n.values()]
                figure.draw("scatter", x=list(found.top_n), y=values, name=name, mode="lines+markers")
            figures.append(figure)
    return html.document(title, (), figures)
