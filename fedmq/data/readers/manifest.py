"""Read any data set described by a CSV or JSONL file with the image, captions, labels and split of each item.

CSV: a header line with ``image`` and any of ``captions`` (or ``caption``), ``labels``, ``split``, ``key``. Several
captions or labels of an item are separated by ``|``; captions may also have several columns. JSONL: one object per line
with the same fields; captions and labels are a string or a list. Videos and folders of frames are read as for MSR-VTT.
Relative paths are relative to the file's folder.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, multi_hot, read_text, whole
from fedmq.data.splits import split_numbers
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS, Files, is_folder
from fedmq.errors import InputError

CAPTIONS = ("captions", "caption")
KNOWN = ("image", *CAPTIONS, "labels", "label", "split", "key")

#: Field values of one item by name, not yet validated.
Record = Mapping[str, object]


def _csv(path: Path, more: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = next(reader, [])
        twice = [name for name, count in Counter(header).items() if count > 1 and name not in CAPTIONS]
        if twice:
            raise InputError(
                f"{path}: line 1", f"{twice[0]!r} twice", "each column once; only captions may have several"
            )
        if unknown := [name for name in header if name not in (*KNOWN, *more)]:
            raise InputError(f"{path}: line 1", unknown[0], f"fields {', '.join((*KNOWN, *more))}")
        if header and "image" not in header:
            raise InputError(f"{path}: line 1", f"columns {', '.join(header)}", "a column image, with paths of images")
        for fields in reader:
            if not fields:
                continue
            # A truncated line would silently lose labels.
            if len(fields) != len(header):
                allowed = f"as many fields as the header has, {len(header)}"
                raise InputError(f"{path}: line {reader.line_num}", f"{len(fields)} fields", allowed)
            single, several = dict[str, str](), dict[str, list[str]]()
            for name, value in zip(header, fields, strict=True):
                if name in ("image", "split", "key", *more):
                    single[name] = value
                else:
                    # Columns `captions` and `caption` are joined in column order.
                    several.setdefault(CAPTIONS[0] if name in CAPTIONS else name, []).extend(value.split("|"))
            yield reader.line_num, {**single, **several}
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}", str(error), "valid CSV") from None


def _unique_fields(pairs: list[tuple[str, object]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} twice")
    return record


def _jsonl(path: Path, _more: tuple[str, ...]) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line, object_pairs_hook=_unique_fields)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number}", str(error), "valid JSON, each field once") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number}", type(record).__name__, "an object")
            yield number, record


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


def _key(place: str, record: Record, image: str) -> str:
    key = record.get("key")
    if not isinstance(key, str | int | float | None) or isinstance(key, bool):
        raise InputError(f"{place}: key", repr(key)[:80], "a string or a number")
    # Normalised, so that one picture under two spellings of its path is not in both the training and the test set.
    return os.path.normpath(image) if key is None or key == "" else str(key)


def _value(place: str, record: Record, column: str) -> str:
    """The item's value in the column that the partition deals by."""
    value = record.get(column)
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise InputError(f"{place}: {column}", repr(value)[:80], "a text or a whole number for every item")
    return whole(str(value).strip(), f"{place}: {column}")


def _contains_root(path: Path, root: Path) -> bool:
    """Whether ``path`` is the manifest's root folder or above it, so that it cannot be a folder of frames."""
    normal, start = (Path(os.path.normpath(each.absolute())) for each in (path, root))
    return normal == start or normal in start.parents


def read_manifest(data: Data) -> RawSet:
    """Read the items in file order.

    Raises:
        InputError: the file is malformed (the message gives line and field), or only some items have a split.
    """
    path = data.path
    readers = {".csv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl}
    if path is None or path.suffix.lower() not in readers:
        raise InputError("data.path", str(path), "a .csv or .jsonl file")
    if data.column in KNOWN:
        raise InputError("partition.column", data.column, f"a column of its own, not one of {', '.join(KNOWN)}")
    more = () if data.column is None else (data.column,)
    root = data.images or path.parent
    keys: dict[str, int] = {}
    paths, captions, labels, splits, values = [], [], [], [], []
    for number, record in readers[path.suffix.lower()](path, more):
        place = f"{path}: line {number}"
        if unknown := [name for name in record if name not in (*KNOWN, *more)]:
            raise InputError(place, str(unknown[0]), f"fields {', '.join((*KNOWN, *more))}")
        image = record.get("image")
        if not isinstance(image, str) or not image.strip():
            raise InputError(f"{place}: image", image, "the path of an image")
        image = whole(image.strip(), f"{place}: image")
        path_of = root / image
        if _contains_root(path_of, root):
            raise InputError(f"{place}: image", image, "the path of an image, a video or a folder of frames")
        key = _key(place, record, image)
        if key in keys:
            allowed = "every item once, with all its captions; or a different key for each"
            raise InputError(place, f"{key!a} again, as in line {keys[key]}", allowed)
        keys[key] = number
        paths.append(path_of)
        captions.append(_strings(place, record, *CAPTIONS))
        labels.append(_strings(place, record, "labels", "label"))
        values += [_value(place, record, column) for column in more]
        split = record.get("split")
        splits.append("" if split is None else str(split).strip())
    lines = tuple(keys.values())
    if any(splits) and not all(splits):
        raise InputError(
            f"{path}: line {lines[splits.index('')]}: split", "nothing", "a split for every item or for none"
        )
    hot, names = multi_hot(labels)
    folders = any(file.suffix.lower() not in IMAGE_ENDINGS | VIDEO_ENDINGS and is_folder(file) for file in paths)
    videos = folders or any(file.suffix.lower() in VIDEO_ENDINGS for file in paths)
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(keys),
            pictures=Files(tuple(paths), root, data.frames if videos else 1, folders),
            captions=tuple(captions),
            labels=hot,
            label_names=names,
            split=split_numbers(str(path), splits, {"validation": "val", "valid": "val"}, lines)
            if any(splits)
            else None,
            column=tuple(values) if more else None,
        )
    )
