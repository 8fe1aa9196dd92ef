"""Describe a scenario's data, and report every problem for which a run would refuse them: ``fedmq data check``.

No encoder is loaded. Until features are extracted, which can take hours, zeros of their shape stand in for them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import blake3
import numpy as np
import numpy.typing as npt

from fedmq.config.resolve import ResolvedRun
from fedmq.config.scenario import Data, Scenario
from fedmq.config.site import Site
from fedmq.data import catalogue, extract
from fedmq.data.labels import counts_of
from fedmq.data.overlap import Contents, Overlap, overlaps
from fedmq.data.raw_set import RawSet, in_files
from fedmq.data.splits import (
    SPLITS,
    first_of_equals,
    much_closer_to_one,
    origin_of_split,
    same_rows,
    split_line,
    split_of,
)
from fedmq.data.warnings import DataWarnings, of_captions, of_equal_images, of_heldout_labels
from fedmq.encoders.images import IMAGE_ENDINGS, difference_hash, further_pages
from fedmq.errors import InputError
from fedmq.federation.participant import SiteData
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import SiloFacts
from fedmq.launch.preparation import check_data, planned
from fedmq.packages import MissingPackageError
from fedmq.text import Progress, tell
from protocols.parts.training import steps_per_task

#: Facts that prepared data tell better than raw ones.
_FROM_FEATURES = ("silos", "overlap", "duplicates_of_training_items", "crops", "warnings", "heldout_labels")
BATCH = 256  # images read between two reports of progress
_CONSTANT = 8  # maximum difference of the values, 0 to 255, of an image that counts as blank
_ALIKE = 4  # maximum number of the 64 bits in which the difference hashes of two images differ that look the same
_COMPARED = 1 << 22  # hashes compared at a time
_WIDE = 256  # minimum length of image vectors among which a crop stands out


@dataclass(frozen=True)
class _Decoded:
    """What decoding found about one image."""

    problem: str = ""  # ``name: reason`` if it cannot be read; else empty
    pixels: str = ""  # digest of its pixels; empty if there are none
    constant: bool = False  # whether the values of each colour differ by at most _CONSTANT: practically blank
    pages: int = 0  # number of further images in the same file, which are not read
    # Difference hashes of the image and of its mirror image; None without an image, of a video or if blank.
    looks: tuple[int, int] | None = None


def _decode(raw: RawSet, row: int) -> _Decoded:
    if raw.images.missing(row) or not raw.with_image[row]:
        return _Decoded()
    try:
        frames = raw.images.frames(row)
        path = Path(raw.images.name(row))
        pages = further_pages(path) if in_files(raw) and path.suffix.lower() in IMAGE_ENDINGS else 0
    except MissingPackageError:
        raise
    except InputError as error:
        return _Decoded(problem=f"{error.place}: {error.found}")
    pixels = blake3.blake3()
    for frame in frames:
        pixels.update(repr(frame.shape).encode() + frame.tobytes())
    highest, lowest = (np.stack([reduce(frame, axis=(0, 1)) for frame in frames]) for reduce in (np.max, np.min))
    spread = highest.max(axis=0).astype(int) - lowest.min(axis=0)
    blank = int(spread.max()) <= _CONSTANT
    looks = None if blank or len(frames) > 1 else (difference_hash(frames[0]), difference_hash(frames[0][:, ::-1]))
    return _Decoded(pixels=pixels.hexdigest(), constant=blank, pages=pages, looks=looks)


def _decode_all(raw: RawSet, progress: Progress | None) -> list[_Decoded]:
    """Decode every image that exists."""
    report, found = tell(progress, "images", len(raw)), list[_Decoded]()
    with ThreadPoolExecutor(extract.READERS) as pool:
        for start in range(0, len(raw), BATCH):
            rows = range(start, min(start + BATCH, len(raw)))
            found += pool.map(partial(_decode, raw), rows)
            report(rows.stop)
    return found


@dataclass(frozen=True)
class SiloData:
    """The data that a silo would hold."""

    modalities: tuple[str, ...]  # ``image``, ``text`` or both
    samples: int
    labels: Mapping[str, int]  # number of training items of each label
    heldout: int
    steps: int = 0  # optimiser steps of each of its tasks
    # Jensen-Shannon divergence [bits] of its labels from those of all silos; None without labels, or of a single site.
    label_divergence: float | None = None
    image_only: int = 0  # among the training items of a silo with both modalities, those with an image only
    text_only: int = 0  # likewise with captions only


@dataclass(frozen=True)
class DataFacts:
    """Facts about a scenario's data; None for facts that were not checked."""

    data: str
    items: int
    captions: int
    splits: Mapping[str, int]  # number of items of each split; empty if the items cannot be split
    labels: Mapping[str, int]  # number of items of each label
    without_labels: int  # number of items without a label
    # Numbers of items and labels in the data set's papers, if they differ from those on disk.
    published: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # errors with which a run would fail
    usable: bool = True  # whether a run can use the data set
    missing: tuple[str, ...] | None = None  # names of missing images
    unreadable: tuple[str, ...] | None = None  # images that cannot be read, each with the reason
    without_captions: tuple[str, ...] | None = None  # keys of the items without captions
    without_image: tuple[str, ...] | None = None  # keys of the items whose data set says that they have no image
    silos: Mapping[str, SiloData] | None = None  # the data that each silo would hold
    # Keys of evaluated items that duplicate a training item.
    duplicates_of_training_items: tuple[str, ...] | None = None
    # Keys of evaluated items whose image is a training item's, whatever the captions.
    duplicates_by_image: tuple[str, ...] | None = None
    # Images and captions that two silos have, or two splits; of a partition.
    overlap: tuple[Overlap, ...] | None = None
    alike: tuple[str, ...] | None = None  # keys of further evaluated items whose image looks like a training item's
    # Keys of further evaluated items whose image vector is much closer to one training item's than to others.
    crops: tuple[str, ...] | None = None
    constant: tuple[str, ...] | None = None  # names of images of nearly one colour
    # Names of files with several images, such as the pages of a TIFF, of which only the first is read.
    paged: tuple[str, ...] | None = None
    # Counts of what is probably unintended; zeros and near vectors only if the features are known.
    warnings: DataWarnings | None = None
    heldout_labels: tuple[str, ...] = ()  # one line for each held-out split in which labels distinguish no items
    split: str = ""  # one line on where the split comes from; empty if the items cannot be split
    # Names of files and items that are not read, by the reason.
    ignored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    example: str = ""  # one item with its captions and labels, in a line

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data, without facts that were not checked."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        return plain | ({} if self.warnings is None else {"warnings": self.warnings.plain()})


