"""Read a user's own images and captions: a list in CSV, TSV or JSONL, or a folder.

CSV: a header line with ``image``, ``captions`` (or ``caption``) or both, and any of ``labels``, ``split``, ``key``.
An item may lack its image or its captions; their fields are then empty. Several captions or labels of an item are
separated by ``|`` or written as a list (``['dog', 'sky']``, as pandas does); captions may also have several columns.
TSV: the same, with tabs. JSONL: one object per line with the same fields; captions and labels are a string or a list.
Lines of one image, or of one key, are one item with the captions and labels of all of them. Videos and folders of
frames are read as for MSR-VTT. Relative paths are relative to the file's folder.

The columns of other programs are understood, too: ``filepath`` and ``title`` of open_clip, ``file_name`` and ``text``
of Hugging Face. A ``title`` or ``text`` is one caption, whatever characters are in it.

A folder has such a list, ``metadata.csv`` or ``metadata.jsonl``, or a text file next to each image.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, folder_of, not_read, read_text, refuse_keys, whole
from fedmq.data.splits import SPLIT_NAMES, split_numbers, splits_of_names
from fedmq.encoders.image_sets import ImageFiles, ImagesWithGaps, files_below, is_folder, is_leftover
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS
from fedmq.errors import InputError

#: Fields with the path of the image, the first of which is this project's own.
IMAGES = ("image", "filepath", "file_name")
#: Fields with one caption, in the files of other programs.
SINGLE_CAPTIONS = ("title", "text")
CAPTIONS = ("captions", "caption", *SINGLE_CAPTIONS)
LABELS = ("labels", "label")
KNOWN = (*IMAGES, *CAPTIONS, *LABELS, "split", "key")
#: Lists of captions in a folder of images.
METADATA = ("metadata.csv", "metadata.jsonl")
_UNLISTED = "images that the list does not name"


# --- lines of a list ------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """The fields of a line, not yet validated."""

    place: str  # file and number of the line, for error messages
    number: int  # number of the line
    captions: list[str] = field(default_factory=list)  # captions in order
    labels: list[str] = field(default_factory=list)  # labels in order
    # Values of the other fields by name; the path of the image is ``image``.
    others: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, value: object, *, cell: bool) -> None:
        """Add a field; ``cell``: the value is a cell of a table, which may hold several captions or labels."""
        place = f"{self.place}: {name}"
        if name in IMAGES:
            self.others["image"] = value
        elif name in SINGLE_CAPTIONS and isinstance(value, str):
            self.captions += [] if cell and value.strip() in MISSING else [value]
        elif name in CAPTIONS:
            self.captions += captions_in_cell(place, str(value)) if cell else texts_of(place, value)
        elif name in LABELS:
            self.labels += labels_in_cell(place, str(value)) if cell else texts_of(place, value, label=True)
        else:
            self.others[name] = value


def _in_table(path: Path, more: tuple[str, ...], *, strict: bool) -> Iterator[Line]:
    text = read_text(path)
    # Files of open_clip have tabs, whatever their extension.
    tabs = path.suffix.lower() == ".tsv" or "\t" in text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if tabs else ",", strict=True)
    try:
        header = next(reader, [])
        known = _known(f"{path}: line 1", header, more, strict=strict)
        if header and not {*IMAGES, *CAPTIONS} & known:
            allowed = "a column image, with paths of images, or captions"
            raise InputError(f"{path}: line 1", f"columns {', '.join(header)}", allowed)
        for fields in filter(None, reader):
            line = Line(f"{path}: line {reader.line_num}", reader.line_num)
            # A truncated line would silently lose labels.
            if len(fields) != len(header):
                allowed = f"as many fields as the header has, {len(header)}"
                raise InputError(line.place, f"{len(fields)} fields", allowed)
            for name, value in zip(header, fields, strict=True):
                if name in known:
                    line.add(name, value, cell=True)
            yield line
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}", str(error), "valid CSV") from None


def _unique_fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{twice[0]!r} twice")
    return dict(pairs)


def _in_objects(path: Path, more: tuple[str, ...], *, strict: bool) -> Iterator[Line]:
    for number, text in enumerate(read_text(path).split("\n"), 1):
        if not text.strip():
            continue
        line = Line(f"{path}: line {number}", number)
        try:
            record = json.loads(text, object_pairs_hook=_unique_fields)
        except ValueError as error:
            raise InputError(line.place, str(error), "valid JSON, each field once") from None
        if not isinstance(record, dict):
            raise InputError(line.place, type(record).__name__, "an object")
        known = _known(line.place, list(record), more, strict=strict)
        for name in dict.fromkeys((*CAPTIONS, *record)):
            if name in known:
                line.add(name, record[name], cell=False)
        yield line


def _known(place: str, names: Sequence[str], more: tuple[str, ...], *, strict: bool) -> set[str]:
    """The fields that are read; refuses those given twice and, unless other programs made the list, unknown ones."""
    twice = [name for name, count in Counter(names).items() if count > 1 and name not in CAPTIONS]
    if twice:
        raise InputError(place, f"{twice[0]!r} twice", "each column once; only captions may have several")
    if len(named := [name for name in names if name in IMAGES]) > 1:
        raise InputError(place, f"{' and '.join(named)}", "one field with the path of the image")
    allowed = (*KNOWN, *more)
    if strict and (unknown := [name for name in names if name not in allowed]):
        raise InputError(place, unknown[0], f"fields {', '.join(allowed)}")
    return set(names) & set(allowed)


READERS = {".csv": _in_table, ".tsv": _in_table, ".jsonl": _in_objects, ".ndjson": _in_objects}


# --- items ----------------------------------------------------------------------------------------------------------


@dataclass
class Item:
    """One item, of one or several lines."""

    line: int  # number of its first line
    file: Path | None  # its image, video or folder of frames; None if it has none
    split: str  # name of its split; empty if it has none
    value: str  # its value of the column by which the partition distributes items; empty without one
    captions: dict[str, None] = field(default_factory=dict)  # its distinct captions in order, as keys
    labels: dict[str, None] = field(default_factory=dict)  # its distinct labels in order, as keys
    # Names of the folders in which it is, from the folder that is read; empty for the items of a list.
    folders: tuple[str, ...] = ()


def items_of(path: Path, root: Path, column: str | None, *, strict: bool = True) -> dict[str, Item]:
    """The items of a file by key, in file order; unknown fields are refused if ``strict``, otherwise ignored.

    Raises:
        InputError: a line is malformed, lines of one item differ in image, split or column, or an item has neither
            image nor caption.
    """
    items: dict[str, Item] = {}
    for line in READERS[path.suffix.lower()](path, () if column is None else (column,), strict=strict):
        image, file = _image(line, root)
        key, split = _key(line, image), line.others.get("split")
        split = "" if split is None else str(split).strip()
        value = "" if column is None else _value(line, column)
        item = items.setdefault(key, Item(line.number, file, split, value))
        item.file = item.file or file
        if file and item.file and os.path.normpath(file) != os.path.normpath(item.file):
            allowed = f"{item.file}, as in line {item.line}, or another key"
            raise InputError(f"{line.place}: image of the item {key!a}", image, allowed)
        for name, given, before in (("split", split, item.split), (column or "", value, item.value)):
            if given != before:
                allowed = f"{before or 'nothing'}, as in line {item.line} for {key!a}"
                raise InputError(f"{line.place}: {name}", given or "nothing", allowed)
        item.captions.update(dict.fromkeys(filter(None, map(str.strip, line.captions))))
        item.labels.update(dict.fromkeys(filter(None, map(str.strip, line.labels))))
    for item in items.values():
        if item.file is None and not item.captions:
            raise InputError(f"{path}: line {item.line}: image", "neither an image nor a caption", "one of them")
    return items


def _image(line: Line, root: Path) -> tuple[str, Path | None]:
    """An item's image as written, and the file; empty and None if it has none."""
    image = line.others.get("image") or ""
    if not isinstance(image, str):
        raise InputError(f"{line.place}: image", repr(image)[:80], "the path of an image")
    if not (image := image.strip()):
        return "", None
    file, start = (Path(os.path.normpath(path.absolute())) for path in (root / image, root))
    if file == start or file in start.parents:  # it cannot be a folder of frames
        raise InputError(f"{line.place}: image", image, "the path of an image, a video or a folder of frames")
    return image, root / image


