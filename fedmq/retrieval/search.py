"""Search a gallery with a released model, by a text, an image, or an item of the gallery.

An encoded gallery is searched without torch: importing it takes longer than the search.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from fedmq.config.sections import Modality
from fedmq.encoders.base import Array
from fedmq.encoders.images import Pixels, decode
from fedmq.errors import InputError
from fedmq.retrieval.encoded_gallery import AGAIN, Among, Gallery, existing_gallery, query_folders, query_vector
from fedmq.text import Progress, printable

if TYPE_CHECKING:
    from fedmq.retrieval.released_model import ModelFolder, Release

#: Rows whose products are held at a time.
_BLOCK: Final = 4096


@dataclass(frozen=True)
class Hit:
    """One result."""

    rank: int  # from 1
    score: float  # cosine similarity, or Hamming distance of codes
    item: str
    caption: str  # the caption found, or the first caption of an image found; empty if captions are unknown as text


@dataclass(frozen=True)
class Query:
    """A query: a text, an image file or an item, exactly one of them.

    Raises:
        InputError: not exactly one of the three is given, or ``side`` is given without ``item``.
    """

    text: str | None = None  # a text
    image: Path | None = None  # an image file
    item: str | None = None  # name of an item of the gallery
    side: Modality | None = None  # modality of ``item`` that is the query; None takes its image

    def __post_init__(self) -> None:
        given = sum(query is not None for query in (self.text, self.image, self.item))
        if given != 1:
            what = f"{given} queries" if given else "no query"
            raise InputError("search", what, "one of TEXT, --image FILE and --item KEY")
        if self.side is not None and self.item is None:
            raise InputError("search: --side", self.side, "only with --item: TEXT and --image have one side each")

    @property
    def modality(self) -> Modality:
        """The tower that encodes the query."""
        if self.item is not None:
            return self.side or "image"
        return "text" if self.text is not None else "image"


@dataclass(frozen=True)
class SearchHits:
    """The result of a search."""

    gallery: Gallery  # the gallery that was searched
    among: Among  # whether images or captions were searched
    hits: tuple[Hit, ...]  # nearest first


def find(
    release: Release | ModelFolder,
    query: Query,
    *,
    chosen: Path | None = None,
    among: Among | None = None,
    top: int = 10,
    progress: Progress | None = None,
) -> SearchHits:
    """Search a gallery for ``top`` items; it is exported first if necessary.

    The gallery is chosen as in :func:`fedmq.retrieval.gallery.export`. It is the modality other than the query's that
    is searched, or images if there are no captions, unless ``among`` says another.

    Raises:
        InputError: the item or image does not exist, the model has no encoder for a free query, the gallery has no
            captions to search, or a model without its run got no folder of images.
    """
    from fedmq.retrieval.gallery import embed, export  # noqa: PLC0415 - imports torch
    from fedmq.retrieval.model_export import export_query  # noqa: PLC0415 - likewise
    from fedmq.retrieval.released_model import Release  # noqa: PLC0415 - likewise

    if query.item is not None:
        return find_item(export(release, chosen, progress), query, among=among, top=top)
    # Encode the query first: if it cannot be read, the user need not wait minutes for the gallery.
    encoder, item, modalities = release.encoder(query.modality), _read(query), (query.modality,)
    encoded = encoder.encode([item if isinstance(item, str) else encoder.fit(item)])
    gallery = export(release, chosen, progress)
    if isinstance(release, Release) and release.scenario.data is not None:
        model = release.retriever(gallery.prepared, modalities)
    else:
        model = release.alone(modalities)
    shared = release if not isinstance(release, Release) else release.files if release.own is None else None
    folders = None if shared is None else export_query(shared, query.modality)
    if folders is None:
        vector = embed(model, query.modality, [encoded], lambda _: None)
    else:  # with the same bits as in later searches
        vector = query_vector(folders, item, binary=model.binary)
    return _hits(gallery, query, vector, among, top)


def find_again(
    root: Path, query: Query, *, chosen: Path | None = None, among: Among | None = None, top: int = 10
) -> SearchHits | None:
    """Search a gallery that the shared model has encoded, as :func:`find`; None if that needs the model and torch.

    Raises:
        InputError: the item or image does not exist, or the gallery has no captions to search or to search with.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    if (found := existing_gallery(root, chosen)) is None:
        return None
    gallery, config = found
    if query.item is not None:
        return find_item(gallery, query, among=among, top=top)
    folders = query_folders(config, query.modality)
    if folders is None or not folders.exist:
        return None
    vector = query_vector(folders, _read(query), binary=gallery.binary)
    return _hits(gallery, query, vector, among, top)


