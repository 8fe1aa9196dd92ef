"""Compute what a report shows of the data and the model: examples of retrieval, the shared space, who holds what."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedmq import seeds
from fedmq.config.sections import Modality
from fedmq.data import catalogue
from fedmq.data.silo_dataset import load_silo_dataset
from fedmq.encoders.image_sets import Images
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.evaluation.gallery_ranking import Embedded, comparable
from fedmq.evaluation.heldout import embed
from fedmq.evaluation.recall import first_of_rows, tied
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import encoders_of
from fedmq.packages import package
from fedmq.retrieval.gallery import caption_texts
from fedmq.retrieval.released_model import Release
from fedmq.runs.data_records import Example, ReportData, ReportHit, ReportItem, Space
from fedmq.storage.run_folder import write_json
from fedmq.text import Progress

#: Maximum number of held-out items among which examples are ranked; the first ones after shuffling by the seed.
_MOST_ITEMS = 1000
#: Maximum number of pairs in the plane of the shared space.
_MOST_PAIRS = 200
#: Best and worst cases in each direction.
_EXAMPLES = 3
_HITS = 5
#: Longer edge [pixels] and JPEG quality of a thumbnail, which is then three to five kilobytes in size.
_EDGE, _QUALITY = 112, 80

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def write(release: Release, progress: Progress | None = None) -> None:
    """Write ``report_data.json`` into the run folder.

    Raises:
        InputError: the data are not on this machine, or have changed since the run.
    """
    write_json(release.run.root / "report_data.json", collect(release, progress).plain())


def collect(release: Release, progress: Progress | None = None) -> ReportData:
    """Compute a report's images, projections and holdings; arguments and errors as in :func:`write`."""
    scenario = release.scenario
    population = build_population(scenario, progress, release.cache)
    release.check_data(population.prepared)
    classes, holdings = _holdings(population)
    notes = [*population.prepared.notes, *population.prepared.warnings]
    data = ReportData(model_digest=release.files.used, classes=classes, holdings=holdings, notes=notes)
    if release.files.config.personal_only:
        return data
    shuffled = seeds.numpy_generator(scenario.seed, "report").permutation(population.evaluated)
    rows = np.sort(shuffled[:_MOST_ITEMS])
    model = release.model(population.prepared)
    items = load_silo_dataset(population.prepared, rows, image=True, text=True)
    after = embed(encoders_of(model), items, binary=model.binary)
    model.load(model.initial())
    before = embed(encoders_of(model), items, binary=model.binary)
    return data.model_copy(
        update={
            "items": len(rows),
            "examples": _examples(release, population, rows, after),
            "before": _space(before, scenario.seed),
            "after": _space(after, scenario.seed),
        }
    )


def _holdings(population: Population) -> tuple[list[str], dict[str, list[int]]]:
    labels = population.prepared.labels
    if labels is None:
        return [], {}
    counts = {
        silo.name: [int(count) for count in labels[rows].sum(axis=0, dtype=np.int64)]
        for silo, rows in zip(population.silos, population.train, strict=True)
    }
    return list(population.prepared.label_names), counts


def _space(items: Embedded, seed: int) -> Space:
    """Images and first captions in the plane of their two largest principal components."""
    chosen = seeds.numpy_generator(seed, "report", "space").permutation(len(items.image))[:_MOST_PAIRS]
    some = items.subset(np.sort(chosen))
    both = np.concatenate([some.image, some.first_captions]).astype(np.float64)
    plane = _principal_plane(both) if min(both.shape) >= 2 else np.zeros((len(both), 2))
    points = [[round(float(x), 5), round(float(y), 5)] for x, y in plane]
    return Space(image=points[: len(some.image)], text=points[len(some.image) :])


