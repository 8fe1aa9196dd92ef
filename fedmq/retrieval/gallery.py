"""Galleries: a data set or a folder of images, encoded by a released model for search.

:mod:`fedmq.retrieval.encoded_gallery` describes its files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fedmq.config.resolve import load
from fedmq.config.scenario import Backbone, Data
from fedmq.config.sections import Modality
from fedmq.config.site import Site, read_site
from fedmq.config.yaml_files import read_yaml
from fedmq.data import catalogue
from fedmq.data.prepare import prepare
from fedmq.data.prepared_arrays import Prepared
from fedmq.encoders.base import MODALITIES, Array
from fedmq.encoders.images import decode
from fedmq.errors import InputError
from fedmq.evaluation import hamming
from fedmq.federation.agreement import difference, format_of, spread, unknown_name
from fedmq.retrieval.encoded_gallery import (
    ELSEWHERE,
    FORMAT,
    Gallery,
    GalleryMeta,
    folder_contents,
    folder_name,
    open_gallery,
    write_items,
)
from fedmq.retrieval.released_model import ModelFolder, Release, Retriever
from fedmq.runs.data_records import AgreementRecord
from fedmq.storage.cache import build_once, key_of
from fedmq.storage.json_files import read_json
from fedmq.text import Progress

_BATCH = 256
_FEATURES: Final = (".npz", ".safetensors")
ALLOWED: Final = (
    "a folder of images, a scenario or site file (YAML) for its data, or with backbone features a features file "
    f"({', '.join(_FEATURES)})"
)


def data_in(file: Path) -> Data:
    """The data of a scenario, a site file or a features file."""
    if not file.is_file():
        raise InputError(f"--gallery {file}", "no such file or folder", ALLOWED)
    if file.suffix.lower() in _FEATURES:
        return Data(name="features", path=file.absolute())
    # A site file may have the same keys as a scenario of nothing but data; its paths start at its own folder.
    site = read_yaml(file).keys() <= Site.model_fields.keys()
    data = read_site(file).data if site else load(file).data
    if data is None:
        raise InputError(f"--gallery {file}", f"a {'site file' if site else 'scenario'} without data", ALLOWED)
    return data


def caption_texts(data: Data, backbone: Backbone, keys: Sequence[str]) -> list[list[str]]:
    """Captions of each item as text; empty if the data set has vectors only, as with backbone ``features``."""
    known: dict[str, Sequence[str]] = {}
    if backbone.name != "features":
        raw = catalogue.find(data.name).read(data)
        known = dict(zip(raw.keys, raw.captions, strict=True))
    return [list(known.get(key, ())) for key in keys]


def site_gallery(
    release: Release, chosen: Path, progress: Progress | None
) -> tuple[Data, Prepared, Callable[[Array], Array]]:
    """Prepare the data that a user chose for a run whose data only the sites have.

    Returns the data, their arrays, and a function of rows of captions [n, ...] that gives them as the model reads them:
    the counts of bags of words in the order on which the sites agreed.
    """
    scenario, place, data = release.scenario, f"--gallery {chosen}", data_in(chosen)
    record = read_json(release.run.agreement, AgreementRecord, "what the sites of a run agreed on")
    if record.agreed is None:
        raise InputError(str(release.run.agreement), "no agreed format", "the agreement of a run on sites' own data")
    agreed = record.agreed.payload()
    prepared = prepare(data, scenario.backbone, release.cache, scenario.seed, progress, release.device)
    present = np.asarray(prepared.present)
    image, text = bool(present[:, 0].any()), bool(present[:, 1].any())
    if not image:
        raise InputError(place, "data without images", "data with images")
    # Labels are not encoded, so they may differ.
    held = replace(format_of(prepared, image=image, text=text), label_names=())
    wrong = difference("the gallery", held, "the run", agreed) or unknown_name("the gallery", held, agreed)
    if wrong is not None:
        raise InputError(place, wrong, "data with the widths, encoders and words on which the sites agreed")

    def captions(rows: Array) -> Array:
        words, wanted = prepared.vocabulary, agreed.vocabulary
        return rows if words == wanted else spread(torch.from_numpy(np.array(rows)), len(rows), words, wanted).numpy()

    return data, prepared, captions


@dataclass(frozen=True)
class Source:
    """The items from which a gallery is created."""

    name: str  # name of the gallery's folder
    described: str  # description for ``gallery.json``
    # Reads the key and the captions of each item, which may take a while.
    items: Callable[[], Sequence[tuple[str, list[str]]]]
    image: Callable[[], Iterable[Array]]  # inputs of the image tower, batch by batch
    text: Callable[[], Iterable[Array]] | None  # inputs of the text tower, likewise; None without captions
    owner: npt.NDArray[np.int64]  # int64 [m], the item of each caption


def of_data(
    data: Data, backbone: Backbone, prepared: Prepared, name: str, captions: Callable[[Array], Array] = np.asarray
) -> Source:
    """The source of a data set, with all its splits; ``captions`` maps rows [n, ...] to inputs of the text tower."""
    counts = np.asarray(prepared.captions)
    ends = [*prepared.first.tolist(), len(prepared.text)]
    held = np.repeat(counts > 0, np.maximum(counts, 1))  # an item without captions has a row of zeros

    def images() -> Iterator[Array]:
        for start in range(0, prepared.n, _BATCH):
            yield prepared.image[start : start + _BATCH]

    def texts() -> Iterator[Array]:
        for start in range(0, prepared.n, _BATCH):
            part = slice(ends[start], ends[min(start + _BATCH, prepared.n)])
            yield captions(prepared.text[part][held[part]])

    return Source(
        name=name,
        described=f"{data.name} {prepared.digest}",
        items=lambda: list(zip(prepared.keys, caption_texts(data, backbone, prepared.keys), strict=True)),
        image=images,
        text=texts if counts.any() else None,
        owner=np.repeat(np.arange(prepared.n, dtype=np.int64), counts),
    )


def of_folder(release: Release | ModelFolder, folder: Path) -> Source:
    """The source of all images below a folder, named by their relative paths."""
    files, keys, digest = folder_contents(folder, release.used)
    encoder = release.encoder("image")

    def images() -> Iterator[Array]:
        for start in range(0, len(files), _BATCH):
            yield encoder.encode([encoder.fit(decode(path)) for path in files[start : start + _BATCH]])

    return Source(
        name=_named(release, folder.resolve().name, digest),
        described=f"folder {folder.resolve().name}",
        items=lambda: [(key, []) for key in keys],
        image=images,
        text=None,
        owner=np.zeros(0, np.int64),
    )


def _named(release: Release | ModelFolder, what: str, digest: str) -> str:
    """Name of the folder of a model's gallery."""
    own = None if isinstance(release, ModelFolder) else release.own
    return folder_name(what, None if own is None else own.silo, digest)


