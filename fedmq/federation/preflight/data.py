"""Describe a scenario's data, and report every problem for which a run would refuse them: ``fedmq data check``.

No encoder is loaded. Until features are extracted, which can take hours, zeros of their shape stand in for them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import blake3
import numpy as np
import numpy.typing as npt

from fedmq.config.scenario import Data, Scenario
from fedmq.config.site import Site
from fedmq.data import catalogue, extract
from fedmq.data.extract import ExtractionPlan
from fedmq.data.labels import counts_of
from fedmq.data.prepared_arrays import finish, save_arrays, save_present
from fedmq.data.raw_set import RawSet, in_files
from fedmq.data.splits import SPLITS, same_rows, split_of
from fedmq.data.warnings import DataWarnings, of_captions, of_heldout_labels
from fedmq.encoders.images import IMAGE_ENDINGS, further_pages
from fedmq.errors import InputError
from fedmq.federation.participant import SiteData
from fedmq.federation.population import Population, build_population, check_clusters
from fedmq.federation.protocol import SiloFacts
from fedmq.packages import MissingPackageError
from fedmq.storage.cache import cache_folder
from fedmq.text import Progress, tell

BATCH = 256  # images read between two reports of progress
_CONSTANT = 8  # maximum difference of the values, 0 to 255, of an image that counts as blank


@dataclass(frozen=True)
class _Decoded:
    """What decoding found about one image.

    Args:
        problem: ``name: reason`` if it cannot be read; else empty.
        pixels: digest of its pixels; empty if there are none.
        constant: whether the values of each colour differ by at most :data:`_CONSTANT`: practically blank.
        pages: number of further images in the same file, which are not read.
    """

    problem: str = ""
    pixels: str = ""
    constant: bool = False
    pages: int = 0


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
    return _Decoded(pixels=pixels.hexdigest(), constant=int(spread.max()) <= _CONSTANT, pages=pages)


def _decode_all(raw: RawSet, progress: Progress | None) -> list[_Decoded]:
    """Decode every image that exists.

    Raises:
        InputError: the package that reads these files is missing.
    """
    report, found = tell(progress, "images", len(raw)), list[_Decoded]()
    with ThreadPoolExecutor(extract.READERS) as pool:
        for start in range(0, len(raw), BATCH):
            rows = range(start, min(start + BATCH, len(raw)))
            found += pool.map(partial(_decode, raw), rows)
            report(rows.stop)
    return found


@dataclass(frozen=True)
class SiloData:
    """The data that a silo would hold.

    Args:
        modalities: ``image``, ``text`` or both.
        samples: number of training items.
        labels: number of training items of each label.
        heldout: number of held-out items.
        image_only: among the training items of a silo with both modalities, those with an image only.
        text_only: likewise with captions only.
    """

    modalities: tuple[str, ...]
    samples: int
    labels: Mapping[str, int]
    heldout: int
    image_only: int = 0
    text_only: int = 0


@dataclass(frozen=True)
class DataFacts:
    """Facts about a scenario's data; None for facts that were not checked.

    Args:
        data: name of the data set.
        items: number of items.
        captions: number of captions.
        splits: number of items of each split; empty if the items cannot be split.
        labels: number of items of each label.
        without_labels: number of items without a label.
        published: numbers of items and labels in the data set's papers, if they differ from those on disk.
        problems: errors with which a run would fail.
        usable: whether a run can use the data set.
        missing: names of missing images.
        unreadable: images that cannot be read, each with the reason.
        without_captions: keys of the items without captions.
        without_image: keys of the items whose data set says that they have no image.
        silos: the data that each silo would hold.
        duplicates_of_training_items: keys of evaluated items that duplicate a training item.
        duplicates_by_image: keys of evaluated items whose image is a training item's, whatever the captions.
        constant: names of images of nearly one colour.
        paged: names of files with several images, such as the pages of a TIFF, of which only the first is read.
        warnings: counts of what is probably unintended; of vectors, only for a data set whose features are known.
        heldout_labels: one line for each held-out split in which labels distinguish no items.
        captions_alone: files of captions without an image, which are not items.
        example: one item with its captions and labels, in a line.
    """

    data: str
    items: int
    captions: int
    splits: Mapping[str, int]
    labels: Mapping[str, int]
    without_labels: int
    published: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    usable: bool = True
    missing: tuple[str, ...] | None = None
    unreadable: tuple[str, ...] | None = None
    without_captions: tuple[str, ...] | None = None
    without_image: tuple[str, ...] | None = None
    silos: Mapping[str, SiloData] | None = None
    duplicates_of_training_items: tuple[str, ...] | None = None
    duplicates_by_image: tuple[str, ...] | None = None
    constant: tuple[str, ...] | None = None
    paged: tuple[str, ...] | None = None
    warnings: DataWarnings | None = None
    heldout_labels: tuple[str, ...] = ()
    captions_alone: tuple[str, ...] | None = None
    example: str = ""

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data, without facts that were not checked."""
        plain = {name: value for name, value in asdict(self).items() if value is not None}
        return plain | ({} if self.warnings is None else {"warnings": self.warnings.plain()})