def check_raw(data: Data, progress: Progress | None = None) -> DataFacts:
    """Check a data set on disk.

    Raises:
        InputError: the annotations cannot be read.
    """
    entry = catalogue.find(data.name)
    raw = entry.read(data)
    kind = data.text or entry.text
    missing = [row for row in range(len(raw)) if raw.images.missing(row)]
    uncaptioned = [row for row, captions in enumerate(raw.captions) if not captions] if kind == "sentences" else []
    decoded = _decode_all(raw, progress)
    broken = tuple(_from_folder(data, each.problem) for each in decoded if each.problem)
    kept, split, problems = raw, None, list[str]()
    found = dict(zip(raw.keys, decoded, strict=True))
    origin = origin_of_split(raw.split is not None, data, raw.split_remark)
    try:
        kept = extract.complete(raw, data, kind)
    except InputError as error:
        problems.append(str(error))
    try:
        # Images that do not exist cannot be compared; they are a problem already.
        split = split_of(
            kept.split, len(kept), data, entry.draw, None if problems else partial(kept.same_images, progress)
        )
    except InputError as error:
        problems.append(str(error))
    same = () if split is None else _duplicates_by_pixels(found, kept.keys, split)
    return DataFacts(
        data=data.name,
        items=len(kept),
        captions=sum(map(len, kept.captions)) if kind == "sentences" else len(kept),
        splits={} if split is None else _by_split(split),
        labels=counts_of(kept.labels, kept.label_names),
        without_labels=_without_labels(kept.labels, len(kept)),
        published=_published(data, len(raw), len(raw.label_names)),
        problems=tuple(problems),
        usable=not (broken or problems),
        missing=tuple(_from_folder(data, raw.images.name(row)) for row in missing),
        unreadable=broken,
        without_captions=tuple(raw.keys[row] for row in uncaptioned),
        without_image=tuple(raw.keys[row] for row in np.flatnonzero(~raw.with_image)),
        constant=tuple(_from_folder(data, raw.images.name(row)) for row, each in enumerate(decoded) if each.constant),
        paged=tuple(_from_folder(data, raw.images.name(row)) for row, each in enumerate(decoded) if each.pages),
        duplicates_by_image=same,
        alike=() if split is None else _alike(found, kept.keys, split, same),
        warnings=_seen(kept, found, split),
        heldout_labels=() if split is None else tuple(of_heldout_labels(kept.labels, kept.label_names, split)),
        split="" if split is None else split_line(origin, split),
        ignored=raw.ignored,
        example=raw.example,
    )


