"""A data set turned once into memory-mapped arrays, which all silo processes of a machine then share.

A folder of the cache holds ``image.npy`` [n, ...], ``text.npy`` [n, C, ...], ``captions.npy`` int64 [n], ``split.npy``
uint8 [n], ``labels.npy`` uint8 [n, L] (where there are labels), ``keys.json`` and ``meta.json``. Features are float32
whatever the source had: torch trains in float32, and widening once is cheaper than at every batch. The folder's name is
the digest of everything it was made from; it appears complete, by one rename, or not at all.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedmq.data.features import SPLITS, FeatureSet, checked, file_digest, read_features
from fedmq.errors import InputError, RunError
from fedmq.models.two_tower import InputSpec
from fedmq.scenario import Backbone, Data
from fedmq.stored import Stored, read_json

FORMAT = 1  # of the folder; another number makes another folder
BATCH = 32  # captions encoded at once
ITEMS = 256  # whose captions are encoded before the next mark
_AGAIN = "a prepared data set; delete the folder to make it again"


class _Meta(Stored):
    format: Literal[1]
    digest: str
    source: dict[str, Any]
    n: int
    image_shape: list[int]
    text_shape: list[int]
    image_dtype: str
    text_dtype: str
    label_names: list[str]
    mean: list[float]
    std: list[float]


Array = npt.NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


def cache_folder() -> Path:
    """Where prepared data and shared weights live: $FEDMQ_CACHE, else $XDG_CACHE_HOME/fedmq, else ~/.cache/fedmq."""
    if own := os.environ.get("FEDMQ_CACHE"):
        return Path(own)
    general = os.environ.get("XDG_CACHE_HOME")
    return (Path(general) if general else Path.home() / ".cache") / "fedmq"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel drops it when the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make a folder that is there complete or not at all, once, however many processes ask for it.

    Args:
        folder: where it will be.
        fill: writes everything into the empty folder it is given.

    Raises:
        RunError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        with locked(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():
                # Under the lock nobody else is building this one: what lies there is from a build that died.
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise RunError(f"cache {folder.parent} cannot be written: {error.strerror or error}") from error
    return folder


@dataclass(frozen=True)
class Prepared:
    """A prepared data set; arrays are opened when asked for, as read-only memory maps.

    Args:
        folder: in the cache.
        meta: ``meta.json``.
    """

    folder: Path
    meta: Mapping[str, Any]

    @property
    def n(self) -> int:
        """Number of items."""
        return int(self.meta["n"])

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything the arrays were made from; the folder's name."""
        return str(self.meta["digest"])

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of what is the same wherever and whenever the set is prepared.

        Its items' names, captions' numbers, labels and splits, and the content of a file of vectors or arrays. Pictures
        and captions are not in it: what a frozen encoder makes of them differs in the last digits from machine to
        machine, and :attr:`digest` knows pictures by the sizes and times of their files.
        """
        facts = [list(self.keys), list(self.label_names), self.meta["source"].get("content")]
        found = hashlib.sha256(json.dumps(facts).encode())
        for part in (self.captions, self.split, self.labels):
            if part is not None:
                found.update(f"{part.dtype.name} {part.shape}".encode() + np.ascontiguousarray(part).data)
        return found.hexdigest()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the L labels; empty where the data set has none."""
        return tuple(self.meta["label_names"])

    @property
    def inputs(self) -> InputSpec:
        """What one item looks like to the model."""
        return InputSpec(
            image_shape=tuple(self.meta["image_shape"]),
            text_shape=tuple(self.meta["text_shape"]),
            image_dtype=self.meta["image_dtype"],
            text_dtype=self.meta["text_dtype"],
            mean=tuple(self.meta["mean"]),
            std=tuple(self.meta["std"]),
        )

    def _map(self, name: str) -> Array:
        return mapped(self.folder / name)

    @property
    def val_apart(self) -> bool:
        """Whether validation items are no part of the gallery."""
        return bool(self.meta["source"].get("val_apart"))

    @cached_property
    def image(self) -> Array:
        """[n, *image_shape], read-only."""
        return self._map("image.npy")

    @cached_property
    def text(self) -> Array:
        """[n, C, *text_shape], read-only; rows beyond an item's captions are zero."""
        return self._map("text.npy")

    @cached_property
    def captions(self) -> npt.NDArray[np.int64]:
        """int64 [n]: captions of each item."""
        return self._map("captions.npy")

    @cached_property
    def labels(self) -> npt.NDArray[np.uint8] | None:
        """uint8 [n, L] multi-hot, or None."""
        return self._map("labels.npy") if self.label_names else None

    @cached_property
    def split(self) -> npt.NDArray[np.uint8]:
        """uint8 [n]: 0 train, 1 val, 2 test, 3 public, 4 database."""
        return self._map("split.npy")

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of the n items."""
        path = self.folder / "keys.json"
        try:
            return tuple(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InputError(str(path), str(error), _AGAIN) from None

    def rows(self, split: str) -> npt.NDArray[np.int64]:
        """Rows of a split, ascending: int64 [m].

        Raises:
            InputError: no such split.
        """
        if split not in SPLITS:
            raise InputError("split", split, ", ".join(SPLITS))
        return np.flatnonzero(self.split == SPLITS.index(split)).astype(np.int64)


def mapped(path: Path) -> Array:
    """An array of prepared data, on disk.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        found: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(str(path), str(error) or type(error).__name__, _AGAIN) from None
    return found