def _key(line: Line, image: str) -> str:
    """The item's key: that of the line, else the path of its image, else the number of its line."""
    key = line.others.get("key")
    if not isinstance(key, str | int | float | None) or isinstance(key, bool):
        raise InputError(f"{line.place}: key", repr(key)[:80], "a string or a number")
    # Normalised, so that one image under two spellings of its path is not in both the training and the test set.
    own = os.path.normpath(image) if image else f"line {line.number}"
    return own if key is None or key == "" else str(key)


def _value(line: Line, column: str) -> str:
    """The item's value in the column by which the partition distributes items."""
    value = line.others.get(column)
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise InputError(f"{line.place}: {column}", repr(value)[:80], "a text or a whole number for every item")
    return whole(str(value).strip(), f"{line.place}: {column}")


def read_manifest(data: Data) -> RawSet:
    """Read the items in file order.

    Raises:
        InputError: the file is malformed (the message gives line and field), or only some items have a split.
    """
    path = data.path
    if path is None or path.suffix.lower() not in READERS:
        raise InputError("data.path", str(path), f"a file {', '.join(READERS)}")
    raw = _of_items(str(path), items_of(path, data.images or path.parent, _checked_column(data)), data)
    images = raw.images.held if isinstance(raw.images, ImagesWithGaps) else raw.images
    files = images.paths if isinstance(images, ImageFiles) else ()
    beside = {each for folder in {file.parent for file in files} for each in _images_in(folder)}.difference(files)
    unlisted = tuple(sorted(os.path.relpath(each, path.parent) for each in beside))
    names, remark = splits_of_names([file.parent.parts[-2:] for file in files]) if raw.split is None else (None, "")
    if names is not None:
        remark = "folders of the images look like splits, but only a column split is read"
    return replace(raw, ignored={_UNLISTED: unlisted} if unlisted else {}, split_remark=remark)


