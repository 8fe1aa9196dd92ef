"""A prepared data set: memory-mapped arrays in the cache, which all silo processes of a machine share.

A folder of the cache holds ``image.npy`` [n, ...], ``text.npy`` [n, C, ...], ``captions.npy`` int64 [n], ``split.npy``
uint8 [n], ``labels.npy`` uint8 [n, L] (where there are labels), ``keys.json`` and ``meta.json``. Features are float32
whatever the source had: torch trains in float32, and widening once is cheaper than at every batch. The folder's name is
the digest of everything it was made from; it appears complete, by one rename, or not at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from fedmq.data.splits import SPLITS
from fedmq.encoders.base import InputSpec
from fedmq.errors import InputError
from fedmq.storage.cache import FORMAT
from fedmq.storage.json_files import Stored, read_json

_AGAIN = "a prepared data set; delete the folder to make it again"


class PreparedMeta(Stored):
    """``meta.json``: what a prepared data set holds.

    Args:
        format: of the folder.
        digest: SHA-256 (hex) of everything the arrays were made from.
        source: what that was.
        n: items.
        image_shape: of one image's input.
        text_shape: of one caption's input.
        image_dtype: name of its dtype.
        text_dtype: likewise.
        captions: the most that an item has.
        label_names: of the L labels.
        mean: of each image channel, where pictures are normalised.
        std: likewise.
    """

    format: Literal[1]
    digest: str
    source: dict[str, JsonValue]
    n: int
    image_shape: list[int]
    text_shape: list[int]
    image_dtype: str
    text_dtype: str
    captions: int | None = None
    label_names: list[str]
    mean: list[float]
    std: list[float]


Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """A prepared data set; arrays are opened when asked for, as read-only memory maps.

    Args:
        folder: in the cache.
        meta: ``meta.json``.
    """

    folder: Path
    meta: PreparedMeta

    @property
    def n(self) -> int:
        """Number of items."""
        return self.meta.n

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything the arrays were made from; the folder's name."""
        return self.meta.digest

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of what is the same wherever and whenever the set is prepared.

        Its items' names, captions' numbers, labels and splits, and the content of a file of vectors or arrays. Pictures
        and captions are not in it: what a frozen encoder makes of them differs in the last digits from machine to
        machine, and :attr:`digest` knows pictures by the sizes and times of their files.
        """
        facts = [list(self.keys), list(self.label_names), self.meta.source.get("content")]
        found = hashlib.sha256(json.dumps(facts).encode())
        for part in (self.captions, self.split, self.labels):
            if part is not None:
                found.update(f"{part.dtype.name} {part.shape}".encode() + np.ascontiguousarray(part).data)
        return found.hexdigest()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the L labels; empty where the data set has none."""
        return tuple(self.meta.label_names)

    @property
    def inputs(self) -> InputSpec:
        """What one item looks like to the model."""
        return InputSpec(
            image_shape=tuple(self.meta.image_shape),
            text_shape=tuple(self.meta.text_shape),
            image_dtype=self.meta.image_dtype,
            text_dtype=self.meta.text_dtype,
            mean=tuple(self.meta.mean),
            std=tuple(self.meta.std),
        )

    def _map(self, name: str) -> Array:
        return mapped(self.folder / name)

    @property
    def val_apart(self) -> bool:
        """Whether validation items are no part of the gallery."""
        return bool(self.meta.source.get("val_apart"))

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
    return Prepared(folder, read_json(folder / "meta.json", PreparedMeta, _AGAIN))


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
    meta = PreparedMeta(
        format=FORMAT,
        digest=digest,
        source=dict(source),
        n=len(image),
        image_shape=list(image.shape[1:]),
        text_shape=list(text.shape[2:]),
        image_dtype=image.dtype.name,
        text_dtype=text.dtype.name,
        captions=text.shape[1],
        label_names=list(label_names),
        mean=list(mean),
        std=list(std),
    )
    (folder / "keys.json").write_text(json.dumps(list(keys)), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta.plain(), indent=1), encoding="utf-8")


def save_arrays(folder: Path, **arrays: Array | None) -> None:
    """Write each array that is there as ``<name>.npy``."""
    for name, value in arrays.items():
        if value is not None:
            np.save(folder / f"{name}.npy", value, allow_pickle=False)
