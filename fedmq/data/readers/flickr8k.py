"""Flickr8k: Karpathy's JSON, or the captions and lists of photos of its official release.

Source of the release and its splits: Hodosh, Young and Hockenmaier 2013. Both have the same numbers of photos.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, first_existing, folder_of, is_number, read_text
from fedmq.data.readers.karpathy import FOLDERS, annotation_files, read_karpathy
from fedmq.data.splits import split_numbers
from fedmq.encoders.images import Files
from fedmq.errors import InputError

TOKENS = "Flickr8k.token.txt"
LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}


def read_flickr8k(data: Data) -> RawSet:
    """Flickr8k as it lies there; the JSON where both do, or what ``data.annotations`` names.

    Raises:
        InputError: neither a JSON nor the release's captions, no folder of images, or a file of another structure.
    """
    folder = folder_of(data)
    if data.annotations is not None:
        named = data.annotations / TOKENS if data.annotations.is_dir() else data.annotations
        return _release(data, folder, named) if named.suffix == ".txt" else read_karpathy(data)
    usual = annotation_files(folder, data.name)
    choices = [*usual, folder / "Flickr8k_text" / TOKENS, folder / TOKENS]
    found = first_existing(choices, "data.annotations", "annotation file")
    return read_karpathy(data) if found in usual else _release(data, folder, found)


def _release(data: Data, folder: Path, tokens: Path) -> RawSet:
    """The photos of the three lists, in their order, with the captions of ``Flickr8k.token.txt``.

    Photos and captions of no list are left out: the release has some 90 more of them, and captions of one photo,
    ``2258277193_586949ec62.jpg.1``, which it does not have.

    Raises:
        InputError: a list or the folder of images is missing, or a line is of another form.
    """
    images = data.images or first_existing(
        [folder / name for name in FOLDERS[data.name]], "data.images", "folder of images"
    )
    captions = _captions(tokens)
    keys: list[str] = []
    splits: list[str] = []
    for split, name in LISTS.items():
        path = first_existing([tokens.parent / name, folder / name], "data.annotations", f"list {name}")
        own = _photos(path)
        keys += own
        splits += [split] * len(own)
    return checked(
        RawSet(
            place=str(tokens),
            keys=tuple(keys),
            pictures=Files(tuple(images / key for key in keys), images),
            captions=tuple(tuple(captions.get(key, ())) for key in keys),
            split=split_numbers(str(tokens), splits, {}),
        )
    )


def _captions(path: Path) -> dict[str, list[str]]:
    """The captions of each photo's name, in the file's order.

    Raises:
        InputError: a line of another form.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        place, tab, caption = line.partition("\t")
        name, _, count = place.rpartition("#")
        if not tab or not name or not is_number(count):
            raise InputError(f"{path}: line {number}", line[:80], "a photo's name, # and a number, a tab, a caption")
        if caption.strip():
            found[name].append(caption.strip())
    return found


def _photos(path: Path) -> list[str]:
    """The photos of a list.

    Raises:
        InputError: a line is no name of a file.
    """
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = line.strip()
        if name and (Path(name).name != name or name == ".."):
            raise InputError(f"{path}: line {number}", name[:80], "the name of a photo, without a folder")
        found += [name] if name else []
    return found