def _principal_plane(points: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coordinates of points [n, d] along their first two principal axes: [n, 2].

    With NumPy, as every run draws this and scikit-learn takes more than a second to import. The sign of an axis is
    arbitrary; here the largest coordinate along it is positive.
    """
    left, scale, _ = np.linalg.svd(points - points.mean(axis=0), full_matrices=False)
    plane: npt.NDArray[np.float64] = left[:, :2] * scale[:2]
    largest = plane[np.abs(plane).argmax(axis=0), [0, 1]]
    plane *= np.where(largest < 0, -1.0, 1.0)
    return plane


def _examples(release: Release, population: Population, rows: I64, items: Embedded) -> list[Example]:
    """The best and the worst queries in both directions."""
    describe = _described(release, population, rows)
    owner = items.owner
    if items.binary:  # the share of equal bits
        image, text = (hamming.sign(outputs).astype(np.float32) for outputs in (items.image, items.text))
        similar = (1 + text @ image.T / image.shape[1]) / 2
    else:
        image, text, _ = comparable(items, release.scenario.seed)
        similar = tied(tied(text @ image.T, first_of_rows(image)).T, first_of_rows(text)).T
    per_image = _first_right(similar.T, owner)
    directions: tuple[tuple[Literal["t2i", "i2t"], F32, I64, npt.NDArray[np.floating], I64], ...] = (
        ("t2i", similar, _ranks(similar, owner), _margins(similar, owner), owner),
        ("i2t", similar.T, per_image, -per_image.astype(float), np.arange(len(image))),
    )

    def caption(place: int) -> ReportItem:
        return describe(int(owner[place]), int(place - np.searchsorted(owner, owner[place])), "text")

    def image_of(item: int) -> ReportItem:
        return describe(int(item), 0, "image")

    examples = []
    for best in (True, False):
        for way, scores, ranks, margins, items_of in directions:
            show, hit, hits_of = (
                (caption, image_of, np.arange(len(image))) if way == "t2i" else (image_of, caption, owner)
            )
            for query in _chosen(ranks, margins, best=best, groups=items_of):
                order, item = np.argsort(-scores[query], kind="stable"), items_of[query]
                rank = int(np.flatnonzero(hits_of[order] == item)[0]) + 1
                places = order[:_HITS]
                found = [round(float(scores[query, at]), 4) for at in places]
                hits = [
                    ReportHit(**vars(hit(at)), right=bool(hits_of[at] == item), score=score)
                    for at, score in zip(places, found, strict=True)
                ]
                examples.append(Example(way=way, best=best, query=show(query), rank=rank, hits=hits))
    return examples


def _ranks(similar: F32, owner: I64) -> I64:
    """Rank of each caption's own image, from 1: [m, n] to int64 [m]."""
    own = similar[np.arange(len(owner)), owner]
    ranks: I64 = 1 + (similar > own[:, None]).sum(axis=1)
    return ranks


def _margins(similar: F32, owner: I64) -> F32:
    """How much more similar each caption's own image is than the most similar other one: float32 [m]."""
    own = similar[np.arange(len(owner)), owner]
    others = similar.copy()
    others[np.arange(len(owner)), owner] = -np.inf
    margins: F32 = own - others.max(axis=1)
    return margins


def _first_right(similar: F32, owner: I64) -> I64:
    """Rank of the first of each image's own captions, from 1: [n, m] to int64 [n]."""
    order = np.argsort(-similar, axis=1, kind="stable")
    ranks: I64 = 1 + np.argmax(owner[order] == np.arange(len(similar))[:, None], axis=1)
    return ranks


def _chosen(ranks: I64, margins: npt.NDArray[np.floating], *, best: bool, groups: I64) -> list[int]:
    """The queries with the best or the worst ranks, at most one of each item; ties by margin, then by index."""
    sign = 1 if best else -1
    order = np.lexsort((-sign * margins, sign * ranks))
    first: dict[int, int] = {}
    for query in order:
        first.setdefault(int(groups[query]), int(query))
        if len(first) == _EXAMPLES:
            break
    return list(first.values())


Describe = Callable[[int, int, Modality], ReportItem]


def _described(release: Release, population: Population, rows: I64) -> Describe:
    """A function that describes an item by its index, the number of a caption, and the modality to show."""
    data, backbone, keys = release.scenario.dataset, release.scenario.backbone, population.prepared.keys
    known = [keys[row] for row in rows]
    captions = caption_texts(data, backbone, known)
    images: Images | None = None
    if backbone.name != "features":
        raw = catalogue.find(data.name).read(data)
        images, places = raw.images, {key: place for place, key in enumerate(raw.keys)}

    def describe(item: int, number: int, side: Modality) -> ReportItem:
        key, texts = known[item], captions[item]
        if side == "image" and images is not None:
            return ReportItem(key=key, image=thumbnail(images, places[key]))
        return ReportItem(key=key, caption=texts[number] if number < len(texts) else "")

    return describe


def thumbnail(images: Images, row: int) -> str:
    """A small JPEG of a whole image, or of a video's middle frame, as a data URI; empty if it cannot be read."""
    try:
        frames = images.frames(row)
        pixels = frames[len(frames) // 2]
    except InputError:
        return ""
    file = io.BytesIO()
    small = package("PIL.Image", "embedded", "report").fromarray(pixels)
    small.thumbnail((_EDGE, _EDGE))
    small.save(file, "JPEG", quality=_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
