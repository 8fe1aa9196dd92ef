"""Read Flickr8k, Flickr30K, MS-COCO and MSR-VTT: files of captions and splits, and a folder of images or videos.

Flickr8k may also have the captions and photo lists of its official release (Hodosh, Young and Hockenmaier 2013), whose
splits have the same sizes. COCO's labels are the categories of ``instances_*.json``, if present.

COCO may also have its own ``captions_*.json``; the year parts ``train`` and ``val`` are then the training and the test
split, as COCO publishes no captions of its test images.

Sources of the splits: Karpathy and Fei-Fei 2015 (``dataset_<name>.json``; COCO's ``restval`` belongs to the training
split, which gives 113,287 / 5,000 / 5,000); for MSR-VTT the files' ``split`` field (Xu et al. 2016: 6,513 train, 497
validate, 2,990 test). A video's embedding is the normalised mean of its frames' embeddings (``fedmq.data.extract``).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, first_existing, folder_of, is_number, read_json, read_text
from fedmq.data.splits import split_numbers
from fedmq.encoders.image_sets import ImageFiles, files_below
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS
from fedmq.errors import InputError

#: Usual image folders of each set below ``data.path``.
FOLDERS: Mapping[str, Sequence[str]] = {
    "flickr8k": ("Flicker8k_Dataset", "Flickr8k_Dataset", "images", "."),
    "flickr30k": ("flickr30k-images", "flickr30k_images", "images", "."),
    "coco": ("images", "."),  # contains train2014 and val2014
}
#: COCO's own files of captions.
_COCO_CAPTIONS = "captions_*.json"


# --- Karpathy's files -----------------------------------------------------------------------------------------------


class _Sentence(BaseModel):
    raw: str


class _Image(BaseModel):
    """An image; ``filepath`` and ``cocoid`` are COCO's: ``train2014`` or ``val2014``, and a number."""

    filename: Annotated[str, Field(pattern=r"\S")]
    filepath: str | None = None
    split: str
    sentences: list[_Sentence]
    cocoid: int | str = ""


class _Karpathy(BaseModel):
    images: list[_Image]


class _Category(BaseModel):
    id: int
    name: str


class _Annotation(BaseModel):
    image_id: int
    category_id: int


class _Instances(BaseModel):
    categories: list[_Category]
    annotations: list[_Annotation]


def _categories(folders: Sequence[Path]) -> dict[str, set[str]]:
    """COCO category names by image number, from the ``instances_*.json`` files in any of the folders."""
    categories: dict[str, set[str]] = defaultdict(set)
    for path in sorted({os.path.realpath(path) for folder in folders for path in folder.glob("instances_*.json")}):
        instances = read_json(Path(path), _Instances, "COCO's instances: categories and annotations of images")
        names = {category.id: category.name for category in instances.categories}
        for annotation in instances.annotations:
            if annotation.category_id not in names:
                raise InputError(path, f"category_id {annotation.category_id}", "one of the file's categories")
            categories[str(annotation.image_id)].add(names[annotation.category_id])
    return categories


def annotation_files(folder: Path, name: str) -> list[Path]:
    """Usual paths of a set's Karpathy JSON, most likely first."""
    return [folder / f"dataset_{name}.json", folder / "dataset.json"]


def _image_folder(data: Data, folder: Path) -> Path:
    choices = [folder / name for name in FOLDERS[data.name]]
    return data.images or first_existing(choices, "data.images", "folder of images")


def read_karpathy(data: Data) -> RawSet:
    """Read Flickr8k, Flickr30K or MS-COCO.

    Raises:
        InputError: the annotation file or the image folder is missing, or a file is malformed.
    """
    folder = folder_of(data)
    usual = annotation_files(folder, data.name)
    path = data.annotations or first_existing(usual, "data.annotations", "annotation file")
    root = _image_folder(data, folder)
    images = read_json(path, _Karpathy, "Karpathy's JSON: images with filename, split and sentences").images
    folders = [inner for start in (folder, path.parent) for inner in (start, start / "annotations")]
    categories = _categories(folders) if data.name == "coco" else {}
    return checked(
        RawSet(
            place=str(path),
            keys=tuple(image.filename for image in images),
            images=ImageFiles(tuple(root / (image.filepath or "") / image.filename for image in images)),
            captions=tuple(
                tuple(text for sentence in image.sentences if (text := sentence.raw.strip())) for image in images
            ),
            split=split_numbers(str(path), [image.split for image in images], {"restval": "train"}),
        ),
        [categories.get(str(image.cocoid), ()) for image in images],
    )


# --- COCO's own captions ---------------------------------------------------------------------------------------------


class _CocoImage(BaseModel):
    id: int
    file_name: Annotated[str, Field(pattern=r"\S")]


class _CocoCaption(BaseModel):
    image_id: int
    caption: str


class _CocoCaptions(BaseModel):
    images: list[_CocoImage]
    annotations: list[_CocoCaption]


def read_coco(data: Data) -> RawSet:
    """Read MS-COCO, with Karpathy's JSON or else its own ``captions_*.json``, all of those beside each other.

    Raises:
        InputError: the annotation file or the image folder is missing, or a file is malformed.
    """
    folder, given, usual = folder_of(data), data.annotations, annotation_files(folder_of(data), data.name)
    if given is not None and not given.is_dir():
        return _of_coco(data, folder, [given]) if given.match(_COCO_CAPTIONS) else read_karpathy(data)
    if given is None and any(path.exists() for path in usual):
        return read_karpathy(data)
    places = [folder / "annotations", folder] if given is None else [given]
    own = next(filter(None, (sorted(place.glob(_COCO_CAPTIONS)) for place in places)), None)
    if own is None:
        choices = [*(usual if given is None else ()), *(place / _COCO_CAPTIONS for place in places)]
        raise InputError("data.annotations", "no annotation file", " or ".join(map(str, choices)))
    return _of_coco(data, folder, own)


