"""Read any data set described by a CSV, TSV or JSONL file with the image, captions, labels and split of each item.

CSV: a header line with ``image``, ``captions`` (or ``caption``) or both, and any of ``labels``, ``split``, ``key``.
An item may lack its image or its captions; their fields are then empty. Several captions or labels of an item are
separated by ``|`` or written as a list (``['dog', 'sky']``, as pandas does); captions may also have several columns.
TSV: the same, with tabs. JSONL: one object per line with the same fields; captions and labels are a string or a list.
Lines of one image, or of one key, are one item with the captions and labels of all of them. Videos and folders of
frames are read as for MSR-VTT. Relative paths are relative to the file's folder.

The columns of other programs are understood, too: ``filepath`` and ``title`` of open_clip, ``file_name`` and ``text``
of Hugging Face. A ``title`` or ``text`` is one caption, whatever characters are in it.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, multi_hot, read_text, whole
from fedmq.data.readers.cells import MISSING, captions_of, labels_of, one_label, one_text
from fedmq.data.splits import split_numbers
from fedmq.encoders.image_sets import ImageFiles, ImagesWithGaps, is_folder
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS
from fedmq.errors import InputError

#: Fields with the path of the image, the first of which is this project's own.
IMAGES = ("image", "filepath", "file_name")
#: Fields with one caption, in the files of other programs.
SINGLE_CAPTIONS = ("title", "text")
CAPTIONS = ("captions", "caption", *SINGLE_CAPTIONS)
KNOWN = (*IMAGES, *CAPTIONS, "labels", "label", "split", "key")

#: Field values of one item by name, not yet validated.
Record = Mapping[str, object]


def _csv(path: Path, more: tuple[str, ...], *, strict: bool) -> Iterator[tuple[int, Record]]:
    text = read_text(path)
    # Files of open_clip have tabs, whatever their extension.
    tabs = path.suffix.lower() == ".tsv" or "\t" in text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", strict=True)
    try:
        header = next(reader, [])
        _check_header(f"{path}: line 1", header, more, strict=strict)
        for fields in reader:
            if not fields:
                continue
            # A truncated line would silently lose labels.
            if len(fields) != len(header):
                allowed = f"as many fields as the header has, {len(header)}"
                raise InputError(f"{path}: line {reader.line_num}", f"{len(fields)} fields", allowed)
            single, several = dict[str, str](), dict[str, list[str]]()
            for name, value in zip(header, fields, strict=True):
                if name in IMAGES:
                    single["image"] = value
                elif name in ("split", "key", *more):
                    single[name] = value
                elif name in CAPTIONS:
                    # The columns of captions are joined in column order.
                    place = f"{path}: line {reader.line_num}: {name}"
                    found = _one(value) if name in SINGLE_CAPTIONS else captions_of(place, value)
                    several.setdefault(CAPTIONS[0], []).extend(found)
                elif name in KNOWN:
                    several.setdefault(name, []).extend(labels_of(f"{path}: line {reader.line_num}: {name}", value))
            yield reader.line_num, {**single, **several}
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}", str(error), "valid CSV") from None


def _one(cell: str) -> list[str]:
    """The caption in a cell that holds one; none if it says ``nan``."""
    return [] if cell.strip() in MISSING else [cell]


def _check_header(place: str, header: Sequence[str], more: tuple[str, ...], *, strict: bool) -> None:
    """Refuse columns that are unknown, given twice, or without images and captions."""
    twice = [name for name, count in Counter(header).items() if count > 1 and name not in CAPTIONS]
    if twice:
        raise InputError(place, f"{twice[0]!r} twice", "each column once; only captions may have several")
    if len(named := [name for name in header if name in IMAGES]) > 1:
        raise InputError(place, f"columns {' and '.join(named)}", "one column with the paths of images")
    unknown = [name for name in header if name not in (*KNOWN, *more)]
    if unknown and strict:
        raise InputError(place, unknown[0], f"fields {', '.join((*KNOWN, *more))}")
    if header and not {*IMAGES, *CAPTIONS} & set(header):
        allowed = "a column image, with paths of images, or captions"
        raise InputError(place, f"columns {', '.join(header)}", allowed)


def _unique_fields(pairs: list[tuple[str, object]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} twice")
    return record


def _jsonl(path: Path, more: tuple[str, ...], *, strict: bool) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line, object_pairs_hook=_unique_fields)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number}", str(error), "valid JSON, each field once") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number}", type(record).__name__, "an object")
            _check_texts(f"{path}: line {number}", record)
            yield number, _own_names(f"{path}: line {number}", record, more, strict=strict)


def _own_names(place: str, record: Record, more: tuple[str, ...], *, strict: bool) -> Record:
    """A record of JSON in which the image has this project's name, without unknown fields unless these are errors."""
    if len(named := [name for name in record if name in IMAGES]) > 1:
        raise InputError(place, f"fields {' and '.join(named)}", "one field with the path of the image")
    unknown = [name for name in record if name not in (*KNOWN, *more)]
    if unknown and strict:
        raise InputError(place, str(unknown[0]), f"fields {', '.join((*KNOWN, *more))}")
    kept = {name: value for name, value in record.items() if name not in unknown}
    return {"image" if name in IMAGES else name: value for name, value in kept.items()}


