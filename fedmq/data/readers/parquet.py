"""Read Parquet and Arrow files with images and captions, as Hugging Face's data sets are stored.

Images are read row group by row group when they are needed; only captions and labels are read immediately.
"""

from __future__ import annotations

import bisect
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from fedmq.config.scenario import Data
from fedmq.data.raw_set import U8, RawSet, checked, is_number, not_read, refuse_keys
from fedmq.data.readers import formats
from fedmq.data.readers.manifest import check_inside, texts_of
from fedmq.data.splits import SPLIT_NAMES, split_numbers
from fedmq.encoders.image_sets import ImageFiles, Images, StoredImages, files_below
from fedmq.encoders.images import Pixels, decode_bytes
from fedmq.errors import InputError
from fedmq.storage import quarantine
from fedmq.storage.cache import file_digests, key_of

ENDINGS = (".parquet", ".arrow")
_IMAGES = ("image", "img", "picture", "jpg", "png")
_CAPTIONS = ("captions", "caption", "text", "title", "sentences")
_LABELS = ("labels", "label")
_KEPT = 2  # row groups of images that are kept in memory
_ALLOWED = "a Parquet or Arrow file of images and captions"
T = TypeVar("T")


@dataclass(frozen=True)
class TableFile:
    """A Parquet or Arrow file, and what it says of itself."""

    path: Path  # path of the file
    columns: dict[str, str]  # type of each column by name, as pyarrow writes it
    groups: tuple[int, ...]  # number of rows of each row group
    huggingface: str  # Hugging Face's metadata, in JSON; empty without

    def read(self, function: Callable[[str, str, int], list[T]], column: str, group: int) -> list[T]:
        """What a function of ``formats`` reads of a column of a row group."""
        values = _read(self.path, function, column, group)
        if len(values) != self.groups[group]:
            raise InputError(str(self.path), "a row group of another length than stated", _ALLOWED)
        return values


def _read(path: Path, function: Callable[..., T], *arguments: object) -> T:
    about = (path, *arguments)
    return quarantine.read(
        function, *about, place=str(path), allowed=_ALLOWED, files=[path], libraries=("pyarrow.parquet",)
    )


def _opened(path: Path) -> TableFile:
    columns, groups, huggingface = _read(path, formats.describe_table)
    return TableFile(path, columns, tuple(groups), huggingface)


@dataclass(frozen=True, eq=False)
class TableImages(StoredImages):
    """Images in a column of tables."""

    files: tuple[TableFile, ...]
    column: str  # with the bytes of image files, or with structures that have them as ``bytes``
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _groups(self) -> list[tuple[int, int, int]]:
        """File, row group and its first row in the file, of each row group of all files."""
        return [
            (index, group, sum(file.groups[:group]))
            for index, file in enumerate(self.files)
            for group in range(len(file.groups))
        ]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(rows for file in self.files for rows in file.groups))

    def _place(self, at: int) -> tuple[int, int, int, int]:
        """File, row group, its first row in the file, and row in the group."""
        number = bisect.bisect_right(self._ends, at)
        return (*self._groups[number], at - (self._ends[number - 1] if number else 0))

    @override
    def stored_name(self, at: int) -> str:
        index, _, start, inside = self._place(at)
        return f"{self.files[index].path}: {self.column}[{start + inside}]"

    @cached_property
    def _contents(self) -> Callable[[int, int], list[bytes | None]]:
        """The image files of a row group of a file; those of the last few are kept."""
        return lru_cache(_KEPT)(lambda index, group: self.files[index].read(formats.read_images, self.column, group))

    @cached_property
    @override
    def stamp(self) -> str:
        return key_of("table", self.column, *file_digests([file.path for file in self.files]))

    @override
    def stored_image(self, at: int) -> Pixels:
        index, group, _, inside = self._place(at)
        with self._reading:  # else threads would read one row group several times
            content = self._contents(index, group)[inside]
        if not isinstance(content, bytes) or not content:
            raise InputError(self.stored_name(at), "no image", "the bytes of an image file")
        return decode_bytes(content, self.stored_name(at))


