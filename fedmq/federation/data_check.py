"""``fedmq data check``: what lies on the disk, before any encoder is loaded, and every file that is not right."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmq.config import user_files
from fedmq.config.scenario import Data, Scenario
from fedmq.data import catalogue, extract
from fedmq.data.label_levels import fine_columns
from fedmq.data.prepared import finish, save_arrays
from fedmq.data.raw_set import RawSet
from fedmq.data.splits import SPLITS, split_of
from fedmq.errors import InputError
from fedmq.federation.population import Population, build_population
from fedmq.federation.protocol import SiloFacts
from fedmq.progress import Progress, tell
from fedmq.storage.cache import cache_folder

BATCH = 256  # pictures read between two marks of progress
FEW_LABELS, FEW_SILOS = 30, 12  # at most, of which all numbers of items are printed; JSON has all
SHOWN = 20  # names printed of each kind; JSON has all
_WIDTH = 8  # of the vectors that stand for features of an encoder that has to be loaded to tell its own

#: Refuses a scenario that cannot run on the prepared data in a folder.
Fits = Callable[[Scenario, Path], None]


def unreadable(raw: RawSet, progress: Progress | None = None) -> Iterator[str]:
    """Decode every picture that is there; ``name: reason`` of each that cannot be read.

    Args:
        raw: the set.
        progress: told while reading.

    Raises:
        InputError: the package that reads these files is missing, which no file is to blame for.
    """

    def attempt(row: int) -> str | None:
        if raw.pictures.missing(row):
            return None
        try:
            raw.pictures.frames(row)
        except InputError as error:
            if isinstance(error.__context__, ImportError):
                raise
            return f"{error.place}: {error.found}"
        return None

    told = tell(progress, "images", len(raw))
    with ThreadPoolExecutor(extract.READERS) as pool:
        for start in range(0, len(raw), BATCH):
            rows = range(start, min(start + BATCH, len(raw)))
            yield from (found for found in pool.map(attempt, rows) if found is not None)
            told(rows.stop)


@dataclass(frozen=True)
class SiloData:
    """What a silo would hold.

    Args:
        modalities: ``image``, ``text`` or both.
        samples: training items.
        labels: training items of each label.
        heldout: items of its held-out share.
    """

    modalities: tuple[str, ...]
    samples: int
    labels: Mapping[str, int]
    heldout: int


@dataclass(frozen=True)
class DataFacts:
    """The facts about a scenario's data; None is what was not looked at.

    Args:
        data: name of the set.
        items: how many.
        captions: of all items.
        splits: items of each split; empty where they cannot be split.
        labels: items of each label.
        without_labels: items that have none.
        published: numbers of items and labels that the set's papers use, where others lie here.
        problems: the lines a run would end with.
        usable: whether a run would take the set.
        missing: names of the pictures that are not there.
        unreadable: pictures that cannot be read, each with the reason.
        without_captions: keys of the items that have none.
        silos: who would hold what.
        twins_of_training_items: keys of evaluated items that equal one.
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
    silos: Mapping[str, SiloData] | None = None
    twins_of_training_items: tuple[str, ...] | None = None

    def to_plain(self) -> dict[str, object]:
        """As JSON-serialisable data, without what was not looked at."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def check_raw(data: Data, progress: Progress | None = None) -> DataFacts:
    """The facts about a set on disk.

    Args:
        data: of the scenario.
        progress: told while pictures are read.

    Raises:
        InputError: the annotations cannot be read.
    """
    entry = catalogue.find(data.name)
    raw = entry.read(data)
    kind = data.text or entry.text
    missing = [row for row in range(len(raw)) if raw.pictures.missing(row)]
    silent = [row for row, own in enumerate(raw.captions) if not own] if kind == "sentences" else []
    broken = tuple(unreadable(raw, progress))
    kept, split, problems = raw, None, list[str]()
    try:
        kept = extract.complete(raw, data, kind)
    except InputError as error:
        problems.append(str(error))
    try:
        split = split_of(kept.split, len(kept), data, entry.draw)
    except InputError as error:
        problems.append(str(error))
    return DataFacts(
        data=data.name,
        items=len(kept),
        captions=sum(map(len, kept.captions)) if kind == "sentences" else len(kept),
        splits={} if split is None else _by_split(split),
        labels=_by_label(kept.labels, kept.label_names),
        without_labels=_without_labels(kept.labels, len(kept)),
        published=_published(data, len(raw), len(raw.label_names)),
        problems=tuple(problems),
        usable=not (broken or problems),
        missing=tuple(raw.pictures.name(row) for row in missing),
        unreadable=broken,
        without_captions=tuple(raw.keys[row] for row in silent),
    )


def _published(data: Data, items: int, labels: int) -> dict[str, int]:
    """The sizes that a set's papers use, if others lie here; empty otherwise.

    A part of a set is a set, too, and no loader can know that files of it were left out.
    """
    if data.name in catalogue.OTHERS or data.labelled:
        return {}
    entry = catalogue.find(data.name)
    fine = entry.items in (0, items) and (not labels or entry.labels in (0, labels))
    sizes = {"items": entry.items} | ({"labels": entry.labels} if labels and entry.labels else {})
    return {} if fine else sizes


def _by_split(split: npt.NDArray[np.uint8]) -> dict[str, int]:
    """How many items each split has."""
    return {name: int((split == code).sum()) for code, name in enumerate(SPLITS)}


def _by_label(labels: npt.NDArray[np.uint8] | None, names: Sequence[str]) -> dict[str, int]:
    """How many of these items have each label; empty where there are no labels."""
    if labels is None:
        return {}
    return dict(zip(names, np.asarray(labels).sum(axis=0, dtype=np.int64).tolist(), strict=True))


def _without_labels(labels: npt.NDArray[np.uint8] | None, n: int) -> int:
    """How many of n items have no label."""
    return n if labels is None else int((~np.asarray(labels).any(axis=1)).sum())


def _silo_data(population: Population, silo: SiloFacts) -> SiloData:
    labels, rows = population.prepared.labels, population.train[silo.index]
    return SiloData(
        modalities=tuple(name for name, owned in (("image", silo.image), ("text", silo.text)) if owned),
        samples=len(rows),
        labels=_by_label(None if labels is None else labels[rows], population.prepared.label_names),
        heldout=len(population.heldout[silo.index]),
    )


def _twins(population: Population, progress: Progress | None) -> tuple[str, ...]:
    """Keys of the evaluated items that have both the vectors and the captions of an item that is trained on.

    Pictures kept as pixels are not looked at: tens of gigabytes for a large set.
    """
    prepared = population.prepared
    if prepared.image.ndim > 2:
        return ()
    trained = np.unique(np.concatenate([*population.train, np.zeros(0, np.int64)]))
    told = tell(progress, "items compared", len(trained) + len(population.evaluated))

    def content(row: int) -> bytes:
        own = prepared.text[row][: int(prepared.captions[row])]
        return hashlib.blake2b(prepared.image[row].tobytes() + own.tobytes(), digest_size=16).digest()

    seen = set()
    for done, row in enumerate(trained, 1):
        seen.add(content(row))
        told(done)
    found = []
    for done, row in enumerate(population.evaluated, len(trained) + 1):
        if content(row) in seen:
            found.append(prepared.keys[row])
        told(done)
    return tuple(found)


def _prepared_facts(name: str, population: Population, progress: Progress | None) -> DataFacts:
    """The facts about a prepared set, and who would hold what of it."""
    prepared = population.prepared
    return DataFacts(
        data=name,
        items=prepared.n,
        captions=int(np.asarray(prepared.captions).sum()),
        splits=_by_split(np.asarray(prepared.split)),
        labels=_by_label(prepared.labels, prepared.label_names),
        without_labels=_without_labels(prepared.labels, prepared.n),
        silos={silo.name: _silo_data(population, silo) for silo in population.silos},
        twins_of_training_items=_twins(population, progress),
    )


def check(scenario: Scenario, fits: Fits, progress: Progress | None = None) -> DataFacts:
    """The facts about a scenario's data, and who would hold what as far as that is known without encoding anything.

    Args:
        scenario: as resolved.
        fits: what a run of its programs asks of a scenario and its data.
        progress: told during anything long.

    Returns:
        As :func:`check_raw`, and where the features are there ``silos`` and ``twins_of_training_items``. Openmoji's
        features are made at once, those of a set on disk by ``fedmq data features``. What a run would refuse, as a
        method without the labels that it needs, is the last of ``problems``.

    Raises:
        InputError: the data cannot be read, or cannot be shared out as asked.
    """
    data, backbone = scenario.data, scenario.backbone
    if data.name in ("openmoji", "features") or backbone.name == "features":
        population = build_population(scenario, progress)
        facts = _prepared_facts(data.name, population, progress)
        facts = replace(facts, published=_published(data, facts.items, len(facts.labels)))
        return _with_refusal(facts, scenario, fits, population.prepared.folder)
    facts = check_raw(data, progress)
    if not facts.usable:
        return facts
    made = extract.plan(data, backbone, cache_folder(), scenario.seed)
    folder = cache_folder() / "data" / made.digest
    if folder.is_dir():
        prepared = _prepared_facts(data.name, build_population(scenario, progress), progress)
        both = replace(
            prepared,
            published=facts.published,
            missing=facts.missing,
            unreadable=facts.unreadable,
            without_captions=facts.without_captions,
        )
        return _with_refusal(both, scenario, fits, folder)
    if backbone.adapter_site == "blocks" or backbone.end_to_end:
        return facts  # networks for pixels, which no vectors can stand for
    with tempfile.TemporaryDirectory(prefix="fedmq-check-") as name:
        _stand_in(made, backbone.dim or _WIDTH, Path(name))
        return _with_refusal(facts, _on_vectors(scenario), fits, Path(name))


def _with_refusal(facts: DataFacts, scenario: Scenario, fits: Fits, folder: Path) -> DataFacts:
    """The facts with what a run would refuse among the problems."""
    try:
        fits(scenario, folder)
    except InputError as error:
        return replace(facts, problems=(*facts.problems, str(error)), usable=False)
    return facts


def _stand_in(made: extract.ExtractionPlan, usual: int, folder: Path) -> None:
    """A prepared set with the labels and the split of one whose features are not extracted yet, and zeros for those.

    They are as wide as the features will be, or, where that is not known, as the other side's, or ``usual``.
    """
    n = len(made.raw)
    image, text = made.image.width, made.text.width if made.text else 0
    if made.text is None and made.raw.bag is not None:
        text = made.raw.bag.shape[1]
    for name, shape in (("image", (n, image or text or usual)), ("text", (n, 1, text or image or usual))):
        # Zeros that a file system need not store: a bag of words of NUS-WIDE has 780 MB of them.
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape)
    save_arrays(folder, captions=np.ones(n, np.int64), labels=made.raw.labels, split=made.split)
    finish(folder, made.digest, {}, made.raw.keys, made.raw.label_names)


def _on_vectors(scenario: Scenario) -> Scenario:
    """The scenario with what needs no features: text clusters are of features, and so is the backbone."""
    backbone = scenario.backbone.model_copy(update={"name": "features", "pretrained": None, "text_encoder": None})
    partition = scenario.partition
    if partition.kind == "dir_clusters":
        partition = partition.model_copy(update={"kind": "iid"})
    return scenario.model_copy(update={"backbone": backbone, "partition": partition})


def _printable(text: str) -> str:
    """Bytes of a file's name that are no UTF-8 as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _shared_by_all(facts: DataFacts) -> list[str]:
    """Labels by which all items are alike."""
    names = list(facts.labels)
    return [names[column] for column in fine_columns(names) if facts.labels[names[column]] == facts.items]