def check_raw(data: Data, progress: Progress | None = None) -> DataFacts:
    """Check a data set on disk.

    Args:
        data: the scenario's data section.
        progress: called while images are read.

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
        duplicates_by_image=()
        if split is None
        else _duplicates_by_pixels(dict(zip(raw.keys, decoded, strict=True)), kept.keys, split),
        warnings=DataWarnings().model_copy(update=of_captions(text for captions in raw.captions for text in captions)),
        heldout_labels=() if split is None else tuple(of_heldout_labels(kept.labels, kept.label_names, split)),
        captions_alone=raw.alone,
        example=raw.example,
    )


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


def _silo_data(population: Population, silo: SiloFacts) -> SiloData:
    labels, rows = population.prepared.labels, population.train[silo.index]
    found = population.rows_of(silo)
    return SiloData(
        modalities=tuple(name for name, present in (("image", silo.image), ("text", silo.text)) if present),
        samples=len(rows),
        labels=counts_of(None if labels is None else labels[rows], population.prepared.label_names),
        heldout=len(population.heldout[silo.index]),
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


def _duplicates_by_vector(population: Population) -> tuple[str, ...]:
    """Keys of evaluated items whose image vector equals a training item's."""
    prepared = population.prepared
    if prepared.image.ndim > 2:
        return ()
    trained = np.unique(np.concatenate([*population.train, np.zeros(0, np.int64)]))
    rows = np.concatenate([trained, population.evaluated])
    first = same_rows(prepared.image[rows])[len(trained) :]
    return tuple(prepared.keys[row] for row in population.evaluated[first < len(trained)])


def _prepared_facts(name: str, population: Population, progress: Progress | None) -> DataFacts:
    """Facts about a prepared data set and its partition."""
    prepared = population.prepared
    return DataFacts(
        data=name,
        items=prepared.n,
        captions=int(np.asarray(prepared.captions).sum()),
        splits=_by_split(np.asarray(prepared.split)),
        labels=counts_of(prepared.labels, prepared.label_names),
        without_labels=_without_labels(prepared.labels, prepared.n),
        silos={silo.name: _silo_data(population, silo) for silo in population.silos},
        duplicates_of_training_items=_duplicates(population, progress),
        duplicates_by_image=_duplicates_by_vector(population),
        warnings=prepared.meta.warnings,
        heldout_labels=tuple(of_heldout_labels(prepared.labels, prepared.label_names, np.asarray(prepared.split))),
    )


def check(scenario: Scenario, fits: Fits, progress: Progress | None = None) -> DataFacts:
    """Check a scenario's data, and its partition as far as possible without encoding.

    Args:
        scenario: the resolved scenario.
        fits: raises InputError if a run would refuse the scenario with its data.
        progress: called during long steps.

    Returns:
        As :func:`check_raw`; if the features are cached, also ``silos`` and ``duplicates_of_training_items``.
        OpenMoji's features are extracted immediately, those of other data sets by ``fedmq data features``. An error of
        ``fits``, such as missing labels that the method needs, is the last of ``problems``.

    Raises:
        InputError: the data cannot be read, or cannot be partitioned as required.
    """
    data, backbone = scenario.dealt, scenario.backbone
    if data.name in ("openmoji", "features") or backbone.name == "features":
        population = build_population(scenario, progress)
        facts = _prepared_facts(data.name, population, progress)
        facts = replace(facts, published=_published(data, facts.items, len(facts.labels)))
        return _with_refusal(facts, lambda: fits(scenario, population.prepared.folder))
    facts = check_raw(data, progress)
    if not facts.usable:
        return facts
    made = extract.plan(data, backbone, cache_folder(), scenario.seed, progress=progress)
    folder = cache_folder() / "data" / made.digest
    if folder.is_dir():
        prepared = _prepared_facts(data.name, build_population(scenario, progress), progress)
        both = replace(
            prepared,
            published=facts.published,
            missing=facts.missing,
            unreadable=facts.unreadable,
            without_captions=facts.without_captions,
            without_image=facts.without_image,
            constant=facts.constant,
            paged=facts.paged,
            duplicates_by_image=facts.duplicates_by_image,
            captions_alone=facts.captions_alone,
            example=facts.example,
        )
        return _with_refusal(both, lambda: fits(scenario, folder))
    return _with_refusal(facts, lambda: refuse_before_extraction(made, scenario, fits))


