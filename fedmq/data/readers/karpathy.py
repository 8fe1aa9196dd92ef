"""Read Flickr8k, Flickr30K and MS-COCO: Karpathy's JSON of captions and splits, and a folder of images.

Flickr8k may also have the captions and photo lists of its official release (Hodosh, Young and Hockenmaier 2013), whose
splits have the same sizes.

Source of the splits: Karpathy and Fei-Fei 2015 (``dataset_<name>.json``). COCO's ``restval`` belongs to the training
split, which gives 113,287 / 5,000 / 5,000. COCO's labels are the categories of ``instances_*.json``, if present.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, first_existing, folder_of, is_number, multi_hot, read_json, read_text
from fedmq.data.splits import split_numbers
from fedmq.encoders.image_sets import ImageFiles
from fedmq.errors import InputError

#: Usual image folders of each set below ``data.path``.
FOLDERS: Mapping[str, Sequence[str]] = {
    "flickr8k": ("Flicker8k_Dataset", "Flickr8k_Dataset", "images", "."),
    "flickr30k": ("flickr30k-images", "flickr30k_images", "images", "."),
    "coco": ("images", "."),  # contains train2014 and val2014
}


def _invalid_field(entry: Any) -> tuple[str, Any] | None:
    """The first invalid field of an entry, e.g. `.split`, and its value; None if the entry is valid."""
    if not isinstance(entry, dict):
        return "", entry
    name, sentences = entry.get("filename"), entry.get("sentences")
    valid = {
        "filename": isinstance(name, str) and bool(name.strip()),
        "filepath": isinstance(entry.get("filepath"), str | None),
        "split": isinstance(entry.get("split"), str),
        "sentences": isinstance(sentences, list),
    }
    for field, ok in valid.items():
        if not ok:
            return f".{field}", entry.get(field)
    for index, sentence in enumerate(sentences or ()):
        if not (isinstance(sentence, dict) and isinstance(sentence.get("raw"), str)):
            return f".sentences[{index}]", sentence
    return None


def _entries(path: Path) -> list[dict[str, Any]]:
    """The validated ``images`` entries of a Karpathy file.

    Raises:
        InputError: the file is malformed; the message gives the first invalid entry.
    """
    loaded = read_json(path)
    images = loaded.get("images") if isinstance(loaded, dict) else None
    if not isinstance(images, list):
        raise InputError(str(path), type(loaded).__name__, "Karpathy's JSON: an object with a list `images`")
    for index, entry in enumerate(images):
        if invalid := _invalid_field(entry):
            field, found = invalid
            allowed = "an object with filename, split and sentences, each with raw"
            short = repr(found)[:80] if isinstance(found, dict | list) else found
            raise InputError(f"{path}: images[{index}]{field}", short, allowed)
    return images


def _categories(folders: Sequence[Path]) -> dict[str, set[str]]:
    """COCO category names by image number, from the ``instances_*.json`` files in any of the folders.

    Raises:
        InputError: a file is malformed.
    """
    categories: dict[str, set[str]] = defaultdict(set)
    for name in sorted({os.path.realpath(path) for folder in folders for path in folder.glob("instances_*.json")}):
        path = Path(name)
        loaded = read_json(path)
        try:
            names = {entry["id"]: str(entry["name"]) for entry in loaded["categories"]}
            for entry in loaded["annotations"]:
                categories[str(entry["image_id"])].add(names[entry["category_id"]])
        except (KeyError, TypeError, ValueError) as error:
            allowed = "COCO's instances: annotations with image_id and category_id, categories with id and name"
            raise InputError(str(path), f"{type(error).__name__}: {error}", allowed) from None
    return categories


def annotation_files(folder: Path, name: str) -> list[Path]:
    """Usual paths of a set's Karpathy JSON, most likely first."""
    return [folder / f"dataset_{name}.json", folder / "dataset.json"]


def read_karpathy(data: Data) -> RawSet:
    """Read one of the three sets.

    Raises:
        InputError: the annotation file or the image folder is missing, or a file is malformed.
    """
    folder = folder_of(data)
    usual = annotation_files(folder, data.name)
    path = data.annotations or first_existing(usual, "data.annotations", "annotation file")
    choices = [folder / name for name in FOLDERS[data.name]]
    images = data.images or first_existing(choices, "data.images", "folder of images")
    entries = _entries(path)
    split = split_numbers(str(path), [entry["split"] for entry in entries], {"restval": "train"})
    # COCO's `filepath` is train2014 or val2014; the other sets have none.
    files = tuple(images / str(entry.get("filepath") or "") / entry["filename"] for entry in entries)
    folders = [inner for each in (folder, path.parent) for inner in (each, each / "annotations")]
    categories = _categories(folders) if data.name == "coco" else {}
    labels, names = multi_hot([categories.get(str(entry.get("cocoid")), set()) for entry in entries])
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(entry["filename"] for entry in entries),
            images=ImageFiles(files),
            captions=tuple(
                tuple(text for sentence in entry["sentences"] if (text := sentence["raw"].strip())) for entry in entries
            ),
            labels=labels,
            label_names=names,
            split=split,
        )
    )


# --- the release of Flickr8k ----------------------------------------------------------------------------------------

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
            images=ImageFiles(tuple(images / key for key in keys)),
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
