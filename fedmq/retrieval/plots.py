"""Plots of released models: precision-recall curves, and t-SNE (van der Maaten and Hinton 2008).

The curves are the usual figures of papers on hashing: precision against recall by rank and by Hamming radius, and
precision or recall among the first N. Models are evaluated as in their runs: same split, same gallery, same order of
ties. In a t-SNE plot, distances between clusters and their sizes carry no meaning.
"""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.config.sections import Modality
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.evaluation.gallery_ranking import Way, rank
from fedmq.evaluation.heldout import HeldOut, embed
from fedmq.evaluation.label_metrics import Curve, RankingMetrics
from fedmq.federation.population import Population, build_population
from fedmq.retrieval.released_model import Release
from fedmq.runs.report import html
from fedmq.runs.report.html import Figure
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder
from fedmq.text import Progress, as_csv, csv_text

#: Maximum number of points of a curve by rank, in figures and files.
_POINTS = 200


@dataclass(frozen=True)
class Runs:
    """Runs that a plot shows under one name."""

    name: str  # name of the run's folder, or of the comparison's row
    folders: tuple[Path, ...]  # folders of the single run, or of the row's runs, one per seed
    comparison: Path | None = None  # folder of the comparison; None for a single run


def named(paths: Iterable[Path], silo: str | None = None) -> list[Runs]:
    """The runs in some folders, without duplicates; equal names are completed by the folder.

    Raises:
        InputError: a comparison's ``runs.csv`` is damaged, or one of its runs is not there.
    """
    runs: list[Runs] = []
    for path in dict.fromkeys(paths):
        is_run = RunFolder(path).scenario.exists() or not (path / "runs.csv").exists()
        name = Path(os.path.abspath(path)).name  # noqa: PTH100 - keeps the name of a symbolic link
        runs += [Runs(name, (path,))] if is_run else _rows(path)
    if silo is not None:
        runs = [replace(run, name=f"{run.name} {silo}") for run in runs]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({run.comparison or run.folders[0]})") if names.count(run.name) > 1 else run
        for run in runs
    ]


def _rows(comparison: Path) -> list[Runs]:
    """The rows of a comparison that have a trained model, in order."""
    table = comparison / "runs.csv"
    allowed = "what fedmq compare writes: a line of names, then each run's name, model_digest and folder"
    rows: dict[str, list[Path]] = {}
    try:
        text = io.StringIO(read_regular(table, allowed).decode("utf-8"), newline="")
        for record in csv.DictReader(text):
            cells = (record.get(key) for key in ("name", "model_digest", "folder"))
            name, digest, folder = (None if cell is None else csv_text(cell) for cell in cells)
            if not name or not folder or digest is None:
                raise InputError(str(table), "a line without name, model_digest or folder", allowed)
            if digest:  # zero-shot rows have no digest; their folder is that of a run that was trained later
                rows.setdefault(name, []).append(Path(folder))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(table), str(error), allowed) from None
    if not rows:
        raise InputError(str(table), "no run", allowed)
    for path in (folder for folders in rows.values() for folder in folders):
        if not os.path.isdir(path):  # noqa: PTH112 - unlike Path, False for names that are too long
            where = "an existing folder; relative ones are looked up from the working directory"
            raise InputError(str(table), str(path), where)
    return [Runs(name, tuple(folders), comparison) for name, folders in rows.items()]


@dataclass(frozen=True)
class Measured:
    """The curves of one run, or the means over several that differ in their seed."""

    name: str  # name of the runs, followed by the silo if its personal models are used
    ways: dict[Way, RankingMetrics]  # ``i2t`` and ``t2i``; with ``evaluation.within`` also ``i2i`` and ``t2t``


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
    """As :func:`evaluated_population`, checked to have labels.

    Raises:
        InputError: also if the data have no labels.
    """
    population = evaluated_population(release, progress)
    if not population.prepared.label_names:
        if release.site is not None:
            raise InputError("--site", "a site whose data have no labels", "data with labels")
        raise InputError(f"data.name of {release.run.root}", release.scenario.dataset.name, "a data set with labels")
    return population


def evaluated_population(release: Release, progress: Progress | None = None) -> Population:
    """Load a run's data, or those of the site whose personal model is used.

    Raises:
        InputError: the data are not those of the run, or only the sites have them, or the site has no pair to evaluate.
    """
    scenario = release.scenario
    if release.site is not None:
        if not len(release.site.evaluated):
            split = scenario.evaluation.split
            raise InputError("--site", f"a site without a pair in its {split} split", f"a site with {split} pairs")
        return release.site
    if scenario.data is None:
        allowed = (
            "a run on one data set; --site FILE measures a silo's personal model at its site, and summary.json has the "
            "metrics of the silos' held-out items under own_heldout"
        )
        raise InputError(str(release.run.root), "a run whose data only the sites have (partition.kind own)", allowed)
    population = build_population(scenario, progress, release.cache)
    release.check_data(population.prepared)
    return population


