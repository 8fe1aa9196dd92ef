"""Prepared data sets: memory-mapped arrays in the cache, shared by all silo processes of a machine.

A prepared folder holds ``image.npy`` [n, ...], ``text.npy`` [N, ...] with the captions of all items one after the
other, ``captions.npy`` int64 [n], ``split.npy`` uint8 [n], ``labels.npy`` uint8 [n, L] (if there are labels),
``present.npy`` bool [n, 2] (if an item lacks its image or its captions, which are then one row of zeros),
``keys.json``, ``column.json`` (if the partition needs it), ``meta.json`` and, once it was needed, ``content.json``.
Features are always float32: torch trains in float32, and converting once is cheaper than converting every batch. The
folder is named by the digest of its sources and is created atomically by a rename.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue

from fedmq.data.labels import counts_of
from fedmq.data.splits import SPLITS, split_line
from fedmq.data.warnings import NOTHING, DataWarnings, of_heldout_labels, of_labels, of_spellings, sentences
from fedmq.encoders.base import InputSpec
from fedmq.errors import FedmqError, InputError
from fedmq.storage.cache import key_of
from fedmq.storage.json_files import Stored, read_json
from fedmq.storage.regular_files import check_regular, read_regular
from fedmq.storage.run_folder import write_text

#: Maximum size of a file [bytes].
_MOST_BYTES = 1 << 50
_AGAIN = "a prepared data set; delete the folder to prepare it again"


class PreparedMeta(Stored):
    """``meta.json``: metadata of a prepared data set."""

    format: Literal[1]  # format version of the folder
    digest: str  # SHA-256 (hex) of the sources of the arrays
    source: dict[str, JsonValue]  # description of the sources
    n: int  # number of items
    image_shape: list[int]  # shape of one image input
    text_shape: list[int]  # shape of one caption input
    image_dtype: str  # dtype name of the image inputs
    text_dtype: str  # dtype name of the caption inputs
    captions: int | None = None  # maximum number of captions of an item
    label_names: list[str]  # names of the L labels
    # Words of the bags of words, in the order of their columns; empty if unknown, or for other texts.
    vocabulary: list[str] = Field(default_factory=list)
    mean: list[float]  # mean of each image channel; empty for features
    std: list[float]  # standard deviation of each image channel; empty for features
    warnings: DataWarnings = DataWarnings()  # counts of what is probably unintended
    split: str  # where the split comes from
    ignored: list[str] = Field(default_factory=list)  # a line for each reason for which files were not read


class _Content(Stored):
    """``content.json``: :attr:`Prepared.content`."""

    sha256: str = Field(pattern="^[0-9a-f]{64}$")


Array = npt.NDArray[Any]
#: bool [n, 2]: whether each item has an image, and whether it has captions.
Present = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Prepared:
    """A prepared data set; its arrays are opened lazily as read-only memory maps."""

    folder: Path  # folder in the cache
    meta: PreparedMeta  # contents of ``meta.json``

    @property
    def n(self) -> int:
        """Number of items."""
        return self.meta.n

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the sources of the arrays; the folder's name."""
        return self.meta.digest

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of the parts that do not depend on the machine that prepared the set.

        These are item keys, caption counts, labels and splits, and the content of a file of features. Extracted
        features are excluded: their floating-point rounding differs between machines. :attr:`digest` does depend on
        the machine, as it identifies images by size and modification time.

        Computed once and kept in the folder: every process of a run needs it.
        """
        path = self.folder / "content.json"
        with suppress(InputError):
            return read_json(path, _Content, _AGAIN).sha256
        found = _Content(sha256=self._content())
        with suppress(FedmqError):  # a read-only cache
            write_text(path, json.dumps(found.plain()))
        return found.sha256

    def _content(self) -> str:
        facts = [list(self.keys), list(self.label_names), self.meta.source.get("content")]
        digest = hashlib.sha256(json.dumps(facts).encode())
        for part in (self.captions, self.split, self.labels, self.present if self.unpaired else None):
            if part is not None:
                digest.update(f"{part.dtype.name} {part.shape}".encode() + np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the L labels; empty if the data set has none."""
        return tuple(self.meta.label_names)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Words of the bags of words, in the order of their columns; empty if unknown, or for other texts."""
        return tuple(self.meta.vocabulary)

    @property
    def inputs(self) -> InputSpec:
        """Shapes and dtypes of one item's model inputs."""
        return InputSpec.of(self.meta)

    @property
    def notes(self) -> list[str]:
        """Where the split comes from, with its counts, and what was not read: one line each."""
        return [split_line(self.meta.split, self.split), *self.meta.ignored]

    @property
    def warnings(self) -> list[str]:
        """One line for each property of vectors, captions and labels that is probably unintended."""
        labels = of_labels(counts_of(self.labels, self.label_names), self.n)
        heldout = of_heldout_labels(self.labels, self.label_names, np.asarray(self.split))
        sites = of_spellings(sorted(set(self.column or ())), "values of the column of partition.column")
        return [*sentences(self.meta.warnings), *labels, *heldout, *sites]

    def _map(self, name: str, dtype: str, *shape: int) -> Array:
        """An array of a file."""
        array = mapped(self.folder / name)
        if array.dtype.name != dtype or not array.dtype.isnative or array.shape != shape:
            raise InputError(str(self.folder / name), f"{array.dtype.name} {list(array.shape)}", _AGAIN)
        return array

    def _texts(self, name: str) -> tuple[str, ...]:
        """One text for each item; refuses a missing or damaged file."""
        path = self.folder / name
        try:
            found = json.loads(read_regular(path, _AGAIN, _MOST_BYTES))
        except (ValueError, RecursionError) as error:
            raise InputError(str(path), str(error), _AGAIN) from None
        if not isinstance(found, list) or len(found) != self.n or not all(isinstance(each, str) for each in found):
            raise InputError(str(path), f"other than {self.n} texts", _AGAIN)
        return tuple(found)

    @property
    def val_apart(self) -> bool:
        """Whether the gallery excludes validation items."""
        return bool(self.meta.source.get("val_apart"))

    @cached_property
    def image(self) -> Array:
        """Image inputs [n, *image_shape], read-only."""
        return self._map("image.npy", self.meta.image_dtype, self.n, *self.meta.image_shape)

    @cached_property
    def text(self) -> Array:
        """Caption inputs [N, *text_shape] of all items one after the other, read-only."""
        rows = int(np.maximum(self.captions, 1).sum())
        return self._map("text.npy", self.meta.text_dtype, rows, *self.meta.text_shape)

    @cached_property
    def first(self) -> npt.NDArray[np.int64]:
        """int64 [n]: row in :attr:`text` of each item's first caption."""
        return first_rows(self.captions)

    @cached_property
    def captions(self) -> npt.NDArray[np.int64]:
        """int64 [n]: number of captions of each item, 0 for an item without."""
        counts = self._map("captions.npy", "int64", self.n)
        if (counts < 0).any():
            raise InputError(str(self.folder / "captions.npy"), "a negative number", _AGAIN)
        return counts

    @property
    def unpaired(self) -> bool:
        """Whether an item lacks its image or its captions."""
        return bool(self.meta.source.get("unpaired"))

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Bool [n, 2]: whether each item has an image, and whether it has captions."""
        return self._map("present.npy", "bool", self.n, 2) if self.unpaired else all_present(self.n)

    @cached_property
    def labels(self) -> npt.NDArray[np.uint8] | None:
        """Multi-hot labels uint8 [n, L], or None if there are none."""
        names = len(self.label_names)
        return self._map("labels.npy", "uint8", self.n, names) if names else None

    @cached_property
    def split(self) -> npt.NDArray[np.uint8]:
        """uint8 [n], indices into ``SPLITS``: 0 train, 1 val, 2 test, 3 public, 4 database."""
        splits = self._map("split.npy", "uint8", self.n)
        if (splits >= len(SPLITS)).any():
            raise InputError(str(self.folder / "split.npy"), "an unknown split", _AGAIN)
        return splits

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of the n items."""
        return self._texts("keys.json")

    def pairs(self, split: str) -> npt.NDArray[np.int64]:
        """Rows of the items of a split that have both modalities: int64 [m], ascending; errors as in :meth:`rows`."""
        rows = self.rows(split)
        return rows[np.asarray(self.present)[rows].all(axis=1)]

    @cached_property
    def column(self) -> tuple[str, ...] | None:
        """Each item's value of ``data.column``; None if the set was prepared without one."""
        return self._texts("column.json") if (self.folder / "column.json").exists() else None

    def rows(self, split: str) -> npt.NDArray[np.int64]:
        """Rows of a split: int64 [m], ascending.

        Raises:
            InputError: unknown split.
        """
        if split not in SPLITS:
            raise InputError("split", split, ", ".join(SPLITS))
        return np.flatnonzero(self.split == SPLITS.index(split)).astype(np.int64)