def _of_coco(data: Data, folder: Path, files: Sequence[Path]) -> RawSet:
    """The images of COCO's own files; each file's images are in a folder of its part, such as ``val2014``."""
    root, keys, paths, numbers, parts = _image_folder(data, folder), list[str](), list[Path](), list[int](), list[str]()
    captions: dict[int, dict[str, None]] = defaultdict(dict)
    for path in files:
        found = read_json(path, _CocoCaptions, "COCO's captions: images with id and file_name, annotations of images")
        part = path.stem.partition("_")[2]
        within = next((place / part for place in (root, folder) if (place / part).is_dir()), root)
        keys += [image.file_name for image in found.images]
        paths += [within / image.file_name for image in found.images]
        numbers += [image.id for image in found.images]
        parts += [part] * len(found.images)
        for annotation in found.annotations:
            if text := annotation.caption.strip():
                captions[annotation.image_id][text] = None
    categories = _categories([files[0].parent])
    raw = RawSet(
        place=str(files[0]),
        keys=tuple(keys),
        images=ImageFiles(tuple(paths)),
        captions=tuple(tuple(captions[number]) for number in numbers),
    )
    labels = [categories.get(str(number), ()) for number in numbers]
    return checked(raw, labels).split_by_names([(part,) for part in parts])


# --- the release of Flickr8k ----------------------------------------------------------------------------------------

TOKENS = "Flickr8k.token.txt"
LISTS = {"train": "Flickr_8k.trainImages.txt", "val": "Flickr_8k.devImages.txt", "test": "Flickr_8k.testImages.txt"}


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
    """
    images, captions = _image_folder(data, folder), _captions(tokens)
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
    """Captions by photo name, in file order."""
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
    """The photo names of a list file."""
    names = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        name = line.strip()
        if name and (Path(name).name != name or name == ".."):
            raise InputError(f"{path}: line {number}", name[:80], "the name of a photo, without a folder")
        names += [name] if name else []
    return names


# --- MSR-VTT --------------------------------------------------------------------------------------------------------

VIDEO_LISTS = ("MSRVTT_data.json", "videodatainfo.json", "train_val_videodatainfo.json", "test_videodatainfo.json")
#: Folders below ``data.path`` to search; the last two are named after the archives.
VIDEO_FOLDERS = ("annotation", "annotations", "train_val_annotation", "test_videodatainfo")


def _video_lists(data: Data, folder: Path) -> list[Path]:
    if data.annotations is not None and not data.annotations.is_dir():
        return [data.annotations]
    start = data.annotations or folder
    places = [start, *(start / name for name in VIDEO_FOLDERS)]
    files = [place / name for place in places for name in VIDEO_LISTS if (place / name).is_file()]
    if not files:
        raise InputError("data.annotations", "no annotation file", f"{' or '.join(VIDEO_LISTS)} in {start}")
    # A complete file replaces partial ones in any folder. Of files with the same name, the first is used.
    complete = [path for path in files if path.name in VIDEO_LISTS[:2]]
    parts: dict[str, Path] = {}
    for path in files:
        parts.setdefault(path.name, path)
    return complete[:1] or list(parts.values())


def _places(folder: Path) -> dict[str, Path]:
    """Paths by video name: a video file, or a folder of frames."""
    videos: dict[str, Path] = {}
    framed: dict[str, Path] = {}
    for path in files_below(folder):
        if path.suffix.lower() in VIDEO_ENDINGS:
            videos[path.stem] = path
        elif path.suffix.lower() in IMAGE_ENDINGS:
            framed.setdefault(path.parent.name, path.parent)
    # Extracted frames take precedence over the video.
    return videos | framed


class _Video(BaseModel):
    video_id: str
    split: str
    category: int | str | None = None


class _VideoSentence(BaseModel):
    video_id: str
    caption: str


class _Videos(BaseModel):
    videos: list[_Video]
    sentences: list[_VideoSentence]


def read_msrvtt(data: Data) -> RawSet:
    """Read MSR-VTT, in the order of its annotation files.

    Raises:
        InputError: there is no annotation file, or one is malformed.
    """
    folder = folder_of(data)
    paths, root = _video_lists(data, folder), data.images or folder
    videos: list[_Video] = []
    captions: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        allowed = "MSR-VTT's JSON: videos with video_id and split, sentences with video_id and caption"
        listed = read_json(path, _Videos, allowed)
        videos += listed.videos
        for sentence in listed.sentences:
            if text := sentence.caption.strip():
                captions[sentence.video_id].append(text)
    places, keys = _places(root), tuple(video.video_id for video in videos)
    categories = [() if video.category is None else (f"category-{video.category!s:0>2}",) for video in videos]
    splits = split_numbers(str(paths[0]), [video.split for video in videos], {"validate": "val", "trainval": "train"})
    return checked(
        RawSet(
            place=str(paths[0]),
            keys=keys,
            images=ImageFiles(tuple(places.get(key, root / f"{key}.mp4") for key in keys), data.frames, True),
            captions=tuple(tuple(captions[key]) for key in keys),
            split=splits,
        ),
        categories,
    )