def _check_texts(place: str, record: Record) -> None:
    """Refuse captions and labels of JSON that look like lists but are texts."""
    for name in (*CAPTIONS, "labels", "label"):
        value, label = record.get(name), name not in CAPTIONS
        if isinstance(value, str):
            _ = one_label(f"{place}: {name}", value) if label else one_text(f"{place}: {name}", value, label=False)
        for item in value if isinstance(value, list) else ():
            if isinstance(item, str):
                one_text(f"{place}: {name}", item, label=label)


def _strings(place: str, record: Record, *names: str) -> tuple[str, ...]:
    """The distinct non-empty strings of the given fields, in order."""
    strings: list[str] = []
    for name in names:
        value = record.get(name)
        value = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{place}: {name}", repr(value)[:80], "a string or a list of strings")
        strings += [whole(item.strip(), f"{place}: {name}") for item in value]
    return tuple(dict.fromkeys(filter(None, strings)))


def _key(place: str, record: Record, image: str, number: int) -> str:
    """The item's key: that of the record, else the path of its image, else the number of its line."""
    key = record.get("key")
    if not isinstance(key, str | int | float | None) or isinstance(key, bool):
        raise InputError(f"{place}: key", repr(key)[:80], "a string or a number")
    # Normalised, so that one image under two spellings of its path is not in both the training and the test set.
    own = os.path.normpath(image) if image else f"line {number}"
    return own if key is None or key == "" else str(key)


def _value(place: str, record: Record, column: str) -> str:
    """The item's value in the column by which the partition distributes items."""
    value = record.get(column)
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise InputError(f"{place}: {column}", repr(value)[:80], "a text or a whole number for every item")
    return whole(str(value).strip(), f"{place}: {column}")


def _contains_root(path: Path, root: Path) -> bool:
    """Whether ``path`` is the manifest's root folder or above it, so that it cannot be a folder of frames."""
    normal, start = (Path(os.path.normpath(each.absolute())) for each in (path, root))
    return normal == start or normal in start.parents


@dataclass
class Item:
    """One item, of one or several lines.

    Args:
        line: number of its first line.
        file: its image, video or folder of frames; None if it has none.
        split: name of its split; empty if it has none.
        value: its value of the column by which the partition distributes items; empty without one.
        captions: its distinct captions in order, as keys.
        labels: its distinct labels in order, as keys.
    """

    line: int
    file: Path | None
    split: str
    value: str
    captions: dict[str, None] = field(default_factory=dict)
    labels: dict[str, None] = field(default_factory=dict)


