"""Read the tar files of webdataset and img2dataset: files that differ only in their ending are one item.

Nothing is unpacked: images are read at their places in the archives, which therefore must not be compressed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, multi_hot, refuse_keys
from fedmq.data.readers.cells import one_label, one_of_many, one_text
from fedmq.data.readers.formats import list_members
from fedmq.data.readers.photo_folder import captions_in
from fedmq.encoders.image_sets import StoredImages, is_leftover
from fedmq.encoders.images import IMAGE_ENDINGS, Pixels, decode_bytes
from fedmq.errors import InputError
from fedmq.storage import quarantine
from fedmq.storage.cache import file_digests, key_of
from fedmq.storage.regular_files import open_regular

_ALLOWED = "an uncompressed tar file of webdataset"
_CAPTIONS = ("captions", "caption", "text")


@dataclass(frozen=True)
class Member:
    """A file in an archive.

    Args:
        tar: the archive.
        name: name of the file.
        start: start of its content in the archive [bytes].
        size: size of its content [bytes].
    """

    tar: Path
    name: str
    start: int
    size: int

    @property
    def place(self) -> str:
        """Its name in error messages."""
        return f"{self.tar}: {self.name}"

    def content(self) -> bytes:
        """Read the file.

        Raises:
            InputError: the archive cannot be read, or is shorter than it was.
        """
        with open_regular(self.tar, _ALLOWED) as archive:
            archive.seek(self.start)
            found = archive.read(self.size)
        if len(found) != self.size:
            raise InputError(self.place, f"{len(found)} of {self.size} bytes", "an archive that was not cut off")
        return found


@dataclass(frozen=True)
class Members:
    """Images in archives, for :class:`fedmq.encoders.image_sets.StoredImages`.

    Args:
        members: the images.
    """

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    def name(self, row: int) -> str:
        """The archive and the name in it."""
        return self.members[row].place

    @cached_property
    def stamp(self) -> str:
        """The digests of the archives, and the places of the images in them."""
        tars = list(dict.fromkeys(member.tar for member in self.members))
        digests = dict(zip(tars, file_digests(tars), strict=True))
        return key_of("tar", *([digests[member.tar], member.start, member.size] for member in self.members))

    def image(self, row: int) -> Pixels:
        """Decode one image: uint8 [height, width, 3].

        Raises:
            InputError: it cannot be read.
        """
        return decode_bytes(self.members[row].content(), self.name(row))


@dataclass
class _Sample:
    """The files of one item.

    Args:
        image: its image.
        captions: captions in order, as keys.
        labels: labels in order, as keys.
    """

    image: Member | None = None
    captions: dict[str, None] = field(default_factory=dict)
    labels: dict[str, None] = field(default_factory=dict)


def read_webdataset(data: Data) -> RawSet:
    """Read a tar file, or all tar files of a folder in the order of their names.

    An item has one image (``.jpg``, ``.png``, ...), captions in ``.txt`` (one per line) or in ``.json`` (``caption``,
    ``captions`` or ``text``), and labels in ``.cls`` or in the JSON's ``label`` or ``labels``.

    Raises:
        InputError: an archive is compressed or damaged, holds links or paths that lead out of it, or an item has no
            image or more than one.
    """
    refuse_keys(data, ("annotations", "images", "column"), "tar files of webdataset")
    tars = _archives(data)
    samples: dict[str, _Sample] = {}
    for tar in tars:
        for member in _members(tar):
            path = PurePosixPath(member.name)
            stem, _, ending = path.name.partition(".")
            key = (path.parent / stem).as_posix()
            # Numbers restart in each archive.
            _add(samples.setdefault(key if len(tars) == 1 else f"{tar.stem}/{key}", _Sample()), ending.lower(), member)
    held = {key: sample for key, sample in samples.items() if sample.image is not None or sample.captions}
    without = [key for key, sample in held.items() if sample.image is None]
    if without and data.missing != "skip":
        raise InputError(f"{data.path}: {without[0]}", "captions without an image", "both; data.missing: skip")
    images = {key: sample.image for key, sample in held.items() if sample.image is not None}
    labels, names = multi_hot([tuple(held[key].labels) for key in images])
    return checked(
        RawSet(
            place=str(data.path),
            keys=tuple(images),
            images=StoredImages(Members(tuple(images.values())), tuple(range(len(images)))),
            captions=tuple(tuple(held[key].captions) for key in images),
            labels=labels,
            label_names=names,
        )
    )


def _archives(data: Data) -> list[Path]:
    """The tar files that ``data.path`` names, or that are in the folder it names."""
    path = data.path
    if path is not None and path.is_dir():
        tars = sorted(each for each in path.iterdir() if each.suffix == ".tar" and not is_leftover(each.name))
        if tars:
            return tars
    elif path is not None and path.is_file():
        return [path]
    raise InputError("data.path", str(path), "a tar file, or a folder with tar files")


def _members(tar: Path) -> Iterator[Member]:
    """The regular files in an archive, without those that macOS adds.

    Raises:
        InputError: it is not an uncompressed tar file, is truncated, or has links, devices or paths that lead out of
            it.
    """
    for name, start, size in quarantine.read(list_members, tar, place=str(tar), allowed=_ALLOWED, files=[tar]):
        if not any(map(is_leftover, PurePosixPath(name).parts)):
            yield Member(tar, name, start, size)


def _add(sample: _Sample, ending: str, member: Member) -> None:
    """Add a file to its item; files of other endings are ignored."""
    if f".{ending}" in IMAGE_ENDINGS:
        if sample.image is not None:
            raise InputError(member.place, f"a second image next to {sample.image.name}", "one image for each item")
        sample.image = member
    elif ending in ("txt", "json", "cls"):
        try:
            text = member.content().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(member.place, "bytes that are not UTF-8", "UTF-8 text") from None
        if ending == "txt":
            sample.captions.update(dict.fromkeys(captions_in(text)))
        elif ending == "cls":
            sample.labels.update(dict.fromkeys(captions_in(text)))
        else:
            _add_json(sample, member.place, text)


def _add_json(sample: _Sample, place: str, text: str) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(place, str(error), "valid JSON") from None
    if not isinstance(found, dict):
        raise InputError(place, type(found).__name__, "a JSON object")
    for name in _CAPTIONS:
        sample.captions.update(dict.fromkeys(texts_of(f"{place}: {name}", found.get(name))))
    for name in ("label", "labels"):
        sample.labels.update(dict.fromkeys(texts_of(f"{place}: {name}", found.get(name), numbers=True)))


def texts_of(place: str, value: object, *, numbers: bool = False) -> list[str]:
    """The texts that a field holds: one, a list of them, or none.

    Args:
        place: place of the field in error messages.
        value: value of the field.
        numbers: also accept whole numbers, as labels.

    Raises:
        InputError: it holds something else, or a text that looks like several.
    """
    several = [] if value is None else value if isinstance(value, list) else [value]
    kinds = (str, int) if numbers else (str,)
    if any(not isinstance(each, kinds) or isinstance(each, bool) for each in several):
        raise InputError(place, repr(value)[:80], "a text or a list of texts")
    for each in several:
        if isinstance(each, str) and not numbers:
            one_of_many(place, each)
        elif isinstance(each, str):
            _ = one_text(place, each, label=True) if isinstance(value, list) else one_label(place, each)
    return [text for each in several if (text := str(each).strip())]
