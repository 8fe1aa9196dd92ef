"""Overlap between sites: images and captions that two sites hold, or one site's training and another's test items.

Each site writes keyed digests of its contents (HMAC-SHA-256, RFC 2104) with a key that the sites share, and anyone can
compare the files. Without the key, they show only how many different contents a site has in each split, and how many
of them two sites have. With the key, one can also test whether a site has a given content.
"""

from __future__ import annotations

import hmac
import itertools
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, RootModel

from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.extract import read_complete
from fedmq.data.prepare import prepare
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS, split_of
from fedmq.errors import InputError
from fedmq.storage.json_files import Stored
from fedmq.text import Progress, tell

_BYTES = 16  # of a digest: two of 10^9 contents are equal by chance with a probability below 10^-20
_LABEL = b"fedmq overlap 1\0"
_WORDS = re.compile(r"\w+")
_HELD_OUT = ("val", "test")

#: A site and a split.
_Place = tuple[str, str]
Split = Literal["train", "val", "test", "public", "database"]
Keyed = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * _BYTES}}}$")]


class Contents(NamedTuple):
    """What a site holds of a split, each content once; any form in which equal contents are equal."""

    images: Set[Hashable]
    captions: Set[Hashable]


class SplitDigests(Stored):
    """Keyed digests of a split's contents, sorted."""

    images: list[Keyed]
    captions: list[Keyed]


class OverlapFile(Stored):
    """The file that a site writes: keyed digests of its contents, without their order and their items."""

    format: Literal[1]  # format of the file
    site: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    key: Keyed  # digest of an empty content, equal in files that were made with the same key
    splits: dict[Split, SplitDigests]

    @property
    def contents(self) -> dict[_Place, Contents]:
        """Contents by site and split."""
        return {
            (self.site, split): Contents(frozenset(each.images), frozenset(each.captions))
            for split, each in self.splits.items()
        }


class OverlapNames(RootModel[dict[Keyed, str]]):
    """Beside the file: the name of an item for each digest, which stays at the site."""


@dataclass(frozen=True)
class Overlap:
    """Contents that are in two places."""

    one: _Place
    other: _Place
    images: int  # number of different images that both have
    captions: int  # likewise of captions

    @property
    def spoils(self) -> bool:
        """Whether held-out items are trained on, so that figures measured on them are too high."""
        return {self.one[1] in _HELD_OUT, self.other[1] in _HELD_OUT} == {True, False}


def overlaps(held: Mapping[_Place, Contents]) -> list[Overlap]:
    """The contents that two places have; first those in which held-out items are trained on, the largest first."""
    images = _in_two({place: each.images for place, each in held.items()})
    captions = _in_two({place: each.captions for place, each in held.items()})
    found = [Overlap(*places, images[places], captions[places]) for places in {**images, **captions}]
    return sorted(found, key=lambda each: (not each.spoils, -each.images, -each.captions, each.one, each.other))


def _in_two(held: Mapping[_Place, Set[Hashable]]) -> Counter[tuple[_Place, _Place]]:
    """The number of contents that two places have."""
    places = defaultdict[Hashable, list[_Place]](list)
    for place, contents in held.items():
        for content in contents:
            places[content].append(place)
    found = Counter[tuple[_Place, _Place]]()
    for at in places.values():
        if len(at) > 1:
            found.update(itertools.combinations(at, 2))
    return found


def normalised(caption: str) -> str:
    """A caption's words in lower case, without punctuation and in one form of Unicode (NFKC).

    >>> normalised("Two dogs,  on a BEACH.")
    'two dogs on a beach'
    """
    return " ".join(_WORDS.findall(unicodedata.normalize("NFKC", caption).casefold()))


def shared_items(held: Mapping[_Place, Contents], names: Mapping[str, str]) -> list[str]:
    """The items, of the names that a site kept, whose image or caption is in two places."""
    seen = Counter(digest for each in held.values() for digest in (*each.images, *each.captions))
    return sorted({name for digest, name in names.items() if seen[digest] > 1})


