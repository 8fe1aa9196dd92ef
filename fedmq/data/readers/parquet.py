"""Read Parquet and Arrow files with pictures and captions, as Hugging Face's data sets are stored.

Pictures are read row group by row group when they are needed; only captions and labels are read immediately.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from fedmq.config.scenario import Data
from fedmq.data.raw_set import U8, RawSet, checked, is_number, multi_hot, refuse_keys
from fedmq.data.readers.photo_folder import MAX_CAPTIONS, check_inside, named_splits
from fedmq.data.readers.webdataset import MAX_PICTURE, texts_of
from fedmq.data.splits import SPLIT_NAMES, split_numbers
from fedmq.encoders.images import Files, Pictures, Pixels, decode_bytes, files_below
from fedmq.encoders.stored_pictures import Rows
from fedmq.errors import InputError
from fedmq.packages import package
from fedmq.storage.cache import file_digests, key_of
from fedmq.storage.regular_files import check_regular

ENDINGS = (".parquet", ".arrow")
#: Maximum size of a file [bytes], and maximum number of rows of all files.
MAX_FILE, MAX_ROWS = 1 << 40, 50_000_000
#: Maximum size of a row group, as stated in its file and after decoding [bytes].
MAX_GROUP = 1 << 31
#: Maximum size of a decoded column of texts [bytes]: an average per row, and a fixed allowance.
MAX_MEAN_TEXT, MAX_MORE_TEXT = 4096, 1 << 26
_IMAGES = ("image", "img", "picture", "jpg", "png")
_CAPTIONS = ("captions", "caption", "text", "title", "sentences")
_LABELS = ("labels", "label")
_KEPT = 2  # row groups with pictures that are kept in memory
_BATCH = 16  # rows that are decoded at once: a small file can repeat one large value in every row
_ALLOWED = "a Parquet or Arrow file of pictures and captions"
_T = TypeVar("_T")


def _guarded(path: Path, action: Callable[[], _T]) -> _T:
    """Run an action of pyarrow, whose errors become one line."""
    try:
        return action()
    except InputError:
        raise
    except Exception as error:  # pyarrow raises many types on a damaged file
        found = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise InputError(str(path), found[:200], _ALLOWED) from None


@dataclass(frozen=True)
class TableFile:
    """A Parquet or Arrow file, opened lazily.

    Args:
        path: path of the file.
    """

    path: Path

    @cached_property
    def _parquet(self) -> Any:
        """The opened Parquet file; None for an Arrow file."""
        check_regular(self.path, MAX_FILE, _ALLOWED)
        if self.path.suffix.lower() != ".parquet":
            return None
        return _guarded(self.path, lambda: package("pyarrow.parquet", "parquet", str(self.path)).ParquetFile(self.path))

    @cached_property
    def _batches(self) -> Any:
        """The record batches of an Arrow file, in a memory map."""
        arrow = package("pyarrow", "parquet", str(self.path))

        def opened() -> Any:
            mapped = arrow.memory_map(str(self.path))
            as_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            table = (arrow.ipc.open_file if as_file else arrow.ipc.open_stream)(mapped).read_all()
            # A damaged offset would otherwise be followed out of the file, which kills the process.
            table.validate(full=True)
            return table

        batches = _guarded(self.path, lambda: opened().to_batches())
        if not batches:
            raise InputError(str(self.path), "no row", _ALLOWED)
        return batches

    @cached_property
    def schema(self) -> Any:
        """The schema, as pyarrow gives it."""
        if self._parquet is not None:
            return _guarded(self.path, lambda: self._parquet.schema_arrow)
        return self._batches[0].schema

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Number of rows of each row group.

        Raises:
            InputError: a row group is too large to be read at once.
        """
        if self._parquet is None:
            return tuple(len(batch) for batch in self._batches)
        about = _guarded(self.path, lambda: self._parquet.metadata)
        described = _guarded(self.path, lambda: [about.row_group(each) for each in range(about.num_row_groups)])
        if (largest := max((each.total_byte_size for each in described), default=0)) > MAX_GROUP:
            allowed = f"row groups of at most {MAX_GROUP:,} bytes; write it with a smaller row_group_size"
            raise InputError(str(self.path), f"a row group of {largest:,} bytes", allowed)
        return tuple(each.num_rows for each in described)

    def read(self, group: int, column: str) -> Any:
        """The values of a column of a row group, as a pyarrow array of as many rows as :attr:`groups` says.

        Raises:
            InputError: the file is damaged, or has more bytes than :data:`MAX_GROUP` when it is decoded.
        """
        if self._parquet is None:
            return self._batches[group].column(column)  # in the memory map
        found = list(self.batches(group, column, MAX_GROUP))
        return found[0] if len(found) == 1 else package("pyarrow", "parquet", str(self.path)).chunked_array(found)

    def batches(self, group: int, column: str, most: int, part: str | None = None) -> Iterator[Any]:
        """The values of a column of a row group, as pyarrow arrays of a few rows.

        Args:
            group: number of the row group.
            column: name of the column.
            most: bytes that they may have once decoded.
            part: the field of structures to read, instead of all.

        Raises:
            InputError: the file is damaged, or has more bytes.
        """
        read, size, rows = _guarded(self.path, lambda: self._decoded(group, column, part)), 0, 0
        while (batch := _guarded(self.path, lambda: next(read, None))) is not None:
            size, rows = size + batch.nbytes, rows + len(batch)
            if size > most:
                allowed = f"at most {most:,} bytes in its {self.groups[group]:,} rows"
                raise InputError(f"{self.path}: {column}", f"more than {most:,} decoded bytes in a row group", allowed)
            yield batch
        if rows != self.groups[group]:
            raise InputError(str(self.path), "a row group of another length than stated", _ALLOWED)

    def _decoded(self, group: int, column: str, part: str | None) -> Iterator[Any]:
        if self._parquet is None:
            whole = self._batches[group].column(column)
            arrays = (whole.slice(start, _BATCH) for start in range(0, len(whole), _BATCH))
        else:
            name = column if part is None else f"{column}.{part}"
            batches = self._parquet.iter_batches(_BATCH, row_groups=[group], columns=[name], use_threads=False)
            arrays = (batch.column(column) for batch in batches)
        fields = arrays if part is None else (each.field(part) for each in arrays)
        return (each.dictionary_decode() if hasattr(each, "dictionary_decode") else each for each in fields)

    def without(self, group: int, column: str, part: str) -> set[int]:
        """The rows of a row group without a field of their structures.

        A file that states falsely that every row has it is noticed when the row's picture is read.
        """
        if self._parquet is not None and self._no_null(group, f"{column}.{part}"):
            return set()
        values = itertools.chain.from_iterable(
            _guarded(self.path, batch.is_null().to_pylist) for batch in self.batches(group, column, MAX_GROUP, part)
        )
        return {row for row, missing in enumerate(values) if missing}

    def _no_null(self, group: int, name: str) -> bool:
        """Whether a Parquet file states that a column has no null in a row group."""

        def stated() -> bool:
            about = self._parquet.metadata.row_group(group)
            chunk = next(c for c in map(about.column, range(about.num_columns)) if c.path_in_schema == name)
            return bool(chunk.is_stats_set and chunk.statistics.has_null_count and chunk.statistics.null_count == 0)

        return _guarded(self.path, stated)


