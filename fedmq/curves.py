"""Precision and recall of released models: along the list, within each Hamming radius, and among the first N.

The papers on hashing print these as figures: precision against recall, and precision or recall among the first N. The
models of finished runs are measured as their runs measured them: same split, same gallery, same order of ties.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedmq import plots, tables
from fedmq.data.prepared import Progress
from fedmq.errors import InputError
from fedmq.evaluator import HeldOut, Way, embed, rank
from fedmq.figures import Figure
from fedmq.ranking import Curve, RankingMetrics
from fedmq.release import Release
from fedmq.world import build_world

#: Places of a long list that are drawn; the file has as many.
_POINTS = 200


@dataclass(frozen=True)
class Measured:
    """One run's curves.

    Args:
        name: of the run, and the silo's if the model is its own.
        ways: ``i2t`` and ``t2i``; with ``evaluation.within`` also ``i2i`` and ``t2t``.
    """

    name: str
    ways: dict[Way, RankingMetrics]


def parse_cutoffs(text: str) -> tuple[int, ...]:
    """Read ``1,5,10``.

    Raises:
        InputError: they are no whole numbers from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", part) and int(part) for part in parts):
        raise InputError("--top", text, "whole numbers from 1, e.g. 1,10,100")
    return tuple(sorted({int(part) for part in parts}))


def measured(release: Release, top_n: Sequence[int], progress: Progress | None = None) -> Measured:
    """Measure a released model.

    Args:
        release: the run.
        top_n: cut-offs of precision@N and recall@N; those beyond the gallery are left out.
        progress: told while data are prepared.

    Raises:
        InputError: the data are not those of the run, or have no labels, by which items would be relevant.
    """
    scenario = release.scenario
    world = build_world(scenario, progress, release.cache)
    release.check_data(world.prepared)
    if not world.prepared.label_names:
        raise InputError(f"data.name of {release.run.root}", scenario.data.name, "a data set with labels")
    heldout, model = HeldOut.load(scenario, world), release.retriever(world.prepared)
    queries = embed(model.encoders, heldout.share, binary=model.binary)
    gallery = queries if heldout.gallery is None else embed(model.encoders, heldout.gallery, binary=model.binary)
    asked = tuple(n for n in top_n if n <= len(gallery.image))
    ways: tuple[Way, ...] = ("i2t", "t2i")
    if scenario.evaluation.within and heldout.gallery is not None:
        ways = (*ways, "i2i", "t2t")
    found = rank(queries, gallery, scenario.evaluation, scenario.seed, ways, top_n=asked, curves=True)
    silo = "" if release.own is None else f" {release.own.silo}"
    return Measured(f"{release.run.root.name}{silo}", found)


def _thinned(curve: Curve) -> tuple[np.ndarray, Curve]:
    """Places [k] from 1, the first ones all, then further and further apart, with the curve there."""
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
    return tables.as_csv(records)


def page(runs: Sequence[Measured], title: str) -> str:
    """The curves as one self-contained HTML page: for each way precision against recall, and among the first N."""
    figures = []
    for way in dict.fromkeys(way for run in runs for way in run.ways):
        have = [(run.name, run.ways[way]) for run in runs if way in run.ways]
        figure = Figure(f"{way}: precision against recall, along the list", "recall", "precision")
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
    return plots.document(title, (), figures)


def distinct(runs: Sequence[Measured]) -> list[Measured]:
    """The same with names that differ: a run folder's name says little twice."""
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({names[: place + 1].count(run.name)})") if names.count(run.name) > 1 else run
        for place, run in enumerate(runs)
    ]