def _images_in(folder: Path) -> list[Path]:
    """The image files in a folder; none if it does not exist."""
    found = [each for each in folder.iterdir() if each.suffix.lower() in IMAGE_ENDINGS] if is_folder(folder) else []
    return [each for each in found if not is_leftover(each.name)]


def _checked_column(data: Data) -> str | None:
    """``data.column``, which must not be a field with a meaning."""
    if data.column in KNOWN:
        raise InputError("partition.column", data.column, f"a column of its own, not one of {', '.join(KNOWN)}")
    return data.column


def _of_items(path: str, items: Mapping[str, Item], data: Data) -> RawSet:
    """The set of a file's or folder's items."""
    lines, files = [item.line for item in items.values()], [item.file for item in items.values()]
    held, splits = [file for file in files if file is not None], [item.split for item in items.values()]
    if any(splits) and not all(splits):
        place = f"{path}: line {lines[splits.index('')]}: split"
        raise InputError(place, "nothing", "a split for every item or for none")
    folders = any(file.suffix.lower() not in IMAGE_ENDINGS | VIDEO_ENDINGS and is_folder(file) for file in held)
    videos = folders or any(file.suffix.lower() in VIDEO_ENDINGS for file in held)
    images = ImageFiles(tuple(held), data.frames if videos else 1, folders)
    places = iter(range(len(held)))
    gaps = ImagesWithGaps(images, tuple(None if file is None else next(places) for file in files))
    return checked(
        RawSet(
            place=path,
            keys=tuple(items),
            images=images if len(held) == len(files) else gaps,
            captions=tuple(tuple(item.captions) for item in items.values()),
            split=split_numbers(path, splits, SPLIT_NAMES, lines) if any(splits) else None,
            column=tuple(item.value for item in items.values()) if data.column is not None else None,
            unpaired=True,
        ),
        [tuple(item.labels) for item in items.values()],
    )


# --- folders --------------------------------------------------------------------------------------------------------


