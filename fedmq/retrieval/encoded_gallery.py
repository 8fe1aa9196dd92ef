"""Encoded galleries as files: opened and read without torch, so that an item of a gallery is searched at once.

A gallery is a folder that :mod:`fedmq.retrieval.gallery` creates atomically:

    image.npy, text.npy   embeddings float32 [n, d] and [m, d], or codes uint8 [n, bytes], eight bits to a byte
    owner.npy             the item of each caption, int64 [m]
    items.jsonl           a line for each item: its key, and the captions as text if the data set has any
    gallery.json          its model and its source
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fedmq.data.prepared_arrays import Prepared, PreparedMeta, mapped
from fedmq.encoders.image_sets import files_below
from fedmq.encoders.images import IMAGE_ENDINGS, PIXELS_VERSION
from fedmq.errors import InputError
from fedmq.runs.release import ReleaseConfig, is_model, model_config, released_config
from fedmq.storage.cache import cache_folder, file_digest, key_of
from fedmq.storage.json_files import Stored, checked_json, read_json
from fedmq.storage.regular_files import read_regular
from fedmq.storage.run_folder import RunFolder, open_run

Array = npt.NDArray[Any]
Among = Literal["images", "captions"]

FORMAT: Final = 1
AGAIN = "an exported gallery; delete the folder to create it again"
#: Folder in the cache for galleries of models whose own folder is not writable.
ELSEWHERE: Final = "galleries"
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


def images_below(folder: Path, place: str) -> list[Path]:
    """The image files below a folder, in the order of their paths.

    Args:
        folder: folder to search; links to folders are followed.
        place: the option or argument that names it, for the error.

    Raises:
        InputError: there are none.
    """
    files = sorted(path for path in files_below(folder) if path.suffix.lower() in IMAGE_ENDINGS)
    if not files:
        raise InputError(f"{place} {folder}", "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
    return files


def folder_contents(folder: Path, used: str) -> tuple[list[Path], list[str], str]:
    """The images below a folder, their names, and the digest of a gallery of them for the model of digest ``used``.

    Raises:
        InputError: there are none, or one cannot be read.
    """
    files = images_below(folder, "--gallery")
    # Bytes of file names that are not UTF-8 are escaped, because they could not be printed.
    keys = [os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace") for path in files]
    contents = [[key, file_digest(path)] for key, path in zip(keys, files, strict=True)]
    return files, keys, key_of("folder", used, contents, PIXELS_VERSION)


def existing_gallery(root: Path, images: Path | None = None) -> tuple[Gallery, ReleaseConfig] | None:
    """A gallery that the shared model of a release has encoded, with its configuration; None if there is none yet.

    Args:
        root: the run folder, or the folder of a model without its run.
        images: the folder of images in the gallery; None takes the run's own data set.

    Raises:
        InputError: the release or the gallery is damaged, or the folder has no image.
        OtherModelError: the release does not match the digests in the run's summary.
    """
    model = root if is_model(root) else RunFolder(root).model
    places = [place for place in (model / "gallery", cache_folder() / ELSEWHERE) if place.is_dir()]
    if not places or (images is not None and not images.is_dir()):
        return None
    config = model_config(root) if model == root else released_config(open_run(root))
    used, what = config.model_digest, ("data", config.model_digest)
    if images is not None:
        what = (images.resolve().name, folder_contents(images, used)[2])
    folders = [folder for place in places if (folder := place / folder_name(what[0], None, what[1])).is_dir()]
    return None if config.personal_only or not folders else (open_gallery(folders[0], used), config)