def items_of(path: Path, root: Path, column: str | None, *, strict: bool = True) -> dict[str, Item]:
    """The items of a file by key, in file order.

    Args:
        path: the file.
        root: folder that the paths of images are relative to.
        column: column by which the partition assigns the items; None without one.
        strict: refuse unknown fields; otherwise they are ignored.

    Raises:
        InputError: a line is malformed, lines of one item differ in image, split or column, or an item has neither
            image nor caption.
    """
    items: dict[str, Item] = {}
    more = (column,) if column is not None else tuple[str, ...]()
    for number, record in READERS[path.suffix.lower()](path, more, strict=strict):
        place = f"{path}: line {number}"
        image, file = _image(place, record, root)
        key, split = _key(place, record, image, number), record.get("split")
        split = "" if split is None else str(split).strip()
        value = "" if column is None else _value(place, record, column)
        item = items.setdefault(key, Item(number, file, split, value))
        item.file = item.file or file
        if file and item.file and os.path.normpath(file) != os.path.normpath(item.file):
            allowed = f"{item.file}, as in line {item.line}, or another key"
            raise InputError(f"{place}: image of the item {key!a}", image, allowed)
        if split != item.split:
            allowed = f"{item.split or 'nothing'}, as in line {item.line} for {key!a}: an item is in one split"
            raise InputError(f"{place}: split", split or "nothing", allowed)
        if value != item.value:
            raise InputError(f"{place}: {column}", value, f"{item.value}, as in line {item.line} for {key!a}")
        item.captions.update(dict.fromkeys(_strings(place, record, *CAPTIONS)))
        item.labels.update(dict.fromkeys(_strings(place, record, "labels", "label")))
    for item in items.values():
        if item.file is None and not item.captions:
            raise InputError(f"{path}: line {item.line}: image", "neither an image nor a caption", "one of them")
    return items


def _image(place: str, record: Record, root: Path) -> tuple[str, Path | None]:
    """An item's image as written, and the file; empty and None if it has none."""
    image = record.get("image")
    if image is None or (isinstance(image, str) and not image.strip()):
        return "", None
    if not isinstance(image, str):
        raise InputError(f"{place}: image", repr(image)[:80], "the path of an image")
    image = whole(image.strip(), f"{place}: image")
    file = root / image
    if _contains_root(file, root):
        raise InputError(f"{place}: image", image, "the path of an image, a video or a folder of frames")
    return image, file


READERS = {".csv": _csv, ".tsv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl}


def read_manifest(data: Data) -> RawSet:
    """Read the items in file order.

    Raises:
        InputError: the file is malformed (the message gives line and field), or only some items have a split.
    """
    path = data.path
    if path is None or path.suffix.lower() not in READERS:
        raise InputError("data.path", str(path), f"a file {', '.join(READERS)}")
    return of_items(str(path), items_of(path, data.images or path.parent, checked_column(data)), data)


def checked_column(data: Data) -> str | None:
    """``data.column``, which must not be a field with a meaning.

    Raises:
        InputError: it is.
    """
    if data.column in KNOWN:
        raise InputError("partition.column", data.column, f"a column of its own, not one of {', '.join(KNOWN)}")
    return data.column


def of_items(path: str, items: Mapping[str, Item], data: Data) -> RawSet:
    """The set of a file's items.

    Args:
        path: the file or folder, for error messages.
        items: items by key, in order.
        data: the scenario's data section.

    Raises:
        InputError: only some items have a split, or a split is unknown.
    """
    lines, paths = [item.line for item in items.values()], [item.file for item in items.values() if item.file]
    splits = [item.split for item in items.values()]
    if any(splits) and not all(splits):
        raise InputError(
            f"{path}: line {lines[splits.index('')]}: split", "nothing", "a split for every item or for none"
        )
    hot, names = multi_hot([tuple(item.labels) for item in items.values()])
    folders = any(file.suffix.lower() not in IMAGE_ENDINGS | VIDEO_ENDINGS and is_folder(file) for file in paths)
    videos = folders or any(file.suffix.lower() in VIDEO_ENDINGS for file in paths)
    return checked(
        RawSet(
            place=path,
            keys=tuple(items),
            images=_images([item.file for item in items.values()], data.frames if videos else 1, folders),
            captions=tuple(tuple(item.captions) for item in items.values()),
            labels=hot,
            label_names=names,
            split=split_numbers(path, splits, {"validation": "val", "valid": "val"}, lines) if any(splits) else None,
            column=tuple(item.value for item in items.values()) if data.column is not None else None,
            unpaired=True,
        )
    )


def _images(files: Sequence[Path | None], frames: int, folders: bool) -> ImageFiles | ImagesWithGaps:
    """The items' images, of which some may have none."""
    held = [file for file in files if file is not None]
    images, places = ImageFiles(tuple(held), frames, folders), iter(range(len(held)))
    if len(held) == len(files):
        return images
    return ImagesWithGaps(images, tuple(None if file is None else next(places) for file in files))
