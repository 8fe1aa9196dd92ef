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
from fedmq.config.site import read_site
from fedmq.encoders.images import as_pixels
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.retrieval.encoded_gallery import images_below
from fedmq.retrieval.released_model import ModelFolder, PersonalModel, Retriever, described, open_model
from fedmq.retrieval.search import nearest
from fedmq.runs.release import ReleaseConfig, is_model

#: An image: path of a file, Pillow image, array [height, width, 3] or tensor [3, height, width].
ImageLike = Any
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Found:
    """One result of a search.

    Args:
        rank: from 1.
        score: cosine similarity, or the Hamming distance of hash codes.
        item: the gallery's item: a path, a text, or the number of an image.
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

    def __repr__(self) -> str:
        return f"<{len(self)} items embedded, each in {self.vectors.shape[-1]} dimensions>"

    def __len__(self) -> int:
        return len(self.items)


class Model:
    """A released model, ready for inference; :func:`fedmq.load` opens one.

    Args:
        files: the model's folder.
        own: a silo's personal model, to use instead of the shared model.
    """

    def __init__(self, files: ModelFolder, own: PersonalModel | None = None) -> None:
        self._files, self._own = files, own
        self.folder = files.folder
        if own is None:
            described(files)  # refuses a model that cannot be built

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
        return self._retriever.binary

    @property
    def silo(self) -> str | None:
        """The silo whose personal model this is; None for the shared model."""
        return None if self._own is None else self._own.silo

    @property
    def card(self) -> str:
        """The model card (Markdown); empty if there is none."""
        path = self.folder / "README.md"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def embed_images(
        self, images: Iterable[ImageLike], *, batch_size: int = 32, progress: Callable[[int], None] | None = None
    ) -> Floats:
        """Embed images.

        Args:
            images: paths, Pillow images, arrays uint8 [height, width, 3] or tensors [3, height, width]; arrays and
                tensors may also be floating point in [0, 1].
            batch_size: number of images decoded at a time.
            progress: called with the number of images done.

        Returns:
            float32 [n, dim], of unit length; of a binary model the outputs whose signs are the hash codes.

        Raises:
            InputError: an image cannot be read, or the model was trained on vectors instead of images.
        """
        encoder = self._files.encoder("image")

        def rows() -> Iterator[npt.NDArray[Any]]:
            for number, batch in enumerate(_batches(_sequence(images, "images"), batch_size)):
                first = number * batch_size
                pixels = [as_pixels(image, f"images[{first + index}]") for index, image in enumerate(batch)]
                yield encoder.encode([encoder.fit(image) for image in pixels])

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
        encoder = self._files.encoder("text")
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"texts[{index}]", repr(text), "a text that is not empty")
        return self._embedded("text", (encoder.encode(batch) for batch in _batches(texts, batch_size)), progress)

    def codes(self, *, images: Iterable[ImageLike] | None = None, texts: Sequence[str] | None = None) -> Any:
        """Hash codes of images or of texts; give one of the two.

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

    def gallery(self, images: str | os.PathLike[str] | Sequence[ImageLike]) -> Embeddings:
        """Embed images as a gallery for :meth:`search`.

        Args:
            images: a folder, whose image files are taken in the order of their paths, or images as in
                :meth:`embed_images`; items that are not paths are named by their number.

        Raises:
            InputError: there is no image, or one cannot be read.
        """
        if isinstance(images, str | os.PathLike):
            folder = Path(images)
            if not folder.is_dir():
                raise InputError("gallery", str(folder), "a folder of images, or a list of images")
            images = images_below(folder, "gallery")
        given = _sequence(images, "gallery")
        named = [image if isinstance(image, str | os.PathLike) else number for number, image in enumerate(given)]
        return Embeddings(tuple(named), self._ranked(self.embed_images(given)))

    def search(
        self, query: ImageLike, gallery: Embeddings | str | os.PathLike[str] | Sequence[ImageLike], *, top: int = 10
    ) -> list[Found]:
        """Rank a gallery for a query.

        Args:
            query: a ``str`` is a text; anything else an image (``pathlib.Path`` for a file).
            gallery: from :meth:`gallery`, or what that takes. Embed a gallery once if it is searched often.
            top: number of results.

        Returns:
            The nearest items first; ties in the gallery's order.

        Raises:
            InputError: the query or the gallery cannot be read.
        """
        if top < 1:
            raise InputError("top", top, "1 or more")
        searched = gallery if isinstance(gallery, Embeddings) else self.gallery(gallery)
        outputs = self.embed_texts([query]) if isinstance(query, str) else self.embed_images([query])
        ranked = nearest(searched.vectors, self._ranked(outputs), top)
        return [Found(rank, score, searched.items[row]) for rank, (score, row) in enumerate(ranked, 1)]

    def __repr__(self) -> str:
        what = f"{self.dim}-bit codes" if self.config.objective.get("bits") else f"{self.dim}-dimensional embeddings"
        whose = "" if self._own is None else f"personal model of {self._own.silo}, "
        return f"<fedmq model {self.folder}: {whose}{self.config.protocol}, {self.config.backbone.get('name')}, {what}>"

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415

        return f"<pre>{escape(repr(self))}</pre>"

    @cached_property
    def _retriever(self) -> Retriever:
        return self._files.alone() if self._own is None else self._own.retriever

    def _embedded(
        self, modality: str, batches: Iterable[npt.NDArray[Any]], progress: Callable[[int], None] | None
    ) -> Floats:
        model, parts, done = self._retriever, list[Floats](), 0
        tower = model.encoders.image if modality == "image" else model.encoders.caption
        for rows in batches:
            with torch.inference_mode():
                # Copied because the last bits depend on the alignment of the memory.
                vectors = tower(torch.from_numpy(np.array(rows))).float().cpu()
            parts.append((vectors if model.binary else normalize(vectors, dim=1)).numpy())
            done += len(rows)
            if progress is not None:
                progress(done)
        return np.concatenate(parts) if parts else np.zeros((0, self.dim), np.float32)

    def _ranked(self, outputs: Floats) -> npt.NDArray[Any]:
        return hamming.pack(torch.from_numpy(outputs)) if self.binary else outputs


