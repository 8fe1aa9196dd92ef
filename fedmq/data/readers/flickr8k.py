"""Read Flickr8k from Karpathy's JSON, or from the captions and photo lists of the official release.

Source of the release and its splits: Hodosh, Young and Hockenmaier 2013. Both formats have splits of the same sizes.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, first_existing, folder_of, is_number, read_text
from fedmq.data.readers.karpathy import FOLDERS, annotation_files, read_karpathy
from fedmq.data.splits import split_numbers
from fedmq.encoders.image_sets import ImageFiles
from fedmq.errors import InputError

TOKENS = "Flickr8k.token.txt"
LISTS = {
    "train": "Flickr_8k.trainImages.txt",
    "val": "Flickr_8k.devImages.txt",
    "test": "Flickr_8k.testImages.txt",
}


def read_flickr8k(data: Data) -> RawSet:
    """Read Flickr8k from the file ``data.annotations``, else from the JSON, else from the release's files.

    Raises:
        InputError: there is no annotation file or no image folder, or a file is malformed.
    """
    folder = folder_of(data)
    if data.annotations is not None:
        named = data.annotations / TOKENS if data.annotations.is_dir() else data.annotations
        return _release(data, folder, named) if named.suffix == ".txt" else read_karpathy(data)
    usual = annotation_files(folder, data.name)
    choices = [*usual, folder / "Flickr8k_text" / TOKENS, folder / TOKENS]
    file = first_existing(choices, "data.annotations", "annotation file")
    return read_karpathy(data) if file in usual else _release(data, folder, file)


def _release(data: Data, folder: Path, tokens: Path) -> RawSet:
    """The photos of the three lists, in list order, with the captions of ``Flickr8k.token.txt``.

    Photos and captions outside the lists are skipped: the release has about 90 such photos, and captions of a photo
    that it lacks, ``2258277193_586949ec62.jpg.1``.

    Raises:
        InputError: a list or the image folder is missing, or a line is malformed.
    """
    images = data.images or first_existing(
        [folder / name for name in FOLDERS[data.name]], "data.images", "folder of images"
    )
    captions = _captions(tokens)
    keys: list[str] = []
    splits: list[str] = []
    for split, name in LISTS.items():
        path = first_existing([tokens.parent / name, folder / name], "data.annotations", f"list {name}")
        photos = _photos(path)
        keys += photos
        splits += [split] * len(photos)
    return checked(
        RawSet(
            place=str(tokens),
            keys=tuple(keys),
            pictures=ImageFiles(tuple(images / key for key in keys)),
            captions=tuple(tuple(captions.get(key, ())) for key in keys),
            split=split_numbers(str(tokens), splits, {}),
        )
    )


def _captions(path: Path) -> dict[str, list[str]]:
    """Captions by photo name, in file order.

    Raises:
        InputError: a line is malformed.
    """
    captions: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        place, tab, caption = line.partition("\t")
        name, _, count = place.rpartition("#")
        if not tab or not name or not is_number(count):
            raise InputError(f"{path}: line {number}", line[:80], "a photo's name, # and a number, a tab, a caption")
        if caption.strip():
            captions[name].append(caption.strip())
    return captions


def _photos(path: Path) -> list[str]:
    """The photo names of a list file.

    Raises:
        InputError: a line is not a file name.
    """
    names = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = line.strip()
        if name and (Path(name).name != name or name == ".."):
            raise InputError(f"{path}: line {number}", name[:80], "the name of a photo, without a folder")
        names += [name] if name else []
    return names
