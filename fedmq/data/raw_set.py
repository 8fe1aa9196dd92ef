"""A data set as it lies on a user's disk: pictures, captions or tags, labels, split; before any encoder.

Every loader returns a :class:`RawSet`; what is common to all of them is here: the check of a set, splits drawn as
papers draw them, labels from names, reading text and JSON files with errors of one line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data.readers.features import MAX_LABELS
from fedmq.encoders.images import Pictures
from fedmq.errors import InputError, line_of

Array = npt.NDArray[Any]
U8 = npt.NDArray[np.uint8]


def is_number(text: str) -> bool:
    """Whether a word of a list is a number: plain digits, and no more than an index or a class has."""
    return text.isascii() and text.isdecimal() and len(text) < 19


@dataclass(frozen=True, eq=False)
class RawSet:
    """Items of a data set, in a fixed order.

    Args:
        place: what an error names, e.g. the annotation file.
        keys: n names of the items, all different.
        pictures: n images or videos.
        captions: n tuples of captions, possibly empty.
        bag: [n, V] bag of words (0/1 or counts), or None where the set has none.
        labels: uint8 [n, L] multi-hot, or None.
        label_names: L names; two levels are told apart by ``coarse:`` and ``fine:`` before the name.
        split: uint8 [n], places in ``SPLITS``, or None where the set has no split of its own.
    """

    place: str
    keys: tuple[str, ...]
    pictures: Pictures
    captions: tuple[tuple[str, ...], ...]
    bag: Array | None = None
    labels: U8 | None = None
    label_names: tuple[str, ...] = ()
    split: U8 | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def subset(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> RawSet:
        """Some of the items, in the order asked for."""
        chosen = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            keys=tuple(self.keys[row] for row in chosen),
            pictures=self.pictures.subset(chosen.tolist()),
            captions=tuple(self.captions[row] for row in chosen),
            bag=None if self.bag is None else self.bag[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            split=None if self.split is None else self.split[chosen],
        )

    def labelled(self) -> RawSet:
        """The items that have a label.

        Raises:
            InputError: fewer than two have one.
        """
        return self.subset(labelled_rows(self.labels, self.place))

    def first_captions(self, most: int) -> RawSet:
        """The items with at most so many captions each, the first ones."""
        return replace(self, captions=tuple(own[:most] for own in self.captions))

    @cached_property
    def image_digest(self) -> str:
        """SHA-256 (hex) of which pictures these are: names, sizes and times of change, not every pixel."""
        return _digest(self.pictures.stamp(row) for row in range(len(self)))

    def text_digest(self, kind: str) -> str:
        """SHA-256 (hex) of the captions (``sentences``) or of the bags (``bag``)."""
        if kind == "bag" and self.bag is not None:
            return array_digest(self.bag)
        return _digest(json.dumps(captions) for captions in self.captions)


def array_digest(value: Array) -> str:
    """SHA-256 (hex) of an array's type, shape and values."""
    found = hashlib.sha256(repr((value.shape, value.dtype.name)).encode())
    found.update(np.ascontiguousarray(value).data)
    return found.hexdigest()


