"""Released models for inference: embeddings, hash codes and search, without the training data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize

import protocols  # noqa: F401 - registers the objectives
from fedmq.encoders.base import Encoder, InputSpec
from fedmq.encoders.images import IMAGE_ENDINGS, as_pixels, files_below
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.extras import package
from fedmq.models.two_tower import TwoTower
from fedmq.retrieval.released_model import ModelFolder, open_model
from fedmq.runs.run_records import ReleaseConfig

#: A picture: path of a file, Pillow image, array [height, width, 3] or tensor [3, height, width].
Picture = Any
Floats = npt.NDArray[np.float32]
#: Number of gallery items from which faiss ranks instead of NumPy.
FAISS_FROM = 10_000


@dataclass(frozen=True)
class Found:
    """One result of a search.

    Args:
        rank: from 1.
        score: cosine similarity, or the Hamming distance of hash codes.
        item: the gallery's item: a path, a text, or the number of a picture.
    """

    rank: int
    score: float
    item: Any


@dataclass(frozen=True)
class Embeddings:
    """Items with their vectors, as a gallery to search.

    Args:
        items: the n items.
        vectors: float32 [n, dim] of unit length, or packed hash codes uint8 [n, dim / 8].
    """

    items: tuple[Any, ...]
    vectors: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.items)


class Model:
    """A released model, ready for inference; :func:`fedmq.load` opens one.

    Args:
        files: the model's folder.
    """

    def __init__(self, files: ModelFolder) -> None:
        self._files = files
        self.folder = files.folder
        self._inputs, self._label_names = _described(files)

    @property
    def config(self) -> ReleaseConfig:
        """The model's ``config.json``."""
        return self._files.config

    @property
    def dim(self) -> int:
        """Width of an embedding, or number of bits of a hash code."""
        return self.config.dim

    @property
    def binary(self) -> bool:
        """Whether the model computes hash codes, ranked by Hamming distance."""
        return self._towers.binary

    @property
    def card(self) -> str:
        """The model card (Markdown); empty if there is none."""
        path = self.folder / "README.md"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def embed_images(
        self, images: Iterable[Picture], *, batch_size: int = 32, progress: Callable[[int], None] | None = None
    ) -> Floats:
        """Embed pictures.

        Args:
            images: paths, Pillow images, arrays uint8 [height, width, 3] or tensors [3, height, width]; arrays and
                tensors may also be floating point in [0, 1].
            batch_size: number of pictures decoded at a time.
            progress: called with the number of pictures done.

        Returns:
            float32 [n, dim], of unit length; of a binary model the outputs whose signs are the hash codes.

        Raises:
            InputError: a picture cannot be read, or the model was trained on vectors instead of pictures.
        """
        encoder = self._encoder("image")

        def rows() -> Iterator[npt.NDArray[Any]]:
            for number, batch in enumerate(_batches(_sequence(images, "images"), batch_size)):
                first = number * batch_size
                pixels = [as_pixels(each, f"images[{first + index}]") for index, each in enumerate(batch)]
                yield encoder.encode([encoder.fit(each) for each in pixels])

        return self._embedded("image", rows(), progress)

    def embed_texts(
        self, texts: Sequence[str], *, batch_size: int = 256, progress: Callable[[int], None] | None = None
    ) -> Floats:
        """Embed texts.

        Args:
            texts: captions or queries.
            batch_size: number of texts encoded at a time.
            progress: called with the number of texts done.

        Returns:
            As :meth:`embed_images`.

        Raises:
            InputError: a text is empty, or the model was trained on vectors or bags of words instead of texts.
        """
        if isinstance(texts, str):
            raise InputError("texts", "one text", f"a list of texts: [{texts!r}]")
        encoder = self._encoder("text")
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"texts[{index}]", repr(text), "a text that is not empty")
        return self._embedded("text", (encoder.encode(batch) for batch in _batches(texts, batch_size)), progress)

    def codes(self, *, images: Iterable[Picture] | None = None, texts: Sequence[str] | None = None) -> Any:
        """Hash codes of pictures or of texts; give one of the two.

        Returns:
            uint8 [n, dim / 8]: the signs of the outputs, packed (0 counts as positive).

        Raises:
            InputError: the model has no hash codes, or not exactly one of the two is given; as :meth:`embed_images`.
        """
        if not self.binary:
            raise InputError("codes", "a model of embeddings", "embed_images and embed_texts; codes are of hash models")
        if (images is None) == (texts is None):
            raise InputError("codes", "both or neither of images and texts", "images=[...] or texts=[...]")
        outputs = self.embed_texts(texts) if texts is not None else self.embed_images(images or ())
        return hamming.pack(torch.from_numpy(outputs))

    def gallery(self, images: str | os.PathLike[str] | Sequence[Picture]) -> Embeddings:
        """Embed pictures as a gallery for :meth:`search`.

        Args:
            images: a folder, whose image files are taken in the order of their paths, or pictures as in
                :meth:`embed_images`; items that are not paths are named by their number.

        Raises:
            InputError: there is no picture, or one cannot be read.
        """
        if isinstance(images, str | os.PathLike):
            folder = Path(images)
            if not folder.is_dir():
                raise InputError("gallery", str(folder), "a folder of images, or a list of pictures")
            images = sorted(path for path in files_below(folder) if path.suffix.lower() in IMAGE_ENDINGS)
            if not images:
                raise InputError(f"gallery {folder}", "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
        pictures = _sequence(images, "gallery")
        named = [each if isinstance(each, str | os.PathLike) else number for number, each in enumerate(pictures)]
        return Embeddings(tuple(named), self._ranked(self.embed_images(pictures)))

    def search(
        self,
        query: Picture,
        gallery: Embeddings | str | os.PathLike[str] | Sequence[Picture],
        *,
        top: int = 10,
    ) -> list[Found]:
        """Rank a gallery for a query.

        Args:
            query: a ``str`` is a text; anything else a picture (``pathlib.Path`` for a file).
            gallery: from :meth:`gallery`, or what that takes. Embed a gallery once if it is searched often.
            top: number of results.

        Returns:
            The nearest items first; ties in the gallery's order.

        Raises:
            InputError: the query or the gallery cannot be read.
        """
        if top < 1:
            raise InputError("top", top, "1 or more")
        found = gallery if isinstance(gallery, Embeddings) else self.gallery(gallery)
        outputs = self.embed_texts([query]) if isinstance(query, str) else self.embed_images([query])
        scores, rows = nearest(found.vectors, self._ranked(outputs), min(top, len(found)))
        return [
            Found(rank, score, found.items[row]) for rank, (score, row) in enumerate(zip(scores, rows, strict=True), 1)
        ]

    def __repr__(self) -> str:
        what = f"{self.dim}-bit codes" if self.config.objective.get("bits") else f"{self.dim}-dimensional embeddings"
        return f"<fedmq model {self.folder}: {self.config.protocol}, {self.config.backbone.get('name')}, {what}>"

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415

        return f"<pre>{escape(repr(self))}</pre>"

    @cached_property
    def _towers(self) -> TwoTower:
        return self._files.build(self._inputs, self._label_names)

    def _encoder(self, modality: Any) -> Encoder:
        what = self.config.texts
        if what == "vectors":
            raise InputError(
                str(self.folder), "a model of precomputed features", "a model trained on pictures and texts"
            )
        if modality == "text" and what == "bag":
            raise InputError(str(self.folder), "a model whose texts are bags of words", "embed_images only")
        return self._files.encoder(modality)

    def _embedded(
        self, modality: str, batches: Iterable[npt.NDArray[Any]], progress: Callable[[int], None] | None
    ) -> Floats:
        towers, parts, done = self._towers, list[Floats](), 0
        tower = towers.image if modality == "image" else towers.caption
        for rows in batches:
            with torch.inference_mode():
                # Copied because the last bits depend on the alignment of the memory.
                vectors = tower(torch.from_numpy(np.array(rows)).to(towers.flat.device)).float().cpu()
            parts.append((vectors if towers.binary else normalize(vectors, dim=1)).numpy())
            done += len(rows)
            if progress is not None:
                progress(done)
        return np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)

    def _ranked(self, outputs: Floats) -> npt.NDArray[Any]:
        return hamming.pack(torch.from_numpy(outputs)) if self.binary else outputs