# ------------------------------------------------------------------------------------------------ files of the sites
@dataclass
class _Split:
    """Keyed digests of a split, and names of their items, which stay at the site."""

    images: dict[str, str] = field(default_factory=dict)  # key of the first item with the image, by digest
    captions: dict[str, str] = field(default_factory=dict)


def digests_of(
    data: Data, site: str, key: bytes, *, image: bool = True, text: bool = True, progress: Progress | None = None
) -> tuple[OverlapFile, dict[str, str]]:
    """The file of a site, and the name of an item for each digest in it, which stays at the site.

    Images in files are compared byte by byte, those in archives, tables and arrays by their pixels, features by their
    values. The key is the secret that the sites share; ``image`` and ``text`` say what the site uses.

    Raises:
        InputError: the data cannot be read.
    """
    splits = dict[str, _Split]()
    for name, split, content, captions in _items(data, progress):
        part = splits.setdefault(split, _Split())
        if image and content is not None:
            part.images.setdefault(_keyed(key, b"image", content), name)
        for caption in captions if text else ():
            part.captions.setdefault(_keyed(key, b"caption", caption), name)
    made = OverlapFile.model_validate(
        {
            "format": 1,
            "site": site,
            "key": _keyed(key, b"key", b""),
            "splits": {
                split: {"images": sorted(part.images), "captions": sorted(part.captions)}
                for split, part in splits.items()
            },
        }
    )
    names = {
        digest: name for part in splits.values() for digest, name in (*part.images.items(), *part.captions.items())
    }
    return made, names


def _keyed(key: bytes, kind: bytes, content: bytes) -> str:
    return hmac.digest(key, _LABEL + kind + b"\0" + content, "sha256")[:_BYTES].hex()


def _items(data: Data, progress: Progress | None) -> Iterator[tuple[str, str, bytes | None, Iterable[bytes]]]:
    """Key and split of each item, its image, None without one, and its normalised captions."""
    if data.name in catalogue.OTHERS:
        yield from _vectors(data, progress)
        return
    raw, kind = read_complete(data)
    usual = catalogue.find(data.name).draw
    split = split_of(raw.split, len(raw), data, usual, partial(raw.same_images, progress))
    contents = raw.images.contents(tell(progress, "images read", len(raw)))
    for row, (name, content) in enumerate(zip(raw.keys, contents, strict=True)):
        yield name, SPLITS[split[row]], content.encode() if raw.with_image[row] else None, _captions(raw, row, kind)


def _captions(raw: RawSet, row: int, kind: str) -> Iterable[bytes]:
    if kind == "bag" and raw.bag is not None:
        return (np.ascontiguousarray(raw.bag[row]).tobytes(),) if raw.bag[row].any() else ()
    return (text.encode() for caption in raw.captions[row] if (text := normalised(caption)))


def _vectors(data: Data, progress: Progress | None) -> Iterator[tuple[str, str, bytes | None, Iterable[bytes]]]:
    prepared = prepare(data, Backbone(name="features"), None, 0, progress)
    for row, (name, (image, text)) in enumerate(zip(prepared.keys, prepared.present, strict=True)):
        start = prepared.first[row]
        captions = prepared.text[start : start + prepared.captions[row]] if text else ()
        content = np.ascontiguousarray(prepared.image[row]).tobytes() if image else None
        yield name, SPLITS[prepared.split[row]], content, (np.ascontiguousarray(each).tobytes() for each in captions)


def joined(files: Sequence[tuple[str, OverlapFile]]) -> dict[_Place, Contents]:
    """The contents of several sites by site and split, of files with their places for errors.

    Raises:
        InputError: two files are of one site, or were made with different keys.
    """
    held = dict[_Place, Contents]()
    for place, each in files:
        if each.key != files[0][1].key:
            raise InputError(place, "digests made with another key", f"the key with which {files[0][0]} was made")
        if any(site == each.site for site, _ in held):
            raise InputError(place, f"a second file of {each.site}", "one file of each site")
        held |= each.contents
    return held