def _digest(lines: Iterable[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        # A name on disk may be of any bytes.
        found.update(f"{line}\n".encode(errors="surrogateescape"))
    return found.hexdigest()


def checked(found: RawSet) -> RawSet:
    """A loader's result, if it is one.

    Raises:
        InputError: fewer than two items, a key twice, too many labels, or half a character somewhere.
    """
    if len(found) < 2:
        raise InputError(found.place, f"{len(found)} items", "at least 2: one to train on, one to test on")
    twice = [key for key, count in Counter(found.keys).items() if count > 1]
    if twice:
        raise InputError(found.place, f"{twice[0]!r} twice ({len(twice)} keys in all)", "every item once")
    if len(found.label_names) > MAX_LABELS:
        raise InputError(found.place, f"{len(found.label_names)} labels", f"at most {MAX_LABELS}")
    for row, key in enumerate(found.keys):
        for text in (key, *found.captions[row]):
            whole(text, f"{found.place}: {key!a}")
        try:
            # A name on disk may be of any bytes, which Python keeps; these could come from no disk.
            os.fsencode(found.pictures.name(row))
        except UnicodeEncodeError:
            raise InputError(f"{found.place}: {key!a}", found.pictures.name(row), "the name of a file") from None
    for name in found.label_names:
        whole(name, f"{found.place}: labels")
    return found


def whole(text: str, place: str) -> str:
    """A text of whole characters: a string cut in the middle of one, or of bytes that are no UTF-8, is not.

    Raises:
        InputError: it holds half a character, which can neither be encoded nor printed.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[max(0, error.start - 40) : error.start + 40]
        raise InputError(place, found, "whole characters of Unicode") from None
    return text


# --- splits ---------------------------------------------------------------------------------------------------------


# --- labels and files -----------------------------------------------------------------------------------------------


def multi_hot(
    labels: Sequence[Collection[str]], names: Sequence[str] | None = None
) -> tuple[U8 | None, tuple[str, ...]]:
    """Label names of each item to columns.

    Args:
        labels: [n] names of each item.
        names: all names in their order; None takes those that occur, sorted.

    Returns:
        uint8 [n, L] and the L names; None and none where nobody has a label.
    """
    names = tuple(sorted({name for own in labels for name in own}) if names is None else names)
    if not names:
        return None, ()
    column = {name: index for index, name in enumerate(names)}
    hot = np.zeros((len(labels), len(names)), dtype=np.uint8)
    for row, own in enumerate(labels):
        for name in own:
            hot[row, column[name]] = 1
    return hot, names


def labelled_rows(labels: Array | None, place: str) -> npt.NDArray[np.int64]:
    """The items that ``data.labelled`` keeps.

    Args:
        labels: [n, L] multi-hot, or class numbers [n], of which everybody has one.
        place: what an error names.

    Raises:
        InputError: fewer than two items have a label.
    """
    kept = np.zeros(0, np.int64)
    if labels is not None:
        kept = np.arange(len(labels)) if labels.ndim == 1 else np.flatnonzero(labels.any(axis=1))
    if len(kept) < 2:
        raise InputError(f"{place}: data.labelled", f"{len(kept)} items with a label", "at least 2")
    return kept


def read_text(path: Path, encoding: str = "utf-8-sig") -> str:
    """A whole text file; the mark that Windows sets before UTF-8 is passed over.

    Raises:
        InputError: missing or unreadable.
    """
    try:
        return path.read_text(encoding=encoding)
    except FileNotFoundError:
        allowed = "a file of the data set; see docs/reference/data_sets.md for its layout"
        raise InputError(str(path), "no such file", allowed) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: line {line_of(error)}", error.reason, f"{encoding.removesuffix('-sig')} text"
        ) from None
    except OSError as error:
        readable = f"a readable {encoding.removesuffix('-sig')} file"
        raise InputError(str(path), error.strerror or str(error), readable) from None


def read_json(path: Path) -> Any:
    """A JSON file.

    Raises:
        InputError: missing, unreadable or no JSON.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), str(error), "valid JSON") from None


def folder_of(data: Data) -> Path:
    """``data.path`` where it must be a folder.

    Raises:
        InputError: it is none.
    """
    if data.path is None or not data.path.is_dir():
        allowed = f"the folder of {data.name}; see docs/reference/data_sets.md for its layout"
        raise InputError("data.path", str(data.path), allowed)
    return data.path


def refuse_keys(data: Data, names: Iterable[str], what: str) -> None:
    """Refuse keys of ``data`` that say nothing about how a set is stored here.

    Args:
        data: of the scenario.
        names: the keys.
        what: how the set is stored, for the message.

    Raises:
        InputError: one of them is given.
    """
    for name in names:
        value = getattr(data, name)
        if value != Data.model_fields[name].default:
            raise InputError(f"data.{name}", str(value), f"no such key: it is not for {what}")


def first_existing(paths: Sequence[Path], place: str, what: str) -> Path:
    """The first path that exists.

    Raises:
        InputError: none does; all are listed.
    """
    for path in paths:
        if path.exists():
            return path
    raise InputError(place, f"no {what}", " or ".join(map(str, paths)))
