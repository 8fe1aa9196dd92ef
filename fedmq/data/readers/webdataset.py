"""Read the tar files of webdataset and img2dataset: files that differ only in their ending are one item.

Nothing is unpacked: images are read at their places in the archives, which therefore must not be compressed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from typing_extensions import override

from fedmq.config.scenario import Data
from fedmq.data.raw_set import RawSet, checked, not_read, refuse_keys
from fedmq.data.readers.formats import list_members
from fedmq.data.readers.manifest import lines_of, texts_of
from fedmq.encoders.image_sets import StoredImages, files_below, is_leftover
from fedmq.encoders.images import IMAGE_ENDINGS, Pixels, decode_bytes
from fedmq.errors import InputError
from fedmq.storage import quarantine
from fedmq.storage.cache import file_digests, key_of
from fedmq.storage.regular_files import open_regular

_ALLOWED = "an uncompressed tar file of webdataset"
_CAPTIONS = ("captions", "caption", "text")


@dataclass(frozen=True)
class Member:
    """A file in an archive."""

    tar: Path
    name: str  # name of the file
    start: int  # start of its content in the archive [bytes]
    size: int  # size of its content [bytes]

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
class Members(StoredImages):
    """Images in archives."""

    members: tuple[Member, ...]

    @override
    def stored_name(self, at: int) -> str:
        return self.members[at].place

    @cached_property
    @override
    def stamp(self) -> str:  # the digests of the archives, and the places of the images in them
        tars = list(dict.fromkeys(member.tar for member in self.members))
        digests = dict(zip(tars, file_digests(tars), strict=True))
        return key_of("tar", *([digests[member.tar], member.start, member.size] for member in self.members))

    @override
    def stored_image(self, at: int) -> Pixels:
        return decode_bytes(self.members[at].content(), self.members[at].place)


@dataclass
class _Sample:
    """The files of one item."""

    image: Member | None = None
    captions: dict[str, None] = field(default_factory=dict)  # captions in order, as keys
    labels: dict[str, None] = field(default_factory=dict)  # labels in order, as keys
    read: bool = False  # whether a file of it was read


def read_webdataset(data: Data) -> RawSet:
    """Read a tar file, or all tar files below a folder in the order of their paths.

    An item has one image (``.jpg``, ``.png``, ...), captions in ``.txt`` (one per line) or in ``.json`` (``caption``,
    ``captions`` or ``text``), and labels in ``.cls`` or in the JSON's ``label`` or ``labels``. Its name ends at the
    first dot, as webdataset reads it; or at the last dot, if such files make an image with captions. Names of archives
    and folders can say the split.

    Raises:
        InputError: an archive is compressed or damaged, holds links or paths that lead out of it, or an item has no
            image or more than one.
    """
    refuse_keys(data, ("annotations", "images", "column"), "tar files of webdataset")
    tars = _archives(data)
    samples: dict[str, _Sample] = {}
    ignored: list[str] = []
    for tar in tars:
        own = tar.relative_to(data.path).with_suffix("") if data.path is not None and len(tars) > 1 else None
        for key, ending, member in _by_item(_members(tar)):
            # Numbers restart in each archive.
            sample = samples.setdefault(key if own is None else f"{own.as_posix()}/{key}", _Sample())
            if not _add(sample, ending, member):
                ignored.append(member.name)
    held = {key: sample for key, sample in samples.items() if sample.image is not None or sample.captions}
    without = [key for key, sample in held.items() if sample.image is None]
    if without and data.missing != "skip":
        raise InputError(f"{data.path}: {without[0]}", "captions without an image", "both; data.missing: skip")
    images = {key: sample.image for key, sample in held.items() if sample.image is not None}
    unread = {"files of other endings": tuple(ignored)} if ignored else {}
    if lacking := tuple(key for key, sample in samples.items() if sample.image is None and sample.read):
        unread["samples without an image"] = lacking
    if data.path is not None and data.path.is_dir():
        unread |= not_read(data.path, tars)
    raw = checked(
        RawSet(
            place=str(data.path),
            keys=tuple(images),
            images=Members(tuple(range(len(images))), tuple(images.values())),
            captions=tuple(tuple(held[key].captions) for key in images),
            ignored=unread,
        ),
        [tuple(held[key].labels) for key in images],
    )
    return raw.split_by_names([PurePosixPath(key).parent.parts for key in images])


def _by_item(members: Iterable[Member]) -> Iterator[tuple[str, str, Member]]:
    """Each file with the key of its item and its ending in lower case."""
    dotted: dict[str, list[tuple[str, str, Member]]] = defaultdict(list)
    for member in members:
        path = PurePosixPath(member.name)
        stem, _, ending = path.name.partition(".")
        found = (path.parent / stem).as_posix(), ending.lower(), member
        if "." in ending:
            dotted[(path.parent / path.stem).as_posix()].append(found)
        else:
            yield found
    for key, files in dotted.items():
        last = [f".{ending.rpartition('.')[2]}" for _, ending, _ in files]
        item = not IMAGE_ENDINGS.isdisjoint(last) and not {".txt", ".json"}.isdisjoint(last)
        yield from [(key, end[1:], file[2]) for end, file in zip(last, files, strict=True)] if item else files


def _archives(data: Data) -> list[Path]:
    """The tar file that ``data.path`` names, or those below the folder it names."""
    path = data.path
    if path is not None and path.is_dir():
        tars = sorted(each for each in files_below(path, leave=False) if each.suffix == ".tar")
        if tars:
            return tars
    elif path is not None and path.is_file():
        return [path]
    raise InputError("data.path", str(path), "a tar file, or a folder with tar files")


def _members(tar: Path) -> Iterator[Member]:
    """The regular files in an archive, without those that macOS adds; errors as of :func:`list_members`."""
    for name, start, size in quarantine.read(list_members, tar, place=str(tar), allowed=_ALLOWED, files=[tar]):
        if not any(map(is_leftover, PurePosixPath(name).parts)):
            yield Member(tar, name, start, size)


def _add(sample: _Sample, ending: str, member: Member) -> bool:
    """Add a file to its item, unless its ending is not read; whether it was added."""
    if f".{ending}" in IMAGE_ENDINGS:
        if sample.image is not None:
            raise InputError(member.place, f"a second image next to {sample.image.name}", "one image for each item")
        sample.image = member
    elif ending in ("txt", "json", "cls"):
        quarantine.note(member.place, "text or JSON")
        try:
            text = member.content().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError(member.place, "bytes that are not UTF-8", "UTF-8 text") from None
        if ending == "txt":
            sample.captions.update(dict.fromkeys(lines_of(text)))
        elif ending == "cls":
            sample.labels.update(dict.fromkeys(lines_of(text)))
        else:
            _add_json(sample, member.place, text)
    else:
        return False
    sample.read = True
    return True


def _add_json(sample: _Sample, place: str, text: str) -> None:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(place, str(error), "valid JSON") from None
    if not isinstance(found, dict):
        raise InputError(place, type(found).__name__, "a JSON object")
    for name in _CAPTIONS:
        sample.captions.update(dict.fromkeys(texts_of(f"{place}: {name}", found.get(name))))
    for name in ("label", "labels"):
        sample.labels.update(dict.fromkeys(texts_of(f"{place}: {name}", found.get(name), label=True)))