def load(path: str | os.PathLike[str], *, device: str | None = None, weights: str | None = None) -> Model:
    """Open a released model for inference.

    Args:
        path: a run folder, or the folder of a model (``RUN/model``), which needs neither the run nor its data.
        device: ``cpu`` (the default), ``cuda:N`` or ``auto``.
        weights: file of the frozen encoders' weights, if it is not where the model's configuration says.

    Raises:
        InputError: there is no such model, it was released by a version of fedmq that did not record its inputs, its
            method trains no usable shared model, or the frozen encoder here is not the one it was trained with.
    """
    folder = Path(path)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    return Model(open_model(folder, device, weights))


def _described(files: ModelFolder) -> tuple[InputSpec, tuple[str, ...]]:
    config, place = files.config, str(files.folder / "config.json")
    if config.inputs is None:
        allowed = "a model released by this version; search older runs with fedmq search RUN, which reads their data"
        raise InputError(place, "a configuration without the model's inputs", allowed)
    if config.personal_only:
        allowed = "fedmq search RUN --silo NAME, which rebuilds a silo's personal model"
        raise InputError(place, f"{config.protocol}, which trains the shared model in part or not at all", allowed)
    found = config.inputs
    inputs = InputSpec(
        tuple(found.image_shape),
        tuple(found.text_shape),
        found.image_dtype,
        found.text_dtype,
        tuple(found.mean),
        tuple(found.std),
    )
    return inputs, tuple(config.label_names)


