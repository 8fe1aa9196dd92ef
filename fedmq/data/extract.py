"""Extract frozen features of a raw set chunk by chunk, so that an interrupted extraction can resume.

Features are cached in ``features/<key>.npy``. The key is the digest of the images (or captions) and of the encoder's
weights, so scenarios that differ in split, labels or method share them. Prepared folders link to these files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.catalogue import TextKind
from fedmq.data.prepared_arrays import Prepared, finish, mapped, open_prepared, prepared_key, save_arrays, save_present
from fedmq.data.raw_set import RawSet, array_digest
from fedmq.data.readers.openmoji import Drawings
from fedmq.data.splits import origin_of_split, split_of
from fedmq.data.warnings import DataWarnings, of_captions, of_vectors
from fedmq.encoders.base import Encoder
from fedmq.encoders.select import image_encoder, text_encoder
from fedmq.errors import DataItemError, InputError, RunError
from fedmq.storage.cache import build_once, key_of
from fedmq.storage.locks import locked
from fedmq.storage.regular_files import read_regular
from fedmq.text import Progress, tell

Array = npt.NDArray[Any]

CHUNK = 128  # images per checkpoint; captions use twice as many items
READERS = min(16, os.cpu_count() or 4)  # decoding threads: Pillow releases the GIL while it decodes


# --- rows in the cache ----------------------------------------------------------------------------------------------


def store(
    path: Path,
    n: int,
    chunk: int,
    encode: Callable[[range], Array],
    on_progress: Callable[[int], None],
    each: npt.NDArray[np.int64] | None = None,
) -> Path:
    """Compute the rows of n items chunk by chunk, and return their ``.npy`` file; finished chunks survive a crash.

    Resuming uses the same chunks, so batches have the same rows. ``encode`` maps a range of items to their rows, of
    which each item has one, or as many as ``each`` int64 [n] says; ``on_progress`` receives the number of items
    computed so far.

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
            ends = np.cumsum(np.ones(n, np.int64) if each is None else each)
            total = int(ends[-1])
            done, hashed = _marked(mark, partial, ends)
            rows = np.lib.format.open_memmap(partial, "r+") if done else None
            while done < n:
                values = encode(range(done, min(done + chunk, n)))
                if rows is None:
                    rows = np.lib.format.open_memmap(partial, "w+", values.dtype, (total, *values.shape[1:]))
                    hashed = _begun(rows)
                    # Reserve the space now: on a full disk, writing a mapped page kills the process (SIGBUS).
                    with partial.open("r+b") as file:
                        os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
                stop = min(done + chunk, n)
                rows[ends[done - 1] if done else 0 : ends[stop - 1]] = values
                hashed.update(np.ascontiguousarray(values).tobytes())
                done = stop
                # Flush the rows before the mark, so that the mark never counts rows that are not on disk.
                rows.flush()
                _write_mark(mark, f"{done} {hashed.hexdigest()}")
                on_progress(done)
            partial.replace(path)
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cache {path.parent} cannot be written: {error.strerror or error}") from error
    return path


def _marked(mark: Path, partial: Path, ends: npt.NDArray[np.int64]) -> tuple[int, blake3.blake3]:
    """Number of finished items and the digest of their rows so far; 0 if the mark or the rows are damaged.

    ``ends`` int64 [n] is the row after each item's last.
    """
    try:
        number, _, digest = read_regular(mark, "a mark of finished items").decode("ascii").partition(" ")
        # Open read-only first: opening a truncated file for writing would pad it with zeros.
        rows, done = mapped(partial), int(number)
        if not (0 < done <= len(ends) and rows.ndim and len(rows) == ends[-1]):
            return 0, blake3.blake3()
        hashed, stop = _begun(rows), int(ends[done - 1])
        for start in range(0, stop, CHUNK):
            hashed.update(rows[start : min(start + CHUNK, stop)].tobytes())
    except (InputError, ValueError):
        return 0, blake3.blake3()
    return (done, hashed) if hashed.hexdigest() == digest else (0, blake3.blake3())


def _begun(rows: Array) -> blake3.blake3:
    """The digest of no rows of this type and shape."""
    return blake3.blake3(f"{rows.dtype.str} {rows.shape[1:]} ".encode())