def load(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    weights: str | None = None,
    silo: str | None = None,
    site: str | os.PathLike[str] | None = None,
) -> Model:
    """Open a released model, or a silo's personal model, for inference.

    Args:
        path: a run folder, or the folder of a model (``RUN/model``), which needs neither the run nor its data.
        device: ``cpu`` (the default), ``cuda:N`` or ``auto``.
        weights: file of the frozen encoders' weights, if it is not where the model's configuration says.
        silo: the silo whose personal model to open; ``path`` is the run folder then, and its data must be here.
        site: for a run on sites' own data the silo's site file, at the site, which has its data and state.

    Raises:
        InputError: there is no such model, its method trains no usable shared model, or the frozen encoder here is not
            the one it was trained with; there is no such personal model, or the data or the state from which it is
            rebuilt are missing.
    """
    folder = Path(path)
    if silo is not None or site is not None:
        return _personal(folder, device, weights, silo, None if site is None else Path(site))
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    return Model(open_model(folder, device, weights))


def _personal(folder: Path, device: str | None, weights: str | None, silo: str | None, site: Path | None) -> Model:
    """A silo's personal model, rebuilt from the folder of its run."""
    from fedmq.launch.released_runs import open_run_model  # noqa: PLC0415 - imports coordinator and silos

    if weights is not None:
        raise InputError("weights", weights, "no weights with silo or site, which use those of the run's scenario")
    if is_model(folder):
        raise InputError("silo" if site is None else "site", str(silo or site), "a run folder as path")
    before = os.environ.get("FEDMQ_CACHE")
    if site is not None and (cache := read_site(site).cache) is not None:
        os.environ["FEDMQ_CACHE"] = str(cache)
    try:
        release = open_run_model(folder, device or "cpu", silo, None, site)
    finally:
        if before is None:
            os.environ.pop("FEDMQ_CACHE", None)
        else:
            os.environ["FEDMQ_CACHE"] = before
    return Model(release.files, release.own)


def _sequence(images: Iterable[ImageLike], place: str) -> Sequence[ImageLike]:
    if isinstance(images, str | os.PathLike):
        raise InputError(place, "one path", f"a list of images: [{os.fspath(images)!r}]")
    if hasattr(images, "convert"):
        raise InputError(place, "one image", "a list of images")
    return list(images)


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    if size < 1:
        raise InputError("batch_size", size, "1 or more")
    return (items[start : start + size] for start in range(0, len(items), size))