def find_item(gallery: Gallery, query: Query, *, among: Among | None = None, top: int = 10) -> SearchHits:
    """Search an encoded gallery with one of its items, as :func:`find_again`."""
    return _hits(gallery, query, _item_vector(gallery, str(query.item), query.modality), among, top)


def _hits(gallery: Gallery, query: Query, vector: Array, among: Among | None, top: int) -> SearchHits:
    other: Among = "images" if query.modality == "text" or not gallery.meta.captions else "captions"
    place = among or other
    return SearchHits(gallery, place, tuple(nearest_items(gallery, vector, place, top)))


def _read(query: Query) -> str | Pixels:
    """The text of a free query, or the pixels of its image."""
    if query.image is not None:
        return decode(query.image)
    text = query.text or ""
    if not text.strip():
        raise InputError("search: TEXT", text, "a text that is not empty")
    return text


def _item_vector(gallery: Gallery, key: str, side: Modality) -> Array:
    item = gallery.items.row(key)
    if item is None:
        keys = gallery.items.keys
        near = difflib.get_close_matches(key, keys, 3, 0.5) or list(keys[:3])
        allowed = f"one of the gallery's {len(keys)} items, e.g. {', '.join(map(printable, near))}"
        raise InputError("--item", key, allowed)
    if side == "image":
        return gallery.array("image")[item : item + 1]
    if not gallery.meta.captions:
        raise InputError("--side", "text", "image: this gallery has no captions")
    first = int(np.searchsorted(gallery.array("owner"), item))
    return gallery.array("text")[first : first + 1]


def nearest_items(gallery: Gallery, vector: Array, among: Among, top: int) -> list[Hit]:
    """The items nearest to a packed code uint8 [1, bytes] or embedding float32 [1, d]; ties in the gallery's order.

    With captions, an item is ranked by its nearest one.
    """
    if among == "captions" and not gallery.meta.captions:
        raise InputError("--among", among, "images: this gallery has no captions")
    items = gallery.items
    if among == "images":
        places = _nearest(gallery, vector, among, top)
        found = [(rank, score, items[row]) for rank, (score, row) in enumerate(places, 1)]
        return [Hit(rank, score, item.key, item.caption()) for rank, score, item in found]
    owner = gallery.array("owner")
    most = int(np.bincount(owner).max())
    hits: dict[int, Hit] = {}
    # No item has more than `most` captions, so these belong to at least `top` items.
    for score, place in _nearest(gallery, vector, among, most * top):
        row = int(owner[place])
        if row not in hits and len(hits) < top:
            item = items[row]
            caption = item.caption(place - int(np.searchsorted(owner, row)))
            hits[row] = Hit(len(hits) + 1, score, item.key, caption)
    return list(hits.values())


def _nearest(gallery: Gallery, vector: Array, among: Among, count: int) -> list[tuple[float, int]]:
    """Scores and places of the nearest vectors, ordered by (score, place)."""
    vectors = gallery.array("image" if among == "images" else "text")
    if (vector.dtype, vector.shape[1]) != (vectors.dtype, vectors.shape[1]):
        held = f"{vectors.dtype} vectors of {vectors.shape[1]}"
        raise InputError(str(gallery.folder), held, f"{vector.dtype} vectors of {vector.shape[1]}, as of the model")
    found = nearest(vectors, vector, count)
    if not np.isfinite([score for score, _ in found]).all():
        raise InputError(str(gallery.folder), "vectors that are not finite", AGAIN)
    return found


def nearest(vectors: Array, query: Array, top: int) -> list[tuple[float, int]]:
    """The vectors nearest to a query, by Hamming distance of packed codes, else by inner product.

    Args:
        vectors: float32 [n, d], or packed codes uint8 [n, bytes].
        query: one row of the same kind, [1, d] or [1, bytes].
        top: number of results.

    Returns:
        Scores and rows, nearest first; ties in the order of the rows, and scores that are not finite before all.
    """
    binary = vectors.dtype == np.uint8
    parts = []
    for start in range(0, len(vectors), _BLOCK):
        part = vectors[start : start + _BLOCK]
        # Not a matrix product, in which the last bits of equal rows can differ with their places.
        parts.append(np.bitwise_count(part ^ query).sum(axis=1) if binary else (part * query).sum(axis=1))
    scores = np.concatenate(parts)
    order = np.lexsort((np.arange(len(scores)), scores if binary else -scores, np.isfinite(scores)))[:top]
    return [(float(scores[row]), int(row)) for row in order]