def _write_mark(mark: Path, content: str) -> None:
    unfinished = mark.with_name(f"{mark.name}.new")
    unfinished.write_text(content, encoding="ascii")
    unfinished.replace(mark)


def pooled(vectors: Array, counts: Sequence[int]) -> Array:
    """Video embeddings: the L2-normalised mean of each video's frame embeddings (RCSR, MSR-VTT).

    Takes frame embeddings float32 [sum(counts), d] and each video's number of frames; returns float32 [len(counts), d].
    """
    ends = np.cumsum(counts)
    means = np.stack([vectors[end - count : end].mean(axis=0) for end, count in zip(ends, counts, strict=True)])
    scaled: Array = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), np.float32(1e-12))
    return scaled.astype(np.float32)


def _image_rows(raw: RawSet, encoder: Encoder, stacked: int, rows: range) -> Array:
    """Rows of the image array; rows of items without an image are zero."""
    held = [row for row in rows if raw.with_image[row]]
    if not held:  # only the shape of an encoded image is needed
        empty = encoder.encode([encoder.fit(np.zeros((encoder.edge, encoder.edge, 3), np.uint8))])[0]
        return np.zeros((len(rows), *([stacked] if stacked else []), *empty.shape), empty.dtype)
    encoded = _encoded_images(raw, encoder, stacked, held)
    if len(held) == len(rows):
        return encoded
    spread = np.zeros((len(rows), *encoded.shape[1:]), encoded.dtype)
    spread[raw.with_image[rows.start : rows.stop]] = encoded
    return spread


