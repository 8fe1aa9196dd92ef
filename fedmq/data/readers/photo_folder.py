"""Read a folder of images with captions: ``.txt`` files next to the images, or Hugging Face's ``metadata.csv``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, folder_of, read_text, refuse_keys
from fedmq.data.readers.manifest import Item, checked_column, items_of, of_items
from fedmq.data.splits import SPLIT_NAMES, split_numbers
from fedmq.encoders.image_sets import ImageFiles, files_below
from fedmq.encoders.images import IMAGE_ENDINGS
from fedmq.errors import InputError
from fedmq.storage.regular_files import check_regular

METADATA = ("metadata.csv", "metadata.jsonl")
#: Maximum size of the text file with an image's captions [bytes].
MAX_CAPTIONS = 1 << 20


def read_folder(data: Data) -> RawSet:
    """Read the images below a folder, in the order of their paths or of their list.

    With ``metadata.csv`` or ``metadata.jsonl`` in the folder, or in each of its folders ``train``, ``validation`` and
    ``test``, that list has the captions, as in an imagefolder of Hugging Face. Otherwise ``a.txt`` has the captions of
    ``a.jpg``, one per line.

    Raises:
        InputError: there is no image with a caption, a list is malformed, or names a file outside of its folder, or
            a link leads to a folder outside of it.
    """
    folder = folder_of(data)
    lists = _lists(folder)
    if lists:
        refuse_keys(data, ("images", "annotations"), "a folder with metadata.csv or metadata.jsonl")
        return of_items(str(folder), _listed(folder, lists, checked_column(data)), data)
    refuse_keys(data, ("images", "column"), "a folder of images with .txt files")
    return _beside(folder, data.annotations or folder, images_alone=data.missing == "keep")


def _lists(folder: Path) -> list[Path]:
    """The lists of captions: that of the folder, or those of the folders of its splits."""
    folders = [folder, *sorted(path for path in folder.iterdir() if path.name in SPLIT_NAMES and path.is_dir())]
    found = [[inside / name for name in METADATA if (inside / name).exists()] for inside in folders]
    for inside, names in zip(folders, found, strict=True):
        if len(names) > 1:
            raise InputError(str(inside), " and ".join(path.name for path in names), "one of the two")
    return found[0] or [path for names in found[1:] for path in names]


def _listed(folder: Path, lists: Sequence[Path], column: str | None) -> dict[str, Item]:
    """The items of all lists, by key; those of a split's folder are in that split, unless there is one only."""
    items: dict[str, Item] = {}
    for path in lists:
        inside = path.parent
        for key, item in items_of(path, inside, column, strict=False).items():
            check_inside(f"{path}: line {item.line}: file_name", item.file, inside)
            if inside == folder:
                items[key] = item
            else:
                split = SPLIT_NAMES[inside.name] if len(lists) > 1 else item.split
                items[f"{inside.name}/{key}"] = replace(item, split=split)
    return items


def check_inside(place: str, file: Path | None, folder: Path) -> None:
    """Refuse the path of an image that leaves its folder; such lists come from elsewhere."""
    if file is not None and not Path(os.path.normpath(file)).is_relative_to(os.path.normpath(folder)):
        raise InputError(place, os.path.relpath(file, folder), "the path of an image in the folder")


def _beside(folder: Path, texts: Path, *, images_alone: bool) -> RawSet:
    """The images below a folder with the captions in the text files of the same names.

    Args:
        folder: the folder of the images.
        texts: the folder of the text files.
        images_alone: whether there may be no caption at all.
    """
    inside = files_below(folder, leave=False)
    images = sorted(path for path in inside if path.suffix.lower() in IMAGE_ENDINGS)
    if not images:
        raise InputError(str(folder), "no image", f"a folder with {', '.join(sorted(IMAGE_ENDINGS))}")
    found = (path for path in files_below(texts, leave=False) if path.suffix == ".txt")
    written = {path.relative_to(texts).with_suffix(""): path for path in found}
    inner = [path.relative_to(folder) for path in images]
    captions = [_lines(written.get(path.with_suffix(""))) for path in inner]
    if not any(captions) and not images_alone:
        allowed = (
            "a text file next to each image (a.txt for a.jpg) with one caption per line, or metadata.csv; "
            "data.missing: keep uses images without captions"
        )
        raise InputError(str(folder), f"{len(images)} images, none with captions", allowed)
    first = [path.parts[0] if len(path.parts) > 1 else "" for path in inner]
    keys = tuple(path.as_posix() for path in inner)
    split = split_numbers(str(folder), first, SPLIT_NAMES) if named_splits(first) else None
    with_image = {path.with_suffix("") for path in inner}
    alone = tuple(f"{stem.as_posix()}.txt" for stem in sorted(written) if stem not in with_image)
    return checked(RawSet(str(folder), keys, ImageFiles(tuple(images)), tuple(captions), split=split, alone=alone))


def named_splits(names: Sequence[str]) -> bool:
    """Whether folder or file names are all names of splits, and name more than one split."""
    return set(names) <= set(SPLIT_NAMES) and len({SPLIT_NAMES[name] for name in set(names)}) > 1


def _lines(path: Path | None) -> tuple[str, ...]:
    """The captions in a text file, one per line; none without a file."""
    if path is None:
        return ()
    check_regular(path, MAX_CAPTIONS, "the captions of an image")
    return captions_in(read_text(path))


def captions_in(text: str) -> tuple[str, ...]:
    """The captions in a text, one per line, without empty lines and repetitions."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))
