"""Any other set: one CSV or JSONL file that says of each item its image, captions, labels and split.

CSV: a header line with ``image`` and any of ``captions`` (or ``caption``), ``labels``, ``split``, ``key``; several
captions or labels of one item are separated by ``|``. JSONL: one object a line with the same names, where captions and
labels are a string or a list. Videos are read like MSR-VTT's. Relative paths start at the file's folder.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedmq.data.pictures import VIDEO_ENDINGS, Files
from fedmq.data.raw import RawSet, checked, multi_hot, read_text, split_numbers
from fedmq.errors import InputError
from fedmq.scenario import Data

KNOWN = ("image", "captions", "caption", "labels", "label", "split", "key")


def _csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(io.StringIO(read_text(path, "utf-8-sig"), newline=""), restkey="too many", strict=True)
    try:
        for record in reader:
            if "too many" in record:
                raise InputError(f"{path}: line {reader.line_num}", record["too many"], "as many fields as the header")
            listed = {
                name: (value or "").split("|")
                for name, value in record.items()
                if name not in ("image", "split", "key")
            }
            yield reader.line_num, {**record, **listed}
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}", str(error), "valid CSV") from None


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number}", str(error), "valid JSON") from None
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number}", type(record).__name__, "an object")
            yield number, record


def _strings(place: str, record: dict[str, Any], *names: str) -> tuple[str, ...]:
    value: Any = next((record[name] for name in names if record.get(name) is not None), [])
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{place}: {names[0]}", repr(value)[:80], "a string or a list of strings")
    return tuple(dict.fromkeys(item.strip() for item in value if item.strip()))


def read_manifest(data: Data) -> RawSet:
    """The items in the file's order.

    Raises:
        InputError: the file is of another form (line and field are named), or only some items have a split.
    """
    path = data.path
    readers = {".csv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl}
    if path is None or path.suffix.lower() not in readers:
        raise InputError("data.path", str(path), "a .csv or .jsonl file")
    root = data.images or path.parent
    keys, paths, captions, labels, splits = [], [], [], [], []
    for number, record in readers[path.suffix.lower()](path):
        place = f"{path}: line {number}"
        if unknown := [name for name in record if name not in KNOWN]:
            raise InputError(place, str(unknown[0]), f"fields {', '.join(KNOWN)}")
        image = record.get("image")
        if not isinstance(image, str) or not image.strip():
            raise InputError(f"{place}: image", image, "the path of an image")
        keys.append(str(record.get("key") or image))
        paths.append(root / image.strip())
        captions.append(_strings(place, record, "captions", "caption"))
        labels.append(_strings(place, record, "labels", "label"))
        splits.append(str(record.get("split") or ""))
    if any(splits) and not all(splits):
        raise InputError(f"{path}: split", f"nothing for item {splits.index('')}", "a split for every item or for none")
    hot, names = multi_hot(labels)
    videos = any(file.suffix.lower() in VIDEO_ENDINGS for file in paths)
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(keys),
            pictures=Files(tuple(paths), root, data.frames if videos else 1),
            captions=tuple(captions),
            labels=hot,
            label_names=names,
            split=split_numbers(str(path), splits, {"validation": "val", "valid": "val"}) if any(splits) else None,
        )
    )