def _seen(kept: RawSet, decoded: Mapping[str, _Decoded], split: npt.NDArray[np.uint8] | None) -> DataWarnings:
    """Counts of what is probably unintended, as far as they are known without encoding."""
    pixels = [decoded[key].pixels for key in kept.keys]
    first = first_of_equals(content or row for row, content in enumerate(pixels))
    counts, _ = of_equal_images(first, np.array([bool(content) for content in pixels]), split)
    captions = of_captions(text for captions in kept.captions for text in captions)
    return DataWarnings().model_copy(update={**counts, **captions})


def _from_folder(data: Data, name: str) -> str:
    """The name of an image as a path from the data's folder, as in a list; others unchanged."""
    if data.path is None:
        return name
    return name.removeprefix(f"{data.path if data.path.is_dir() else data.path.parent}{os.sep}")


def _duplicates_by_pixels(
    decoded: Mapping[str, _Decoded], keys: Sequence[str], split: npt.NDArray[np.uint8]
) -> tuple[str, ...]:
    """Keys of the items of val and test whose image has the pixels of a training item's."""
    pixels = [decoded[key].pixels for key in keys]
    trained = {content for content, code in zip(pixels, split, strict=True) if SPLITS[code] == "train" and content}
    evaluated = (SPLITS.index("val"), SPLITS.index("test"))
    return tuple(
        key for key, content, code in zip(keys, pixels, split, strict=True) if code in evaluated and content in trained
    )