def _encoded_images(raw: RawSet, encoder: Encoder, stacked: int, rows: Sequence[int]) -> Array:
    def read(row: int) -> list[Any]:
        return [encoder.fit(frame) for frame in raw.images.frames(row)]

    with ThreadPoolExecutor(READERS) as pool:
        frames = list(pool.map(read, rows))
    if stacked:
        # The array needs the same number of frames per video: frames of shorter videos are repeated evenly.
        frames = [[clip[(2 * i + 1) * len(clip) // (2 * stacked)] for i in range(stacked)] for clip in frames]
    encoded = encoder.encode([frame for clip in frames for frame in clip])
    if stacked:
        return encoded.reshape(len(rows), stacked, *encoded.shape[1:])
    return pooled(encoded, [len(clip) for clip in frames]) if raw.images.clips else encoded


def _text_rows(raw: RawSet, encoder: Encoder | None, rows: range) -> Array:
    """Rows of all captions of some items, or their bags of words; one row of zeros for an item without captions."""
    if encoder is None:
        assert raw.bag is not None  # noqa: S101 - checked by `complete`
        return raw.bag[rows.start : rows.stop].astype(np.float32)
    counts = np.array([len(raw.captions[row]) for row in rows])
    captions = [caption for row in rows for caption in raw.captions[row]]
    encoded = encoder.encode(captions or [""])[: len(captions)]  # without captions, only the shape is needed
    if counts.all():
        return encoded
    spread = np.zeros((int(np.maximum(counts, 1).sum()), *encoded.shape[1:]), dtype=encoded.dtype)
    spread[np.repeat(counts > 0, np.maximum(counts, 1))] = encoded
    return spread


# --- a prepared set -------------------------------------------------------------------------------------------------


def complete(raw: RawSet, data: Data, kind: TextKind) -> RawSet:
    """The set without incomplete items if ``data.missing`` is ``skip``; otherwise every item must be complete.

    In a set that states which modalities each item has, items without an image or without captions are complete, too.
    If ``data.missing`` is ``keep``, so are images without captions.

    Raises:
        InputError: an item lacks its image or its text (``data.missing: refuse``), or the kind of text is invalid.
    """
    if kind == "bag" and raw.bag is None:
        raise InputError("data.text", "bag", f"sentences: {data.name} has no bag of words")
    if kind == "bag" and data.captions is not None:
        raise InputError("data.captions", str(data.captions), "null: a bag of words is one text")
    no_image = [row for row in range(len(raw)) if raw.images.missing(row)]
    no_caption = [row for row in range(len(raw)) if not raw.captions[row]] if kind == "sentences" else []
    if data.missing == "skip":
        left_out = {*no_image, *no_caption, *np.flatnonzero(~raw.with_image).tolist()}
        if len(raw) - len(left_out) < 2:
            raise InputError(raw.place, f"{len(raw) - len(left_out)} items with image and caption", "at least 2")
        return raw.subset([row for row in range(len(raw)) if row not in left_out]) if left_out else raw
    if data.missing == "keep" and no_caption:
        raw = replace(raw, unpaired=True)
    hint = "data.missing: skip leaves out those without"
    if no_image:
        others = f" and {len(no_image) - 1} more" if len(no_image) > 1 else ""
        place = raw.images.name(no_image[0]) + others
        raise DataItemError(place, "no such file", f"an image for each item of {raw.place} ({hint})")
    if no_caption and not raw.unpaired:
        place = f"{raw.place}: {raw.keys[no_caption[0]]}"
        raise DataItemError(place, "no caption", f"items with at least one ({hint}, keep uses their images alone)")
    return raw


def read_complete(data: Data) -> tuple[RawSet, TextKind]:
    """A data set without incomplete items, and the kind of its texts; errors as of :func:`complete` and the reader."""
    kind = catalogue.text_kind(data)
    return complete(catalogue.find(data.name).read(data), data, kind), kind


def left_out(data: Data) -> str:
    """One line on the items that ``data.missing: skip`` leaves out; empty if there are none."""
    if data.missing != "skip":
        return ""
    raw, kind = catalogue.find(data.name).read(data), catalogue.text_kind(data)
    reasons: dict[str, set[int]] = {
        "no image": {row for row in range(len(raw)) if raw.images.missing(row) or not raw.with_image[row]},
        "no caption": {row for row in range(len(raw)) if not raw.captions[row]} if kind == "sentences" else set(),
    }
    rows = set().union(*reasons.values())
    several = sum(map(bool, reasons.values())) > 1
    why = ", ".join(f"{len(found):,} {reason}" if several else reason for reason, found in reasons.items() if found)
    return f"{len(rows):,} of {len(raw):,} items left out: {why}" if rows else ""


@dataclass(frozen=True, eq=False)
class ExtractionPlan:
    """What to extract from a raw set, and under which cache keys."""

    raw: RawSet  # the items to use
    kind: TextKind  # kind of text
    split: npt.NDArray[np.uint8]  # uint8 [n], indices into ``SPLITS``
    origin: str  # where the split comes from
    image: Encoder  # image encoder
    text: Encoder | None  # text encoder; None for bags of words
    image_key: str  # cache key of the image features
    text_key: str  # cache key of the text features
    digest: str  # digest of the prepared folder

    @property
    def finish(self) -> Callable[..., None]:
        """:func:`finish`, which knows the column, the source of the split and the files that are not read."""
        return partial(finish, column=self.raw.column, split=self.origin, ignored=self.raw.ignored_lines)


def plan(
    data: Data, backbone: Backbone, cache: Path, seed: int, device: str = "cpu", progress: Progress | None = None
) -> ExtractionPlan:
    """Read a set's annotations and the bytes of its images, and derive its extraction plan; computes no features.

    Raises:
        InputError: the set is incomplete, or it is incompatible with the backbone, or an image cannot be read.
    """
    entry, (raw, kind) = catalogue.find(data.name), read_complete(data)
    blocks = backbone.adapter_site == "blocks"
    if blocks and kind == "bag":
        raise InputError("backbone.adapter_site", "blocks with a bag of words", "feature")
    if backbone.text_encoder is not None and kind == "bag":
        raise InputError("data.text", "bag with backbone.text_encoder", "sentences: a bag of words is not encoded")
    if backbone.end_to_end and raw.images.clips:
        raise InputError("backbone.end_to_end", "true with videos", "false: their frames' features are averaged once")
    image = image_encoder(backbone, seed, cache, device)
    if isinstance(raw.images, Drawings):
        raw = replace(raw, images=replace(raw.images, edge=image.edge))
    raw = replace(raw, stamps=raw.images.stamps(tell(progress, "files read", len(raw))))
    split = split_of(raw.split, len(raw), data, entry.draw, lambda: raw.same_images(progress))
    text = text_encoder(backbone, seed, cache, device) if kind == "sentences" else None
    image_key = key_of("rows", raw.image_digest, image.digest)
    text_key = key_of("caption rows", raw.text_digest(kind), text.digest if text else "bag")
    labels = None if raw.labels is None else array_digest(raw.labels)
    # Pixels and token ids are shared between models, but the prepared folder also depends on the model applied later.
    later = (image.later,) if image.later else ()
    apart = ("val apart",) if entry.val_apart else ()
    by_column = () if raw.column is None else (data.column, raw.column)
    present = raw.present(kind)
    lacking = () if present is None else ("present", array_digest(present))
    facts = (raw.keys, array_digest(split), labels, raw.label_names, backbone.adapter_site)
    origin = origin_of_split(raw.split is not None, data, raw.split_remark)
    facts = (*facts, *later, *apart, *by_column, *lacking, origin, *raw.ignored_lines)
    digest = prepared_key(data.name, image_key, text_key, *facts)
    return ExtractionPlan(raw, kind, split, origin, image, text, image_key, text_key, digest)


def prepare_raw(
    data: Data,
    backbone: Backbone,
    cache: Path,
    seed: int,
    progress: Progress | None,
    device: str = "cpu",
    before: Callable[[ExtractionPlan], None] | None = None,
) -> Prepared:
    """Prepare a data set on disk, or reuse its prepared folder from the cache.

    The seed is that of random weights. The device of the frozen encoders is no part of the cache key, although it
    determines the last bits. ``before`` is called before features are extracted; not if the folder is cached.

    Raises:
        InputError: the set or the backbone is invalid, or an image is unreadable (the message names it).
        RunError: the cache cannot be written.
    """
    todo = plan(data, backbone, cache, seed, device, progress)
    folder = cache / "data" / todo.digest
    if folder.is_dir():
        return open_prepared(folder)
    if before is not None:
        before(todo)
    raw, n, rows = todo.raw, len(todo.raw), cache / "features"
    counts = np.array([len(captions) for captions in raw.captions] if todo.text else [1] * n, dtype=np.int64)
    frames = data.frames if raw.images.clips else 1
    # With adapters in the blocks, frames are pooled after the tower, so all frames' pixels are stored.
    stacked = frames if backbone.adapter_site == "blocks" and raw.images.clips else 0
    encoded, report = partial(_image_rows, raw, todo.image, stacked), tell(progress, "images", n)
    image_rows = store(rows / f"{todo.image_key}.npy", n, max(1, CHUNK // frames), encoded, report)
    each, report = np.maximum(counts, 1), tell(progress, "captions", n)
    text_rows = store(rows / f"{todo.text_key}.npy", n, 2 * CHUNK, partial(_text_rows, raw, todo.text), report, each)

    def fill(into: Path) -> None:
        _link(image_rows, into / "image.npy")
        _link(text_rows, into / "text.npy")
        save_arrays(into, captions=counts, labels=raw.labels, split=todo.split)
        source = {
            "data": data.name,
            "content": [raw.image_digest, raw.text_digest(todo.kind)],
            "backbone": backbone.model_dump(mode="json"),
            "weights": [todo.image.digest, todo.text.digest if todo.text else None],
            "later": todo.image.later,
            "seed": seed,
            "val_apart": catalogue.find(data.name).val_apart,
            **save_present(into, raw.present(todo.kind)),
        }
        image, text = (mapped(path) for path in (image_rows, text_rows))
        warnings = _with_captions(of_vectors(image, text, counts, raw.present(todo.kind), todo.split), raw, todo.text)
        described = partial(todo.finish, vocabulary=raw.vocabulary if todo.kind == "bag" else (), warnings=warnings)
        described(into, todo.digest, source, raw.keys, raw.label_names, mean=todo.image.mean, std=todo.image.std)

    return open_prepared(build_once(folder, fill))


def _with_captions(counted: DataWarnings, raw: RawSet, encoder: Encoder | None) -> DataWarnings:
    """Add :func:`of_captions`, the number of captions longer than the encoder reads, and the first such item."""
    if encoder is None:
        return counted
    counts = of_captions(caption for captions in raw.captions for caption in captions)
    if encoder.cut is None:
        return counted.model_copy(update=counts)
    found = [sum(encoder.cut(captions)) for captions in raw.captions]
    first = next((key for key, count in zip(raw.keys, found, strict=True) if count), "")
    return counted.model_copy(update={**counts, "cut": sum(found), "first_cut": first})


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