def read_parquet(data: Data) -> RawSet:
    """Read a file, or all ``.parquet`` or ``.arrow`` files below a folder in the order of their paths.

    Columns: ``image`` (bytes of image files, as Hugging Face stores them, or paths), ``caption``, ``captions`` or
    ``text`` (a text or a list of texts), and any of ``label``, ``labels``, ``split``. Without ``split``, names of files
    and folders can say the split. Other columns are ignored.

    Raises:
        InputError: a file is damaged or has no such columns, or pyarrow is not installed.
    """
    refuse_keys(data, ("annotations",), "Parquet and Arrow files")
    files = _files(data)
    columns = files[0].columns
    for file in files[1:]:
        if list(file.columns) != list(columns):
            found = f"columns {', '.join(file.columns)}"
            raise InputError(str(file.path), found[:200], f"the columns of {files[0].path}")
    if data.column is not None and data.column not in columns:
        raise InputError("partition.column", data.column, f"a column of {files[0].path}")
    texts = _column(files[0], _CAPTIONS, "captions")
    captions = [tuple(dict.fromkeys(texts_of(place, value))) for place, value in _values(files, texts)]
    label = next((name for name in _LABELS if name in columns), None)
    images = _images(files, _column(files[0], _IMAGES, "images"), data)
    keys = [f"{file.path.stem}/{row:06d}" for file in files for row in range(sum(file.groups))]
    raw = checked(
        RawSet(
            place=str(data.path),
            keys=tuple(keys if len(files) > 1 else [key.rpartition("/")[2] for key in keys]),
            images=images,
            captions=tuple(captions),
            split=_split(files),
            column=None if data.column is None else tuple(str(value) for _, value in _values(files, data.column)),
            ignored=_ignored(data, files, images),
        ),
        [] if label is None else _labels(files, label),
    )
    if raw.split is not None or data.path is None or not data.path.is_dir():
        return raw
    inner = [file.path.relative_to(data.path) for file in files for _ in range(sum(file.groups))]
    return raw.split_by_names([(*path.parent.parts, path.stem) for path in inner])


def _files(data: Data) -> tuple[TableFile, ...]:
    """The tables that ``data.path`` names, or that are below the folder it names."""
    path = data.path
    if path is not None and path.is_dir():
        found = sorted(each for each in files_below(path, leave=False) if each.suffix.lower() in ENDINGS)
        if found:
            return tuple(map(_opened, found))
    elif path is not None and path.suffix.lower() in ENDINGS:
        return (_opened(path),)
    raise InputError("data.path", str(path), f"a file {' or '.join(ENDINGS)}, or a folder with such files")


def _column(file: TableFile, names: Sequence[str], what: str) -> str:
    """The first of some columns that a table has."""
    for name in names:
        if name in file.columns:
            return name
    found = f"columns {', '.join(file.columns)}"
    raise InputError(str(file.path), found[:200], f"a column of {what}: {', '.join(names)}")


def _values(files: Sequence[TableFile], column: str) -> Iterator[tuple[str, Any]]:
    """The values of a column of all files, texts or numbers, each with its place for error messages."""
    for file in files:
        groups = (file.read(formats.read_column, column, group) for group in range(len(file.groups)))
        for row, value in enumerate(itertools.chain.from_iterable(groups)):
            yield f"{file.path}: {column}[{row}]", value


def _labels(files: Sequence[TableFile], column: str) -> list[list[str]]:
    """The labels of each row: texts, or numbers, which Hugging Face's metadata may name; -1 means no label."""
    names = _class_names(files[0], column)
    found = []
    for place, value in _values(files, column):
        texts = [text for text in texts_of(place, value, label=True) if text != "-1"]
        found.append([names[int(text)] if is_number(text) and int(text) < len(names) else text for text in texts])
    return found


def _class_names(file: TableFile, column: str) -> list[str]:
    """The names of a column's class numbers in Hugging Face's metadata; empty if there are none."""
    try:
        about = json.loads(file.huggingface)["info"]["features"][column]
        names = (about.get("feature") or about)["names"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _ignored(data: Data, files: Sequence[TableFile], images: Images) -> dict[str, tuple[str, ...]]:
    """Columns that are not read, and files of the folder that are neither tables nor images of theirs."""
    columns = files[0].columns
    read = [next((name for name in names if name in columns), "") for names in (_IMAGES, _CAPTIONS, _LABELS)]
    others = tuple(name for name in columns if name not in (*read, "split", data.column))
    found = {"other columns": others} if others else {}
    if data.path is None or not data.path.is_dir():
        return found
    named = images.paths if isinstance(images, ImageFiles) else ()
    return found | not_read(data.path, [*(file.path for file in files), *named])


def _split(files: Sequence[TableFile]) -> U8 | None:
    """The split of each row by the column ``split``; None if there is none."""
    if "split" not in files[0].columns:
        return None
    names = ["" if value is None else str(value) for _, value in _values(files, "split")]
    return split_numbers(str(files[0].path.parent), names, SPLIT_NAMES)


def _images(files: tuple[TableFile, ...], column: str, data: Data) -> Images:
    """The images of a column: bytes of image files, or paths."""
    kind = files[0].columns[column]
    if "string" in kind and not kind.startswith("struct"):
        root = data.images or files[0].path.parent
        places = [(place, root / str(value or "")) for place, value in _values(files, column)]
        for place, path in places:
            check_inside(place, path, root)
        return ImageFiles(tuple(path for _, path in places))
    refuse_keys(data, ("images",), "Parquet and Arrow files with the bytes of images")
    if not ("binary" in kind and (not kind.startswith("struct") or "bytes" in kind)):
        raise InputError(f"{files[0].path}: {column}", kind[:80], "bytes of image files, or paths of images")
    return TableImages(tuple(range(sum(sum(file.groups) for file in files))), files, column)