def embed(model: Retriever, modality: Modality, batches: Iterable[Array], report: Callable[[int], None]) -> Array:
    """Encode batches of inputs of a tower into vectors for an index; ``report`` gets the number of items done.

    Returns:
        Packed codes uint8 [n, bytes] of a binary model, else float32 [n, d] of unit length.
    """
    tower = model.encoders.image if modality == "image" else model.encoders.caption
    parts: list[Array] = []
    done = 0
    for batch in batches:
        with torch.inference_mode():
            # Copied because the last bits depend on the alignment of the memory, which a memory map does not fix.
            vectors = tower(torch.from_numpy(np.array(batch))).cpu()
        unit = vectors if model.binary else torch.nn.functional.normalize(vectors, dim=1)
        parts.append(hamming.pack(unit) if model.binary else unit.numpy())
        done += len(batch)
        report(done)
    return np.concatenate(parts)


def export(release: Release | ModelFolder, chosen: Path | None = None, progress: Progress | None = None) -> Gallery:
    """Encode and index a gallery, or open it if it was exported before.

    The model of a run encodes the data of a scenario, site file or features file, or a folder of images, which is all
    that a model without its run takes; by default the run's own data set, which is encoded once per model, so that
    later changes of its files have no effect.

    Raises:
        InputError: there is nothing to encode, or an encoder or a package is missing.
        RunError: the run folder cannot be written.
    """
    if isinstance(release, ModelFolder):
        return _export_folder(release, chosen, progress)
    if release.scenario.data is None:
        return _export_own(release, chosen, progress)
    root = release.run.model / "gallery"
    own = _named(release, "data", release.used)
    if chosen is None and (root / own).is_dir():
        return open_gallery(root / own, release.used)
    scenario = release.scenario
    prepared = prepare(scenario.dataset, scenario.backbone, release.cache, scenario.seed, progress, release.device)
    if chosen is None:
        release.check_data(prepared)
        source = of_data(scenario.dataset, scenario.backbone, prepared, own)
    elif chosen.is_dir():
        source = of_folder(release, chosen)
    else:
        data = data_in(chosen)
        other = prepare(data, scenario.backbone, release.cache, scenario.seed, progress, release.device)
        if other.inputs != prepared.inputs:
            raise InputError(f"--gallery {chosen}", f"items like {other.inputs}", f"items like {prepared.inputs}")
        name = _named(release, chosen.stem, key_of(release.used, other.digest))
        source = of_data(data, scenario.backbone, other, name)
    silo = None if release.own is None else release.own.silo
    about = {"prepared": prepared.meta, **({} if silo is None else {"silo": silo})}
    return _filled(root, source, release.used, partial(release.retriever, prepared), about, progress)


