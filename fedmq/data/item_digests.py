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
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data
from fedmq.data.catalogue import TextKind
from fedmq.data.prepared_arrays import Prepared, mapped
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS
from fedmq.errors import FedmqError, InputError
from fedmq.storage.locks import locked
from fedmq.storage.run_folder import write_atomically
from fedmq.text import Progress, tell

#: uint8 [n, 3, 32]: digests of each item's key, split and labels, of its image, and of its captions.
ItemDigests = npt.NDArray[np.uint8]

_FILE = "item_digests.npy"
_REPORTED = 256  # items between two reports of progress
_BLOCK = 4096  # items read at a time


def salted_digest(items: ItemDigests, run: str, *, image: bool = True, text: bool = True) -> str:
    """Digest (hex) of a data set for one run: SHA-256 over ``fedmq data``, the run's id and the items' digests.

    ``image`` and ``text`` say whether the images and the captions belong to the data.
    """
    parts = [0, *([1] if image else []), *([2] if text else [])]
    digest = hashlib.sha256(f"fedmq data\0{run}\0".encode())
    digest.update(np.ascontiguousarray(items if len(parts) == items.shape[1] else items[:, parts]).data)
    return digest.hexdigest()


def item_digests(prepared: Prepared, data: Data, progress: Progress | None = None) -> ItemDigests:
    """The digests of a prepared set's items; computed once, and then kept in its folder.

    Files of images are read through the section from which it was prepared.

    Raises:
        InputError: an image cannot be read, or the data are no longer those that were prepared.
    """
    path = prepared.folder / _FILE
    if (kept := _kept(path, prepared)) is not None:
        return kept
    with ExitStack() as held:
        with suppress(OSError):  # a read-only cache
            # One process of a run computes them, and the others wait.
            held.enter_context(locked(path.with_suffix(".lock")))
        if (kept := _kept(path, prepared)) is not None:
            return kept
        digests = _computed(prepared, data, progress)
        with suppress(FedmqError):  # a read-only cache
            write_atomically(path, lambda temporary: _save(temporary, digests))
        return digests


def _kept(path: Path, prepared: Prepared) -> ItemDigests | None:
    """The digests that were computed earlier; None if there are none, or they are damaged."""
    with suppress(InputError):
        found: ItemDigests = mapped(path)
        if found.shape == (prepared.n, 3, 32) and found.dtype == np.uint8:
            return found
    return None


def _computed(prepared: Prepared, data: Data, progress: Progress | None) -> ItemDigests:
    rows = _of_features(prepared) if prepared.meta.source.get("weights") is None else _of_raw(prepared, data)
    on_progress, digests = tell(progress, "items digested", prepared.n), bytearray()
    for row, (head, (image, text)) in enumerate(zip(_heads(prepared), rows, strict=True), 1):
        digests += head + image + text
        if row == prepared.n or not row % _REPORTED:
            on_progress(row)
    return np.frombuffer(digests, np.uint8).reshape(prepared.n, 3, 32)


def _save(path: Path, digests: ItemDigests) -> None:
    with path.open("wb") as file:
        np.save(file, digests, allow_pickle=False)


def _heads(prepared: Prepared) -> Iterator[bytes]:
    """Digest of each item's key, split and label names."""
    splits = [SPLITS[number] for number in np.asarray(prepared.split).tolist()]
    for facts in zip(prepared.keys, splits, _labels(prepared), strict=True):
        yield hashlib.sha256(json.dumps(facts).encode()).digest()


def _labels(prepared: Prepared) -> Iterator[list[str]]:
    """The names of each item's labels, sorted."""
    if prepared.labels is None:
        yield from ([] for _ in range(prepared.n))
        return
    names = np.array(prepared.label_names, dtype=object)
    order = np.argsort(names, kind="stable")
    for start in range(0, prepared.n, _BLOCK):
        flags = np.asarray(prepared.labels[start : start + _BLOCK])[:, order]
        rows, columns = np.nonzero(flags)
        held, ends = names[order[columns]].tolist(), np.searchsorted(rows, np.arange(len(flags) + 1)).tolist()
        yield from (held[begin:end] for begin, end in pairwise(ends))


def _of_features(prepared: Prepared) -> Iterator[tuple[bytes, bytes]]:
    # Rows of a mapped file are slow to take one by one.
    firsts = np.append(prepared.first, len(prepared.text))
    for start in range(0, prepared.n, _BLOCK):
        part = slice(start, min(start + _BLOCK, prepared.n))
        image, text = np.asarray(prepared.image[part]), np.asarray(prepared.text[firsts[start] : firsts[part.stop]])
        begins, counts = (firsts[part] - firsts[start]).tolist(), prepared.captions[part].tolist()
        for row, begin, count in zip(image, begins, counts, strict=True):
            yield _of_array(row), _of_array(text[begin : begin + count])


def _of_array(values: npt.NDArray[np.generic]) -> bytes:
    digest = hashlib.sha256(f"{values.dtype.name} {values.shape}\0".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()


def _of_raw(prepared: Prepared, data: Data) -> Iterator[tuple[bytes, bytes]]:
    from fedmq.data.extract import read_complete  # noqa: PLC0415 - brings the encoders

    raw, kind = read_complete(data)
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