def measured(release: Release, top_n: Sequence[int], progress: Progress | None = None) -> dict[Way, RankingMetrics]:
    """Compute the curves of a released model; cut-offs ``top_n`` beyond the gallery are left out.

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

    Raises:
        InputError: their lists or codes have different lengths, so that they cannot be averaged.
    """
    sizes = {
        tuple(
            (way, *(None if curve is None else len(curve.recall) for curve in (ranking.pr_rank, ranking.pr_radius)))
            for way, ranking in run.items()
        )
        for run in runs
    }
    if len(sizes) > 1:
        raise InputError(f"runs of {name}", "lists or codes of different lengths", "runs that differ in their seed")
    return Measured(name, {way: _mean([run[way] for run in runs]) for way in runs[0]})


def _mean(runs: Sequence[RankingMetrics]) -> RankingMetrics:
    return RankingMetrics(
        map=float(np.mean([run.map for run in runs])),
        map_expected=float(np.mean([run.map_expected for run in runs])),
        map_at={},  # not measured here, like NDCG
        ndcg={},
        ndcg_retrieved={},
        top_n={n: tuple(np.mean([run.top_n[n] for run in runs], axis=0).tolist()) for n in runs[0].top_n},
        pr_rank=_curve([run.pr_rank for run in runs]),
        pr_radius=_curve([run.pr_radius for run in runs]),
    )


def _curve(of_runs: Sequence[Curve | None]) -> Curve | None:
    """The mean curve; runs that retrieve nothing within a radius are left out of its precision."""
    curves = [curve for curve in of_runs if curve is not None]
    if not curves:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)  # NaN if no run retrieves anything
        precision = np.nanmean([curve.precision for curve in curves], axis=0)
    return Curve(precision, np.mean([curve.recall for curve in curves], axis=0))


def _thinned(curve: Curve) -> tuple[np.ndarray, Curve]:
    """Ranks [k] from 1, geometrically spaced if the curve is long, and the curve at these ranks."""
    length = len(curve.precision)
    kept = np.unique(np.geomspace(1, length, _POINTS).round().astype(np.int64)) if length > _POINTS else None
    places = np.arange(1, length + 1) if kept is None else kept
    return places, Curve(curve.precision[places - 1], curve.recall[places - 1])


def curves_table(runs: Sequence[Measured]) -> str:
    """All curves as CSV: run, way, curve (``rank``, ``radius`` or ``top``), place, precision, recall."""
    records: list[dict[str, object]] = []
    for run in runs:
        for way, ranking in run.ways.items():
            rows: list[tuple[str, int, float, float]] = []
            if ranking.pr_rank is not None:
                places, curve = _thinned(ranking.pr_rank)
                rows += [("rank", int(at), *pair) for at, *pair in zip(places, *curve, strict=True)]
            if ranking.pr_radius is not None:
                rows += [("radius", at, *pair) for at, pair in enumerate(zip(*ranking.pr_radius, strict=True))]
            rows += [("top", n, *pair) for n, pair in ranking.top_n.items()]
            for kind, at, precision, recall in rows:
                head = {"run": run.name, "way": way, "curve": kind, "place": at}
                records.append({**head, "precision": round(float(precision), 6), "recall": round(float(recall), 6)})
    return as_csv(records)


def curves_page(runs: Sequence[Measured], title: str) -> str:
    """The curves as one self-contained HTML page, with figures for each direction of retrieval."""
    figures = []
    for way in dict.fromkeys(way for run in runs for way in run.ways):
        have = [(run.name, run.ways[way]) for run in runs if way in run.ways]
        figure = Figure(f"{way}: precision against recall, by rank", "recall", "precision")
        for name, ranking in have:
            if ranking.pr_rank is not None:
                _, curve = _thinned(ranking.pr_rank)
                figure.draw("scatter", x=curve.recall, y=curve.precision, name=name, mode="lines")
        figures.append(figure)
        if any(ranking.pr_radius is not None for _, ranking in have):
            figure = Figure(f"{way}: precision against recall, by Hamming radius", "recall", "precision")
            for name, ranking in have:
                if ranking.pr_radius is not None:
                    precision, recall = ranking.pr_radius
                    radii = [f"radius {radius}" for radius in range(len(recall))]
                    figure.draw("scatter", x=recall, y=precision, text=radii, name=name, mode="lines+markers")
            figures.append(figure)
        for place, what in enumerate(("precision", "recall")):
            figure = Figure(f"{way}: {what} among the first N", "N", what)
            for name, ranking in have:
                values = [pair[place] for pair in ranking.top_n.values()]
                figure.draw("scatter", x=list(ranking.top_n), y=values, name=name, mode="lines+markers")
            figures.append(figure)
    return html.document(title, (), figures)


F32 = npt.NDArray[np.float32]
_PERPLEXITY = 30.0
_SYMBOLS: dict[Modality, str] = {"image": "circle", "text": "x-thin-open"}