def _sequence(pictures: Iterable[Picture], place: str) -> Sequence[Picture]:
    if isinstance(pictures, str | os.PathLike):
        raise InputError(place, "one path", f"a list of pictures: [{os.fspath(pictures)!r}]")
    if hasattr(pictures, "convert"):
        raise InputError(place, "one picture", "a list of pictures")
    return list(pictures)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    if size < 1:
        raise InputError("batch_size", size, "1 or more")
    return (items[start : start + size] for start in range(0, len(items), size))


def nearest(
    vectors: npt.NDArray[Any], query: npt.NDArray[Any], top: int, *, faiss_from: int = FAISS_FROM
) -> tuple[list[float], list[int]]:
    """The rows nearest to a query, by Hamming distance of packed codes, else by inner product.

    Args:
        vectors: float32 [n, d], or packed codes uint8 [n, bytes].
        query: one row of the same kind, [1, d] or [1, bytes].
        top: number of rows.
        faiss_from: number of vectors from which faiss ranks instead of NumPy.

    Returns:
        Scores and rows, nearest first; with NumPy, ties are in the order of the rows.
    """
    binary = vectors.dtype == np.uint8
    if len(vectors) >= faiss_from:
        faiss = package("faiss", "search", "a gallery of 10,000 items or more")
        width = vectors.shape[1]
        index = faiss.IndexBinaryFlat(8 * width) if binary else faiss.IndexFlatIP(width)
        index.add(np.ascontiguousarray(vectors))
        scores, rows = index.search(np.ascontiguousarray(query), top)
        return [float(each) for each in scores[0]], [int(each) for each in rows[0]]
    if binary:
        distances = np.bitwise_count(vectors ^ query).sum(axis=1)
        order = np.argsort(distances, kind="stable")[:top]
        return [float(distances[row]) for row in order], [int(row) for row in order]
    similar = vectors @ query[0]
    order = np.argsort(-similar, kind="stable")[:top]
    return [float(similar[row]) for row in order], [int(row) for row in order]