def _alike(
    decoded: Mapping[str, _Decoded], keys: Sequence[str], split: npt.NDArray[np.uint8], same: Collection[str]
) -> tuple[str, ...]:
    """Keys of the items of val and test whose image, or its mirror image, looks like a training item's.

    Two images look the same if their difference hashes (Krawetz 2013) are nearly equal, as after another compression or
    another size. Those with the pixels of a training item, ``same``, are left out.
    """
    train = [decoded[key].looks for key, code in zip(keys, split, strict=True) if SPLITS[code] == "train"]
    trained = np.array([looks[0] for looks in train if looks], np.uint64)
    evaluated = (SPLITS.index("val"), SPLITS.index("test"))
    queries = [key for key, code in zip(keys, split, strict=True) if code in evaluated and key not in same]
    rows = [(key, decoded[key].looks) for key in queries]
    asked = [(key, looks) for key, looks in rows if looks]
    found, step = list[str](), max(1, _COMPARED // max(1, len(trained)))
    for start in range(0, len(asked), step):
        hashes = np.array([looks for _, looks in asked[start : start + step]], np.uint64)
        near = (np.bitwise_count(hashes[:, :, None] ^ trained) <= _ALIKE).any(axis=(1, 2))
        found += [asked[start + int(row)][0] for row in np.flatnonzero(near)]
    return tuple(found)


def _published(data: Data, items: int, labels: int) -> dict[str, int]:
    """The sizes of a data set in its papers, if they differ from those on disk; empty otherwise.

    Loaders accept subsets, so only this comparison reveals that files are missing.
    """
    if data.name in catalogue.OTHERS or data.labelled:
        return {}
    entry = catalogue.find(data.name)
    fine = entry.items in (0, items) and (not labels or entry.labels in (0, labels))
    sizes = {"items": entry.items} | ({"labels": entry.labels} if labels and entry.labels else {})
    return {} if fine else sizes


def _by_split(split: npt.NDArray[np.uint8]) -> dict[str, int]:
    """Number of items of each split."""
    return {name: int((split == code).sum()) for code, name in enumerate(SPLITS)}


def _without_labels(labels: npt.NDArray[np.uint8] | None, n: int) -> int:
    """Number of items without a label, out of n."""
    return n if labels is None else int((~np.asarray(labels).any(axis=1)).sum())


def _silo_data(scenario: Scenario, population: Population, silo: SiloFacts) -> SiloData:
    labels, rows = population.prepared.labels, population.train[silo.index]
    found = population.rows_of(silo)
    return SiloData(
        modalities=tuple(name for name, present in (("image", silo.image), ("text", silo.text)) if present),
        samples=len(rows),
        labels=counts_of(None if labels is None else labels[rows], population.prepared.label_names),
        heldout=len(population.heldout[silo.index]),
        steps=steps_per_task(scenario, len(found.dataset)),
        label_divergence=population.label_divergence.get(silo.name),
        image_only=len(found.image_only),
        text_only=len(found.text_only),
    )


def _duplicates(population: Population, progress: Progress | None) -> tuple[str, ...]:
    """Keys of evaluated items whose image and captions equal those of a training item.

    Images stored as pixels are not compared, because large data sets have tens of gigabytes of them.
    """
    prepared = population.prepared
    if prepared.image.ndim > 2:
        return ()
    trained = np.unique(np.concatenate([*population.train, np.zeros(0, np.int64)]))
    report = tell(progress, "items compared", len(trained) + len(population.evaluated))

    def content(row: int) -> bytes:
        start = prepared.first[row]
        captions = prepared.text[start : start + int(prepared.captions[row])]
        return hashlib.blake2b(prepared.image[row].tobytes() + captions.tobytes(), digest_size=16).digest()

    seen = set()
    for done, row in enumerate(trained, 1):
        seen.add(content(row))
        report(done)
    found = []
    for done, row in enumerate(population.evaluated, len(trained) + 1):
        if content(row) in seen:
            found.append(prepared.keys[row])
        report(done)
    return tuple(found)


def _equal_and_cropped(
    population: Population, progress: Progress | None
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Keys of evaluated items whose image vector equals a training item's, and of those that are likely crops of one.

    The second is None where vectors have too few numbers to tell: there, chance alone brings one much closer.
    """
    prepared = population.prepared
    if prepared.image.ndim > 2:
        return (), None
    trained = np.unique(np.concatenate([*population.train, np.zeros(0, np.int64)]))
    rows = np.concatenate([trained, population.evaluated])
    first = same_rows(prepared.image[rows])
    known = first[len(trained) :] < len(trained)
    equal, others = population.evaluated[known], population.evaluated[~known]
    crops = None
    if prepared.image.shape[1] >= _WIDE:
        different = trained[first[: len(trained)] == np.arange(len(trained))]
        report = tell(progress, "image vectors compared", len(others))
        near = much_closer_to_one(prepared.image[others], prepared.image[different], report)
        crops = tuple(prepared.keys[row] for row in others[near])
    return tuple(prepared.keys[row] for row in equal), crops


def _overlap(scenario: Scenario, population: Population) -> tuple[Overlap, ...]:
    """Images and captions, by their vectors or pixels, that two silos have, or a silo's two splits."""
    prepared = population.prepared
    image, text = same_rows(prepared.image), same_rows(prepared.text)
    owner = np.repeat(np.arange(prepared.n), np.maximum(prepared.captions, 1))
    counted = np.asarray(prepared.captions)[owner] > 0
    held = dict[tuple[str, str], Contents]()
    for silo in population.silos:
        rows = population.rows_of(silo)
        with_image, with_text = (np.concatenate([rows.dataset, more]) for more in (rows.image_only, rows.text_only))
        heldout = population.heldout[silo.index]
        for split, images, texts in (
            ("train", with_image if silo.image else heldout[:0], with_text if silo.text else heldout[:0]),
            (scenario.evaluation.split, heldout, heldout),
        ):
            captions = text[np.isin(owner, texts) & counted]
            held[silo.name, split] = Contents(frozenset(image[images].tolist()), frozenset(captions.tolist()))
    return tuple(overlaps(held))


def _prepared_facts(name: str, scenario: Scenario, population: Population, progress: Progress | None) -> DataFacts:
    """Facts about a prepared data set and its partition."""
    prepared = population.prepared
    equal, crops = _equal_and_cropped(population, progress)
    return DataFacts(
        data=name,
        items=prepared.n,
        captions=int(np.asarray(prepared.captions).sum()),
        splits=_by_split(np.asarray(prepared.split)),
        labels=counts_of(prepared.labels, prepared.label_names),
        without_labels=_without_labels(prepared.labels, prepared.n),
        silos={silo.name: _silo_data(scenario, population, silo) for silo in population.silos},
        overlap=_overlap(scenario, population),
        duplicates_of_training_items=_duplicates(population, progress),
        duplicates_by_image=equal,
        crops=crops,
        warnings=prepared.meta.warnings,
        split=prepared.notes[0],
        heldout_labels=tuple(of_heldout_labels(prepared.labels, prepared.label_names, np.asarray(prepared.split))),
    )


def check(run: ResolvedRun, progress: Progress | None = None) -> DataFacts:
    """Check a scenario's data, and its partition as far as possible without encoding.

    If the features are cached, the facts include ``silos`` and ``duplicates_of_training_items``. Features of the
    embedded sets are extracted immediately, those of other data sets by ``fedmq data features``. The error with which a
    run would refuse the data, such as missing labels that the method needs, is the last of ``problems``.

    Raises:
        InputError: the data cannot be read, or cannot be partitioned as required.
    """
    scenario = run.scenario
    data, backbone = scenario.dataset, scenario.backbone
    known: extract.ExtractionPlan | Path
    if data.name == "features" or catalogue.packaged(data.name) or backbone.name == "features":
        population = build_population(scenario, progress)
        known, facts = population.prepared.folder, _prepared_facts(data.name, scenario, population, progress)
        facts = replace(facts, published=_published(data, facts.items, len(facts.labels)))
    else:
        facts = check_raw(data, progress)
        if not facts.usable:
            return facts
        if isinstance(known := planned(scenario, progress), Path):
            population = build_population(scenario, progress, folder=known)
            prepared = _prepared_facts(data.name, scenario, population, progress)
            facts = replace(facts, **{name: getattr(prepared, name) for name in _FROM_FEATURES})
    try:
        check_data(run, progress, known)
    except InputError as error:
        return replace(facts, problems=(*facts.problems, str(error)), usable=False)
    return facts


def check_site(scenario: Scenario, site: Site, progress: Progress | None = None) -> DataFacts:
    """Check the data of a site's file.

    Raises:
        InputError: the site file has no data, or they cannot be read.
    """
    if site.data is None:
        raise InputError(site.place("data"), "nothing", "the site's data, as in docs/howto/own_sites.md")
    if scenario.backbone.name != "features":
        return replace(check_raw(site.data, progress), silos={})
    name = site.name if site.name in scenario.silo_names else scenario.silo_names[0]
    population = SiteData.load(scenario, site, scenario.name, progress).alone(name)
    facts = _prepared_facts(site.data.name, scenario, population, progress)
    return replace(facts, silos={name: facts.silos[name]} if facts.silos else {})
