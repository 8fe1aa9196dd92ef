"""Frozen features of a raw set, computed once: in chunks, so that an extraction that was killed goes on where it was.

Rows lie in ``features/<key>.npy`` of the cache, where the key is the digest of the pictures (or captions) and of the
weights: scenarios with other splits, labels or methods share them. A prepared folder links to them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.catalogue import TextKind
from fedmq.data.prepared import Prepared, finish, open_prepared, save_arrays
from fedmq.data.raw_set import RawSet, array_digest
from fedmq.data.readers.openmoji import Drawings
from fedmq.data.splits import split_of
from fedmq.encoders.base import Encoder
from fedmq.encoders.select import image_encoder, text_encoder
from fedmq.errors import InputError, RunError
from fedmq.progress import Progress, tell
from fedmq.storage.cache import build_once, key_of
from fedmq.storage.locks import locked

Array = npt.NDArray[Any]

CHUNK = 128  # pictures decoded and encoded before the next mark; captions go by twice as many items
READERS = min(16, os.cpu_count() or 4)  # threads that decode pictures: Pillow lets go of the interpreter while it does


# --- rows in the cache ----------------------------------------------------------------------------------------------


def store(path: Path, n: int, chunk: int, encode: Callable[[range], Array], told: Callable[[int], None]) -> Path:
    """Compute an array of n rows chunk by chunk, once; what is finished survives a kill.

    Args:
        path: of the finished ``.npy``.
        n: rows.
        chunk: rows computed at once. It stays the same when a run goes on, so the same rows meet in a batch.
        encode: a range of rows to their values [len(range), ...].
        told: called with the number of rows done.

    Returns:
        ``path``.

    Raises:
        RunError: the cache cannot be written.
    """
    if path.is_file():
        return path
    partial, mark = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.done")
    try:
        with locked(path.with_name(f"{path.name}.lock")):
            if path.is_file():
                return path
            done = _marked(mark, partial, n)
            mapped = np.lib.format.open_memmap(partial, "r+") if done else None
            while done < n:
                values = encode(range(done, min(done + chunk, n)))
                if mapped is None:
                    mapped = np.lib.format.open_memmap(partial, "w+", values.dtype, (n, *values.shape[1:]))
                    # All of its room now: a disk found full when a page is written kills the process without a word.
                    with partial.open("r+b") as file:
                        os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
                mapped[done : done + len(values)] = values
                done += len(values)
                # The rows first, then the mark that counts them: a mark never promises rows that are not there.
                mapped.flush()
                _write_mark(mark, done)
                told(done)
            partial.replace(path)
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cache {path.parent} cannot be written: {error.strerror or error}") from error
    return path


def _marked(mark: Path, partial: Path, n: int) -> int:
    """How many rows are finished; none where a crash of the machine damaged the mark or the rows."""
    try:
        done = int(mark.read_text(encoding="ascii"))
        # Opened to read first: opened to write, a file that is too short would be filled up with zeros.
        found = np.load(partial, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return 0
    return done if len(found) == n and 0 < done <= n else 0


def _write_mark(mark: Path, done: int) -> None:
    unfinished = mark.with_name(f"{mark.name}.new")
    unfinished.write_text(str(done), encoding="ascii")
    unfinished.replace(mark)


def pooled(vectors: Array, counts: Sequence[int]) -> Array:
    """Videos from their frames: the mean of the frames' embeddings, then unit length (RCSR, MSR-VTT).

    Args:
        vectors: float32 [sum(counts), d].
        counts: frames of each video.

    Returns:
        float32 [len(counts), d].
    """
    ends = np.cumsum(counts)
    means = np.stack([vectors[end - count : end].mean(axis=0) for end, count in zip(ends, counts, strict=True)])
    scaled: Array = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.float32(1e-12))
    return scaled.astype(np.float32)


def _image_rows(raw: RawSet, encoder: Encoder, stacked: int, rows: range) -> Array:
    def read(row: int) -> list[Any]:
        return [encoder.fit(frame) for frame in raw.pictures.frames(row)]

    with ThreadPoolExecutor(READERS) as pool:
        frames = list(pool.map(read, rows))
    if stacked:
        # As many of each, in a row of its own; a shorter video's are repeated evenly.
        frames = [[own[(2 * i + 1) * len(own) // (2 * stacked)] for i in range(stacked)] for own in frames]
    encoded = encoder.encode([frame for own in frames for frame in own])
    if stacked:
        return encoded.reshape(len(rows), stacked, *encoded.shape[1:])
    return pooled(encoded, [len(own) for own in frames]) if raw.pictures.clips else encoded


def _text_rows(raw: RawSet, encoder: Encoder, most: int, rows: range) -> Array:
    encoded = encoder.encode([caption for row in rows for caption in raw.captions[row]])
    counts = np.array([len(raw.captions[row]) for row in rows])
    spread = np.zeros((len(rows), most, *encoded.shape[1:]), dtype=encoded.dtype)
    spread[np.arange(most) < counts[:, None]] = encoded
    return spread


# --- a prepared set -------------------------------------------------------------------------------------------------


def complete(raw: RawSet, data: Data, kind: TextKind) -> RawSet:
    """The items that can be used.

    Raises:
        InputError: an item lacks its picture or its text and ``data.missing`` is ``refuse``.
    """
    if kind == "bag" and raw.bag is None:
        raise InputError("data.text", "bag", f"sentences: {data.name} has no bag of words")
    if kind == "bag" and data.captions is not None:
        raise InputError("data.captions", str(data.captions), "null: a bag of words is one text")
    absent = [row for row in range(len(raw)) if raw.pictures.missing(row)]
    silent = [row for row in range(len(raw)) if not raw.captions[row]] if kind == "sentences" else []
    if data.missing == "skip":
        left_out = {*absent, *silent}
        if len(raw) - len(left_out) < 2:
            raise InputError(raw.place, f"{len(raw) - len(left_out)} items with picture and caption", "at least 2")
        return raw.subset([row for row in range(len(raw)) if row not in left_out]) if left_out else raw
    hint = "data.missing: skip leaves such items out, fedmq data check lists them"
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise InputError(raw.pictures.name(absent[0]) + others, "no such file", f"the items of {raw.place}; {hint}")
    if silent:
        raise InputError(f"{raw.place}: {raw.keys[silent[0]]}", "no caption", f"at least one for each item; {hint}")
    return raw


@dataclass(frozen=True, eq=False)
class ExtractionPlan:
    """What a raw set becomes, before anything is computed.

    Args:
        raw: the items that are used.
        kind: of text.
        split: uint8 [n].
        image: encoder of the pictures.
        text: encoder of the captions, or None for bags.
        image_key: name of the pictures' rows in the cache.
        text_key: name of the texts' rows.
        digest: of the prepared folder.
    """

    raw: RawSet
    kind: TextKind
    split: npt.NDArray[np.uint8]
    image: Encoder
    text: Encoder | None
    image_key: str
    text_key: str
    digest: str


def plan(data: Data, backbone: Backbone, cache: Path, seed: int, device: str = "cpu") -> ExtractionPlan:
    """Read a set's annotations and name everything that would be made of it.

    Raises:
        InputError: the set is not complete, or set and backbone do not go together.
    """
    entry = catalogue.find(data.name)
    kind: TextKind = data.text or entry.text
    raw = complete(entry.read(data), data, kind)
    blocks = backbone.adapter_site == "blocks"
    if blocks and kind == "bag":
        raise InputError("backbone.adapter_site", "blocks with a bag of words", "feature")
    if backbone.text_encoder is not None and kind == "bag":
        raise InputError("data.text", "bag with backbone.text_encoder", "sentences: a bag of words is not encoded")
    if backbone.end_to_end and raw.pictures.clips:
        raise InputError("backbone.end_to_end", "true with videos", "false: their frames' features are averaged once")
    split = split_of(raw.split, len(raw), data, entry.draw)
    image = image_encoder(backbone, seed, cache, device)
    if isinstance(raw.pictures, Drawings):
        raw = replace(raw, pictures=replace(raw.pictures, edge=image.edge))
    text = text_encoder(backbone, seed, cache, device) if kind == "sentences" else None
    image_key = key_of("rows", raw.image_digest, image.digest)
    text_key = key_of("rows", raw.text_digest(kind), text.digest if text else "bag")
    labels = None if raw.labels is None else array_digest(raw.labels)
    # Pixels and token ids are shared whatever network sees them; what is made with its weights later is not.
    later = (image.later,) if image.later else ()
    apart = ("val apart",) if entry.val_apart else ()
    facts = (raw.keys, array_digest(split), labels, raw.label_names, backbone.adapter_site, *later, *apart)
    digest = key_of(data.name, image_key, text_key, *facts)
    return ExtractionPlan(raw, kind, split, image, text, image_key, text_key, digest)


def prepare_raw(
    data: Data, backbone: Backbone, cache: Path, seed: int, progress: Progress | None, device: str = "cpu"
) -> Prepared:
    """Turn a set on disk into a prepared folder, or find it in the cache.

    Args:
        data: of the scenario.
        backbone: whose features are computed.
        cache: folder.
        seed: of random weights.
        progress: told while encoding.
        device: where frozen encoders compute. It is no part of the key: whoever comes first decides the last digits.

    Raises:
        InputError: anything about the set or the backbone is not allowed; an unreadable picture is named.
        RunError: the cache cannot be written.
    """
    made = plan(data, backbone, cache, seed, device)
    folder = cache / "data" / made.digest
    if folder.is_dir():
        return open_prepared(folder)
    raw, n, rows = made.raw, len(made.raw), cache / "features"
    counts = np.array([len(own) for own in raw.captions] if made.text else [1] * n, dtype=np.int64)
    most, frames = int(counts.max()), data.frames if raw.pictures.clips else 1
    # With adapters in the blocks frames are pooled after the tower, so that their pixels are kept.
    stacked = frames if backbone.adapter_site == "blocks" and raw.pictures.clips else 0
    image_rows = store(
        rows / f"{made.image_key}.npy",
        n,
        max(1, CHUNK // frames),
        lambda part: _image_rows(raw, made.image, stacked, part),
        tell(progress, "images", n),
    )
    text_encoding, bag = made.text, raw.bag

    def text_chunk(part: range) -> Array:
        if text_encoding is not None:
            return _text_rows(raw, text_encoding, most, part)
        assert bag is not None  # noqa: S101 - `complete` saw to it
        return bag[part.start : part.stop, None].astype(np.float32)

    text_rows = store(rows / f"{made.text_key}.npy", n, 2 * CHUNK, text_chunk, tell(progress, "captions", n))

    def fill(into: Path) -> None:
        _link(image_rows, into / "image.npy")
        _link(text_rows, into / "text.npy")
        save_arrays(into, captions=counts, labels=raw.labels, split=made.split)
        source = {
            "data": data.name,
            "content": [raw.image_digest, raw.text_digest(made.kind)],
            "backbone": backbone.model_dump(mode="json"),
            "weights": [made.image.digest, made.text.digest if made.text else None],
            "seed": seed,
            "val_apart": catalogue.find(data.name).val_apart,
        }
        finish(into, made.digest, source, raw.keys, raw.label_names, mean=made.image.mean, std=made.image.std)

    return open_prepared(build_once(folder, fill))


def _link(source: Path, target: Path) -> None:
    """The same bytes under another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