def _export_folder(model: ModelFolder, folder: Path | None, progress: Progress | None) -> Gallery:
    """The gallery of the images below a folder, made with a model without its run and kept in the model's folder."""
    if folder is None or not folder.is_dir():
        given = "nothing" if folder is None else f"{folder}, which is not a folder"
        raise InputError("--gallery", given, "a folder of images: a model without its run has no other gallery")
    return _filled_alone(model, of_folder(model, folder), progress)


def _export_own(release: Release, chosen: Path | None, progress: Progress | None) -> Gallery:
    """A gallery for a run whose data only the sites have."""
    if chosen is None:
        raise InputError("--gallery", "nothing", f"{ALLOWED}: with partition.kind own only the sites have data")
    if chosen.is_dir() and release.scenario.backbone.name == "features":
        allowed = f"a features file ({', '.join(_FEATURES)}), or a scenario or site file (YAML) for its data"
        raise InputError(f"--gallery {chosen}", "a folder, for a model that was trained on features", allowed)
    if chosen.is_dir():
        return _filled_alone(release, of_folder(release, chosen), progress)
    data, prepared, captions = site_gallery(release, chosen, progress)
    name = _named(release, chosen.stem, key_of(release.used, prepared.digest))
    source = of_data(data, release.scenario.backbone, prepared, name, captions)
    return _filled_alone(release, source, progress)


def _filled_alone(opened: Release | ModelFolder, source: Source, progress: Progress | None) -> Gallery:
    """The gallery of a source, made without the data of the model's run."""
    model = opened.files if isinstance(opened, Release) else opened
    root = model.folder / "gallery"
    if not (root / source.name).is_dir() and not os.access(root if root.is_dir() else model.folder, os.W_OK):
        root = model.cache / ELSEWHERE  # as on a read-only disk
        if progress is not None:
            progress(f"{model.folder} cannot be written: the gallery is kept in {root}", 1, 1)
    silo = opened.own.silo if isinstance(opened, Release) and opened.own is not None else None
    return _filled(root, source, opened.used, opened.alone, {} if silo is None else {"silo": silo}, progress)


def _filled(
    root: Path,
    source: Source,
    used: str,
    retriever: Callable[[tuple[Modality, ...]], Retriever],
    about: Mapping[str, object],
    progress: Progress | None,
) -> Gallery:
    """The gallery of a source, encoded unless it exists; ``about`` has further fields of ``gallery.json``."""
    if not (root / source.name).is_dir():
        model = retriever(MODALITIES if source.text else ("image",))
        fill = partial(_fill, model=model, used=used, source=source, about=about, progress=progress)
        build_once(root / source.name, fill)
    return open_gallery(root / source.name, used)


def _fill(
    folder: Path, model: Retriever, used: str, source: Source, about: Mapping[str, object], progress: Progress | None
) -> None:
    items = source.items()

    def vectors(modality: Modality, batches: Iterable[Array], total: int) -> Array:
        what = "images" if modality == "image" else "captions"
        return embed(model, modality, batches, lambda done: progress(what, done, total) if progress else None)

    arrays = {"image": vectors("image", source.image(), len(items))}
    if source.text is not None:
        arrays["text"] = vectors("text", source.text(), len(source.owner))
    width: dict[str, object] = {"bits": model.dim} if model.binary else {"dim": arrays["image"].shape[1]}
    meta = GalleryMeta(
        format=FORMAT,
        model_digest=used,
        made_of=source.described,
        binary=model.binary,
        items=len(items),
        captions=len(source.owner),
    ).model_copy(update={**width, **about})
    for name, array in {"owner": source.owner, **arrays}.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    write_items(folder / "items.jsonl", items)
    (folder / "gallery.json").write_text(json.dumps(meta.plain(), indent=1), encoding="utf-8")