def read_folder(data: Data) -> RawSet:
    """Read the images below a folder, in the order of their paths or of their list.

    With ``metadata.csv`` or ``metadata.jsonl`` in the folder, or else in folders below it, such as ``train`` and
    ``test``, these lists have the captions, as in an imagefolder of Hugging Face. Otherwise ``a.txt`` has the captions
    of ``a.jpg``, one per line. Names of folders can say the split.

    Raises:
        InputError: there is no image with a caption, a list is malformed, or names a file outside of its folder, or
            a link leads to a folder outside of it.
    """
    folder = folder_of(data)
    lists = _lists(folder)
    if lists:
        refuse_keys(data, ("images", "annotations"), "a folder with metadata.csv or metadata.jsonl")
        items = _listed(folder, lists, _checked_column(data))
        raw = _of_items(str(folder), items, data)
        raw = raw if raw.split is not None else raw.split_by_names([item.folders for item in items.values()])
        used = [item.file for item in items.values() if item.file is not None]
        return replace(raw, ignored={**raw.ignored, **not_read(folder, [*used, *lists])})
    refuse_keys(data, ("images", "column"), "a folder of images with .txt files")
    return _beside(folder, data.annotations or folder, images_alone=data.missing == "keep")


def _lists(folder: Path) -> list[Path]:
    """The lists of captions: that of the folder, or those of the folders below it."""
    found = sorted(path for path in files_below(folder) if path.name in METADATA)
    for inside, count in Counter(path.parent for path in found).items():
        if count > 1:
            raise InputError(str(inside), " and ".join(METADATA), "one of the two")
    return [path for path in found if path.parent == folder] or found


def _listed(folder: Path, lists: Sequence[Path], column: str | None) -> dict[str, Item]:
    """The items of all lists, by key."""
    items: dict[str, Item] = {}
    for path in lists:
        inside = path.parent
        for key, item in items_of(path, inside, column, strict=False).items():
            check_inside(f"{path}: line {item.line}: file_name", item.file, inside)
            own = "" if inside == folder else f"{inside.relative_to(folder).as_posix()}/"
            here = inside if item.file is None else Path(os.path.normpath(item.file)).parent
            items[own + key] = replace(item, folders=here.relative_to(os.path.normpath(folder)).parts)
    return items


def check_inside(place: str, file: Path | None, folder: Path) -> None:
    """Refuse the path of an image that leaves its folder; such lists come from elsewhere."""
    if file is not None and not Path(os.path.normpath(file)).is_relative_to(os.path.normpath(folder)):
        raise InputError(place, os.path.relpath(file, folder), "the path of an image in the folder")


