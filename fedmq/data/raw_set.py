"""The :class:`RawSet` that readers return (images, captions or tags, labels, split), and helpers for readers.

The helpers validate sets, encode labels, and read text and JSON files with one-line errors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from fedmq.config.scenario import Data
from fedmq.data.labels import MAX_LABELS, one_spelling
from fedmq.data.prepared_arrays import Present, presence
from fedmq.data.splits import first_of_equals, split_numbers, splits_of_names
from fedmq.encoders.image_sets import ImageFiles, Images, ImagesWithGaps, files_below, is_folder
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS, check_header
from fedmq.errors import InputError, line_of
from fedmq.packages import MissingPackageError
from fedmq.storage import quarantine
from fedmq.storage.json_files import refusal
from fedmq.storage.regular_files import check_regular
from fedmq.text import Progress, first_few, tell

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]
Schema = TypeVar("Schema", bound=BaseModel)


def is_number(text: str) -> bool:
    """Whether a token is a non-negative integer of at most 18 ASCII digits, so that it fits int64."""
    return text.isascii() and text.isdecimal() and len(text) < 19


@dataclass(frozen=True, eq=False)
class RawSet:
    """A data set before encoding, its items in a fixed order."""

    place: str  # source named in error messages, e.g. the annotation file.
    keys: tuple[str, ...]  # n unique item keys
    images: Images  # n images or videos
    captions: tuple[tuple[str, ...], ...]  # n tuples of captions, possibly empty
    bag: Array | None = None  # bag of words [n, V] (0/1 or counts), or None
    labels: U8 | None = None  # multi-hot uint8 [n, L], or None
    label_names: tuple[str, ...] = ()  # L names; names of two-level labels start with ``coarse:`` or ``fine:``
    split: U8 | None = None  # uint8 [n], indices into ``SPLITS``; None if the set has no official split
    stamps: tuple[str, ...] | None = None  # n fingerprints of the images; None if their files have not been read
    # N values of ``data.column``, by which ``partition.kind column`` partitions the items; None without it.
    column: tuple[str, ...] | None = None
    vocabulary: tuple[str, ...] = ()  # the V words of ``bag``; empty if the data set does not name them
    unpaired: bool = False  # items may lack their image or their captions, because the set declares this for each item
    # Names of files and items that are not read, by the reason.
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split_remark: str = ""  # what to say about where the split comes from; possibly empty

    def __len__(self) -> int:
        return len(self.keys)

    def subset(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> RawSet:
        """The items of the given rows, in the given order."""
        chosen = np.asarray(rows, dtype=np.int64)
        parts: dict[str, Any] = {"images": self.images.subset(chosen.tolist())}
        for name in ("keys", "captions", "bag", "labels", "split", "stamps", "column"):
            if (held := getattr(self, name)) is not None:
                parts[name] = tuple(held[row] for row in chosen) if isinstance(held, tuple) else held[chosen]
        return replace(self, **parts)

    @cached_property
    def with_image(self) -> npt.NDArray[np.bool_]:
        """Bool [n]: whether each item has an image, whether or not its file is readable."""
        if not isinstance(self.images, ImagesWithGaps):
            return np.ones(len(self), np.bool_)
        return np.array([at is not None for at in self.images.rows])

    @property
    def example(self) -> str:
        """An item with captions in one line, so that the user sees what was read as captions and what as labels."""
        row = next((row for row, captions in enumerate(self.captions) if captions), None)
        if row is None:
            return ""
        captions = "; ".join(f'"{caption[:60]}"' for caption in self.captions[row][:3])
        labels = [] if self.labels is None else [self.label_names[at] for at in np.flatnonzero(self.labels[row])]
        named = f"; labels {', '.join(labels[:6])}" if labels else ""
        return f"for example {self.keys[row]}: captions {captions}{named}"

    def present(self, kind: str) -> Present | None:
        """The modalities of each item, bool [n, 2]: image, captions or a bag of words; None if all items have both."""
        captioned = np.array([bool(captions) or kind == "bag" for captions in self.captions])
        return presence(self.with_image, captioned)

    def split_by_names(self, paths: Sequence[Sequence[str]]) -> RawSet:
        """The set with the split that :func:`splits_of_names` finds; items outside of its parts are ignored."""
        names, remark = splits_of_names(paths)
        found = replace(self, split_remark=remark)
        if names is None:
            return found
        inside = [row for row, name in enumerate(names) if name]
        if len(inside) < len(names):
            outside = tuple(key for key, name in zip(self.keys, names, strict=True) if not name)
            found = replace(found.subset(inside), ignored={**self.ignored, "items outside of the splits": outside})
        return replace(found, split=split_numbers(self.place, [names[row] for row in inside], {}))

    @property
    def ignored_lines(self) -> list[str]:
        """One line for each reason for which files are not read."""
        return [f"ignored, {why} ({len(names)}): {first_few(names)}" for why, names in self.ignored.items() if names]

    def labelled(self) -> RawSet:
        """The items that have a label.

        Raises:
            InputError: fewer than two items have a label.
        """
        return self.subset(labelled_rows(self.labels, self.place))

    @cached_property
    def image_digest(self) -> str:
        """SHA-256 (hex) of the images' contents, regardless of file names."""
        return _digest(self.images.stamps() if self.stamps is None else self.stamps)

    def same_images(self, progress: Progress | None = None) -> npt.NDArray[np.int64]:
        """The first row with the same image as each row: int64 [n].

        Raises:
            InputError: an image cannot be read.
        """
        contents = self.stamps
        if contents is None or not isinstance(self.images, ImageFiles):
            contents = self.images.contents(tell(progress, "images compared", len(self)))
        return first_of_equals(contents)

    def text_digest(self, kind: str) -> str:
        """SHA-256 (hex) of the captions (``sentences``) or of the bags (``bag``)."""
        if kind == "bag" and self.bag is not None:
            return array_digest(self.bag)
        return _digest(json.dumps(captions) for captions in self.captions)


