"""t-SNE (van der Maaten and Hinton 2008) of released models: the evaluated items' codes or embeddings in the plane.

The figure shows whether classes, and the two modalities of an item, are separated. Distances between clusters and their
sizes carry no meaning; retrieval quality is measured by ``fedmq curves`` and the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.config.sections import Modality
from fedmq.data.labels import fine_columns
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.evaluation.embedding import embed
from fedmq.retrieval.pr_curves import labelled_population
from fedmq.retrieval.released_model import Release
from fedmq.runs.report import html
from fedmq.runs.report.html import Figure
from fedmq.runs.tables import as_csv
from fedmq.text import Progress

F32 = npt.NDArray[np.float32]
_PERPLEXITY = 30.0
_SYMBOLS: dict[Modality, str] = {"image": "circle", "text": "x-thin-open"}


@dataclass(frozen=True)
class Plane:
    """One model's items in the plane.

    Args:
        name: name of the model.
        places: coordinates, float32 [n, 2].
        sides: modality of each point: the item's image, or its first caption.
        classes: class of each point.
        items: key of each point's item.
    """

    name: str
    places: F32
    sides: tuple[Modality, ...]
    classes: tuple[str, ...]
    items: tuple[str, ...]


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
        found: F32 = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(unit)
    return found


def table(planes: Sequence[Plane]) -> str:
    """All points as CSV: run, item, side, class, x, y."""
    return as_csv(
        [
            {"run": plane.name, "item": item, "side": side, "class": name, "x": f"{x:.4f}", "y": f"{y:.4f}"}
            for plane in planes
            for item, side, name, (x, y) in zip(plane.items, plane.sides, plane.classes, plane.places, strict=True)
        ]
    )


def page(planes: Sequence[Plane]) -> str:
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