def _beside(folder: Path, texts: Path, *, images_alone: bool) -> RawSet:
    """The images below a folder with the captions in the text files of the same names below ``texts``.

    ``images_alone``: there may be no caption at all.
    """
    images = sorted(path for path in files_below(folder, leave=False) if path.suffix.lower() in IMAGE_ENDINGS)
    if not images:
        raise InputError(str(folder), "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
    found = (path for path in files_below(texts, leave=False) if path.suffix == ".txt")
    written = {path.relative_to(texts).with_suffix(""): path for path in found}
    inner = [path.relative_to(folder) for path in images]
    captions = [_captions(written.get(path.with_suffix(""))) for path in inner]
    if not any(captions) and not images_alone:
        allowed = (
            "a text file next to each image (a.txt for a.jpg) with one caption per line, or metadata.csv; "
            "data.missing: keep uses images without captions"
        )
        raise InputError(str(folder), f"{len(images)} images, none with captions", allowed)
    keys = tuple(path.as_posix() for path in inner)
    with_image = {path.with_suffix("") for path in inner}
    alone = tuple(f"{stem.as_posix()}.txt" for stem in sorted(written) if stem not in with_image)
    ignored = {"text files without an image next to them": alone} if alone else {}
    ignored |= not_read(folder, [*images, *written.values()])
    raw = checked(RawSet(str(folder), keys, ImageFiles(tuple(images)), tuple(captions), ignored=ignored))
    return raw.split_by_names([path.parent.parts for path in inner])


def _captions(path: Path | None) -> tuple[str, ...]:
    """The captions in a text file, one per line; none without a file."""
    return () if path is None else lines_of(read_text(path))


# --- captions and labels in one field: a cell such as ``dog|sky`` or ``['dog', 'sky']``, or a value of JSON ----------


_TEXT = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?"
_BRACKETS = ("[]", "()", "{}")
_LIST_START = re.compile(r"[\[({]\s*b?['\"]|b['\"]|(?:array|frozenset|set|tuple|list|Index)\(")
#: Commas and semicolons, also those of Chinese, Japanese and Arabic; tags next to each other.
_SEPARATOR = re.compile(r"[,;\t\n\uff0c\u3001\uff1b\u060c\u061b]|(?<=[^\s<>]>)\s*(?=<[^\s<>])")
#: How pandas writes a missing value as text.
MISSING = ("nan", "NaN", "<NA>")


def _list_of(item: str) -> re.Pattern[str]:
    """A list, tuple or set with commas between its items, as Python, pandas and JSON write it."""
    return re.compile(rf"[\[({{]\s*(?:{item}\s*(?:,\s*{item}\s*)*,?\s*)?[\])}}]", re.DOTALL)


_TEXTS, _TEXTS_OR_NUMBERS = _list_of(_TEXT), _list_of(f"(?:{_TEXT}|{_NUMBER})")
_ITEM = re.compile(f"{_TEXT}|{_NUMBER}", re.DOTALL)


def captions_in_cell(place: str, cell: str) -> list[str]:
    """The captions in a cell: separated by ``|``, or a list of quoted texts; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like a list of another form, which would be mistaken for one caption.
    """
    found = _list_in(place, cell, _TEXTS)
    return [text for text in cell.split("|") if text.strip() not in MISSING] if found is None else found


def labels_in_cell(place: str, cell: str) -> list[str]:
    """The labels in a cell: separated by ``|``, or a list; none if the cell says ``nan``.

    Raises:
        InputError: the cell looks like several labels of another form, which would be mistaken for one label.
    """
    found = _list_in(place, cell, _TEXTS_OR_NUMBERS)
    if found is None and "|" not in cell:
        _one_label(place, cell)
    return [name for name in cell.split("|") if name.strip() not in MISSING] if found is None else found


def texts_of(place: str, value: object, *, label: bool = False) -> list[str]:
    """The texts that a value of JSON or of a table with types holds: one, a list, or none; labels may be numbers.

    Raises:
        InputError: it holds something else, or a text that looks like several.
    """
    several = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(text, (str, int) if label else str) or isinstance(text, bool) for text in several):
        raise InputError(place, repr(value)[:80], "a text or a list of texts")
    texts = [str(text) for text in several]
    for text in texts:
        if label and _list_in(place, text, _TEXTS_OR_NUMBERS) is not None:
            raise InputError(place, text[:80], "a list, not a text that holds a list")
        if label and not isinstance(value, list):
            _one_label(place, text)
        # Captions may be any text, but for one that is a list as a whole.
        if not label and text[:1] in ("[", "(", "{") and _TEXTS.fullmatch(text.strip()) and _ITEM.search(text):
            raise InputError(place, text[:80], "a list of texts, not a text that holds a list")
    return [stripped for text in texts if (stripped := text.strip())]


def lines_of(text: str) -> tuple[str, ...]:
    """The captions or labels in a text file, one per line, without empty lines and repetitions."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def _one_label(place: str, text: str) -> None:
    """Refuse a text that looks like several labels."""
    if separator := re.search(r"\|", text) or _SEPARATOR.search(text.strip()):
        part = f"{separator[0]!r} is" if separator[0] else "the brackets are"
        allowed = f"labels separated by | in a table, a list in JSON; if {part} part of one label, it ends with |"
        raise InputError(place, text[:80], f"{allowed} or is in a list")


def _list_in(place: str, cell: str, pattern: re.Pattern[str]) -> list[str] | None:
    """Items of a list in a text; None if the text is not a list."""
    text = cell.strip()
    bracketed = text[:1] + text[-1:] in _BRACKETS
    if bracketed and pattern.fullmatch(text):
        try:
            return [_item_value(item) for item in _ITEM.findall(text)]
        except (ValueError, SyntaxError):  # an escape that does not exist
            pass
    elif not _LIST_START.match(text) and not (bracketed and pattern is _TEXTS_OR_NUMBERS):
        return None
    raise InputError(place, text[:80], "texts separated by |, or a list of quoted texts such as ['dog', 'sky']")


def _item_value(item: str) -> str:
    """An item of a list: JSON where it is JSON, whose escapes of two halves of a character Python does not know."""
    try:
        return str(json.loads(item))
    except ValueError:
        return str(literal_eval(item))
