"""Read MSR-VTT: one or two JSON files of captions, and videos or one folder of frames per video.

Source of the split: the files' ``split`` field (Xu et al. 2016: 6,513 train, 497 validate, 2,990 test). A video's
embedding is the normalised mean of its frames' embeddings (``fedmq.data.extract``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, folder_of, multi_hot, read_json
from fedmq.data.splits import split_numbers
from fedmq.encoders.image_sets import ImageFiles, files_below
from fedmq.encoders.images import IMAGE_ENDINGS, VIDEO_ENDINGS
from fedmq.errors import InputError

NAMES = ("MSRVTT_data.json", "videodatainfo.json", "train_val_videodatainfo.json", "test_videodatainfo.json")
#: Folders below ``data.path`` to search; the last two are named after the archives.
FOLDERS = ("annotation", "annotations", "train_val_annotation", "test_videodatainfo")


def _annotations(data: Data, folder: Path) -> list[Path]:
    if data.annotations is not None and not data.annotations.is_dir():
        return [data.annotations]
    start = data.annotations or folder
    places = [start, *(start / name for name in FOLDERS)]
    files = [place / name for place in places for name in NAMES if (place / name).is_file()]
    if not files:
        raise InputError("data.annotations", "no annotation file", f"{' or '.join(NAMES)} in {start}")
    # A complete file replaces partial ones in any folder. Of files with the same name, the first is used.
    complete = [path for path in files if path.name in NAMES[:2]]
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


@dataclass(frozen=True)
class _Video:
    """A video entry of the annotations; ``category`` is its number as a string, None if there is none."""

    split: str
    key: str
    category: str | None

    @classmethod
    def of(cls, entry: Mapping[str, object]) -> _Video:
        """Parse an entry; raises KeyError or TypeError if it is invalid."""
        category = str(entry["category"]) if "category" in entry else None
        return cls(str(entry["split"]), str(entry["video_id"]), category)


def read_msrvtt(data: Data) -> RawSet:
    """Read MSR-VTT, in the order of its annotation files.

    Raises:
        InputError: there is no annotation file, or one is malformed.
    """
    folder = folder_of(data)
    paths = _annotations(data, folder)
    videos: list[_Video] = []
    captions: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        loaded = read_json(path)
        try:
            videos += [_Video.of(video) for video in loaded["videos"]]
            for sentence in loaded["sentences"]:
                if not isinstance(sentence["caption"], str):
                    raise TypeError(f"the caption {sentence['caption']!r:.40} of {sentence['video_id']!r:.40}")
                if text := sentence["caption"].strip():
                    captions[str(sentence["video_id"])].append(text)
        except (KeyError, TypeError) as error:
            allowed = "MSR-VTT's JSON: videos with video_id and split, sentences with video_id and caption"
            raise InputError(str(path), f"{type(error).__name__}: {error}", allowed) from None
    places = _places(data.images or folder)
    root = data.images or folder
    labels, names = multi_hot(
        [set() if video.category is None else {f"category-{video.category.zfill(2)}"} for video in videos]
    )
    keys, splits = tuple(video.key for video in videos), [video.split for video in videos]
    return checked(
        RawSet(
            place=str(paths[0]),
            keys=keys,
            images=ImageFiles(tuple(places.get(key, root / f"{key}.mp4") for key in keys), data.frames, True),
            captions=tuple(tuple(captions[key]) for key in keys),
            labels=labels,
            label_names=names,
            split=split_numbers(str(paths[0]), splits, {"validate": "val", "trainval": "train"}),
        )
    )