@dataclass(frozen=True)
class Plane:
    """One model's items in the plane."""

    name: str
    places: F32  # coordinates, float32 [n, 2]
    sides: tuple[Modality, ...]  # modality of each point: the item's image, or its first caption
    classes: tuple[str, ...]  # class of each point
    items: tuple[str, ...]  # key of each point's item


def placed(
    name: str,
    release: Release,
    *,
    items: int,
    classes: int,
    sides: Sequence[Modality],
    progress: Progress | None = None,
) -> Plane:
    """Compute the t-SNE of a model's evaluated items.

    Args:
        name: name of the model.
        release: its run.
        items: maximum number of items, sampled with the run's seed.
        classes: number of classes, the most frequent ones. An item with several of them counts as the first, an item
            with none is left out.
        sides: image, text or both; an item has one point per modality, all in one plane.
        progress: called while data are prepared.

    Raises:
        InputError: the data are not those of the run, have no labels, or leave fewer than four points.
    """
    population = labelled_population(release, progress)
    prepared, model = population.prepared, release.retriever(population.prepared)
    fine = fine_columns(prepared.label_names)
    labels = np.asarray(prepared.labels)[population.evaluated][:, fine]
    common = np.sort(np.argsort(-labels.sum(axis=0, dtype=np.int64), kind="stable")[:classes])
    shown = labels[:, common] > 0
    rows = np.flatnonzero(shown.any(axis=1))
    if len(rows) > items:
        rows = np.sort(seeds.numpy_generator(release.scenario.seed, "tsne", "items").choice(rows, items, replace=False))
    dataset = population.load(population.evaluated[rows], image=True, text=True)
    embedded = embed(model.encoders, dataset, binary=model.binary)
    vectors = {"image": embedded.image, "text": embedded.first_captions}
    points = np.concatenate([vectors[side] for side in sides])
    if len(points) < 4:
        raise InputError(f"{release.run.root}: t-SNE", f"{len(points)} points", "at least 4: more --items or --classes")
    class_of = [prepared.label_names[fine[column]] for column in common[shown[rows].argmax(axis=1)]]
    keys = [prepared.keys[row] for row in dataset.rows.tolist()]
    return Plane(
        name,
        _plane(points, binary=model.binary, seed=seeds.derive(release.scenario.seed, "tsne") % 2**32),
        tuple(side for side in sides for _ in rows),
        tuple(class_of) * len(sides),
        tuple(keys) * len(sides),
    )


def _plane(points: F32, *, binary: bool, seed: int) -> F32:
    """t-SNE of vectors [n, d], as [n, 2]; of codes by Hamming distance, of embeddings by angle."""
    from sklearn.manifold import TSNE  # noqa: PLC0415 - takes a second to import
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415

    length = np.maximum(np.linalg.norm(points, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    unit = hamming.sign(points).astype(np.float32) if binary else points / length
    if not np.ptp(unit, axis=0).any():  # all equal, as codes of an untrained model may be
        return np.zeros((len(unit), 2), np.float32)
    if unit.shape[1] < 2:
        unit = np.pad(unit, ((0, 0), (0, 1)))  # PCA initialisation needs two dimensions
    perplexity = min(_PERPLEXITY, (len(unit) - 1) / 3)
    with threadpool_limits(1):  # with more, the order of sums varies between calls
        places: F32 = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(unit)
    return places


def tsne_table(planes: Sequence[Plane]) -> str:
    """All points as CSV: run, item, side, class, x, y."""
    return as_csv(
        [
            {"run": plane.name, "item": item, "side": side, "class": name, "x": f"{x:.4f}", "y": f"{y:.4f}"}
            for plane in planes
            for item, side, name, (x, y) in zip(plane.items, plane.sides, plane.classes, plane.places, strict=True)
        ]
    )


def tsne_page(planes: Sequence[Plane]) -> str:
    """The planes as one self-contained HTML page: a colour for each class, a symbol for each modality."""
    figures = []
    for plane in planes:
        figure = Figure(f"{plane.name}: {' and '.join(dict.fromkeys(plane.sides))}", "", "", height=700)
        classes, sides = np.array(plane.classes), np.array(plane.sides)
        for place, name in enumerate(sorted(set(plane.classes))):
            for side in dict.fromkeys(plane.sides):
                points = np.flatnonzero((classes == name) & (sides == side))
                figure.draw(
                    "scatter",
                    x=plane.places[points, 0],
                    y=plane.places[points, 1],
                    text=[plane.items[point] for point in points],
                    name=f"{name}, {side}",
                    legendgroup=name,
                    mode="markers",
                    marker={"color": html.colour(place), "symbol": _SYMBOLS[side], "size": 6},
                )
        figures.append(figure)
    notes = ("t-SNE: distances between clusters, and their sizes, carry no meaning",)
    return html.document(", ".join(plane.name for plane in planes), notes, figures)
