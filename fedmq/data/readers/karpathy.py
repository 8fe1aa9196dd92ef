"""Flickr8k, Flickr30K and MS-COCO: Karpathy's JSON of captions and splits beside a folder of images.

Source of the splits: Karpathy and Fei-Fei 2015 (``dataset_<name>.json``); COCO's ``restval`` is trained on, which
makes 113,287 / 5,000 / 5,000. Labels of COCO: the categories of ``instances_*.json``, where these files are there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, first_existing, folder_of, multi_hot, read_json
from fedmq.data.splits import split_numbers
from fedmq.encoders.images import Files
from fedmq.errors import InputError

#: Folders in which the images of each set usually lie; "." is ``data.path`` itself.
FOLDERS: Mapping[str, Sequence[str]] = {
    "flickr8k": ("Flicker8k_Dataset", "Flickr8k_Dataset", "images", "."),
    "flickr30k": ("flickr30k-images", "flickr30k_images", "images", "."),
    "coco": ("images", "."),  # with train2014 and val2014 in it
}


def _wrong(entry: Any) -> tuple[str, Any] | None:
    """Where an entry is not as it must be, as `.split`, and what is there; None where all is well."""
    if not isinstance(entry, dict):
        return "", entry
    name, sentences = entry.get("filename"), entry.get("sentences")
    fine = {
        "filename": isinstance(name, str) and bool(name.strip()),
        "filepath": isinstance(entry.get("filepath"), str | None),
        "split": isinstance(entry.get("split"), str),
        "sentences": isinstance(sentences, list),
    }
    for field, well in fine.items():
        if not well:
            return f".{field}", entry.get(field)
    for index, said in enumerate(sentences or ()):
        if not (isinstance(said, dict) and isinstance(said.get("raw"), str)):
            return f".sentences[{index}]", said
    return None


def _entries(path: Path) -> list[dict[str, Any]]:
    """The ``images`` of a Karpathy file, each with the fields that are used.

    Raises:
        InputError: another structure; names the first entry that is wrong.
    """
    loaded = read_json(path)
    images = loaded.get("images") if isinstance(loaded, dict) else None
    if not isinstance(images, list):
        raise InputError(str(path), type(loaded).__name__, "Karpathy's JSON: an object with a list `images`")
    for index, entry in enumerate(images):
        if wrong := _wrong(entry):
            place, found = wrong
            allowed = "an object with filename, split and sentences, each with raw"
            short = repr(found)[:80] if isinstance(found, dict | list) else found
            raise InputError(f"{path}: images[{index}]{place}", short, allowed)
    return images


def _categories(folders: Sequence[Path]) -> dict[str, set[str]]:
    """COCO's category names of each image number, from ``instances_*.json`` files in any of the folders.

    Raises:
        InputError: a file has another structure.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted({path.resolve() for folder in folders for path in folder.glob("instances_*.json")}):
        loaded = read_json(path)
        try:
            names = {entry["id"]: str(entry["name"]) for entry in loaded["categories"]}
            for entry in loaded["annotations"]:
                found[str(entry["image_id"])].add(names[entry["category_id"]])
        except (KeyError, TypeError, ValueError) as error:
            allowed = "COCO's instances: annotations with image_id and category_id, categories with id and name"
            raise InputError(str(path), f"{type(error).__name__}: {error}", allowed) from None
    return found


def annotation_files(folder: Path, name: str) -> list[Path]:
    """Where Karpathy's JSON of a set usually lies, the likeliest place first."""
    return [folder / f"dataset_{name}.json", folder / "dataset.json"]


def read_karpathy(data: Data) -> RawSet:
    """One of the three sets.

    Raises:
        InputError: no annotation file or image folder, or a file of another structure.
    """
    folder = folder_of(data)
    usual = annotation_files(folder, data.name)
    path = data.annotations or first_existing(usual, "data.annotations", "annotation file")
    choices = [folder / name for name in FOLDERS[data.name]]
    images = data.images or first_existing(choices, "data.images", "folder of images")
    entries = _entries(path)
    split = split_numbers(str(path), [entry["split"] for entry in entries], {"restval": "train"})
    # COCO's images lie in train2014 and val2014, which `filepath` names.
    files = tuple(images / str(entry.get("filepath") or "") / entry["filename"] for entry in entries)
    beside = [folder, path.parent]
    noted = [inner for each in beside for inner in (each, each / "annotations")]
    categories = _categories(noted) if data.name == "coco" else {}
    labels, names = multi_hot([categories.get(str(entry.get("cocoid")), set()) for entry in entries])
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(entry["filename"] for entry in entries),
            pictures=Files(files, images),
            captions=tuple(
                tuple(said["raw"].strip() for said in entry["sentences"] if said["raw"].strip()) for entry in entries
            ),
            labels=labels,
            label_names=names,
            split=split,
        )
    )
