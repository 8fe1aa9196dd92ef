"""Digests of a data set's items, and the salted digest by which a process states what data it holds.

An item has three SHA-256 digests: of its key, split and label names (as JSON), of its image, and of its captions. An
image's digest covers its stamp (``Images.stamps``: the content and how it is decoded), or the float32 values of a row
of features; the captions' digest covers their texts, or the float32 values. None of them depends on the machine. The
salted digest hashes them together with the run's id, so that it reveals nothing to anyone without the data, and does
not link two runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data import catalogue
from fedmq.data.catalogue import TextKind
from fedmq.data.prepared_arrays import Prepared, mapped
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS
from fedmq.errors import FedmqError, InputError
from fedmq.storage.run_folder import write_atomically
from fedmq.text import Progress, tell

#: uint8 [n, 3, 32]: digests of each item's key, split and labels, of its image, and of its captions.
ItemDigests = npt.NDArray[np.uint8]

_FILE = "item_digests.npy"
_REPORTED = 256  # items between two reports of progress


def salted_digest(items: ItemDigests, run: str, *, image: bool = True, text: bool = True) -> str:
    """Digest (hex) of a data set for one run: SHA-256 over ``fedmq data``, the run's id and the items' digests.

    Args:
        items: digests of all items, in the order of the data set.
        run: the run's id.
        image: whether the images belong to the data.
        text: whether the captions belong to the data.
    """
    parts = [0, *([1] if image else []), *([2] if text else [])]
    digest = hashlib.sha256(f"fedmq data\0{run}\0".encode())
    digest.update(np.ascontiguousarray(items if len(parts) == items.shape[1] else items[:, parts]).data)
    return digest.hexdigest()


def item_digests(prepared: Prepared, data: Data, progress: Progress | None = None) -> ItemDigests:
    """The digests of a prepared set's items; computed once, and then kept in its folder.

    Args:
        prepared: the set.
        data: the section it was prepared from; files of images are read through it.
        progress: called with (what, done, total) while images are read.

    Raises:
        InputError: an image cannot be read, or the data are no longer those that were prepared.
    """
    path = prepared.folder / _FILE
    with suppress(InputError):
        found: ItemDigests = mapped(path)
        if found.shape == (prepared.n, 3, 32) and found.dtype == np.uint8:
            return found
    rows = _of_features(prepared) if prepared.meta.source.get("weights") is None else _of_raw(prepared, data)
    on_progress = tell(progress, "items digested", prepared.n)
    digests = np.zeros((prepared.n, 3, 32), np.uint8)
    for row, (head, (image, text)) in enumerate(zip(_heads(prepared), rows, strict=True)):
        digests[row] = [list(each) for each in (head, image, text)]
        if row + 1 == prepared.n or not (row + 1) % _REPORTED:
            on_progress(row + 1)
    with suppress(FedmqError):  # a read-only cache
        write_atomically(path, lambda temporary: _save(temporary, digests))
    return digests


def _save(path: Path, digests: ItemDigests) -> None:
    with path.open("wb") as file:
        np.save(file, digests, allow_pickle=False)


def _heads(prepared: Prepared) -> Iterator[bytes]:
    """Digest of each item's key, split and label names."""
    labels, names = prepared.labels, prepared.label_names
    for row, key in enumerate(prepared.keys):
        held = [] if labels is None else sorted(names[column] for column in np.flatnonzero(labels[row]))
        yield hashlib.sha256(json.dumps([key, SPLITS[prepared.split[row]], held]).encode()).digest()


def _of_features(prepared: Prepared) -> Iterator[tuple[bytes, bytes]]:
    for row in range(prepared.n):
        start = prepared.first[row]
        image, text = prepared.image[row], prepared.text[start : start + prepared.captions[row]]
        yield _of_array(image), _of_array(text)


def _of_array(values: npt.NDArray[np.generic]) -> bytes:
    digest = hashlib.sha256(f"{values.dtype.name} {values.shape}\0".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def _of_raw(prepared: Prepared, data: Data) -> Iterator[tuple[bytes, bytes]]:
    from fedmq.data.extract import complete  # noqa: PLC0415 - brings the encoders

    entry = catalogue.find(data.name)
    kind: TextKind = data.text or entry.text
    raw = complete(entry.read(data), data, kind)
    if raw.keys != prepared.keys:
        found, allowed = "other items than those that were prepared", "the data as they were when the run began"
        raise InputError(raw.place, found, allowed)
    stamps = raw.images.stamps() if raw.stamps is None else raw.stamps
    for row, stamp in enumerate(stamps):
        yield hashlib.sha256(stamp.encode()).digest(), _of_text(raw, row, kind)


def _of_text(raw: RawSet, row: int, kind: TextKind) -> bytes:
    if kind == "bag" and raw.bag is not None:
        return _of_array(raw.bag[row])
    return hashlib.sha256(json.dumps(raw.captions[row]).encode()).digest()
