"""Prepare a data set as arrays in the cache, or reuse the cached arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedmq.config.plug_ins import label
from fedmq.config.scenario import Backbone, Data
from fedmq.data import catalogue
from fedmq.data.prepared_arrays import (
    Array,
    Prepared,
    finish,
    first_rows,
    mapped,
    open_prepared,
    prepared_key,
    save_arrays,
    save_present,
)
from fedmq.data.readers.features import KNOWN, FeatureSet, checked, floats, read_features
from fedmq.data.readers.formats import list_arrays
from fedmq.data.splits import origin_of_split, same_rows, split_of
from fedmq.encoders.base import BATCH
from fedmq.errors import InputError
from fedmq.storage.cache import build_once, cache_folder, file_digest
from fedmq.text import Progress, first_few, tell

if TYPE_CHECKING:
    from fedmq.data.extract import ExtractionPlan

ITEMS = 256  # items per checkpoint while captions are encoded


def _prepare_features(path: Path, cache: Path, seed: int, column: str | None) -> Prepared:
    # The seed is part of the key only if it determined the split, which is known once the file has been read.
    content, by_column = file_digest(path), () if column is None else ("column", column)
    for known in (prepared_key("features", content, *by_column), prepared_key("features", content, seed, *by_column)):
        if (cache / "data" / known).is_dir():
            return open_prepared(cache / "data" / known)
    found = read_features(path, seed, column)
    digest = prepared_key("features", content, *(() if found.split_given else (seed,)), *by_column)
    origin = origin_of_split(found.split_given, Data(name="features", path=path))
    others = [stored.key for stored in list_arrays(path) if stored.key not in (*KNOWN, column)]
    ignored = [f"ignored, other arrays ({len(others)}): {first_few(others)}"] if others else []
    source = {"data": "features", "content": content, "seed": seed}
    return _stored(found, cache, digest, source, origin, ignored)


def _stored(
    found: FeatureSet, cache: Path, digest: str, source: Mapping[str, object], origin: str, ignored: Sequence[str] = ()
) -> Prepared:
    """Prepare features under a digest of what they were read from."""

    def fill(folder: Path) -> None:
        kept = {"captions": found.captions, "labels": found.labels, "split": found.split}
        save_arrays(folder, image=found.image, text=found.text, **kept)
        about = {**source, **save_present(folder, found.present)}
        told = partial(finish, warnings=found.warnings, split=origin, ignored=ignored)
        told(folder, digest, about, found.keys, found.label_names, column=found.column)

    return open_prepared(build_once(cache / "data" / digest, fill))


def _prepare_arrays(data: Data, cache: Path) -> Prepared:
    """Prepare precomputed features of a named set from published .mat, .h5 or .npz files."""
    from fedmq.data.readers import arrays  # noqa: PLC0415 - loaders are needed for their own sets only

    path, read = data.path or Path(data.name), catalogue.read_apart(arrays.read_arrays, data)
    entry, n = catalogue.find(data.name), len(read["image"])
    split = split_of(
        read.get("split"), n, data, entry.draw, lambda: same_rows(floats(path, "image", read["image"], (2,)))
    )
    found = checked(path, {**read, "split": split}, 0, data.column)
    content = hashlib.sha256()
    for part in (found.image, found.text, found.split, found.labels, found.present):
        if part is not None:
            content.update(repr(part.shape).encode() + np.ascontiguousarray(part).data)
    apart = ("val apart",) if entry.val_apart else ()
    by_column = () if found.column is None else ("column", data.column, found.column)
    origin = origin_of_split("split" in read, data)
    digest = prepared_key(data.name, "arrays", content.hexdigest(), found.label_names, *apart, *by_column, origin)
    source = {"data": data.name, "content": content.hexdigest(), "val_apart": entry.val_apart}
    return _stored(found, cache, digest, source, origin)


def prepare(
    data: Data,
    backbone: Backbone,
    cache: Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    device: str = "cpu",
    before: Callable[[ExtractionPlan], None] | None = None,
) -> Prepared:
    """Prepare a data set, or reuse its prepared folder from the cache; safe to call from several processes.

    The backbone is ``features`` if the data set already consists of features; the cache is by default
    :func:`cache_folder`, and the seed is that of random weights. ``before`` is called before features are extracted;
    not if they are cached or come from a file.

    Raises:
        InputError: data and backbone are incompatible, or the data or the weights are invalid.
        RunError: the cache cannot be written.
    """
    cache = cache_folder() if cache is None else cache
    if data.path is not None and not data.path.exists():
        allowed = f"an existing file or folder; docs/reference/data_sets.md shows the layout of {data.name}"
        raise InputError("data.path", str(data.path), allowed)
    if data.name == "features" and backbone.name != "features":
        raise InputError(
            "backbone.name", f"{backbone.name} with data.name features", "features with data.name features"
        )
    if catalogue.packaged(data.name) and backbone.name == "features":
        raise InputError("backbone.name", f"features with data.name {data.name}", "an encoder, e.g. lite")
    if backbone.name == "features" and data.name not in (*catalogue.SETS, *catalogue.OTHERS):
        allowed = "an encoder, e.g. lite: your own data set is read as images and texts"
        raise InputError("backbone.name", f"features with data.name {label(data.name)}", allowed)
    if data.name == "features":
        if data.path is None:
            raise InputError("data.path", None, "a .npz or .safetensors file")
        return _prepare_features(data.path, cache, data.split_seed, data.column)
    if backbone.name == "features":
        return _prepare_arrays(data, cache)
    from fedmq.data import extract  # noqa: PLC0415 - brings the encoders

    return extract.prepare_raw(data, backbone, cache, seed, progress, device, before)


def text_features(
    prepared: Prepared,
    backbone: Backbone,
    seed: int = 0,
    cache: Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
) -> npt.NDArray[np.float32]:
    """One vector per item, float32 [n, d]: the mean of its captions' frozen features; used to cluster the partition.

    Token ids are encoded by the frozen text tower chunk by chunk, so that an interrupted computation can resume. The
    result is stored in the prepared folder. The backbone is the one with which it was prepared: ``meta.json`` records
    it, too, but its weights may have moved since. The tower's weights are by default in the cache that holds
    ``prepared``.

    Raises:
        RunError: the cache cannot be written.
    """
    counts, first = np.asarray(prepared.captions), prepared.first
    if prepared.meta.text_dtype == "float32":
        return _mean_of(prepared.text, counts)
    from fedmq.data.extract import store  # noqa: PLC0415 - brings the encoders
    from fedmq.encoders import clip, clip_weights  # noqa: PLC0415 - brings the encoders

    @once
    def tower() -> clip.Frozen:
        stored = clip_weights.weights(backbone, seed, cache or prepared.folder.parent.parent)
        return clip.load_tower(stored, "text", device)

    def encoded(part: range) -> Array:
        some, stop = counts[part.start : part.stop], (*first, len(prepared.text))[part.stop]
        tokens = np.array(prepared.text[first[part.start] : stop])
        return _mean_of(clip.encode_texts(tower(), tokens, BATCH, device), some)

    on_progress = tell(progress, "captions for the clusters", prepared.n)
    path = store(prepared.folder / "text_features.npy", prepared.n, ITEMS, encoded, on_progress)
    features: npt.NDArray[np.float32] = np.array(mapped(path))
    return features


def _mean_of(text: Array, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Mean over each item's captions: all captions [N, d] and their numbers int64 [n] to float32 [n, d]."""
    first, several = first_rows(counts), np.maximum(counts, 1)
    total = np.array(text[first], dtype=np.float32)
    for number in range(1, int(several.max())):  # in the order of the captions, so that sums repeat bit for bit
        items = np.flatnonzero(several > number)
        total[items] += text[first[items] + number]
    mean: npt.NDArray[np.float32] = (total / several[:, None]).astype(np.float32)
    return mean
