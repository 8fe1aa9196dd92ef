"""Encoded galleries as files: opened and read without torch, so that an item of a gallery is searched at once.

A gallery is a folder that :mod:`fedmq.retrieval.gallery` creates atomically:

    image.npy, text.npy   embeddings float32 [n, d] and [m, d], or codes uint8 [n, bytes], eight bits to a byte
    owner.npy             the item of each caption, int64 [m]
    items.jsonl           a line for each item: its key, and the captions as text if the data set has any
    gallery.json          its model and its source
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fedmq.data.prepared_arrays import Prepared, PreparedMeta, mapped
from fedmq.errors import InputError
from fedmq.runs.release import released_config
from fedmq.storage.json_files import Stored, checked_json, read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, open_run

Array = npt.NDArray[Any]
Among = Literal["images", "captions"]

FORMAT: Final = 1
AGAIN = "an exported gallery; delete the folder to create it again"
#: Maximum size of ``items.jsonl`` [bytes].
_MOST_BYTES: Final = 1 << 32


class GalleryMeta(Stored):
    """``gallery.json``: model and source of a gallery."""

    format: Literal[1]  # format of the folder
    model_digest: str  # SHA-256 (hex) of the model
    silo: str | None = None  # the silo whose personal model it is; None for the shared model
    made_of: str = ""  # description of the source
    binary: bool  # whether it holds codes, ranked by Hamming distance
    bits: int | None = None  # length of a code; None for embeddings
    dim: int | None = None  # width of an embedding; None for codes
    items: int  # number of items
    captions: int  # number of captions
    # Metadata of the run's data set, with the shapes and labels needed to build its model; None if the model was used
    # without its run.
    prepared: PreparedMeta | None = None


class Item(Stored):
    """A line of ``items.jsonl``."""

    key: str  # name of the item
    captions: list[str]  # its captions, as text; empty if the data set has vectors only

    def caption(self, number: int = 0) -> str:
        """One caption; empty if it is unknown."""
        return self.captions[number] if number < len(self.captions) else ""


def write_items(path: Path, items: Iterable[tuple[str, list[str]]]) -> None:
    """Write keys and captions as ``items.jsonl``."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'key': key, 'captions': captions})}\n" for key, captions in items)


class Items:
    """``items.jsonl`` of a gallery; only the lines that are asked for are decoded.

    Args:
        path: its file.
        count: number of items in the gallery.

    Raises:
        InputError: the file is missing, or has another number of lines.
    """

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._text = read_regular(path, AGAIN, _MOST_BYTES)
        self._ends = np.flatnonzero(np.frombuffer(self._text, np.uint8) == ord("\n"))
        if len(self._ends) != count or not self._text.endswith(b"\n"):
            raise InputError(str(path), f"{len(self._ends)} items in a gallery of {count}", AGAIN)

    def __getitem__(self, row: int) -> Item:
        start = 0 if row == 0 else int(self._ends[row - 1]) + 1
        line = self._text[start : int(self._ends[row])]
        return checked_json(f"{self._path}: line {row + 1}", line, Item, AGAIN)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def keys(self) -> list[str]:
        """The names of all items."""
        return [self[row].key for row in range(len(self))]

    def row(self, key: str) -> int | None:
        """Row of the first item of this name; None without one."""
        # Quotation marks within a JSON string are escaped, so this is the start of a line.
        place = self._text.find(f"{json.dumps({'key': key})[:-1]},".encode())
        return None if place < 0 else int(np.searchsorted(self._ends, place))


@dataclass(frozen=True)
class Gallery:
    """An exported gallery."""

    folder: Path  # folder of its files
    meta: GalleryMeta  # ``gallery.json``

    @property
    def binary(self) -> bool:
        """Whether it holds codes, ranked by Hamming distance."""
        return self.meta.binary

    @property
    def prepared(self) -> Prepared:
        """Shapes and labels of the run's data set, without its data; building the model needs only these.

        Raises:
            InputError: the gallery was made by a model without its run.
        """
        if self.meta.prepared is None:
            raise InputError(str(self.folder / "gallery.json"), "no description of the run's data", AGAIN)
        return Prepared(self.folder, self.meta.prepared)

    @cached_property
    def items(self) -> Items:
        """Names and captions."""
        return Items(self.folder / "items.jsonl", self.meta.items)

    def array(self, name: str) -> Array:
        """One array, mapped from its file: ``image`` [n, .], ``text`` [m, .], or ``owner`` int64 [m].

        Raises:
            InputError: the file is damaged, or holds something else than ``gallery.json`` says.
        """
        path, rows = self.folder / f"{name}.npy", self.meta.items if name == "image" else self.meta.captions
        width = self.meta.dim if self.meta.bits is None else -(-self.meta.bits // 8)
        expected = ("i", rows) if name == "owner" else ("u" if self.binary else "f", rows, width)
        array = mapped(path, AGAIN)
        found = (array.dtype.kind, *array.shape)
        if found != expected or (name == "owner" and not self._are_owners(array)):
            shown = f"{found[0]} {list(found[1:])}, or other values"
            raise InputError(str(path), shown, f"{expected[0]} {list(expected[1:])} of {AGAIN}")
        return array

    def _are_owners(self, array: Array) -> bool:
        """Whether numbers of items ascend."""
        return not len(array) or bool((np.diff(array) >= 0).all() and 0 <= array[0] <= array[-1] < self.meta.items)


def open_gallery(folder: Path, used: str) -> Gallery:
    """Open an exported gallery, which must have been encoded with the model of this digest."""
    path = folder / "gallery.json"
    meta = read_json(path, GalleryMeta, AGAIN)
    if meta.model_digest != used:
        raise InputError(str(path), f"a gallery of model {meta.model_digest[:12]}", f"of {used[:12]}: {AGAIN}")
    return Gallery(folder, meta)


def folder_name(what: str, silo: str | None, digest: str) -> str:
    """Name of a gallery's folder: the source, the silo if its personal model is used, and a digest."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", what) or "gallery"
    return f"{plain}-{'' if silo is None else f'{silo}-'}{digest[:12]}"


def existing_gallery(root: Path) -> Gallery | None:
    """The gallery of a run's own data set, encoded by its shared model; None if there is none yet.

    Args:
        root: the run folder, or the folder of a model without its run, which has no such gallery.

    Raises:
        InputError: the release or the gallery is damaged.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    if not (RunFolder(root).model / "gallery").is_dir():
        return None
    run = open_run(root)
    config = released_config(run)
    folder = run.model / "gallery" / folder_name("data", None, config.model_digest)
    return None if config.personal_only or not folder.is_dir() else open_gallery(folder, config.model_digest)