def array_digest(value: Array) -> str:
    """SHA-256 (hex) of an array's dtype, shape and values."""
    digest = hashlib.sha256(repr((value.shape, value.dtype.name)).encode())
    digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        # File names may hold arbitrary bytes.
        digest.update(f"{line}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def checked(raw: RawSet, labels: Sequence[Collection[str]] = ()) -> RawSet:
    """Validate a reader's result and return it, without captions in which nothing is visible.

    ``labels`` are the names of each item's labels, if ``raw`` has no array of labels: equal labels get one spelling,
    and are in the order of ``raw.label_names``, else sorted.

    Raises:
        InputError: fewer than two items, a duplicate key, too many labels, or text with an incomplete character.
    """
    if labels:
        labels = one_spelling(labels)
        names = tuple(raw.label_names or sorted({name for item in labels for name in item}))
        raw = replace(raw, labels=multi_hot(labels, names) if names else None, label_names=names)
    if len(raw) < 2:
        raise InputError(raw.place, f"{len(raw)} items", "at least 2: one to train on, one to test on")
    twice = [key for key, count in Counter(raw.keys).items() if count > 1]
    if twice:
        raise InputError(raw.place, f"{twice[0]!r} twice ({len(twice)} keys in all)", "every item once")
    if len(raw.label_names) > MAX_LABELS:
        raise InputError(raw.place, f"{len(raw.label_names)} labels", f"at most {MAX_LABELS}")
    for row, key in enumerate(raw.keys):
        for text in (key, *raw.captions[row]):
            whole(text, f"{raw.place}: {key!a}")
        try:
            # Python can represent file names of arbitrary bytes, but other lone surrogates never name a file.
            os.fsencode(raw.images.name(row))
        except UnicodeEncodeError:
            raise InputError(f"{raw.place}: {key!a}", raw.images.name(row), "the name of a file") from None
    for name in raw.label_names:
        whole(name, f"{raw.place}: labels")
    visible = tuple(tuple(filter(_is_visible, captions)) for captions in raw.captions)
    return raw if visible == raw.captions else replace(raw, captions=visible)


def _is_visible(caption: str) -> bool:
    """Whether a text has a character other than spaces and signs without width, such as U+200B."""
    return any(each.isprintable() and not each.isspace() for each in caption)


def whole(text: str, place: str) -> str:
    """Return ``text`` if it can be encoded as UTF-8.

    Raises:
        InputError: it holds a lone surrogate, e.g. because it was cut in the middle of a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[max(0, error.start - 40) : error.start + 40]
        raise InputError(place, found, "whole characters of Unicode") from None
    return text


# --- labels and files -----------------------------------------------------------------------------------------------


def multi_hot(items: Sequence[Collection[str]], names: Sequence[str]) -> U8:
    """Which of the names, labels or words, each item has: 0/1 uint8 [n, L]."""
    column = {name: index for index, name in enumerate(names)}
    hot = np.zeros((len(items), len(names)), dtype=np.uint8)
    for row, item in enumerate(items):
        hot[row, [column[name] for name in item]] = 1
    return hot


def labelled_rows(labels: Array | None, place: str) -> npt.NDArray[np.int64]:
    """Rows of the items that ``data.labelled`` keeps: int64, ascending; all items if labels are class numbers [n].

    Raises:
        InputError: fewer than two items have a label.
    """
    kept = np.zeros(0, np.int64)
    if labels is not None:
        kept = np.arange(len(labels)) if labels.ndim == 1 else np.flatnonzero(labels.any(axis=1))
    if len(kept) < 2:
        raise InputError(f"{place}: data.labelled", f"{len(kept)} items with a label", "at least 2")
    return kept


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """Read a text file; by default UTF-8 with or without a byte order mark.

    Raises:
        InputError: the file is missing or not a regular file, or in another encoding.
    """
    if not path.exists():
        allowed = "a file of the data set; see docs/reference/data_sets.md for its layout"
        raise InputError(str(path), "no such file", allowed)
    quarantine.note(str(path), "a readable text file")
    check_regular(path, "a text file")
    try:
        return path.read_text(encoding=encoding)
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        raise InputError(f"{path}: line {line_of(error)}", f"bytes that are not {name}", f"{name} text") from None


def read_json(path: Path, schema: type[Schema], allowed: str) -> Schema:
    """Read a JSON file.

    Raises:
        InputError: the file is missing, unreadable, not valid JSON, or does not match the schema.
    """
    try:
        return schema.model_validate_json(read_text(path))
    except ValidationError as error:
        raise refusal(str(path), error, allowed) from None


def folder_of(data: Data) -> Path:
    """Return ``data.path``, which must be a folder.

    Raises:
        InputError: it is not a folder.
    """
    if data.path is None or not data.path.is_dir():
        allowed = f"the folder of {data.name}; see docs/reference/data_sets.md for its layout"
        raise InputError("data.path", str(data.path), allowed)
    return data.path


def not_read(folder: Path, used: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """The files below a folder that a reader did not use: images, and others; for :attr:`RawSet.ignored`.

    ``used`` are files, and folders whose files are all used.
    """
    read = {os.path.normpath(path) for path in used}
    left = [
        path.relative_to(folder)
        for path in files_below(folder)
        if read.isdisjoint(map(os.path.normpath, (path, *path.parents)))
    ]
    pictures = sorted(path.as_posix() for path in left if path.suffix.lower() in IMAGE_ENDINGS | VIDEO_ENDINGS)
    others = sorted(path.as_posix() for path in left if path.suffix.lower() not in IMAGE_ENDINGS | VIDEO_ENDINGS)
    found = {"images that no list names": tuple(pictures), "files of other kinds": tuple(others)}
    return {why: names for why, names in found.items() if names}


def refuse_keys(data: Data, names: Iterable[str], what: str) -> None:
    """Reject keys of ``data`` that do not apply to ``what``, the way the set is stored."""
    for name in names:
        value = getattr(data, name)
        if value != Data.model_fields[name].default:
            raise InputError(f"data.{name}", str(value), f"no such key: it is not for {what}")


def first_existing(paths: Sequence[Path], place: str, what: str) -> Path:
    """The first path that exists.

    Raises:
        InputError: none exists; the message lists all of them.
    """
    for path in paths:
        if path.exists():
            return path
    raise InputError(place, f"no {what}", " or ".join(map(str, paths)))


# --- opening images early -------------------------------------------------------------------------------------------

#: Maximum number of image files whose headers are read, and of images inside other files that are decoded.
MOST_FILES, MOST_STORED = 10_000, 500
#: Names listed in one message.
LISTED = 5
_THREADS, _BATCH = 8, 64


@dataclass(frozen=True)
class Unreadable:
    """What opening the images of a data set found."""

    tried: int  # number of images that were opened
    names: tuple[str, ...]  # ``name (reason)`` of those that cannot be read


def unreadable(raw: RawSet, progress: Progress | None = None) -> Unreadable:
    """Open the images of a data set in order, for image files only the headers; videos are not opened.

    Raises:
        InputError: the package that reads these files is missing.
    """
    files = in_files(raw)
    rows = [row for row in range(len(raw)) if raw.with_image[row] and not raw.images.missing(row)]
    rows = rows[: MOST_FILES if files else MOST_STORED]
    report, found = tell(progress, "images opened", len(rows)), list[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            found += filter(None, pool.map(partial(_problem, raw, files), batch))
            report(start + len(batch))
    return Unreadable(len(rows), tuple(found))


def in_files(raw: RawSet) -> bool:
    """Whether each image is a file of its own, not one in an archive or an array."""
    return isinstance(raw.images.held if isinstance(raw.images, ImagesWithGaps) else raw.images, ImageFiles)


def _problem(raw: RawSet, files: bool, row: int) -> str:
    """Name and reason of an image that cannot be read; empty if it can."""
    try:
        if not files:
            raw.images.frames(row)
            return ""
        path = Path(raw.images.name(row))
        if path.suffix.lower() not in VIDEO_ENDINGS and not is_folder(path):
            check_header(path)
    except MissingPackageError:
        raise
    except InputError as error:
        return f"{raw.keys[row]} ({error.found})"
    return ""