def all_present(n: int) -> Present:
    """Both modalities for each of n items: bool [n, 2], read-only."""
    return np.broadcast_to(np.ones((1, 2), dtype=np.bool_), (n, 2))


def presence(image: npt.NDArray[Any], text: npt.NDArray[Any]) -> Present | None:
    """Two bool arrays [n] as one [n, 2]; None if every item has both modalities."""
    both = np.stack([image, text], axis=1).astype(np.bool_)
    return None if both.all() else both


def first_rows(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Row of each item's first caption among the captions of all items, int64 [n], of their numbers int64 [n]."""
    ends = np.cumsum(np.maximum(counts, 1))
    return np.concatenate([np.zeros(1, np.int64), ends[:-1]])


def prepared_key(*parts: object) -> str:
    """Digest of a prepared folder's sources and of its format."""
    return key_of("prepared", 2, *parts)


# NumPy parses a header with ast.literal_eval, which fails now and then if two threads use it at once (python/cpython
# issue 106905): "AST constructor recursion depth mismatch".
_HEADERS: Final = threading.Lock()


def mapped(path: Path, allowed: str = _AGAIN) -> Array:
    """Memory-map an array (``.npy``) that fedmq has written, by default of prepared data, read-only.

    ``allowed`` is what it is and what to do if it is damaged, for the error.

    Raises:
        InputError: the file is missing or damaged.
    """
    check_regular(path, allowed, _MOST_BYTES)
    try:
        with _HEADERS:
            array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy raises many types on a damaged header
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(str(path), reason, allowed) from None
    return array


def open_prepared(folder: Path) -> Prepared:
    """Open a prepared folder.

    Raises:
        InputError: ``meta.json`` is missing or damaged.
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
    column: Sequence[str] | None = None,
    vocabulary: Sequence[str] = (),
    warnings: DataWarnings = NOTHING,
    split: str,
    ignored: Sequence[str] = (),
) -> None:
    """Write ``keys.json``, ``column.json`` and then ``meta.json`` for the arrays already in ``folder``."""
    image, text = (mapped(folder / name) for name in ("image.npy", "text.npy"))
    meta = PreparedMeta(
        format=1,
        digest=digest,
        source=dict(source),
        n=len(image),
        image_shape=list(image.shape[1:]),
        text_shape=list(text.shape[1:]),
        image_dtype=image.dtype.name,
        text_dtype=text.dtype.name,
        captions=int(mapped(folder / "captions.npy").max()),
        label_names=list(label_names),
        warnings=warnings,
        split=split,
        ignored=list(ignored),
        mean=list(mean),
        std=list(std),
        **({"vocabulary": list(vocabulary)} if vocabulary else {}),
    )
    if column is not None:
        (folder / "column.json").write_text(json.dumps(list(column)), encoding="utf-8")
    (folder / "keys.json").write_text(json.dumps(list(keys)), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta.plain(), indent=1), encoding="utf-8")


def save_arrays(folder: Path, **arrays: Array | None) -> None:
    """Save each array that is not None as ``<name>.npy``."""
    for name, value in arrays.items():
        if value is not None:
            np.save(folder / f"{name}.npy", value, allow_pickle=False)


def save_present(folder: Path, present: npt.NDArray[np.bool_] | None) -> dict[str, object]:
    """Save the modalities of each item, bool [n, 2], if some items lack one (not None).

    Returns: The entry of ``source`` in ``meta.json`` about it.
    """
    if present is None:
        return {}
    save_arrays(folder, present=present)
    return {"unpaired": int((~present.all(axis=1)).sum())}