def open_prepared(folder: Path) -> Prepared:
    """Open a folder that :func:`prepare` made, in this process or another.

    Raises:
        InputError: it is not such a folder.
    """
    return Prepared(folder, read_json(folder / "meta.json", _Meta, _AGAIN))


def key_of(*parts: object) -> str:
    """SHA-256 (hex) over the canonical JSON of ``parts``: a folder's name in the cache."""
    return hashlib.sha256(json.dumps([FORMAT, *parts], sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def finish(
    folder: Path,
    digest: str,
    source: Mapping[str, Any],
    keys: Sequence[str],
    label_names: Sequence[str],
    *,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
) -> None:
    """Write ``keys.json`` and, last, ``meta.json`` beside the arrays."""
    image, text = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in ("image.npy", "text.npy"))
    meta = {
        "format": FORMAT,
        "digest": digest,
        "source": dict(source),
        "n": len(image),
        "image_shape": list(image.shape[1:]),
        "text_shape": list(text.shape[2:]),
        "image_dtype": image.dtype.name,
        "text_dtype": text.dtype.name,
        "captions": text.shape[1],
        "label_names": list(label_names),
        "mean": list(mean),
        "std": list(std),
    }
    (folder / "keys.json").write_text(json.dumps(list(keys)), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def save_arrays(folder: Path, **arrays: Array | None) -> None:
    """Write each array that is there as ``<name>.npy``."""
    for name, value in arrays.items():
        if value is not None:
            np.save(folder / f"{name}.npy", value, allow_pickle=False)


def _prepare_features(path: Path, cache: Path, seed: int) -> Prepared:
    # The whole file is checked before anything is written, and its seed counts only where it drew the split.
    content = file_digest(path)
    for known in (key_of("features", content), key_of("features", content, seed)):
        if (cache / "data" / known).is_dir():
            return open_prepared(cache / "data" / known)
    found: FeatureSet = read_features(path, seed)
    digest = key_of("features", content) if found.split_given else key_of("features", content, seed)

    def fill(folder: Path) -> None:
        save_arrays(
            folder, image=found.image, text=found.text, captions=found.captions, labels=found.labels, split=found.split
        )
        finish(folder, digest, {"data": "features", "content": content, "seed": seed}, found.keys, found.label_names)

    return open_prepared(build_once(cache / "data" / digest, fill))


def tell(progress: Progress | None, what: str, total: int) -> Callable[[int], None]:
    """A function that is told how many of ``total`` are done and tells ``progress``."""

    def told(done: int) -> None:
        if progress is not None:
            progress(what, done, total)

    return told


def _spread(rows: Array, counts: npt.NDArray[np.int64]) -> Array:
    """Rows of all captions one after the other [sum(counts), ...] to [n, C, ...], padded with zeros."""
    spread = np.zeros((len(counts), int(counts.max()), *rows.shape[1:]), dtype=rows.dtype)
    spread[np.arange(spread.shape[1]) < counts[:, None]] = rows
    return spread


def _prepare_arrays(data: Data, cache: Path) -> Prepared:
    """Precomputed features of a named set, in the .mat, .h5 and .npz files that circulate."""
    from fedmq.data import arrays, raw, sets  # noqa: PLC0415 - loaders are needed for their own sets only

    read = arrays.read_arrays(data)
    entry = sets.SETS[data.name]
    split = raw.split_of(read.get("split"), len(read["image"]), data, entry.draw)
    found = checked(data.path or Path(data.name), {**read, "split": split}, 0)
    content = hashlib.sha256()
    for part in (found.image, found.text, found.split, found.labels):
        if part is not None:
            content.update(repr(part.shape).encode() + np.ascontiguousarray(part).data)
    apart = ("val apart",) if entry.val_apart else ()
    digest = key_of(data.name, "arrays", content.hexdigest(), found.label_names, *apart)

    def fill(folder: Path) -> None:
        save_arrays(
            folder, image=found.image, text=found.text, captions=found.captions, labels=found.labels, split=found.split
        )
        source = {"data": data.name, "content": content.hexdigest(), "val_apart": entry.val_apart}
        finish(folder, digest, source, found.keys, found.label_names)

    return open_prepared(build_once(cache / "data" / digest, fill))


def prepare(
    data: Data,
    backbone: Backbone,
    cache: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    device: str = "cpu",
) -> Prepared:
    """Turn a data set into arrays, or find them in the cache. Several processes may call this at once.

    Args:
        data: which data set.
        backbone: which frozen encoder; with ``features`` the data set is a file of features itself.
        cache: folder; None means :func:`cache_folder`.
        seed: of a split that a ``features`` file does not say, and of random weights.
        progress: told while encoding.
        device: where the frozen encoders of a set on disk compute.

    Raises:
        InputError: data and backbone do not go together, or the data or the weights are not allowed.
        RunError: the cache cannot be written.
    """
    cache = cache_folder() if cache is None else cache
    if data.path is not None and not data.path.exists():
        allowed = f"a file or folder that is there; docs/data.md shows the layout of {data.name}"
        raise InputError("data.path", str(data.path), allowed)
    if data.name == "features" and backbone.name != "features":
        raise InputError(
            "backbone.name", f"{backbone.name} with data.name features", "features with data.name features"
        )
    if data.name == "openmoji" and backbone.name == "features":
        raise InputError("backbone.name", "features with data.name openmoji", "an encoder, e.g. lite")
    if data.name == "features":
        if data.path is None:
            raise InputError("data.path", None, "a .npz or .safetensors file")
        return _prepare_features(data.path, cache, data.split_seed)
    if backbone.name == "features":
        return _prepare_arrays(data, cache)
    from fedmq.data import extract  # noqa: PLC0415 - as above

    return extract.prepare_raw(data, backbone, cache, seed, progress, device)


def text_features(
    prepared: Prepared,
    backbone: Backbone,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
) -> npt.NDArray[np.float32]:
    """One text vector per item, the mean of its captions' frozen features, for clustering in the partition.

    Token ids are encoded once by the frozen text tower, chunk by chunk, so that it goes on where it was stopped; the
    result is kept beside the data.

    Args:
        prepared: the data set.
        backbone: which it was prepared with. The folder names one, too, but its weights may lie elsewhere by now.
        seed: of random weights.
        cache: folder with the tower's weights; None means the one that holds ``prepared``.
        progress: told while encoding.
        device: where the tower computes.

    Returns:
        float32 [n, d].

    Raises:
        RunError: the cache cannot be written.
    """
    counts = prepared.captions
    if prepared.meta["text_dtype"] == "float32":
        return _mean_of(prepared.text, counts)
    from fedmq.data.extract import store  # noqa: PLC0415 - as above
    from fedmq.models import clip, clip_weights  # noqa: PLC0415 - as above

    @functools.cache
    def tower() -> clip.Frozen:
        found = clip_weights.weights(backbone, seed, cache or prepared.folder.parent.parent)
        return clip.load_tower(found, "text", device)

    def encoded(part: range) -> Array:
        own, tokens = counts[part.start : part.stop], prepared.text[part.start : part.stop]
        seen = np.arange(tokens.shape[1]) < own[:, None]
        return _mean_of(_spread(clip.encode_texts(tower(), tokens[seen], BATCH, device), own), own)

    told = tell(progress, "captions for the clusters", prepared.n)
    kept = store(prepared.folder / "text_features.npy", prepared.n, ITEMS, encoded, told)
    found: npt.NDArray[np.float32] = np.load(kept, allow_pickle=False)
    return found


def _mean_of(text: Array, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Mean over each item's captions: [n, C, d] and int64 [n] to float32 [n, d]."""
    # Rows beyond an item's captions are zero, so the sum over all C is the sum over its captions.
    mean: npt.NDArray[np.float32] = (text.sum(axis=1, dtype=np.float32) / counts[:, None]).astype(np.float32)
    return mean