@dataclass(frozen=True, eq=False)
class TablePictures:
    """Pictures in a column of tables, for :class:`fedmq.encoders.stored_pictures.Rows`.

    Args:
        files: the tables.
        column: with the bytes of image files, or with structures that have them as ``bytes``.
    """

    files: tuple[TableFile, ...]
    column: str
    _kept: OrderedDict[tuple[int, int], Any] = field(default_factory=OrderedDict)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        return [(index, group) for index, file in enumerate(self.files) for group in range(len(file.groups))]

    @cached_property
    def _ends(self) -> list[int]:
        return list(itertools.accumulate(rows for file in self.files for rows in file.groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _place(self, row: int) -> tuple[int, int, int]:
        """File, row group, and row in the group."""
        at = bisect.bisect_right(self._ends, row)
        return (*self._groups[at], row - (self._ends[at - 1] if at else 0))

    def name(self, row: int) -> str:
        """File, column and row in the file."""
        index, group, inside = self._place(row)
        return f"{self.files[index].path}: {self.column}[{sum(self.files[index].groups[:group]) + inside}]"

    @cached_property
    def stamp(self) -> str:
        """The digests of the files, and the column."""
        return key_of("table", self.column, *file_digests([file.path for file in self.files]))

    def picture(self, row: int) -> Pixels:
        """Decode one picture: uint8 [height, width, 3].

        Raises:
            InputError: the row has no picture, or it cannot be read.
        """
        index, group, inside = self._place(row)
        with self._reading:
            values = self._kept.get((index, group))
            if values is None:
                values = self._kept[index, group] = self.files[index].read(group, self.column)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            value = _guarded(self.files[index].path, lambda: values.slice(inside, 1).to_pylist())[0]
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes) or not 0 < len(content) <= MAX_PICTURE:
            found = "no picture" if not content else f"{len(content):,} bytes"
            raise InputError(self.name(row), found, f"the bytes of an image file, at most {MAX_PICTURE:,}")
        return decode_bytes(content, self.name(row))


def read_parquet(data: Data) -> RawSet:
    """Read a file, or all ``.parquet`` or ``.arrow`` files below a folder in the order of their paths.

    Columns: ``image`` (bytes of image files, as Hugging Face stores them, or paths), ``caption``, ``captions`` or
    ``text`` (a text or a list of texts), and any of ``label``, ``labels``, ``split``. Files whose names or folders
    begin with the name of a split are that split. Other columns are ignored.

    Raises:
        InputError: a file is damaged or has no such columns, or pyarrow is not installed.
    """
    refuse_keys(data, ("annotations",), "Parquet and Arrow files")
    files = _files(data)
    schema = files[0].schema
    for file in files[1:]:
        if file.schema.names != schema.names:
            found = f"columns {', '.join(file.schema.names)}"
            raise InputError(str(file.path), found[:200], f"the columns of {files[0].path}")
    if (rows := sum(sum(file.groups) for file in files)) > MAX_ROWS:
        raise InputError(str(data.path), f"{rows:,} rows", f"at most {MAX_ROWS:,}")
    if data.column is not None and data.column not in schema.names:
        raise InputError("partition.column", data.column, f"a column of {files[0].path}")
    captions = [_captions(place, value) for place, value in _values(files, _column(files[0], _CAPTIONS, "captions"))]
    label = next((name for name in _LABELS if name in schema.names), None)
    labels, names = multi_hot([] if label is None else _labels(files, label))
    keys = [f"{file.path.stem}/{row:06d}" for file in files for row in range(sum(file.groups))]
    return checked(
        RawSet(
            place=str(data.path),
            keys=tuple(keys if len(files) > 1 else [key.rpartition("/")[2] for key in keys]),
            pictures=_pictures(files, _column(files[0], _IMAGES, "pictures"), data),
            captions=tuple(captions),
            labels=labels,
            label_names=names,
            split=_split(files),
            column=None if data.column is None else tuple(str(value) for _, value in _values(files, data.column)),
        )
    )


def _files(data: Data) -> tuple[TableFile, ...]:
    """The tables that ``data.path`` names, or that are below the folder it names."""
    path = data.path
    if path is not None and path.is_dir():
        found = sorted(each for each in files_below(path, leave=False) if each.suffix.lower() in ENDINGS)
        if found:
            return tuple(map(TableFile, found))
    elif path is not None and path.suffix.lower() in ENDINGS:
        return (TableFile(path),)
    raise InputError("data.path", str(path), f"a file {' or '.join(ENDINGS)}, or a folder with such files")


def _column(file: TableFile, names: Sequence[str], what: str) -> str:
    """The first of some columns that a table has."""
    for name in names:
        if name in file.schema.names:
            return name
    found = f"columns {', '.join(file.schema.names)}"
    raise InputError(str(file.path), found[:200], f"a column of {what}: {', '.join(names)}")


def _values(files: Sequence[TableFile], column: str) -> Iterator[tuple[str, Any]]:
    """The values of a column of texts or numbers, each with its place for error messages."""
    for file in files:
        row, left = 0, MAX_MORE_TEXT + MAX_MEAN_TEXT * sum(file.groups)
        for group in range(len(file.groups)):
            for batch in file.batches(group, column, left):
                left -= batch.nbytes
                for value in _guarded(file.path, batch.to_pylist):
                    yield f"{file.path}: {column}[{row}]", value
                    row += 1


def _captions(place: str, value: object) -> tuple[str, ...]:
    """The captions of a row, without repetitions."""
    texts = tuple(dict.fromkeys(texts_of(place, value)))
    if (size := sum(len(text.encode(errors="replace")) for text in texts)) > MAX_CAPTIONS:
        raise InputError(place, f"{size:,} bytes", f"captions of at most {MAX_CAPTIONS:,} bytes for a picture")
    return texts


def _labels(files: Sequence[TableFile], column: str) -> list[list[str]]:
    """The labels of each row: texts, or numbers, which Hugging Face's metadata may name; -1 means no label."""
    names = _class_names(files[0], column)
    found = []
    for place, value in _values(files, column):
        texts = [text for text in texts_of(place, value, numbers=True) if text != "-1"]
        found.append([names[int(text)] if is_number(text) and int(text) < len(names) else text for text in texts])
    return found


def _class_names(file: TableFile, column: str) -> list[str]:
    """The names of a column's class numbers in Hugging Face's metadata; empty if there are none."""
    try:
        about = json.loads((file.schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        names = (about.get("feature") or about)["names"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _split(files: Sequence[TableFile]) -> U8 | None:
    """The split of each row: of the column ``split``, else that of the file's name or folder; None if there is none."""
    if "split" in files[0].schema.names:
        names = [str(value or "") for _, value in _values(files, "split")]
    else:
        own = [re.split(r"[-_.]", file.path.name)[0] for file in files]
        own = own if set(own) <= set(SPLIT_NAMES) else [file.path.parent.name for file in files]
        if not named_splits(own):
            return None
        names = [name for name, file in zip(own, files, strict=True) for _ in range(sum(file.groups))]
    return split_numbers(str(files[0].path.parent), names, SPLIT_NAMES)


def _pictures(files: tuple[TableFile, ...], column: str, data: Data) -> Pictures:
    """The pictures of a column: bytes of image files, or paths."""
    kind = str(files[0].schema.field(column).type)
    if "string" in kind and not kind.startswith("struct"):
        root = data.images or files[0].path.parent
        paths = [root / str(value or "") for _, value in _values(files, column)]
        for (place, _), path in zip(_values(files, column), paths, strict=True):
            check_inside(place, path, root)
        return Files(tuple(paths))
    refuse_keys(data, ("images",), "Parquet and Arrow files with the bytes of pictures")
    if not ("binary" in kind and (not kind.startswith("struct") or "bytes" in kind)):
        raise InputError(f"{files[0].path}: {column}", kind[:80], "bytes of image files, or paths of images")
    if kind.startswith("struct") and re.search(r"\bpath: \w*string", kind):
        _refuse_paths_out(files, column)
    stack = TablePictures(files, column)
    return Rows(stack, tuple(range(len(stack))))


def _refuse_paths_out(files: Sequence[TableFile], column: str) -> None:
    """Refuse a row without the bytes of a picture whose path leads out of the data set's folder.

    In addition to the bytes, Hugging Face stores the original path of a picture, which is not used.
    """
    for file in files:
        first = 0
        for group, rows in enumerate(file.groups):
            if without := file.without(group, column, "bytes"):
                paths = itertools.chain.from_iterable(
                    _guarded(file.path, batch.to_pylist) for batch in file.batches(group, column, MAX_GROUP, "path")
                )
                for row, path in enumerate(paths, first):
                    if path and row - first in without:
                        check_inside(f"{file.path}: {column}[{row}].path", file.path.parent / path, file.path.parent)
            first += rows