def check_site(scenario: Scenario, site: Site, progress: Progress | None = None) -> DataFacts:
    """Check the data of a site's file.

    Args:
        scenario: the resolved scenario, which has no data.
        site: the site.
        progress: called during long steps.

    Raises:
        InputError: the site file has no data, or they cannot be read.
    """
    if site.data is None:
        raise InputError(site.place("data"), "nothing", "the site's data, as in docs/howto/own_sites.md")
    if scenario.backbone.name != "features":
        return replace(check_raw(site.data, progress), silos={})
    name = site.name if site.name in scenario.silo_names else scenario.silo_names[0]
    population = SiteData.load(scenario, site, scenario.name, progress).alone(name)
    facts = _prepared_facts(site.data.name, population, progress)
    return replace(facts, silos={name: facts.silos[name]} if facts.silos else {})


def _with_refusal(facts: DataFacts, checks: Callable[[], None]) -> DataFacts:
    """Add the error of a run that would refuse the data to the problems."""
    try:
        checks()
    except InputError as error:
        return replace(facts, problems=(*facts.problems, str(error)), usable=False)
    return facts


_WIDTH = 8  # of placeholder features, if the width is only known after loading the encoder

#: Raises InputError if a scenario cannot run on the prepared data in a folder.
Fits = Callable[[Scenario, Path], None]


def refuse_before_extraction(made: ExtractionPlan, scenario: Scenario, fits: Fits) -> None:
    """Refuse a scenario that cannot run on a data set, as far as that can be seen without its features.

    Args:
        made: what would be extracted.
        scenario: the resolved scenario.
        fits: raises InputError if a run would refuse the scenario with prepared data.

    Raises:
        InputError: as of ``fits``, or there are fewer training texts than ``partition.clusters``.
    """
    if scenario.partition.kind == "dir_clusters":
        present, train = made.raw.present(made.kind), made.split == SPLITS.index("train")
        texts = int((train if present is None else train & present[:, 1]).sum())
        check_clusters(scenario.partition.clusters, texts)
    if scenario.backbone.adapter_site == "blocks" or scenario.backbone.end_to_end:
        return  # needs pixels, for which there are no placeholders
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _write_placeholder(made, scenario.backbone.dim or _WIDTH, Path(name))
        fits(_on_vectors(scenario), Path(name))


def _write_placeholder(made: ExtractionPlan, usual: int, folder: Path) -> None:
    """Write a prepared data set with the labels and splits of a raw one, and zeros as features.

    Their width is that of the features or, if unknown, of the other modality's, or ``usual``.
    """
    n = len(made.raw)
    image, text = made.image.width, made.text.width if made.text else 0
    if made.text is None and made.raw.bag is not None:
        text = made.raw.bag.shape[1]
    for name, shape in (("image", (n, image or text or usual)), ("text", (n, text or image or usual))):
        # A sparse file: NUS-WIDE's bags of words would take 780 MB of zeros.
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
    present = made.raw.present(made.kind)
    counts = np.ones(n, np.int64) if present is None else present[:, 1].astype(np.int64)
    save_arrays(folder, captions=counts, labels=made.raw.labels, split=made.split)
    lacking = save_present(folder, present)
    finish(folder, made.digest, lacking, made.raw.keys, made.raw.label_names, column=made.raw.column)


def _on_vectors(scenario: Scenario) -> Scenario:
    """The scenario with a backbone and a partition that need no encoder."""
    backbone = scenario.backbone.model_copy(update={"name": "features", "pretrained": None, "text_encoder": None})
    partition = scenario.partition
    if partition.kind == "dir_clusters":
        partition = partition.model_copy(update={"kind": "iid"})
    return scenario.model_copy(update={"backbone": backbone, "partition": partition})