def show(facts: DataFacts, out: Console) -> None:
    """Print the facts of :func:`check`."""
    splits = ", ".join(f"{count} {name}" for name, count in facts.splits.items() if count)
    line = f"{user_files.label(facts.data)}: {facts.items} items, {facts.captions} captions" + (
        splits and f" ({splits})"
    )
    if facts.labels:
        line += f", {len(facts.labels)} labels, {facts.without_labels} items without one"
    out.print(line, highlight=False, markup=False)
    for label in _shared_by_all(facts):
        line = f"every item has the label {_printable(label)}, so that each is relevant to all others"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for kind, found in (
        ("missing", facts.missing),
        ("unreadable", facts.unreadable),
        ("without captions", facts.without_captions),
        ("twins of training items", facts.twins_of_training_items),
    ):
        if found:
            rest = f" (the first {SHOWN}; --json has all)" if len(found) > SHOWN else ""
            out.print(f"{len(found)} {kind}{rest}:", highlight=False)
            for name in found[:SHOWN]:
                out.print(f"  {_printable(name)}", highlight=False, markup=False, soft_wrap=True)
    if facts.published:
        usual = " and ".join(f"{count:,} {what}" for what, count in facts.published.items())
        line = f"as its papers use it the set has {usual}: a part of its files may be missing"
        out.print(line, highlight=False, markup=False, soft_wrap=True)
    for problem in facts.problems:
        out.print(_printable(problem), highlight=False, markup=False, soft_wrap=True)
    if facts.silos is not None:
        _show_silos(facts.silos, facts.labels, out)
    elif facts.usable:
        out.print(
            "fedmq data features FILE extracts the features; then this shows who would hold what", highlight=False
        )


def _show_silos(silos: Mapping[str, SiloData], labels: Collection[str], out: Console) -> None:
    """Print who would hold what, and of how many labels and silos a table can take, the numbers of items, too."""
    table = Table("silo", "modalities", "samples", "held out")
    for name, own in silos.items():
        table.add_row(name, " + ".join(own.modalities), str(own.samples), str(own.heldout))
    out.print(table)
    if labels and len(labels) <= FEW_LABELS and len(silos) <= FEW_SILOS:
        table = Table("silo", *(name.removeprefix("silo-") for name in silos))
        for label in labels:
            table.add_row(escape(label), *(str(own.labels[label]) for own in silos.values()))
        out.print("training items of each label", table, sep="\n")
